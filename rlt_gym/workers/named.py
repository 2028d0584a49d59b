"""Classes and functions that a worker imports by name, and settings that are checked before it starts."""

from __future__ import annotations

import importlib
import json
import operator
import os
import sys
from numbers import Integral
from typing import Any


def split_name(target: Any, allowed: str) -> tuple[str, str]:
    """
    Split a name ``"module:name"``.

    :param target: What was given as a name.
    :param allowed: What is allowed, for errors.
    :return: Module and attribute of ``"module:name"``.
    :raises ValueError: It has another form, or names the running script, which no other process can import.
    """
    if not isinstance(target, str) or target.count(":") != 1 or not all(target.split(":")):
        raise ValueError(allowed)
    module, name = target.split(":")
    if module == "__main__":
        raise ValueError(f"{allowed}: workers cannot import a script that is running, put it into a separate module")
    return module, name


def check_sendable(what: str, kwargs: dict[str, Any]) -> None:
    """
    Check that arguments can be sent to a worker.

    :param what: Name of these arguments, for errors.
    :param kwargs: Keyword arguments for something in a worker.
    :raises ValueError: JSON cannot hold them.
    """
    try:
        json.dumps(kwargs)
    except TypeError as error:
        raise ValueError(
            f"{what} must be numbers, strings, lists and dicts, which can be sent to a worker, got {kwargs!r}"
        ) from error


def import_folder(module: str, file: str | None) -> str | None:
    """
    Find the folder that a worker needs on ``sys.path`` to import a module.

    :param module: Name of a module.
    :param file: Its file, if it has one.
    :return: The folder that must be on ``sys.path`` to import it; ``None`` for a module of this package.
    """
    if module.split(".")[0] == "rlt_gym" or not file:
        return None
    folder = os.path.abspath(file)
    levels = module.count(".") + (1 if os.path.basename(file) == "__init__.py" else 0)
    for _ in range(levels + 1):
        folder = os.path.dirname(folder)
    return folder


def load_named(entry: dict[str, Any]) -> Any:
    """
    Import what an entry names, inside a worker or a zygote.

    :param entry: ``target``, ``"module:name"``, and ``path``, of :func:`import_folder`.
    :return: The class or function.
    """
    if entry["path"] is not None and entry["path"] not in sys.path:
        sys.path.append(entry["path"])
    module, name = entry["target"].split(":")
    return getattr(importlib.import_module(module), name)


def is_integer(value: Any) -> bool:
    """
    Tell whether a value is an integer, Python's or NumPy's; ``bool`` is none.

    :param value: Anything.
    :return: Whether it is.
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def checked_int(name: str, value: Any, low: int, high: int | None = None) -> int:
    """
    Check an integer.

    :param name: Of the setting, for errors.
    :param value: What was given.
    :param low: Smallest number allowed.
    :param high: Largest number allowed; ``None``: any.
    :return: The value as an ``int``.
    :raises ValueError: It is no integer (``bool`` is none), or out of range.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = low - 1
    if isinstance(value, bool) or number < low or (high is not None and number > high):
        allowed = f">= {low}" if high is None else f"in {low}..{high}"
        raise ValueError(f"{name} must be an integer {allowed}, got {value!r}")
    return number
