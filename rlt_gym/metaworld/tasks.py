"""Meta-World's tasks and robot, known without importing the simulator."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlt_gym.core.robot_spec import Camera, ProprioPart, RobotSpec
from rlt_gym.workers.named import is_integer

_MT50 = (
    "assembly basketball bin-picking box-close button-press-topdown button-press-topdown-wall button-press "
    "button-press-wall coffee-button coffee-pull coffee-push dial-turn disassemble door-close door-lock door-open "
    "door-unlock hand-insert drawer-close drawer-open faucet-open faucet-close hammer handle-press-side handle-press "
    "handle-pull-side handle-pull lever-pull pick-place-wall pick-out-of-hole pick-place plate-slide plate-slide-side "
    "plate-slide-back plate-slide-back-side peg-insert-side peg-unplug-side soccer stick-push stick-pull push "
    "push-wall push-back reach reach-wall shelf-place sweep-into sweep window-open window-close"
)
_MT10 = (
    "reach push pick-place door-open drawer-open drawer-close button-press-topdown peg-insert-side window-open "
    "window-close"
)
#: Names of Meta-World's environments by suite, in Meta-World's own order.
SUITES = {"MT10": tuple(f"{name}-v3" for name in _MT10.split()), "MT50": tuple(f"{name}-v3" for name in _MT50.split())}

#: Control steps after which an episode is truncated: Meta-World's own limit, and a shorter one in training, about twice
#: what its experts take.
HORIZON, TRAIN_HORIZON = 500, 200

SAWYER = RobotSpec(
    name="sawyer",
    cameras=(Camera("corner2"), Camera("gripperPOV")),
    proprio=(
        # meters in the world frame
        ProprioPart("position", 3, center=(0.0, 0.6, 0.2), scale=(0.2, 0.2, 0.15)),
        # 0 is closed, 1 is open
        ProprioPart("opening", 1, center=(0.5,), scale=(0.5,)),
    ),
    action_names=("x", "y", "z", "gripper"),
    control_frequency=80.0,
    gripper_index=3,
    control_mode="relative",
)


@dataclass(frozen=True)
class MetaWorldTask:
    """
    One task of a suite.

    :param task_id: Index of the task in the suite.
    :param name: Meta-World's name of the environment.
    """

    task_id: int
    name: str

    @property
    def instruction(self) -> str:
        """What the robot is told to do: the words of the name."""
        return self.name.removesuffix("-v3").replace("-", " ")


def get_tasks(suite: str, task_ids: Sequence[int] | None = None) -> list[MetaWorldTask]:
    """
    Look tasks up.

    :param suite: A name of :data:`SUITES`.
    :param task_ids: Which tasks, in this order; ``None`` for the whole suite.
    :return: The tasks.
    :raises ValueError: Unknown suite or task, no task, or a task named twice.
    :raises ImportError: Meta-World is not installed.
    """
    if importlib.util.find_spec("metaworld") is None:
        raise ImportError("Meta-World is not installed: run `pip install 'rlt[metaworld]'`")
    if suite not in SUITES:
        raise ValueError(f"Unknown Meta-World suite {suite!r}. Available: {', '.join(SUITES)}")
    names = SUITES[suite]
    given = task_ids.tolist() if isinstance(task_ids, np.ndarray) else task_ids
    chosen = range(len(names)) if given is None else given
    known = isinstance(chosen, Sequence) and all(is_integer(task) and 0 <= task < len(names) for task in chosen)
    if not known or not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(f"task_ids must be different integers 0..{len(names) - 1} of {suite}, got {given!r}")
    return [MetaWorldTask(int(task_id), names[task_id]) for task_id in chosen]
