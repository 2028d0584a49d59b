"""benchmarks/critics.py on made-up episodes whose outcome depends on the chunks, or does not."""

import numpy as np
import pytest
import torch as th
from benchmark_helpers import import_benchmark
from gymnasium import spaces

from rlt_sb3.common.replay.storage import TransitionStorage
from rlt_sb3.rlt.policies import RLTPolicy

OBS = spaces.Dict(
    z_rl=spaces.Box(-np.inf, np.inf, (3,), np.float32),
    proprio=spaces.Box(-np.inf, np.inf, (2,), np.float32),
    vla_ref=spaces.Box(-1.0, 1.0, (2, 1), np.float32),
)


@pytest.fixture
def critics():
    return import_benchmark("critics")


def fill(episodes, decided_by):
    """Two chunks an episode; the second one's reward is 1 if ``decided_by`` (a number per episode) is positive."""
    rng, storage = np.random.default_rng(0), TransitionStorage(3 * episodes + 1, OBS, 2, 1)
    deviations = rng.normal(0.0, 0.3, (episodes, 2, 1)).astype(np.float32)
    luck = rng.normal(size=episodes)
    for number in range(episodes):
        slots = []
        for _ in range(3):
            obs = {key: rng.normal(0, 0.3, space.shape).clip(-1, 1) for key, space in OBS.items()}
            slots.append(storage.put_observation(obs, None))
        won = (deviations[number].sum() if decided_by == "chunk" else luck[number]) > 0
        for at, end in ((0, False), (1, True)):
            change = deviations[number] if end else 0.0
            action = np.clip(storage.obs["vla_ref"][slots[at]] + change, -1, 1)
            storage.put_chunk(slots[at], action, np.array([0.0, won * end]), 2, slots[at + 1], end, False, 0)
        storage.successful[slots[:2]] = won
    return storage


def rows_and_maker(critics, storage):
    policy = RLTPolicy(OBS, spaces.Box(-1.0, 1.0, (2, 1)), lambda _: 1e-3, net_arch=[32, 32], n_critics=2)
    return critics.Rows(storage, policy.critic.features_extractor), policy.make_critic


def test_episodes_and_their_returns(critics):
    storage = fill(5, "chunk")
    storage.put_observation({key: np.zeros(space.shape) for key, space in OBS.items()}, None)  # not a row yet
    episodes = critics.episodes_of(storage)
    assert [episode.tolist() for episode in episodes] == [[0, 1], [3, 4], [6, 7], [9, 10], [12, 13]]
    returns = critics.returns_of(storage, episodes, 0.9)
    won = storage.successful[[0, 3, 6, 9, 12]]
    assert 0 < won.sum() < 5
    assert returns[[1, 4, 7, 10, 13]] == pytest.approx(0.9 * won)  # the reward of the second of two control steps
    assert returns[[0, 3, 6, 9, 12]] == pytest.approx(0.9**3 * won)


@pytest.mark.parametrize(("decided_by", "low", "high"), [("chunk", 0.5, 1.0), ("luck", -0.25, 0.25)])
def test_critics_rank_chunks_where_chunks_decide(critics, decided_by, low, high):
    th.manual_seed(0)
    rows, make = rows_and_maker(critics, fill(300, decided_by))
    found = critics.correlations(rows, critics.episodes_of(rows.storage), make, 0.99, 3, updates=150)
    assert low < found["return of the episode"] < high
    assert low < found["value after 1 chunk"] < high  # the chunk that decides is the last one


def test_values_by_phase(critics):
    storage = fill(20, "chunk")
    rows, make = rows_and_maker(critics, storage)
    lines = critics.by_phase(rows, critics.episodes_of(storage), make(), 0.9)
    wins = int(storage.successful.sum()) // 2
    # two rows in three thirds: none is in the last one
    assert [line[:3] for line in lines] == [
        ("first third", "success", wins),
        ("second third", "success", wins),
        ("first third", "failure", 20 - wins),
        ("second third", "failure", 20 - wins),
    ]
    assert [line[4] for line in lines] == pytest.approx([0.9**3, 0.9, 0.0, 0.0])
