"""Demonstration files: layout, reading back, chunk targets, errors."""

import json
import os

import h5py
import numpy as np
import pytest
from vla_helpers import write_demos

from rlt_gym.core.files import atomic_write
from rlt_gym.data.demo_set import DemoReader, load_demo_set, resize_frames
from rlt_gym.data.libero_hdf5 import DemoFile, DemoWriter, expand_paths
from rlt_gym.rl_token.encode_demos import EncodeDemosConfig, encode_demos
from rlt_gym.testing import FakeVLA


def test_atomic_write_keeps_the_old_file_on_error(tmp_path):
    path = tmp_path / "deep" / "file.txt"
    with atomic_write(path) as temporary:
        temporary.write_text("old")
    with pytest.raises(RuntimeError), atomic_write(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert os.listdir(path.parent) == ["file.txt"]


def test_writer_and_reader(tmp_path):
    path = write_demos(tmp_path / "a.hdf5", "put the bowl on the stove", demos=3, length=5)
    with DemoFile(path) as file:
        assert file.instruction == "put the bowl on the stove"
        assert [demo.name for demo in file] == ["demo_0", "demo_1", "demo_2"]
        demo = file[1]
        assert demo.attrs == {"num_samples": 5, "success": True, "init_index": 1}
        assert demo.actions.shape == (5, 7) and demo.actions.dtype == np.float32
        assert demo.proprio.shape == (5, 8) and demo.proprio.dtype == np.float32
        assert demo.frames("agentview").shape == (5, 32, 32, 3) and demo.frames("wrist", 2).shape[0] == 3
        assert demo.object_positions.shape == (5, 1, 3)


def test_official_layout_without_our_additions(tmp_path):
    """As in LIBERO's files: more keys than we need, no object positions, no attributes per demonstration."""
    path = tmp_path / "official.hdf5"
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["problem_info"] = json.dumps({"problem_name": "x", "language_instruction": '"open the drawer"'})
        for number in (0, 10, 2):  # numeric, not alphabetic order
            demo = data.create_group(f"demo_{number}")
            demo["actions"] = np.full((4, 7), number / 10.0)
            demo["states"] = np.zeros((4, 50))
            demo["obs/agentview_rgb"] = np.zeros((4, 32, 32, 3), np.uint8)
            demo["obs/eye_in_hand_rgb"] = np.zeros((4, 32, 32, 3), np.uint8)
            demo["obs/ee_states"] = np.zeros((4, 6))
            demo["obs/gripper_states"] = np.ones((4, 2))
    data = load_demo_set(path, image_size=32)
    assert (
        data.instructions == ["open the drawer"] and data.num_demos == 3 and data.object_positions.shape == (12, 0, 3)
    )
    np.testing.assert_allclose(data.actions[[0, 4, 8], 0], [0.0, 0.2, 1.0], rtol=1e-6)


def test_failed_writer_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="proprio"), DemoWriter(tmp_path / "a.hdf5", "x") as writer:
        frames = np.zeros((3, 8, 8, 3), np.uint8)
        writer.add(np.zeros((3, 7)), np.full((3, 8), np.nan), agentview=frames, wrist=frames)
    assert os.listdir(tmp_path) == []


def test_chunks_repeat_the_last_action_and_mask_it(tmp_path):
    write_demos(tmp_path / "a.hdf5", "a", demos=2, length=6)
    data = load_demo_set(tmp_path, image_size=32, frame_stride=2)
    assert data.action_row.tolist() == [0, 2, 4, 6, 8, 10]
    chunk, mask = data.chunks(np.array([2, 3]), 4)
    np.testing.assert_array_equal(chunk[0], data.actions[[4, 5, 5, 5]])
    np.testing.assert_array_equal(chunk[1], data.actions[[6, 7, 8, 9]])
    assert mask.tolist() == [[True, True, False, False], [True] * 4]


def test_split_is_by_whole_demonstrations_of_each_task(tmp_path):
    write_demos(tmp_path / "a.hdf5", "a", demos=4)
    write_demos(tmp_path / "b.hdf5", "b", demos=4, seed=1)
    data = load_demo_set([tmp_path / "a.hdf5", tmp_path / "b.hdf5"], image_size=16)
    train, held = data.split(0.25, seed=0)
    assert len(train) + len(held) == len(data)
    assert not set(data.demo[train]) & set(data.demo[held])
    assert len(set(data.demo[held])) == 2 and set(data.task[held]) == {0, 1}


def test_resize_is_an_average():
    frames = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)
    expected = frames.reshape(2, 4, 2, 4, 2, 3).mean(axis=(2, 4))
    assert np.abs(resize_frames(frames, 4) - expected).max() <= 0.5
    with pytest.raises(ValueError, match="multiple"):
        resize_frames(frames, 3)


