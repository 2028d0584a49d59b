"""The deployment gate: which actor is deployed; noise-free training episodes decide."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch as th
from torch import nn

from rlt_sb3.common.chunk_outcome import ChunkOutcome
from rlt_sb3.common.stats import wilson_interval


class GatedPolicy(Protocol):
    """What a policy needs for the gate: beside the actor that learns, a copy on trial and a copy that is deployed."""

    @property
    def actor_on_trial(self) -> nn.Module:
        """The copy on trial."""

    @property
    def actor_deployed(self) -> nn.Module:
        """The copy that is deployed."""

    @property
    def training_actor(self) -> nn.Module:
        """The actor that practises."""

    @property
    def starts_at_vla(self) -> bool:
        """Whether the untrained actor plays the VLA's chunks."""

    def start_trial(self) -> None:
        """Copy the training actor to ``actor_on_trial``."""

    def deploy(self, parameters: Mapping[str, Any]) -> None:
        """Give ``actor_deployed``, which ``predict`` plays, these parameters."""


class Successes(Protocol):
    """Outcome of an evaluation."""

    @property
    def successes(self) -> int:
        """Episodes that succeeded."""

    @property
    def n(self) -> int:
        """Episodes."""


AnyEvaluation = TypeVar("AnyEvaluation", bound=Successes)


