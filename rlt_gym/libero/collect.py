"""``rlt collect``: demonstrations of the scripted expert, recorded inside the workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rlt_gym.core.episodes import SPLIT_SIZES
from rlt_gym.data.lerobot_writer import LeRobotWriter
from rlt_gym.data.libero_hdf5 import DemoWriter
from rlt_gym.libero.experts import check_expert, check_motion
from rlt_gym.libero.suites.tasks import SUITE_HORIZONS, LiberoTask, get_tasks
from rlt_gym.libero.vector_env import LiberoVectorEnv

#: Demonstrations come from the upper end of the training split, which online training draws from only rarely.
_FIRST_INDEX = SPLIT_SIZES["train"] // 2


FORMATS = ("hdf5", "lerobot")


@dataclass
class CollectConfig:
    """
    Settings of :func:`collect`.

    :param suite: LIBERO suite.
    :param task_ids: Tasks of the suite.
    :param demos: Successful demonstrations per task.
    :param out: Folder for one ``<suite>_<task>.hdf5`` per task; with ``format="lerobot"`` the folder of the dataset,
        which must not exist.
    :param format: ``"hdf5"``, LIBERO's own layout, or ``"lerobot"``, one LeRobot dataset of all tasks for
        ``lerobot-train``, which needs the extra ``lerobot``.
    :param noise: Disturbances of the expert's motion, as a share of the action range; the recorded action is the
        expert's own, undisturbed one, so that demonstrations contain recoveries (DART, arXiv 1703.09327).
    :param speed: Greatest length of the position part of the expert's actions, in (0, 1]. Human demonstrations are
        slower than the expert's 0.9.
    :param assets: As for ``LIBERO-v0``.
    :param image_size: Side of the pictures in pixels.
    :param render: ``"exact"``, ``"fast"`` or ``"stock"``, as for ``LIBERO-v0``.
    :param num_envs: Worker processes.
    :param seed: Seed of initial states and disturbances.
    """

    suite: str = "libero_goal"
    task_ids: list[int] = field(default_factory=lambda: [1, 2, 4, 6, 8])
    demos: int = 50
    out: str = "demos"
    format: str = "hdf5"
    noise: float = 0.3
    speed: float = 0.9
    assets: str = "auto"
    image_size: int = 128
    render: str = "fast"
    num_envs: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        get_tasks(self.suite, self.task_ids)
        if self.demos < 1:
            raise ValueError(f"demos is {self.demos}; it must be at least 1")
        check_motion(self.noise, self.speed)
        if self.format not in FORMATS:
            raise ValueError(f"format is {self.format!r}; it may be {', '.join(FORMATS)}")


def collect(config: CollectConfig) -> list[Path]:
    """
    Record demonstrations of the scripted expert.

    :param config: What to record.
    :return: The files written, one per task, or the folder of the LeRobot dataset.
    :raises ValueError: There is no expert for one of the tasks; the dataset exists already, or LeRobot is missing.
    :raises RuntimeError: The expert fails more often than it succeeds.
    """
    tasks = get_tasks(config.suite, config.task_ids)
    check_expert(config.suite, [task.task_id for task in tasks])
    if config.format == "hdf5":
        with _simulators(config, tasks) as (env, made):
            return [_write_file(env, task, config, made) for task in tasks]
    with LeRobotWriter(config.out) as writer, _simulators(config, tasks) as (env, made):
        writer.made = {**made, "tasks": {task.instruction: task.task_id for task in tasks}}
        for task in tasks:
            for _, episode in _episodes(env, task, config):
                arrays = {name: episode[name] for name in ("actions", "agentview", "wrist", "proprio")}
                writer.add(task.instruction, **arrays)
    return [writer.path]


@contextmanager
def _simulators(config: CollectConfig, tasks: Sequence[LiberoTask]) -> Iterator[tuple[LiberoVectorEnv, dict[str, Any]]]:
    """Start workers; yield them and how the demonstrations are made."""
    env = LiberoVectorEnv(
        config.num_envs,
        config.suite,
        [task.task_id for task in tasks],
        assets=config.assets,
        image_size=config.image_size,
        render=config.render,
    )
    try:
        yield env, {**asdict(config), "assets": env.assets.kind}
    finally:
        env.close()


def _write_file(env: LiberoVectorEnv, task: LiberoTask, config: CollectConfig, made: dict[str, Any]) -> Path:
    path = Path(config.out) / f"{task.suite}_{task.task_id}.hdf5"
    path.parent.mkdir(parents=True, exist_ok=True)
    with DemoWriter(path, task.instruction, {**made, "task_id": task.task_id}) as writer:
        for index, episode in _episodes(env, task, config):
            writer.add(**episode, init_index=index)
    return path


def _episodes(env: LiberoVectorEnv, task: LiberoTask, config: CollectConfig) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield as many successes as are wanted, each with the index of its initial state."""
    tried = solved = 0
    with tqdm(total=config.demos, desc=task.instruction, unit="demo") as bar:
        while solved < config.demos:
            if tried >= 2 * config.demos + 2 * env.num_envs:
                raise RuntimeError(
                    f"The expert solved only {solved} of {tried} episodes of {task.name} (task {task.task_id}): lower "
                    "noise, or leave the task out"
                )
            indices = [
                _FIRST_INDEX + (config.seed * 1000 + tried + env_id) % _FIRST_INDEX for env_id in range(env.num_envs)
            ]
            episodes = _record(env, task, indices, config)
            tried += env.num_envs
            for index, episode in zip(indices, episodes, strict=True):
                if episode["success"] and solved < config.demos:
                    yield index, episode
                    solved += 1
                    bar.update()


def _record(
    env: LiberoVectorEnv, task: LiberoTask, indices: Sequence[int], config: CollectConfig
) -> list[dict[str, Any]]:
    arguments = [
        {
            "task_id": task.task_id,
            "arguments": {
                "index": index,
                "seed": index + 100_000 * config.seed,
                "noise": config.noise,
                "speed": config.speed,
                "max_steps": SUITE_HORIZONS[config.suite],
            },
        }
        for index in indices
    ]
    return env.call_workers("rlt_gym.libero.experts.record:record_demo", arguments)
