"""Ctrl-C in the midst of a reset or a step: nothing goes on from a state that nobody was shown."""

import numpy as np
import pytest

from rlt_gym.core.single_env import SingleEnv
from rlt_gym.rl_token.env import RLTokenVectorEnv
from rlt_gym.rl_token.untrained import MeanToken
from rlt_gym.testing import FakeLiberoVectorEnv, FakeVLA

CHUNK = np.zeros((3, 4, 7), np.float32)


class Interrupted(FakeLiberoVectorEnv):
    """Plays or begins what it is asked for, and is then interrupted, if ``where`` says so."""

    where = None

    def _play(self, chunks):
        return self._then("play", super()._play(chunks))

    def _start_episodes(self, envs):
        return self._then("start", super()._start_episodes(envs))

    def _then(self, part, answer):
        if self.where == part:
            raise KeyboardInterrupt
        return answer


class Slow(FakeVLA):
    interrupted = False

    def forward(self, obs, tasks, *, seed=None):
        if self.interrupted:
            raise KeyboardInterrupt
        return super().forward(obs, tasks, seed=seed)


@pytest.mark.parametrize("part", ["play", "start"])
def test_a_raw_environment_wants_a_reset(part):
    env = Interrupted(3, chunk_length=4, max_episode_steps=8)
    env.reset(seed=0)
    env.step(CHUNK)
    env.where = part  # the second chunk ends the episodes, and the next ones begin
    with pytest.raises(KeyboardInterrupt):
        env.step(CHUNK)
    env.where = None
    with pytest.raises(RuntimeError, match=r"call reset\(\) before step"):
        env.step(CHUNK)
    with pytest.raises(ValueError, match="must select all environments in the first reset"):
        env.reset(options={"reset_mask": np.array([True, False, False])})
    _, infos = env.reset()
    assert infos["episode_steps"].tolist() == [0, 0, 0]
    assert env.step(CHUNK)[-1]["episode_steps"].tolist() == [4, 4, 4]


def test_a_refused_step_or_reset_changes_nothing():
    env = FakeLiberoVectorEnv(3, chunk_length=4)
    env.reset(seed=0)
    for refused in (lambda: env.step(CHUNK[:2]), lambda: env.reset(options={"init_states": "none"})):
        with pytest.raises(ValueError, match="must"):
            refused()
    assert env.step(CHUNK)[-1]["episode_steps"].tolist() == [4, 4, 4]


def test_an_interrupt_of_the_vla_wants_a_reset_too():
    """The simulators have played a chunk then, and whoever steps has seen nothing of it."""
    vla = Slow(horizon=8)
    env = RLTokenVectorEnv(FakeLiberoVectorEnv(3, chunk_length=4), vla, MeanToken(vla.spec.token_dim))
    env.reset(seed=0)
    for asked in (lambda: env.step(CHUNK), env.reset):
        vla.interrupted = True
        with pytest.raises(KeyboardInterrupt):
            asked()
        vla.interrupted = False
        with pytest.raises(RuntimeError, match=r"interrupt lost observations: call reset\(\) before step"):
            env.step(CHUNK)
        with pytest.raises(RuntimeError, match="reset all environments, got a reset_mask of some"):
            env.reset(options={"reset_mask": np.array([True, True, False])})
        env.reset()
        assert env.step(CHUNK)[-1]["episode_steps"].tolist() == [4, 4, 4]


def test_a_single_environment_can_be_reset_after_it():
    vla = Slow(horizon=8)
    raw = FakeLiberoVectorEnv(1, chunk_length=4, autoreset_mode="Disabled", init_states="eval")
    env = SingleEnv(RLTokenVectorEnv(raw, vla, MeanToken(vla.spec.token_dim)))
    assert env.reset()[1]["init_index"] == 0
    vla.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        env.step(CHUNK[0])
    vla.interrupted = False
    with pytest.raises(RuntimeError, match=r"call reset\(\) before step"):
        env.step(CHUNK[0])
    assert env.reset()[1]["init_index"] == 1
    assert env.step(CHUNK[0])[-1]["episode_steps"] == 4
