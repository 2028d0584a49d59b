"""
The gripper's command: how RLT explores and corrects a number of which only the sign counts.

Small noise on a command near 1 never shows what -1 does, and a pull by the squared distance forbids it. So the command
is reversed for whole chunks, in a few chunks with noise, and the actor is pulled towards the reversed command where the
critics prefer it. HIL-SERL (arXiv 2410.21845) treats the gripper as a discrete action for the same reason.
"""

from collections.abc import Sequence

import numpy as np
import torch as th

from rlt_sb3.common.chunk_outcome import ChunkOutcome
from rlt_sb3.common.gated_policy import TASK
from rlt_sb3.common.stats import fisher_p
from rlt_sb3.rlt.features import TensorDict
from rlt_sb3.rlt.policies import RLTCritic

#: By how much the lowest critic has to prefer the reversed command to what the mean of the critics says of the VLA's
MARGIN = 0.02


def reverse_gripper(chunks: np.ndarray, gripper: int, chosen: np.ndarray) -> None:
    """
    Reverse the gripper in some chunks: during all control steps it opens where most of them close it, or closes.

    :param chunks: (N, C, d), changed in place
    :param gripper: place of the command in an action
    :param chosen: which chunks, bool (N,)
    """
    closes = chunks[chosen, :, gripper].mean(1, keepdims=True) > 0.0
    chunks[chosen, :, gripper] = np.where(closes, -1.0, 1.0)


def pull_gripper(
    critic: RLTCritic,
    observations: TensorDict,
    actions: th.Tensor,
    target: th.Tensor,
    gripper: int,
    in_tasks: np.ndarray,
) -> th.Tensor:
    """
    Reverse the gripper in the chunks to which the actor is pulled, where the critics prefer it.

    Compared are the actor's chunk with the VLA's commands and with the reversed ones.

    :param critic: the critics
    :param observations: ``z_rl``, ``proprio`` and ``vla_ref`` (B, C, d), and ``task`` (B, T) if there are several
    :param actions: of the actor, flat (B, C*d)
    :param target: chunks to which it is pulled so far, flat (B, C*d)
    :param gripper: place of the command in an action
    :param in_tasks: in which tasks it may be reversed, bool (T,); not used where observations tell no tasks apart
    :return: the new target, flat (B, C*d). It is the old one where someone else than the VLA chose the chunk
    """
    reference = observations["vla_ref"].float()
    chunks = actions.detach().view_as(reference)
    own, opposite, wanted = chunks.clone(), chunks.clone(), target.view_as(reference).clone()
    own[..., gripper] = reference[..., gripper]
    command = th.where(reference[..., gripper].mean(1, keepdim=True) > 0.0, -1.0, 1.0)
    opposite[..., gripper] = command
    with th.no_grad():
        better = critic.q_values(observations, opposite.flatten(1)).min(0).values
        better = better > critic.q_values(observations, own.flatten(1)).mean(0) + MARGIN
    better &= (target == reference.flatten(1)).all(1)
    if TASK in observations:  # without a copy of in_tasks to a GPU: that cannot be recorded as a CUDA graph
        better &= th.stack([observations[TASK][:, task] for task in np.flatnonzero(in_tasks)]).any(0)
    wanted[..., gripper] = th.where(better[:, None], command, wanted[..., gripper])
    return wanted.flatten(1)


