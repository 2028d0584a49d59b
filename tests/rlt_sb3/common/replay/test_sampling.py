"""Which rows of the chunk buffer a batch takes: of each task, of offline data, of the whole ring."""

import numpy as np
import pytest
import torch as th
from buffer_world import OBS, C, D, World, make, observation, stack

from rlt_sb3.common.replay.storage import TransitionStorage


def with_offline(buffer, storage):
    """Rows of another origin, without a file."""
    buffer.set_offline(storage)
    return buffer


@pytest.mark.parametrize("stratified", [True, False])
def test_tasks_in_a_batch(stratified):
    """Task ids {0, 10}, nine of ten rows from the first."""
    buffer = make(3000, 2, stratified=stratified)
    world = World(2, longest=1)
    world.feed(buffer, 100)
    for _ in range(800):
        key = observation(0, 5000, 0)
        info = {"step_rewards": np.zeros(C), "chunk_steps": C, "task_id": 0}
        infos = [info, {"worker_restarted": True}]
        buffer.add(stack([key, key]), stack([key, key]), np.zeros((2, C, D)), np.zeros(2), np.ones(2, bool), infos)
    assert buffer.storage.counts == {0: 900, 10: 100}
    shares = [(buffer.sample(101).task_ids == 10).sum().item() for _ in range(30)]
    if stratified:
        assert set(shares) == {50, 51}
    else:
        assert 5 < np.mean(shares) < 16
    assert all(len(buffer.sample(size).rewards) == size for size in (1, 2, 3, 64))


def feed_episode(buffer, length, task, success, at):
    """An episode of the first environment; the other one's simulator is broken."""
    for step in range(length):
        last = step == length - 1
        told = {"step_rewards": np.zeros(C), "chunk_steps": C, "task_id": task, "is_success": success and last}
        keys = [observation(0, at + step + further, 0) for further in (0, 1)]
        buffer.add(
            stack([keys[0]] * 2), stack([keys[1]] * 2), np.zeros((2, C, D)), np.zeros(2), np.full(2, last),
            [told, {"worker_restarted": True}],
        )  # fmt: skip


@pytest.mark.parametrize("stratified", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_successes_in_a_batch(share, stratified):
    """One row of ten belongs to a success; task 10, which only fails, gives no row of a success."""
    buffer = make(3000, 2, stratified=stratified, success_share=share)
    feed_episode(buffer, 30, 0, False, at=0)
    assert buffer.sample(40).successful.sum() == 0  # nothing else is there
    feed_episode(buffer, 60, 0, False, at=100)
    feed_episode(buffer, 10, 0, True, at=200)
    for _ in range(20):
        assert buffer.sample(40).successful.sum() == 40 * share
    feed_episode(buffer, 100, 10, False, at=300)
    counts = {0: 0, 10: 0}
    for _ in range(50):
        batch = buffer.sample(40)
        assert batch.successful.sum() == (20 if stratified else 40) * share
        assert ((batch.task_ids == 0) | (batch.successful[:, 0] == 0)).all()
        for task in counts:
            counts[task] += int((batch.task_ids == task).sum())
    expected = 1000 if stratified else 2000 * (1 - share) * 100 / 190
    assert abs(counts[10] - expected) <= (0 if stratified else 150)
    storage = buffer.storage
    rows = np.bincount(buffer._draw(storage, 40_000), minlength=storage.size)
    successes = rows[storage.successful & storage.is_row(np.arange(storage.size))]
    if share:  # each of them is drawn as often as any other
        assert abs(successes / successes.mean() - 1.0).max() < 0.15


def test_a_share_of_successes_that_cannot_be():
    with pytest.raises(
        ValueError, match=r"success_share must be None or in \[0, 1\] \(share of each batch\), got 1\.5"
    ):
        make(100, 2, success_share=1.5)


def test_rows_are_drawn_evenly_also_after_the_ring_has_wrapped():
    buffer = make(50, 2, stride=2, stratified=False)
    World(2, stride=2, longest=9).feed(buffer, 200)
    rows = np.flatnonzero(buffer.storage.is_row(np.arange(buffer.storage.size)))
    drawn = np.bincount(buffer._draw(buffer.storage, 200_000), minlength=buffer.storage.size)
    assert set(np.flatnonzero(drawn)) == set(rows)
    assert abs(drawn[rows] / 200_000 * len(rows) - 1.0).max() < 0.1


def test_batches_at_once():
    world = World(2, stride=2)
    offline = make(400, 1)
    World(1, seed=9).feed(offline, 50)
    buffer = with_offline(make(400, 2, 2, stride=2, offline_data="x", offline_ratio=0.25), offline.storage)
    world.feed(buffer, 40)
    batches = buffer.sample_batches(3, 32)
    assert len(batches) == 3 and all(batch.rewards.shape == (32, 1) for batch in batches)
    for batch in batches:
        own = type(batch)(*(_first(column, 24) for column in batch))
        world.check(own, 2)
    assert not th.equal(batches[0].actions, batches[1].actions)


def _first(column, count):
    return {key: value[:count] for key, value in column.items()} if isinstance(column, dict) else column[:count]


@pytest.mark.parametrize(("ratio", "share"), [(0.5, 32), (0.25, 16), (1.0, 64), (0.1, 6), (0.15, 10)])
def test_composition_of_a_mixed_batch(ratio, share):
    """``offline_ratio`` of the rows are offline ones, in every batch."""
    offline = make(400, 1)
    demos = World(1, seed=9)
    demos.at = [(700, 0)]
    demos.length[0, 700], demos.known[0, 700] = 9, 0
    demos.feed(offline, 50)
    buffer = with_offline(make(400, 1, offline_data="x", offline_ratio=ratio), offline.storage)
    if ratio < 1.0:
        with pytest.raises(ValueError, match="empty"):
            buffer.sample(4)
    World(1).feed(buffer, 60)
    for _ in range(5):
        episodes = buffer.sample(64).observations["proprio"][:, 1]
        assert (episodes >= 700).sum().item() == share


def test_mixing_needs_rows_that_fit():
    with pytest.raises(ValueError, match="offline_data must be a file, since offline_ratio is not 0"):
        make(offline_ratio=0.5)
    with pytest.raises(ValueError, match="no offline rows"):
        make(offline_data="x", offline_ratio=0.5).set_offline(TransitionStorage(10, OBS, C, D))
    with pytest.raises(ValueError, match="offline_ratio"):
        make(offline_ratio=1.5)
    with pytest.raises(ValueError, match="another chunk length"):
        make(intervention_rows=4, offline_ratio=0.5).set_offline(TransitionStorage(10, OBS, C + 1, D))
