"""The outcome of a policy on the suites of a benchmark, as data and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlt_sb3.evaluation.results import Evaluation, StateResult
from rlt_sb3.evaluation.shards import MergeError, read_json

#: First entry of the files, by which they are recognized.
KIND = "evaluation of a policy on suites"
#: What makes two files parts of one evaluation.
SAME = ("policy", "vla", "protocol", "played", "tasks", "episodes")
#: What files note besides: it explains small differences, and parts of one evaluation may differ in it.
NOTED = ("num_envs", "versions", "machine")
#: The split that is played.
SPLIT = "eval"


@dataclass(frozen=True)
class Place:
    """
    An initial state of a benchmark.

    :param suite: its suite
    :param pair: its number in the suite: state by state, the tasks in turn
    :param task_id: its task
    :param init_index: its number within the task
    """

    suite: str
    pair: int
    task_id: int
    init_index: int


def plan(tasks: Mapping[str, Sequence[int]], episodes: int, shard: tuple[int, int] = (0, 1)) -> list[Place]:
    """
    List the initial states of an evaluation, or of one of its parts.

    :param tasks: task numbers by suite
    :param episodes: initial states per task
    :param shard: (k, n) takes the states k, k + n, k + 2n, ... of all
    :return: suite by suite, in the order in which they are played: task by task, as a simulator keeps few tasks
    """
    places = [
        Place(suite, state * len(numbers) + position, task, state)
        for suite, numbers in tasks.items()
        for state in range(episodes)
        for position, task in enumerate(numbers)
    ]
    mine = places[shard[0] :: shard[1]]
    order = {(suite, task): (i, j) for i, suite in enumerate(tasks) for j, task in enumerate(tasks[suite])}
    return sorted(mine, key=lambda place: (order[place.suite, place.task_id], place.init_index))


@dataclass
class BenchmarkResult:
    """
    The outcome of one policy.

    :param header: what was evaluated and how: the entries of :data:`SAME` and :data:`NOTED`
    :param shard: (k, n), k from 1 on, if this is a part
    :param rows: by suite, one entry per initial state that was played
    :param instructions: what the robot was told to do, by "suite/task"
    :param films: by "suite/task", ``init_index`` of a failure and ``file``, relative to the JSON file
    """

    header: dict[str, Any]
    shard: tuple[int, int] | None = None
    rows: dict[str, list[StateResult]] = field(default_factory=dict)
    instructions: dict[str, str] = field(default_factory=dict)
    films: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def places(self) -> list[Place]:
        """The initial states that this evaluation, or part of one, has when it is complete."""
        shard = (0, 1) if self.shard is None else (self.shard[0] - 1, self.shard[1])
        return plan(self.header["tasks"], self.header["episodes"], shard)

    @property
    def left(self) -> list[Place]:
        """The initial states that were not played yet."""
        played = {(suite, row.pair) for suite, rows in self.rows.items() for row in rows}
        return [place for place in self.places if (place.suite, place.pair) not in played]

    @property
    def suites(self) -> dict[str, Evaluation]:
        """The outcome by suite; suites of which nothing was played are left out."""
        return {
            suite: Evaluation(self.header["policy"], SPLIT, sorted(self.rows[suite], key=lambda row: row.pair))
            for suite in self.header["tasks"]
            if self.rows.get(suite)
        }

    @property
    def mean_of_suites(self) -> float | None:
        """Mean of the suites' success rates, each suite of equal weight; None if nothing was played."""
        rates = [suite.rate for suite in self.suites.values()]
        return sum(rates) / len(rates) if rates else None

    def add(self, place: Place, instruction: str, success: bool, steps: int, chunks: int) -> None:
        """
        Add the outcome of an initial state.

        :param place: the state
        :param instruction: what the robot was told to do
        :param success: whether the task was solved
        :param steps: control steps played
        :param chunks: chunks played
        """
        row = StateResult(place.pair, place.task_id, place.init_index, success, steps, chunks)
        self.rows.setdefault(place.suite, []).append(row)
        self.instructions[f"{place.suite}/{place.task_id}"] = instruction

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data for JSON. It does not depend on the order in which the states were played."""
        suites = {}
        for name, suite in self.suites.items():
            tasks = {
                str(task): {"instruction": self.instructions[f"{name}/{task}"], **_summary(part)}
                for task, part in suite.per_task().items()
            }
            suites[name] = {**_summary(suite), "tasks": tasks, "rows": [asdict(row) for row in suite.rows]}
        data: dict[str, Any] = {"kind": KIND, **self.header}
        if self.shard is not None:
            data["shard"] = list(self.shard)
        data["complete"] = not self.left
        data["mean_of_suites"] = self.mean_of_suites
        data["suites"] = suites
        data["films"] = dict(sorted(self.films.items()))
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> BenchmarkResult:
        """
        Read an evaluation from plain data.

        :param data: from :meth:`to_dict`
        :return: the evaluation
        """
        rows = {name: [StateResult(**row) for row in suite["rows"]] for name, suite in data["suites"].items()}
        instructions = {
            f"{name}/{task}": entry["instruction"]
            for name, suite in data["suites"].items()
            for task, entry in suite["tasks"].items()
        }
        header = {key: data[key] for key in (*SAME, *NOTED)}
        shard = tuple(data["shard"]) if "shard" in data else None
        return cls(header, shard, rows, instructions, dict(data["films"]))


def _summary(evaluation: Evaluation) -> dict[str, Any]:
    data = evaluation.to_dict()
    return {key: data[key] for key in ("successes", "n", "wilson_95", "mean_steps_to_success")}


def is_benchmark(path: Path) -> bool:
    """
    Tell whether a file is the outcome of a policy on suites.

    :param path: a file; it may be missing or anything else
    """
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and data.get("kind") == KIND


def read(path: Path) -> BenchmarkResult:
    """
    Read a file of ``rlt eval --vla``.

    :param path: the file
    :return: the evaluation
    :raises FileNotFoundError: if there is none
    :raises ValueError: if it is another file, or damaged
    :raises RunError: if it cannot be read
    """
    otherwise = f"{path} is no evaluation: give a JSON file that rlt eval --vla wrote."
    data = read_json(path, otherwise)
    if data.get("kind") != KIND:
        raise ValueError(otherwise)
    try:
        return BenchmarkResult.from_dict(data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: evaluate again with rlt eval --vla, or give another file.") from error


def merge(files: Sequence[Path]) -> BenchmarkResult:
    """
    Put the parts of an evaluation together.

    :param files: JSON files of ``rlt eval --vla NAME --shard``
    :return: what one evaluation of all states would have given
    :raises MergeError: if a part is missing, there twice, incomplete, or of another evaluation
    """
    parts: dict[int, BenchmarkResult] = {}
    first = read(files[0])
    for path in files:
        part = read(path)
        if part.shard is None:
            raise MergeError(f"{path} is a whole evaluation: --merge takes those of rlt eval --shard.")
        different = differences(first.header, part.header, SAME)
        if different:
            raise MergeError(f"{path} belongs to another evaluation than {files[0]}: {different}.")
        index, count = part.shard
        assert first.shard is not None
        if count != first.shard[1]:
            raise MergeError(f"{path} is part {index}/{count}, but {files[0]} is one of {first.shard[1]}.")
        if index in parts:
            raise MergeError(f"Part {index}/{count} is there twice ({path}): give each part once.")
        if part.left:
            raise MergeError(
                f"{path} lacks {len(part.left)} of {len(part.places)} initial states: give the command of this part "
                "again, which goes on where it was."
            )
        parts[index] = part
    assert first.shard is not None
    missing = [f"{k}/{first.shard[1]}" for k in range(1, first.shard[1] + 1) if k not in parts]
    if missing:
        raise MergeError(f"Missing: part {', part '.join(missing)}. Give the JSON file of each part.")
    whole = BenchmarkResult(dict(first.header))
    for key in NOTED:  # parts may come from several machines
        different_ones = [part.header.get(key) for part in parts.values()]
        if any(entry != different_ones[0] for entry in different_ones):
            whole.header[key] = different_ones
    for _, part in sorted(parts.items()):
        for suite, rows in part.rows.items():
            whole.rows.setdefault(suite, []).extend(rows)
        whole.instructions |= part.instructions
        for key, film in part.films.items():
            if key not in whole.films or film["init_index"] < whole.films[key]["init_index"]:
                whole.films[key] = film
    return whole


def differences(first: Mapping[str, Any], second: Mapping[str, Any], keys: Sequence[str]) -> str:
    """
    Name what differs between two settings.

    :param first: settings, perhaps with settings inside
    :param second: the others
    :param keys: what to compare
    :return: "protocol.chunk_length is 8, not 5"; "" without a difference
    """
    found = []
    for key in keys:
        a, b = first.get(key), second.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            inner = differences(a, b, [*a, *(name for name in b if name not in a)])
            found += [f"{key}.{text}" for text in inner.split("; ") if text]
        elif a != b:
            found.append(f"{key} is {b!r}, not {a!r}")
    return "; ".join(found)
