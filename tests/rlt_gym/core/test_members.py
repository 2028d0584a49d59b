"""``call``, ``get_attr`` and ``set_attr``: what libraries ask a SyncVectorEnv, they can ask ours."""

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from still_env import Still

from rlt_gym.core.single_env import SingleEnv
from rlt_gym.rl_token.env import RLTokenVectorEnv
from rlt_gym.rl_token.untrained import MeanToken
from rlt_gym.testing import FakeLiberoVectorEnv, FakeVLA


def rl_token():
    vla = FakeVLA(horizon=6)
    raw = FakeLiberoVectorEnv(2, chunk_length=4, task_ids=[3, 4], render_mode="rgb_array")
    return RLTokenVectorEnv(raw, vla, MeanToken(vla.spec.token_dim))


def test_members_have_the_spaces_and_frames_that_a_sync_vector_env_tells():
    ours = Still(3, render_mode="rgb_array", seed=0)
    single = [SingleEnv(Still(1, render_mode="rgb_array", autoreset_mode=AutoresetMode.DISABLED)) for _ in range(3)]
    theirs = SyncVectorEnv([lambda env=env: env for env in single])
    for env in (ours, theirs):
        env.reset(seed=0)
    for name in ("observation_space", "action_space", "render_mode"):
        assert ours.get_attr(name) == theirs.get_attr(name) == ours.call(name)
    # skrl draws in this way
    assert [frame.max() for frame in ours.call("render")] == [0, 1, 2] and len(theirs.call("render")) == 3
    assert [task.task_id for task in ours.call("task")] == ours.reset(seed=0)[1]["task_id"].tolist()
    assert ours.get_attr("chunk_length") == (4, 4, 4)
    assert Still(2).call("render") == (None, None)


def test_a_wrapper_answers_for_itself_and_asks_below():
    env = rl_token()
    env.reset(seed=0)
    assert env.get_attr("observation_space") == (env.single_observation_space,) * 2
    assert env.unwrapped.get_attr("observation_space")[0] != env.single_observation_space
    assert env.get_attr("success_step") == (13, 13) and env.get_attr("vla") == (env.vla, env.vla)
    assert [frame.shape for frame in env.call("render")] == [(32, 32, 3)] * 2
    assert sorted(task.task_id for task in env.call("task")) == [3, 4]
    env.set_attr("success_step", 7)
    assert env.unwrapped.success_step == 7


def test_what_members_share_is_set_for_all():
    env = Still(2)
    for values in (6, [6, 6], (np.int64(6), 6)):
        env.train_episode_steps = None
        env.set_attr("train_episode_steps", values)
        assert env.get_attr("train_episode_steps") == (6, 6)


@pytest.mark.parametrize("make", [lambda: Still(2), rl_token])
def test_what_cannot_be_asked_or_set_says_why(make):
    env = make()
    for name in ("reset", "step", "close"):
        with pytest.raises(ValueError, match=rf"{name}\(\) acts on all 2 environments at once"):
            env.call(name)
    for use in (lambda: env.get_attr("no_such"), lambda: env.call("no_such"), lambda: env.set_attr("no_such", 1)):
        with pytest.raises(AttributeError, match=r"(VectorEnv|Still) has no attribute 'no_such'"):
            use()
    for name, values, message in (
        ("train_episode_steps", [4, 8], "the members share train_episode_steps"),
        ("train_episode_steps", [4], "one value or 2, one for each member; got 1"),
        ("action_space", env.single_action_space, "action_space cannot be set"),
    ):
        with pytest.raises(ValueError, match=message):
            env.set_attr(name, values)