class PolicyGate:
    """
    Plays a share of the training episodes without noise, and deploys an actor that has shown itself to be better.

    Practice has to try things, and the actor that practises is worse than the VLA for a while: it follows critics that
    are still wrong. Whoever uses the model does not have to live with that. Noise-free episodes tell what an actor is
    worth; noisy ones do not (noise shakes free a policy that stands still), nor do those of an actor that moves from
    one update to the next (which shakes it free as well). So a copy of the training actor is put on trial and stays as
    it is: it is deployed if it beats the VLA beyond chance in ``window`` trials, that is, if the lower end of Wilson's
    95 % interval is above the VLA's rate, and rejected as soon as it cannot any more. Then the next copy has its turn.
    The VLA's rate is that of the noise-free episodes before the actor moves. (Safe policy improvement, as in Thomas et
    al., "High Confidence Policy Improvement", 2015. There is no record to beat: a lucky early one would keep every
    later actor out.)

    Where the VLA solves so much that not even ``window`` successes would be better beyond chance (81 % or more for a
    window of 16), an actor has to be quicker: it solves at least the VLA's share, in fewer control steps beyond chance
    (Mann and Whitney's one-sided test on the successful episodes, 2.5 %).

    An algorithm calls :meth:`play_vla` or :meth:`choose` before each vector step and :meth:`step` after it, and
    :meth:`restart` where environments are reset from outside. Its policy is a :class:`GatedPolicy`.

    :param share: share of the episodes that are trials, in (0, 1]
    :param window: trials of an actor
    :raises ValueError: for settings out of range
    """

    #: what :meth:`state_dict` holds besides the lists
    COUNTERS = ("on_trial", "candidates", "approvals")
    LISTS = ("vla", "vla_steps", "outcomes", "steps", "recent")

    def __init__(self, share: float = 0.5, window: int = 16):
        if not (isinstance(share, int | float | np.floating) and 0.0 < share <= 1.0):
            raise ValueError(f"gate.share must be in (0, 1] (a share of the episodes), got {share!r}.")
        if not isinstance(window, int) or window < 1:
            raise ValueError(f"gate.window must be an integer >= 1, got {window!r}.")
        self.share, self.window = share, window
        self.recent: deque[bool] = deque(maxlen=window)  # of all actors, to be looked at
        # of the VLA and of the actor on trial: outcomes of the episodes, control steps of the successful ones
        self.vla: list[bool] = []
        self.vla_steps: list[int] = []
        self.outcomes: list[bool] = []
        self.steps: list[int] = []
        self.on_trial = False  # whether an actor is on trial
        self.candidates = 0  # actors that were put on trial
        self.approvals = 0  # actors that were deployed
        self.restart(1)

    def state_dict(self) -> dict[str, Any]:
        """:return: plain data (for JSON) from which :meth:`load_state_dict` goes on; without the running episodes"""
        state = {name: getattr(self, name) for name in self.COUNTERS}
        return state | {name: list(getattr(self, name)) for name in self.LISTS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Go on where another gate was; new episodes begin.

        :param state: of :meth:`state_dict`
        """
        for name in self.COUNTERS:
            setattr(self, name, state[name])
        self.vla, self.vla_steps = list(state["vla"]), list(state["vla_steps"])
        self.outcomes, self.steps = list(state["outcomes"]), list(state["steps"])
        self.recent = deque(state["recent"], maxlen=self.window)
        self.restart(self.n_envs)

    # ---------------------------------------------------------------- which actor plays

    def restart(self, n_envs: int) -> None:
        """
        New episodes begin in all environments; the running ones do not count.

        :param n_envs: number of environments from now on
        """
        self.n_envs = n_envs
        self._noise_free: np.ndarray | None = None  # drawn when asked for: two restarts in a row draw as one does
        self.player = np.full(n_envs, "", dtype=object)  # who has played the running episode
        self._elapsed = np.zeros(n_envs, dtype=np.int64)  # control steps of the running episode

    @property
    def noise_free(self) -> np.ndarray:
        """Which environments play their running episode without noise, bool (n_envs,)."""
        if self._noise_free is None:
            self._noise_free = self._draw()
        return self._noise_free

    def _draw(self) -> np.ndarray:
        return np.random.random(self.n_envs) < self.share

    @property
    def vla_rate(self) -> float:
        """Success rate of the VLA; nan before its first noise-free episode."""
        return float(np.mean(self.vla)) if self.vla else float("nan")

    @property
    def none_deployed(self) -> bool:
        """Whether no actor has passed yet: the untrained one is deployed."""
        return self.approvals == 0

    def plays_vla(self, policy: GatedPolicy) -> bool:
        """
        :param policy: the policy
        :return: whether what is deployed plays the VLA's own chunks
        """
        return self.none_deployed and policy.starts_at_vla

    def play_vla(self) -> None:
        """The VLA's own chunks are played everywhere, without noise: all running episodes can be its trials."""
        self.noise_free[:] = True

    def choose(self, policy: GatedPolicy, observation: Any, chunks: np.ndarray, ready: bool) -> np.ndarray:
        """
        Which actor collects in which environment: the one on trial where there is no noise.

        :param policy: the policy
        :param observation: as its actors take it, of all environments
        :param chunks: of the training actor (n_envs, ...)
        :param ready: whether the training actor moves; if so and none is on trial, a copy of it goes on trial now
        :return: chunks to play (n_envs, ...); the noise-free ones are to be played as they are
        """
        if ready and not self.on_trial:
            self.start_trial(policy)
        with th.no_grad():
            tried = policy.actor_on_trial(observation).cpu().numpy().reshape(chunks.shape)
        return np.where(self.noise_free.reshape(-1, *[1] * (chunks.ndim - 1)), tried, chunks)

    def start_trial(self, policy: GatedPolicy) -> None:
        """
        Put a copy of the training actor on trial; running episodes are not its own from their beginning and do not
        count.

        :param policy: the policy
        """
        policy.start_trial()
        self.on_trial, self.outcomes, self.steps = True, [], []
        self.candidates += 1
        self.player[self.player != ""] = "both"

    def abandon_trial(self) -> None:
        """The actor on trial is no longer the one that played; the next one has its turn."""
        self.on_trial = False

    def deploy(self, policy: GatedPolicy) -> None:
        """
        Deploy the actor on trial.

        :param policy: the policy
        """
        policy.deploy(policy.actor_on_trial.state_dict())
        self.approvals += 1

    # ---------------------------------------------------------------- the test

    def step(self, policy: GatedPolicy, outcomes: Sequence[ChunkOutcome], dones: np.ndarray, ready: bool) -> None:
        """
        Count one vector step; deploys the actor on trial if it has passed.

        :param policy: the policy
        :param outcomes: of the chunks just played, one per environment. An episode whose simulator broke or in which
            someone took over does not count
        :param dones: (n_envs,)
        :param ready: whether the actor on trial played where there is no noise; else the VLA, or as good as
        """
        passed = False
        player = "actor" if ready else "vla"
        for env, (outcome, done) in enumerate(zip(outcomes, dones, strict=True)):
            alone = not outcome.broken and not outcome.taken_over
            self.player[env] = player if alone and self.player[env] in ("", player) else "both"
            self._elapsed[env] += outcome.steps
            if not done:
                continue
            success, steps = outcome.success, int(self._elapsed[env])
            if self.player[env] == "vla" and self.noise_free[env]:
                self.vla.append(success)
                if success:
                    self.vla_steps.append(steps)
            elif self.player[env] == "actor" and self.noise_free[env]:
                self.recent.append(success)
                passed |= self.on_trial and self._judge(success, steps)
            self.player[env], self._elapsed[env] = "", 0
        if np.any(dones):
            self._noise_free = np.where(dones, self._draw(), self.noise_free)
        if passed:
            self.deploy(policy)

    def _judge(self, success: bool, steps: int) -> bool:
        """Whether the actor on trial has passed with this episode; it is on trial no longer once that is decided."""
        if not self.vla:  # nothing to beat yet
            self.on_trial = False
            return False
        self.outcomes.append(success)
        if success:
            self.steps.append(steps)
        best = self.window - len(self.outcomes) + sum(self.outcomes)  # successes, if all that come are
        vla_rate = self.vla_rate
        successes_can_tell = beats(self.window, self.window, vla_rate)
        possible = beats(best, self.window, vla_rate) if successes_can_tell else best / self.window >= vla_rate
        full = len(self.outcomes) == self.window
        self.on_trial = possible and not full
        return possible and full and (successes_can_tell or self._quicker())

    def _quicker(self) -> bool:
        from scipy.stats import mannwhitneyu

        return bool(mannwhitneyu(self.steps, self.vla_steps, alternative="less").pvalue < 0.025)

    def audition(
        self, policy: GatedPolicy, evaluate: Callable[[], AnyEvaluation], vla_rate: float
    ) -> tuple[AnyEvaluation, bool]:
        """
        Evaluate the training actor, and deploy it if it beats the VLA beyond chance.

        :param policy: the policy; the training actor is deployed while it is evaluated, and what was deployed before
            comes back if it does not pass, or if the evaluation is interrupted
        :param evaluate: plays what is deployed on a fixed set of initial states
        :param vla_rate: success rate of the VLA on the same states
        :return: evaluation of the training actor, whether it is deployed now
        """
        before = {name: value.clone() for name, value in policy.actor_deployed.state_dict().items()}
        policy.deploy(policy.training_actor.state_dict())
        passed = False
        try:
            result = evaluate()
            passed = beats(result.successes, result.n, vla_rate)
        finally:
            if not passed:
                policy.deploy(before)
        self.approvals += passed
        return result, passed


def beats(successes: int, n: int, rate: float) -> bool:
    """
    :param successes: number of successes
    :param n: number of episodes
    :param rate: the rate to beat
    :return: whether the lower end of Wilson's 95 % interval is above it
    """
    return wilson_interval(successes, n)[0] > rate
