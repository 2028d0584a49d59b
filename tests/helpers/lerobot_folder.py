"""A small LeRobot dataset as it lies on disk in versions 2 and 3, and the same demonstrations in HDF5."""

import io
import json

import imageio
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from offline_helpers import action
from PIL import Image

from rlt_gym.data.libero_hdf5 import DemoWriter

SIZE, FPS = 32, 20
LENGTHS, TASKS = (11, 3, 8), ("do it", "do that", "do it")
NAMES = {
    "openpi": ("image", "wrist_image", "state", "actions"),
    "lerobot": ("observation.images.image", "observation.images.image2", "observation.state", "action"),
    "unusual": ("front", "hand", "joints", "command"),
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


def write_hdf5(folder, failed=(2,)) -> None:
    """The same demonstrations in LIBERO's own layout."""
    for name, demos in (("a", (0, 2)), ("b", (1,))):
        with DemoWriter(folder / f"{name}.hdf5", TASKS[demos[0]]) as writer:
            for demo in demos:
                steps = range(LENGTHS[demo])
                state = np.zeros((len(steps), 8), np.float32)
                state[:, 0], state[:, 1] = steps, demo
                views = [np.stack([picture(demo, t, wrist) for t in steps]) for wrist in (False, True)]
                writer.add(actions_of(demo), state, success=demo not in failed, agentview=views[0], wrist=views[1])
