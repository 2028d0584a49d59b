"""Compares the critics' value of an episode's first chunk with the return of the episode."""

import warnings
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from rlt_sb3.common.chunk_outcome import ChunkOutcome, envs_of


class ValueBias:
    """
    Averages Q(s0, a0) minus the realized discounted return over recent episodes, and counts control steps.

    This kind of training fails by over-estimation: critics predict success for actions that never had any, the actor
    follows them, and the success rate falls. The gap shows this before the success rate does. Episodes that run into
    the horizon count with their return, without a bootstrap.

    :param n_envs: number of environments
    :param gamma: discount per control step
    :param span: width of the range that returns can take
    :param window: episodes to average over
    :param limit: warn, once, if the gap exceeds this fraction of ``span`` ...
    :param patience: ... in this many episodes in a row
    """

    #: lowest and highest discounted return so far, of finished episodes and of their last chunks
    range: tuple[float, float] = (np.inf, -np.inf)

    def __init__(
        self, n_envs: int, gamma: float, span: float = 1.0, window: int = 100, limit: float = 0.5, patience: int = 30
    ):
        self.gamma = gamma
        self.span = span
        self.limit = limit
        self.patience = patience
        self.gaps: deque[float] = deque(maxlen=window)
        self.streak = 0
        self.warned = False
        self.control_steps = 0
        self.restart(n_envs)

    def restart(self, n_envs: int) -> None:
        """
        Forget the running episodes.

        :param n_envs: number of environments from now on
        """
        self.new = np.ones(n_envs, dtype=bool)
        self.promised = np.full(n_envs, np.nan)  # nan: the critic was not asked at the start of this episode
        self.returns = np.zeros(n_envs)
        self.discounts = np.ones(n_envs)

    @property
    def gap(self) -> float | None:
        """Mean gap, None before the first finished episode."""
        return float(np.mean(self.gaps)) if self.gaps else None

    def step(
        self, outcomes: Sequence[ChunkOutcome], dones: np.ndarray, q_function: Callable[[], np.ndarray] | None
    ) -> None:
        """
        Count one vector step.

        :param outcomes: of the n chunks just played, see :func:`~rlt_sb3.common.chunk_outcome.envs_of`
        :param dones: (n,)
        :param q_function: gives Q (n,) of the executed chunks; None while the critic is not trained
        """
        envs = np.array(envs_of(outcomes))
        # before the critical phase the VLA acts, and the critics do not learn: they are asked at the start of the phase
        critical = np.array([outcome.critical for outcome in outcomes], dtype=bool)
        asked = self.new[envs] & critical
        if q_function is not None and asked.any():
            self.promised[envs[asked]] = q_function()[asked]
        self.new[envs] = np.array(dones, dtype=bool) | (self.new[envs] & ~critical)
        for index, outcome, done in zip(envs, outcomes, dones, strict=True):
            self.control_steps += outcome.steps
            if not outcome.critical:
                continue
            step_rewards = outcome.step_rewards[: outcome.steps].astype(float)
            discounted = float(step_rewards @ self.gamma ** np.arange(len(step_rewards)))
            self.returns[index] += self.discounts[index] * discounted
            self.discounts[index] *= self.gamma**outcome.steps
            if done:
                if not outcome.broken:
                    ends = (float(self.returns[index]), discounted)
                    self.range = (min(self.range[0], *ends), max(self.range[1], *ends))
                # an episode that ended because a worker died has no return to compare with
                if not np.isnan(self.promised[index]) and not outcome.broken:
                    self._add(float(self.promised[index] - self.returns[index]))
                self.promised[index], self.returns[index], self.discounts[index] = np.nan, 0.0, 1.0

    def _add(self, gap: float) -> None:
        self.gaps.append(gap)
        mean = float(np.mean(self.gaps))
        self.streak = self.streak + 1 if mean > self.limit * self.span else 0
        if self.streak >= self.patience and not self.warned:
            self.warned = True
            warnings.warn(
                f"Q at episode starts has been above the realized discounted return, by {mean:.2f} on average, for "
                f"{self.streak} episodes: the critics over-estimate and the actor may follow them away from the VLA. "
                "Raise bc_coef, n_steps, n_critics or learning_starts, or lower utd.",
                stacklevel=2,
            )
