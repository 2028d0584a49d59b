"""Which actor to hand out: episodes of the training itself decide."""

from collections import deque
from typing import Any

import numpy as np

from rlt_sb3.evaluation import wilson_interval


class Trials:
    """
    Plays a share of the training episodes without noise and says when the actor has shown itself to be better.

    Practice has to try things, and the actor that practises is worse than the VLA for a while: it follows critics that
    are still wrong. Whoever uses the model does not have to live with that. Noise-free episodes tell what the actor is
    worth; noisy ones do not (noise shakes free a policy that stands still). Before the actor moves they are the VLA's,
    which gives its success rate. The actor is approved, as it then is, at the end of every trial after which the last
    ``window`` trials are better than the VLA beyond chance: the lower end of Wilson's 95 % interval is above its rate.
    (Safe policy improvement, as in Thomas et al., "High Confidence Policy Improvement", 2015. There is no record to
    beat: a lucky early one would keep every later actor out.)

    :param n_envs: number of environments
    :param share: share of the episodes that are trials
    :param window: trials in a row that are counted
    """

    def __init__(self, n_envs: int, share: float, window: int):
        self.share = share
        self.recent: deque[bool] = deque(maxlen=window)
        self.vla: list[bool] = []
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

    def no_noise(self) -> None:
        """The running episodes are played without noise, so they can be trials of the VLA."""
        if self.share > 0.0:
            self.noisy[:] = False

    def step(self, by_actor: bool, dones: np.ndarray, infos: list[dict[str, Any]], rewards: np.ndarray) -> bool:
        """
        Count one vector step.

        :param by_actor: whether an actor that has moved played it; else it was the VLA, or as good as
        :param dones: (n_envs,)
        :param infos: ``is_success`` is read (without it a positive last reward is a success), and ``worker_restarted``
            and ``intervention``: an episode whose simulator broke or in which someone took over does not count
        :param rewards: sums over the chunks (n_envs,)
        :return: whether the actor is approved now
        """
        approved = False
        player = "actor" if by_actor else "vla"
        for env, done in enumerate(dones):
            alone = not infos[env].get("worker_restarted", False) and not np.any(infos[env].get("intervention", False))
            self.player[env] = player if alone and self.player[env] in ("", player) else "both"
            if not done:
                continue
            success = bool(infos[env].get("is_success", rewards[env] > 0))
            if self.player[env] == "vla" and not self.noisy[env]:
                self.vla.append(success)
            elif self.player[env] == "actor" and not self.noisy[env]:
                self.recent.append(success)
                approved |= self._better_than_vla()
            self.player[env] = ""
        if np.any(dones):
            self._noisy = np.where(dones, self._draw(), self.noisy)
        return approved

    def _better_than_vla(self) -> bool:
        lower, _ = wilson_interval(sum(self.recent), len(self.recent))
        vla_rate = float(np.mean(self.vla)) if self.vla else 0.0
        if len(self.recent) < (self.recent.maxlen or 0) or lower <= vla_rate:
            return False
        self.approvals += 1
        return True
