"""
The settings of a run: plain dataclasses that the command line, YAML files and Python share.

Imports neither torch nor a simulator. Long because the help of each setting of a run is here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, ClassVar

import yaml

from rlt_gym.cluster.connection import RayConfig
from rlt_sb3.experiment.algorithms import RESERVED, algorithm_names, get_algorithm
from rlt_sb3.experiment.imports import HOOKS

#: Choices of ``guard``.
GUARDS = ("warn", "restore")

#: the folder of the configurations that are part of the package
_SHIPPED = files("rlt_sb3.experiment") / "configs"


@dataclass
class EnvConfig:
    """The environment, made by ``gymnasium.make_vec``. ``None`` leaves the environment's own default.

    :param id: id of a registered vector environment with the observations ``z_rl``, ``vla_ref`` and ``proprio``
    :param num_envs: number of simulators; each is a process
    :param suite: LIBERO suite, a name of ``rlt list``
    :param task_ids: numbers of the suite's tasks, ``--env.task_ids 0 1``; None: all of them
    :param chunk_length: control steps per action chunk
    :param vla: frozen VLA: a name or scheme of ``rlt list``, the path of a file that ``rlt train-vla`` wrote, or
        "package.module:Class" of an allowed package (``RLT_ALLOWED_IMPORTS``)
    :param vla_kwargs: further arguments of whoever makes this VLA
    :param rl_token: RL-token encoder: "auto" (the one trained for this VLA), the path of a checkpoint, "mean"
        (ablation: the mean of the VLA's image tokens), "none" (a single zero, for a VLA that gives no tokens), or
        another name or scheme of ``rlt list``
    :param show_tokens: observations also have the VLA's tokens, which ``rlt.policy_kwargs.train_token`` needs
    :param show_pictures: observations also have what the VLA reads, which ``rlt.policy_kwargs.train_vla`` needs
    :param show_task: observations also say which of the suite's tasks is played; the deployment gate and the pull then
        count each task by itself. For several tasks in one run
    :param reward_model: file of ``rlt train-reward`` that decides about success in training episodes; evaluations go by
        the simulator. None: the simulator decides
    :param assets: meshes and textures: "auto", "embedded", "official" or a folder
    :param max_episode_steps: control steps after which an episode is cut off; None: the environment's own default
    :param train_episode_steps: control steps after which a training episode is cut off, at most ``max_episode_steps``;
        None: what the frozen VLA's successes on the selection states take, with some margin
        (:func:`~rlt_sb3.evaluation.horizon.fitting_horizon`), or ``max_episode_steps`` if that is given
    :param image_size: width and height of the camera images in pixels; None: what the VLA needs
    :param render: how images are drawn: "exact" (as LIBERO does), "fast" (simpler robot, rougher edges) or "stock";
        None: as those that the VLA was trained on
    :param device: torch device of the frozen VLA and the RL-token encoder; None: "cpu". The device of what is trained
        is a setting of the algorithm (``rlt.device``)
    :param render_mode: "rgb_array" to be able to film episodes
    :param kwargs: further keyword arguments of ``gymnasium.make_vec``
    """

    id: str = "RLToken-LIBERO-v0"
    num_envs: int = 2
    suite: str | None = None
    task_ids: list[int] | None = None
    chunk_length: int | None = None
    vla: str | None = None
    vla_kwargs: dict[str, Any] | None = None
    rl_token: str | None = None
    show_tokens: bool | None = None
    show_pictures: bool | None = None
    show_task: bool | None = None
    reward_model: str | None = None
    assets: str | None = None
    max_episode_steps: int | None = None
    train_episode_steps: int | None = None
    image_size: int | None = None
    render: str | None = None
    device: str | None = None
    render_mode: str | None = "rgb_array"
    kwargs: dict[str, Any] = field(default_factory=dict)

    def make_kwargs(self) -> dict[str, Any]:
        """Return keyword arguments for ``gymnasium.make_vec``, without the id."""
        special = ("id", "kwargs")
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in special}
        return {key: value for key, value in given.items() if value is not None} | self.kwargs


@dataclass
class RolloutConfig:
    """Where training episodes are played, and whether learning waits for them.

    :param mode: "sync": play a chunk everywhere, then compute the updates for it. "overlap": compute the updates for
        the rows of a chunk while the next one is played. "async": workers play with copies of the actor and wait
        neither for each other nor for the updates; evaluations have ``evaluation.num_envs`` simulators of their own.
        None: what the algorithm's ``train_freq`` says, which is "overlap" for rlt and "sync" for others
    :param workers: number of processes on a Ray cluster, each with its own simulators, frozen VLA and RL-token encoder;
        None: the simulators of ``env.num_envs`` on this machine, without Ray
    :param envs_per_worker: number of simulators of each worker; None: ``env.num_envs``
    :param max_staleness: with "async", chunks of an actor that is more than so many critic updates old are not stored
    """

    mode: str | None = None
    workers: int | None = None
    envs_per_worker: int | None = None
    max_staleness: int = 1000


@dataclass
class EvalSettings:
    """The evaluations of a run.

    :param n_states: number of held-out initial states on which the frozen VLA and the best model are compared
    :param selection_states: number of initial states, none of them held out, on which the best model is chosen during
        training
    :param selection_every: chunks of training between two selection evaluations
    :param videos: write before.mp4 and after.mp4
    :param record_states: number of held-out states that are filmed; the two videos are chosen from them
    :param num_envs: number of simulators used only for evaluation; training episodes are then interrupted only at
        checkpoints, every ``save_every`` chunks. None: evaluation uses the simulators of training, which takes no
        further memory; training episodes are interrupted at each evaluation
    :param vla_of: folder of another run in the same environment, from which the frozen VLA's outcomes are taken, for
        example for further seeds: a VLA without noise does the same again, and one with noise keeps that run's. None:
        the VLA is played
    """

    n_states: int = 50
    selection_states: int = 48
    selection_every: int = 1200
    videos: bool = True
    record_states: int = 6
    num_envs: int | None = None
    vla_of: str | None = None

    def states(self, split: str) -> int:
        """
        Return how many initial states of a split are played.

        :param split: "eval" or "selection"
        """
        return self.selection_states if split == "selection" else self.n_states


@dataclass
class TrainConfig:
    """One run: frozen VLA evaluated, RL-token policy trained online, best model evaluated on the same states, report.

    :param name: name of the run; its folder is ``out/name`` (``name-2`` and so on if that one exists)
    :param out: folder that holds the runs
    :param env: the environment
    :param rollout: where training episodes are played: on this machine, or by workers on a cluster
    :param ray: the cluster
    :param algorithm: a name of ``rlt list``, e.g. "rlt" or "tqc" (sb3-contrib's TQC on the same observations)
    :param algorithms: algorithm -> keyword arguments of its class, which ``rlt train --help`` lists. In a file and on
        the command line each algorithm is a section: ``rlt: {bc_coef: 5}``, ``--rlt.bc_coef 5``. A class is written
        "torch.nn:GELU", a linear schedule ``{start: 20, end: 5, end_fraction: 0.5}``
    :param evaluation: the evaluations
    :param total_chunks: number of chunks to collect, over all simulators; one chunk is one transition
    :param total_control_steps: stop training after this many control steps, over all simulators
    :param max_minutes: stop training after this many minutes, selection evaluations included
    :param save_every: number of chunks between two checkpoints, besides those after selection evaluations; training
        episodes are interrupted there
    :param keep_checkpoints: number of checkpoints that can be resumed; older ones keep only their model
    :param guard: what to do when a selection evaluation is below the frozen VLA's 95 % interval: "warn", or "restore"
        (the best networks so far replace the present ones)
    :param accept_poor_token: train also on an RL token whose report says that it misses a limit of ``rlt probe``
    :param video_every: film every n-th training episode, and every n-th selection state
    :param wandb: keyword arguments of ``wandb.init``, e.g. ``{project: rlt}``, to log to Weights & Biases as well
    :param resume: folder of a run, or one of its checkpoints, to resume
    :param seed: seed of the algorithm and of the initial states of training
    :param torch_threads: threads of torch in the training process; None: one if the networks train on the CPU (the
        simulators need the other cores, and results do not depend on the number of cores), else torch's own default
    :param deterministic: let torch use deterministic operations only; for a GPU, where others round as they come
    :param log_interval: episodes between two rows of metrics.csv
    :param progress: show a progress bar
    """

    name: str = "rlt"
    out: str = "runs"
    env: EnvConfig = field(default_factory=EnvConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    algorithm: str = "rlt"
    algorithms: dict[str, dict[str, Any]] = field(default_factory=dict)
    evaluation: EvalSettings = field(default_factory=EvalSettings)
    total_chunks: int = 7200
    total_control_steps: int | None = None
    max_minutes: float | None = None
    save_every: int | None = None
    keep_checkpoints: int = 2
    guard: str = "warn"
    accept_poor_token: bool = False
    video_every: int | None = None
    wandb: dict[str, Any] | None = None
    resume: str | None = None
    seed: int = 0
    torch_threads: int | None = None
    deterministic: bool = False
    log_interval: int = 4
    progress: bool = True

    #: shipped configurations, which ``--config`` takes by name
    configs: ClassVar[Traversable] = _SHIPPED

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments of the chosen algorithm; the dict may be changed in place."""
        return self.algorithms.setdefault(self.algorithm, {})

    @property
    def mode(self) -> str | None:
        """``rollout.mode``, or the algorithm's own one; None where ``train_freq`` says when updates are computed."""
        if self.rollout.mode is None and "train_freq" not in self.settings:
            return get_algorithm(self.algorithm).modes[0]
        return self.rollout.mode

    @property
    def model_settings(self) -> dict[str, Any]:
        """Keyword arguments with which the chosen algorithm is made: those of its section, and what the mode needs."""
        mode, modes = self.rollout.mode, get_algorithm(self.algorithm).modes
        if mode is None or "train_freq" in self.settings or len(modes) == 1:
            return self.settings
        return self.settings | {"train_freq": [1, "overlap"] if mode == "overlap" else 1}

    @property
    def selections(self) -> int:
        """Selection evaluations of the whole run, if its chunks decide when it ends."""
        return -(-self.total_chunks // self.evaluation.selection_every)

    @property
    def envs_per_worker(self) -> int:
        """Simulators of one worker; without workers, all."""
        return self.rollout.envs_per_worker or self.env.num_envs

    @property
    def num_envs(self) -> int:
        """Simulators of training."""
        return (self.rollout.workers or 1) * self.envs_per_worker

    @property
    def evaluation_envs(self) -> int:
        """Simulators of evaluations, where they have their own."""
        return self.evaluation.num_envs or self.env.num_envs

    def to_dict(self) -> dict[str, Any]:
        """Return what YAML files hold: the settings, each algorithm's as a section (unless it is empty)."""
        data = asdict(self)
        place = list(data).index("algorithms")
        sections = {name: section for name, section in data.pop("algorithms").items() if section}
        items = list(data.items())
        return dict(items[:place]) | sections | dict(items[place:])

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TrainConfig:
        """
        Make a configuration from a dict.

        :param data: settings (missing ones keep their defaults), each registered algorithm's as a section
        :raises TypeError: for an unknown setting
        """
        known = algorithm_names()
        sections = {key: dict(value) for key, value in data.items() if key in known and value}
        return cls(**{key: value for key, value in data.items() if key not in known}, algorithms=sections)

    def check(self) -> None:
        """Refuse what cannot work, before any process starts.

        :raises ValueError: names the setting, what was given and what is allowed
        """
        at_least_one = {
            "env.num_envs": self.env.num_envs,
            "rollout.workers": self.rollout.workers,
            "rollout.envs_per_worker": self.rollout.envs_per_worker,
            "rollout.max_staleness": self.rollout.max_staleness,
            "evaluation.n_states": self.evaluation.n_states,
            "evaluation.selection_states": self.evaluation.selection_states,
            "evaluation.selection_every": self.evaluation.selection_every,
            "evaluation.num_envs": self.evaluation.num_envs,
            "total_chunks": self.total_chunks,
            "total_control_steps": self.total_control_steps,
            "save_every": self.save_every,
            "keep_checkpoints": self.keep_checkpoints,
            "video_every": self.video_every,
            "torch_threads": self.torch_threads,
            "log_interval": self.log_interval,
        }
        for key, value in at_least_one.items():
            if value is not None and value < 1:
                raise ValueError(f"{key} must be at least 1, got {value}.")
        if self.evaluation.num_envs is not None and self.save_every is None:
            raise ValueError(
                "evaluation.num_envs needs save_every, for example 1000: evaluations on separate simulators do not "
                "interrupt training, so no resumable checkpoint is written at them."
            )
        self.ray.check()
        if self.rollout.workers is None and (self.rollout.envs_per_worker is not None or self.ray != RayConfig()):
            raise ValueError("rollout.envs_per_worker and the section ray need rollout.workers, for example 2.")
        self._check_mode()
        if self.max_minutes is not None and self.max_minutes <= 0:
            raise ValueError(f"max_minutes must be positive (or left out for no limit), got {self.max_minutes}.")
        if not self.name or Path(self.name).name != self.name:
            raise ValueError(f"name must be a plain folder name, got {self.name!r}; use out for where runs are kept.")
        algorithm = get_algorithm(self.algorithm)
        for name in self.algorithms:
            get_algorithm(name)
        if self.guard not in GUARDS:
            raise ValueError(f"Unknown guard {self.guard!r}; choose one of {', '.join(GUARDS)}.")
        if (self.video_every is not None or self.evaluation.videos) and self.env.render_mode is None:
            raise ValueError("Videos need env.render_mode 'rgb_array'; or set evaluation.videos and video_every off.")
        hooks = [key for key in HOOKS if self.env.kwargs.get(key) is not None]
        if hooks and not algorithm.learns_from_hooks:
            raise ValueError(
                f"algorithm {self.algorithm!r} cannot learn with env.kwargs {' and '.join(hooks)}: it would store "
                "chunks that were not played as its own. Leave them out, or use 'rlt'."
            )
        policy = self.settings.get("policy_kwargs")
        self._check_training(policy)
        reserved = set(RESERVED) & set(self.settings)
        if reserved:
            raise ValueError(
                f"{self.algorithm} may not contain {sorted(reserved)}: the run sets them itself (seed: use the run's "
                "seed)."
            )
        for key, value in self.to_dict().items():
            _check_plain(key, value)

    def _check_mode(self) -> None:
        """Refuse a mode that does not fit the other settings."""
        mode, modes = self.rollout.mode, get_algorithm(self.algorithm).modes
        if mode is not None and mode not in modes:
            raise ValueError(f"rollout.mode must be one of {', '.join(modes)} with {self.algorithm}, got {mode!r}.")
        if get_algorithm(self.algorithm).wrapper is not None and self.rollout.workers is not None:
            raise ValueError(
                f"{self.algorithm} asks the VLA in this process, and rollout.workers is {self.rollout.workers}: leave "
                "rollout.workers out."
            )
        if mode is not None and len(modes) > 1 and "train_freq" in self.settings:
            raise ValueError(f"rollout.mode {mode!r} sets {self.algorithm}.train_freq itself: leave one of them out.")
        frequency = self.settings.get("train_freq")
        if isinstance(frequency, list | tuple) and "episode" in frequency and self.num_envs > 1:
            raise ValueError(
                f"{self.algorithm}.train_freq must be counted in steps with {self.num_envs} simulators, for example "
                f"[1, 'step'], got {list(frequency)}."
            )
        if mode != "async":
            return
        if self.rollout.workers is None:
            raise ValueError("rollout.mode 'async' needs rollout.workers, for example 2.")
        if self.save_every is None:
            raise ValueError(
                "rollout.mode 'async' needs save_every, for example 1000: its evaluations do not interrupt training, "
                "so no resumable checkpoint is written at them."
            )
        if self.video_every is not None:
            raise ValueError("rollout.mode 'async' does not film training episodes: leave video_every out.")
        policy = self.settings.get("policy_kwargs") or {}
        if policy.get("gripper_flip") == "auto":
            raise ValueError(
                f"{self.algorithm}.policy_kwargs.gripper_flip 'auto' does not work with rollout.mode 'async': give a "
                "number."
            )

    def _check_training(self, policy: Any) -> None:
        """Refuse a token or a VLA that is to learn without what it reads."""
        for trains, shows, what, needed in (
            ("train_token", "show_tokens", "the VLA's tokens", "RL token"),
            ("train_vla", "show_pictures", "pictures", "VLA"),
        ):
            if not isinstance(policy, dict) or policy.get(trains) is None:
                continue
            from_pictures = trains == "train_token" and policy.get("train_vla") is not None
            if self.env.id == EnvConfig.id and not getattr(self.env, shows) and not from_pictures:
                raise ValueError(
                    f"{self.algorithm}.policy_kwargs.{trains} needs {what} in the observations: set env.{shows} to "
                    "true."
                )
            if self.rollout.workers is not None:
                raise ValueError(
                    f"{self.algorithm}.policy_kwargs.{trains} needs the {needed} in this process, and rollout.workers "
                    f"is {self.rollout.workers}: leave one of them out."
                )


def _check_plain(key: str, value: Any) -> None:
    """
    Refuse a value that config.yaml cannot hold.

    :param key: a setting, for the message
    :param value: its value
    :raises ValueError: if config.yaml, without which a run can be neither resumed nor evaluated, cannot hold it
    """
    try:
        yaml.safe_dump(value)
    except yaml.representer.RepresenterError as error:
        raise ValueError(
            f"{key} contains {error.args[-1]!r}, which cannot be written to config.yaml: give numbers, texts, lists "
            "and mappings only; classes as 'torch.nn:GELU', schedules as {start: 60, end: 5}."
        ) from error


@dataclass
class ReportConfig:
    """Write report.html and learning_curve.png of a run again from its files.

    :param run: folder of the run
    :param beside: folders of other runs on the same states, for example the TQC baseline; each gets a row in the table
    """

    run: str
    beside: list[str] | None = None


@dataclass
class ListConfig:
    """Names that settings take.

    :param suite: a LIBERO suite, to list its tasks instead
    """

    suite: str | None = None


def shipped_configs(folder: Traversable = _SHIPPED) -> dict[str, str]:
    """
    List shipped configurations.

    :param folder: where they lie; by default those of ``rlt train``
    :return: name that ``--config`` takes -> the first line of the file, which says what it is for
    """
    shipped = sorted((file for file in folder.iterdir() if file.name.endswith(".yaml")), key=lambda file: file.name)
    lines = {file.name: file.read_text(encoding="utf-8").partition("\n")[0] for file in shipped}
    return {name.removesuffix(".yaml"): line.removeprefix("# ") for name, line in lines.items()}


def config_file(name: str, folder: Traversable = _SHIPPED) -> str:
    """
    Find a configuration file.

    :param name: path of a YAML file, or the name of a shipped configuration; a file that exists wins
    :param folder: where the shipped ones lie
    :return: path of the file
    :raises ValueError: if it is neither; lists the shipped ones
    """
    if Path(name).is_file():
        return name
    names = shipped_configs(folder)
    if name not in names and Path(name).is_dir():
        raise ValueError(f"{name!r} is a folder; --config takes a YAML file.")
    if name not in names:
        raise ValueError(f"There is no file {name!r}, and no shipped configuration of that name: {', '.join(names)}.")
    return str(folder / f"{name}.yaml")


def save_config(config: TrainConfig, path: Path) -> None:
    """
    Write a configuration in the form that ``rlt train --config`` reads.

    :param config: the configuration
    :param path: file
    """
    from rlt_sb3.common.files import replacing

    with replacing(path) as temporary:
        temporary.write_text(yaml.safe_dump(config.to_dict() | {"resume": None}, sort_keys=False))


def load_config(path: Path) -> TrainConfig:
    """
    Read a configuration written by :func:`save_config`; missing settings keep their defaults.

    :param path: file
    :return: the configuration
    :raises ValueError: if the file is missing or has an unknown setting
    """
    if not path.is_file():
        raise ValueError(f"There is no {path}. A run is the folder that `rlt train` wrote, for example runs/demo.")
    data = yaml.safe_load(path.read_text()) or {}
    nested = {"env": EnvConfig, "rollout": RolloutConfig, "ray": RayConfig, "evaluation": EvalSettings}
    try:
        parts = {key: cls(**data.pop(key)) for key, cls in nested.items() if key in data}
        return TrainConfig.from_dict(data | parts)
    except TypeError as error:
        raise ValueError(f"{path} is no configuration of a run: {error}.") from error
