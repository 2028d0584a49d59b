"""Demonstrations of one task, wherever they lie: files in LIBERO's HDF5 layout and LeRobot datasets are read alike."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlt_gym.core.robot_spec import RobotSpec
from rlt_gym.data.lerobot import PROVENANCE, LeRobotDemo, LeRobotFolder, LeRobotSettings, is_lerobot
from rlt_gym.data.libero_hdf5 import ROBOT, Demo, DemoFile, expand_paths


@dataclass(frozen=True)
class DemoSource:
    """
    The demonstrations of one task in one file or dataset.

    :param name: Of the file or folder, for messages.
    :param instruction: Of the task.
    :param made: How they were made, as ``rlt collect`` wrote it: suite, task id, assets, render, ...; else empty.
    :param robot: The robot that they show.
    :param number: Task in a LeRobot dataset, which is not LIBERO's; ``None`` for a file.
    :param demos: Reads them one by one: the arrays of each only while it lasts.
    """

    name: str
    instruction: str
    made: Mapping[str, Any]
    robot: RobotSpec
    number: int | None
    demos: Callable[[], Iterator[Demo | LeRobotDemo]]


def demo_sources(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    lerobot: LeRobotSettings | None = None,
) -> list[DemoSource]:
    """
    Find demonstrations; only headers are read.

    :param paths: HDF5 files, glob patterns or folders of them; folders of LeRobot datasets.
    :param lerobot: How LeRobot datasets are read; ``None`` = with the defaults.
    :return: First the files in sorted order, then each dataset's tasks.
    :raises ValueError: If something is missing or damaged.
    """
    names = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    how = lerobot or LeRobotSettings()
    folders = [Path(name) for name in names if is_lerobot(Path(name))]
    files = [name for name in names if not is_lerobot(Path(name))]
    sources = []
    for path in expand_paths(files) if files or not folders else []:
        with DemoFile(path) as file:
            read = partial(_read_file, path)
            sources.append(DemoSource(path.name, file.instruction, file.env_args, file.robot, None, read))
    for folder in folders:
        dataset = LeRobotFolder(folder, how.lerobot_columns, how.lerobot_rotated, how.lerobot_gripper)
        made = json.loads((folder / PROVENANCE).read_text()) if (folder / PROVENANCE).is_file() else {}
        for number, instruction in sorted(dataset.tasks.items()):
            task_id = made.get("tasks", {}).get(instruction)
            task = made if task_id is None else made | {"task_id": task_id}
            read_task = partial(_read_folder, dataset, number)
            sources.append(DemoSource(folder.name, instruction, task, ROBOT, number, read_task))
    return sources


def _read_file(path: Path) -> Iterator[Demo]:
    with DemoFile(path) as file:
        yield from file


def _read_folder(dataset: LeRobotFolder, number: int) -> Iterator[LeRobotDemo]:
    yield from dataset.demos(number)
