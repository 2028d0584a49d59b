"""The ``rlt`` command. A subcommand is a dataclass of settings and a function; only the one in use gets imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

#: name -> (settings, function, one line of help), the first two as "module:attribute"
COMMANDS = {
    "collect": (
        "rlt_gym.collect:CollectConfig",
        "rlt_gym.collect:collect",
        "write demonstrations of the scripted expert",
    ),
    "train-vla": (
        "rlt_gym.vla.imitation:TrainVLAConfig",
        "rlt_gym.vla.imitation:train_vla",
        "train the embedded vision-language-action policy on demonstrations",
    ),
    "pretrain-token": (
        "rlt_gym.rl_token_training:PretrainTokenConfig",
        "rlt_gym.rl_token_training:pretrain_token",
        "train the RL-token encoder of a frozen policy on demonstrations",
    ),
    "encode-demos": (
        "rlt_gym.transitions:EncodeDemosConfig",
        "rlt_gym.transitions:encode_demos",
        "demonstrations as transitions, for mixing into online training",
    ),
    "train": (
        "rlt_sb3.config:TrainConfig",
        "rlt_sb3.train:train",
        "frozen VLA evaluated, RL-token policy trained online, evaluated on the same states, report",
    ),
    "eval": ("rlt_sb3.config:EvalConfig", "rlt_sb3.eval_run:evaluate_run", "evaluate a model of a run"),
    "assets": (
        "rlt_gym.assets.command:AssetsConfig",
        "rlt_gym.assets.command:assets",
        "check, download, verify or draw (sheet) the assets of LIBERO's tasks",
    ),
    "report": ("rlt_sb3.config:ReportConfig", "rlt_sb3.report:report", "write report.html of a run again"),
}


def usage() -> str:
    """What ``rlt --help`` prints; needs no import."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, _, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: rlt COMMAND [--config FILE.yaml] [--setting VALUE ...]",
            "",
            "commands:",
            *lines,
            "",
            "rlt COMMAND --help lists the settings.",
        ]
    )


def _load(path: str) -> Any:
    module, attribute = path.split(":")
    return getattr(import_module(module), attribute)


def parse(command: str, args: Sequence[str]) -> Any:
    """Settings of a command from a YAML file and overrides.

    :param command: one of :data:`COMMANDS`
    :param args: the rest of the command line
    :return: the command's dataclass
    """
    from jsonargparse import ArgumentParser

    config_class = _load(COMMANDS[command][0])
    parser = ArgumentParser(prog=f"rlt {command}", description=COMMANDS[command][2], allow_abbrev=False)
    parser.add_argument("--config", action="config", help="YAML file with settings; later arguments override it")
    parser.add_class_arguments(config_class, as_group=False, as_positional=True)
    settings = parser.instantiate(parser.parse_args(list(args)))
    return config_class(**{key: value for key, value in vars(settings).items() if key != "config"})


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point.

    :param argv: arguments without the program's name
    :return: exit status: what the command returned if that is a number, else 0; 2 for a wrong setting, 130 after an
        interrupt
    """
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
        status = _load(COMMANDS[command][1])(settings)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    except (ValueError, FileNotFoundError) as error:
        print(f"rlt {command}: {error}", file=sys.stderr)
        return 2
    return status if isinstance(status, int) else 0


if __name__ == "__main__":
    sys.exit(main())
