"""RLT: online reinforcement learning on RL tokens."""

from rlt_sb3.rlt.policies import MultiInputPolicy, RLTPolicy
from rlt_sb3.rlt.rlt import RLT

__all__ = ["RLT", "MultiInputPolicy", "RLTPolicy"]
