"""The settings of rlt eval and rlt compare."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from rlt_gym.cluster.connection import RayConfig

#: Settings of ``rlt eval`` that only a run has, and those that only a VLA has.
ONLY_RUN = ("model", "n_states", "split", "beside_vla", "all_checkpoints", "max_parallel")
ONLY_VLA = (
    "vla_kwargs", "suites", "episodes", "protocol", "chunk_length", "max_episode_steps", "image_size", "render",
    "assets", "seed", "films",
)  # fmt: skip


@dataclass
class EvalConfig:
    """Evaluate the models of a run, or any VLA on LIBERO without a run.

    ``rlt eval RUN``: the architecture comes from the run itself. ``rlt eval --vla NAME``: the VLA's own chunks; started
    again after an interruption, the command goes on where it was.

    :param run: folder of a finished or interrupted run; ``rlt eval RUN`` is enough
    :param model: of a run: "best", "last", "vla", or the path of a saved model
    :param tasks: numbers of the suite's tasks to evaluate, ``--tasks 0 1``; they need not be training tasks. None: the
        run's, of a VLA all
    :param n_states: of a run: number of initial states, over all tasks; None: the run's
    :param split: of a run: set of initial states, "eval" or "selection"; None: "eval", with ``all_checkpoints``
        "selection"
    :param num_envs: number of simulators; None: the run's, of a VLA 4
    :param beside_vla: of a run: compare with the frozen VLA on the same states; it is played unless the run has its
        results
    :param all_checkpoints: of a run: evaluate every checkpoint instead of one model
    :param max_parallel: number of checkpoints evaluated at once, each in a process with its own simulators
    :param perturbations: strengths of what changes from episode to episode, ``{light: 1}``; kinds are light, color,
        texture, camera, friction and placement. Beside the model of a run, the VLA plays in the same changed scenes
    :param shard: "k/n": evaluate on only the k-th of n parts of the states
    :param workers: play in this many parts, each a task on a Ray cluster with its own simulators, and join them
    :param ray: the cluster
    :param merge: files of all parts, to join into one evaluation: ``rlt eval --merge FILE FILE ...``
    :param device: torch device of VLA and model; None: the run's ``env.device`` for the VLA, "cpu" otherwise
    :param out: JSON file to write; of a run with a CSV beside it, None: ``RUN/eval-MODEL-SPLIT.json``; of a VLA with an
        HTML page and films beside it, None: ``eval-VLA-PROTOCOL.json``
    :param progress: show a progress bar
    :param vla: a frozen VLA, named as in ``--env.vla``, instead of a run
    :param vla_kwargs: further arguments of whoever makes this VLA
    :param suites: of a VLA: LIBERO's suites, ``--suites libero_goal libero_10``; None: the four of LIBERO's score
    :param episodes: of a VLA: initial states per task, from number 0 on; None: the protocol's
    :param protocol: of a VLA: whose horizons, states, pictures and replanning: "rlt" (None), "openpi", "lerobot" or
        "vla-eval"
    :param chunk_length: of a VLA: control steps played before it is asked again; None: the protocol's
    :param max_episode_steps: of a VLA: horizon in control steps of all suites; None: the protocol's
    :param image_size: of a VLA: side of the pictures in pixels; None: the protocol's
    :param render: of a VLA: "exact", "stock" or "fast" pictures; None: the protocol's
    :param assets: of a VLA: meshes and textures: "auto" (None), "embedded", "official" or a folder
    :param seed: of a VLA: seed of its noise, if it has any; None: the protocol's
    :param films: of a VLA: most films of failures per suite, one per task
    """

    run: str | None = field(default=None, metadata={"positional": True})
    model: str = "best"
    tasks: list[int] | None = None
    n_states: int | None = None
    split: str | None = None
    num_envs: int | None = None
    beside_vla: bool = True
    all_checkpoints: bool = False
    max_parallel: int = 1
    perturbations: dict[str, float] | None = None
    shard: str | None = None
    workers: int | None = None
    ray: RayConfig = field(default_factory=RayConfig)
    merge: list[str] | None = None
    device: str | None = None
    out: str | None = None
    progress: bool = True
    vla: str | None = None
    vla_kwargs: dict[str, Any] | None = None
    suites: list[str] | None = None
    episodes: int | None = None
    protocol: str | None = None
    chunk_length: int | None = None
    max_episode_steps: int | None = None
    image_size: int | None = None
    render: str | None = None
    assets: str | None = None
    seed: int | None = None
    films: int = 3

    def check(self) -> None:
        """Refuse settings that do not go together.

        :raises ValueError: names them
        """
        given = [name for name in ("run", "vla", "merge") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                "Give one of a run (rlt eval RUN), --vla NAME and --merge FILES, got "
                f"{' and '.join(given) or 'none of them'}."
            )
        defaults = {entry.name: entry.default for entry in fields(self)}
        only_vla = [name for name in ONLY_VLA if name != "films"]  # of parts, they are joined
        of_merge = (*ONLY_RUN, *only_vla, "tasks", "perturbations", "shard", "workers")
        others = {"run": ONLY_VLA, "vla": ONLY_RUN, "merge": of_merge}[given[0]]
        changed = [name for name in others if getattr(self, name) != defaults[name]]
        if changed:
            what = {"run": "a run", "vla": "a VLA", "merge": "merge"}[given[0]]
            raise ValueError(f"{', '.join(changed)} cannot be used with {what}: leave {_them(changed)} out.")
        if self.tasks is not None and len(set(self.tasks)) != max(len(self.tasks), 1):
            raise ValueError(f"tasks must be one or more different numbers, for example --tasks 0 1, got {self.tasks}.")
        if self.num_envs is not None and self.num_envs < 1:
            raise ValueError(f"num_envs must be at least 1, got {self.num_envs}.")
        self.ray.check()
        if self.workers is None and self.ray != RayConfig():
            raise ValueError("The section ray needs workers, for example --workers 2.")
        if self.workers is not None and (self.workers < 1 or self.all_checkpoints or self.shard is not None):
            raise ValueError(
                f"workers must be at least 1, without all_checkpoints and shard, got {self.workers}: leave those out."
            )
        if self.max_parallel < 1 or (self.max_parallel > 1 and not self.all_checkpoints):
            raise ValueError(
                "max_parallel must be 1, or with all_checkpoints a larger number of processes, got "
                f"{self.max_parallel}."
            )
        if self.perturbations is not None and self.all_checkpoints:
            raise ValueError("perturbations cannot be used with all_checkpoints: leave one of them out.")
        if self.all_checkpoints and self.shard is not None:
            raise ValueError(
                "shard cannot be used with all_checkpoints, whose table has whole evaluations only: leave it out "
                "(max_parallel shares that work among processes)."
            )

    @property
    def scenes(self) -> str:
        """What the names of files say of ``perturbations``: "-light1-camera0.5"."""
        return "".join(f"-{kind}{strength:g}" for kind, strength in (self.perturbations or {}).items())


def _them(names: list[str]) -> str:
    return "it" if len(names) == 1 else "them"


@dataclass
class CompareConfig:
    """Compare two evaluations of ``rlt eval --vla`` pair by pair: on the same suites, tasks and initial states.

    :param first: JSON file of an evaluation
    :param second: JSON file of another one
    :param any_protocol: also compare evaluations under different protocols
    :param out: JSON file to write; None: none
    """

    first: str
    second: str
    any_protocol: bool = False
    out: str | None = None
