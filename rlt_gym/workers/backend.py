"""What a worker process plays: a class that makes simulators, named by its owner.

``rlt_gym.workers`` knows no benchmark. The owner of the workers names a :class:`Backend` as ``"module:Class"``; the
worker imports it and asks it for a :class:`Simulator` of each task. A second simulator is therefore one new folder with
two classes. A backend's module runs in the worker's interpreter: Python 3.8, NumPy and what the simulator needs.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, field
from typing import Any, Callable, Collection, Protocol, TypedDict

import numpy as np

from rlt_gym.workers.named import check_sendable, import_folder, load_named, split_name

#: What may decide about a control step: gets the action of the chunk, returns the one to execute.
Choose = Callable[[np.ndarray], np.ndarray]


@dataclass
class ChunkResult:
    """
    What one chunk did.

    :param observation: After the last executed step: pictures uint8 (height, width, 3) and small arrays, by key.
    :param step_rewards: float32 (k,), one per executed control step.
    :param success: Whether the task's goal is reached.
    :param inner: Observations at the steps asked for that came before the last executed one.
    """

    observation: dict[str, np.ndarray]
    step_rewards: np.ndarray
    success: bool
    inner: list[dict[str, np.ndarray]] = field(default_factory=list)


class Simulator(Protocol):
    """
    One task's simulator in a worker. Whatever it raises ends the worker's episode, and the worker is replaced.

    It may have an attribute ``rests_open``. If this is true, it is not closed while simulators of other tasks play.
    """

    def reset(self, split: str, index: int) -> dict[str, np.ndarray]:
        """
        Start an episode; the same arguments give the same episode on any worker.

        :param split: Name of the set of initial states.
        :param index: Number of the initial state in it.
        :return: The first observation.
        """
        ...

    def episode_seed(self, split: str, index: int) -> int:
        """
        Compute the seed of an episode.

        :param split: As in :meth:`reset`.
        :param index: As in :meth:`reset`.
        :return: Seed of that episode. The randomness of hooks comes from it too.
        """
        ...

    def step_chunk(
        self,
        actions: np.ndarray,
        *,
        observe_at: Collection[int] = (),
        choose: Choose | None = None,
        until_success: bool = True,
    ) -> ChunkResult:
        """
        Play a chunk of control steps.

        :param actions: float (k, A); played until the goal is reached.
        :param observe_at: Numbers (from 1) of the control steps inside the chunk after which to observe as well.
        :param choose: Asked before each control step what to do instead of its action.
        :param until_success: False: all of the actions are played, whether the goal is reached or not, since somebody
            else decides about success. The result then says whether it is reached at the end.
        :return: What it did.
        """
        ...

    def frame(self, size: int) -> np.ndarray:
        """
        Draw the scene for people.

        :param size: Side in pixels.
        :return: Upright picture of the scene for people, uint8 (size, size, 3).
        """
        ...

    def close(self) -> None:
        """
        Free what only one simulator of a process may have at a time (a GL context).

        Called when the simulator is dropped, and when another task's turn comes unless it has ``rests_open``; a later
        :meth:`reset` may use the simulator again.
        """
        ...


class Backend(Protocol):
    """
    Makes the simulators of one process.

    It is constructed with the keyword arguments of its settings, in every process anew, and may change the process for
    all that comes after (environment variables, import settings).
    """

    def make(self, task_id: int) -> Simulator:
        """
        Build the simulator of a task.

        :param task_id: Number of the task.
        :return: Its simulator, which has not played yet.
        """
        ...

    def warm_up(self, task_id: int) -> Simulator:
        """
        Build a simulator in the zygote, whose forks share its memory.

        :param task_id: Number of the task.
        :return: The same as :meth:`make`, after a step was played: all code is compiled and loaded. It must have no
            thread and no GL context, which a fork would not survive.
        """
        ...


class WorkerSettings(TypedDict):
    """
    What the owner says about its workers, in types that JSON has.

    ``name``: what error messages call the simulator, e.g. ``"LIBERO"``. ``backend``: of :func:`backend_settings`.
    ``pictures``: shape (height, width, 3) of each picture in an observation, by key; those go through shared memory.
    ``frame_size``: side of the frames for people. ``resident``: how many tasks' simulators a worker keeps.
    ``hooks``: arguments of :class:`~rlt_gym.workers.hooks.WorkerHooks`.
    """

    name: str
    backend: dict[str, Any]
    pictures: dict[str, Any]
    frame_size: int
    resident: int
    hooks: dict[str, Any]


#: Sets of initial states that never overlap.
SPLITS = ("train", "selection", "eval")


def split_seed(split: str, *numbers: int) -> int:
    """
    Compute the seed for everything that a simulator draws at a reset.

    Each split owns one third of the 32-bit seeds, so that no training state can be an evaluation state.

    :param split: One of :data:`SPLITS`.
    :param numbers: What the seed follows from: number of suite and task, number of the initial state.
    :return: The seed, in 0..2**32-1.
    """
    block = 2**32 // len(SPLITS)
    mixed = np.random.SeedSequence(numbers).generate_state(1)[0]
    return SPLITS.index(split) * block + int(mixed) % block


def backend_settings(target: str, **kwargs: Any) -> dict[str, Any]:
    """
    Name a backend, in the owner's process, without importing it: the owner may lack what the simulator needs.

    :param target: ``"module:Class"`` of a :class:`Backend`.
    :param kwargs: Its keyword arguments: numbers, strings, lists, dicts.
    :return: Entry ``backend`` of :class:`WorkerSettings`.
    :raises ValueError: There is no such module, or the arguments cannot be sent to a worker.
    """
    allowed = f"backend must be 'module:Class' of an importable class, got {target!r}"
    module, _ = split_name(target, allowed)
    check_sendable(f"arguments of backend {target!r}", kwargs)
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{allowed}: {error}") from error
    if spec is None:
        raise ValueError(f"{allowed}: there is no module {module!r}")
    return {"target": target, "kwargs": kwargs, "path": import_folder(module, spec.origin)}


def load_backend(settings: dict[str, Any]) -> Backend:
    """
    Import and construct a backend, inside a worker or a zygote.

    :param settings: Of :func:`backend_settings`.
    :return: The backend.
    """
    return load_named(settings)(**settings["kwargs"])


def backend_key(settings: dict[str, Any]) -> str:
    """
    Make the key under which simulators of equal backends are shared.

    :param settings: Of :func:`backend_settings`.
    :return: Equal for backends whose simulators can replace each other.
    """
    return json.dumps(settings, sort_keys=True)
