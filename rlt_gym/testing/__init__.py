"""
Fakes without a simulator, and a checker for vector environments; shipped for users' own tests.

Needs NumPy and Gymnasium only (``FakeVLA`` imports torch when it is made).
"""

from rlt_gym.testing.checks import check_vector_env
from rlt_gym.testing.envs import FakeLiberoVectorEnv, FakeRLTokenVectorEnv
from rlt_gym.testing.vla import FakeVLA

__all__ = ["FakeLiberoVectorEnv", "FakeRLTokenVectorEnv", "FakeVLA", "check_vector_env"]
