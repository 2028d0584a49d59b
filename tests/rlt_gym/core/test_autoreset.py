"""Automatic resets in the next step, compared with Gymnasium's own SyncVectorEnv over single environments."""

import numpy as np
import pytest
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import vector as wrappers
from still_env import Still

from rlt_gym.core.episodes import EpisodeSequence
from rlt_gym.core.single_env import SingleEnv
from rlt_gym.rl_token.env import RLTokenVectorEnv
from rlt_gym.rl_token.untrained import MeanToken
from rlt_gym.testing import FakeLiberoVectorEnv, FakeVLA

N, C = 3, 4
NEXT_STEP = AutoresetMode.NEXT_STEP


class Solvable(Still):
    """Solved at a control step from 2 to 14, which the initial state decides; the horizon is 10."""

    def _control_step(self, env, action):
        solved = self._steps[env] + 1 >= 2 + self.episodes[env].init_index % 13
        return float(solved) + 0.125 * float(action[0]), bool(solved)


class Fake(FakeLiberoVectorEnv):
    """The fake of LIBERO-v0 with the episodes of the real one."""

    def __init__(self, num_envs, sequence=EpisodeSequence, **kwargs):
        super().__init__(num_envs, **kwargs)
        self.sequence = sequence(num_envs, len(self.tasks), self.init_states, self.np_random_seed)

    def _observe(self, env):
        observation = super()._observe(env)
        observation["proprio"][2] = 0  # the number of the sub-environment, which is 0 where it is alone
        return observation


def member_of(index):
    """The episodes that environment ``index`` of N plays, for an environment that is alone."""

    class Member(EpisodeSequence):
        def number(self, env, turn):
            return N - 1 - index + turn * N

    return Member


def solvable(num_envs=N, **settings):
    return Solvable(num_envs, seed=5, obs_stride=2, **settings)


def rl_token(num_envs=N, **settings):
    vla = FakeVLA(horizon=6)
    raw = Fake(
        num_envs, chunk_length=C, task_ids=[1, 4], success_step=7, max_episode_steps=10, obs_stride=2, **settings
    )
    return RLTokenVectorEnv(raw, vla, MeanToken(vla.spec.token_dim))


def theirs(make):
    members = [make(1, sequence=member_of(index), autoreset_mode=AutoresetMode.DISABLED) for index in range(N)]
    return SyncVectorEnv([lambda env=env: SingleEnv(env) for env in members], autoreset_mode=NEXT_STEP)


@pytest.mark.parametrize("make", [solvable, rl_token])
def test_the_next_step_resets_as_gymnasiums_sync_vector_env_does(make):
    ours, oracle = make(autoreset_mode="NextStep"), theirs(make)
    assert ours.autoreset_mode == ours.metadata["autoreset_mode"] == NEXT_STEP
    rng = np.random.default_rng(0)
    assert data_equivalence(ours.reset()[0], oracle.reset()[0])
    done, ended, apart = np.zeros(N, dtype=bool), 0, 0
    for _ in range(40):
        actions = rng.uniform(-1, 1, ours.action_space.shape).astype(np.float32)
        (obs, *numbers, infos), (their_obs, *their_numbers, their_infos) = ours.step(actions), oracle.step(actions)
        assert data_equivalence(obs, their_obs)
        for number, other in zip(numbers, their_numbers, strict=True):
            np.testing.assert_array_equal(number, other)
            assert not number[done].any()
        for key in ("step_rewards", "chunk_steps", "is_success", "episode_steps", "task_id", "init_index"):
            np.testing.assert_array_equal(infos[key], their_infos[key])
        assert infos["instruction"].tolist() == their_infos["instruction"].tolist()
        assert "final_obs" not in infos and "final_info" not in infos
        assert not infos["chunk_steps"][done].any() and infos["chunk_steps"][~done].all()
        assert not infos["inner_count"][done].any()
        done = numbers[1] | numbers[2]
        ended, apart = ended + done.sum(), apart + (0 < done.sum() < N)
    assert ended > 20 and apart > 5  # members that end at different times


def test_a_reset_between_takes_the_place_of_the_automatic_one():
    for mask in (None, np.array([True, True, False])):
        env = Still(N, seed=5, autoreset_mode=NEXT_STEP)
        env.reset()
        for _ in range(3):
            *_, truncations, infos = env.step(np.zeros((N, C, 7)))
        assert truncations.all() and infos["episode_steps"].tolist() == [10] * N
        env.reset(options=None if mask is None else {"reset_mask": mask})
        *_, infos = env.step(np.zeros((N, C, 7)))
        assert infos["chunk_steps"].tolist() == ([C] * N if mask is None else [C, C, 0])


@pytest.mark.parametrize("make", [lambda: Still(N, seed=5, autoreset_mode=NEXT_STEP),
                                  lambda: rl_token(autoreset_mode=NEXT_STEP)])  # fmt: skip
def test_gymnasiums_wrappers_of_observations_take_it(make):
    """They refuse SAME_STEP, and NormalizeObservation takes nothing else."""
    env = wrappers.NormalizeObservation(wrappers.FlattenObservation(wrappers.RecordEpisodeStatistics(make())))
    env.reset(seed=1)
    lengths = []
    for _ in range(12):
        obs, *_, infos = env.step(env.action_space.sample())
        if "episode" in infos:
            lengths += infos["episode"]["l"][infos["_episode"]].tolist()
    assert obs.shape == env.observation_space.shape and np.isfinite(obs).all()
    assert len(lengths) >= 2 * N and max(lengths) == 3  # 10 control steps in chunks of 4; the reset is no step
