"""Demonstrations in LeRobot's format, as it lies on disk in versions 2 and 3, pictures in the tables or as videos."""

import io
import json
import sys

import imageio
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from offline_helpers import C, CountingVLA, ReadingEncoder, action, space
from PIL import Image

from rlt_gym.core.gripper import Gripper
from rlt_gym.data.lerobot import LeRobotFolder
from rlt_gym.data.libero_hdf5 import DemoWriter
from rlt_gym.rl_token.encode_demos import EncodeDemosConfig, encode_demos
from rlt_sb3.common.replay.offline import load_transitions

SIZE, FPS = 32, 20
LENGTHS, TASKS = (11, 3, 8), ("do it", "do that", "do it")
NAMES = {
    "openpi": ("image", "wrist_image", "state", "actions"),
    "lerobot": ("observation.images.image", "observation.images.image2", "observation.state", "action"),
}


def picture(demo: int, step: int, wrist: bool) -> np.ndarray:
    """As LIBERO gives it: the place of the bright quarter says which way is up, the shade which step it is."""
    frame = np.full((SIZE, SIZE, 3), 20 + 12 * step + 70 * demo, dtype=np.uint8)
    frame[: SIZE // 2, : SIZE // 2] = 0 if wrist else 250
    return frame


def actions_of(demo: int) -> np.ndarray:
    """The gripper is open (-1) in the first half of a demonstration and closes in the second."""
    rows = np.array([[action(demo, t)] * 7 for t in range(LENGTHS[demo])], np.float32)
    rows[:, 6] = np.where(np.arange(len(rows)) < len(rows) / 2, -1, 1)
    return rows


def upright(frame: np.ndarray) -> np.ndarray:
    return frame[::-1, ::-1]


def png(frame: np.ndarray) -> dict:
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(frame)).save(buffer, format="PNG")
    return {"bytes": buffer.getvalue(), "path": "frame.png"}


def film(path, frames) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    quality = ["-crf", "4", "-g", "2"]
    with imageio.get_writer(path, fps=FPS, codec="libx264", macro_block_size=8, ffmpeg_params=quality) as writer:
        for frame in frames:
            writer.append_data(np.ascontiguousarray(frame))


def write(root, version: int, names: str = "lerobot", video: bool = False, success: bool = True):
    """Three episodes of two tasks; in version 3 all of them in one file, and in one film."""
    agentview, wrist, state, act = NAMES[names]
    pictures = {agentview: False, wrist: True}
    tasks = sorted(set(TASKS))
    kind = "video" if video else "image"
    features = {name: {"dtype": kind, "shape": [SIZE, SIZE, 3]} for name in pictures}
    features |= {state: {"dtype": "float32", "shape": [8]}, act: {"dtype": "float32", "shape": [7]}}
    tables, rows, index = [], [], 0
    for demo, length in enumerate(LENGTHS):
        states = np.zeros((length, 8), np.float32)
        states[:, 0], states[:, 1] = np.arange(length), demo
        columns = {
            state: states.tolist(),
            act: actions_of(demo).tolist(),
            "timestamp": [t / FPS for t in range(length)],
            "frame_index": list(range(length)),
            "episode_index": [demo] * length,
            "index": list(range(index, index + length)),
            "task_index": [tasks.index(TASKS[demo])] * length,
        }
        if not video:
            for name, hand in pictures.items():
                columns[name] = [png(upright(picture(demo, t, hand))) for t in range(length)]
        if not success:
            columns["next.success"] = [demo != 2 and t == length - 1 for t in range(length)]
        tables.append(pa.table(columns))
        row = {"episode_index": demo, "tasks": [TASKS[demo]], "length": length}
        if version == 3:
            row |= {"data/chunk_index": 0, "data/file_index": 0, "dataset_from_index": index}
            row |= {"dataset_to_index": index + length, "stats/action/mean": [0.0] * 7}
            for name in pictures if video else ():
                row |= {f"videos/{name}/chunk_index": 0, f"videos/{name}/file_index": 0}
                row |= {f"videos/{name}/from_timestamp": index / FPS}
                row |= {f"videos/{name}/to_timestamp": (index + length) / FPS}
        rows.append(row)
        index += length
    meta = root / "meta"
    meta.mkdir(parents=True)
    info = {"codebase_version": "v2.1" if version == 2 else "v3.0", "fps": FPS, "features": features}
    info |= {"chunks_size": 1000, "total_episodes": len(LENGTHS)}
    if version == 2:
        info["data_path"] = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
        info["video_path"] = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
        (root / "data" / "chunk-000").mkdir(parents=True)
        for demo, table in enumerate(tables):
            pq.write_table(table, root / f"data/chunk-000/episode_{demo:06d}.parquet")
            for name, hand in pictures.items() if video else ():
                path = root / f"videos/chunk-000/{name}/episode_{demo:06d}.mp4"
                film(path, [upright(picture(demo, t, hand)) for t in range(LENGTHS[demo])])
        (meta / "tasks.jsonl").write_text(
            "\n".join(json.dumps({"task_index": i, "task": task}) for i, task in enumerate(tasks))
        )
        (meta / "episodes.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    else:
        info["data_path"] = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
        info["video_path"] = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
        (root / "data" / "chunk-000").mkdir(parents=True)
        pq.write_table(pa.concat_tables(tables), root / "data/chunk-000/file-000.parquet")
        for name, hand in pictures.items() if video else ():
            frames = [upright(picture(d, t, hand)) for d, length in enumerate(LENGTHS) for t in range(length)]
            film(root / f"videos/{name}/chunk-000/file-000.mp4", frames)
        # as pandas writes a frame whose index are the instructions
        table = pa.table({"task_index": list(range(len(tasks))), "__index_level_0__": tasks})
        pq.write_table(table, meta / "tasks.parquet")
        (meta / "episodes" / "chunk-000").mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows), meta / "episodes/chunk-000/file-000.parquet")
    (meta / "info.json").write_text(json.dumps(info))
    return root


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
    for name, demos in (("a", (0, 2)), ("b", (1,))):
        with DemoWriter(tmp_path / f"{name}.hdf5", TASKS[demos[0]]) as writer:
            for demo in demos:
                steps = range(LENGTHS[demo])
                state = np.zeros((len(steps), 8), np.float32)
                state[:, 0], state[:, 1] = steps, demo
                views = [np.stack([picture(demo, t, wrist) for t in steps]) for wrist in (False, True)]
                writer.add(actions_of(demo), state, success=demo != 2, agentview=views[0], wrist=views[1])

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
