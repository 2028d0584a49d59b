"""
The ``rlt`` command.

A subcommand is a dataclass of settings and a function, in :mod:`rlt_gym` or :mod:`rlt_sb3`: the command line may import
both packages. It names them as texts, and imports only those of the subcommand in use.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from rlt_sb3.experiment.config import ListConfig

#: name -> (settings, function, one line of help), the first two as "module:attribute"
COMMANDS = {
    "collect": (
        "rlt_gym.libero.collect:CollectConfig",
        "rlt_sb3.experiment.collect:collect",
        "write demonstrations of the scripted expert, or rollouts of a VLA or of a run",
    ),
    "export-lerobot": (
        "rlt_gym.data.lerobot_writer:ExportLeRobotConfig",
        "rlt_gym.data.lerobot_writer:export_lerobot",
        "write demonstration files as a LeRobot dataset, for lerobot-train",
    ),
    "train-vla": (
        "rlt_gym.vla.mini.training:TrainVLAConfig",
        "rlt_gym.vla.mini.training:train_vla",
        "train the embedded vision-language-action policy on demonstrations",
    ),
    "vla": (
        "rlt_gym.vla.command:VLAConfig",
        "rlt_gym.vla.command:vla_command",
        "check a vision-language-action policy: does it keep the contract, how fast is it",
    ),
    "pretrain-token": (
        "rlt_gym.rl_token.pretrain:PretrainTokenConfig",
        "rlt_gym.rl_token.pretrain:pretrain_token",
        "train the RL-token encoder of a frozen policy on demonstrations",
    ),
    "encode-tokens": (
        "rlt_gym.rl_token.encode_tokens:EncodeTokensConfig",
        "rlt_gym.rl_token.encode_tokens:encode_tokens",
        "write a frozen policy's tokens of demonstrations to disk, for pretrain-token on sets of any size",
    ),
    "probe": (
        "rlt_gym.rl_token.probe.command:ProbeConfig",
        "rlt_gym.rl_token.probe.command:probe",
        "is an RL token any good: what can be read from it, as numbers and as a page; exit status 1 if it is not",
    ),
    "train-reward": (
        "rlt_gym.reward.training:TrainRewardConfig",
        "rlt_gym.reward.training:train_reward",
        "train a network that sees success in a frozen policy's tokens, as a reward without the simulator's predicate",
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
        "rlt_sb3.experiment.eval_config:EvalConfig",
        "rlt_sb3.experiment.evaluate:evaluate",
        "evaluate a model of a run, or any frozen policy on LIBERO's suites",
    ),
    "compare": (
        "rlt_sb3.experiment.eval_config:CompareConfig",
        "rlt_sb3.experiment.evaluate:compare_files",
        "compare two evaluations state by state",
    ),
    "serve": (
        "rlt_sb3.experiment.serve:ServeConfig",
        "rlt_sb3.experiment.serve:serve",
        "serve a frozen VLA to training elsewhere, or the policy of a run to a robot",
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
    "pretrain-token --config": "rlt_sb3.cli.catalog:token_configs",
}
#: refuses a ``device`` that torch cannot use, for every command that has one; ``rlt train`` has two inside its sections
CHECK_DEVICE = "rlt_sb3.experiment.environment:check_device"
TASKS = "rlt_sb3.cli.catalog:tasks"
CONFIG_HELP = (
    "YAML file with settings, or (train, pretrain-token) the name of a shipped one; settings beside it override it"
)
USAGE = "%(prog)s [--config FILE.yaml] [--setting VALUE ...]"


def _columns(names: Mapping[str, str]) -> list[str]:
    """Return one line per name, with its meaning."""
    width = max(map(len, names), default=0)
    return [f"  {name:<{width}}  {text}".rstrip() for name, text in names.items()]


def usage() -> str:
    """Write what ``rlt --help`` prints, without importing the subcommands."""
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


def parse(command: str, args: Sequence[str]) -> Any:
    """
    Read the settings of a command from YAML files and the command line.

    :param command: one of :data:`COMMANDS`
    :param args: the command line after the command
    :return: the command's dataclass
    :raises ValueError: for a file that cannot be used
    :raises SystemExit: with status 2 for an unknown setting or one of a wrong type, after a line that says so; with
        status 0 for ``--help``
    """
    from jsonargparse import ArgumentParser

    from rlt_sb3.cli.arguments import plain_error, put_nested, read_words

    class Parser(ArgumentParser):
        def error(self, message: str, ex: Exception | None = None) -> NoReturn:
            # one line, as for all other errors: the usage is longer than a screen
            plain = plain_error(message, config_class, sections)
            print(f"rlt {command}: {plain} (rlt {command} --help)", file=sys.stderr)
            raise SystemExit(2) from ex

        def print_help(self, file: Any = None) -> None:
            super().print_help(file)
            if command == "train":
                sys.stdout.flush()  # the rest takes a few seconds: it imports the algorithms and with them torch
                from rlt_sb3.cli.algorithm_help import all_algorithms_help

                print(f"\n{all_algorithms_help()}", file=file)

    config_class = resolve_name(COMMANDS[command][0])
    parser = Parser(prog=f"rlt {command}", usage=USAGE, description=COMMANDS[command][2], allow_abbrev=False)
    parser.add_argument("--config", action="config", help=CONFIG_HELP)
    sections: dict[str, str] = {}
    if command == "train":
        sections = _sections()
        parser.add_class_arguments(config_class, as_group=False, skip={"algorithms"})
        for name, text in sections.items():
            parser.add_argument(f"--{name}", type=dict[str, Any], default={}, help=text)
    else:
        parser.add_class_arguments(config_class, as_group=False, as_positional=True)
    words = read_words(args, config_class, sections)
    printing = [word for word in words.settings if word.partition("=")[0] == "--print_config"]
    words.settings = [word for word in words.settings if word not in printing]
    found = parser.parse_args(words.for_parser())
    put_nested(vars(found), words.nested)
    if printing:  # with the nested settings, of which the parser knows nothing; it prints and exits
        merged = [f"--{name}={json.dumps(found[name])}" for name in sections]
        parser.parse_args([*words.for_parser(), *merged, *printing])
    settings = vars(parser.instantiate(found))
    del settings["config"]
    return config_class.from_dict(settings) if command == "train" else config_class(**settings)


def _sections() -> dict[str, str]:
    """Return the help on each section of a run's configuration, one section for each registered algorithm."""
    from rlt_sb3.experiment.algorithms import algorithm_names

    return {
        name: f"settings of the algorithm {name!r}, used with --algorithm {name}; one of them is --{name}.SETTING"
        for name in algorithm_names()
    }


def list_names(config: ListConfig) -> None:
    """``rlt list``.

    :param config: whether the tasks of a suite are asked for
    :raises ValueError: for an unknown suite; lists the choices
    """
    if config.suite is not None:
        lists = {f"env.task_ids of {config.suite}": resolve_name(TASKS)(config.suite)}
    else:
        lists = {setting: resolve_name(function)() for setting, function in LISTS.items()}
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
            resolve_name(CHECK_DEVICE)(device)
        status = resolve_name(COMMANDS[command][1])(settings)
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
