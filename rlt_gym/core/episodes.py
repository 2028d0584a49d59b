"""Which task and which initial state the episodes of a vector environment have. No environment is needed for that."""

from __future__ import annotations

import warnings
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rlt_gym.workers.named import checked_int, is_integer

#: Initial states per task in each split.
SPLIT_SIZES = {"train": 10_000, "selection": 500, "eval": 500}


@dataclass
class Episode:
    """
    What one environment is playing.

    :param number: Number of the episode in the sequence of the whole vector environment.
    :param task_index: Index of its task among the environment's tasks.
    :param init_index: Its initial state in the split.
    :param steps: Control steps played so far.
    :param noise_seed: Seed for the noise of a policy in this episode, see :meth:`EpisodeSequence.noise_seed`.
    """

    number: int
    task_index: int
    init_index: int
    steps: int = 0
    noise_seed: int = 0


class ResetOptions(NamedTuple):
    """
    What a reset was given; ``None`` where it was not.

    :param mask: Which environments to reset, bool (N,); all without ``reset_mask``.
    :param split: The split to switch to.
    :param shard: (k, n).
    :param turns: How many episodes each environment leaves out.
    :param episodes: The list of episodes, (index of the task, initial state) each.
    :param horizon: Of the training split, in control steps: of all tasks, or of each.
    """

    mask: np.ndarray
    split: str | None
    shard: tuple[int, int] | None
    turns: Sequence[int] | None
    episodes: Sequence[tuple[int, int]] | None
    horizon: int | list[int] | None


