"""The statistics of branches.py: how critics rank the chunks of one branch point, and its tables."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from markdown_table import markdown_table
from scipy.stats import spearmanr

from rlt_sb3.common.stats import wilson_interval

#: how the critics' values of a chunk are summed up
VALUES = ("mean", "min")
#: of the initial states, for an interval
RESAMPLES = 500


def pairs_of(rows: list[dict[str, Any]], kinds: Sequence[str]) -> list[dict[str, Any]]:
    """
    Compare the branches of each branch point with each other.

    :param rows: of :func:`branches.branch`
    :param kinds: which chunks to compare
    :return: for each pair its "state", and the first one's "success", "return", "mean" and "min" less the second one's
    """
    points: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        if row["plays"] in kinds:
            points.setdefault((*row["state"], row["at"]), []).append(row)
    return [
        {"state": a["state"], **{name: float(a[name]) - float(b[name]) for name in ("success", "return", *VALUES)}}
        for group in points.values()
        for a, b in itertools.combinations(group, 2)
    ]


def ranking(pairs: list[dict[str, Any]], value: str) -> dict[str, Any]:
    """
    Say how well values rank chunks.

    :param pairs: of :func:`pairs_of`
    :param value: one of :data:`VALUES`
    :return: "differ": pairs with a success and a failure, "preferred": those in which the success has the larger value,
        "interval": Wilson's, "correlation": with returns, and "bootstrap": both ends of its interval, NaN if unknown
    """
    differ = [pair for pair in pairs if pair["success"]]
    preferred = sum(pair[value] * pair["success"] > 0 for pair in differ)
    of_state: dict[Any, list[tuple[float, float]]] = {}
    for pair in pairs:
        both = (pair[value], pair["return"])
        of_state.setdefault(tuple(pair["state"]), []).extend([both, (-both[0], -both[1])])
    groups = [np.array(group) for group in of_state.values()]

    def correlation(chosen: Sequence[int]) -> float:
        both = np.concatenate([groups[number] for number in chosen]) if len(chosen) else np.zeros((1, 2))
        return math.nan if np.ptp(both, axis=0).min() == 0 else float(spearmanr(*both.T).statistic)

    rng = np.random.default_rng(0)
    drawn = [correlation(rng.integers(len(groups), size=len(groups)).tolist()) for _ in range(RESAMPLES * bool(groups))]
    known = [one for one in drawn if not math.isnan(one)] or [math.nan]
    return {
        "differ": len(differ), "preferred": preferred, "interval": wilson_interval(preferred, len(differ)),
        "correlation": correlation(range(len(groups))), "bootstrap": np.percentile(known, (2.5, 97.5)).tolist(),
    }  # fmt: skip


def outcome_table(rows: list[dict[str, Any]]) -> str:
    """
    Make the table of what chunks lead to, and of what the critics say.

    :param rows: of :func:`branches.branch`
    :return: Markdown
    """
    lines = [["chunk", "plays", "solved", "mean return", "critics' mean", "critics' minimum"]]
    for (at, plays), group in itertools.groupby(
        sorted(rows, key=lambda row: (row["at"], row["plays"])), lambda row: (row["at"], row["plays"])
    ):
        of_kind = list(group)
        solved, n = sum(row["success"] for row in of_kind), len(of_kind)
        low, high = wilson_interval(solved, n)
        means = (f"{np.mean([row[name] for row in of_kind]):.3f}" for name in ("return", *VALUES))
        lines.append([str(at), plays, f"{solved}/{n} ({low:.0%} to {high:.0%})", *means])
    return markdown_table(lines)


def ranking_table(found: list[dict[str, Any]]) -> str:
    """
    Make the table of rankings.

    :param found: of :func:`ranking`, with "at", "kinds", "pairs" and "value"
    :return: Markdown
    """
    lines = [["chunk", "pairs of", "pairs", "value", "success preferred", "rank correlation with the return"]]
    for row in found:
        low, high = row["interval"]
        preferred = f"{row['preferred']}/{row['differ']} ({low:.0%} to {high:.0%})"
        correlation = f"{row['correlation']:+.2f} ({row['bootstrap'][0]:+.2f} to {row['bootstrap'][1]:+.2f})"
        lines.append([str(row["at"]), row["kinds"], str(row["pairs"]), row["value"], preferred, correlation])
    return markdown_table(lines)
