"""Groups of episodes from the same initial state, and their advantages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlt_sb3.common.chunk_outcome import ChunkOutcome


def group_advantages(returns: Sequence[float]) -> np.ndarray | None:
    """
    Compute the advantages of a group's episodes: return minus their mean, over their standard deviation.

    :param returns: return of each episode, g of them
    :return: (g,); None if all returns are equal, which says nothing about the policy
    """
    values = np.asarray(returns, dtype=np.float64)
    std = values.std()
    return (values - values.mean()) / std if std > 1e-6 else None


@dataclass
class GroupEpisode:
    """
    The chunks of one episode.

    :param observations: before each chunk, without the axis of the sub-environments
    :param actions: chunks that were drawn, not clipped, (C, d)
    :param log_probs: their log-densities when they were drawn
    :param reward: sum of the rewards so far
    """

    observations: list[dict[str, np.ndarray]] = field(default_factory=list)
    actions: list[np.ndarray] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    reward: float = 0.0


class GroupCollector:
    """
    Sorts the episodes of a vector environment into groups by task and initial state.

    An episode whose simulator broke counts as a member without rows, so that its group can be completed.
    Sub-environments whose episodes are short run ahead of the others, so any number of groups can be open.

    :param n_envs: number of sub-environments
    :param group_size: episodes of a group
    """

    def __init__(self, n_envs: int, group_size: int):
        self.n_envs, self.group_size = n_envs, group_size
        self.restart()

    def restart(self) -> None:
        """Forget everything, because the environments are about to be reset from outside."""
        self._running = [GroupEpisode() for _ in range(self.n_envs)]
        self._open: dict[tuple[int, int], list[GroupEpisode | None]] = {}
        self.complete: list[list[GroupEpisode]] = []

    def step(
        self,
        observations: Mapping[str, np.ndarray],
        actions: np.ndarray,
        log_probs: np.ndarray,
        outcomes: Sequence[ChunkOutcome],
        dones: np.ndarray,
        infos: Sequence[Mapping[str, Any]],
    ) -> None:
        """
        Store one vector step.

        :param observations: before it, (n_envs, ...) by key
        :param actions: chunks that were drawn (n_envs, C, d)
        :param log_probs: (n_envs,)
        :param outcomes: of the chunks
        :param dones: whether an episode ended, (n_envs,)
        :param infos: with ``init_index``, the episode's initial state
        """
        for env, (outcome, done) in enumerate(zip(outcomes, dones, strict=True)):
            episode = self._running[env]
            if not outcome.broken:
                episode.observations.append({key: value[env] for key, value in observations.items()})
                episode.actions.append(actions[env])
                episode.log_probs.append(float(log_probs[env]))
                episode.reward += float(np.sum(outcome.step_rewards[: outcome.steps]))
            if done:
                state = outcome.task_id, int(infos[env]["init_index"])
                self._end(state, None if outcome.broken else episode)
                self._running[env] = GroupEpisode()

    def _end(self, state: tuple[int, int], episode: GroupEpisode | None) -> None:
        members = self._open.setdefault(state, [])
        members.append(episode)
        if len(members) == self.group_size:
            self.complete.append([one for one in self._open.pop(state) if one is not None])

    def take(self) -> list[list[GroupEpisode]]:
        """Return the complete groups; they are not kept."""
        complete, self.complete = self.complete, []
        return complete
