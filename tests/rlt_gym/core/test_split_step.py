"""Steps in two parts are those in one: environments, wrappers, and what may not be asked in between."""

import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.vector import AutoresetMode, VectorWrapper
from sleepy_env import SleepyVectorEnv

from rlt_gym.core.split_step import splits_step
from rlt_gym.core.wrappers import GripperPenalty
from rlt_gym.rl_token.env import RLTokenVectorEnv
from rlt_gym.rl_token.untrained import MeanToken
from rlt_gym.testing import FakeLiberoVectorEnv, FakeVLA

N, C = 3, 4


class Plain(VectorWrapper):
    """Has no two parts itself."""


def raw(**kwargs):
    return FakeLiberoVectorEnv(N, chunk_length=C, max_episode_steps=10, success_step=7, **kwargs)


def with_vla(env):
    return RLTokenVectorEnv(env, FakeVLA(stochastic=True), MeanToken(12))


def critical(simulator):
    return simulator.env._steps[simulator.index] >= C


MADE = {
    "raw": raw,
    "next step": lambda: raw(autoreset_mode=AutoresetMode.NEXT_STEP),
    "stride": lambda: with_vla(raw(obs_stride=2)),
    "critical phase": lambda: with_vla(raw(critical_phase=critical)),
    "penalty": lambda: GripperPenalty(with_vla(raw())),
    "penalty below": lambda: with_vla(GripperPenalty(raw(), signal="command")),
    "plain wrapper below": lambda: with_vla(Plain(raw())),
}


def equal(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, np.ndarray) and a.dtype == object:
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return np.array_equal(a, b)


@pytest.mark.parametrize("kind", MADE)
def test_two_parts_are_one_step(kind):
    """Everything that is returned, over several ends of episodes, and what the other side of a wrapper was given."""
    one, two = MADE[kind](), MADE[kind]()
    assert splits_step(two)
    assert equal(one.reset(seed=1), two.reset(seed=1))
    chunks, ended = np.random.default_rng(0).uniform(-1, 1, (12, N, C, 7)).astype(np.float32), 0
    for chunk in chunks:
        two.step_async(chunk)
        expected = one.step(chunk)
        ended += int(np.sum(expected[2] | expected[3]))
        assert equal(expected, two.step_wait())
    assert ended > N


def test_what_only_steps_at_once_is_seen():
    assert splits_step(raw()) and not splits_step(Plain(raw()))

    class Own(FakeLiberoVectorEnv):
        def step(self, actions):
            return super().step(actions)

    class OwnParts(Own):
        def step_async(self, actions):
            super().step_async(actions)

    assert not splits_step(Own(1)) and splits_step(OwnParts(1))


@pytest.mark.parametrize("kind", ["raw", "penalty", "plain wrapper below"])
def test_wrong_actions_begin_no_step(kind):
    env = MADE[kind]()
    env.reset(seed=0)
    with pytest.raises(NoAsyncCallError, match="step_async"):
        env.step_wait()
    good = np.zeros((N, C, 7), np.float32)
    with pytest.raises(ValueError):
        env.step_async(np.full_like(good, np.nan))
    with pytest.raises(NoAsyncCallError):
        env.step_wait()
    env.step_async(good)
    env.step_wait()


def test_nothing_else_is_asked_during_a_step():
    env = SleepyVectorEnv(2, autoreset_mode=AutoresetMode.DISABLED, render_mode="rgb_array")
    env.reset(seed=0)
    chunk = np.zeros((2, C, 7), np.float32)
    env.step_async(chunk)
    for call in (
        lambda: env.step_async(chunk),
        lambda: env.step(chunk),
        lambda: env.render(),
        lambda: env.reset(options={"reset_mask": np.array([True, False])}),
    ):
        with pytest.raises(AlreadyPendingCallError, match=r"during a step: call step_wait\(\) first, or reset\(\) all"):
            call()
    env.step_wait()
    assert len(env.render()) == 2
    env.step_async(chunk)
    env._thread.join()
    env.reset(seed=0)  # gives the step up
    assert env.step(chunk)[4]["episode_steps"].tolist() == [C, C]
    for name in ("step_async", "step_wait"):
        with pytest.raises(ValueError, match="acts on all"):
            env.call(name)


def test_simulators_play_between_the_parts():
    env = GripperPenalty(SleepyVectorEnv(2, longest=0.0))
    env.reset(seed=0)
    env.step_async(np.zeros((2, C, 7), np.float32))
    env.unwrapped._thread.join()
    assert env.unwrapped.events == ["begin", "played"]
    env.step_wait()
    assert env.unwrapped.events == ["begin", "played", "end"]
