"""Names of Python objects in configuration files: only those of known packages are looked up."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

#: Packages whose classes a configuration may name.
ALLOWED = ("rlt_gym", "rlt_sb3", "stable_baselines3", "sb3_contrib", "torch.nn", "torch.optim")
#: Environment variable with more of them, separated by commas. Not a setting: a configuration could allow itself.
VARIABLE = "RLT_ALLOWED_IMPORTS"


def check_import(module: str, setting: str) -> None:
    """
    Refuse a module that a configuration may not name.

    :param module: dotted name
    :param setting: the setting that names it, for the message
    :raises ValueError: if it is not in an allowed package
    """
    allowed = (*ALLOWED, *filter(None, os.environ.get(VARIABLE, "").split(",")))
    if not any(module == prefix or module.startswith(prefix + ".") for prefix in allowed):
        raise ValueError(
            f"{setting} names the module {module!r}; a configuration may only name {', '.join(allowed)}. "
            f"Add a package of your own with the environment variable {VARIABLE}={module.split('.')[0]}."
        )


def _look_up(name: str, setting: str, form: str) -> Any:
    """
    Import what a name stands for.

    :param name: "module:name"
    :param setting: the setting, for messages
    :param form: what the name must look like, for messages
    :return: the class or function
    :raises ValueError: if the name has another form, is not allowed, or means nothing
    """
    module, colon, attribute = name.partition(":")
    if not colon or not attribute.isidentifier():
        raise ValueError(f"{setting} must be {form}, got {name!r}.")
    check_import(module, setting)
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{setting}: there is no {name!r} ({error}).") from error


def resolve_class(name: str, setting: str) -> type:
    """
    Import the class that ``"module:Class"`` names.

    :param name: for example "torch.nn:GELU"
    :param setting: the setting, for messages
    :raises ValueError: if the name has another form, is not allowed, or is no class
    """
    found = _look_up(name, setting, "'module:Class', for example 'torch.nn:GELU'")
    if not isinstance(found, type):
        raise ValueError(f"{setting} must name a class, {name!r} is a {type(found).__name__}.")
    # what an allowed module has only imported from elsewhere is not part of it
    check_import(found.__module__, setting)
    return found


#: Keyword arguments of an environment that are callables, which a configuration gives as "module:name".
HOOKS = ("intervention", "critical_phase")


def check_hooks(kwargs: dict[str, Any], setting: str) -> None:
    """
    Refuse hooks of packages that a configuration may not name: workers run them.

    :param kwargs: keyword arguments of an environment
    :param setting: their name, for messages
    :raises ValueError: if one has another form than "module:name", is not allowed, or does not exist
    """
    for key in HOOKS:
        name = kwargs.get(key)
        if isinstance(name, str):
            found = _look_up(name, f"{setting}.{key}", "'module:name' of a class or function")
            check_import(getattr(found, "__module__", None) or type(found).__module__, f"{setting}.{key}")


def resolve_classes(settings: dict[str, Any], setting: str) -> dict[str, Any]:
    """
    Replace ``"module:Class"`` by the class, in entries whose key ends with ``_class`` or ``_fn``, at any depth.

    :param settings: keyword arguments of an algorithm
    :param setting: their name, for messages
    """
    out: dict[str, Any] = {}
    for key, value in settings.items():
        where = f"{setting}.{key}"
        if isinstance(value, dict):
            out[key] = resolve_classes(value, where)
        elif isinstance(value, str) and key.endswith(("_class", "_fn")):
            out[key] = resolve_class(value, where)
        else:
            out[key] = value
    return out
