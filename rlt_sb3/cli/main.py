"""
The ``rlt`` command. A subcommand is a dataclass of settings and a function, in :mod:`rlt_gym` or :mod:`rlt_sb3`: the
command line may import both packages. It names them as texts, and imports only those of the subcommand in use.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from rlt_sb3.experiment.config import ListConfig

#: name -> (settings, function, one line of help), the first two as "module:attribute"
COMMANDS = {
    "collect": (
        "rlt_gym.libero.collect:CollectConfig",
        "rlt_gym.libero.collect:collect",
        "write demonstrations of the scripted expert",
    ),
    "train-vla": (
        "rlt_gym.vla.mini.training:TrainVLAConfig",
        "rlt_gym.vla.mini.training:train_vla",
        "train the embedded vision-language-action policy on demonstrations",
    ),
    "pretrain-token": (
        "rlt_gym.rl_token.pretrain:PretrainTokenConfig",
        "rlt_gym.rl_token.pretrain:pretrain_token",
        "train the RL-token encoder of a frozen policy on demonstrations",
    ),
    "encode-demos": (
        "rlt_gym.rl_token.encode_demos:EncodeDemosConfig",
        "rlt_gym.rl_token.encode_demos:encode_demos",
        "demonstrations as transitions, for mixing into online training",
    ),
    "train": (
        "rlt_sb3.experiment.config:TrainConfig",
        "rlt_sb3.experiment.train:train",
        "frozen VLA evaluated, RL-token policy trained online, evaluated on the same states, report",
    ),
    "eval": (
        "rlt_sb3.experiment.config:EvalConfig",
        "rlt_sb3.experiment.evaluate_run:evaluate_run",
        "evaluate a model of a run",
    ),
    "assets": (
        "rlt_gym.libero.assets.command:AssetsConfig",
        "rlt_gym.libero.assets.command:assets",
        "check, download, verify or draw (sheet) the assets of LIBERO's tasks",
    ),
    "doctor": (
        "rlt_sb3.cli.doctor:DoctorConfig",
        "rlt_sb3.cli.doctor:doctor",
        "what is installed, what works, what to mend",
    ),
    "report": (
        "rlt_sb3.experiment.config:ReportConfig",
        "rlt_sb3.experiment.report:report",
        "write report.html of a run again",
    ),
    "list": (
        "rlt_sb3.experiment.config:ListConfig",
        "rlt_sb3.cli.main:list_names",
        "names that settings take: algorithms, environments, VLAs, suites, tasks, shipped configurations",
    ),
}

#: what ``rlt list`` prints: setting -> "module:function", which returns name -> what it is
LISTS = {
    "algorithm": "rlt_sb3.experiment.algorithms:labels",
    "env.id": "rlt_sb3.experiment.environment:registered_ids",
    "env.vla": "rlt_sb3.cli.catalog:vlas",
    "env.suite": "rlt_sb3.cli.catalog:suites",
    "config": "rlt_sb3.experiment.config:shipped_configs",
}
#: refuses a ``device`` that torch cannot use, for every command that has one; ``rlt train`` has two inside its sections
CHECK_DEVICE = "rlt_sb3.experiment.environment:check_device"
TASKS = "rlt_sb3.cli.catalog:tasks"
CONFIG_HELP = "YAML file with settings, for train also the name of a shipped one; later arguments override it"


def _columns(names: Mapping[str, str]) -> list[str]:
    """:return: one line per name, what it means beside it"""
    width = max(map(len, names), default=0)
    return [f"  {name:<{width}}  {text}".rstrip() for name, text in names.items()]


def usage() -> str:
    """What ``rlt --help`` prints; needs no import."""
    return "\n".join(
        [
            "usage: rlt COMMAND [--config FILE.yaml] [--setting VALUE ...]",
            "",
            "commands:",
            *_columns({name: text for name, (_, _, text) in COMMANDS.items()}),
            "",
            "rlt COMMAND --help lists the settings.",
        ]
    )


def _load(path: str) -> Any:
    module, attribute = path.split(":")
    return getattr(import_module(module), attribute)


def normalise(config_class: Any, args: Sequence[str]) -> list[str]:
    """
    Forms that people expect of a command line, as the parser takes them: ``--all-checkpoints`` for
    ``--all_checkpoints true``, ``--merge a b`` for ``--merge '["a", "b"]'``, ``--tasks 0,1`` or ``--tasks 0 1`` for
    ``--tasks '[0, 1]'``.

    :param config_class: the command's dataclass
    :param args: the rest of the command line
    """
    types = {field.name: str(getattr(field.type, "__name__", field.type)) for field in fields(config_class)}
    out: list[str] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        option, equals, value = arg.partition("=")
        if not option.startswith("--"):
            out.append(arg)
            continue
        key = option[2:].replace("-", "_")
        following = bool(rest) and not rest[0].startswith("--")
        if types.get(key) == "bool" and not equals and (not following or rest[0] not in ("true", "false")):
            arg = f"--{key}=true"
        elif types.get(key, "").startswith("list[") and not equals and following and rest[0][:1] not in "[":
            names = []
            while rest and not rest[0].startswith("--"):
                names.append(rest.pop(0))
            if types[key].startswith("list[int]"):
                arg = f"--{key}=[{','.join(names)}]"
            else:
                arg = f"--{key}={json.dumps(names)}"
            if key == "merge":
                out.append("")  # no RUN
        else:
            arg = f"--{key}{equals}{value}"
        out.append(arg)
    return out


def _with_config_of_resumed(args: list[str]) -> list[str]:
    """Let the configuration of the run in ``--resume`` come before everything else."""
    from pathlib import Path

    given = [arg.partition("=")[2] if "=" in arg else args[i + 1 : i + 2] for i, arg in enumerate(args)
             if arg == "--resume" or arg.startswith("--resume=")]  # fmt: skip
    if not given:
        return args
    path = Path(given[-1][0] if isinstance(given[-1], list) and given[-1] else str(given[-1]))
    for folder in (path, path.parent.parent):
        if (folder / "config.yaml").is_file():
            return ["--config", str(folder / "config.yaml"), *args]
    raise ValueError(f"There is no run to resume in {path}: --resume takes the folder that `rlt train` wrote.")


def _with_files_of_shipped_configs(args: list[str]) -> list[str]:
    """``rlt train --config demo``: put the file of a shipped configuration in the place of its name."""
    from rlt_sb3.experiment.config import config_file

    out: list[str] = []
    for arg in args:
        if out and out[-1] == "--config":
            arg = config_file(arg)
        elif arg.startswith("--config="):
            arg = f"--config={config_file(arg.partition('=')[2])}"
        out.append(arg)
    return out


def _check_config_files(args: list[str]) -> None:
    """
    The parser does not name the file that it cannot read.

    :param args: the rest of the command line
    :raises ValueError: if a file of ``--config`` is missing, no YAML, or no mapping
    """
    given = [arg.partition("=")[2] for arg in args if arg.startswith("--config=")]
    given += [value for option, value in pairwise(args) if option == "--config"]
    for name in given:
        import yaml

        try:
            with open(name, encoding="utf-8") as file:
                data = yaml.safe_load(file)
        except FileNotFoundError as error:
            raise ValueError(f"There is no file {name!r}.") from error
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ValueError(f"{name} cannot be read as YAML: {' '.join(str(error).split())}.") from error
        if data is not None and not isinstance(data, dict):
            raise ValueError(
                f"{name} must hold settings, 'name: value' in each line, it holds a {type(data).__name__}."
            )


def _take_nested(sections: Collection[str], args: list[str]) -> tuple[list[str], list[tuple[list[str], str]]]:
    """
    Take out settings inside a mapping of an algorithm, ``--rlt.policy_kwargs.n_critics 2``: the parser would replace
    the whole mapping by this one entry.

    :param sections: names of the algorithms
    :param args: the rest of the command line
    :return: the other arguments; (["rlt", "policy_kwargs", "n_critics"], "2") each
    """
    others: list[str] = []
    nested: list[tuple[list[str], str]] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        option, equals, value = arg.partition("=")
        path = option[2:].split(".")
        if option.startswith("--") and path[0] in sections and len(path) > 2 and (equals or rest):
            nested.append((path, value if equals else rest.pop(0)))
        else:
            others.append(arg)
    return others, nested


def _put(settings: dict[str, Any], path: list[str], value: Any) -> None:
    """
    :param settings: a mapping
    :param path: keys that lead into it
    :param value: what goes there
    :raises ValueError: if the path leads into something that is no mapping
    """
    for place, key in enumerate(path[:-1]):
        inner = settings.get(key)
        if inner is not None and not isinstance(inner, dict):
            raise ValueError(f"--{'.'.join(path)}: {'.'.join(path[: place + 1])} is {inner!r}, which has no settings.")
        settings[key] = dict(inner or {})
        settings = settings[key]
    settings[path[-1]] = value


def parse(command: str, args: Sequence[str]) -> Any:
    """Settings of a command from a YAML file and overrides.

    :param command: one of :data:`COMMANDS`
    :param args: the rest of the command line
    :return: the command's dataclass
    """
    from jsonargparse import ArgumentParser

    class Parser(ArgumentParser):
        def error(self, message: str, ex: Exception | None = None) -> NoReturn:
            # one line, as for all other errors: the usage is longer than a screen
            print(f"rlt {command}: {' '.join(message.split())} (rlt {command} --help)", file=sys.stderr)
            raise SystemExit(2) from ex

    config_class = _load(COMMANDS[command][0])
    parser = Parser(prog=f"rlt {command}", description=COMMANDS[command][2], allow_abbrev=False)
    parser.add_argument("--config", action="config", help=CONFIG_HELP)
    tidy = normalise(config_class, args)
    if command == "train":
        parser.add_class_arguments(config_class, as_group=False, skip={"algorithms"})
        sections = _sections()
        for name, text in sections.items():
            parser.add_argument(f"--{name}", type=dict[str, Any], default={}, help=text)
        tidy = _with_config_of_resumed(_with_files_of_shipped_configs(tidy))
        tidy, nested = _take_nested(sections, tidy)
    else:
        parser.add_class_arguments(config_class, as_group=False, as_positional=True)
        nested = []
    _check_config_files(tidy)
    settings = vars(parser.instantiate(parser.parse_args(tidy)))
    del settings["config"]
    if nested:
        import yaml

        for path, value in nested:
            _put(settings, path, yaml.safe_load(value))
    return config_class.from_dict(settings) if command == "train" else config_class(**settings)


def _sections() -> dict[str, str]:
    """:return: section of a run's configuration -> help; one for each registered algorithm"""
    from rlt_sb3.experiment.algorithms import algorithm_names

    return {
        name: f"keyword arguments of the algorithm {name!r}, used with --algorithm {name}; one of them is --{name}.KEY"
        for name in algorithm_names()
    }


