"""
Fakes without a simulator, and checkers for vector environments and VLAs; shipped for users' own tests.

Needs NumPy and Gymnasium only (``FakeVLA`` and ``check_vla`` import torch when they are called).
"""

from rlt_gym.testing.checks import check_vector_env
from rlt_gym.testing.envs import FakeLiberoVectorEnv, FakeRLTokenVectorEnv
from rlt_gym.testing.vla import FakeVLA, check_vla

__all__ = ["FakeLiberoVectorEnv", "FakeRLTokenVectorEnv", "FakeVLA", "check_vector_env", "check_vla"]
