"""Help of ``rlt train`` on the settings of algorithms, from their classes' signatures and docstrings."""

from __future__ import annotations

import argparse
from dataclasses import asdict, is_dataclass
from typing import Any

from rlt_sb3.experiment.algorithms import Algorithm, algorithm_names, get_algorithm
from rlt_sb3.experiment.signatures import REQUIRED, Setting

#: numbers of environments and control steps per chunk with which defaults that depend on them are shown
SHOWN = (2, 8)


def default_text(value: Any) -> str:
    """
    Write a default as a configuration file has it.

    :param value: a default
    :return: how a configuration file has it
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, type):
        return f"{value.__module__}:{value.__qualname__}"
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {default_text(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(default_text, value))}]"
    if all(hasattr(value, key) for key in ("start", "end", "end_fraction")):  # SB3's LinearSchedule
        return f"{{start: {value.start}, end: {value.end}, end_fraction: {value.end_fraction}}}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _describe(setting: Setting, default: Any, note: str = "") -> str:
    text = [f"type: {setting.type_name}"]
    if default is not REQUIRED:
        text.append(f"default: {default_text(default)}{note}")
    return f"{setting.text} ({', '.join(text)})".strip().replace("%", "%%")


def algorithm_help(name: str) -> str:
    """
    Write the help on an algorithm's settings.

    :param name: a registered algorithm
    :return: a heading and all settings of its section, with type, default and description
    """
    try:
        algorithm = get_algorithm(name)
        known, parts = algorithm.settings(), algorithm.settings_of_parts()
    except Exception as error:  # of another package, whose fault must not hide the help of the others
        return f"{name}: its settings cannot be shown ({' '.join(str(error).split())}).\n"
    parser = argparse.ArgumentParser(prog="rlt train", usage=argparse.SUPPRESS, add_help=False, allow_abbrev=False)
    group = parser.add_argument_group(
        f"settings of {algorithm.label}, with --algorithm {name}",
        f"In a file they are the section '{name}: {{setting: value}}'. A schedule is a mapping {{start: 20, end: 5, "
        'end_fraction: 0.5}, a class is written "torch.nn:GELU".',
    )
    defaults, varying = _defaults_of_runs(algorithm)
    for setting in known:
        if not setting.type_name:  # nothing that a file could hold
            continue
        note = f" for {SHOWN[0]} simulators and chunks of {SHOWN[1]} control steps" if setting.name in varying else ""
        default = defaults.get(setting.name, setting.default)
        group.add_argument(f"--{name}.{setting.name}", metavar="", help=_describe(setting, default, note))
        for inner in parts.get(setting.name, ()):
            if inner.type_name:
                group.add_argument(
                    f"--{name}.{setting.name}.{inner.name}", metavar="", help=_describe(inner, inner.default)
                )
    return "\n".join(line.rstrip() for line in parser.format_help().strip("\n").splitlines()) + "\n"


def _defaults_of_runs(algorithm: Algorithm) -> tuple[dict[str, Any], set[str]]:
    """Return the settings that a run computes from its environment unless the configuration gives them."""
    shown, other = algorithm.defaults(*SHOWN), algorithm.defaults(SHOWN[0] + 1, SHOWN[1] + 1)
    return shown, {name for name, value in shown.items() if other.get(name) != value}


def all_algorithms_help() -> str:
    """Return :func:`algorithm_help` of every registered algorithm."""
    return "\n".join(map(algorithm_help, algorithm_names()))
