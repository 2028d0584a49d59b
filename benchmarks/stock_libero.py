"""CPU time of LIBERO workers against stock LIBERO, interleaved in the same run.

    python benchmarks/stock_libero.py [--parts step,where,reset,physics,workers,vector,pixels] [--json FILE]
    python benchmarks/stock_libero.py --parts step,where --tasks libero_10:3,libero_90:30 --json FILE --resume

Stock is LIBERO's own ``OffScreenRenderEnv`` (hard resets, both cameras drawn at every control step). Every competitor
is a separate process; they take turns chunk by chunk, so that whatever else the machine does hits all of them alike.
Only CPU time (user and system, children included) is compared. Ratios are stock / other: above 1 is faster.

"step" and "where" measure ten tasks, two of each suite: those one third and two thirds into the suite, whatever they
are. FILE is written after each task, and ``--resume`` leaves out the tasks that it has.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from simulators import CHUNK, Competitor, race, row_of, started

Task = tuple[str, int]

#: One third and two thirds into each suite.
TASKS: list[Task] = [
    *((suite, task) for suite in ("libero_spatial", "libero_object", "libero_goal", "libero_10") for task in (3, 6)),
    ("libero_90", 30),
    ("libero_90", 60),
]
PIXEL_TASKS: list[Task] = [("libero_goal", 0), ("libero_object", 1), ("libero_10", 3)]


# ---------------------------------------------------------------- parts: each yields rows


def bench_step(rounds: int, tasks: list[Task]) -> Iterator[dict[str, Any]]:
    """One control step of a chunk of 8, two cameras of 128 pixels."""
    for suite, task in tasks:
        where = {"suite": suite, "task": task}
        competitors = started(
            stock=("Stock", {**where, "assets": "official"}),
            exact=("Ours", {**where, "assets": "official"}),
            fast=("Ours", {**where, "assets": "official", "render": "fast"}),
            embedded_exact=("Ours", {**where, "assets": "embedded"}),
            embedded_fast=("Ours", {**where, "assets": "embedded", "render": "fast"}),
        )
        for competitor in competitors.values():
            competitor.call("reset")
        seconds = race(competitors, "chunk", rounds)
        yield row_of(f"{suite} {task}", {name: value / CHUNK for name, value in seconds.items()})
        for competitor in competitors.values():
            competitor.close()


def bench_where(rounds: int, tasks: list[Task]) -> Iterator[dict[str, Any]]:
    """Where our time goes, in ms of CPU per control step; a reset with its settling steps."""
    for suite, task in tasks:
        for assets, render in (("official", "exact"), ("embedded", "fast")):
            ours = Competitor("Ours", suite=suite, task=task, assets=assets, render=render)
            parts = ours.call("parts", 2 * rounds)
            ours.close()
            what = f"{suite} {task}, {render}, {assets}"
            yield {"what": what, **{name: round(value, 2) for name, value in parts.items()}}


def bench_physics(rounds: int, tasks: list[Task]) -> Iterator[dict[str, Any]]:
    """One control step without pictures."""
    where = {"suite": "libero_goal", "task": 0, "assets": "official", "pictures": False}
    competitors = started(stock=("Stock", where), exact=("Ours", where))
    for competitor in competitors.values():
        competitor.call("reset")
    seconds = race(competitors, "chunk", rounds, per_round=3)
    for competitor in competitors.values():
        competitor.close()
    yield row_of("libero_goal 0", {name: value / CHUNK for name, value in seconds.items()})


def bench_reset(rounds: int, tasks: list[Task]) -> Iterator[dict[str, Any]]:
    """``reset()`` and ``set_init_state()``; the same with ten settling steps and the first two pictures."""
    where = {"suite": "libero_goal", "task": 0, "assets": "official"}
    competitors = started(stock=("Stock", where), exact=("Ours", where))
    for command, what in (("reset", "reset"), ("episode", "with 10 steps and pictures")):
        yield row_of(f"libero_goal 0, {what}", race(competitors, command, max(2, rounds - 1)))
    for competitor in competitors.values():
        competitor.close()


def bench_workers(rounds: int, tasks: list[Task]) -> Iterator[dict[str, Any]]:
    """Start and memory of four workers on embedded assets; one control step with one and with two workers."""
    where = {"kind": "ours", "suite": "libero_goal", "task": 1, "assets": "embedded", "render": "fast"}
    four = Competitor("Vector", **where, number=4)
    four.call("chunk", np.zeros((CHUNK, 7)))
    memory = four.call("memory")
    workers = sorted(memory)[-4:]
    row: dict[str, Any] = {
        "what": "4 workers, embedded, fast",
        "cpu_s_to_ready_each": round(four.start / 4, 2),
        "pss_mb_each": round(float(np.mean(workers)), 0),
    }
    four.close()
    competitors = started(one=("Vector", {**where, "number": 1}), two=("Vector", {**where, "number": 2}))
    seconds = race(competitors, "chunk", rounds, per_round=6)
    for competitor in competitors.values():
        competitor.close()
    row["ms_per_step_one_worker"] = round(1e3 * seconds["one"] / CHUNK, 2)
    row["ms_per_step_two_workers"] = round(1e3 * seconds["two"] / CHUNK / 2, 2)
    yield row


def bench_vector(rounds: int, tasks: list[Task]) -> Iterator[dict[str, Any]]:
    """Measure two simulators in separate processes, per control step and simulator."""
    where = {"suite": "libero_goal", "task": 0, "assets": "official", "number": 2}
    competitors = started(
        stock=("Vector", {**where, "kind": "subproc"}),
        gymnasium_async=("Vector", {**where, "kind": "async"}),
        exact=("Vector", {**where, "kind": "ours"}),
        fast=("Vector", {**where, "kind": "ours", "render": "fast"}),
    )
    seconds = race(competitors, "chunk", max(2, rounds - 1))
    for competitor in competitors.values():
        competitor.close()
    yield row_of("2 x libero_goal 0", {name: value / CHUNK / 2 for name, value in seconds.items()})


def bench_pixels(rounds: int, tasks: list[Task]) -> Iterator[dict[str, Any]]:
    """Mean absolute difference of fast from exact pictures, of 255."""
    for suite, task in PIXEL_TASKS:
        for assets in ("official", "embedded"):
            found = started(pictures=("Pictures", {"suite": suite, "task": task, "assets": assets}))
            for competitor in found.values():
                differences = {c: round(value, 2) for c, value in competitor.call("differences").items()}
                yield {"what": f"{suite} {task}", "assets": assets, **differences}
                competitor.close()


PARTS = {
    "step": bench_step,
    "where": bench_where,
    "physics": bench_physics,
    "reset": bench_reset,
    "workers": bench_workers,
    "vector": bench_vector,
    "pixels": bench_pixels,
}
#: Parts that go through :data:`TASKS`, and how many rows each task has.
BY_TASK = {"step": 1, "where": 2}


# ---------------------------------------------------------------- the table and the file


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print rows as a table in Markdown."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(str(row.get(column, "")) for column in columns) + " |", flush=True)


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compute the median and the lowest ratio over tasks."""
    found: list[dict[str, Any]] = [{"what": "median ratio"}, {"what": "lowest ratio"}]
    for column in dict.fromkeys(key for row in rows for key in row if key.endswith("_ratio")):
        values = [row[column] for row in rows if column in row]
        found[0][column], found[1][column] = round(statistics.median(values), 1), min(values)
    return found


