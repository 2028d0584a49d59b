"""The outcome of one chunk in one sub-environment, read once from the environment's infos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class ChunkOutcome:
    """
    The outcome of one chunk in one sub-environment.

    :class:`~rlt_sb3.common.vec_env.GymnasiumVecEnv` makes one for every sub-environment in every step, and carries it
    in ``info["outcome"]``. Everything that learns from chunks, counts them or logs them reads its attributes
    (:func:`outcomes_of`); only :meth:`from_info` knows the environment's own keys.

    :param steps: executed control steps, 1..C; 0 where nothing was executed
    :param step_rewards: reward of each control step (C,); only the first ``steps`` count
    :param executed: executed actions (C, d). Before the critical phase the VLA's chunk is played instead of the one
        that was asked for; where the environment does not list what it executed, this is the chunk that was asked for
    :param intervention: which control steps someone else chose, bool (C,); None where nobody can take over
    :param critical_chunk: whether the chunk belongs to the critical phase of its episode; None where the environment
        knows no phases, and all chunks count
    :param success: whether the episode ended in success; undefined before the end
    :param broken: whether the simulator broke and was restarted: the chunk does not count, and its episode is over
    :param stored: whether the replay buffer keeps it
    :param env: which sub-environment it is of; None: its place in the vector step says so. A step of a part of the
        sub-environments names them
    :param offset: the offset of the VLA's chunks with which the whole episode is played, if it counts for
        :class:`~rlt_sb3.rlt.offset.OffsetSearch`
    :param searching: whether the episode tries this offset; else it is played without noise
    :param task_id: the episode's task
    :param episode_steps: control steps of the episode so far; None where the environment does not count them
    :param goal_reached: whether the simulator's goal is reached, if a reward model decides about success; None: it does
        not
    :param reward_terms: the parts of ``step_rewards`` by name, (C,) each
    :param inner_obs: observations inside the chunk, arrays (n, ...) by key; None where there are none
    :param inner_count: how many of them are valid
    """

    steps: int
    step_rewards: np.ndarray
    executed: np.ndarray
    intervention: np.ndarray | None = None
    critical_chunk: bool | None = None
    success: bool = False
    broken: bool = False
    stored: bool = True
    env: int | None = None
    offset: np.ndarray | None = None
    searching: bool = False
    task_id: int = 0
    episode_steps: int | None = None
    goal_reached: bool | None = None
    reward_terms: Mapping[str, np.ndarray] = field(default_factory=dict)
    inner_obs: Mapping[str, np.ndarray] | None = None
    inner_count: int = 0

    @classmethod
    def complete(cls, action: np.ndarray, reward: float, **told: Any) -> ChunkOutcome:
        """
        Make the outcome of a complete chunk, for an environment that reports nothing about its control steps.

        :param action: the chunk (C, d); an action of another shape counts as one control step
        :param reward: its reward, taken as earned in the first control step; a positive one as a success
        :param told: attributes that are known better
        :return: the outcome
        """
        action = np.asarray(action)
        executed = action if action.ndim == 2 else action.reshape(1, -1)
        step_rewards = np.zeros(len(executed), dtype=np.float32)
        step_rewards[0] = reward
        known: dict[str, Any] = {"steps": len(executed), "step_rewards": step_rewards, "executed": executed}
        return cls(**(known | {"success": bool(reward > 0)} | told))

    @classmethod
    def from_info(cls, info: Mapping[str, Any], action: np.ndarray, reward: float) -> ChunkOutcome:
        """
        Read an environment's info.

        :param info: of one sub-environment; where a key is missing, what :meth:`complete` says holds
        :param action: the chunk that was asked for, (C, d)
        :param reward: sum over the chunk
        :return: the outcome
        """
        told: dict[str, Any] = {}
        if "chunk_steps" in info:
            told["steps"] = int(info["chunk_steps"])
        if "step_rewards" in info:
            told["step_rewards"] = np.asarray(info["step_rewards"])
        if "executed_actions" in info:
            told["executed"] = np.asarray(info["executed_actions"])
        if "intervention" in info:
            told["intervention"] = np.asarray(info["intervention"], dtype=bool)
        if "critical_chunk" in info:
            told["critical_chunk"] = bool(info["critical_chunk"])
        if "is_success" in info:
            told["success"] = bool(info["is_success"])
        if "episode_steps" in info:
            told["episode_steps"] = int(info["episode_steps"])
        if "goal_reached" in info:
            told["goal_reached"] = bool(info["goal_reached"])
        if "inner_obs" in info:
            told |= {"inner_obs": info["inner_obs"], "inner_count": int(info["inner_count"])}
        told["broken"] = bool(info.get("worker_restarted", False))
        told["task_id"] = int(info.get("task_id", 0))
        told["reward_terms"] = info.get("reward_terms", {})
        return cls.complete(action, reward, **told)

    @property
    def critical(self) -> bool:
        """Whether the policy learns from the chunk: it began in the critical phase, or there are no phases."""
        return self.critical_chunk is not False

    @property
    def taken_over(self) -> bool:
        """Whether someone else chose at least one of the control steps."""
        return self.intervention is not None and bool(self.intervention.any())


def outcomes_of(
    infos: Sequence[Mapping[str, Any]],
    actions: np.ndarray,
    rewards: np.ndarray,
) -> list[ChunkOutcome]:
    """
    Take the outcomes of one vector step from its infos.

    Infos of bridges other than GymnasiumVecEnv have no outcome; it is made here.

    :param infos: one per sub-environment
    :param actions: chunks that were asked for (n_envs, C, d)
    :param rewards: sums over the chunks (n_envs,)
    :return: one outcome per sub-environment
    """
    return [
        info["outcome"] if "outcome" in info else ChunkOutcome.from_info(info, action, reward)
        for info, action, reward in zip(infos, actions, rewards, strict=True)
    ]


def envs_of(outcomes: Sequence[ChunkOutcome]) -> list[int]:
    """
    Tell which sub-environments the outcomes of one vector step are of.

    :param outcomes: of all sub-environments, in their order, or of some, which they name
    :return: the number of each one's sub-environment
    """
    return [place if outcome.env is None else outcome.env for place, outcome in enumerate(outcomes)]


def mean_over_chunks(outcomes: Sequence[ChunkOutcome]) -> dict[str, float]:
    """
    Average what the outcomes of one vector step say besides the reward, for the log.

    :param outcomes: one per sub-environment
    :return: the means that exist: ``intervention``, share of the executed control steps that someone else chose;
        ``critical_phase``, share of the chunks in it; ``reward_<term>``, sum per chunk of each of ``reward_terms``
    """
    values: dict[str, list[float]] = {}
    for outcome in outcomes:
        if outcome.intervention is not None and outcome.steps:
            values.setdefault("intervention", []).append(float(np.mean(outcome.intervention[: outcome.steps])))
        if outcome.critical_chunk is not None:
            values.setdefault("critical_phase", []).append(float(outcome.critical_chunk))
        for name, term in outcome.reward_terms.items():
            values.setdefault(f"reward_{name}", []).append(float(np.sum(term)))
    return {name: float(np.mean(of_envs)) for name, of_envs in values.items()}
