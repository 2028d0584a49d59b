"""Names of Python objects in the configuration of a run: only those of known packages are looked up."""

from __future__ import annotations

from typing import Any

from rlt_gym.core import imports

#: Packages whose classes a configuration may name.
ALLOWED = (*imports.ALLOWED, "rlt_sb3", "stable_baselines3", "sb3_contrib", "torch.nn", "torch.optim")
#: Environment variable with more of them.
VARIABLE = imports.VARIABLE


def check_import(module: str, setting: str) -> None:
    """
    Refuse a module that a configuration may not name.

    :param module: dotted name
    :param setting: the setting that names it, for the message
    :raises ValueError: if it is not in an allowed package
    """
    imports.check_import(module, setting, ALLOWED)


def resolve_class(name: str, setting: str) -> type:
    """
    Import the class that ``"module:Class"`` names.

    :param name: for example "torch.nn:GELU"
    :param setting: the setting, for messages
    :raises ValueError: if the name has another form, is not allowed, or is no class
    """
    return imports.resolve_class(name, setting, ALLOWED)


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
            form = "'module:name' of a class or function"
            found = imports.look_up(name, f"{setting}.{key}", form, ALLOWED)
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
