"""Rows in which someone took over are in both buffers, the replay buffer and the offline rows beside it."""

import pickle

import numpy as np
import pytest
import torch as th
from buffer_world import OBS, C, D, World, make
from intervention_runs import learn

from rlt_sb3.common.replay.offline import load_transitions, save_transitions
from rlt_sb3.common.replay.storage import TransitionStorage

CPU = th.device("cpu")


class Taken(World):
    """Someone chooses some of the control steps."""

    def taken(self, env: int, episode: int, step: int) -> bool:
        return (env + 3 * episode + step // 5) % 3 == 0

    def info(self, env, episode, step, steps):
        info = super().info(env, episode, step, steps)
        flags = np.array([self.taken(env, episode, step + j) for j in range(C)])
        own = np.stack([self.action(env, episode, step + j) for j in range(C)])
        executed = np.where(flags[:, None], -own, own).astype(np.float32)
        return info | {"intervention": flags, "executed_actions": executed}


def contents(rows: TransitionStorage, n_steps: int, overwrite: bool, only_taken: bool) -> dict[tuple, list]:
    """What a sample of each row would be, by the row's place (env, episode, control step)."""
    slots = np.flatnonzero(rows.is_row(np.arange(rows.size)))
    if only_taken:
        slots = slots[rows.intervention[slots].any(axis=1)]
    batch = rows.gather(slots, n_steps, 0.9, CPU, overwrite)
    out = {}
    for i in range(len(slots)):
        parts = [part for column in batch for part in (column.values() if isinstance(column, dict) else [column])]
        out[tuple(batch.observations["proprio"][i].tolist())] = [part[i] for part in parts]
    assert len(out) == len(slots)
    return out


def same_rows(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(all(th.equal(x, y) for x, y in zip(a[key], b[key], strict=True)) for key in a)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("stride", [None, 1, 2, 3])
def test_copies_are_the_rows_of_the_replay_buffer(stride, overwrite):
    world = Taken(2, seed=1, stride=stride)
    buffer = make(
        2000, 2, stride=stride, intervention_ref="replace" if overwrite else "target", intervention_rows=2000,
        offline_ratio=0.5,
    )  # fmt: skip
    buffer.read_offline()
    world.feed(buffer, 60, broken=0.1)
    online = contents(buffer.storage, 1, overwrite, only_taken=True)
    copied = contents(buffer.offline, 1, False, only_taken=False)
    assert 30 < len(online) < buffer.size()
    assert same_rows(online, copied)
    assert {bool(row[-1]) for row in copied.values()} == {True, False}  # marks of successes came along


@pytest.mark.parametrize("stride", [None, 2])
def test_returns_run_through_copies_that_follow_each_other(stride):
    world = Taken(1, seed=2, stride=stride, longest=40)
    buffer = make(2000, 1, stride=stride, intervention_rows=2000, offline_ratio=0.5, intervention_ref="target")
    buffer.read_offline()
    world.taken = lambda env, episode, step: True
    world.feed(buffer, 50)
    assert same_rows(contents(buffer.storage, 3, False, True), contents(buffer.offline, 3, False, False))


@pytest.mark.parametrize("room", [2, 3, 7, 40])
def test_full_ring_of_copies_stays_right_in_memory_and_file(tmp_path, room):
    """Whatever survives is a row of the world; what was in the file is still there, and the newest copy, too."""
    earlier = Taken(1, seed=5)
    source = make(100, 1)
    earlier.feed(source, 10)
    save_transitions(tmp_path / "rows.safetensors", source.storage)
    rows = {"offline_data": str(tmp_path / "rows.safetensors"), "offline_ratio": 0.5, "intervention_rows": room}
    buffer = make(30, 2, stride=2, intervention_ref="target", **rows)
    buffer.read_offline()
    alone = load_transitions(tmp_path / "rows.safetensors", OBS)
    # rows of the file have the same names (env, episode, step): tell them apart by their slots
    in_file = np.flatnonzero(alone.is_row(np.arange(alone.size)))
    world = Taken(2, seed=room, stride=2)
    whole = make(5000, 2, stride=2)  # the same, with room for everything
    both = type("Both", (), {"add": lambda self, *args: (buffer.add(*args), whole.add(*args))})()
    for _ in range(12):
        world.feed(both, 6, broken=0.05)
        rows = buffer.offline
        slots = np.flatnonzero(rows.is_row(np.arange(rows.size)))
        assert np.array_equal(slots[slots < rows.kept], in_file)
        kept, loaded = (r.gather(in_file, 1, 0.9, CPU) for r in (rows, alone))
        assert all(th.equal(x, y) for x, y in zip(kept[1:2] + kept[3:], loaded[1:2] + loaded[3:], strict=True))
        truth = contents(whole.storage, 1, False, True)
        batch = rows.gather(slots[slots >= rows.kept], 1, 0.9, CPU)
        names = [tuple(key) for key in batch.observations["proprio"].tolist()]
        assert names and len(names) <= room // 2 + (room > 2) * room
        for i, name in enumerate(names):
            parts = [part for column in batch for part in (column.values() if isinstance(column, dict) else [column])]
            assert all(th.equal(part[i], want) for part, want in zip(parts, truth[name], strict=True))
    assert rows.written > rows.size  # it has wrapped


def test_batches_and_files():
    world = Taken(1, seed=3)
    buffer = make(500, 1, intervention_rows=100, offline_ratio=0.25, intervention_ref="target")
    buffer.read_offline()
    world.taken = lambda env, episode, step: False
    world.feed(buffer, 5)
    assert len(buffer.sample(32).rewards) == 32  # nobody has taken over yet: all rows are the buffer's own
    world.taken = lambda env, episode, step: True
    world.feed(buffer, 3)
    copies = set(contents(buffer.offline, 1, False, False))
    assert 1 <= len(copies) <= 3
    sample = buffer.sample(32)
    of_offline = [tuple(key) for key in sample.observations["proprio"][24:].tolist()]
    assert set(of_offline) <= copies and len(sample.rewards) == 32

    again = pickle.loads(pickle.dumps(buffer))
    assert again.offline_ratio == 0.25 and same_rows(
        contents(again.offline, 1, False, False), contents(buffer.offline, 1, False, False)
    )
    again.read_offline()  # what learn() does at a resumption: nothing is lost
    world.feed(again, 4)
    assert len(contents(again.offline, 1, False, False)) > len(copies)


def test_training_fills_both():
    def someone(simulator, proposed, step):
        return np.full(7, 0.2) if step % 8 in (2, 3) else None

    settings = {"replay_buffer_kwargs": {"intervention_rows": 200, "offline_ratio": 0.25}, "batch_size": 16}
    model, steps = learn(60, intervention=someone, rlt=settings)
    buffer = model.replay_buffer
    flagged = sum(bool(info["intervention"][: info["chunk_steps"]].any()) for *_, infos in steps for info in infos)
    assert flagged == buffer.offline.count and buffer.size() == 60 and 10 < flagged < 50
    assert same_rows(contents(buffer.storage, 1, True, True), contents(buffer.offline, 1, False, False))
    batch = buffer.sample(16)
    human = (batch.bc_target.view(16, C, 7) == 0.2).all(dim=2).any(dim=1)
    assert human[12:].all() and not human[:12].all()


def test_errors():
    with pytest.raises(ValueError, match="two or more free slots"):
        make(intervention_rows=2, offline_ratio=0.5).set_offline(TransitionStorage(1, OBS, C, D))
    with pytest.raises(ValueError, match="offline_ratio must be > 0, since intervention_rows"):
        learn(rlt={"replay_buffer_kwargs": {"intervention_rows": 10}})
    with pytest.raises(ValueError, match="intervention_rows must be 0, or an integer >= 2"):
        learn(rlt={"replay_buffer_kwargs": {"intervention_rows": 1, "offline_ratio": 0.5}})
