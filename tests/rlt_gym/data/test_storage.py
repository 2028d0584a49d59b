"""Arrays in memory or in files."""

import os

import h5py
import numpy as np
import pytest
from vla_helpers import write_demos

from rlt_gym.data.demo_set import frame_edge, load_demo_set
from rlt_gym.data.storage import IN_MEMORY, ArrayStorage


def test_only_large_arrays_lie_in_files(tmp_path):
    storage = ArrayStorage(limit=1000, folder=tmp_path / "new")
    small, large = storage.zeros((10, 10, 10), np.uint8), storage.zeros((10, 10, 10), np.float16)
    assert not isinstance(small, np.memmap) and isinstance(large, np.memmap)
    assert not isinstance(IN_MEMORY.zeros((10**6,), np.float64), np.memmap)
    assert large.shape == (10, 10, 10) and large.dtype == np.float16 and not large.any()
    large[3] = 7
    assert large.sum() == 700
    assert (tmp_path / "new").is_dir() and not os.listdir(tmp_path / "new"), "the file has no name to stay behind under"


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match=r"has no room for 8388608.0 GiB .*choose another folder \(scratch\)"):
        ArrayStorage(limit=0, folder=tmp_path).zeros((2**53,), np.uint8)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="choose another folder"):
        ArrayStorage(limit=0, folder=tmp_path / "file").zeros((10,), np.uint8)


def test_demonstrations_are_the_same_in_files(tmp_path):
    write_demos(tmp_path / "a.hdf5", "a", demos=3, length=7, size=32)
    write_demos(tmp_path / "b.hdf5", "b", demos=2, length=6, size=16, seed=1)
    plain = load_demo_set(tmp_path, 16, frame_stride=2)
    filed = load_demo_set(tmp_path, 16, frame_stride=2, storage=ArrayStorage(0, tmp_path))
    assert isinstance(filed.agentview, np.memmap) and isinstance(filed.wrist, np.memmap)
    rows = []
    for name, length in (("a", 3), ("b", 2)):
        with h5py.File(tmp_path / f"{name}.hdf5") as file:
            rows += [file[f"data/demo_{i}/obs/agentview_rgb"][::2] for i in range(length)]
    pooled = [x.reshape(len(x), 16, x.shape[1] // 16, 16, -1, 3).mean((2, 4)) for x in rows]
    assert plain.agentview.shape == (3 * 4 + 2 * 3, 16, 16, 3)
    np.testing.assert_array_equal(plain.agentview, np.floor(np.concatenate(pooled) + 0.5))
    for key in ("agentview", "wrist", "proprio", "actions", "action_row", "task", "demo", "object_positions"):
        np.testing.assert_array_equal(getattr(plain, key), getattr(filed, key))
    less = filed.without_frames()
    assert less.agentview.shape == less.wrist.shape == (0, 16, 16, 3) and len(less) == len(filed) == 18
    assert frame_edge(tmp_path / "a.hdf5") == 32 and frame_edge(tmp_path / "b.hdf5") == 16
