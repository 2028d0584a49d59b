"""Residual SAC: Stable-Baselines3's SAC on bounded corrections of the VLA's chunk."""

from rlt_sb3.residual_sac.policies import ResidualSACPolicy
from rlt_sb3.residual_sac.residual_sac import ResidualSAC

__all__ = ["ResidualSAC", "ResidualSACPolicy"]
