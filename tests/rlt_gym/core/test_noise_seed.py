"""Seeds for the noise of a stochastic policy: what they depend on, and what they do not depend on."""

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from still_env import Still

from rlt_gym.core.episodes import EpisodeSequence
from rlt_gym.rl_token.env import RLTokenVectorEnv
from rlt_gym.rl_token.untrained import MeanToken
from rlt_gym.testing import FakeLiberoVectorEnv, FakeVLA
from rlt_gym.vla.base import forward_seed


def seeds(split: str, num_envs: int = 1, episodes: int = 6, sequence: EpisodeSequence | None = None, **arguments):
    """Seed of each of the first episodes, by (task, initial state, number)."""
    sequence = sequence or EpisodeSequence(num_envs, 2, split, **arguments)
    played = [sequence.next(env) for _ in range(episodes // num_envs) for env in range(num_envs)]
    task_ids = (3, 8)
    return {
        (task_ids[e.task_index], e.init_index, e.number): sequence.noise_seed(e, task_ids[e.task_index]) for e in played
    }


@pytest.mark.parametrize("seed", [0, 7, 2**64 + 1, 2**200])
def test_splits_tasks_states_and_seeds_have_their_own(seed):
    drawn = [seeds(split, seed=other) for split in ("train", "selection", "eval") for other in (seed, seed + 1)]
    numbers = [number for part in drawn for number in part.values()]
    assert len(set(numbers)) == len(numbers) == 36
    assert all(isinstance(number, int) and 0 <= number < 2**63 for number in numbers)
    assert drawn == [seeds(split, seed=other) for split in ("train", "selection", "eval") for other in (seed, seed + 1)]


@pytest.mark.parametrize("split", ["train", "selection", "eval"])
def test_the_number_of_environments_changes_nothing(split):
    assert seeds(split, 1, seed=5) == seeds(split, 2, seed=5) == seeds(split, 3, seed=5)


def test_an_evaluation_repeats_them_whatever_the_training_did():
    """Sequences start over, shards divide the states, training is seeded anew: the same state has the same noise."""
    sequence = EpisodeSequence(1, 2, "eval", seed=5)
    first = seeds("eval", sequence=sequence)
    for number in range(3):
        sequence.restart("train", seed=1000 + number)
        seeds("train", sequence=sequence)
        sequence.restart("eval")
        assert seeds("eval", sequence=sequence) == first
    sequence.restart("eval", shard=(1, 2))
    part = {key[:2]: value for key, value in seeds("eval", episodes=3, sequence=sequence).items()}
    whole = {key[:2]: value for key, value in first.items()}
    assert part == {key: whole[key] for key in part} and len(part) == 3
    sequence.restart("eval", seed=6)
    assert seeds("eval", sequence=sequence) == seeds("eval", seed=6) != first
    sequence.reseed(5)
    sequence.restart("eval")
    assert seeds("eval", sequence=sequence) == first


def test_an_evaluation_of_fewer_tasks_repeats_them():
    """Task 8 alone, or beside task 3, and once more when the states begin again."""
    both, alone = EpisodeSequence(1, 2, "eval", seed=5), EpisodeSequence(1, 1, "eval", seed=5, sizes={"eval": 3})
    expected = [both.noise_seed(episode, 8) for episode in (both.next(0) for _ in range(6)) if episode.task_index == 1]
    assert [alone.noise_seed(alone.next(0), 8) for _ in range(6)] == expected * 2


def test_every_visit_in_training_has_its_own():
    """A state that is drawn again (here there are only two), and the members of a group."""
    again = seeds("train", episodes=20, seed=1, sizes={"train": 2, "selection": 5, "eval": 5})
    assert len({key[:2] for key in again}) <= 4 and len(set(again.values())) == 20
    env = Still(4, seed=1, group_size=4)
    infos = env.reset()[1]
    assert len(set(infos["init_index"].tolist())) == 1 and len(set(infos["noise_seed"].tolist())) == 4
    assert env.reset(seed=1)[1]["noise_seed"].tolist() == infos["noise_seed"].tolist()
    assert env.reset()[1]["noise_seed"].tolist() != infos["noise_seed"].tolist()


class Recording(FakeVLA):
    """Keeps the seed of every row that it was given, by what the row shows: (init_index, control step)."""

    def __init__(self) -> None:
        super().__init__(horizon=4, stochastic=True)
        self.given: dict[tuple[int, int], int] = {}

    def forward(self, obs, tasks, *, seed=None):
        for state, number in zip(obs["state"].tolist(), seed, strict=True):
            key = (int(state[1]), int(state[0]))
            assert self.given.setdefault(key, number) == number
        return super().forward(obs, tasks, seed=seed)


def play(num_envs: int, split: str, seed: int, obs_stride: int | None = None) -> dict[tuple[int, int], int]:
    raw = FakeLiberoVectorEnv(
        num_envs, chunk_length=4, max_episode_steps=10, init_states=split, seed=seed, obs_stride=obs_stride
    )
    env = RLTokenVectorEnv(raw, Recording(), MeanToken(12))
    obs, _ = env.reset()
    for _ in range(12 // num_envs):  # four episodes of three chunks
        obs, *_ = env.step(obs["vla_ref"])
    return {key: number for key, number in env.vla.given.items() if key[0] < 4}


@pytest.mark.parametrize("split", ["train", "eval"])
def test_what_the_vla_is_given(split):
    """The same noise for the same observation with one, two and four environments, also inside a chunk; other noise
    with another seed, in another split, in another state, and at another step.
    """
    one = play(1, split, 0)
    assert one == play(2, split, 0) == play(4, split, 0) and set(one) == {
        (i, s) for i in range(4) for s in (0, 4, 8, 10)
    }
    inner = play(2, split, 0, obs_stride=3)
    assert {key: inner[key] for key in one} == one and set(inner) - set(one) == {
        (i, s) for i in range(4) for s in (3, 7)
    }
    others = [play(1, split, 1), play(1, "selection", 0)]
    numbers = [number for part in (inner, *others) for number in part.values()]
    assert len(set(numbers)) == len(numbers)


def test_the_seed_of_a_row_depends_on_episode_and_step():
    grid = {forward_seed(noise_seed, step) for noise_seed in (0, 1, 2**32, 2**63 - 1) for step in range(50)}
    assert len(grid) == 200 and all(0 <= number < 2**32 for number in grid)
    assert forward_seed(np.int64(7), np.int64(3)) == forward_seed(7, 3)


def test_an_environment_that_does_not_report_it_is_refused():
    raw = FakeLiberoVectorEnv(2, chunk_length=4, autoreset_mode=AutoresetMode.DISABLED)
    reset = raw.reset

    def without(**kwargs):
        obs, infos = reset(**kwargs)
        return obs, {key: value for key, value in infos.items() if not key.endswith("noise_seed")}

    raw.reset = without
    with pytest.raises(ValueError, match=r"infos lack \['noise_seed'\]"):
        RLTokenVectorEnv(raw, FakeVLA(), MeanToken(12)).reset()
