"""What a user may run inside a worker: someone who takes over (interventions) and a predicate (critical phase).

Both are named by ``"module:name"`` and checked in the main process, before any worker starts.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

ACTION_SIZE = 7


def check_hook(
    name: str, target: str | None, kwargs: dict[str, Any] | None, arguments: int, may_be_class: bool = True
) -> dict[str, Any] | None:
    """
    Check the name and the arguments of a class or function that workers are to use.

    :param name: Of the setting, for errors.
    :param target: ``"module:name"`` of something importable, or ``None``.
    :param kwargs: Keyword arguments for it: numbers, strings, lists, dicts.
    :param arguments: How many positional arguments a function is called with. A class is called with ``kwargs`` only;
        if it has a ``check_arguments``, that is called with them here.
    :param may_be_class: Otherwise it must be a function.
    :return: What :func:`load_hook` takes, or ``None`` without a target.
    :raises ValueError: It cannot be imported or called this way.
    """
    if target is None:
        if kwargs:
            raise ValueError(f"{name}_kwargs is {kwargs!r}, but {name} is None: name what they are for")
        return None
    allowed = f"{name} must be 'module:name' of an importable class or function, got {target!r}"
    if not isinstance(target, str) or target.count(":") != 1 or not all(target.split(":")):
        raise ValueError(allowed)
    module_name, attribute = target.split(":")
    if module_name == "__main__":
        raise ValueError(f"{allowed}: workers cannot import a script that is running, put it into a module of its own")
    kwargs = dict(kwargs or {})
    try:
        json.dumps(kwargs)
    except TypeError as error:
        raise ValueError(
            f"{name}_kwargs must be numbers, strings, lists and dicts, which can be sent to a worker, got {kwargs!r}"
        ) from error
    try:
        module = importlib.import_module(module_name)
        found = getattr(module, attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{allowed}: {error}") from error
    if not callable(found):
        raise ValueError(f"{allowed}, which is a {type(found).__name__} and cannot be called")
    if inspect.isclass(found) and not may_be_class:
        raise ValueError(f"{name} must be a function, got the class {target!r}")
    try:
        inspect.signature(found).bind(*([] if inspect.isclass(found) else [None] * arguments), **kwargs)
    except TypeError as error:
        raise ValueError(f"{name}={target!r} does not take {name}_kwargs={kwargs!r}: {error}") from error
    if hasattr(found, "check_arguments"):
        found.check_arguments(**kwargs)
    return {"target": target, "kwargs": kwargs, "path": _import_folder(module)}


def check_one_env(hook: dict[str, Any] | None, num_envs: int) -> None:
    """
    :param hook: Of :func:`check_hook`.
    :param num_envs: Of the environment.
    :raises ValueError: A class whose ``one_env`` is true (a person with a keyboard) and more than one env.
    """
    if hook is not None and num_envs > 1 and getattr(hook_object(hook), "one_env", False):
        raise ValueError(f"{hook['target']} can control one simulator at a time: num_envs must be 1, got {num_envs}")


def _import_folder(module: Any) -> str | None:
    """The folder that must be on ``sys.path`` to import a module; None for a module of this package."""
    root = module.__name__.split(".")[0]
    if root == "rlt_gym" or not getattr(module, "__file__", None):
        return None
    file = os.path.abspath(module.__file__)
    levels = module.__name__.count(".") + (1 if os.path.basename(file) == "__init__.py" else 0)
    for _ in range(levels + 1):
        file = os.path.dirname(file)
    return file


def hook_object(hook: dict[str, Any]) -> Any:
    """
    :param hook: Of :func:`check_hook`.
    :return: The class or function it names.
    """
    module, attribute = hook["target"].split(":")
    return getattr(importlib.import_module(module), attribute)


def load_hook(hook: dict[str, Any] | Callable[..., Any]) -> tuple[Any, Callable[..., Any]]:
    """
    Import what a hook names, inside a worker.

    :param hook: Of :func:`check_hook`, or a function itself where nothing has to be sent to a process.
    :return: An instance and its ``act`` for a class; ``None`` and the function with its keyword arguments bound.
    """
    if callable(hook):
        return None, hook
    if hook["path"] is not None and hook["path"] not in sys.path:
        sys.path.append(hook["path"])
    found = hook_object(hook)
    if inspect.isclass(found):
        instance: Any = found(**hook["kwargs"])
        return instance, instance.act
    return None, lambda *arguments: found(*arguments, **hook["kwargs"])


class WorkerHooks:
    """
    Asks the hooks of one worker and keeps what they said.

    :param intervention: Of :func:`check_hook`, a function, or ``None``; ``critical_phase`` likewise.
    """

    def __init__(
        self,
        intervention: dict[str, Any] | Callable[..., Any] | None = None,
        critical_phase: dict[str, Any] | Callable[..., Any] | None = None,
    ):
        self._intervenor: Any = None
        self._act: Callable[..., Any] | None = None
        self._predicate: Callable[..., Any] | None = None
        if intervention is not None:
            self._intervenor, self._act = load_hook(intervention)
        if critical_phase is not None:
            _, self._predicate = load_hook(critical_phase)
        self._simulator: Any = None
        self._takes_part = False
        self._steps = 0
        self._critical = False
        self._executed: list[np.ndarray] = []
        self._taken: list[bool] = []

    def begin_episode(self, simulator: Any, seed: int, takeover: bool = True) -> dict[str, Any]:
        """
        :param simulator: The :class:`~rlt_gym.libero.worker.simulator.LiberoSimulator`, just reset.
        :param seed: Of the episode; the intervenor's randomness comes from it.
        :param takeover: Whether anybody may take over in this episode.
        :return: What the info of the first observation says about hooks.
        """
        self._simulator, self._steps, self._critical = simulator, 0, False
        self._takes_part = takeover and self._act is not None
        if self._takes_part and hasattr(self._intervenor, "reset"):
            self._intervenor.reset(simulator, np.random.default_rng([seed, 1]))
        return self._phase()

    @property
    def choose(self) -> Callable[[np.ndarray], np.ndarray] | None:
        """What decides about each control step of the next chunk; ``None`` if nobody can take over."""
        self._executed, self._taken = [], []
        return self._choose if self._takes_part else None

    def _choose(self, proposed: np.ndarray) -> np.ndarray:
        assert self._act is not None
        action = self._act(self._simulator, np.array(proposed), self._steps)
        taken = action is not None
        executed = np.asarray(action if taken else proposed, dtype=np.float32)
        if executed.shape != (ACTION_SIZE,) or not np.isfinite(executed).all():
            raise ValueError(
                f"an intervention must return None or {ACTION_SIZE} finite numbers in [-1, 1], got {action!r}"
            )
        executed = np.clip(executed, -1.0, 1.0)
        self._steps += 1
        self._executed.append(executed)
        self._taken.append(taken)
        return executed.astype(np.float64)

    def end_chunk(self) -> dict[str, Any]:
        """
        :return: What the info says about the chunk just played: ``executed_actions`` (k, 7) and ``intervention`` (k,)
            of the executed steps; ``critical_chunk``, ``critical_phase``.
        """
        result: dict[str, Any] = {}
        if self._takes_part:
            result["executed_actions"] = np.array(self._executed, dtype=np.float32).reshape(-1, ACTION_SIZE)
            result["intervention"] = np.array(self._taken, dtype=bool)
        if self._predicate is not None:
            result["critical_chunk"] = self._critical
        return {**result, **self._phase()}

    def _phase(self) -> dict[str, Any]:
        """Once critical, an episode stays so."""
        if self._predicate is None:
            return {}
        self._critical = self._critical or bool(self._predicate(self._simulator))
        return {"critical_phase": self._critical}


def hook_info(
    hooks: dict[str, Any], chunk_length: int, said: dict[str, Any], actions: np.ndarray | None
) -> dict[str, Any]:
    """
    Info entries of one env, the same keys at every reset and step.

    :param hooks: The environment's hooks by name.
    :param said: Answer of :class:`WorkerHooks`; empty where a worker was lost.
    :param actions: The chunk that was asked for, float32 (C, 7); ``None`` at a reset.
    :return: ``executed_actions`` float32 (C, 7), from step k on what was asked for; ``intervention`` bool (C,);
        ``critical_chunk`` and ``critical_phase`` bool.
    """
    info: dict[str, Any] = {}
    if hooks.get("intervention") is not None:
        executed = np.zeros((chunk_length, ACTION_SIZE), np.float32) if actions is None else np.array(actions)
        taken = np.zeros(chunk_length, dtype=bool)
        done = said.get("executed_actions", ())
        if len(done):
            executed[: len(done)], taken[: len(done)] = done, said["intervention"]
        info["executed_actions"], info["intervention"] = executed, taken
    if hooks.get("critical_phase") is not None:
        info["critical_chunk"] = bool(said.get("critical_chunk", False))
        info["critical_phase"] = bool(said.get("critical_phase", False))
    return info
