"""LeRobot datasets are written by LeRobot: its own reader and ours give back what went in, bit for bit."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from rlt_gym.data.demo_set import DemoReader, load_demo_set
from rlt_gym.data.lerobot import LeRobotFolder
from rlt_gym.data.lerobot_writer import ExportLeRobotConfig, LeRobotWriter, export_lerobot
from rlt_gym.data.libero_hdf5 import DemoFile, DemoWriter
from rlt_gym.data.sources import demo_sources
from rlt_gym.libero.collect import CollectConfig, collect

SIZE, LENGTHS = 16, (5, 3, 4)


def arrays(length: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    pictures = {
        camera: rng.integers(0, 256, (length, SIZE, SIZE, 3), dtype=np.uint8) for camera in ("agentview", "wrist")
    }
    numbers = {"actions": rng.uniform(-1, 1, (length, 7)), "proprio": rng.normal(size=(length, 8))}
    return {**pictures, **{name: value.astype(np.float32) for name, value in numbers.items()}}


def write_files(folder: Path) -> dict[str, list[dict[str, np.ndarray]]]:
    """Two tasks, the first with two demonstrations and a failure between them."""
    demos = {"open it": [arrays(length, seed) for seed, length in enumerate(LENGTHS)], "shut it": [arrays(6, 9)]}
    for task_id, (instruction, episodes) in enumerate(demos.items(), start=3):
        env_args = {"task_id": task_id, "render": "fast", "noise": 0.1 * task_id}
        with DemoWriter(folder / f"{task_id}.hdf5", instruction, env_args) as writer:
            for number, episode in enumerate(episodes):
                writer.add(**episode, success=not (instruction == "open it" and number == 1))
    demos["open it"].pop(1)
    return demos


def test_without_lerobot_the_extra_is_named_and_nothing_is_left(tmp_path, monkeypatch):
    write_files(tmp_path / "files")
    monkeypatch.setitem(sys.modules, "lerobot", None)
    monkeypatch.setitem(sys.modules, "lerobot.datasets.lerobot_dataset", None)
    with pytest.raises(ValueError, match=r"pip install 'rlt\[lerobot\]'"):
        export_lerobot(ExportLeRobotConfig([str(tmp_path / "files")], str(tmp_path / "out"), progress=False))
    with pytest.raises(ValueError, match=r"pip install 'rlt\[lerobot\]'"):
        collect(CollectConfig(format="lerobot", out=str(tmp_path / "out")))
    assert [path.name for path in tmp_path.iterdir()] == ["files"]
    with pytest.raises(ValueError, match="format is 'zarr'; it may be hdf5, lerobot"):
        CollectConfig(format="zarr")


def test_a_folder_that_exists_is_refused(tmp_path):
    with pytest.raises(ValueError, match="exists already"):
        collect(CollectConfig(format="lerobot", out=str(tmp_path)))


def test_what_goes_in_comes_out(tmp_path):
    """By our reader, by LeRobot's own, and as the arrays that the RL token is trained on."""
    pytest.importorskip("lerobot")
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    written = write_files(tmp_path / "files")
    files, out = str(tmp_path / "files"), tmp_path / "out"
    assert export_lerobot(ExportLeRobotConfig([files], str(out), progress=False)) == out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "out"]
    assert sorted(path.name for path in out.iterdir()) == ["data", "meta"]
    folder = LeRobotFolder(out)
    assert folder.fps == 20 and list(folder.tasks.values()) == list(written)
    for number, episodes in enumerate(written.values()):
        found = folder.demos(number)
        assert len(found) == len(episodes)
        for demo, episode in zip(found, episodes, strict=True):
            assert len(demo) == len(episode["actions"]) and demo.frame_shape == (SIZE, SIZE)
            np.testing.assert_array_equal(demo.actions, episode["actions"])
            np.testing.assert_array_equal(demo.proprio, episode["proprio"])
            for camera in ("agentview", "wrist"):
                np.testing.assert_array_equal(demo.frames(camera), episode[camera])

    theirs = LeRobotDataset("any/name", root=out, delta_timestamps={"action": [0.0, 0.05, 0.1]})
    item, episode = theirs[6], written["open it"][1]  # the second row of the second episode, four rows long
    assert item["task"] == "open it" and item["action_is_pad"].tolist() == [False] * 3
    np.testing.assert_array_equal(item["action"].numpy(), episode["actions"][1:4])
    np.testing.assert_array_equal(item["observation.state"].numpy(), episode["proprio"][1])
    for name, camera in (("image", "agentview"), ("image2", "wrist")):
        upright = np.rot90(episode[camera][1], 2)  # turned by 180 degrees
        picture = item[f"observation.images.{name}"].permute(1, 2, 0).numpy()
        np.testing.assert_array_equal((picture * 255).round().astype(np.uint8), upright)

    ours, hdf5 = (load_demo_set(path, SIZE, frame_stride=2) for path in (out, files))
    assert DemoReader(out).edge == SIZE and ours.instructions == hdf5.instructions
    assert list(ours.files.values()) == list(hdf5.files.values()) == [2, 1]
    for camera in ("agentview", "wrist"):
        np.testing.assert_array_equal(ours.pictures[camera], hdf5.pictures[camera], err_msg=camera)
    for name in ("proprio", "actions", "action_row", "action_end", "task", "demo"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(hdf5, name), err_msg=name)
    # what both files agree in, and each task's number in LIBERO
    assert [source.made["task_id"] for source in demo_sources(out)] == [3, 4]
    made = json.loads((out / "meta" / "rlt.json").read_text())
    assert made == {"render": "fast", "tasks": {"open it": 3, "shut it": 4}}

    pooled = export_lerobot(ExportLeRobotConfig([files], str(tmp_path / "small"), image_size=8, progress=False))
    np.testing.assert_array_equal(load_demo_set(pooled, 8).pictures["wrist"], load_demo_set(files, 8).pictures["wrist"])


def test_a_dataset_that_is_not_finished_is_thrown_away(tmp_path):
    pytest.importorskip("lerobot")
    with pytest.raises(KeyboardInterrupt), LeRobotWriter(tmp_path / "out") as writer:
        writer.add("open it", **arrays(3, 0))
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


@pytest.mark.sim
def test_collected_on_libero_as_in_the_other_format(tmp_path):
    pytest.importorskip("lerobot")
    settings = {"task_ids": [8], "demos": 1, "image_size": 64, "assets": "embedded", "num_envs": 1}
    (path,) = collect(CollectConfig(out=str(tmp_path / "files"), **settings))
    (folder,) = collect(CollectConfig(out=str(tmp_path / "set"), format="lerobot", **settings))
    with DemoFile(path) as file:
        (theirs,) = LeRobotFolder(folder).demos(0)
        assert LeRobotFolder(folder).tasks == {0: file.instruction}
        for name in ("actions", "proprio"):
            np.testing.assert_array_equal(getattr(theirs, name), getattr(file[0], name))
        for camera in ("agentview", "wrist"):
            np.testing.assert_array_equal(theirs.frames(camera), file[0].frames(camera))
