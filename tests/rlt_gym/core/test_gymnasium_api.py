"""What Gymnasium and the libraries around it expect of an environment beside ``reset`` and ``step``."""

import gymnasium as gym
import pytest
from gymnasium.envs.registration import load_env_creator
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlt_gym.libero import vector_env as libero
from rlt_gym.rl_token.env import RLTokenVectorEnv
from rlt_gym.rl_token.mean import MeanToken
from rlt_gym.testing import FakeLiberoVectorEnv, FakeVLA

IDS = ("LIBERO-v0", "RLToken-LIBERO-v0")
VLA = FakeVLA(horizon=8)
#: Further arguments of each id, so that nothing is loaded.
MORE = {"LIBERO-v0": {}, "RLToken-LIBERO-v0": {"vla": VLA, "rl_token": MeanToken(VLA.spec.token_dim)}}


@pytest.fixture
def no_simulator(monkeypatch):
    monkeypatch.setattr(libero, "LiberoVectorEnv", FakeLiberoVectorEnv)


def modes(render_mode=None):
    made = []
    for mode in (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED):
        raw = FakeLiberoVectorEnv(2, autoreset_mode=mode, render_mode=render_mode)
        made += [(mode, raw), (mode, RLTokenVectorEnv(raw, VLA, MeanToken(VLA.spec.token_dim)))]
    return made


def test_the_mode_of_autoreset_is_an_attribute_as_in_gymnasium():
    """TorchRL reads it."""
    assert SyncVectorEnv([lambda: gym.make("CartPole-v1")]).autoreset_mode == AutoresetMode.NEXT_STEP
    for mode, env in modes():
        assert env.autoreset_mode == env.metadata["autoreset_mode"] == mode


@pytest.mark.parametrize("id", IDS)
def test_entry_points_tell_their_render_modes(id):
    for entry_point in (gym.spec(id).entry_point, gym.spec(id).vector_entry_point):
        assert load_env_creator(entry_point).metadata["render_modes"] == ["rgb_array"]
    assert load_env_creator(gym.spec(id).vector_entry_point).metadata["autoreset_mode"] == AutoresetMode.SAME_STEP


@pytest.mark.parametrize("id", IDS)
def test_gymnasium_adds_the_modes_that_we_have_not(id, no_simulator):
    with pytest.warns(UserWarning, match="HumanRendering wrapper is being applied"):
        env = gym.make(id, render_mode="human", **MORE[id])
    assert isinstance(env, gym.wrappers.HumanRendering) and env.metadata["render_fps"] == 2.5
    env = gym.make(id, render_mode="rgb_array_list", **MORE[id])
    env.reset(seed=0)
    env.step(env.action_space.sample())
    assert [frame.shape for frame in env.render()] == [(32, 32, 3)] * 2
    assert gym.make(id, **MORE[id]).metadata["render_fps"] == 2.5
