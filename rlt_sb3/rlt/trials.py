"""Which actor to hand out: episodes of the training itself decide."""

from collections import deque
from typing import Any

import numpy as np

from rlt_sb3.common.chunks import succeeded
from rlt_sb3.common.stats import wilson_interval


class Trials:
    """
    Plays a share of the training episodes without noise and says when an actor has shown itself to be better.

    Practice has to try things, and the actor that practises is worse than the VLA for a while: it follows critics that
    are still wrong. Whoever uses the model does not have to live with that. Noise-free episodes tell what an actor is
    worth; noisy ones do not (noise shakes free a policy that stands still), nor do those of an actor that moves from
    one update to the next (which shakes it free as well). So a copy of the actor is put on trial and stays as it is:
    it is approved if it beats the VLA beyond chance in ``window`` trials, that is, if the lower end of Wilson's 95 %
    interval is above the VLA's rate, and rejected as soon as it cannot any more. Then the next copy has its turn. The
    VLA's rate is that of the noise-free episodes before the actor moves. (Safe policy improvement, as in Thomas et al.,
    "High Confidence Policy Improvement", 2015. There is no record to beat: a lucky early one would keep every later
    actor out.)

    Where the VLA solves so much that not even ``window`` successes would be better beyond chance (81 % or more for a
    window of 16), an actor has to be quicker: it solves at least the VLA's share, in fewer control steps beyond chance
    (Mann and Whitney's one-sided test on the successful episodes, 2.5 %).

    :param n_envs: number of environments
    :param share: share of the episodes that are trials
    :param window: trials of an actor
    """

    def __init__(self, n_envs: int, share: float, window: int):
        self.share, self.window = share, window
        self.recent: deque[bool] = deque(maxlen=window)  # of all actors, to be looked at
        # of the VLA and of the actor on trial: outcomes of the episodes, control steps of the successful ones
        self.vla: list[bool] = []
        self.vla_steps: list[int] = []
        self.outcomes: list[bool] = []
        self.steps: list[int] = []
        self.open = False  # whether an actor is on trial
        self.candidates = 0
        self.approvals = 0
        self.restart(n_envs)

    def restart(self, n_envs: int) -> None:
        """
        New episodes begin in all environments; the running ones do not count.

        :param n_envs: number of environments from now on
        """
        self.n_envs = n_envs
        self._noisy: np.ndarray | None = None  # drawn when asked for: two restarts in a row draw as one does
        self.player = np.full(n_envs, "", dtype=object)  # who has played the running episode
        self._elapsed = np.zeros(n_envs, dtype=np.int64)  # control steps of the running episode

    @property
    def noisy(self) -> np.ndarray:
        """Which environments play their running episode with noise, bool (n_envs,)."""
        if self._noisy is None:
            self._noisy = self._draw()
        return self._noisy

    def _draw(self) -> np.ndarray:
        if self.share == 0.0:
            return np.ones(self.n_envs, dtype=bool)
        return np.random.random(self.n_envs) >= self.share

    @property
    def none_approved(self) -> bool:
        """Whether there are trials and no actor has been approved yet: the untrained one is handed out."""
        return self.share > 0.0 and self.approvals == 0

    def no_noise(self) -> None:
        """The running episodes are played without noise, so they can be trials of the VLA."""
        if self.share > 0.0:
            self.noisy[:] = False

    def void(self) -> None:
        """The actor on trial is no longer the one that played; the next one has its turn."""
        self.open = False

    def begin(self) -> None:
        """A new actor is on trial; the running episodes are not its own from their beginning and do not count."""
        self.open, self.outcomes, self.steps = True, [], []
        self.candidates += 1
        self.player[self.player != ""] = "both"

    def step(self, by_actor: bool, dones: np.ndarray, infos: list[dict[str, Any]], rewards: np.ndarray) -> bool:
        """
        Count one vector step.

        :param by_actor: whether the actor on trial played it where there is no noise; else the VLA, or as good as
        :param dones: (n_envs,)
        :param infos: ``is_success`` is read (without it a positive last reward is a success), ``chunk_steps`` (without
            it a chunk counts as one step), and ``worker_restarted`` and ``intervention``: an episode whose simulator
            broke or in which someone took over does not count
        :param rewards: sums over the chunks (n_envs,)
        :return: whether the actor on trial is approved now; :attr:`open` is false after it was approved or rejected
        """
        approved = False
        player = "actor" if by_actor else "vla"
        for env, done in enumerate(dones):
            alone = not infos[env].get("worker_restarted", False) and not np.any(infos[env].get("intervention", False))
            self.player[env] = player if alone and self.player[env] in ("", player) else "both"
            self._elapsed[env] += infos[env].get("chunk_steps", 1)
            if not done:
                continue
            success, steps = succeeded(infos[env], rewards[env]), int(self._elapsed[env])
            if self.player[env] == "vla" and not self.noisy[env]:
                self.vla.append(success)
                if success:
                    self.vla_steps.append(steps)
            elif self.player[env] == "actor" and not self.noisy[env]:
                self.recent.append(success)
                approved |= self.open and self._judge(success, steps)
            self.player[env], self._elapsed[env] = "", 0
        if np.any(dones):
            self._noisy = np.where(dones, self._draw(), self.noisy)
        return approved

    def _judge(self, success: bool, steps: int) -> bool:
        if not self.vla:  # nothing to beat yet
            self.open = False
            return False
        self.outcomes.append(success)
        if success:
            self.steps.append(steps)
        vla_rate = float(np.mean(self.vla))
        best = self.window - len(self.outcomes) + sum(self.outcomes)  # successes, if all that come are
        successes_can_tell = self._at_least(self.window) > vla_rate
        possible = self._at_least(best) > vla_rate if successes_can_tell else best / self.window >= vla_rate
        full = len(self.outcomes) == self.window
        self.open = possible and not full
        approved = possible and full and (successes_can_tell or self._quicker())
        self.approvals += approved
        return approved

    def _at_least(self, successes: int) -> float:
        return wilson_interval(successes, self.window)[0]

    def _quicker(self) -> bool:
        from scipy.stats import mannwhitneyu

        return bool(mannwhitneyu(self.steps, self.vla_steps, alternative="less").pvalue < 0.025)
