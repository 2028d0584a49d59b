"""Settings that a class takes: names, types, defaults and descriptions, from its signature and docstring."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from inspect import Parameter, getdoc, signature
from os import PathLike
from types import NoneType, UnionType
from typing import Any, ForwardRef, Literal, TypeVar, Union, get_args, get_origin

from docstring_parser import DocstringStyle
from docstring_parser import parse as parse_docstring

#: default of a setting that has none
REQUIRED = Parameter.empty
#: types that a value of a configuration file can have
_PLAIN = {str: "str", bool: "bool", int: "int", float: "float", list: "list", tuple: "list", dict: "dict"}


@dataclass(frozen=True)
class Setting:
    """
    A keyword argument of a class.

    :param name: its name
    :param hint: its annotation; a text where the annotation cannot be resolved, :data:`REQUIRED` where there is none
    :param default: its default, or :data:`REQUIRED`
    :param text: what the docstring says about it, in one line
    """

    name: str
    hint: Any
    default: Any
    text: str

    @property
    def type_name(self) -> str:
        """Its type in a configuration file, ``float | schedule``; empty if no value of a file has its type."""
        return type_name(self.hint)

    @property
    def takes_tuple(self) -> bool:
        """Whether a list in a file stands for a tuple."""
        origins = [get_origin(part) for part in parts_of(self.hint)]
        return tuple in origins and list not in origins


def descriptions(documented: Any) -> dict[str, str]:
    """
    Read the descriptions of parameters from a docstring.

    :param documented: class or function whose docstring has ``:param name: text``
    :return: parameter -> what the docstring says about it, in one line, without the markup of cross-references
    """
    found = parse_docstring(getdoc(documented) or "", style=DocstringStyle.REST).params
    texts = {param.arg_name: " ".join((param.description or "").split()) for param in found}
    return {name: re.sub(r":\w+:`~?(?:[\w.]+\.)?([^`]*)`", r"\1", text) for name, text in texts.items()}


def settings_of(owner: type, skip: Collection[str] = ()) -> list[Setting]:
    """
    List the settings that a constructor takes.

    :param owner: a class; where its constructor takes ``**kwargs``, the arguments of its base classes follow
    :param skip: names to leave out, besides ``self``
    :return: keyword arguments of its constructor, in their order
    """
    parameters: dict[str, Parameter] = {}
    texts: dict[str, str] = {}
    open_ended = True
    for base in owner.__mro__[:-1]:
        texts = descriptions(base) | texts if base.__doc__ else texts
        if not open_ended or "__init__" not in vars(base):
            continue
        texts = descriptions(base.__init__) | texts  # type: ignore[misc]
        try:
            found = signature(base.__init__, eval_str=True).parameters  # type: ignore[misc]
        except NameError:  # a name that is imported for type checkers only
            found = signature(base.__init__).parameters  # type: ignore[misc]
        named = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        parameters = {name: parameter for name, parameter in found.items() if parameter.kind in named} | parameters
        open_ended = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in found.values())
    return [
        Setting(name, parameter.annotation, parameter.default, texts.get(name, ""))
        for name, parameter in parameters.items()
        if name not in ("self", *skip)
    ]


def parts_of(hint: Any) -> tuple[Any, ...]:
    """
    List the members of a union.

    :param hint: an annotation
    :return: the members of a union, else the annotation alone
    """
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def is_schedule(hint: Any) -> bool:
    """
    Tell whether a setting takes a schedule of Stable-Baselines3.

    :param hint: an annotation
    :return: whether a function is among its types, for which a configuration file has ``{start: .., end: ..}``
    """
    return any((get_origin(part) or part) is Callable for part in parts_of(hint))


def is_schedule_class(hint: Any) -> bool:
    """
    Tell whether an annotation is a dataclass of a schedule.

    :param hint: an annotation
    :return: whether it is a dataclass whose objects are functions, for which a file has a mapping of its fields
    """
    return is_dataclass(hint) and "__call__" in vars(hint)


def type_name(hint: Any) -> str:
    """
    Name a type as the help shows it.

    :param hint: an annotation
    :return: the types among its own that a configuration file can hold, ``float | list[float] | null``; empty if there
        is none besides null
    """
    names = [_name_of(part) for part in parts_of(hint)]
    if all(name in ("", "null") for name in names):
        return ""
    return " | ".join(dict.fromkeys(filter(None, names)))


def _name_of(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if hint in (NoneType, None):
        return "null"
    if is_schedule(hint) or is_schedule_class(hint):
        return "schedule"
    if hint is type or origin is type:
        return "class"
    if hint is Any:
        return "any"
    if origin is Literal:
        return " | ".join(map(repr, args))
    if origin is tuple and Ellipsis not in args:
        return f"[{', '.join(map(type_name, args))}]"
    if origin in (list, dict, tuple, Sequence, Mapping) and args:
        kind = "dict" if origin in (dict, Mapping) else "list"
        return f"{kind}[{', '.join(type_name(arg) for arg in args if arg is not Ellipsis)}]"
    return _PLAIN.get(hint, "")


def matches(value: Any, hint: Any) -> bool:
    """
    Compare a value with a type.

    :param value: of a configuration, with classes looked up and schedules made
    :param hint: an annotation; one that is not known here fits every value
    :return: whether the value has that type; an integer is a float, a bool is neither, lists and tuples are alike
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(matches(value, part) for part in args)
    if hint in (Any, REQUIRED) or isinstance(hint, str | ForwardRef | TypeVar):
        return True
    if hint in (NoneType, None):
        return value is None
    if hint in (int, float):
        return isinstance(value, int | hint) and not isinstance(value, bool)
    if is_schedule(hint):
        return callable(value)
    if origin is type:
        base = args[0] if args and isinstance(args[0], type) else object
        return isinstance(value, type) and issubclass(value, base)
    if origin is Literal:
        return value in args
    if (origin or hint) in (list, tuple, Sequence):
        if not isinstance(value, list | tuple):
            return False
        if origin is tuple and Ellipsis not in args:
            return len(value) == len(args) and all(map(matches, value, args))
        return all(matches(item, args[0]) for item in value) if args else True
    if (origin or hint) in (dict, Mapping):
        inner = args or (Any, Any)
        return isinstance(value, Mapping) and all(
            matches(key, inner[0]) and matches(item, inner[1]) for key, item in value.items()
        )
    if origin is PathLike or not isinstance(hint, type):
        return origin is not PathLike
    return isinstance(value, hint)


def check_types(settings: Collection[Setting], given: Mapping[str, Any], where: str) -> None:
    """
    Refuse values of a wrong type.

    :param settings: what there is
    :param given: values of some of them; other names are passed over
    :param where: the section, for the message
    :raises ValueError: names the setting, its types and what was given
    """
    for setting in settings:
        if setting.name in given and not matches(given[setting.name], setting.hint):
            allowed = setting.type_name.replace("schedule", "schedule ({start: 20, end: 5, end_fraction: 0.5})")
            allowed = f"be of type {allowed}" if allowed else "be left out (it takes objects of Python)"
            raise ValueError(f"{where}.{setting.name} must {allowed}, got {given[setting.name]!r}.")
