"""GRPO: policy gradients whose advantages compare episodes from the same initial state."""

from rlt_sb3.grpo.grpo import GRPO

__all__ = ["GRPO"]