def list_names(config: ListConfig) -> None:
    """``rlt list``.

    :param config: whether the tasks of a suite are asked for
    :raises ValueError: for an unknown suite; lists the choices
    """
    if config.suite is not None:
        lists = {f"env.task_ids of {config.suite}": _load(TASKS)(config.suite)}
    else:
        lists = {setting: _load(function)() for setting, function in LISTS.items()}
    for setting, names in lists.items():
        print("\n".join([setting, *_columns(names)]))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point.

    :param argv: arguments without the program's name
    :return: exit status: what the command returned if that is a number, else 0; 1 if something went wrong, 2 for a
        wrong setting, 130 after an interrupt
    """
    from rlt_sb3.common.errors import RunError

    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if args else 2
    command = args.pop(0)
    if command == "--version":
        from importlib.metadata import version

        print(version("rlt"))
        return 0
    if command not in COMMANDS:
        print(f"rlt: unknown command {command!r}; choose one of {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    try:
        settings = parse(command, args)
        device = getattr(settings, "device", None)
        if device not in (None, "cpu"):
            _load(CHECK_DEVICE)(device)
        status = _load(COMMANDS[command][1])(settings)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    except (ValueError, FileNotFoundError) as error:
        print(f"rlt {command}: {error}", file=sys.stderr)
        return 2
    except (RunError, OSError) as error:
        print(f"rlt {command}: {error}", file=sys.stderr)
        return 1
    return status if isinstance(status, int) else 0


if __name__ == "__main__":
    sys.exit(main())
