"""What was executed in a chunk, and how rows that begin inside one are put together."""

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Chunk:
    """
    One executed chunk; only the first ``steps`` control steps of its arrays were executed.

    :param actions: (C, d)
    :param rewards: (C,), zeros from ``steps`` on
    :param steps: executed control steps, 1..C
    :param human: (C,) bool, True where a human or an expert chose
    """

    actions: np.ndarray
    rewards: np.ndarray
    steps: int
    human: np.ndarray


@dataclass
class Lane:
    """
    The running episode of one sub-environment.

    :param slot: slot of the observation after the newest chunk
    :param chunk: the newest chunk
    :param inner: rows that began inside it and are not complete yet: (slot, control step)
    """

    slot: int
    chunk: Chunk
    inner: list[tuple[int, int]] = field(default_factory=list)


def join_chunks(before: Chunk, after: Chunk | None, start: int) -> Chunk:
    """
    The chunk that began inside another one.

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
    rewards, human = np.zeros(length, dtype=np.float32), np.zeros(length, dtype=bool)
    for mine, first, second in (
        (actions, before.actions, None if after is None else after.actions),
        (rewards, before.rewards, None if after is None else after.rewards),
        (human, before.human, None if after is None else after.human),
    ):
        mine[: before.steps - start] = first[own]
        if second is not None:
            mine[before.steps - start : steps] = second[:take]
    actions[steps:] = actions[steps - 1]
    return Chunk(actions, rewards, steps, human)
