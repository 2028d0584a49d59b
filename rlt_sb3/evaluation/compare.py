"""Compares two policies on the same initial states, pair by pair."""

from __future__ import annotations

from dataclasses import dataclass

from rlt_sb3.common.stats import mcnemar_p
from rlt_sb3.evaluation.results import Evaluation


@dataclass(frozen=True)
class Comparison:
    """The outcomes of two policies on the same initial states.

    :param fixed: states that only the second policy solves
    :param broken: states that only the first policy solves
    :param both: states that both solve
    :param neither: states that neither solves
    :param p_value: McNemar's exact test
    """

    fixed: int
    broken: int
    both: int
    neither: int
    p_value: float


def compare(first: Evaluation, second: Evaluation) -> Comparison:
    """Pair two evaluations state by state.

    :param first: for instance the frozen VLA
    :param second: for instance the trained policy
    :raises ValueError: if they did not play the same initial states
    """
    a = {(row.task_id, row.init_index): row.success for row in first.rows}
    b = {(row.task_id, row.init_index): row.success for row in second.rows}
    if a.keys() != b.keys() or first.split != second.split:
        raise ValueError(
            f"Only evaluations on the same initial states can be paired; {first.policy!r} has {len(a)} states of "
            f"the split {first.split!r}, {second.policy!r} has {len(b)} of {second.split!r}, "
            f"{len(a.keys() & b.keys())} in common. "
            "Evaluate both with the same n_states and split."
        )
    fixed = sum(b[key] and not a[key] for key in a)
    broken = sum(a[key] and not b[key] for key in a)
    both = sum(a[key] and b[key] for key in a)
    return Comparison(fixed, broken, both, len(a) - fixed - broken - both, mcnemar_p(fixed, broken))


def tasks_below(first: Evaluation, second: Evaluation) -> list[int]:
    """
    Find the tasks in which a policy is below another one's 95 % interval.

    :param first: for instance the frozen VLA, whose intervals count
    :param second: for instance the trained policy, on the same initial states
    :return: tasks in which the second policy's success rate is below the lower bound of the first one's interval
    """
    theirs = second.per_task()
    return [task for task, part in first.per_task().items() if theirs[task].rate < part.interval[0]]


def describe_tasks_below(first: Evaluation, second: Evaluation) -> str | None:
    """
    Describe :func:`tasks_below`.

    :param first: for instance the frozen VLA
    :param second: for instance the trained policy
    :return: how many tasks of how many, and which; None if there is one task only
    """
    n_tasks, below = len(first.per_task()), tasks_below(first, second)
    if n_tasks < 2:
        return None
    which = f" ({', '.join(f'task {task}' for task in below)})" if below else ""
    return f"{second.policy} is below the {first.policy}'s 95 % interval in {len(below)} of {n_tasks} tasks{which}"
