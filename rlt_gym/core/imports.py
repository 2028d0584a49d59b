"""Names of Python objects in settings: only those of known packages are looked up; a file cannot run any code."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any

#: Packages whose objects settings of this package may name.
ALLOWED = ("rlt_gym",)
#: Environment variable with more of them, separated by commas. Not a setting: a configuration could allow itself.
VARIABLE = "RLT_ALLOWED_IMPORTS"


def check_import(module: str, setting: str, packages: Sequence[str] = ALLOWED) -> None:
    """
    Refuse a module that settings may not name.

    :param module: Dotted name.
    :param setting: The setting that names it, for the message.
    :param packages: Allowed packages, beside those of the environment variable :data:`VARIABLE`.
    :raises ValueError: If it is not in an allowed package.
    """
    allowed = (*packages, *filter(None, os.environ.get(VARIABLE, "").split(",")))
    if not any(module == prefix or module.startswith(prefix + ".") for prefix in allowed):
        raise ValueError(
            f"{setting} names the module {module!r}; a configuration may only name {', '.join(allowed)}. "
            f"Add a package of your own with the environment variable {VARIABLE}={module.split('.')[0]}."
        )


def look_up(name: str, setting: str, form: str, packages: Sequence[str] = ALLOWED) -> Any:
    """
    Import what a setting names.

    :param name: ``"module:name"``.
    :param setting: The setting, for messages.
    :param form: What the name must look like, for messages.
    :param packages: Allowed packages, see :func:`check_import`.
    :return: What it means.
    :raises ValueError: If the name has another form, is not allowed, or means nothing.
    """
    module, colon, attribute = name.partition(":")
    if not colon or not attribute.isidentifier():
        raise ValueError(f"{setting} must be {form}, got {name!r}.")
    check_import(module, setting, packages)
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{setting}: there is no {name!r} ({error}).") from error


def resolve_class(name: str, setting: str, packages: Sequence[str] = ALLOWED) -> type:
    """
    Import the class that ``"module:Class"`` means.

    :param name: The name.
    :param setting: The setting, for messages.
    :param packages: Allowed packages, see :func:`check_import`.
    :return: The class.
    :raises ValueError: If the name has another form, is not allowed, or is no class.
    """
    found = look_up(name, setting, "'module:Class', for example 'torch.nn:GELU'", packages)
    if not isinstance(found, type):
        raise ValueError(f"{setting} must name a class, {name!r} is a {type(found).__name__}.")
    # what an allowed module has only imported from elsewhere is not part of it
    check_import(found.__module__, setting, packages)
    return found
