"""Demonstrations in LeRobot's format, as it lies on disk in versions 2 and 3, pictures in the tables or as videos."""

import json
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lerobot_folder import LENGTHS, actions_of, film, picture, write, write_hdf5
from offline_helpers import C, CountingVLA, ReadingEncoder, space

from rlt_gym.core.gripper import Gripper
from rlt_gym.data.lerobot import LeRobotFolder
from rlt_gym.rl_token.encode_demos import EncodeDemosConfig, encode_demos
from rlt_sb3.common.replay.offline import load_transitions


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(("names", "video"), [("openpi", False), ("lerobot", False), ("lerobot", True)])
def test_episodes_are_read_as_libero_gave_them(tmp_path, version, names, video):
    folder = LeRobotFolder(write(tmp_path / "set", version, names, video))
    assert folder.tasks == {0: "do it", 1: "do that"}
    found = {demo.name: demo for task in folder.tasks for demo in folder.demos(task)}
    assert [demo.name for demo in folder.demos(0)] == ["episode_0", "episode_2"]
    for number, length in enumerate(LENGTHS):
        demo = found[f"episode_{number}"]
        assert demo.attrs == {"success": True}
        np.testing.assert_array_equal(demo.actions, actions_of(number))
        assert demo.proprio.dtype == np.float32 and demo.proprio[:, :2].tolist() == [[t, number] for t in range(length)]
        for camera in ("agentview", "wrist"):
            for stride in (1, 2):
                frames = demo.frames(camera, stride)
                wanted = np.stack([picture(number, t, camera == "wrist") for t in range(0, length, stride)])
                assert frames.dtype == np.uint8 and frames.shape == wanted.shape
                # lossy video: a neighboring frame differs by 12
                limit = 5 if video else 0
                inner = np.abs(frames.astype(int) - wanted)[:, 2:-2, 2:-2]
                assert (
                    np.median(inner) <= limit and np.abs(frames.mean((1, 2, 3)) - wanted.mean((1, 2, 3))).max() <= limit
                )


@pytest.mark.parametrize("version", [2, 3])
def test_the_same_rows_as_from_libero_s_own_files(tmp_path, version):
    """Transitions of the dataset are those of the same demonstrations in HDF5."""
    write(tmp_path / "set", version, success=False)
    write_hdf5(tmp_path)

    def rows(demos, **kwargs):
        config = EncodeDemosConfig(
            [str(tmp_path / demos)], str(tmp_path / f"{version}.safetensors"), chunk_length=C, progress=False, **kwargs
        )
        loaded = load_transitions(encode_demos(config, CountingVLA(), ReadingEncoder()), space())
        slots = np.flatnonzero(loaded.is_row(np.arange(loaded.size)))
        return loaded.counts, loaded.gather(slots, 2, 0.9, torch.device("cpu"))

    theirs, ours = rows("set", task_ids=[4, 9]), rows("*.hdf5", task_ids=[4, 9])
    assert theirs[0] == ours[0] and set(theirs[0]) == {4, 9}
    for a, b in zip(theirs[1], ours[1], strict=True):
        pairs = zip(a.values(), b.values(), strict=True) if isinstance(a, dict) else [(a, b)]
        assert all(torch.equal(x, y) for x, y in pairs)
    assert 0.0 < float(theirs[1].successful.mean()) < 1.0  # next.success was read
    chosen, batch = rows("set", instructions=["do that"], task_ids=[3])
    assert set(chosen) == {3} and set(batch.observations["proprio"][:, 1].tolist()) == {1.0}
    # without task_ids the dataset's own numbers
    assert set(rows("set")[0]) == {0, 1}
    flipped, _ = rows("set", lerobot_rotated=False), None
    assert not torch.equal(flipped[1].observations["z_rl"], theirs[1].observations["z_rl"])