class EpisodeSequence:
    """
    The sequence of episodes that the N environments of a vector environment share.

    Episode number p of the whole vector (env i plays p = N-1-i, 2N-1-i, ...) is task ``p % n_tasks`` and, in the
    evaluation and selection splits, initial state ``p // n_tasks``: SB3's ``evaluate_policy(n_eval_episodes=n)``
    thus sees the first n pairs exactly once, whatever N. In the training split the initial state is drawn from
    ``(seed, p)``, so it does not depend on N either. With ``group_size=g`` training episodes come in groups: task and
    initial state of episode p are those that episode ``p // g`` has without groups. :meth:`set_task_weights` lets some
    tasks have more training episodes than others.

    A subclass that overrides :meth:`episode` numbers tasks and initial states in another way.

    :param num_envs: N.
    :param num_tasks: Number of tasks.
    :param split: The split to begin with, a key of ``sizes``.
    :param seed: Seed of the training split's initial states, and of :meth:`noise_seed` in every split.
    :param group_size: g.
    :param sizes: Initial states per task in each split.
    :raises ValueError: A bad argument.
    """

    def __init__(
        self,
        num_envs: int,
        num_tasks: int,
        split: str = "train",
        seed: int = 0,
        group_size: int = 1,
        sizes: Mapping[str, int] = SPLIT_SIZES,
    ):
        self.num_envs, self.num_tasks, self.sizes = num_envs, num_tasks, dict(sizes)
        self.split = self.checked_split(split)
        self.seed = self.checked_seed(seed)
        #: Seed of :meth:`noise_seed` in the held-out splits. A new seed of the training split leaves it as it is, so
        #: that an evaluation does not depend on the training before it.
        self.held_out_seed = self.seed
        self.group_size = checked_int("group_size", group_size, 1, 10_000)
        self.set_task_weights([1] * num_tasks)
        self.shard = (0, 1)
        #: What is left of a list of episodes, numbered from 0, and which of them each env took last.
        self._listed: deque[tuple[int, int, int]] | None = None
        self._taken: dict[int, tuple[int, int, int]] = {}
        #: How many episodes each env has begun, and how many of the training split when it was left.
        self._next = [0] * num_envs
        self._train_next = [0] * num_envs

    def checked_split(self, split: Any) -> str:
        """
        Check the name of a split.

        :param split: Name of a split.
        :return: The same.
        :raises ValueError: There is no such split.
        """
        if not isinstance(split, str) or split not in self.sizes:
            raise ValueError(f"init_states must be one of {tuple(self.sizes)}, got {split!r}")
        return split

    @staticmethod
    def checked_seed(seed: Any) -> int:
        """
        Check a seed.

        :param seed: A seed.
        :return: The same as an ``int``.
        :raises ValueError: It is no integer, or negative.
        """
        return checked_int("seed", seed, 0)

    def checked_horizon(self, horizon: Any, longest: int | None) -> int | list[int]:
        """
        Check the horizon of training episodes.

        :param horizon: Control steps, of all tasks or of each.
        :param longest: Largest horizon, in control steps; ``None``: any.
        :return: The same, as an ``int`` or a list of them.
        :raises ValueError: It is neither an integer nor one for each task, or one is out of range.
        """
        if not isinstance(horizon, (list, tuple, np.ndarray)):
            return checked_int("train_episode_steps", horizon, 1, longest)
        if len(horizon) != self.num_tasks:
            raise ValueError(
                f"train_episode_steps must be an integer, or {self.num_tasks}, one for each task; got {horizon!r}"
            )
        return [checked_int("train_episode_steps", steps, 1, longest) for steps in horizon]

    def base_seed(self, seed: Any) -> int | None:
        """
        Find the one seed that the environments share.

        :param seed: What a reset was given: ``None``, a seed s, or one for each environment, which must be
            s, s + 1, ..., s + N - 1 (what Gymnasium and Stable-Baselines3 make of s) or all ``None``.
        :return: s; ``None`` without a seed.
        :raises ValueError: Another list, or no seed.
        """
        if seed is None:
            return None
        if not isinstance(seed, (list, tuple, np.ndarray)):
            return self.checked_seed(seed)
        seeds = list(seed)
        if len(seeds) == self.num_envs and all(entry is None for entry in seeds):
            return None
        # mixed lists fail here as well: the environments share one sequence, so one of them cannot be seeded alone
        first = self.checked_seed(seeds[0]) if seeds and seeds[0] is not None else -1
        if first < 0 or seeds != list(range(first, first + self.num_envs)):
            raise ValueError(
                f"seed must be an integer s, or {self.num_envs} consecutive ones s, s + 1, ... (one for each "
                f"environment), or None, got {seed!r}"
            )
        return first

    def checked_options(
        self, options: dict[str, Any] | None, longest: int | None, task_ids: Sequence[int] = ()
    ) -> ResetOptions:
        """
        Read what a reset was given.

        :param options: ``init_states``, ``reset_mask``, ``train_episode_steps``, ``shard``, ``turns`` and
            ``episodes``; others are ignored with a warning.
        :param longest: Largest horizon of the training split, in control steps; ``None``: any.
        :param task_ids: Numbers of the tasks.
        :return: The options.
        :raises ValueError: A bad value, or a switch of the split for a part of the environments.
        """
        options = dict(options or {})
        episodes = options.pop("episodes", None)
        mask = options.pop("reset_mask", None)
        split = options.pop("init_states", None)
        shard = options.pop("shard", None)
        turns = options.pop("turns", None)
        horizon = None
        if "train_episode_steps" in options:
            horizon = self.checked_horizon(options.pop("train_episode_steps"), longest)
        if options:
            warnings.warn(
                f"The reset options {sorted(map(str, options))} are ignored; this environment takes init_states, "
                "reset_mask, train_episode_steps, shard, turns and episodes",
                stacklevel=4,
            )
        if shard is not None and not (_are_integers(shard, 2) and 0 <= shard[0] < shard[1]):
            raise ValueError(f"shard must be (k, n), integers with 0 <= k < n, got {shard!r}")
        if split is not None:
            split = self.checked_split(split)
        if mask is None:
            mask = np.ones(self.num_envs, dtype=bool)
        elif not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (self.num_envs,):
            raise ValueError(f"reset_mask must be a bool array of shape ({self.num_envs},), got {mask!r}")
        if not mask.any():
            raise ValueError(f"reset_mask must select at least one environment, got {mask!r}")
        if not mask.all() and split not in (None, self.split):
            raise ValueError("init_states can only be switched for all environments at once: leave reset_mask out")
        if turns is not None and not (_are_integers(turns, self.num_envs) and min(turns) >= 0 and mask.all()):
            raise ValueError(f"turns must be {self.num_envs} integers of 0 or more, in a full reset, got {turns!r}")
        if episodes is not None:
            if shard is not None or turns is not None or not mask.all():
                raise ValueError("episodes are a list for all environments: leave reset_mask, shard and turns out")
            episodes = self._checked_list(episodes, task_ids, self.sizes[self.split if split is None else split])
        return ResetOptions(mask, split, shard, turns, episodes, horizon)

    @staticmethod
    def _checked_list(episodes: Any, task_ids: Sequence[int], size: int) -> list[tuple[int, int]]:
        """Check a list of episodes, and find the index of each one's task."""
        pairs = episodes.tolist() if isinstance(episodes, np.ndarray) else episodes
        known = isinstance(pairs, Sequence) and all(
            _are_integers(pair, 2) and pair[0] in task_ids and 0 <= pair[1] < size for pair in pairs
        )
        if not known or not pairs:
            raise ValueError(
                f"episodes must be one or more pairs (task_id, initial state) with a task of {list(task_ids)} and a "
                f"state from 0 to {size - 1}, got {pairs!r}"
            )
        return [(task_ids.index(task), state) for task, state in pairs]

    @property
    def init_state_counts(self) -> dict[str, int]:
        """How many initial states the sequences of the held-out splits have before they begin again."""
        return {split: size * self.num_tasks for split, size in self.sizes.items() if split != "train"}

    def number(self, env: int, turn: int) -> int:
        """
        Compute the global number of an episode.

        :param env: Index of the environment.
        :param turn: How many episodes it has begun before.
        :return: Global number of that episode. Later envs come first, as in ``evaluate_policy``.
        """
        return self.num_envs - 1 - env + turn * self.num_envs

    def place(self, number: int) -> int:
        """
        Find the task and the initial state of an episode.

        :param number: Global number of an episode.
        :return: Which task and initial state of the split's sequence it has: its group's in practice.
        """
        return number // self.group_size if self.split == "train" else number

    def episode(self, number: int) -> Episode:
        """
        Make an episode from its number.

        :param number: Global number of an episode.
        :return: That episode, not begun yet.
        """
        place = self.place(number)
        if self.split == "train":
            draw = int(np.random.SeedSequence([self.seed, place]).generate_state(1)[0])
            # Tasks take turns, from one that the seed chooses: whoever seeds anew after every few episodes (a run that
            # evaluates or saves often) still practices all of them.
            first = int(np.random.SeedSequence([self.seed]).generate_state(1)[0])
            return Episode(number, self.task_at(first + place), draw % self.sizes["train"])
        turn, task_index = divmod(place, self.num_tasks)
        return Episode(number, task_index, turn % self.sizes[self.split])

    def set_task_weights(self, weights: Sequence[int]) -> None:
        """
        Let tasks have unequal numbers of training episodes from the next episode on; evaluations are as before.

        :param weights: For each task, how many episodes it has in a round: ``[1, 3]`` plays the tasks 0, 1, 1, 1, and
            again. 0: none. It stays until it is set again.
        :raises ValueError: Other than one integer >= 0 per task, or only zeros; nothing changes.
        """
        if not (_are_integers(weights, self.num_tasks) and min(weights) >= 0 and max(weights) > 0):
            raise ValueError(
                f"task weights must be {self.num_tasks} integers of 0 or more, one for each task and not all 0, got "
                f"{weights!r}"
            )
        #: How many episodes of a round each task has.
        self.task_weights = [int(weight) for weight in weights]
        # as far apart as possible: first each task once, then those that have more
        self._round = [
            task for turn in range(max(weights)) for task, weight in enumerate(self.task_weights) if turn < weight
        ]

    def task_at(self, turn: int) -> int:
        """
        Find the task whose turn it is.

        :param turn: Number of training episodes before, from the beginning of a round on.
        :return: Index of the task.
        """
        return self._round[turn % len(self._round)]

    def noise_seed(self, episode: Episode, task_id: int) -> int:
        """
        Seed for the noise of a policy in one episode.

        In the held-out splits it follows from split, task, initial state and the seed of the evaluation. The number of
        environments and the order of the episodes do not change it. In the training split it also follows from the
        number of the episode, so that a second visit to an initial state, or another member of its group, gets another
        seed.

        :param episode: The episode.
        :param task_id: Number of its task in the suite.
        :return: A number in [0, 2**63).
        """
        train = self.split == "train"
        # The seed comes last: it is the only number here that can need several words of the entropy.
        entropy = [
            zlib.crc32(self.split.encode()),
            task_id,
            episode.init_index,
            episode.number if train else 0,
            self.seed if train else self.held_out_seed,
        ]
        return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)

    def next(self, env: int) -> Episode | None:
        """
        Give an environment its next episode.

        :param env: Index of the environment.
        :return: The episode that it plays next; ``None`` if those of a list have all been given out.
        """
        if self._listed is not None:
            if not self._listed:
                return None
            self._taken[env] = self._listed.popleft()
            return Episode(*self._taken[env])
        number = self.number(env, self._next[env]) * self.shard[1] + self.shard[0]
        self._next[env] += 1
        return self.episode(number)

    def repeat(self, env: int) -> None:
        """
        Let an environment play its present episode again, so that an evaluation misses none of its states.

        :param env: Index of the environment.
        """
        if self._listed is not None:
            self._listed.appendleft(self._taken[env])
        else:
            self._next[env] -= 1

    @property
    def turns(self) -> list[int]:
        """How many episodes of the sequence each environment has begun, for the reset option ``turns``."""
        return list(self._next)

    def go_on(self, turns: Sequence[int] | None) -> None:
        """
        Let the environments leave out the first episodes of the sequence.

        :param turns: How many each of them leaves out, see :attr:`turns`; ``None``: nothing changes.
        """
        if turns is not None:
            self._next = [int(turn) for turn in turns]

    def reseed(self, seed: int) -> None:
        """
        Draw what follows from another seed, without starting a sequence over.

        :param seed: The seed. In a held-out split it becomes the seed of the evaluation as well.
        :raises ValueError: A bad seed.
        """
        self.seed = self.checked_seed(seed)
        if self.split != "train":
            self.held_out_seed = self.seed

    def restart(self, split: str | None = None, seed: int | None = None, shard: tuple[int, int] | None = None) -> None:
        """
        Start the sequence over, as a reset of all environments does.

        :param split: The new split; ``None``: the same.
        :param seed: New seed, which starts the training sequence over; ``None``: the same. If the new split
            is a held-out one, it becomes the seed of the evaluation as well.
        :param shard: (k, n) leaves only the episodes k, k + n, k + 2n, ... until the next restart; ``None``: all.
        :raises ValueError: A bad seed or split.
        """
        split = self.split if split is None else self.checked_split(split)
        seed = None if seed is None else self.checked_seed(seed)
        switched = split != self.split
        if switched and self.split == "train":
            self._train_next = list(self._next)
        self.split = split
        self.shard = (0, 1) if shard is None else (int(shard[0]), int(shard[1]))
        self._listed = None
        if seed is not None:
            self.reseed(seed)
            self._train_next = [0] * self.num_envs
        if self.split != "train":
            # A held-out sequence starts over, so that every evaluation sees the same states.
            self._next = [0] * self.num_envs
        elif switched or seed is not None:
            self._next = list(self._train_next)  # practice goes on where an evaluation interrupted it

    def play_list(self, episodes: Sequence[tuple[int, int]]) -> None:
        """
        Play listed episodes instead of the sequence, until the next restart; whichever environment is free takes one.

        :param episodes: (index of the task, initial state) of each.
        """
        self._listed = deque((number, int(task), int(state)) for number, (task, state) in enumerate(episodes))


def _are_integers(value: Any, count: int) -> bool:
    """Whether a value is a list of that many integers; ``bool`` is none."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    return isinstance(value, Sequence) and len(value) == count and all(map(is_integer, value))
