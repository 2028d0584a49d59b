"""What was executed in a chunk, and how rows that begin inside one are put together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch as th


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
    :param numbers: the observations of the episode so far, counted as they were written
    :param copies: see :func:`~rlt_sb3.common.replay.intervention_copies.copy_row`
    """

    slot: int
    chunk: Chunk
    inner: list[tuple[int, int]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)


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


def executed_chunks(actions: np.ndarray, infos: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """
    :param actions: chunks that were asked for (n_envs, C, d)
    :param infos: one per sub-environment; ``executed_actions`` (C, d) where someone may have taken over
    :return: chunks that were executed (n_envs, C, d)
    """
    return np.stack([info.get("executed_actions", action) for action, info in zip(actions, infos, strict=True)])


def succeeded(info: Mapping[str, Any], reward: float) -> bool:
    """
    :param info: of the step that ended an episode; ``is_success`` where the env says it
    :param reward: of the last chunk; without ``is_success`` a positive one is a success
    :return: whether the episode ended in success
    """
    return bool(info.get("is_success", reward > 0))


def chunk_stats(infos: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """
    What the infos of one vector step say besides the reward, for the log.

    :param infos: one per sub-environment
    :return: of what there is: ``intervention``, share of the executed control steps that someone else chose;
        ``critical_phase``, share of the chunks in it; ``reward_<term>``, sum per chunk of each of ``reward_terms``
    """
    values: dict[str, list[float]] = {}
    for info in infos:
        steps = int(info.get("chunk_steps", 1))
        if "intervention" in info and steps:
            values.setdefault("intervention", []).append(float(np.mean(info["intervention"][:steps])))
        if "critical_chunk" in info:
            values.setdefault("critical_phase", []).append(float(info["critical_chunk"]))
        for name, term in info.get("reward_terms", {}).items():
            values.setdefault(f"reward_{name}", []).append(float(np.sum(term)))
    return {name: float(np.mean(of_envs)) for name, of_envs in values.items()}


def times_per_dimension(chunks: th.Tensor, factor: Any) -> th.Tensor:
    """
    :param chunks: flat chunks (B, C*d)
    :param factor: a number, or one per action dimension (d,)
    :return: the chunks, every step's actions times the factor
    """
    factor = th.as_tensor(factor, dtype=chunks.dtype, device=chunks.device)
    return chunks * (factor if factor.ndim == 0 else factor.repeat(chunks.shape[1] // len(factor)))
