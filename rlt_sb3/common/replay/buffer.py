"""Replay buffer for action chunks: rewards are kept per control step."""

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import BaseBuffer, DictReplayBuffer
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from rlt_sb3.common.chunk_outcome import ChunkOutcome, envs_of, outcomes_of
from rlt_sb3.common.replay.intervention_copies import copy_row
from rlt_sb3.common.replay.offline import load_transitions
from rlt_sb3.common.replay.open_episode import Chunk, OpenEpisode, join_chunks, read_chunk
from rlt_sb3.common.replay.storage import ChunkBatch, TransitionStorage, join_batches, split_batch
from rlt_sb3.common.vec_env import metadata_of

#: Where someone took over, ``vla_ref`` is replaced by the executed action, or only the target of the pull is.
REFERENCES = ("replace", "target")


class ChunkReplayBuffer(DictReplayBuffer):
    r"""
    Replay buffer whose rows are executed action chunks.

    A row holds one chunk of at most :math:`C` control steps, the reward of each step, and the number :math:`k \le C` of
    executed steps (a chunk is cut short when the episode ends inside it). They are read from ``infos[i]["outcome"]``, a
    :class:`~rlt_sb3.common.chunk_outcome.ChunkOutcome`, as are the executed actions, the control steps that someone
    else chose, and the task. If the environment reports nothing about its control steps, the reward counts as earned in
    the first of them and the chunk as complete, k = C.

    Samples are returns over ``n_steps`` consecutive chunks of one sub-environment,

    .. math:: R = \sum_{m} \gamma^{K_m} \sum_{j<k_m} \gamma^j r_{m,j}, \qquad K_m = \sum_{l<m} k_l,

    with ``discounts`` :math:`= \gamma^{\sum_m k_m}` for the bootstrap from the ``next_observations`` of the last chunk
    used. With ``n_steps=1`` this is eq. 3 of the RL Token paper. The sum stops at the end of an episode, at the newest
    row and where :meth:`end_trajectories` was called. ``dones`` is 1 for terminations only: after a time-out the value
    of the last observation is used.

    **Rows between the chunks** (paper: subsampling with stride 2). With ``stride=s`` a row also begins at each control
    step s, 2s, ... inside a chunk. Its actions are the C that were executed from there on, across the border to the
    next chunk; if the episode ends before, k < C and the last action is repeated. The observations in between are the
    outcome's ``inner_obs`` (environments make them with ``obs_stride=s``). Such a row can be drawn once its last action
    is known.

    **Memory.** Each observation is stored once, in one of ``buffer_size`` slots. The final observation of an episode
    takes another slot, so a full buffer holds a little less than ``buffer_size`` rows. If an observation is not the
    next one of the row before, the trajectory counts as cut.

    Chunks that a worker did not finish (the outcome is ``broken``, or of 0 steps) and chunks that began before the
    critical phase of their episode are not stored. The row before such a chunk leads to its observation as usual, and
    what was stored of the episode is marked if it ends in success (not where a worker broke).

    **Successes.** When an episode ends in success, all of its rows are marked, ``successful`` in a sample. Until then,
    and for good if the episode was cut off, they count as rows of a failure.

    **Offline rows.** Rows of another origin (demonstrations, an earlier run) are kept beside the ring, are never
    overwritten and make up ``offline_ratio`` of each batch. :meth:`read_offline` reads their file. A model calls it
    when it begins to learn: loading a model for evaluation does not need the file.

    Different threads may add, sample and save (``model.save_replay_buffer``).

    :param buffer_size: number of slots, over all sub-environments
    :param observation_space: flat Dict space
    :param action_space: Box of shape (C, d); another shape counts as one control step per row
    :param device: torch device of the samples
    :param n_envs: number of sub-environments
    :param optimize_memory_usage: not supported (and not needed)
    :param timeout_is_failure: a time-out ends the return, as a failure does. False: the value of the last observation
        is added (SB3's ``handle_timeout_termination=True``). A policy that stands still never fails within an endless
        episode: its value would be bootstrapped from itself, and stay as high as it began
    :param n_steps: number of chunks in the return
    :param gamma: discount per control step
    :param stride: control steps between two rows that begin inside a chunk, 1..C-1; None: one row per chunk
    :param z_rl_dtype: "float32", or "float16" to keep ``z_rl`` in half the memory
    :param stratified: draw the same number of rows from every task, so that those with long episodes do not fill the
        batches; False: uniformly
    :param success_share: share of the collected rows of each batch, and of each task in it with ``stratified``, that
        belong to episodes that have ended in success, wherever there are both kinds; None: as many as there are
    :param offline_data: file of transitions (``rlt encode-demos``), which :meth:`read_offline` reads; None: none
    :param offline_ratio: share of each batch that comes from the offline rows, rounded to whole rows; 0 as long as
        there are none
    :param intervention_rows: slots beside the offline rows, and drawn with them, for copies of rows in which someone
        took over; later rows of the ring do not overwrite them; 0 disables it
    :param intervention_ref: where someone took over, the executed action is the target of the actor's pull. "replace":
        it also replaces ``vla_ref`` in that row (paper, Alg. 1); "target": it does not. Offline rows keep theirs
    :raises ValueError: for settings out of range, or a share of offline rows without a file
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Dict,
        action_space: spaces.Box,
        device: th.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        timeout_is_failure: bool = True,
        n_steps: int = 1,
        gamma: float = 0.99,
        stride: int | None = None,
        z_rl_dtype: str = "float32",
        stratified: bool = True,
        success_share: float | None = None,
        offline_data: str | os.PathLike[str] | None = None,
        offline_ratio: float = 0.0,
        intervention_rows: int = 0,
        intervention_ref: str = "replace",
    ):
        if not isinstance(n_steps, int | np.integer) or n_steps < 1:
            raise ValueError(f"n_steps must be an integer >= 1 (number of chunks in a return), got {n_steps!r}.")
        if not 0.0 <= gamma <= 1.0:
            raise ValueError(f"gamma must be in [0, 1] (discount per control step), got {gamma!r}.")
        if optimize_memory_usage:
            raise ValueError("ChunkReplayBuffer keeps every observation once anyway: leave optimize_memory_usage out.")
        shape = action_space.shape
        self.chunk_length = int(shape[0]) if len(shape) == 2 else 1
        if stride is not None and not 1 <= stride < self.chunk_length:
            raise ValueError(f"stride must be None or 1..{self.chunk_length - 1} (control steps), got {stride!r}.")
        if not (success_share is None or 0.0 <= success_share <= 1.0):
            raise ValueError(f"success_share must be None or in [0, 1] (share of each batch), got {success_share!r}.")
        if not 0.0 <= offline_ratio <= 1.0:
            raise ValueError(f"offline_ratio must be in [0, 1] (share of each batch), got {offline_ratio!r}.")
        if not (intervention_rows == 0 or (isinstance(intervention_rows, int) and intervention_rows >= 2)):
            raise ValueError(f"intervention_rows must be 0, or an integer >= 2, got {intervention_rows!r}.")
        if intervention_rows and not offline_ratio:
            raise ValueError(f"offline_ratio must be > 0, since intervention_rows is not 0, got {offline_ratio!r}.")
        if offline_ratio and offline_data is None and not intervention_rows:
            raise ValueError("offline_data must be a file, since offline_ratio is not 0, got None.")
        if intervention_ref not in REFERENCES:
            raise ValueError(f"intervention_ref must be one of {REFERENCES}, got {intervention_ref!r}.")
        # not ReplayBuffer's own __init__, which allocates arrays for both observations of every row
        BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs=n_envs)
        self.optimize_memory_usage = False
        self.handle_timeout_termination = not timeout_is_failure  # the name that SB3 asks for when it loads a buffer
        self.n_steps, self.gamma = int(n_steps), float(gamma)
        self.stride = stride
        self.stratified, self.success_share = stratified, success_share
        self.z_rl_dtype = z_rl_dtype
        self.offline_data, self.offline_ratio = offline_data, float(offline_ratio)
        self.intervention_rows, self.intervention_ref = intervention_rows, intervention_ref
        self.offline: TransitionStorage | None = None
        self._lock = threading.RLock()
        self.reset()

    def reset(self) -> None:
        """Forget all rows; offline rows stay."""
        super().reset()
        # the newest observations are not rows yet; a ring that is too small would overwrite them before they are
        per_chunk = 1 if self.stride is None else -(-self.chunk_length // self.stride)
        extra = (self.n_envs + 1) * (per_chunk + 1)
        space = self.observation_space
        assert isinstance(space, spaces.Dict)
        self.storage = TransitionStorage(
            self.buffer_size + extra, space, self.chunk_length, self.action_dim // self.chunk_length, self.z_rl_dtype
        )
        self.open_episodes: list[OpenEpisode | None] = [None] * self.n_envs
        self.rows_stored = 0  # ever

    def read_offline(self, env: VecEnv | None = None) -> None:
        """
        Prepare the offline rows: read their file and make room for interventions. Does nothing the second time.

        :param env: the environment whose frozen models the file must have been made with, where both name theirs
        :raises ValueError: if the file cannot be read, does not fit, or was made with other frozen models
        """
        if self.offline is not None or self.offline_ratio == 0.0:
            return
        space, mine, room = self.observation_space, self.storage, self.intervention_rows
        assert isinstance(space, spaces.Dict)
        if self.offline_data is not None:
            self.set_offline(load_transitions(self.offline_data, space, room, metadata_of(env).get("fingerprint")))
        elif room:
            self.set_offline(TransitionStorage(room, space, mine.chunk_length, mine.action_dim, self.z_rl_dtype))

    def set_offline(self, offline: TransitionStorage) -> None:
        """
        Mix rows of another origin into every batch, ``offline_ratio`` of it.

        :param offline: the rows
        :raises ValueError: if there are none, if they have other shapes, or if interventions have no room in them
        """
        if offline.count == 0 and not self.intervention_rows:
            raise ValueError(
                f"offline_ratio is {self.offline_ratio} but there are no offline rows: give transitions (`rlt "
                "encode-demos` writes them from demonstrations) or set it to 0."
            )
        mine, theirs = _shapes(self.storage), _shapes(offline)
        if mine != theirs:
            raise ValueError(
                f"The offline rows have the shapes {theirs}, this environment {mine}: they were made with another "
                "chunk length, VLA or RL token. Write them again with those of the environment."
            )
        if self.intervention_rows and offline.size - offline.kept < 2:
            raise ValueError(
                f"intervention_rows needs two or more free slots in the offline rows, got "
                f"{offline.size - offline.kept}: make them with more than they must keep."
            )
        self.offline = offline

    def take_settings_from(self, other: "ChunkReplayBuffer") -> None:
        """
        Take over the settings of another buffer that do not concern stored rows.

        These are the discount, the length of returns, how rows are drawn and the offline rows.

        :param other: the other buffer
        """
        self.gamma, self.n_steps = other.gamma, other.n_steps
        self.stratified, self.success_share = other.stratified, other.success_share
        self.offline_data, self.offline_ratio = other.offline_data, other.offline_ratio
        if other.offline is not None:
            self.set_offline(other.offline)

    def references(self) -> np.ndarray:
        """Return the VLA's chunks in the rows that were collected, (rows, C, d); in offline rows if there are none."""
        rows = np.flatnonzero(self.storage.is_row(np.arange(self.storage.size)))
        collected = rows[rows >= self.storage.kept]
        return self.storage.obs["vla_ref"][collected if len(collected) else rows]

    def size(self) -> int:
        """Return number of stored rows that can be drawn."""
        return self.storage.count

    # ------------------------------------------------------------------------------------------------- adding

    def add(  # type: ignore[override]
        self,
        obs: dict[str, np.ndarray],
        next_obs: dict[str, np.ndarray],
        action: np.ndarray,
        reward: np.ndarray,
        done: np.ndarray,
        infos: list[dict[str, Any]],
    ) -> None:
        """
        Store what happened in one chunk of every sub-environment, or of n of them, which their outcomes name.

        :param obs: observations before the chunk
        :param next_obs: observations after it (the final ones where the episode ended)
        :param action: chunks, (n, C, d)
        :param reward: sums over the chunks, (n,)
        :param done: terminated or truncated, (n,)
        :param infos: ``outcome``, see the class; also ``TimeLimit.truncated``
        :raises ValueError: if an outcome does not fit the chunk length or the stride; nothing is stored then
        """
        shape = (len(infos), self.chunk_length, self.action_dim // self.chunk_length)
        actions = np.asarray(action, dtype=np.float32).reshape(shape)
        outcomes = outcomes_of(infos, actions, reward)
        chunks = [read_chunk(index, outcome, shape[1:], self.stride) for index, outcome in enumerate(outcomes)]
        with self._lock:
            for row, (env, chunk, outcome) in enumerate(zip(envs_of(outcomes), chunks, outcomes, strict=True)):
                if chunk is None:
                    self._pass_over(env, bool(done[row]), outcome)
                    continue
                limit = bool(infos[row].get("TimeLimit.truncated", False)) and self.handle_timeout_termination
                self._add_chunk(env, row, obs, next_obs, chunk, bool(done[row]), limit, outcome)
            self.pos = self.storage.written % self.storage.size
            self.full = self.storage.written >= self.storage.size

    def _pass_over(self, env: int, done: bool, outcome: ChunkOutcome) -> None:
        """Leave a chunk out; the rows before it belong to the same episode, which can still end in success."""
        episode, self.open_episodes[env] = self.open_episodes[env], None
        if episode is None or outcome.broken:
            return
        if not done:
            self.open_episodes[env] = replace(episode, slot=None, inner=[])
        elif outcome.success:
            self._mark_success(episode.numbers, episode.copies)

    def _add_chunk(
        self,
        env: int,
        row: int,
        obs: Mapping[str, np.ndarray],
        next_obs: Mapping[str, np.ndarray],
        chunk: Chunk,
        done: bool,
        truncated: bool,
        outcome: ChunkOutcome,
    ) -> None:
        storage, episode, first = self.storage, self.open_episodes[env], self.storage.written
        slot = None if episode is None else episode.slot
        if slot is not None and not storage.holds(slot, obs, row):
            episode = slot = None
        numbers, copies = (episode.numbers, episode.copies) if episode is not None else ([], {})
        if slot is None:
            slot = storage.put_observation(obs, row)
        starts: dict[int, int] = {}  # control step in this chunk -> slot of its observation
        if self.stride is not None:
            assert outcome.inner_obs is not None
            inner = range(self.stride, chunk.steps, self.stride)
            starts = {step: storage.put_observation(outcome.inner_obs, n) for n, step in enumerate(inner)}
        next_slot = storage.put_observation(next_obs, row)
        ends = (next_slot, done and not truncated, done and truncated)
        numbers.extend(range(first, storage.written))
        task = outcome.task_id
        self._complete(copies, slot, chunk, *ends, task)
        for open_slot, step in episode.inner if episode is not None else ():
            assert episode is not None
            window = join_chunks(episode.chunk, chunk, step)
            goes_on = step in starts and window.steps == self.chunk_length
            self._complete(copies, open_slot, window, *((starts[step], False, False) if goes_on else ends), task)
        if done or chunk.steps < self.chunk_length:
            for step, open_slot in starts.items():
                self._complete(copies, open_slot, join_chunks(chunk, None, step), *ends, task)
            starts = {}
        if done and outcome.success:
            self._mark_success(numbers, copies)
        inner_rows = [(s, step) for step, s in starts.items()]
        self.open_episodes[env] = None if done else OpenEpisode(next_slot, chunk, inner_rows, numbers, copies)

    def _mark_success(self, numbers: list[int], copies: dict[int, int]) -> None:
        self.storage.mark_success(numbers)
        if copies and self.offline is not None:
            self.offline.mark_success(list(copies.values()))

    def _complete(
        self,
        copies: dict[int, int],
        slot: int,
        chunk: Chunk,
        next_slot: int,
        terminated: bool,
        truncated: bool,
        task: int,
    ) -> None:
        self.storage.put_chunk(
            slot, chunk.actions, chunk.rewards, chunk.steps, next_slot, terminated, truncated, task, chunk.taken_over
        )
        self.rows_stored += 1
        if self.intervention_rows and self.offline is not None and chunk.taken_over.any():
            copy_row(self.storage, slot, self.offline, copies, self.intervention_ref == "replace")

    def end_trajectories(self) -> None:
        """End all trajectories, so that no return runs across a reset from outside."""
        with self._lock:
            self.open_episodes = [None] * self.n_envs

    # ------------------------------------------------------------------------------------------------- sampling

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> ChunkBatch:  # type: ignore[override]
        """
        Draw a batch of rows.

        :param batch_size: number of rows
        :param env: must be None; normalized rewards would not fit the per-step rewards
        :return: batch with ``rewards`` (B, 1) = n-chunk returns, ``discounts`` (B, 1), ``dones`` (B, 1)
        :raises ValueError: if the buffer is empty
        """
        return self.sample_batches(1, batch_size)[0]

    def sample_batches(
        self, count: int, batch_size: int, prepare: Callable[[ChunkBatch], None] | None = None
    ) -> list[ChunkBatch]:
        """
        Draw several batches at once, with less overhead than one by one.

        :param count: number of batches
        :param batch_size: rows in each
        :param prepare: called with all rows at once (online and offline ones apart), may add observations
        :return: the batches, each drawn as by :meth:`sample`
        :raises ValueError: if the buffer is empty
        """
        with self._lock:
            n_offline = 0
            if self.offline is not None and self.offline.count:
                n_offline = round(batch_size * self.offline_ratio)
            if self.size() == 0 and n_offline < batch_size:
                raise ValueError("The replay buffer is empty: store transitions before sampling.")
            parts: list[tuple[TransitionStorage, int]] = [(self.storage, batch_size - n_offline)]
            if n_offline:
                assert self.offline is not None
                parts.append((self.offline, n_offline))
            read: list[list[ChunkBatch]] = []
            for storage, share in parts:
                if share:
                    slots = np.concatenate([self._draw(storage, share) for _ in range(count)])
                    joined = self._gather(slots, storage)
                    if prepare is not None:
                        prepare(joined)
                    read.append(split_batch(joined, count, share))
        return [join_batches(batches) for batches in zip(*read, strict=True)]

    def _draw(self, storage: TransitionStorage, count: int) -> np.ndarray:
        """
        Choose rows, with replacement: uniformly, or as many from each task or of each outcome as there should be.

        :param storage: what to choose from
        :param count: how many
        :return: slots (count,)
        """
        share = self.success_share if storage is self.storage else None
        return storage.index.draw(count, self.stratified, storage.successful, share)

    def _get_samples(self, batch_inds: np.ndarray, env: VecNormalize | None = None) -> ChunkBatch:  # type: ignore[override]
        return self._gather(batch_inds)

    def _gather(self, slots: np.ndarray, storage: TransitionStorage | None = None) -> ChunkBatch:
        """
        Build the batch of chosen rows.

        :param slots: slots (B,)
        :param storage: where they are; the ring by default
        :return: the batch
        """
        chosen = self.storage if storage is None else storage
        overwrite = self.intervention_ref == "replace" and chosen is self.storage
        return chosen.gather(slots, self.n_steps, self.gamma, self.device, overwrite)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the lock, and the offline rows unless something was added to what is in their file."""
        state = {key: value for key, value in self.__dict__.items() if key != "_lock"}
        return state if self.intervention_rows else state | {"offline": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()


def _shapes(storage: TransitionStorage) -> dict[str, Any]:
    observations = {key: value.shape[1:] for key, value in sorted(storage.obs.items())}
    return {"action": storage.actions.shape[1:]} | observations
