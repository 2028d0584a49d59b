"""The running episode of a sub-environment, and the construction of rows that begin inside a chunk."""

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Chunk:
    """
    One executed chunk; only the first ``steps`` control steps of its arrays were executed.

    :param actions: (C, d)
    :param rewards: (C,), zeros from ``steps`` on
    :param steps: executed control steps, 1..C
    :param taken_over: (C,) bool, True where someone else (a human, an expert) chose
    """

    actions: np.ndarray
    rewards: np.ndarray
    steps: int
    taken_over: np.ndarray


@dataclass
class OpenEpisode:
    """
    The running episode of one sub-environment.

    :param slot: slot of the observation after the newest chunk; None: the newest chunk was not stored
    :param chunk: the newest chunk that was stored
    :param inner: rows that began inside it and are not complete yet: (slot, control step)
    :param numbers: the observations of the episode so far, counted as they were written
    :param copies: see :func:`~rlt_sb3.common.replay.intervention_copies.copy_row`
    """

    slot: int | None
    chunk: Chunk
    inner: list[tuple[int, int]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)


def join_chunks(before: Chunk, after: Chunk | None, start: int) -> Chunk:
    """
    Make the chunk that began inside another one.

    :param before: the chunk it began in, complete if ``after`` is given
    :param after: the next chunk of the episode; None if the episode ended
    :param start: control step of ``before`` at which it began
    :return: C control steps from there on; where fewer were executed, the last action is repeated
    """
    length = len(before.rewards)
    take = 0 if after is None else min(start, after.steps)
    own = slice(start, before.steps)
    steps = before.steps - start + take
    actions = np.empty_like(before.actions)
    rewards, taken_over = np.zeros(length, dtype=np.float32), np.zeros(length, dtype=bool)
    for mine, first, second in (
        (actions, before.actions, None if after is None else after.actions),
        (rewards, before.rewards, None if after is None else after.rewards),
        (taken_over, before.taken_over, None if after is None else after.taken_over),
    ):
        mine[: before.steps - start] = first[own]
        if second is not None:
            mine[before.steps - start : steps] = second[:take]
    actions[steps:] = actions[steps - 1]
    return Chunk(actions, rewards, steps, taken_over)
