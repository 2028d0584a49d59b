"""Seeds as Gymnasium and its users hand them out: large ones, lists, none at all."""

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from still_env import Still
from toy_env import ToyVectorEnv

from rlt_gym.core.single_env import SingleEnv
from rlt_gym.testing import FakeLiberoVectorEnv, FakeRLTokenVectorEnv


def states(env, **reset):
    return env.reset(**reset)[1]["init_index"].tolist()


@pytest.mark.parametrize("seed", [2**63, 10090519789298312267, 2**200, np.uint64(2**63 + 1)])
def test_any_integer_from_0_on_is_a_seed(seed):
    """Minari draws seeds from 64 bits, Gymnasium itself from 128."""
    env = Still(3, seed=seed)
    assert env.np_random_seed == seed
    first = states(env)
    assert states(env, seed=seed) == first != states(env, seed=int(seed) + 1)
    assert states(FakeRLTokenVectorEnv(2), seed=seed) == [1, 0]
    single = SingleEnv(Still(1, autoreset_mode=AutoresetMode.DISABLED))
    assert single.reset(seed=int(seed))[1]["init_index"] == states(Still(1), seed=seed)[0]


@pytest.mark.parametrize("seed", [-1, 1.0, True, "3"])
def test_others_are_not(seed):
    for use in (lambda: Still(3, seed=seed), lambda: Still(3).reset(seed=seed)):
        with pytest.raises(ValueError, match="seed must be an integer >= 0, got"):
            use()


def test_without_a_seed_each_environment_draws_one_and_keeps_it():
    first, second = Still(3), Still(3)
    assert first.np_random_seed != second.np_random_seed
    played, other = [states(first) for _ in range(4)], [states(second) for _ in range(4)]
    assert played != other
    again = Still(3, seed=first.np_random_seed)
    assert [states(again) for _ in range(4)] == played
    assert first.np_random_seed == again.np_random_seed
    first.reset(seed=5)
    assert first.np_random_seed == 5
    first.reset(seed=6, options={"reset_mask": np.array([True, False, False])})
    assert first.np_random_seed == 6
    single = SingleEnv(Still(1, autoreset_mode=AutoresetMode.DISABLED))
    assert single.np_random_seed == single.vector_env.np_random_seed


def test_a_given_seed_draws_what_it_always_drew():
    assert states(Still(2, seed=0)) == [4996, 1710] == states(Still(2), seed=0)


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_a_list_is_one_seed_spread_over_the_environments(kind):
    env = Still(3)
    expected = states(env, seed=5)
    assert states(env, seed=kind([5, 6, 7])) == expected


def test_a_list_of_none_seeds_nothing():
    env, other = Still(3, seed=4), Still(3, seed=4)
    for given in ([None] * 3, None):
        assert states(env, seed=given) == states(other)
    assert env.np_random_seed == 4


@pytest.mark.parametrize(
    "seed", [[5, 9, 10], [7], [], [5, 6, 7, 8], [5, None, 7], [None, 6, 7], [7, 6, 5], np.array([5, 5, 5])]
)
def test_another_list_is_refused_and_nothing_changes(seed):
    for env in (Still(3, seed=4), FakeLiberoVectorEnv(3), FakeRLTokenVectorEnv(3), ToyVectorEnv(3)):
        env.reset()
        before = [episode.number for episode in env.episodes], env.np_random_seed
        with pytest.raises(ValueError, match="seed must be an integer s, or 3 consecutive ones"):
            env.reset(seed=seed)
        assert ([episode.number for episode in env.episodes], env.np_random_seed) == before
