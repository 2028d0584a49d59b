"""How a user wants the workers of an environment to be started and supervised."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any

from rlt_gym.workers.named import checked_int
from rlt_gym.workers.processes import LaunchPlan

#: Most seconds of a time-out, a day: ten times as many, for a whole episode, still fit what the system counts with.
LONGEST = 86_400


@dataclass(frozen=True)
class WorkerOptions:
    """
    Keyword arguments that every environment over worker processes takes.

    :param worker_start: ``"zygote"`` (forked from a process that has the simulator loaded: quick, and memory is
        shared), ``"spawn"`` (a plain subprocess each) or ``"auto"`` (the first, but the second with another
        interpreter).
    :param worker_python: Interpreter of the workers, which needs the simulator and numpy only; ``None``:
        ``RLT_WORKER_PYTHON`` or this one.
    :param worker_timeout: Seconds without an answer after which a worker counts as hung, a day at most.
    :param build_timeout: The same while the first simulators are built, before the first episode. On a fresh install
        code is compiled then, which takes a minute, and several on a busy machine.
    :param max_restarts: Restarts of each worker before :class:`~rlt_gym.workers.processes.WorkerError` is raised.
    :param resident_tasks: Tasks whose simulators each worker keeps; ``None``: the environment decides.
    :raises ValueError: A bad value, or no such interpreter.
    """

    worker_start: str = "auto"
    worker_python: str | os.PathLike[str] | None = None
    worker_timeout: float = 300.0
    build_timeout: float = 1800.0
    max_restarts: int = 10
    resident_tasks: int | None = None

    def __post_init__(self) -> None:
        self.plan()
        for name in ("worker_timeout", "build_timeout"):
            timeout = getattr(self, name)
            if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout <= LONGEST:
                raise ValueError(f"{name} must be a number of seconds above 0 and up to {LONGEST}, got {timeout!r}")
        for name, low, high in (("max_restarts", 0, 10**9), ("resident_tasks", 1, 1000)):
            value = getattr(self, name)
            if name == "resident_tasks" and value is None:
                continue
            checked_int(name, value, low, high)

    @classmethod
    def checked(cls, owner: str, options: dict[str, Any]) -> WorkerOptions:
        """
        Make the options from keyword arguments.

        :param owner: Name of what was called with these options, for errors.
        :param options: Keyword arguments.
        :return: The options.
        :raises TypeError: One that does not exist.
        :raises ValueError: A bad value.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(options.keys() - set(known))
        if unknown:
            raise TypeError(
                f"{owner} got an unexpected keyword argument {unknown[0]!r}; besides its own arguments it takes "
                f"{', '.join(known)}"
            )
        return cls(**options)

    def plan(self) -> LaunchPlan:
        """
        Turn the options into a plan.

        :return: How to start the workers; OpenGL is not chosen yet.
        """
        return LaunchPlan.checked(self.worker_start, self.worker_python)
