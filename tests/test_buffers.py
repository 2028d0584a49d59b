"""Arithmetic of chunk returns against an independent step-by-step reference; observation = number of the row."""

import pickle

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.save_util import load_from_pkl, save_to_pkl

from rlt_sb3 import ChunkReplayBuffer

C, D, GAMMA = 4, 2, 0.9
OBS = spaces.Dict({"a": spaces.Box(-np.inf, np.inf, (2,), np.float32), "b": spaces.Box(-np.inf, np.inf, (1, 1))})
ACT = spaces.Box(-1.0, 1.0, (C, D), np.float32)


def make(size: int = 100, n_envs: int = 1, n_steps: int = 1, **kwargs) -> ChunkReplayBuffer:
    return ChunkReplayBuffer(size, OBS, ACT, device="cpu", n_envs=n_envs, n_steps=n_steps, gamma=GAMMA, **kwargs)


def make_rows(count: int, n_envs: int, seed: int = 0, end_probability: float = 0.25) -> list[list[dict]]:
    """Random rows, rows[t][env]; observation t * 10 + env, next observation + 0.5."""
    rng = np.random.default_rng(seed)
    rows = []
    for t in range(count):
        line = []
        for env in range(n_envs):
            done = rng.random() < end_probability
            truncated = bool(done and rng.random() < 0.5)
            k = int(rng.integers(1, C + 1)) if done else C
            rewards = np.zeros(C, dtype=np.float32)
            rewards[:k] = rng.normal(size=k)
            line.append(dict(id=t * 10 + env, k=k, r=rewards, done=done, truncated=truncated, cut=False))
        rows.append(line)
    return rows


def fill(buffer: ChunkReplayBuffer, rows: list[list[dict]], chunk_infos: bool = True) -> None:
    for line in rows:
        ids = np.array([row["id"] for row in line], dtype=np.float32)
        infos = []
        for row in line:
            info = {"TimeLimit.truncated": row["truncated"]}
            if chunk_infos:
                info |= {"step_rewards": row["r"], "chunk_steps": row["k"]}
            infos.append(info)
        obs = {"a": np.stack([ids, ids], 1), "b": ids[:, None, None]}
        next_obs = {key: value + 0.5 for key, value in obs.items()}
        action = np.broadcast_to(ids[:, None, None] / 1000.0, (len(line), C, D))
        reward = np.array([row["r"].sum() for row in line])
        done = np.array([row["done"] for row in line])
        buffer.add(obs, next_obs, action, reward, done, infos)
        if any(row["cut"] for row in line):
            buffer.end_trajectories()


def oracle(rows: list[list[dict]], t: int, env: int, n_steps: int) -> tuple[float, float, float, float]:
    """Walk one control step at a time: return, discount, done, next observation. Rows as in `make_rows`, all alive."""
    total, discount = 0.0, 1.0
    for used in range(n_steps):
        row = rows[t + used][env]
        for j in range(row["k"]):
            total += discount * float(row["r"][j])
            discount *= GAMMA
        last = t + used == len(rows) - 1
        if row["done"] or row["cut"] or last:
            break
    return total, discount, float(row["done"] and not row["truncated"]), row["id"] + 0.5


def check_against_oracle(buffer: ChunkReplayBuffer, alive: list[list[dict]], n_steps: int, batch: int = 400) -> None:
    np.random.seed(0)
    samples = buffer.sample(batch)
    assert samples.rewards.shape == samples.discounts.shape == samples.dones.shape == (batch, 1)
    where = {row["id"]: (t, env) for t, line in enumerate(alive) for env, row in enumerate(line)}
    seen = set()
    for i in range(batch):
        name = int(samples.observations["a"][i, 0])
        assert name in where, "a row that was overwritten or never written"
        seen.add(name)
        expected = oracle(alive, *where[name], n_steps)
        got = [float(x[i, 0]) for x in (samples.rewards, samples.discounts, samples.dones)]
        got.append(float(samples.next_observations["b"][i, 0, 0]))
        np.testing.assert_allclose(got, expected, atol=1e-5, rtol=1e-5)
        assert samples.observations["b"][i, 0, 0] == name
        np.testing.assert_allclose(samples.actions[i].numpy(), name / 1000.0)
    assert len(seen) > 0.8 * len(where)


@pytest.mark.parametrize("n_steps", [1, 2, 3, 5])
@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("count", [1, 7, 25, 40, 63])
def test_returns_match_the_oracle(n_steps, n_envs, count):
    """Partly filled, exactly full and wrapped around (capacity: 25 rows per env)."""
    rows = make_rows(count, n_envs, seed=count)
    buffer = make(25 * n_envs, n_envs, n_steps)
    fill(buffer, rows)
    check_against_oracle(buffer, rows[-25:], n_steps)