class GripperTrial:
    """
    Decides which chunks are reversed, and finds out whether that helps.

    Where the VLA's gripper is right, a reversed chunk loses the episode, and critics that were never shown an open
    gripper around an object prefer it by mistake. So the correction is not used before there is evidence for it. A
    randomized trial gives it: in :attr:`SHARE` of the first :attr:`EPISODES` episodes with noise some chunks are
    reversed. Once these succeed more often than the others, by Fisher's exact test at :attr:`LEVEL`, the correction is
    used to the end. If they have not after that many episodes, nothing is reversed any more. Where observations say
    which task is played, each task has a trial of its own: a VLA's gripper can be right in one task and wrong in
    another.

    :param flip: "auto" holds the trial; a number: the probability for each chunk with noise, and no trial
    :param n_tasks: number T of tasks that observations tell apart; 1 if they tell none
    """

    #: share of the episodes with noise in which chunks are reversed, and the probability for each of their chunks
    SHARE, RATE = 0.25, 0.04
    #: episodes that are compared, and the level at which those with reversed chunks have to be better
    EPISODES, LEVEL = 60, 0.02
    #: probability for each chunk with noise once the trial has succeeded
    FLIP = 0.02

    def __init__(self, flip: float | str, n_tasks: int = 1):
        self.flip = np.full(n_tasks, 0.0 if isinstance(flip, str) else float(flip))
        self.trying = np.full(n_tasks, isinstance(flip, str))
        #: of each task's episodes: whether it was drawn for reversed chunks, and whether it was a success
        self.ended: list[list[tuple[bool, bool]]] = [[] for _ in range(n_tasks)]
        self.practiced = np.zeros(n_tasks, dtype=bool)  # a suite has tasks that are not played
        self.restart(1)

    @property
    def corrects(self) -> np.ndarray:
        """In which tasks the gripper is reversed where critics prefer it, (T,)."""
        return self.flip > 0.0

    @property
    def reverses(self) -> np.ndarray:
        """In which tasks chunks are reversed, (T,): in the trial, and after one that has succeeded."""
        return self.practiced & (self.trying | self.corrects)

    def restart(self, n_envs: int) -> None:
        """
        Begin new episodes in all environments; the running ones do not count.

        :param n_envs: number of environments from now on
        """
        self.fresh = np.ones(n_envs, dtype=bool)  # whether the next chunk is the first one of its episode
        self.counts = np.zeros(n_envs, dtype=bool)  # whether the running episode is one of those that are compared
        self.drawn = np.zeros(n_envs, dtype=bool)  # whether it is one in which chunks are reversed
        self.reversed = np.zeros(n_envs, dtype=bool)  # whether one was reversed already in the trial

    def reverse(self, chunks: np.ndarray, gripper: int, noisy: np.ndarray, tasks: np.ndarray) -> None:
        """
        Reverse the gripper in some of the chunks about to be played.

        :param chunks: (n_envs, C, d), changed in place
        :param gripper: place of the command in an action
        :param noisy: which environments play with noise, bool (n_envs,)
        :param tasks: task of each environment (n_envs,)
        """
        self.practiced[tasks] = True
        if not self.reverses.any():
            return
        n_envs, rate, trying = len(chunks), self.flip[tasks], self.trying[tasks]
        if trying.any():
            self.counts[self.fresh] = (noisy & trying)[self.fresh]
            self.drawn[self.fresh] = (np.random.random(n_envs) < self.SHARE)[self.fresh]
            rate = np.where(trying, np.where(self.counts & self.drawn, self.RATE, 0.0), rate)
        chosen = noisy & (np.random.random(n_envs) < rate)
        reverse_gripper(chunks, gripper, chosen)
        self.reversed |= chosen & trying

    def step(self, outcomes: Sequence[ChunkOutcome], dones: np.ndarray, tasks: np.ndarray) -> None:
        """
        Count one vector step of the trials, and end those that have succeeded or have had their episodes.

        :param outcomes: of the chunks just played, one per environment. An episode whose simulator broke or in which
            someone took over does not count
        :param dones: (n_envs,)
        :param tasks: task of each environment in that step (n_envs,)
        """
        self.fresh = np.array(dones, dtype=bool)
        for env, (outcome, done) in enumerate(zip(outcomes, dones, strict=True)):
            self.counts[env] &= self.trying[tasks[env]] and not (outcome.broken or outcome.taken_over)
            if done and self.counts[env]:
                self.ended[tasks[env]].append((bool(self.drawn[env]), bool(outcome.success)))
        self.counts[self.fresh] = self.reversed[self.fresh] = False
        for task in np.unique(tasks[self.fresh & self.trying[tasks]]):
            if self._succeeded(task):
                self.trying[task], self.flip[task] = False, self.FLIP
            elif len(self.ended[task]) >= self.EPISODES:
                self.trying[task] = False

    def _succeeded(self, task: int) -> bool:
        drawn = [success for was_drawn, success in self.ended[task] if was_drawn]
        others = [success for was_drawn, success in self.ended[task] if not was_drawn]
        return fisher_p((sum(drawn), len(drawn), sum(others), len(others))) <= self.LEVEL
