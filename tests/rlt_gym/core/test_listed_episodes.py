"""reset(options={"episodes": [...]}): chosen tasks and initial states, each once, by whichever environment is free."""

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from rlt_gym.testing import FakeLiberoVectorEnv

CHUNK = np.zeros((3, 4, 7), np.float32)


def ended(env, infos, done):
    final = infos.get("final_info", infos)
    return [(int(final["task_id"][i]), int(final["init_index"][i])) for i in np.flatnonzero(done)]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_each_is_played_once_and_then_the_environments_rest(count):
    # episodes with odd states last longer, so that the order of the ends is not that of the list
    episodes = [(5, 1), (2, 4), (2, 1), (5, 0), (2, 0), (5, 2), (2, 3)][:count]
    env = FakeLiberoVectorEnv(3, task_ids=[2, 5], chunk_length=4, max_episode_steps=30)
    first, infos = env.reset(options={"init_states": "eval", "episodes": episodes})
    given = list(zip(infos["task_id"].tolist(), infos["init_index"].tolist(), strict=True))
    assert given == (episodes + [episodes[0]] * 3)[:3]
    assert first["proprio"].shape == (3, 8)
    played, steps = [], 0
    while len(played) < count:
        _, rewards, terminations, truncations, infos = env.step(CHUNK)
        done = terminations | truncations
        played += ended(env, infos, done)
        steps += int(sum(infos["chunk_steps"][~done]))
    assert sorted(played) == sorted(episodes)
    before = env._batch()
    for _ in range(10):  # longer than an episode
        after, rewards, terminations, truncations, infos = env.step(CHUNK)
        assert not rewards.any() and not terminations.any() and not truncations.any()
        assert infos["chunk_steps"].tolist() == [0, 0, 0] and "final_info" not in infos
    np.testing.assert_array_equal(after["proprio"], before["proprio"])
    # a full reset goes back to the sequence
    _, infos = env.reset()
    assert infos["init_index"].tolist() == [2, 1, 0]
    assert env.step(CHUNK)[-1]["chunk_steps"].tolist() == [4, 4, 4]


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_an_episode_whose_simulator_was_lost_is_played_again(mode):
    class Fragile(FakeLiberoVectorEnv):
        breaks = ()

        def _play(self, chunks):
            played = super()._play(chunks)
            return {env: result for env, result in played.items() if env not in self.breaks}

    env = Fragile(3, chunk_length=4, max_episode_steps=30, autoreset_mode=mode)
    episodes = [(0, state) for state in (0, 2, 4, 6)]
    env.reset(options={"init_states": "eval", "episodes": episodes})
    solved = []
    for step in range(20):
        env.breaks = (1,) if step == 1 else ()
        _, _, terminations, truncations, infos = env.step(CHUNK)
        done = terminations | truncations
        if step == 1:
            assert done.tolist() == [False, True, False]
        else:
            solved += ended(env, infos, done)
        if mode == AutoresetMode.DISABLED and done.any():
            env.reset(options={"reset_mask": done})
    assert sorted(solved) == episodes


def test_the_noise_is_that_of_the_sequence():
    """What a state's seed is does not depend on how the state was chosen."""
    env = FakeLiberoVectorEnv(1, task_ids=[2, 5], init_states="eval", seed=3)
    _, infos = env.reset()
    _, chosen = env.reset(options={"episodes": [(2, 0)]})
    _, other = env.reset(options={"episodes": [(5, 0)]})
    assert infos["noise_seed"][0] == chosen["noise_seed"][0] != other["noise_seed"][0]


@pytest.mark.parametrize(
    "options",
    [
        {"episodes": []}, {"episodes": [(1, 0)]}, {"episodes": [(0, 500)]}, {"episodes": [(0, -1)]},
        {"episodes": [(0, 0)], "shard": (0, 2)}, {"episodes": [(0, 0)], "reset_mask": np.array([True, False])},
    ],
)  # fmt: skip
def test_bad_lists_change_nothing(options):
    env = FakeLiberoVectorEnv(2, init_states="eval")
    env.reset()
    before = [(episode.number, episode.init_index) for episode in env.episodes]
    with pytest.raises(ValueError, match=r"episodes (must|are)"):
        env.reset(options=options)
    assert [(episode.number, episode.init_index) for episode in env.episodes] == before


def test_a_mask_of_all_goes_on_as_one_of_some():
    """Environments that happen to end together are reset by a mask that selects all of them."""
    env = FakeLiberoVectorEnv(2, chunk_length=4, max_episode_steps=4, autoreset_mode=AutoresetMode.DISABLED)
    everyone = np.ones(2, dtype=bool)

    def rounds(count, **first):
        _, infos = env.reset(**first)
        seen = [infos["init_index"].tolist()]
        for _ in range(count - 1):
            assert (env.step(CHUNK[:2])[3] | env._dones).all()
            seen.append(env.reset(options={"reset_mask": everyone})[1]["init_index"].tolist())
        return seen

    at_eval = {"init_states": "eval"}
    assert rounds(3, options=at_eval | {"reset_mask": everyone}) == [[1, 0], [3, 2], [5, 4]]
    assert rounds(3, options=at_eval | {"shard": (1, 3)}) == [[4, 1], [10, 7], [16, 13]]
    listed = [(0, state) for state in (10, 11, 12, 13)]
    assert rounds(2, options=at_eval | {"episodes": listed}) == [[10, 11], [12, 13]]
    # a reset without a mask begins the evaluation anew, as one with a seed
    assert rounds(2) == [[1, 0], [3, 2]] == rounds(2, seed=3)
