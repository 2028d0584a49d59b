"""Demonstrations of several tasks as arrays, as the training of a VLA and of an RL token reads them."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from rlt_gym.core.robot_spec import RobotSpec
from rlt_gym.data.lerobot import LeRobotDemo, LeRobotSettings
from rlt_gym.data.libero_hdf5 import Demo
from rlt_gym.data.sources import DemoSource, demo_sources


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
class DemoRows:
    """
    Observations of several tasks' demonstrations without their pictures, all rows joined along one axis.

    :param proprio: float32 (R, P).
    :param actions: float32 (A, d), every control step's action, also where observations were strided.
    :param action_row: int64 (R,), the row of ``actions`` that belongs to each row.
    :param action_end: int64 (R,), one past the last row of ``actions`` of the row's demonstration.
    :param task: int64 (R,), index into ``instructions``.
    :param demo: int64 (R,), number of the row's demonstration, counted over all files.
    :param step: int64 (R,), control step of the observation in its demonstration.
    :param success: bool (R,), whether the row's demonstration solved its task.
    :param intervention: bool (R,), whether someone took over from the policy at this control step; false where nobody
        said it.
    :param object_positions: float32 (R, n, 3), NaN where a file has fewer objects or none.
    :param instructions: One per file, and one per task of a dataset.
    :param files: Name and number of demonstrations of each file or task of a dataset.
    """

    proprio: np.ndarray
    actions: np.ndarray
    action_row: np.ndarray
    action_end: np.ndarray
    task: np.ndarray
    demo: np.ndarray
    step: np.ndarray
    success: np.ndarray
    intervention: np.ndarray
    object_positions: np.ndarray
    instructions: list[str]
    files: dict[str, int]

    def __len__(self) -> int:
        return len(self.task)

    @property
    def num_demos(self) -> int:
        """Number of demonstrations."""
        return int(self.demo.max()) + 1 if len(self) else 0

    def take(self, rows: np.ndarray) -> "DemoRows":
        """
        Choose rows.

        :param rows: Their numbers (n,).
        :return: These rows; actions, instructions and files are the same.
        """
        columns: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(DemoRows)}
        whole = ("actions", "instructions", "files")
        return DemoRows(**{name: value if name in whole else value[rows] for name, value in columns.items()})

    def chunks(self, rows: np.ndarray, horizon: int) -> tuple[np.ndarray, np.ndarray]:
        """
        Action-chunk targets; past the demonstration's end its last action is repeated and masked out.

        :param rows: Rows, int (B,).
        :param horizon: Chunk length T in control steps.
        :return: Chunks float32 (B, T, d) and mask bool (B, T), True = a real action.
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


@dataclass
class DemoSet(DemoRows):
    """
    Demonstrations of several tasks with their pictures in memory.

    :param pictures: For each camera its frames as the environment gives them, uint8 (R, size, size, 3).
    :param robot: The robot that they show.
    """

    pictures: dict[str, np.ndarray]
    robot: RobotSpec