class ResultFile:
    """
    Results that grow row by row. A row of the same name is replaced.

    :param path: ``None`` keeps them in memory.
    """

    def __init__(self, path: str | None):
        self._path = Path(path) if path else None
        self._content = json.loads(self._path.read_text()) if self._path and self._path.exists() else {}

    def rows(self, part: str) -> list[dict[str, Any]]:
        """Return the rows of a part."""
        return list(self._content.get(part, {}).get("rows", []))

    def keep(self, part: str, rows: list[dict[str, Any]], row: dict[str, Any]) -> list[dict[str, Any]]:
        """
        Write a row.

        :param part: Name of the part.
        :param rows: Its rows so far.
        :param row: A new one.
        :return: All of them, in the order of the tasks where they are tasks.
        """
        names = [f"{suite} {task}" for suite, task in TASKS]
        rows = [other for other in rows if other["what"] != row["what"] or other.get("assets") != row.get("assets")]
        rows = [*rows, row]
        if part in BY_TASK:  # a file of older lists of tasks has others
            rows = [other for other in rows if other["what"].split(",")[0] in names]
            rows.sort(key=lambda other: names.index(other["what"].split(",")[0]))
        self._content[part] = {"rows": rows}
        if part == "step":
            self._content[part]["summary"] = summary(rows)
        if self._path:
            import mujoco

            from rlt_gym.core.files import write_json

            self._content["machine"] = {
                "cpus": os.cpu_count(),
                "processor": platform.processor() or platform.machine(),
                "python": platform.python_version(),
                "mujoco": mujoco.__version__,
                "gl": os.environ.get("MUJOCO_GL", ""),
            }
            write_json(self._path, self._content)
        return rows


def task_of(text: str) -> Task:
    """Read a task, ``SUITE:NUMBER``."""
    suite, _, number = text.partition(":")
    if (suite, int(number or -1)) not in TASKS:
        known = ",".join(f"{suite}:{task}" for suite, task in TASKS)
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {known}")
    return suite, int(number)


def main() -> None:
    """Run the parts and print their reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--tasks", help="SUITE:NUMBER,...: only these of the ten tasks")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write (or update) results here, row by row")
    parser.add_argument("--resume", action="store_true", help="leave out tasks that the file has")
    args = parser.parse_args()
    unknown = set(args.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts {sorted(unknown)}; known: {', '.join(PARTS)}")
    try:
        tasks = [task_of(text) for text in args.tasks.split(",")] if args.tasks else TASKS
    except (argparse.ArgumentTypeError, ValueError) as error:
        parser.error(f"--tasks: {error}")
    file = ResultFile(args.json)
    for part in args.parts.split(","):
        function = PARTS[part]
        print(f"\n## {part}: {(function.__doc__ or '').strip()}\n", flush=True)
        rows = file.rows(part) if part in BY_TASK else []
        known = [row["what"].split(",")[0] for row in rows] if args.resume else []
        wanted = [(suite, task) for suite, task in tasks if known.count(f"{suite} {task}") < BY_TASK.get(part, 1)]
        for row in function(args.rounds, wanted):
            row.update(rounds=args.rounds, load=round(os.getloadavg()[0], 1))
            rows = file.keep(part, rows, row)
        print_table([*rows, *summary(rows)] if part == "step" else rows)


if __name__ == "__main__":
    main()
