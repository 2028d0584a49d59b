"""
Compare settings of ``rlt train`` over tasks and seeds: a queue of runs, and the statistics of the field.

    python benchmarks/recipe.py --settings benchmarks/recipes/ablations.yaml
    python benchmarks/recipe.py --settings FILE --table            # only the tables of the runs that are finished
    python benchmarks/recipe.py --settings FILE --rows a.json      # with the runs that another machine has made

A settings file has the arguments of ``rlt train`` that all runs share (``common``), those of each task (``tasks``) and
of each setting (``settings``), and ``seeds``. The first setting is the one that the others are compared with. A task
that needs another Python environment has ``{python: FILE, arguments: ...}``. ``{task}`` in arguments becomes the task's
name as in names of folders, ``libero_goal_2``: for files that each task has of its own. Runs are kept in ``--out``, are
not repeated, and go on from their last checkpoint if they were interrupted. The frozen VLA of a task plays in its first
run; later seeds, and settings with the same environment, take its outcomes from there. ``--tasks``, ``--only`` and
``--seeds`` choose a part of the queue for this machine; ``--rows`` reads what ``--json`` of the other machines has
written: those runs are in the tables, and are not repeated. ``--json`` keeps the runs of its file that this command
does not choose; the statistics in it are those of the tables. As many run at once as there are cores, so that all cores
are busy; start nothing else, or minutes mean little. A run's row has the load when it began and when it ended
(``load``: the last minute's average, divided by the number of cores), so that minutes can be judged; after an
interruption, of the part that went on.

The tables show, for each run, the frozen VLA and RLT on held-out states, how many of them only this run solves, and how
many only the first setting's run of the same task and seed; the practicing actor on the selection states, the area
under this curve, its lowest evaluation, and how many robot minutes and control steps (20 a second in LIBERO) it took
until the practicing actor solved 30 points more than the VLA and 90 %. ``report.html`` counts until ``predict()``
did, which plays the deployed actor. "Minutes" are wall time of the whole run. For each setting they show the statistics
of ``recipe_report.py`` (``pip install 'rlt[benchmarks]'``). ``--by-setting`` makes a shorter table.
"""

import argparse
import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from recipe_report import Key, aggregate, by_setting, comparison, figure, key, load_file, load_rliable, measure, table

from rlt_sb3.common.files import replacing
from rlt_sb3.experiment.frozen_vla import NO_MATTER
from rlt_sb3.experiment.report import read_evaluations

ROOT = Path(__file__).parent.parent
KEYS = {"common", "seeds", "tasks", "settings"}


