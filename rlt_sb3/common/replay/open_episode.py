"""The running episode of a sub-environment, its chunks, and the construction of rows that begin inside a chunk."""

from dataclasses import dataclass, field

import numpy as np

from rlt_sb3.common.chunk_outcome import ChunkOutcome


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


def read_chunk(index: int, outcome: ChunkOutcome, asked: tuple[int, int], stride: int | None) -> Chunk | None:
    """
    Check one outcome, before anything is written.

    :param index: of the sub-environment, for messages
    :param outcome: what happened in the chunk
    :param asked: shape (C, d) of a chunk
    :param stride: control steps between two rows inside a chunk; None: there are none
    :return: the chunk; None: it is not to be stored
    :raises ValueError: if the outcome does not fit the chunk's shape or the stride
    """
    length, steps = asked[0], outcome.steps
    if outcome.broken or not outcome.critical or not outcome.stored:
        return None
    # copies: they wait in the open episode
    rewards = np.array(outcome.step_rewards, dtype=np.float32)
    if rewards.shape != (length,) or not 0 <= steps <= length:
        raise ValueError(
            f"Expected info['step_rewards'] of shape ({length},) and 1 <= info['chunk_steps'] <= {length} (0: "
            f"nothing was executed), got shape {rewards.shape} and {steps}."
        )
    if steps == 0:
        return None
    rewards[steps:] = 0.0
    taken_over = np.array(np.zeros(length) if outcome.intervention is None else outcome.intervention, dtype=bool)
    executed = np.array(outcome.executed, dtype=np.float32)
    if taken_over.shape != (length,) or executed.shape != asked:
        raise ValueError(
            f"Expected info['intervention'] of shape ({length},) and info['executed_actions'] of shape "
            f"{asked}, got {taken_over.shape} and {executed.shape}."
        )
    taken_over[steps:] = False
    if stride is not None and outcome.inner_obs is None:
        raise ValueError(
            f"stride={stride} needs info['inner_obs'] and info['inner_count'] of sub-environment {index}: "
            f"make the environment with obs_stride={stride}."
        )
    if stride is not None and outcome.inner_count < len(range(stride, steps, stride)):
        raise ValueError(
            f"stride={stride} needs {len(range(stride, steps, stride))} inner observations of "
            f"{steps} control steps, got {outcome.inner_count}: make the environment with obs_stride={stride}."
        )
    return Chunk(executed, rewards, steps, taken_over)


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
