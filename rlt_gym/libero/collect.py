"""``rlt collect``: demonstrations of the scripted expert and rollouts of policies, as files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rlt_gym.core.episodes import SPLIT_SIZES
from rlt_gym.data.lerobot_writer import LeRobotWriter
from rlt_gym.data.libero_hdf5 import DemoWriter
from rlt_gym.libero.experts import check_expert, check_motion
from rlt_gym.libero.rollouts import Policy, RolloutRecorder, play_vla
from rlt_gym.libero.suites.tasks import SUITE_HORIZONS, LiberoTask, get_tasks
from rlt_gym.libero.vector_env import LiberoVectorEnv
from rlt_gym.rl_token.env import RLTokenVectorEnv

#: Episodes come from the upper end of the training split, which online training draws from only rarely.
_FIRST_INDEX = SPLIT_SIZES["train"] // 2
#: Most episodes that are played for one success of a policy.
_TRIES = 10

FORMATS = ("hdf5", "lerobot")
#: Settings that only these policies have; "run" is the folder of a run.
ONLY = {
    "expert": ("noise", "speed"),
    "vla": ("vla", "vla_kwargs", "chunk_length"),
    "run": ("model",),
    "expert, vla": ("suite", "image_size", "render", "assets"),
    "vla, run": ("successes_only", "intervention", "intervention_kwargs", "max_episode_steps", "device"),
}


@dataclass
class CollectConfig:
    """
    Settings of ``rlt collect``.

    :param policy: Who plays: "expert", the scripted expert; "vla", a frozen VLA's own chunks; or the folder of a run
        of ``rlt train``, what its model plays without noise.
    :param suite: LIBERO suite; ``None`` = libero_goal, of a run its own.
    :param task_ids: Tasks of the suite; ``None`` = 1, 2, 4, 6, 8, of a run its own.
    :param demos: Episodes per task. The expert's are successes, those of other policies only with ``successes_only``.
    :param successes_only: Keep only successes of a VLA or run, and play until there are ``demos`` of them.
    :param out: Folder for one ``<suite>_<task>.hdf5`` per task; with ``format="lerobot"`` the folder of the dataset,
        which must not exist.
    :param format: ``"hdf5"``, LIBERO's own layout, or ``"lerobot"``, one LeRobot dataset of all tasks for
        ``lerobot-train``, which needs the extra ``lerobot`` and holds successes only.
    :param vla: Frozen VLA that "vla" plays, named as in ``--env.vla``; ``None`` = mini.
    :param vla_kwargs: Further arguments of whoever makes this VLA.
    :param chunk_length: Control steps that are played of each chunk of this VLA; ``None`` = all.
    :param model: Which model of a run: "best", "last", or the path of a saved model; ``None`` = the best, or the last
        one if there is no best one.
    :param intervention: Who may take over from a VLA or run, "module:Class", see :mod:`rlt_gym.libero.interventions`;
        ``None`` = nobody, also where somebody did in the practice of the run.
    :param intervention_kwargs: Keyword arguments of this class.
    :param max_episode_steps: Control steps before an episode of a VLA or run fails; ``None`` = the suite's horizon, of
        a run that of its evaluations.
    :param noise: Disturbances of the expert's motion, as a share of the action range; the recorded action is the
        expert's own, undisturbed one, so that demonstrations contain recoveries (DART, arXiv 1703.09327).
    :param speed: Greatest length of the position part of the expert's actions, in (0, 1]. Human demonstrations are
        slower than the expert's 0.9.
    :param assets: As for ``LIBERO-v0``; ``None`` = "auto", of a run its own.
    :param image_size: Side of the pictures in pixels; ``None`` = 128, of a VLA or run what the VLA needs.
    :param render: ``"exact"``, ``"fast"`` or ``"stock"``, as for ``LIBERO-v0``; ``None`` = "fast", of a VLA or run what
        the VLA needs.
    :param num_envs: Worker processes.
    :param device: Where VLA, RL token and model run; ``None`` = the CPU, of a run where its VLA ran.
    :param seed: Seed of initial states and disturbances.
    :param progress: Show a progress bar.
    """

    policy: str = "expert"
    suite: str | None = None
    task_ids: list[int] | None = None
    demos: int = 50
    successes_only: bool = False
    out: str = "demos"
    format: str = "hdf5"
    vla: str | None = None
    vla_kwargs: dict[str, Any] | None = None
    chunk_length: int | None = None
    model: str | None = None
    intervention: str | None = None
    intervention_kwargs: dict[str, Any] | None = None
    max_episode_steps: int | None = None
    noise: float = 0.3
    speed: float = 0.9
    assets: str | None = None
    image_size: int | None = None
    render: str | None = None
    num_envs: int = 2
    device: str | None = None
    seed: int = 0
    progress: bool = True

    def __post_init__(self) -> None:
        if self.demos < 1:
            raise ValueError(f"demos is {self.demos}; it must be at least 1")
        if self.format not in FORMATS:
            raise ValueError(f"format is {self.format!r}; it may be {', '.join(FORMATS)}")
        kind = self.policy if self.policy in ("expert", "vla") else "run"
        if kind == "run" and not Path(self.policy).is_dir():
            raise ValueError(
                f"policy is {self.policy!r}; it may be 'expert', 'vla' or the folder of a run of rlt train"
            )
        defaults = {entry.name: entry.default for entry in fields(self)}
        for owners, names in ONLY.items():
            changed = [name for name in names if getattr(self, name) != defaults[name]]
            if kind not in owners.split(", ") and changed:
                raise ValueError(f"{', '.join(changed)} cannot be used with policy {self.policy!r}: leave out")
        if kind != "run":
            self.suite = self.suite or "libero_goal"
            self.task_ids = [1, 2, 4, 6, 8] if self.task_ids is None else self.task_ids
            self.assets = self.assets or "auto"
            get_tasks(self.suite, self.task_ids)
        if kind == "expert":
            self.image_size, self.render = self.image_size or 128, self.render or "fast"
            check_motion(self.noise, self.speed)
        elif self.format == "lerobot" and (not self.successes_only or self.intervention is not None):
            raise ValueError(
                "format is 'lerobot', and such a dataset has no place for failures and intervention labels: set "
                "successes_only and no intervention, or format='hdf5'"
            )


def collect(config: CollectConfig) -> list[Path]:
    """
    Record demonstrations of the scripted expert, or rollouts of a frozen VLA.

    :param config: What to record.
    :return: The files written, one per task, or the folder of the LeRobot dataset.
    :raises ValueError: There is no expert for one of the tasks; the VLA does not fit or succeeds too rarely; the
        dataset exists already, or LeRobot is missing; the policy is a run, which ``rlt_sb3`` plays.
    :raises RuntimeError: The expert fails more often than it succeeds.
    """
    if config.policy not in ("expert", "vla"):
        raise ValueError(f"policy is {config.policy!r}; runs are played by rlt_sb3.experiment.collect (rlt collect)")
    assert config.suite is not None
    tasks = get_tasks(config.suite, config.task_ids)
    if config.policy == "expert":
        check_expert(config.suite, [task.task_id for task in tasks])
        return _write(config, tasks, lambda: _Expert(config, tasks))
    return collect_rollouts(
        config, tasks, lambda: (make_vla_env(config, tasks), play_vla, {"vla": config.vla or "mini"})
    )


def make_vla_env(config: CollectConfig, tasks: Sequence[LiberoTask]) -> RLTokenVectorEnv:
    """
    Start simulators that a frozen VLA looks at, without an RL token.

    :param config: What to record.
    :param tasks: Tasks of one suite.
    :return: The environment.
    :raises ValueError: If an argument is wrong; no process has been started then.
    """
    from rlt_gym.libero.make import make_rl_token_libero_vec
    from rlt_gym.vla.registry import load_vla

    vla = load_vla(config.vla or "mini", config.device or "cpu", config.vla_kwargs)
    env = make_rl_token_libero_vec(
        num_envs=config.num_envs,
        suite=tasks[0].suite,
        task_ids=[task.task_id for task in tasks],
        chunk_length=config.chunk_length or vla.spec.horizon,
        vla=vla,
        rl_token="none",
        device=config.device or "cpu",
        image_size=config.image_size,
        render=config.render,
        assets=config.assets,
        **recording_kwargs(config, tasks[0].suite, config.chunk_length or vla.spec.horizon),
    )
    assert isinstance(env, RLTokenVectorEnv)
    return env


def recording_kwargs(config: CollectConfig, suite: str, chunk_length: int) -> dict[str, Any]:
    """
    Arguments of ``LIBERO-v0`` for recording.

    :param config: What to record.
    :param suite: LIBERO suite.
    :param chunk_length: Control steps of a chunk.
    :return: Observe each control step, play as long as evaluations do, let someone take over.
    """
    return {
        "init_states": "train",
        "obs_stride": 1 if chunk_length > 1 else None,
        "max_episode_steps": config.max_episode_steps or SUITE_HORIZONS[suite],
        "train_episode_steps": None,
        "intervention": config.intervention,
        "intervention_kwargs": config.intervention_kwargs,
    }


def collect_rollouts(
    config: CollectConfig,
    tasks: Sequence[LiberoTask],
    start: Callable[[], tuple[RLTokenVectorEnv, Policy, dict[str, Any]]],
) -> list[Path]:
    """
    Record rollouts of any policy over a frozen VLA.

    :param config: What to record.
    :param tasks: Tasks to play, of one suite.
    :param start: Makes environment (see :class:`~rlt_gym.libero.rollouts.RolloutRecorder`) and policy, and says what
        the files tell about the policy.
    :return: The files written, one per task, or the folder of the LeRobot dataset.
    :raises ValueError: ``successes_only``, and the policy succeeds too rarely.
    """
    return _write(config, tasks, lambda: _Rollouts(config, *start()))


class _Expert:
    """Plays the scripted expert inside the workers."""

    def __init__(self, config: CollectConfig, tasks: Sequence[LiberoTask]) -> None:
        assert config.suite and config.assets and config.image_size and config.render
        self.config = config
        self.env = LiberoVectorEnv(
            config.num_envs,
            config.suite,
            [task.task_id for task in tasks],
            assets=config.assets,
            image_size=config.image_size,
            render=config.render,
        )
        self.made = {"assets": self.env.assets.kind}

    def episodes(self, task: LiberoTask) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield as many successes as are wanted, each with the index of its initial state."""
        config, env = self.config, self.env
        tried = solved = 0
        while solved < config.demos:
            if tried >= 2 * config.demos + 2 * env.num_envs:
                raise RuntimeError(
                    f"The expert solved only {solved} of {tried} episodes of {task.name} (task {task.task_id}): lower "
                    "noise, or leave the task out"
                )
            indices = _indices(config, tried, env.num_envs)
            episodes = self._record(task, indices)
            tried += env.num_envs
            for index, episode in zip(indices, episodes, strict=True):
                if episode["success"] and solved < config.demos:
                    yield index, episode
                    solved += 1

    def _record(self, task: LiberoTask, indices: Sequence[int]) -> list[dict[str, Any]]:
        config = self.config
        arguments = [
            {
                "task_id": task.task_id,
                "arguments": {
                    "index": index,
                    "seed": index + 100_000 * config.seed,
                    "noise": config.noise,
                    "speed": config.speed,
                    "max_steps": SUITE_HORIZONS[task.suite],
                },
            }
            for index in indices
        ]
        return self.env.call_workers("rlt_gym.libero.experts.record:record_demo", arguments)