@dataclass(frozen=True)
class Run:
    """
    One run of the queue.

    :param setting: name of the setting
    :param task: name of the task
    :param seed: seed of the run
    :param folder: where ``rlt train`` keeps it
    :param python: interpreter that runs it
    :param arguments: of ``rlt train``
    :param same_vla: folders of this run and of the others in which the frozen VLA does the same
    """

    setting: str
    task: str
    seed: int
    folder: Path
    python: str
    arguments: tuple[str, ...]
    same_vla: tuple[Path, ...]

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end."""
        return (self.folder / "report.html").exists()

    @property
    def key(self) -> Key:
        """Setting, task and seed."""
        return self.setting, self.task, self.seed

    def command(self) -> list[str]:
        """Return the command that begins the run, or continues it where it was interrupted."""
        train = [self.python, "-m", "rlt_sb3", "train"]
        if any(self.folder.glob("checkpoints/*/model.zip")):
            return [*train, "--resume", str(self.folder)]
        names = ["--out", str(self.folder.parent), "--name", self.folder.name, "--seed", str(self.seed)]
        known = next((run for run in self.same_vla if run != self.folder and has_vla(run)), None)
        if known is not None:
            names += ["--evaluation.vla_of", str(known)]
        return [*train, *self.arguments, *names, "--progress", "false"]


def has_vla(run: Path) -> bool:
    """
    Tell whether a run has played its frozen VLA on all states that other seeds play, too.

    :param run: folder of a run
    """
    return (run / "evaluations.json").exists() and "vla_selection" in read_evaluations(run)


def read_settings(path: Path) -> dict[str, Any]:
    """
    Read a settings file.

    :param path: a YAML file
    :return: its contents, with every task as a mapping
    :raises ValueError: if it has other keys, or no task, setting or seed
    """
    data = yaml.safe_load(path.read_text())
    if not isinstance(data, dict) or set(data) - KEYS or not all(data.get(key) for key in KEYS - {"common"}):
        found = sorted(data) if isinstance(data, dict) else data
        raise ValueError(f"{path} must have tasks, settings and seeds, and may have common, got {found}.")
    tasks = {
        name: task if isinstance(task, dict) else {"arguments": task or ""} for name, task in data["tasks"].items()
    }
    for name, task in tasks.items():
        if set(task) - {"python", "arguments"}:
            raise ValueError(f"Task {name!r} of {path} may have python and arguments, got {sorted(task)}.")
    return {"common": data.get("common") or "", "seeds": data["seeds"], "tasks": tasks, "settings": data["settings"]}


def queue(settings: dict[str, Any], out: Path, whole: dict[str, Any] | None = None) -> list[Run]:
    """
    List the runs of a settings file: all settings of a task and seed follow one another.

    :param settings: of :func:`read_settings` or :func:`select`
    :param out: where runs are kept
    :param whole: of :func:`read_settings`, if ``settings`` is a part of it: runs of other parts may have played the
        frozen VLA already
    :return: the runs, in the order in which they are made
    """
    runs = []
    whole = whole or settings
    seeds = dict.fromkeys([*whole["seeds"], *settings["seeds"]])
    sharing = [setting for setting, arguments in whole["settings"].items() if not has_own_vla(arguments or "")]
    for seed in settings["seeds"]:
        for task, of_task in settings["tasks"].items():
            for setting, arguments in settings["settings"].items():
                words = " ".join([settings["common"], of_task.get("arguments") or "", arguments or ""])
                words = words.replace("{task}", in_file_name(task))
                folder = out / folder_name(setting, task, seed)
                players = sharing if setting in sharing else [setting]
                same_vla = tuple(out / folder_name(player, task, other) for other in seeds for player in players)
                python = of_task.get("python", sys.executable)
                runs.append(Run(setting, task, seed, folder, python, tuple(shlex.split(words)), same_vla))
    return runs


def folder_name(setting: str, task: str, seed: int) -> str:
    """
    Name the folder of a run.

    :param setting: name of the setting
    :param task: name of the task
    :param seed: seed of the run
    """
    return "-".join(map(in_file_name, (setting, task, f"seed{seed}")))


def in_file_name(text: str) -> str:
    """
    Write a name of the settings file as it stands in names of files.

    :param text: name of a setting or task
    """
    return text.replace(",", "").replace(" ", "_")


def has_own_vla(arguments: str) -> bool:
    """
    Tell whether the frozen VLA may do something else with a setting than with others.

    :param arguments: the setting's arguments of ``rlt train``
    """
    same = {f"--env.{name}" for name in NO_MATTER}
    names = [word.partition("=")[0] for word in shlex.split(arguments)]
    return any(name.startswith(("--env", "--evaluation", "--config")) and name not in same for name in names)


def load() -> float:
    """Return how many processes were ready to run in the last minute, for each core of the machine."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def play(runs: list[Run], parallel: int) -> Iterator[Run]:
    """
    Make the runs that are not finished yet, several at once.

    :param runs: the queue
    :param parallel: runs at once
    :return: runs, each when it has finished
    """

    def one(run: Run) -> Run:
        command = run.command()
        if "--resume" not in command:
            shutil.rmtree(run.folder, ignore_errors=True)  # begun, and interrupted before its first checkpoint
        print("==", shlex.join(command[3:]), flush=True)
        began = load()
        with open(run.folder.with_name(f"{run.folder.name}.log"), "a") as log:
            # one thread each: the runs themselves are what fills the cores
            environ = os.environ | {"OMP_NUM_THREADS": "1"}
            subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT, env=environ)
        with replacing(load_file(run.folder)) as temporary:
            temporary.write_text(json.dumps({"began": began, "ended": load()}))
        return run

    with ThreadPoolExecutor(parallel) as pool:
        yield from pool.map(one, [run for run in runs if not run.finished])


