"""Demonstrations of several tasks as arrays, as the training of a VLA and of an RL token reads them."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from rlt_gym.data.lerobot import LeRobotDemo
from rlt_gym.data.libero_hdf5 import CAMERAS, Demo
from rlt_gym.data.sources import DemoSource, demo_sources
from rlt_gym.data.storage import IN_MEMORY, ArrayStorage


def resize_frames(frames: np.ndarray, size: int) -> np.ndarray:
    """
    Average-pool square frames down to ``size``.

    :param frames: uint8 (T, S, S, 3), ``S`` a multiple of ``size``.
    :param size: Wanted edge in pixels.
    :return: uint8 (T, size, size, 3).
    :raises ValueError: If ``S`` is not a multiple of ``size``.
    """
    edge = frames.shape[1]
    if frames.shape[1] != frames.shape[2] or edge % size:
        raise ValueError(
            f"Frames are {frames.shape[1:3]}; they must be square with an edge that is a multiple of {size}."
        )
    if edge == size:
        return frames
    factor = edge // size
    # adding shifted views is several times faster than a sum over the axes of a reshaped array
    total = np.full((len(frames), size, size, 3), factor * factor // 2, dtype=np.uint32 if factor > 15 else np.uint16)
    for dy in range(factor):
        for dx in range(factor):
            total += frames[:, dy::factor, dx::factor]
    return (total // (factor * factor)).astype(np.uint8)


@dataclass
class DemoSet:
    """
    Demonstrations of several tasks, all rows joined along one axis.

    :param agentview: Frames as LIBERO gives them, uint8 (R, size, size, 3).
    :param wrist: The same for the wrist camera.
    :param proprio: float32 (R, 8).
    :param actions: float32 (A, 7), every control step's action, also where frames were strided.
    :param action_row: int64 (R,), the row of ``actions`` that belongs to each frame row.
    :param action_end: int64 (R,), one past the last row of ``actions`` of the row's demonstration.
    :param task: int64 (R,), index into ``instructions``.
    :param demo: int64 (R,), number of the row's demonstration, counted over all files.
    :param instructions: One per file, and one per task of a dataset.
    :param object_positions: float32 (R, n, 3), NaN where a file has fewer objects or none.
    :param files: Name and number of demonstrations of each file or task of a dataset.
    """

    agentview: np.ndarray
    wrist: np.ndarray
    proprio: np.ndarray
    actions: np.ndarray
    action_row: np.ndarray
    action_end: np.ndarray
    task: np.ndarray
    demo: np.ndarray
    instructions: list[str]
    object_positions: np.ndarray
    files: dict[str, int]

    def __len__(self) -> int:
        return len(self.task)

    @property
    def num_demos(self) -> int:
        """Number of demonstrations."""
        return int(self.demo.max()) + 1 if len(self) else 0

    def without_frames(self) -> "DemoSet":
        """
        Let go of the frames, which take up most of the memory.

        :return: The same set with frames of no row.
        """
        nothing = np.zeros((0, *self.agentview.shape[1:]), np.uint8)
        return replace(self, agentview=nothing, wrist=nothing)

    def chunks(self, rows: np.ndarray, horizon: int) -> tuple[np.ndarray, np.ndarray]:
        """
        Action-chunk targets; past the demonstration's end its last action is repeated and masked out.

        :param rows: Rows, int (B,).
        :param horizon: Chunk length T in control steps.
        :return: Chunks float32 (B, T, 7) and mask bool (B, T), True = a real action.
        """
        index = self.action_row[rows][:, None] + np.arange(horizon)
        last = self.action_end[rows][:, None] - 1
        return self.actions[np.minimum(index, last)], index <= last

    def split(self, held_out: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """
        Split rows by whole demonstrations: neighboring frames never fall on both sides.

        :param held_out: Fraction of each task's demonstrations to hold out (at least one if > 0 and a task has two).
        :param seed: Seed of the choice.
        :return: Rows for training and held-out rows.
        """
        rng = np.random.default_rng(seed)
        chosen: list[int] = []
        for task in range(len(self.instructions)):
            demos = np.unique(self.demo[self.task == task])
            count = min(len(demos) - 1, max(1, round(held_out * len(demos)))) if held_out > 0 else 0
            chosen.extend(rng.choice(demos, size=max(count, 0), replace=False).tolist())
        held = np.isin(self.demo, chosen)
        return np.flatnonzero(~held), np.flatnonzero(held)


def frame_edge(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> int:
    """
    Size of the frames in demonstration files.

    :param paths: Files, glob patterns or folders, also of LeRobot datasets.
    :return: Height in pixels of the first demonstration's frames.
    :raises ValueError: If files are missing or damaged, or have no demonstration.
    """
    sources = demo_sources(paths)
    for source in sources:
        for demo in source.demos():
            return demo.frame_shape[0]
    names = ", ".join(source.name for source in sources)
    raise ValueError(f"{names}: no demonstration in these files; write some with `rlt collect`.")


def load_demo_set(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    image_size: int = 64,
    max_demos: int | None = None,
    frame_stride: int = 1,
    successes_only: bool = True,
    storage: ArrayStorage = IN_MEMORY,
) -> DemoSet:
    """
    Read demonstrations.

    :param paths: Files, glob patterns or folders, also of LeRobot datasets.
    :param image_size: Frames are average-pooled to this edge in pixels while loading.
    :param max_demos: Most demonstrations per file or task of a dataset; ``None`` = all.
    :param frame_stride: Keep one observation in this many; all actions are kept.
    :param successes_only: Leave out demonstrations marked ``success=False``.
    :param storage: Where the frames lie.
    :return: The set.
    :raises ValueError: If files are missing, damaged or hold no usable demonstration.
    """
    columns: dict[str, list[np.ndarray]] = {
        key: [] for key in ("proprio", "actions", "action_row", "action_end", "task", "demo", "objects")
    }
    instructions, files = [], {}
    sources = demo_sources(paths)
    count = 0
    for source in sources:
        count += sum(-(-len(demo) // frame_stride) for demo in _chosen(source, max_demos, successes_only))
    shape = (count, image_size, image_size, 3)
    frames = {camera: storage.zeros(shape, np.uint8) for camera in CAMERAS}
    num_rows = num_demos = num_actions = 0
    for task, source in enumerate(sources):
        before = num_demos
        instructions.append(source.instruction)
        for demo in _chosen(source, max_demos, successes_only):
            length = len(demo)
            rows = np.arange(0, length, frame_stride)
            objects = demo.object_positions
            columns["objects"].append(np.zeros((len(rows), 0, 3), np.float32) if objects is None else objects[rows])
            for camera, array in frames.items():
                array[num_rows : num_rows + len(rows)] = resize_frames(demo.frames(camera, frame_stride), image_size)
            columns["proprio"].append(demo.proprio[rows])
            columns["actions"].append(demo.actions)
            columns["action_row"].append(num_actions + rows)
            columns["action_end"].append(np.full(len(rows), num_actions + length))
            columns["task"].append(np.full(len(rows), task))
            columns["demo"].append(np.full(len(rows), num_demos))
            num_rows += len(rows)
            num_demos += 1
            num_actions += length
        name = source.name if source.number is None else f"{source.name}: {source.instruction}"
        files[name] = num_demos - before
    if not num_demos:
        raise ValueError(f"{', '.join(files)}: no usable demonstration in these files; write some with `rlt collect`.")
    width = max(block.shape[1] for block in columns["objects"])
    columns["objects"] = [
        np.pad(block, ((0, 0), (0, width - block.shape[1]), (0, 0)), constant_values=np.nan)
        for block in columns["objects"]
    ]
    joined = {key: np.concatenate(blocks) for key, blocks in columns.items()}
    joined["object_positions"] = joined.pop("objects")
    return DemoSet(instructions=instructions, files=files, **frames, **joined)


def _chosen(source: DemoSource, max_demos: int | None, successes_only: bool) -> Iterator[Demo | LeRobotDemo]:
    chosen = (demo for demo in source.demos() if not successes_only or bool(demo.attrs.get("success", True)))
    return islice(chosen, max_demos)