def test_windows_longer_than_the_buffer():
    rows = make_rows(10, 1, end_probability=0.0)
    buffer = make(4, 1, n_steps=9)
    fill(buffer, rows)
    check_against_oracle(buffer, rows[-4:], 9, batch=50)


def test_time_out_bootstraps_and_termination_does_not():
    rows = make_rows(3, 1, end_probability=0.0)
    rows[1][0].update(done=True, truncated=True, k=3)
    rows[2][0].update(done=True, truncated=False, k=2)
    buffer = make(n_steps=2)
    fill(buffer, rows)
    batch = buffer._gather(np.arange(3), np.zeros(3, dtype=int))
    assert batch.dones[:, 0].tolist() == [0.0, 0.0, 1.0]
    np.testing.assert_allclose(batch.discounts[:, 0], [GAMMA**7, GAMMA**3, GAMMA**2], rtol=1e-6)
    assert batch.next_observations["b"][:, 0, 0].tolist() == [10.5, 10.5, 20.5]


def test_time_outs_as_terminations():
    rows = make_rows(1, 1)
    rows[0][0].update(done=True, truncated=True)
    buffer = make(handle_timeout_termination=False)
    fill(buffer, rows)
    assert buffer.sample(1).dones.item() == 1.0


def test_plain_environment_counts_as_full_chunk():
    rows = make_rows(2, 2, end_probability=0.0)
    buffer = make(n_envs=2)
    fill(buffer, rows, chunk_infos=False)
    batch = buffer._gather(np.array([0, 1]), np.array([0, 1]))
    np.testing.assert_allclose(batch.rewards[:, 0], [rows[0][0]["r"].sum(), rows[1][1]["r"].sum()], rtol=1e-6)
    np.testing.assert_allclose(batch.discounts[:, 0], GAMMA**C, rtol=1e-6)


def test_reset_from_outside_cuts_returns():
    rows = make_rows(8, 2, end_probability=0.0)
    rows[3][0]["cut"] = rows[3][1]["cut"] = True
    buffer = make(n_envs=2, n_steps=3)
    buffer.end_trajectories()  # harmless while empty
    fill(buffer, rows)
    check_against_oracle(buffer, rows, 3)
    # an overwritten row forgets its cut
    small = make(4, 1, n_steps=3)
    rows = make_rows(3, 1, end_probability=0.0)
    rows[2][0]["cut"] = True
    fill(small, rows)
    later = make_rows(6, 1, seed=1, end_probability=0.0)
    fill(small, later)
    check_against_oracle(small, later[-4:], 3)


@pytest.mark.parametrize("count", [5, 30])
def test_save_and_load(tmp_path, count):
    rows = make_rows(count, 2)
    buffer = make(40, 2, n_steps=3)
    fill(buffer, rows)
    path = tmp_path / "buffer.pkl"
    save_to_pkl(path, buffer)
    loaded = load_from_pkl(path)
    check_against_oracle(loaded, rows[-20:], 3)
    # goes on being filled like the original
    more = make_rows(9, 2, seed=5)
    fill(buffer, more)
    fill(loaded, more)
    for name in ("step_rewards", "chunk_steps", "cuts", "actions", "rewards", "dones", "timeouts"):
        size = buffer.size()
        assert np.array_equal(getattr(buffer, name)[:size], getattr(loaded, name)[:size]), name
    assert buffer.pos == loaded.pos and buffer.full == loaded.full
    for key in OBS.spaces:
        assert np.array_equal(buffer.observations[key], loaded.observations[key])
        assert np.array_equal(buffer.next_observations[key], loaded.next_observations[key])


def test_an_almost_empty_buffer_makes_a_small_file():
    buffer = make(100_000)
    fill(buffer, make_rows(3, 1))
    assert len(pickle.dumps(buffer)) < 20_000


@pytest.mark.parametrize(
    ("rewards", "steps"), [(np.zeros(C + 1), C), (np.zeros(C), 0), (np.zeros(C), C + 1), (np.zeros((C, 1)), 1)]
)
def test_infos_that_do_not_fit(rewards, steps):
    buffer = make()
    zero = {"a": np.zeros((1, 2)), "b": np.zeros((1, 1, 1))}
    info = [{"step_rewards": rewards, "chunk_steps": steps}]
    with pytest.raises(ValueError, match="chunk_steps"):
        buffer.add(zero, zero, np.zeros((1, C, D)), np.zeros(1), np.zeros(1, dtype=bool), info)


def test_bad_arguments():
    with pytest.raises(ValueError, match="n_steps"):
        make(n_steps=0)
    with pytest.raises(ValueError, match="gamma"):
        ChunkReplayBuffer(10, OBS, ACT, gamma=1.5)
    with pytest.raises(ValueError, match="empty"):
        make().sample(1)
