"""Who decides about success in practice: the simulator, or somebody who sees its pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rlt_gym.core.chunk_info import Observation, Played


@dataclass(frozen=True)
class Judged:
    """
    What a judge sees of one environment after a chunk.

    :param observation: The observation.
    :param instruction: Of the task.
    :param noise_seed: Of the episode.
    :param episode_steps: Control steps of the episode so far, the chunk's included.
    """

    observation: Observation
    instruction: str
    noise_seed: int
    episode_steps: int


#: By environment, what it shows -> whether the task is solved.
Judge = Callable[[Mapping[int, Judged]], Mapping[int, bool]]


class Judging:
    """
    Mixin of :class:`~rlt_gym.core.chunk_vector_env.ChunkVectorEnv`: a judge may decide about success in practice.

    It decides in episodes of the training split only; selection and evaluation episodes keep the simulator's verdict. A
    chunk is then played to its end. If the judge calls its last observation a success, the last control step earns 1
    and the episode ends; otherwise the chunk earns nothing, whatever the simulator says. Infos have ``goal_reached``,
    whether the simulator's goal is reached at the end of the chunk.
    """

    #: Whether the simulators can play on after success.
    plays_on = False
    _judge: Judge | None = None
    init_states: Any
    task: Any
    _episode: Any

    def judge_success(self, judge: Judge) -> None:
        """
        Let somebody decide about success from now on.

        :param judge: The judge.
        :raises ValueError: The simulators cannot play on after success.
        """
        if not self.plays_on:
            raise ValueError(
                f"{type(self).__name__} cannot have a reward model: its simulators end an episode at success."
            )
        self._judge = judge

    @property
    def until_success(self) -> bool:
        """Whether the simulators end a chunk at success."""
        return self._judge is None or self.init_states != "train"

    def _judged(self, played: dict[int, Played]) -> dict[int, Played]:
        """
        Replace the simulators' verdicts by the judge's, where it decides.

        :param played: By environment, what the simulator says; the episodes do not count these chunks yet.
        :return: The same with what the episode goes by.
        """
        if self._judge is None:
            return played
        if self.until_success:
            return {env: replace(result, goal_reached=result.success) for env, result in played.items()}
        seen = {}
        for env, result in played.items():
            episode = self._episode(env)
            steps = episode.steps + len(result.step_rewards)
            seen[env] = Judged(result.observation, self.task(env).instruction, episode.noise_seed, steps)
        verdicts = self._judge(seen) if seen else {}
        judged = {}
        for env, result in played.items():
            rewards = np.zeros_like(result.step_rewards)
            rewards[-1:] = float(verdicts[env])
            judged[env] = replace(
                result, step_rewards=rewards, success=bool(verdicts[env]), goal_reached=result.success
            )
        return judged

    def _judge_info(self, played: Played | None) -> dict[str, bool]:
        """Say what the simulator thinks, if it does not decide."""
        return {} if self._judge is None else {"goal_reached": played is not None and bool(played.goal_reached)}