def test_grippers_that_open_with_one(tmp_path):
    """Such a dataset gives LIBERO's actions when the setting says so, and is refused when it does not."""
    values = np.random.default_rng(0).uniform(-0.2, 1.2, 1000).astype(np.float32)
    reference = np.array([-1.0 if v >= 1 else 1.0 if v <= 0 else 1.0 - 2.0 * v for v in values])
    np.testing.assert_allclose(Gripper.OPEN.to_env(values), reference, atol=1e-6)
    assert Gripper.OPEN.to_env(np.array([1.0, 0.0])).tolist() == [-1.0, 1.0]  # 1 = open -> -1
    path = write(tmp_path / "set", 2) / "data/chunk-000/episode_000000.parquet"
    rows = pq.read_table(path).to_pylist()
    for row in rows:
        row["action"][6] = float(row["action"][6] < 0)
    pq.write_table(pa.Table.from_pylist(rows), path)
    with pytest.raises(ValueError, match=r"gripper actions from 0 to 1, .* set lerobot_gripper to open"):
        LeRobotFolder(tmp_path / "set").demos(0)[0].actions  # noqa: B018
    demo = LeRobotFolder(tmp_path / "set", gripper="open").demos(0)[0]
    np.testing.assert_array_equal(demo.actions, actions_of(0))
    with pytest.raises(ValueError, match="lerobot_gripper must be one of"):
        LeRobotFolder(tmp_path / "set", gripper="wide")


def test_clear_errors(tmp_path, monkeypatch):
    root = write(tmp_path / "set", 3)
    info = json.loads((root / "meta" / "info.json").read_text())

    def with_info(**changes):
        (root / "meta" / "info.json").write_text(json.dumps(info | changes))
        return LeRobotFolder(root)

    with pytest.raises(ValueError, match=r"version v1\.6"):
        with_info(codebase_version="v1.6")
    features = {key: value for key, value in info["features"].items() if key != "observation.images.image2"}
    with pytest.raises(ValueError, match=r"lerobot_columns=\{wrist: NAME\}"):
        with_info(features=features)
    with pytest.raises(ValueError, match=r"action has shape \(14,\)"):
        with_info(features=info["features"] | {"action": {"dtype": "float32", "shape": [14]}})
    with pytest.raises(ValueError, match="may name agentview, wrist"):
        LeRobotFolder(root, {"hand": "x"})
    with_info()
    (root / "meta" / "tasks.parquet").unlink()
    with pytest.raises(ValueError, match="damaged or incomplete"):
        LeRobotFolder(root)
    with pytest.raises(ValueError, match="no demonstrations of \\['fly'\\]"):
        config = EncodeDemosConfig([str(write(tmp_path / "two", 2))], instructions=["fly"], chunk_length=C)
        encode_demos(config, CountingVLA(), ReadingEncoder())
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match=r"pip install 'rlt\[datasets\]'"):
        LeRobotFolder(tmp_path / "two")


@pytest.mark.parametrize(("column", "quantity"), [("action", "actions"), ("observation.state", "proprio")])
def test_numbers_that_are_not_finite_are_noticed(tmp_path, column, quantity):
    path = write(tmp_path / "set", 2) / "data/chunk-000/episode_000000.parquet"
    rows = pq.read_table(path).to_pylist()
    rows[3][column][2] = float("nan")
    pq.write_table(pa.Table.from_pylist(rows), path)
    with pytest.raises(ValueError, match=rf"episode_0 of .*set has NaN or infinite values in {column}: record or"):
        getattr(LeRobotFolder(tmp_path / "set").demos(0)[0], quantity)


def test_a_film_that_is_too_short_is_noticed(tmp_path):
    root = write(tmp_path / "set", 2, video=True)
    film(root / "videos/chunk-000/observation.images.image/episode_000000.mp4", [picture(0, 0, False)] * 4)
    demo = LeRobotFolder(root).demos(0)[0]
    with pytest.raises(ValueError, match="has 4 frames of episode 0, its table has 11 rows"):
        demo.frames("agentview")
