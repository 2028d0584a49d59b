"""Converts a command line to the parser's form: files before settings, lists, switches, nested settings."""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from rlt_sb3.experiment.signatures import type_name


@dataclass
class Words:
    """
    A command line in parts.

    :param files: YAML files of ``--config``, in their order; the run in ``--resume`` comes first
    :param settings: settings that the parser takes
    :param nested: settings inside a dict of an algorithm, (["rlt", "policy_kwargs", "n_critics"], "2") each
    """

    files: list[str]
    settings: list[str]
    nested: list[tuple[list[str], str]]

    def for_parser(self) -> list[str]:
        """Return files, then settings, which override them."""
        return [word for file in self.files for word in ("--config", file)] + self.settings


class _Files(argparse.ArgumentParser):
    """Finds ``--config`` and ``--resume`` among words that it does not know."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.add_argument("--config", action="append", default=[])
        self.add_argument("--resume")

    def error(self, message: str) -> NoReturn:
        """
        Raise instead of printing the usage.

        :param message: what is wrong
        :raises ValueError: with that message
        """
        raise ValueError(f"{message[0].upper()}{message[1:]}.")


def read_words(args: Sequence[str], config_class: Any, sections: Collection[str] = ()) -> Words:
    """
    Split a command line into its parts.

    :param args: the command line after the command
    :param config_class: the command's dataclass of settings
    :param sections: names of algorithms, where the command is ``train``
    :return: its parts
    :raises ValueError: if a file is missing, cannot be read, or is not a mapping in YAML; if there is no run to resume
    """
    found, rest = _Files().parse_known_args(list(args))
    files = [*found.config]
    if hasattr(config_class, "configs"):
        from rlt_sb3.experiment.config import config_file

        files = [config_file(name, config_class.configs) for name in files]
    if found.resume is not None:
        files.insert(0, _config_of_run(found.resume))
        rest += ["--resume", found.resume]
    for name in files:
        check_config_file(name, config_class, sections)
    settings, nested = _take_nested(sections, normalize(config_class, rest))
    return Words(files, settings, nested)


def _config_of_run(name: str) -> str:
    path = Path(name)
    for folder in (path, path.parent.parent):  # a run, or one of its checkpoints
        if (folder / "config.yaml").is_file():
            return str(folder / "config.yaml")
    raise ValueError(f"There is nothing to resume in {path}: --resume takes the folder of an interrupted run.")


def check_config_file(name: str, config_class: Any, sections: Collection[str] = ()) -> None:
    """
    Name the file that cannot be read, or the setting in it that does not exist; the parser does not name the file.

    :param name: path of a YAML file
    :param config_class: the command's dataclass of settings
    :param sections: names of algorithms, where the command is ``train``
    :raises ValueError: if it is missing, a folder, unreadable, not YAML, not a mapping, if a section is not one, or for
        an unknown setting
    """
    import yaml

    try:
        with open(name, encoding="utf-8") as file:
            data = yaml.safe_load(file)
    except FileNotFoundError as error:
        raise ValueError(f"There is no file {name!r}.") from error
    except IsADirectoryError as error:
        raise ValueError(f"{name!r} is a folder; --config takes a YAML file.") from error
    except OSError as error:
        raise ValueError(f"{name!r} cannot be read: {error.strerror}.") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{name} cannot be read as YAML: {' '.join(str(error).split())}.") from error
    if data is not None and not isinstance(data, dict):
        raise ValueError(f"{name} must hold settings, 'name: value' in each line; it holds a {type(data).__name__}.")
    groups = [key for key, hint in get_type_hints(config_class).items() if is_dataclass(hint)]
    known = setting_names(config_class, sections)
    for key, value in (data or {}).items():
        if key in groups and not isinstance(value, dict):
            raise ValueError(f"{name}: {key} must hold settings, '{key}: {{name: value}}', got {value!r}.")
        for given in [f"{key}.{inner}" for inner in value] if key in groups else [str(key)]:
            if given not in known and given.partition(".")[0] not in sections:
                raise ValueError(f"{name}: unknown setting {given!r}{did_you_mean(given, known)} (--help lists all).")


def setting_names(config_class: Any, sections: Collection[str] = (), prefix: str = "") -> list[str]:
    """
    List the settings of a command.

    :param config_class: the command's dataclass of settings
    :param sections: names of algorithms, where the command is ``train``; they stand for ``algorithms``
    :param prefix: put before each name
    :return: the names, "env" and "env.task_ids" for settings inside another one
    """
    names, hints = list(sections), get_type_hints(config_class)
    for entry in fields(config_class):
        if not (sections and entry.name == "algorithms"):
            names.append(prefix + entry.name)
        if is_dataclass(hints[entry.name]):
            names += setting_names(hints[entry.name], (), f"{prefix}{entry.name}.")
    return names


def did_you_mean(given: str, known: Collection[str], dashes: str = "") -> str:
    """
    Suggest names for a misspelled or misplaced one.

    :param given: what was written
    :param known: the names that there are
    :param dashes: put before each suggestion
    :return: "; did you mean env.task_ids?", or "" if nothing is like it
    """
    head, _, last = given.rpartition(".")
    found = [name for name in known if name.rpartition(".")[2] == last]  # in another section
    found = found or difflib.get_close_matches(given, known, 1, 0.75)
    if not found and head:  # a setting of an algorithm, whose names are not known here
        found = [f"{name}.{last}" for name in difflib.get_close_matches(head, known, 1, 0.6)]
    if not found:
        found = [name for name in known if difflib.get_close_matches(last, [name.rpartition(".")[2]], 1, 0.75)]
    return f"; did you mean {' or '.join(dashes + name for name in found)}?" if found else ""


def plain_error(message: str, config_class: Any, sections: Collection[str] = ()) -> str:
    """
    Shorten an error message of the parser.

    :param message: the parser's, which lists each type that it has tried
    :param config_class: the command's dataclass of settings
    :param sections: names of algorithms, where the command is ``train``
    :return: setting, type and value in one sentence; words that it does not know, with names like the first one;
        another message as it is, in one line
    """
    message = " ".join(message.split())
    unknown = re.match(r"unrecognized arguments: ([^\s=]+)", message)
    if unknown is not None:
        return message + _instead_of(unknown[1], config_class, sections)
    found = re.match(r'Parser key "([\w.]+)": .*(?:Got|Given) value: (.*)$', message)
    if found is None:
        return message
    name, value = found.groups()
    allowed = type_name(_types(config_class).get(name, dict))
    return f"{name} must be of type {allowed}, got {value}." if allowed else message


def _instead_of(word: str, config_class: Any, sections: Collection[str]) -> str:
    """Suggest what was meant by the first word that the parser does not know."""
    if word.startswith("--"):
        return did_you_mean(word[2:], ["config", *setting_names(config_class, sections)], "--")
    if not hasattr(config_class, "configs"):
        return ""
    from rlt_sb3.experiment.config import shipped_configs

    is_file = Path(word).is_file() or word in shipped_configs(config_class.configs)
    return f"; did you mean --config {word}?" if is_file else ""


def normalize(config_class: Any, args: Sequence[str]) -> list[str]:
    """
    Accept forms that people expect of a command line.

    Examples are ``--all-checkpoints`` for ``--all_checkpoints=true``, ``--tasks 0 1`` or ``--tasks 0,1`` for
    ``--tasks=[0,1]``, and ``--merge a b`` for ``--merge=["a", "b"]``.

    :param config_class: the command's dataclass of settings
    :param args: the command line without files
    :return: the same in the parser's form
    """
    types = _types(config_class)
    positional = [entry.name for entry in fields(config_class) if entry.metadata.get("positional")]
    out: list[str] = []
    rest = list(args)
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        if not option.startswith("--"):
            # a file that may be left out: the parser's own positional settings may not
            prefix = f"--{positional.pop(0)}=" if positional else ""
            out.append(prefix + option + equals + value)
            continue
        key = option[2:].replace("-", "_")
        hint = types.get(key)
        following = bool(rest) and not rest[0].startswith("--")
        if hint is bool and not equals and (not following or rest[0] not in ("true", "false")):
            value, equals = "true", "="
        elif get_origin(hint) is list and not equals and following and not rest[0].startswith("["):
            values: list[str] = []
            while rest and not rest[0].startswith("--"):
                values.append(rest.pop(0))
            value, equals = (f"[{','.join(values)}]" if get_args(hint) == (int,) else json.dumps(values)), "="
        elif positional and not equals and following:
            value, equals = rest.pop(0), "="
        out.append(f"--{key}{equals}{value}")
    return out


def _types(config_class: Any, prefix: str = "") -> dict[str, Any]:
    """:return: setting, "env.task_ids" for one of a section -> its type, list[int] for list[int] | None"""
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(config_class).items():
        if is_dataclass(hint):
            found |= _types(hint, f"{prefix}{name}.")
        lists = [part for part in get_args(hint) if get_origin(part) is list]
        found[prefix + name] = lists[0] if lists else hint
    return found


def _take_nested(sections: Collection[str], args: list[str]) -> tuple[list[str], list[tuple[list[str], str]]]:
    """
    Take out settings inside a dict of an algorithm, ``--rlt.policy_kwargs.n_critics 2``.

    The parser would replace the whole dict by this one entry.

    :param sections: names of the algorithms
    :param args: the command line
    :return: the other words; the settings as in :class:`Words`
    """
    others: list[str] = []
    nested: list[tuple[list[str], str]] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        option, equals, value = arg.partition("=")
        path = option[2:].split(".")
        if option.startswith("--") and path[0] in sections and len(path) > 2:
            if not equals and not rest:
                raise ValueError(f"Argument {option}: expected one argument.")
            nested.append((path, value if equals else rest.pop(0)))
        else:
            others.append(arg)
    return others, nested


def put_nested(settings: dict[str, Any], nested: list[tuple[list[str], str]]) -> None:
    """
    Write nested settings into the parser's result.

    :param settings: what the parser found; changed in place
    :param nested: as in :class:`Words`
    :raises ValueError: if a setting has no settings inside, or a value is not YAML
    """
    if not nested:
        return
    from jsonargparse import get_loader

    for path, text in nested:
        option = f"--{'.'.join(path)}"
        try:
            value = get_loader("yaml")(text)
        except Exception as error:  # the loader's own errors have no class in common
            raise ValueError(f"{option} {text}: {' '.join(str(error).split())}.") from error
        inner = settings
        for place, key in enumerate(path[:-1]):
            entry = inner.get(key)
            if entry is not None and not isinstance(entry, dict):
                raise ValueError(f"{option}: {'.'.join(path[: place + 1])} is {entry!r}, which has no settings.")
            inner[key] = dict(entry or {})
            inner = inner[key]
        inner[path[-1]] = value
