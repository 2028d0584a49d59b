"""A JSON schema of the configuration of a run, by which editors complete and check YAML files.

``python -m rlt_sb3.experiment.schema`` writes it beside the shipped configurations, which name it in a comment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from rlt_sb3.experiment.algorithms import algorithm_names, get_algorithm
from rlt_sb3.experiment.config import TrainConfig
from rlt_sb3.experiment.signatures import Setting, descriptions, is_schedule, is_schedule_class, type_name

FILE = Path(__file__).parent / "configs" / "schema.json"

_TYPES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    tuple: "array",
    dict: "object",
    NoneType: "null",
}
_SCHEDULE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["start", "end"],
    "properties": {name: {"type": "number"} for name in ("start", "end", "end_fraction")},
}


def _type(hint: Any) -> dict[str, Any]:
    """
    Make the schema of a setting from its type.

    :param hint: type of a setting: a plain type, a list, tuple or dict of such, a class, a schedule, a union of them,
        or a dataclass
    :return: its schema
    """
    if is_schedule_class(hint):
        numbers = {name: _type(inner) for name, inner in get_type_hints(hint).items()}
        return _SCHEDULE | {"required": list(numbers), "properties": numbers}
    if is_dataclass(hint):
        return dataclass_schema(hint)
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return {"anyOf": [_type(part) for part in args if part is NoneType or type_name(part)]}
    if is_schedule(hint):
        return _SCHEDULE
    if hint is type or origin is type:
        return {"type": "string", "pattern": "^[\\w.]+:\\w+$"}
    if hint is Any:
        return {}
    schema: dict[str, Any] = {"type": _TYPES[origin or hint]}
    if origin is list:
        schema["items"] = _type(args[0])
    if origin is tuple:
        schema |= {"items": [_type(arg) for arg in args], "minItems": len(args), "maxItems": len(args)}
    return schema


def dataclass_schema(config_class: Any) -> dict[str, Any]:
    """
    Make the schema of a dataclass of settings.

    :param config_class: a dataclass of settings
    :return: schema of a mapping with these settings and no others
    """
    hints, texts = get_type_hints(config_class), descriptions(config_class)
    properties = {}
    for field in fields(config_class):
        properties[field.name] = _type(hints[field.name]) | {"description": texts.get(field.name, "")}
        if field.default is not MISSING:
            properties[field.name]["default"] = field.default
        elif field.default_factory is MISSING:
            raise TypeError(f"{config_class.__name__}.{field.name} has no default, a configuration may leave it out.")
    return {"type": "object", "additionalProperties": False, "properties": properties}


def settings_schema(settings: list[Setting], parts: Mapping[str, list[Setting]]) -> dict[str, Any]:
    """
    Make the schema of a class's settings.

    :param settings: keyword arguments of a class
    :param parts: setting that is a dict -> what it may hold
    :return: schema of a mapping with these settings and no others
    """
    properties = {}
    for setting in settings:
        if not setting.type_name:
            continue
        schema = _type(setting.hint)
        if setting.name in parts:  # in the place of the dict of anything
            inner = settings_schema(parts[setting.name], {})
            schema = {
                "anyOf": [inner if part.get("type") == "object" else part for part in schema.get("anyOf", [schema])]
            }
        properties[setting.name] = schema | {"description": setting.text}
        if isinstance(setting.default, str | int | float | tuple | None):
            properties[setting.name]["default"] = setting.default
    return {"type": "object", "additionalProperties": False, "properties": properties}


def config_schema() -> dict[str, Any]:
    """Return schema of the files that ``rlt train --config`` reads."""
    schema = dataclass_schema(TrainConfig)
    properties = schema["properties"]
    del properties["algorithms"]  # in a file each algorithm is a section
    properties["algorithm"]["enum"] = list(algorithm_names())
    for name in algorithm_names():
        algorithm = get_algorithm(name)
        section = settings_schema(algorithm.settings(), algorithm.settings_of_parts())
        for key, value in algorithm.defaults(1, 1).items():  # a run's, which may depend on its environment
            if algorithm.defaults(2, 2)[key] == value and not isinstance(value, type):
                section["properties"][key]["default"] = value
            else:
                section["properties"][key].pop("default", None)
        properties[name] = section | {"description": f"settings of the algorithm {name!r}"}
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "A run of `rlt train`"} | schema


def text() -> str:
    """Return what the file holds."""
    return json.dumps(config_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
    print(FILE)