def read_rows(files: list[Path]) -> dict[Key, dict[str, Any]]:
    """
    Read the runs in files of results.

    :param files: what ``--json`` of this command has written, here or on other machines
    :return: (setting, task, seed) -> row of the table
    :raises ValueError: if a file is not of this command, or two of them have the same run
    """
    found: dict[Key, dict[str, Any]] = {}
    for file in files:
        try:
            rows = {key(row): row for row in json.loads(file.read_text())["runs"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} must have been written by --json of benchmarks/recipe.py: {error}.") from error
        if twice := sorted(rows.keys() & found.keys()):
            raise ValueError(f"{file} has runs that a file before it has as well: {twice}.")
        found |= rows
    return found


def select(settings: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """
    Keep the part of a settings file that the command line names.

    :param settings: of :func:`read_settings`
    :param args: of the command line
    :return: the part
    :raises ValueError: if the file has no such setting or task
    """
    kept = dict(settings)
    for part, names in (("settings", args.only), ("tasks", args.tasks)):
        if unknown := sorted(set(names or []) - set(settings[part])):
            raise ValueError(f"{args.settings} has no {part} {unknown}, it has {list(settings[part])}.")
        kept[part] = {name: settings[part][name] for name in names or settings[part]}
    return kept | {"seeds": args.seeds or settings["seeds"]}


def main() -> None:
    """Make the runs and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", type=Path, required=True, help="a settings file")
    parser.add_argument("--out", type=Path, help="where runs are kept; runs/ and the file's name by default")
    parser.add_argument("--parallel", type=int, default=os.cpu_count(), help="runs at once")
    parser.add_argument("--only", nargs="+", help="settings of the file")
    parser.add_argument("--tasks", nargs="+", help="tasks of the file")
    parser.add_argument("--seeds", nargs="+", type=int, help="instead of those of the file")
    parser.add_argument("--table", action="store_true", help="make no runs")
    parser.add_argument("--by-setting", action="store_true", help="tables with the seeds of a setting in one line")
    parser.add_argument(
        "--json", type=Path, help="benchmarks/results/ and the file's name by default; keeps other runs"
    )
    parser.add_argument("--rows", type=Path, nargs="+", default=[], help="files that --json has written elsewhere")
    parser.add_argument("--figure", type=Path, help="picture of the practicing actors' learning curves")
    args = parser.parse_args()
    try:
        load_rliable()  # its absence must not show after hours of runs
        whole = read_settings(args.settings)
        settings, elsewhere = select(whole, args), read_rows(args.rows)
        written = args.json or ROOT / "benchmarks" / "results" / f"{args.settings.stem}.json"
        read_rows([written] if written.exists() else [])  # a file of something else must not show after hours of runs
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    out = args.out or Path("runs") / args.settings.stem
    out.mkdir(parents=True, exist_ok=True)
    runs = queue(settings, out, whole)
    if not args.table:
        with open(out / ".lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                parser.error(f"another of these commands is at work in {out}: wait for it, or name another --out")
            for run in play([run for run in runs if run.key not in elsewhere], args.parallel):
                print(table([measure(run.key, run.folder)]).splitlines()[-1], flush=True)
    rows = [
        elsewhere.get(run.key) or measure(run.key, run.folder) for run in runs if run.key in elsewhere or run.finished
    ]
    if not rows:
        parser.error(f"no run in {out} is finished")
    results = aggregate(rows)
    kept = read_rows([written] if written.exists() else [])  # now: another command may have added runs meanwhile
    kept |= {key(row): row for row in rows}
    with replacing(written) as temporary:
        temporary.write_text(json.dumps({"runs": list(kept.values()), "settings": results}, indent=1) + "\n")
    if args.figure:
        figure(rows, args.figure)
    print(by_setting(rows) if args.by_setting else table(rows), comparison(results), sep="\n\n")


if __name__ == "__main__":
    main()
