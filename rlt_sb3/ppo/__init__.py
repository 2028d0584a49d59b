"""PPO: Stable-Baselines3's own, with a policy that starts at the VLA."""

from rlt_sb3.ppo.policies import VLACenteredPolicy

__all__ = ["VLACenteredPolicy"]
