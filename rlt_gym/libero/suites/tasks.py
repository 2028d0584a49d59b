"""LIBERO's suites, tasks, horizons and initial states, read without importing the simulator.

``libero.libero.benchmark`` would pull in torch (1-3 s, 490 MB), so the task table is loaded by file path and the
initial states, which are numpy pickles inside a zip, are read without ``torch.load``.
"""

from __future__ import annotations

import importlib.util
import pickle
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from rlt_gym.libero.suites.folders import libero_root
from rlt_gym.workers.backend import split_seed
from rlt_gym.workers.named import is_integer

#: Control steps (20 Hz) after which an episode is truncated. LIBERO itself never truncates; these are the limits
#: of the OpenVLA evaluation protocol, set above the longest demonstration of each suite.
SUITE_HORIZONS = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}

#: The same in the training split, by default. Training counts a time-out as a failure, so a shorter attempt gives the
#: learner its answer sooner, and an episode that went wrong rarely recovers. About two thirds of LIBERO's limits;
#: ``libero_spatial`` and ``libero_goal`` have the value of the published results.
TRAIN_HORIZONS = {
    "libero_spatial": 160,
    "libero_object": 200,
    "libero_goal": 160,
    "libero_10": 380,
    "libero_90": 290,
}


@dataclass(frozen=True)
class LiberoTask:
    """
    One task of a suite.

    :param suite: Name of the suite.
    :param task_id: Index of the task in the suite.
    :param name: LIBERO's name, that of the task's files.
    :param instruction: What the robot is told to do.
    """

    suite: str
    task_id: int
    name: str
    instruction: str

    @property
    def bddl_file(self) -> Path:
        """File of the task's scene and goal."""
        return libero_root() / "bddl_files" / self.suite / f"{self.name}.bddl"

    @property
    def init_states_file(self) -> Path:
        """File of LIBERO's fixed initial states."""
        return libero_root() / "init_files" / self.suite / f"{self.name}.pruned_init"


@lru_cache(maxsize=None)
def _task_map() -> dict[str, list[str]]:
    path = libero_root() / "benchmark" / "libero_suite_task_map.py"
    spec = importlib.util.spec_from_file_location("_rlt_libero_task_map", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.libero_task_map


def _instruction(name: str) -> str:
    """LIBERO's own rule (``benchmark.grab_language_from_filename``): LIBERO-100 names start with a scene label."""
    if name[0].isupper():
        start = name.find("SCENE")
        name = name[start + (8 if "SCENE10" in name else 7) :]
    return " ".join(name.split("_"))


def get_task(suite: str, task_id: int) -> LiberoTask:
    """
    Look a task up.

    :param suite: One of :data:`SUITE_HORIZONS`.
    :param task_id: Index of the task inside the suite.
    :return: The task.
    :raises ValueError: Unknown suite or task.
    """
    if suite not in SUITE_HORIZONS:
        raise ValueError(f"Unknown LIBERO suite {suite!r}. Available: {', '.join(SUITE_HORIZONS)}")
    names = _task_map()[suite]
    if not is_integer(task_id) or not 0 <= task_id < len(names):
        raise ValueError(f"Unknown task {task_id!r} of {suite}. Available: integers 0..{len(names) - 1}")
    return LiberoTask(suite, int(task_id), names[task_id], _instruction(names[task_id]))


def get_tasks(suite: str, task_ids: Sequence[int] | None = None) -> list[LiberoTask]:
    """
    Look tasks up.

    :param suite: Name of the suite.
    :param task_ids: Which tasks, in this order; ``None`` for the whole suite.
    :return: The tasks.
    :raises ValueError: Unknown suite or task, no task, or a task named twice.
    """
    if task_ids is None:
        get_task(suite, 0)  # the clear error for an unknown suite
        task_ids = range(len(_task_map()[suite]))
    if isinstance(task_ids, str) or not isinstance(task_ids, (Sequence, np.ndarray)):
        raise ValueError(f"task_ids must be a list of integers, got {task_ids!r}")
    if len(task_ids) == 0 or len(set(task_ids)) != len(task_ids):
        raise ValueError(f"task_ids must name at least one task, each once, got {list(task_ids)}")
    return [get_task(suite, task_id) for task_id in task_ids]


@lru_cache(maxsize=None)
def load_init_states(task: LiberoTask) -> np.ndarray:
    """
    Read LIBERO's initial states of a task.

    :param task: The task.
    :return: Float64 ``(50, 1 + nq + nv)``: MuJoCo time, qpos, qvel.
    :raises FileNotFoundError: The installed LIBERO lacks the file.
    """
    # The file is part of the installed package, which is trusted as much as its code: unpickling is no new risk.
    with zipfile.ZipFile(task.init_states_file) as archive:
        name = next(n for n in archive.namelist() if n.endswith("data.pkl"))
        return np.asarray(pickle.loads(archive.read(name)))


def episode_seed(task: LiberoTask, split: str, index: int) -> int:
    """
    Seed for everything LIBERO draws at a reset: fixture poses (which initial states do not cover) and placements.

    LIBERO's own 50 initial states per task are held out for evaluation; those that follow them, and those of the other
    splits, are sampled from LIBERO's placement regions with these seeds.

    :param task: The task.
    :param split: One of :data:`~rlt_gym.workers.backend.SPLITS`.
    :param index: Number of the initial state inside the split.
    :return: The seed, in 0..2**32-1.
    """
    return split_seed(split, list(SUITE_HORIZONS).index(task.suite), task.task_id, index)