def set_array(name, change):
    """Put another array into the second of the demonstrations, or none."""

    def edit(demo):
        before = demo[name][:]
        del demo[name]
        if change is not None:
            demo[name] = change(before)

    return edit


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (set_array("obs/agentview_rgb", lambda a: a[:-1]), "has 7 rows of obs/agentview_rgb for 8 actions"),
        (set_array("obs/eye_in_hand_rgb", lambda a: a[[*range(8), 7]]), "has 9 rows of obs/eye_in_hand_rgb for 8"),
        (set_array("actions", lambda a: a[:5]), r"has 8 rows of (obs/ee_states|object_positions) for 5 actions"),
        (set_array("obs/ee_states", lambda a: a[:5]), "has 5 rows of obs/ee_states for 8 actions"),
        (set_array("object_positions", lambda a: a[:5]), "has 5 rows of object_positions for 8 actions"),
        (set_array("actions", lambda a: a * np.nan), "has NaN or infinite values in actions"),
        (set_array("obs/gripper_states", lambda a: a + np.inf), "has NaN or infinite values in obs/gripper_states"),
        (set_array("actions", lambda a: a[:, :6]), r"has rows of actions of shape \(6,\), not \(7\)"),
        (set_array("obs/ee_states", lambda a: a[:, :5]), r"has rows of obs/ee_states of shape \(5,\), not \(6\)"),
        (set_array("obs/gripper_states", lambda a: a[:, 0]), r"obs/gripper_states of shape \(\), not \(2\)"),
        (set_array("obs/agentview_rgb", lambda a: a[..., :1]), r"shape \(16, 16, 1\), not \(any, any, 3\)"),
        (set_array("object_positions", lambda a: a[..., :2]), r"object_positions of shape \(1, 2\), not \(any, 3\)"),
        (set_array("obs/eye_in_hand_rgb", None), "has no array obs/eye_in_hand_rgb"),
        (set_array("obs/ee_states", None), "has no array obs/ee_states"),
        (set_array("actions", None), "has no array actions"),
        (set_array("actions", lambda a: 3.0), "has no array actions"),
    ],
)  # fmt: skip
def test_arrays_that_do_not_fit_together_are_refused(tmp_path, edit, says):
    """By all who read them: they would shift the rows of the demonstrations behind, or fail without saying where."""
    path = write_demos(tmp_path / "a.hdf5", "a", demos=3, length=8, size=16)
    load_demo_set(path, 8)
    with h5py.File(path, "r+") as file:
        edit(file["data/demo_1"])
    transitions = EncodeDemosConfig([str(path)], str(tmp_path / "o.safetensors"), rl_token="mean", progress=False)
    for read in (lambda: load_demo_set(path, 8), lambda: encode_demos(transitions, FakeVLA())):
        with pytest.raises(ValueError, match=says) as caught:
            read()
        assert str(caught.value).startswith(f"demo_1 of {path} ") and "\n" not in str(caught.value)
    if "rgb" in says and "no array" not in says:
        with pytest.raises(ValueError, match=says):
            _ = DemoReader(path).rows


def test_a_file_without_pictures_is_refused(tmp_path):
    path = write_demos(tmp_path / "a.hdf5", "a", demos=1)
    with h5py.File(path, "r+") as file:
        del file["data/demo_0/obs"]
    with pytest.raises(ValueError, match=r"demo_0 of .*a.hdf5 has no pictures, arrays obs/CAMERA_rgb: collect or copy"):
        _ = DemoReader(path).edge


def test_what_exists_is_no_pattern(tmp_path):
    """A folder with brackets, its file, and a pattern inside it; a pattern beside it still is one."""
    path = write_demos(tmp_path / "run[1]" / "a.hdf5", "a", demos=1)
    other = write_demos(tmp_path / "run1" / "a.hdf5", "a", demos=1)
    assert expand_paths(path.parent) == expand_paths(path) == expand_paths([path, path.parent]) == [path]
    assert expand_paths(tmp_path / "run[[]1]" / "*.hdf5") == [path]
    assert expand_paths(tmp_path / "run[12]" / "*.hdf5") == [other]


def test_errors_name_the_file(tmp_path):
    with pytest.raises(ValueError, match="matches"):
        load_demo_set(tmp_path / "none*.hdf5")
    (tmp_path / "bad.hdf5").write_bytes(b"no hdf5")
    with pytest.raises(ValueError, match=r"bad\.hdf5"):
        load_demo_set(tmp_path / "bad.hdf5")
    with h5py.File(tmp_path / "other.hdf5", "w") as file:
        file["x"] = 1
    with pytest.raises(ValueError, match=r"other\.hdf5 is not in LIBERO's"):
        load_demo_set(tmp_path / "other.hdf5")


def test_labels_of_rollouts(tmp_path):
    """Who chose each action, and which episodes failed; a file without labels says that nobody took over."""
    rows = {"agentview": np.zeros((5, 16, 16, 3), np.uint8), "wrist": np.zeros((5, 16, 16, 3), np.uint8)}
    rows |= {"actions": np.zeros((5, 7)), "proprio": np.zeros((5, 8))}
    taken = np.array([False, True, False, True, True])
    with DemoWriter(tmp_path / "a.hdf5", "task") as writer:
        writer.add(**rows, success=False, intervention=taken)
        writer.add(**rows)
        with pytest.raises(ValueError, match=r"intervention has shape \(4,\); it must be finite with shape \(5,\)"):
            writer.add(**rows, intervention=taken[:4])
        for shape in ((5, 3), (4, 2, 3), (5, 2, 2), (5, 1, 3, 1)):
            with pytest.raises(ValueError, match=r"object_positions is \(.*\); it must be \(5, n_obj, 3\)"):
                writer.add(**rows, object_positions=np.zeros(shape))
        assert writer.add(**rows, object_positions=np.zeros((5, 2, 3))) == "demo_2", "those were not added"
    with DemoFile(tmp_path / "a.hdf5") as file:
        assert len(file) == 3
        assert file[0].intervention.tolist() == taken.tolist() and file[1].intervention is None
    reader = DemoReader(tmp_path / "a.hdf5", stride=2, successes_only=False)
    assert reader.rows.intervention.tolist() == [False, False, True] + [False] * 6
    assert reader.rows.success.tolist() == [False] * 3 + [True] * 6 and reader.failures == 1
    assert DemoReader(tmp_path / "a.hdf5").rows.intervention.tolist() == [False] * 10
