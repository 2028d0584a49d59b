"""The outcome of an evaluation, as data, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from rlt_sb3.common.films import DEFAULT_FPS
from rlt_sb3.common.stats import wilson_interval


@dataclass(frozen=True)
class StateResult:
    """
    The outcome of one initial state.

    :param pair: number of the state in its split's fixed order
    :param task_id: task of the suite
    :param init_index: number of the initial state within the task
    :param success: the task's own success predicate held at some control step
    :param steps: control steps played (to success or to the horizon)
    :param chunks: action chunks played
    """

    pair: int
    task_id: int
    init_index: int
    success: bool
    steps: int
    chunks: int


@dataclass
class Evaluation:
    """The outcome of one policy on one split.

    :param policy: name of the policy, for tables
    :param split: which set of initial states
    :param rows: one entry per initial state, in the split's order
    :param frames: pictures of recorded episodes, ``pair -> [(H, W, 3) uint8]``; not written to JSON
    :param fps: pictures a second at which these films are shown; not written to JSON
    """

    policy: str
    split: str
    rows: list[StateResult]
    frames: dict[int, list[np.ndarray]] = field(default_factory=dict, repr=False)
    fps: float = field(default=DEFAULT_FPS, repr=False, compare=False)

    @property
    def n(self) -> int:
        """Number of initial states."""
        return len(self.rows)

    @property
    def successes(self) -> int:
        """Number of initial states solved."""
        return sum(row.success for row in self.rows)

    @property
    def rate(self) -> float:
        """Success rate."""
        return self.successes / self.n if self.n else float("nan")

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the success rate."""
        return wilson_interval(self.successes, self.n)

    @property
    def steps_to_success(self) -> float:
        """Mean control steps of the successful episodes (NaN without any)."""
        steps = [row.steps for row in self.rows if row.success]
        return float(np.mean(steps)) if steps else float("nan")

    @property
    def control_steps(self) -> int:
        """Control steps of all episodes."""
        return sum(row.steps for row in self.rows)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.successes}/{self.n} ({self.rate:.0%}, 95 % CI {low:.0%} to {high:.0%})"

    def per_task(self) -> dict[int, Evaluation]:
        """Split the outcome by task."""
        tasks = sorted({row.task_id for row in self.rows})
        return {t: Evaluation(self.policy, self.split, [r for r in self.rows if r.task_id == t]) for t in tasks}

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data for JSON: the summary, then the rows."""
        low, high = self.interval
        steps = self.steps_to_success
        return {
            "policy": self.policy,
            "split": self.split,
            "successes": self.successes,
            "n": self.n,
            "wilson_95": [low, high],
            "mean_steps_to_success": None if np.isnan(steps) else steps,
            "rows": [asdict(row) for row in self.rows],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Evaluation:
        """
        Read an evaluation from plain data.

        :param data: from :meth:`to_dict`
        :return: the evaluation, without films
        """
        return cls(data["policy"], data["split"], [StateResult(**row) for row in data["rows"]])


def csv_rows(evaluations: Iterator[Evaluation] | list[Evaluation]) -> str:
    """
    Write the rows of some evaluations as one CSV text.

    :param evaluations: the evaluations
    :return: a header, then one line for each initial state
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["policy", "split", *StateResult.__dataclass_fields__])
    for evaluation in evaluations:
        for row in evaluation.rows:
            writer.writerow([evaluation.policy, evaluation.split, *map(_plain, asdict(row).values())])
    return out.getvalue()


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value


def dumps(data: Any) -> str:
    """
    Write JSON that every other tool can read: NaN is refused.

    :param data: plain data
    :return: the text
    :raises ValueError: if there is a NaN or an infinite number
    """
    return json.dumps(data, indent=2, allow_nan=False) + "\n"
