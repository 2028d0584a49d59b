"""
Offsets: constant corrections of the VLA's chunks, found by playing whole episodes with one and counting successes.

An episode of some twenty chunks says one thing, success or failure. Noise that is drawn anew for each chunk cancels
itself out, and critics of a few hundred episodes cannot tell which chunk a success is owed to. An offset that stays for
the whole episode moves everything the same way, and all it takes to learn from it is a regression of success on a few
numbers. It is exploration in the space of parameters (Sehnke et al., "Parameter-exploring policy gradients", 2010;
Plappert et al., "Parameter space noise for exploration", 2018): those explored are biases of the actor's last layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize

from rlt_sb3.common.chunk_outcome import ChunkOutcome, envs_of

#: The smallest positive number
LEAST = np.finfo(float).tiny


def phase_of(references: Any, gripper: int | None) -> Any:
    """
    Tell which of the vectors of an offset is due: one while the VLA's command to the gripper is positive, one else.

    :param references: the VLA's chunks (B, C, d), an array or a tensor
    :param gripper: place of the gripper's command in an action; None: there is one vector
    :return: 0, or the vectors' numbers (B,)
    """
    return 0 if gripper is None else 1 * (references[:, :, gripper].mean(1) > 0.0)


class OffsetSearch:
    """
    Tries offsets in whole training episodes, and finds the best one by a Gaussian process over those episodes.

    An offset is ``phases`` vectors of one number per action dimension, the gripper's left out, in units of
    ``action_scale``. An episode of the search plays the training actor's chunks with an offset that is drawn around the
    actor's own one and stays the same from the first chunk to the last, with noise on top. Its success is one sample of
    a Gaussian process (squared exponential kernel) over offsets. Episodes that the gate plays without noise are further
    samples, at no cost: they say how good the places are where the offset has been, which keeps it from drifting away.
    After every :attr:`EVERY` episodes of the search the actor's offset goes to the largest mean of the process within
    reach.

    :param opening: number of episodes of each task with which the search begins: until then all episodes with noise
        belong to it, the gate has half of its share, and RLT does not train the actor's network yet. A task with
        fewer training episodes than others has fewer of these, in proportion (:attr:`shares`)
    :param share: share of the episodes with noise that belong to the search afterwards, in [0, 1]
    :param std: standard deviation of what is tried about the actor's offset
    :param reach: how far the offset moves at once, at most
    :param memory: episodes of a task that the process remembers, the latest ones, those without noise included
    :param owns_constants: the network does not follow the part of the critics' gradient that an offset could follow.
        Two constants that are added up cannot be told apart by what is played, and without this the network can take
        back what the search adds
    :raises ValueError: for settings out of range
    """

    #: episodes before the offset moves for the first time, and between two moves
    FIRST, EVERY = 16, 8
    #: the process: length of its kernel in standard deviations of what is tried, amplitude, and variance of an outcome
    LENGTH, AMPLITUDE, NOISE = 3.0, 0.4, 0.2

    def __init__(
        self,
        opening: int = 48,
        share: float = 1.0,
        std: float = 0.02,
        reach: float = 0.01,
        memory: int = 400,
        owns_constants: bool = False,
    ):
        for name, value, kind, low, high, allowed in (
            ("opening", opening, Integral, 0, np.inf, "an integer >= 0 (episodes)"),
            ("share", share, Real, 0.0, 1.0, "in [0, 1] (a share of the episodes with noise)"),
            ("std", std, Real, LEAST, np.inf, "> 0 (units of action)"),
            ("reach", reach, Real, LEAST, np.inf, "> 0 (units of action)"),
            ("memory", memory, Integral, self.FIRST, np.inf, f"an integer >= {self.FIRST} (episodes)"),
        ):
            if not (isinstance(value, kind) and low <= value <= high):
                raise ValueError(f"offset_search.{name} must be {allowed}, got {value!r}.")
        if not isinstance(owns_constants, bool):
            raise ValueError(f"offset_search.owns_constants must be True or False, got {owns_constants!r}.")
        self.opening, self.share, self.std, self.reach, self.memory = opening, share, std, reach, memory
        self.owns_constants = owns_constants

    def begin(self, n_tasks: int, n_dims: int, gripper: int | None) -> None:
        """
        Begin to search.

        :param n_tasks: number of tasks that observations tell apart, each with an offset of its own; 1 otherwise
        :param n_dims: action dimensions d
        :param gripper: place of the gripper's command in an action; None: the robot has none, and there is one phase
        """
        self.gripper = gripper
        self.free = np.flatnonzero(np.arange(n_dims) != (n_dims if gripper is None else gripper))
        self.shape = (1 if gripper is None else 2, n_dims)
        self.samples: list[deque[tuple[np.ndarray, bool]]] = [deque(maxlen=self.memory) for _ in range(n_tasks)]
        self.counted = [0] * n_tasks  # episodes of the search, ever
        #: with those that do not count, by task; tasks that are not played have no entry
        self.ended: dict[int, int] = {}
        #: training episodes of each task, in units of those of the task with the most; the algorithm sets it
        self.shares = np.ones(n_tasks)
        self.opened: set[int] = set()  # tasks whose opening is over
        self.restart(1)

    def restart(self, n_envs: int) -> None:
        """
        Begin new episodes in all environments; the running ones do not count.

        :param n_envs: number of environments from now on
        """
        self.fresh = np.ones(n_envs, dtype=bool)  # whether the next chunk is the first one of its episode
        #: the offsets with which the running episodes are played from beginning to end (n_envs, phases, d); NaN in
        #: episodes that do not count: those of practice that try none, and the VLA's once the network has learned
        self.tried = np.full((n_envs, *self.shape), np.nan)
        self.searching = np.zeros(n_envs, dtype=bool)  # which of them belong to the search
        self.spoiled: set[int] = set()  # environments in whose episode someone took over

    @property
    def opens(self) -> bool:
        """Whether a task that is played has not had its first episodes yet."""
        return self.opening > 0 and not (self.ended and self.opened.issuperset(self.ended))

    def draw(self, noisy: np.ndarray, offsets: np.ndarray, others: np.ndarray, opens: bool = False) -> np.ndarray:
        """
        Draw what the episodes try that begin with the next chunk.

        :param noisy: which environments play with noise, bool (n_envs,)
        :param offsets: of the training actor, one per environment (n_envs, phases, d)
        :param others: those of the episodes without noise that begin now, like ``offsets``; NaN where they are unknown
        :param opens: whether all episodes with noise belong to the search
        :return: which environments try an offset in this vector step, bool (n_envs,)
        """
        begins = np.flatnonzero(self.fresh)
        for env in begins:
            self.searching[env] = noisy[env] and (opens or np.random.random() < self.share)
            self.tried[env] = offsets[env] if self.searching[env] else others[env]
            if self.searching[env]:
                self.tried[env][:, self.free] += self.std * np.random.normal(size=(self.shape[0], len(self.free)))
        self.fresh[begins] = False
        self.tried[noisy & ~self.searching] = np.nan  # also of a trial that has been abandoned
        return noisy & self.searching

    def of_chunks(self, offsets: np.ndarray, references: np.ndarray) -> np.ndarray:
        """
        Take from each environment's offset the vector that is due.

        :param offsets: (n_envs, phases, d)
        :param references: the VLA's chunks (n_envs, C, d)
        :return: (n_envs, 1, d), in units of action
        """
        return offsets[np.arange(len(offsets)), phase_of(references, self.gripper)][:, None]

    def give_up(self, envs: np.ndarray) -> None:
        """
        Take running episodes out of the search: they do not count, and go on with the actor's own offset.

        :param envs: of which environments, bool (n_envs,)
        """
        self.tried[envs] = np.nan
        self.searching[envs] = False

    def end(self, dones: np.ndarray) -> None:
        """
        Take notice of the end of episodes.

        :param dones: (n_envs,)
        """
        self.fresh |= np.asarray(dones, dtype=bool)

    def count(self, outcomes: Sequence[ChunkOutcome], dones: np.ndarray, tasks: np.ndarray) -> list[int]:
        """
        Count the episodes of the search that have ended.

        :param outcomes: of the n chunks just played; they name the offset of their episode. An episode whose simulator
            broke or in which someone took over does not count
        :param dones: (n,)
        :param tasks: their tasks (n,)
        :return: tasks whose offset is due to move
        """
        due = []
        for env, outcome, done, task in zip(envs_of(outcomes), outcomes, dones, map(int, tasks), strict=True):
            self.ended.setdefault(task, 0)
            if outcome.offset is None:
                continue
            if outcome.taken_over:
                self.spoiled.add(env)
            if done:
                self.ended[task] += outcome.searching
                if env not in self.spoiled and not outcome.broken:
                    self.samples[task].append((outcome.offset[:, self.free].ravel(), bool(outcome.success)))
                    self.counted[task] += outcome.searching
                    its_turn = self.counted[task] >= self.FIRST and self.counted[task] % self.EVERY == 0
                    if outcome.searching and its_turn:
                        due.append(task)
                self.spoiled.discard(env)
        # an opening that is over stays over if its task has more training episodes later
        self.opened |= {task for task, ended in self.ended.items() if ended >= self.opening * self.shares[task]}
        return due

    def move(self, task: int, offset: np.ndarray) -> np.ndarray:
        """
        Find the best offset within reach.

        :param task: the task
        :param offset: the actor's present one (phases, d)
        :return: the new one (phases, d)
        """
        tried = np.array([vector for vector, _ in self.samples[task]])
        success = np.array([float(outcome) for _, outcome in self.samples[task]])
        length = self.LENGTH * self.std

        def kernel(vectors: np.ndarray) -> np.ndarray:
            squared = ((vectors[:, None] - tried[None]) ** 2).sum(-1)
            return self.AMPLITUDE**2 * np.exp(-squared / (2.0 * length**2))

        factor = cho_factor(kernel(tried) + self.NOISE * np.eye(len(tried)))
        weights = cho_solve(factor, success - success.mean())

        def negative_mean(vector: np.ndarray) -> tuple[float, np.ndarray]:
            near = kernel(vector[None])[0] * weights
            return -float(near.sum()), near @ (vector - tried) / length**2

        def left(vector: np.ndarray) -> float:
            return self.reach**2 - float(((vector - start) ** 2).sum())

        start = offset[:, self.free].ravel()
        ball = {"type": "ineq", "fun": left, "jac": lambda vector: 2.0 * (start - vector)}
        found = minimize(negative_mean, start, jac=True, method="SLSQP", constraints=ball, options={"ftol": 1e-9})
        step = found.x - start
        step *= min(1.0, self.reach / max(float(np.linalg.norm(step)), 1e-12))
        moved = offset.copy()
        if negative_mean(start + step)[0] < negative_mean(start)[0]:
            moved[:, self.free] = (start + step).reshape(len(offset), -1)
        return moved
