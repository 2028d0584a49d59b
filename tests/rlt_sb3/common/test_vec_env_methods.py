"""The vector env comes first, then its sub-environments: for attributes and methods alike."""

import gymnasium as gym
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorWrapper

from rlt_sb3 import GymnasiumVecEnv


class Sub(gym.Env):
    observation_space = action_space = gym.spaces.Box(-1, 1, (1,))

    def __init__(self, number: int):
        self.number, self.own = number, f"sub {number}"

    def name(self, mark: str = "") -> str:
        return f"sub {self.number}{mark}"

    def shared(self) -> str:
        return "sub"


class Outer(VectorWrapper):
    calls = 0
    kind = "vector"
    name_of_all = ("a", "b")

    def shared(self) -> list[str]:
        Outer.calls += 1
        return ["vector"]


@pytest.fixture
def venv():
    subs = SyncVectorEnv([lambda n=n: Sub(n) for n in range(3)], autoreset_mode=AutoresetMode.SAME_STEP)
    return GymnasiumVecEnv(Outer(subs))


def test_what_the_vector_env_has_is_asked_once(venv):
    Outer.calls = 0
    results = venv.env_method("shared")
    assert results == [["vector"]] * 3 and Outer.calls == 1
    assert results[0] is results[2]
    assert venv.env_method("shared", indices=[1]) == [["vector"]]
    assert venv.get_attr("kind") == ["vector"] * 3
    names = venv.get_attr("name_of_all")
    assert names[0] is names[1] is Outer.name_of_all


def test_otherwise_the_sub_environments_are(venv):
    assert venv.env_method("name", mark="!") == ["sub 0!", "sub 1!", "sub 2!"]
    assert venv.env_method("name", "?", indices=[2, 0]) == ["sub 2?", "sub 0?"]
    assert venv.get_attr("own", indices=[2, 0]) == ["sub 2", "sub 0"]
