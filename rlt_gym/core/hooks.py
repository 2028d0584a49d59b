"""
Hooks, seen from the main process: what a user may run inside a worker is checked here, before any worker starts.

:mod:`rlt_gym.workers.hooks` is the worker's side.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from rlt_gym.workers.named import check_sendable, import_folder, split_name


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
    :return: What :func:`rlt_gym.workers.hooks.load_hook` takes, or ``None`` without a target.
    :raises ValueError: It cannot be imported or called this way.
    """
    if target is None:
        if kwargs:
            raise ValueError(f"{name}_kwargs is {kwargs!r}, but {name} is None: name what they are for")
        return None
    allowed = f"{name} must be 'module:name' of an importable class or function, got {target!r}"
    module_name, attribute = split_name(target, allowed)
    kwargs = dict(kwargs or {})
    check_sendable(f"{name}_kwargs", kwargs)
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
    return {"target": target, "kwargs": kwargs, "path": import_folder(module_name, getattr(module, "__file__", None))}


def check_one_env(hook: dict[str, Any] | None, num_envs: int) -> None:
    """
    Refuse a hook that serves one environment only where there are several.

    :param hook: Of :func:`check_hook`.
    :param num_envs: Of the environment.
    :raises ValueError: A class whose ``one_env`` is true (a person with a keyboard) and more than one env.
    """
    if hook is not None and num_envs > 1 and getattr(hook_object(hook), "one_env", False):
        raise ValueError(f"{hook['target']} can control one simulator at a time: num_envs must be 1, got {num_envs}")


def hook_object(hook: dict[str, Any]) -> Any:
    """
    Look up what a hook's name stands for.

    :param hook: Of :func:`check_hook`.
    :return: The class or function it names.
    """
    module, attribute = hook["target"].split(":")
    return getattr(importlib.import_module(module), attribute)