class _Rollouts:
    """Plays a policy over a frozen VLA."""

    def __init__(self, config: CollectConfig, env: RLTokenVectorEnv, policy: Policy, said: dict[str, Any]) -> None:
        self.config, self.env = config, env
        self._recorder = RolloutRecorder(env, policy)
        self.made = said | self._recorder.made

    def episodes(self, task: LiberoTask) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield as many episodes as are wanted, each with the index of its initial state."""
        config = self.config
        count = min(config.demos * (_TRIES if config.successes_only else 1), _FIRST_INDEX)
        listed = [(task.task_id, index) for index in _indices(config, 0, count)]
        kept = 0
        for episode in self._recorder.play(listed, config.seed):
            if episode.success or not config.successes_only:
                kept += 1
                pictures = {key: episode.observations[key] for key in ("agentview", "wrist", "proprio")}
                labels = {"success": episode.success, "intervention": episode.intervention}
                yield episode.init_index, {"actions": episode.actions, **pictures, **labels}
            if kept == config.demos:
                return
        raise ValueError(
            f"The policy solved only {kept} of {count} episodes of {task.name} (task {task.task_id}), and "
            f"{config.demos} successes are wanted: leave successes_only or the task out"
        )


def _indices(config: CollectConfig, start: int, count: int) -> list[int]:
    """Training states of a seed, from number ``start`` on."""
    return [_FIRST_INDEX + (config.seed * 1000 + start + number) % _FIRST_INDEX for number in range(count)]


def _write(config: CollectConfig, tasks: Sequence[LiberoTask], start: Callable[[], _Expert | _Rollouts]) -> list[Path]:
    """Start the simulators, write the episodes of all tasks, end the simulators."""
    if config.format == "hdf5":
        return _write_files(config, tasks, start())
    with LeRobotWriter(config.out) as writer:
        player = start()
        try:
            writer.made = _made(config, tasks[0].suite, player)
            writer.made["tasks"] = {task.instruction: task.task_id for task in tasks}
            for task in tasks:
                for _, episode in _shown(config, task, player):
                    arrays = {name: episode[name] for name in ("actions", "agentview", "wrist", "proprio")}
                    writer.add(task.instruction, **arrays)
        finally:
            player.env.close()
    return [writer.path]


def _write_files(config: CollectConfig, tasks: Sequence[LiberoTask], player: _Expert | _Rollouts) -> list[Path]:
    paths = []
    try:
        for task in tasks:
            path = Path(config.out) / f"{task.suite}_{task.task_id}.hdf5"
            path.parent.mkdir(parents=True, exist_ok=True)
            made = _made(config, task.suite, player) | {"task_id": task.task_id}
            with DemoWriter(path, task.instruction, made) as writer:
                for index, episode in _shown(config, task, player):
                    writer.add(**episode, init_index=index)
            paths.append(path)
    finally:
        player.env.close()
    return paths


def _made(config: CollectConfig, suite: str, player: _Expert | _Rollouts) -> dict[str, Any]:
    """How the episodes are made, for the files."""
    return {**asdict(config), "suite": suite, **player.made}


def _shown(
    config: CollectConfig, task: LiberoTask, player: _Expert | _Rollouts
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Show a bar, which counts successes too."""
    solved = 0
    with tqdm(total=config.demos, desc=task.instruction, unit="episode", disable=not config.progress) as bar:
        for index, episode in player.episodes(task):
            yield index, episode
            solved += episode["success"]
            bar.set_postfix(successes=solved, refresh=False)
            bar.update()
