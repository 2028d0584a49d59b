"""A JSON schema of the configuration of a run, by which editors complete and check YAML files.

``python -m rlt_sb3.experiment.schema`` writes it beside the shipped configurations, which name it in a comment.
"""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter, getdoc, signature
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from rlt_sb3.experiment.algorithms import RESERVED, algorithm_names, get_algorithm
from rlt_sb3.experiment.config import TrainConfig

FILE = Path(__file__).parent / "configs" / "schema.json"

_TYPES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    NoneType: "null",
}


def _descriptions(documented: Any) -> dict[str, str]:
    """:return: parameter -> what the docstring says about it"""
    found = re.findall(r":param (\w+): (.*?)(?=\n\s*:\w|\n\s*\n|\Z)", getdoc(documented) or "", flags=re.S)
    return {name: " ".join(text.split()) for name, text in found}


def _type(hint: Any) -> dict[str, Any]:
    """
    :param hint: type of a setting: a plain type, ``list[...]``, ``dict[str, Any]``, a union of them, or a dataclass
    :return: its schema
    """
    if is_dataclass(hint):
        return dataclass_schema(hint)
    if isinstance(hint, UnionType):
        return {"anyOf": [_type(part) for part in get_args(hint)]}
    schema: dict[str, Any] = {"type": _TYPES[get_origin(hint) or hint]}
    if get_origin(hint) is list:
        schema["items"] = _type(get_args(hint)[0])
    return schema


def dataclass_schema(config_class: Any) -> dict[str, Any]:
    """
    :param config_class: a dataclass of settings
    :return: schema of a mapping with these settings and no others
    """
    hints, texts = get_type_hints(config_class), _descriptions(config_class)
    properties = {}
    for field in fields(config_class):
        properties[field.name] = _type(hints[field.name]) | {"description": texts.get(field.name, "")}
        if field.default is not MISSING:
            properties[field.name]["default"] = field.default
        elif field.default_factory is MISSING:
            raise TypeError(f"{config_class.__name__}.{field.name} has no default, a configuration may leave it out.")
    return {"type": "object", "additionalProperties": False, "properties": properties}


def config_schema() -> dict[str, Any]:
    """
    :return: schema of the files that ``rlt train --config`` reads. RLT's settings are those of its constructor, by name
        only; TQC's belong to sb3-contrib and are left open.
    """
    schema = dataclass_schema(TrainConfig)
    properties = schema["properties"]
    del properties["algorithms"]  # in a file each algorithm has a section of its own
    properties["algorithm"]["enum"] = list(algorithm_names())
    for name in algorithm_names():
        properties[name] = {"type": "object", "description": f"keyword arguments of the algorithm {name!r}"}
    rlt = get_algorithm("rlt").load_class()
    texts = _descriptions(rlt) | _descriptions(rlt.__init__)
    settings: dict[str, Any] = {}
    for name, parameter in signature(rlt.__init__).parameters.items():
        if name in ("self", *RESERVED) or parameter.kind is Parameter.VAR_KEYWORD:
            continue
        settings[name] = {"description": texts.get(name, "")}
        if isinstance(parameter.default, str | int | float | None):
            settings[name]["default"] = parameter.default
    properties["rlt"] |= {"additionalProperties": False, "properties": settings}
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "A run of `rlt train`"} | schema


def text() -> str:
    """
    :return: what the file holds
    """
    return json.dumps(config_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
    print(FILE)
