"""What the chunk buffer takes in memory and in a file, and what comes back from the file."""

import pickle
import threading
import tracemalloc

import numpy as np
import pytest
import torch as th
from buffer_world import ACT, OBS, C, D, World, everything, make
from gymnasium import spaces
from stable_baselines3.common.save_util import load_from_pkl, save_to_pkl

from rlt_gym.testing import FakeRLTokenVectorEnv
from rlt_sb3 import RLT, ChunkReplayBuffer, GymnasiumVecEnv


@pytest.mark.parametrize("stride", [None, 2])
@pytest.mark.parametrize(("size", "count"), [(1000, 5), (40, 30)])
def test_save_and_load(tmp_path, size, count, stride):
    world = World(2, stride=stride)
    buffer = make(size, 2, n_steps=3, stride=stride)
    world.feed(buffer, count)
    save_to_pkl(tmp_path / "buffer.pkl", buffer)
    loaded = load_from_pkl(tmp_path / "buffer.pkl")
    # goes on being filled like the original
    twin = pickle.loads(pickle.dumps(world))
    world.feed(buffer, 9)
    twin.feed(loaded, 9)
    assert twin.check(everything(loaded), 3) == world.check(everything(buffer), 3)
    assert (buffer.pos, buffer.full, buffer.size()) == (loaded.pos, loaded.full, loaded.size())
    np.random.seed(1)
    first = buffer.sample(50)
    np.random.seed(1)
    second = loaded.sample(50)
    assert th.equal(first.rewards, second.rewards) and th.equal(first.actions, second.actions)


def test_an_almost_empty_buffer_makes_a_small_file():
    buffer = make(100_000)
    World().feed(buffer, 3)
    assert len(pickle.dumps(buffer)) < 20_000


@pytest.mark.parametrize("count", [300, 1500])
def test_saving_copies_nothing(tmp_path, count):
    """Partly filled and wrapped around: the file is as large as the rows, and saving takes no such memory again."""
    space = spaces.Dict(OBS.spaces | {"z_rl": spaces.Box(-np.inf, np.inf, (2048,), np.float32)})
    buffer = ChunkReplayBuffer(1000, space, ACT, device="cpu", z_rl_dtype="float16")
    for step in range(count):
        obs, following = ({key: box.sample()[None] for key, box in space.spaces.items()} for _ in range(2))
        buffer.add(obs, following, ACT.sample()[None], np.ones(1), np.array([step % 9 == 8]), [{}])
    used = min(buffer.storage.written, buffer.storage.size) * buffer.storage.bytes_per_slot
    tracemalloc.start()
    try:
        save_to_pkl(tmp_path / "buffer.pkl", buffer)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 0.3 * used
    assert used < (tmp_path / "buffer.pkl").stat().st_size < 1.05 * used
    loaded = load_from_pkl(tmp_path / "buffer.pkl")
    for name, array in buffer.storage._arrays().items():
        assert (
            np.array_equal(loaded.storage._arrays()[name], array) and loaded.storage._arrays()[name].flags.writeable
        ), name


def test_saving_waits_for_other_threads(tmp_path):
    model = RLT("MultiInputPolicy", GymnasiumVecEnv(FakeRLTokenVectorEnv(1)), device="cpu")
    lock, asked = model.replay_buffer._lock, threading.Event()

    class Watched:
        """The buffer's lock, which tells that someone asks for it."""

        def __enter__(self):
            asked.set()
            lock.acquire()

        def __exit__(self, *_):
            lock.release()

    model.replay_buffer._lock = Watched()
    saver = threading.Thread(target=model.save_replay_buffer, args=(tmp_path / "buffer.pkl",))
    with lock:
        saver.start()
        while saver.is_alive() and not asked.wait(0.01):
            pass
        assert asked.is_set() and not list(tmp_path.iterdir())
    saver.join()
    assert load_from_pkl(tmp_path / "buffer.pkl").size() == 0


def test_half_precision_tokens():
    single, half = make(500), make(500, z_rl_dtype="float16")
    for buffer in (single, half):
        World(longest=200).feed(buffer, 100)
    assert half.storage.bytes_per_slot == single.storage.bytes_per_slot - 2 * 3
    one, two = everything(single), everything(half)
    assert two.observations["z_rl"].dtype == th.float32
    np.testing.assert_allclose(one.next_observations["z_rl"], two.next_observations["z_rl"], rtol=1e-3)
    assert th.equal(one.next_observations["proprio"], two.next_observations["proprio"])
    assert half.size() == single.size()  # rounding does not look like another observation
    with pytest.raises(ValueError, match="float16"):
        make(z_rl_dtype="int8")


def test_memory_is_what_the_formula_says():
    """The bytes of a slot as counted by hand; ``benchmarks/buffer.py`` measures the process."""
    space = spaces.Dict(OBS.spaces | {"z_rl": spaces.Box(-np.inf, np.inf, (2048,), np.float32)})
    buffer = ChunkReplayBuffer(1000, space, ACT, device="cpu", z_rl_dtype="float16")
    observation_bytes, chunk_bytes = 2048 * 2 + 3 * 4 + C * D * 4, C * D * 4 + C * 4
    assert buffer.storage.bytes_per_slot <= 1.02 * (observation_bytes + chunk_bytes)
    arrays = sum(value.nbytes for value in buffer.storage._arrays().values())
    assert arrays <= 1.1 * 1000 * (observation_bytes + chunk_bytes)