class DemoReader:
    """
    Reads demonstrations: the numbers of all at once, the pictures of one demonstration after another.

    :param paths: Files, glob patterns or folders, also of LeRobot datasets.
    :param max_demos: Most demonstrations per file or task of a dataset; ``None`` = all.
    :param stride: Keep one observation in this many; all actions are kept.
    :param successes_only: Leave out demonstrations marked ``success=False``.
    :param lerobot: How LeRobot datasets are read; ``None`` = with the defaults.
    :raises ValueError: If files are missing or damaged.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        max_demos: int | None = None,
        stride: int = 1,
        successes_only: bool = True,
        lerobot: LeRobotSettings | None = None,
    ) -> None:
        self.sources = demo_sources(paths, lerobot)
        self.max_demos = max_demos
        self.stride = stride
        self.successes_only = successes_only

    def _demos(self, source: DemoSource) -> Iterator[Demo | LeRobotDemo]:
        chosen = (demo for demo in source.demos() if not self.successes_only or _succeeded(demo))
        return islice(chosen, self.max_demos)

    @cached_property
    def failures(self) -> int:
        """Number of demonstrations in all files that did not solve their task."""
        return sum(not _succeeded(demo) for source in self.sources for demo in source.demos())

    @cached_property
    def robot(self) -> RobotSpec:
        """
        The robot that the demonstrations show.

        :raises ValueError: If they show several robots.
        """
        robots = {source.robot: source.name for source in self.sources}
        if len(robots) > 1:
            shown = ", ".join(f"{name} shows {robot.name!r}" for robot, name in robots.items())
            raise ValueError(f"Demonstrations of one robot are needed, and {shown}: leave some of them out.")
        return next(iter(robots))

    @cached_property
    def edge(self) -> int:
        """
        Height in pixels of the first demonstration's frames.

        :raises ValueError: If there is no demonstration.
        """
        for source in self.sources:
            for demo in self._demos(source):
                return demo.frame_shape[0]
        raise ValueError(self._nothing())

    def _nothing(self) -> str:
        names = ", ".join(source.name for source in self.sources)
        return f"{names}: no usable demonstration in these files; write some with `rlt collect`."

    @cached_property
    def rows(self) -> DemoRows:
        """
        All but the pictures.

        :raises ValueError: If there is no demonstration.
        """
        columns: dict[str, list[np.ndarray]] = {
            key: []
            for key in (
                "proprio", "actions", "action_row", "action_end", "task", "demo", "step", "success", "intervention",
                "object_positions",
            )
        }  # fmt: skip
        files: dict[str, int] = {}
        num_demos = num_actions = 0
        for task, source in enumerate(self.sources):
            before = num_demos
            for demo in self._demos(source):
                length = len(demo)
                steps = np.arange(0, length, self.stride)
                objects = demo.object_positions
                columns["object_positions"].append(
                    np.zeros((len(steps), 0, 3), np.float32) if objects is None else objects[steps]
                )
                columns["proprio"].append(demo.proprio[steps])
                columns["actions"].append(demo.actions)
                columns["action_row"].append(num_actions + steps)
                columns["action_end"].append(np.full(len(steps), num_actions + length))
                columns["task"].append(np.full(len(steps), task))
                columns["demo"].append(np.full(len(steps), num_demos))
                columns["step"].append(steps)
                columns["success"].append(np.full(len(steps), _succeeded(demo)))
                taken = demo.intervention
                columns["intervention"].append(np.zeros(len(steps), bool) if taken is None else taken[steps])
                num_demos += 1
                num_actions += length
            name = source.name if source.number is None else f"{source.name}: {source.instruction}"
            files[name] = num_demos - before
        if not num_demos:
            raise ValueError(self._nothing())
        width = max(block.shape[1] for block in columns["object_positions"])
        columns["object_positions"] = [
            np.pad(block, ((0, 0), (0, width - block.shape[1]), (0, 0)), constant_values=np.nan)
            for block in columns["object_positions"]
        ]
        joined = {key: np.concatenate(blocks) for key, blocks in columns.items()}
        return DemoRows(**joined, instructions=[source.instruction for source in self.sources], files=files)

    def frames(
        self, cameras: Sequence[str], size: int, start: int = 0, stop: int | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        """
        Read pictures, those of one demonstration at a time.

        :param cameras: Keys of cameras of the robot.
        :param size: Frames are average-pooled to this edge in pixels.
        :param start: First row.
        :param stop: One past the last row; ``None`` = to the end.
        :return: For each demonstration with such rows, in their order: frames of each camera, uint8 (r, size, size, 3).
        """
        first = 0
        for source in self.sources:
            for demo in self._demos(source):
                count = -(-len(demo) // self.stride)
                wanted = slice(max(0, start - first), count if stop is None else min(count, stop - first))
                first += count
                if wanted.start < wanted.stop:
                    frames = {camera: demo.frames(camera, self.stride)[wanted] for camera in cameras}
                    yield {camera: resize_frames(array, size) for camera, array in frames.items()}
                if stop is not None and first >= stop:
                    return


def _succeeded(demo: Demo | LeRobotDemo) -> bool:
    return bool(demo.attrs.get("success", True))


def load_demo_set(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    image_size: int = 64,
    max_demos: int | None = None,
    frame_stride: int = 1,
    successes_only: bool = True,
    lerobot: LeRobotSettings | None = None,
) -> DemoSet:
    """
    Read demonstrations with their pictures.

    :param paths: Files, glob patterns or folders, also of LeRobot datasets.
    :param image_size: Frames are average-pooled to this edge in pixels while loading.
    :param max_demos: Most demonstrations per file or task of a dataset; ``None`` = all.
    :param frame_stride: Keep one observation in this many; all actions are kept.
    :param successes_only: Leave out demonstrations marked ``success=False``.
    :param lerobot: How LeRobot datasets are read; ``None`` = with the defaults.
    :return: The set.
    :raises ValueError: If files are missing, damaged or hold no usable demonstration.
    """
    reader = DemoReader(paths, max_demos, frame_stride, successes_only, lerobot)
    cameras = reader.robot.camera_keys
    rows = reader.rows
    pictures = {camera: np.zeros((len(rows), image_size, image_size, 3), np.uint8) for camera in cameras}
    start = 0
    for block in reader.frames(cameras, image_size):
        count = len(block[cameras[0]])
        for camera, array in block.items():
            pictures[camera][start : start + count] = array
        start += count
    return DemoSet(**vars(rows), pictures=pictures, robot=reader.robot)
