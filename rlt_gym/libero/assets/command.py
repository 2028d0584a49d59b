"""``rlt assets``: what is there, what is missing, fetch it, try it, look at it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from rlt_gym.libero.assets.needed import missing_by_suite
from rlt_gym.libero.assets.resolve import official_locations, resolve_assets
from rlt_gym.libero.suites.tasks import SUITE_HORIZONS, get_tasks
from rlt_gym.libero.worker.libero_import import prepare_libero


@dataclass
class AssetsConfig:
    """
    Settings of ``rlt assets``.

    :param action: ``check`` lists what is missing of the official assets, per suite (exit status 1 if anything is);
        ``download`` fetches them with LIBERO's own function; ``verify`` tries every task on a folder: initial states,
        rest, joints, predicates of the goal, a rollout and a reset; ``sheet`` draws one picture of every task.
    :param assets: ``auto``, ``official``, ``embedded`` or a folder. ``check`` and ``download`` look at official ones.
    :param suites: Which suites; all of them by default.
    :param task_ids: Which tasks of each suite; all of them by default (``verify`` only).
    :param states: How many of LIBERO's 50 initial states ``verify`` lets come to rest.
    :param rollout: Control steps of random actions that ``verify`` plays, 0 for none.
    :param folder: Where ``download`` puts the assets (LIBERO's own cache by default), where ``sheet`` writes.
    :param size: Side in pixels of a picture of ``sheet``.
    """

    action: Literal["check", "download", "verify", "sheet"]
    assets: str = "auto"
    suites: list[str] = field(default_factory=lambda: list(SUITE_HORIZONS))
    task_ids: list[int] | None = None
    states: int = 2
    rollout: int = 40
    folder: str | None = None
    size: int = 160

    def __post_init__(self) -> None:
        if self.action not in _ACTIONS:
            raise ValueError(f"action must be one of {', '.join(_ACTIONS)}, got {self.action!r}")
        for suite in self.suites:
            get_tasks(suite, self.task_ids)
        if not 1 <= self.states <= 50:
            raise ValueError(f"states must be in 1..50, got {self.states}")


def _report_missing(folder: Path, suites: list[str]) -> int:
    """Return how many tasks lack something."""
    total = 0
    for suite, lacking in missing_by_suite(folder, suites).items():
        tasks = len(get_tasks(suite))
        print(f"  {suite:<15} {tasks - len(lacking)}/{tasks} tasks complete")
        files = sorted({file for missing in lacking.values() for file in missing})
        for file in files:
            without = [task for task, missing in lacking.items() if file in missing]
            print(f"    missing {file} (tasks {', '.join(map(str, without))})")
        total += len(lacking)
    return total


def check(config: AssetsConfig) -> int:
    """
    Look for the official assets and list what they lack.

    :param config: Settings of the command.
    :return: Exit status: 0 if a complete folder was found, else 1.
    """
    if config.assets in ("auto", "official"):
        places = official_locations()
    elif config.assets == "embedded":
        places = [("embedded", resolve_assets("embedded").path)]
    else:
        places = [("given folder", Path(config.assets).expanduser())]
    complete = False
    for what, folder in places:
        if not folder.is_dir():
            print(f"{what} {folder}: does not exist")
            continue
        print(f"{what} {folder}:")
        complete = _report_missing(folder, config.suites) == 0
        if complete or what.startswith("$"):
            break  # this is the folder that assets="auto" takes, or complains about
    if complete:
        return 0
    print("The official assets are not complete. `rlt assets download` fetches them; every task also runs on the")
    print('embedded assets (assets="embedded", what "auto" uses without official ones).')
    return 1


def download(config: AssetsConfig) -> int:
    """
    Fetch the official assets.

    :param config: Settings of the command.
    :return: Exit status 0.
    :raises ValueError: If the hub's client is missing, no hub is reachable, or something is missing afterwards.
    """
    prepare_libero(resolve_assets("embedded").path)
    from libero.libero.utils import download_utils

    if not download_utils.HUGGINGFACE_AVAILABLE:
        raise ValueError("LIBERO downloads with huggingface_hub, which is not installed: pip install huggingface_hub")
    try:
        folder = Path(download_utils.download_assets_from_huggingface(config.folder))
    except Exception as error:
        raise ValueError(
            f"the download of {download_utils.HF_ASSETS_REPO_ID} failed ({type(error).__name__}: {error}). "
            "Is a Hugging Face hub reachable from here (HF_ENDPOINT, proxy)? If not, copy the folder from a machine "
            'that has one and set RLT_LIBERO_ASSETS to it, or use assets="embedded".'
        ) from error
    if _report_missing(folder, config.suites):
        # LIBERO's function takes a folder with the right subfolders for a finished download.
        raise ValueError(f"{folder} is incomplete, as an interrupted download leaves it: delete it and try again")
    if config.folder is not None:
        print(f"Set RLT_LIBERO_ASSETS={folder.resolve()} to have it found.")
    return 0


def _rollout(suite: str, task_id: int, steps: int) -> list[str]:
    """Return problems of a rollout of random actions with a picture at its end, and of the reset after it."""
    from rlt_gym.libero.worker.simulator import LiberoSimulator

    simulator = LiberoSimulator(suite, task_id, image_size=64, render="fast")
    try:
        first = simulator.reset("eval", 0)
        actions = np.random.default_rng(task_id).uniform(-1, 1, (steps, 7))
        result = simulator.step_chunk(actions)
        again = simulator.reset("eval", 0)
    finally:
        simulator.close()
    problems = []
    if not result.success and len(result.step_rewards) != steps:
        problems.append(f"the rollout ended after {len(result.step_rewards)} of {steps} steps")
    if not np.isfinite(result.observation["proprio"]).all():
        problems.append("the rollout ended in numbers that are not finite")
    if np.ptp(result.observation["agentview"]) == 0:
        problems.append("the picture is blank")
    if not all(np.array_equal(first[name], again[name]) for name in first):
        problems.append("the same reset gave another observation")
    return problems


def verify(config: AssetsConfig) -> int:
    """
    Try every task on a folder of assets.

    :param config: Settings of the command.
    :return: Exit status: 0 if every task passed, else 1.
    """
    from rlt_gym.libero.assets.verify import verify_task

    assets = resolve_assets(config.assets)
    prepare_libero(assets.path)
    print(f"{assets.kind} assets in {assets.path}")
    states = tuple(round(i) for i in np.linspace(0, 49, config.states))
    failed = 0
    for suite in config.suites:
        passed, start = 0, time.process_time()
        tasks = get_tasks(suite, config.task_ids)
        for task in tasks:
            problems = verify_task(suite, task.task_id, states).problems
            if config.rollout:
                problems += _rollout(suite, task.task_id, config.rollout)
            for problem in problems:
                print(f"  {suite} {task.task_id} {task.name}: {problem}", flush=True)
            passed += not problems
        failed += len(tasks) - passed
        seconds = time.process_time() - start
        print(f"{suite:<15} {passed}/{len(tasks)} tasks pass ({seconds:.0f} s of CPU time)", flush=True)
    return int(failed > 0)


def sheet(config: AssetsConfig) -> int:
    """
    Draw contact sheets.

    :param config: Settings of the command.
    :return: Exit status 0.
    """
    from rlt_gym.libero.assets.sheet import write_sheet

    assets = resolve_assets(config.assets)
    prepare_libero(assets.path)
    for suite in config.suites:
        path = Path(config.folder or ".") / f"{suite}.jpg"
        write_sheet(suite, path, config.size, columns=5 if len(get_tasks(suite)) <= 20 else 9)
        print(f"{path} ({path.stat().st_size // 1024} KB, {assets.kind} assets)", flush=True)
    return 0


_ACTIONS: dict[str, Callable[[AssetsConfig], int]] = {
    "check": check,
    "download": download,
    "verify": verify,
    "sheet": sheet,
}


def assets(config: AssetsConfig) -> int:
    """
    ``rlt assets``.

    :param config: What to do.
    :return: Exit status.
    """
    return _ACTIONS[config.action](config)
