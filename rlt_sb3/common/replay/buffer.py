"""Replay buffer for action chunks: rewards are kept per control step."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import BaseBuffer, DictReplayBuffer
from stable_baselines3.common.vec_env import VecNormalize

from rlt_sb3.common.chunks import Chunk, Lane, join_chunks, succeeded
from rlt_sb3.common.replay.intervention_copies import copy_row
from rlt_sb3.common.replay.storage import ChunkBatch, ChunkRows, join_batches, split_batch


class ChunkReplayBuffer(DictReplayBuffer):
    r"""
    Replay buffer whose rows are executed action chunks.

    A row holds one chunk of at most :math:`C` control steps with its reward at each of them and the number
    :math:`k \le C` of executed steps (a chunk is cut short when the episode ends inside it). Both come from
    ``infos[i]["step_rewards"]`` (C,) and ``infos[i]["chunk_steps"]``. Without them (any other environment) the
    reward is taken as earned in the first control step and the chunk as complete, k = C. ``infos[i]["task_id"]`` is
    kept where there is one. ``infos[i]["executed_actions"]`` (C, d) replaces the action, and
    ``infos[i]["intervention"]`` (C,) marks the control steps that a human or an expert chose.

    Samples are returns over ``n_steps`` consecutive chunks of one sub-environment,

    .. math:: R = \sum_{m} \gamma^{K_m} \sum_{j<k_m} \gamma^j r_{m,j}, \qquad K_m = \sum_{l<m} k_l,

    with ``discounts`` :math:`= \gamma^{\sum_m k_m}` for the bootstrap from the ``next_observations`` of the last
    chunk used. With ``n_steps=1`` this is eq. 3 of the RL Token paper. The sum stops at the end of an episode, at the
    newest row and where :meth:`end_trajectories` was called. ``dones`` is 1 for terminations only: after a time-out
    the value of the last observation is used.

    **Rows between the chunks** (paper: subsampling with stride 2). With ``stride=s`` a row begins at every control step
    s, 2s, ... inside a chunk as well. Its actions are the C that were executed from there on, across the border to the
    next chunk; where the episode ends before, k < C and the last action is repeated. The observations in between come
    from ``infos[i]["inner_obs"]``, a dict of arrays (n, ...), and ``infos[i]["inner_count"]``, how many of them are
    valid (environments make them with ``obs_stride=s``). Such a row can be drawn when its last action is known.

    **Memory.** Each observation is stored once, in one of ``buffer_size`` slots; the final observation of an episode
    takes a slot of its own, so a full buffer holds a little less than ``buffer_size`` rows. Where an observation is not
    the next one of the row before, the trajectory is taken as cut.

    A chunk that a worker did not finish (``infos[i]["worker_restarted"]``, or ``chunk_steps`` 0) is not stored; the
    row before it leads to its observation as usual. Neither is one that began before the critical phase of its episode
    (``infos[i]["critical_chunk"]`` is there and false).

    **Successes.** When an episode ends in success (``infos[i]["is_success"]``, or a positive last reward where that is
    not told), all rows of it are marked, ``successful`` in a sample. Until then, and for good where it was cut off,
    they count as those of a failure.

    Adding, sampling and saving (``model.save_replay_buffer``) may happen in different threads.

    :param buffer_size: number of slots, over all sub-environments
    :param observation_space: flat Dict space
    :param action_space: Box of shape (C, d); another shape counts as one control step per row
    :param device: where samples go
    :param n_envs: number of sub-environments
    :param optimize_memory_usage: not supported (and not needed)
    :param handle_timeout_termination: if False, a time-out counts as a termination
    :param n_steps: number of chunks in the return
    :param gamma: discount per control step
    :param stride: begin a row every so many control steps, 1..C-1; None: one row per chunk
    :param z_rl_dtype: "float32", or "float16" to keep ``z_rl`` in half the memory
    :param stratified: draw the same number of rows from every task
    :param offline: further rows, e.g. of :func:`~rlt_sb3.common.replay.offline.load_transitions`
    :param offline_ratio: share of each batch that comes from ``offline``, rounded to whole rows; nothing as long as
        there are none
    :param keep_interventions: also write rows in which someone took over to ``offline``, where later rows do not push
        them out; it needs at least two slots that are used in turn
    :param overwrite_reference: where someone else chose the action, replace ``vla_ref`` by it (as the paper does),
        not only the target of the actor's pull; ``offline`` rows keep theirs
    :raises ValueError: for settings out of range, or a share of ``offline`` without rows in it
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Dict,
        action_space: spaces.Box,
        device: th.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        n_steps: int = 1,
        gamma: float = 0.99,
        stride: int | None = None,
        z_rl_dtype: str = "float32",
        stratified: bool = False,
        offline: ChunkRows | None = None,
        offline_ratio: float = 0.0,
        overwrite_reference: bool = False,
        keep_interventions: bool = False,
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
        # not ReplayBuffer's own __init__, which allocates arrays for both observations of every row
        BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs=n_envs)
        self.optimize_memory_usage = False
        self.handle_timeout_termination = handle_timeout_termination
        self.n_steps, self.gamma = int(n_steps), float(gamma)
        self.stride = stride
        self.stratified = stratified
        self.overwrite_reference = overwrite_reference
        self.keep_interventions = keep_interventions
        self.z_rl_dtype = z_rl_dtype
        self._lock = threading.RLock()
        self.reset()
        self.set_offline(offline, offline_ratio)

    def reset(self) -> None:
        """Forget all rows; offline rows stay."""
        super().reset()
        # the newest observations are no rows yet; a ring that is too small would lose them before they are
        per_chunk = 1 if self.stride is None else -(-self.chunk_length // self.stride)
        extra = (self.n_envs + 1) * (per_chunk + 1)
        space = self.observation_space
        assert isinstance(space, spaces.Dict)
        self.rows = ChunkRows(
            self.buffer_size + extra, space, self.chunk_length, self.action_dim // self.chunk_length, self.z_rl_dtype
        )
        self.lanes: list[Lane | None] = [None] * self.n_envs
        self.rows_stored = 0  # ever

    def set_offline(self, offline: ChunkRows | None, ratio: float) -> None:
        """
        Mix rows of another origin into every batch.

        :param offline: the rows, or None
        :param ratio: their share of each batch, in [0, 1]
        :raises ValueError: if the share is out of range, or positive without rows, if the rows have other shapes, or
            if interventions have no room in them
        """
        if not 0.0 <= ratio <= 1.0:
            raise ValueError(f"offline_ratio must be in [0, 1] (share of each batch), got {ratio!r}.")
        if ratio > 0.0 and not self.keep_interventions and (offline is None or offline.count == 0):
            raise ValueError(
                f"offline_ratio is {ratio} but there are no offline rows: give transitions (`rlt encode-demos` writes "
                "them from demonstrations) or set it to 0."
            )
        if offline is not None:
            mine, theirs = _shapes(self.rows), _shapes(offline)
            if mine != theirs:
                raise ValueError(
                    f"The offline rows have the shapes {theirs}, this environment {mine}: they were made with another "
                    "chunk length, VLA or RL token. Write them again with those of the environment."
                )
            if self.keep_interventions and offline.size - offline.kept < 2:
                raise ValueError(
                    f"keep_interventions needs two or more free slots in the offline rows, got "
                    f"{offline.size - offline.kept}: make them with more than they must keep."
                )
        self.offline, self.offline_ratio = offline, float(ratio)

    def size(self) -> int:
        """:return: number of stored rows that can be drawn"""
        return self.rows.count

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
        Store what happened in one chunk of every sub-environment.

        :param obs: observations before the chunk
        :param next_obs: observations after it (the final ones where the episode ended)
        :param action: chunks, (n_envs, C, d)
        :param reward: sums over the chunks, (n_envs,)
        :param done: terminated or truncated, (n_envs,)
        :param infos: see the class; also ``TimeLimit.truncated``
        :raises ValueError: if an info does not fit the chunk length or the stride; nothing is stored then
        """
        shape = (self.n_envs, self.chunk_length, self.action_dim // self.chunk_length)
        actions = np.asarray(action, dtype=np.float32).reshape(shape)
        chunks = [self._read(index, actions[index], reward[index], info) for index, info in enumerate(infos)]
        with self._lock:
            for index, (chunk, info) in enumerate(zip(chunks, infos, strict=True)):
                if chunk is None:
                    self.lanes[index] = None
                    continue
                truncated = bool(info.get("TimeLimit.truncated", False)) and self.handle_timeout_termination
                self._add_chunk(index, obs, next_obs, chunk, bool(done[index]), truncated, info)
            self.pos = self.rows.written % self.rows.size
            self.full = self.rows.written >= self.rows.size

    def _read(self, index: int, action: np.ndarray, reward: float, info: Mapping[str, Any]) -> Chunk | None:
        """Check one info before anything is written; None: not to be stored."""
        length = self.chunk_length
        steps = int(info["chunk_steps"]) if "chunk_steps" in info else length
        if info.get("worker_restarted", False) or not info.get("critical_chunk", True):
            return None
        if "step_rewards" in info and "chunk_steps" in info:
            rewards = np.array(info["step_rewards"], dtype=np.float32)
            if rewards.shape != (length,) or not 0 <= steps <= length:
                raise ValueError(
                    f"Expected info['step_rewards'] of shape ({length},) and 1 <= info['chunk_steps'] <= {length} (0: "
                    f"nothing was executed), got shape {rewards.shape} and {steps}."
                )
            if steps == 0:
                return None
            rewards[steps:] = 0.0
        else:
            steps, rewards = length, np.zeros(length, dtype=np.float32)
            rewards[0] = reward
        human = np.array(info.get("intervention", np.zeros(length)), dtype=bool)
        executed = np.array(info.get("executed_actions", action), dtype=np.float32)  # a copy: it waits in the lane
        if human.shape != (length,) or executed.shape != action.shape:
            raise ValueError(
                f"Expected info['intervention'] of shape ({length},) and info['executed_actions'] of shape "
                f"{action.shape}, got {human.shape} and {executed.shape}."
            )
        human[steps:] = False
        if self.stride is not None and "inner_obs" not in info:
            raise ValueError(
                f"stride={self.stride} needs info['inner_obs'] and info['inner_count'] of sub-environment {index}: "
                f"make the environment with obs_stride={self.stride}."
            )
        if self.stride is not None and int(info["inner_count"]) < len(range(self.stride, steps, self.stride)):
            raise ValueError(
                f"stride={self.stride} needs {len(range(self.stride, steps, self.stride))} inner observations of "
                f"{steps} control steps, got {info['inner_count']}: make the environment with obs_stride={self.stride}."
            )
        return Chunk(executed, rewards, steps, human)

    def _add_chunk(
        self,
        index: int,
        obs: Mapping[str, np.ndarray],
        next_obs: Mapping[str, np.ndarray],
        chunk: Chunk,
        done: bool,
        truncated: bool,
        info: Mapping[str, Any],
    ) -> None:
        rows, lane, first = self.rows, self.lanes[index], self.rows.written
        if lane is not None and not rows.holds(lane.slot, obs, index):
            lane = None
        numbers, copies = (lane.numbers, lane.copies) if lane is not None else ([], {})
        slot = lane.slot if lane is not None else rows.put_observation(obs, index)
        starts: dict[int, int] = {}  # control step in this chunk -> slot of its observation
        if self.stride is not None:
            inner = range(self.stride, chunk.steps, self.stride)
            starts = {step: rows.put_observation(info["inner_obs"], n) for n, step in enumerate(inner)}
        next_slot = rows.put_observation(next_obs, index)
        ends = (next_slot, done and not truncated, done and truncated)
        numbers.extend(range(first, rows.written))
        task = int(info.get("task_id", 0))
        self._complete(copies, slot, chunk, *ends, task)
        for open_slot, step in lane.inner if lane is not None else ():
            assert lane is not None
            window = join_chunks(lane.chunk, chunk, step)
            goes_on = step in starts and window.steps == self.chunk_length
            self._complete(copies, open_slot, window, *((starts[step], False, False) if goes_on else ends), task)
        if done or chunk.steps < self.chunk_length:
            for step, open_slot in starts.items():
                self._complete(copies, open_slot, join_chunks(chunk, None, step), *ends, task)
            starts = {}
        if done and succeeded(info, chunk.rewards.sum()):
            rows.mark_success(numbers)
            if copies and self.offline is not None:
                self.offline.mark_success(list(copies.values()))
        inner_rows = [(s, step) for step, s in starts.items()]
        self.lanes[index] = None if done else Lane(next_slot, chunk, inner_rows, numbers, copies)

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
        self.rows.put_chunk(
            slot, chunk.actions, chunk.rewards, chunk.steps, next_slot, terminated, truncated, task, chunk.human
        )
        self.rows_stored += 1
        if self.keep_interventions and self.offline is not None and chunk.human.any():
            copy_row(self.rows, slot, self.offline, copies, self.overwrite_reference)

    def end_trajectories(self) -> None:
        """
        Say that the rows to come do not continue the newest ones (the environment was reset from outside), so that
        no return runs across.
        """
        with self._lock:
            self.lanes = [None] * self.n_envs

    # ------------------------------------------------------------------------------------------------- sampling

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> ChunkBatch:  # type: ignore[override]
        """
        :param batch_size: number of rows
        :param env: must be None; normalised rewards would not fit the per-step rewards
        :return: batch with ``rewards`` (B, 1) = n-chunk returns, ``discounts`` (B, 1), ``dones`` (B, 1)
        :raises ValueError: if the buffer is empty
        """
        return self.sample_batches(1, batch_size)[0]

    def sample_batches(
        self, count: int, batch_size: int, prepare: Callable[[ChunkBatch], None] | None = None
    ) -> list[ChunkBatch]:
        """
        Several batches read at once, with less overhead than one by one.

        :param count: number of batches
        :param batch_size: rows in each
        :param prepare: called with all rows at once (online and offline ones apart), may add observations
        :return: the batches; each by itself is drawn as by :meth:`sample`
        :raises ValueError: if the buffer is empty
        """
        with self._lock:
            n_offline = 0
            if self.offline is not None and self.offline.count:
                n_offline = round(batch_size * self.offline_ratio)
            if self.size() == 0 and n_offline < batch_size:
                raise ValueError("The replay buffer is empty: store transitions before sampling.")
            parts: list[tuple[ChunkRows, int]] = [(self.rows, batch_size - n_offline)]
            if n_offline:
                assert self.offline is not None
                parts.append((self.offline, n_offline))
            read: list[list[ChunkBatch]] = []
            for rows, share in parts:
                if share:
                    slots = np.concatenate([self._draw(rows, share) for _ in range(count)])
                    joined = self._gather(slots, rows)
                    if prepare is not None:
                        prepare(joined)
                    read.append(split_batch(joined, count, share))
        return [join_batches(batches) for batches in zip(*read, strict=True)]

    def _draw(self, rows: ChunkRows, count: int) -> np.ndarray:
        """
        Choose rows, with replacement: uniformly, or as many from each task.

        :param rows: what to choose from
        :param count: how many
        :return: slots (count,)
        """
        return rows.rows.draw(count, self.stratified)

    def _get_samples(self, batch_inds: np.ndarray, env: VecNormalize | None = None) -> ChunkBatch:  # type: ignore[override]
        return self._gather(batch_inds)

    def _gather(self, slots: np.ndarray, rows: ChunkRows | None = None) -> ChunkBatch:
        """
        Build the batch of chosen rows.

        :param slots: slots (B,)
        :param rows: where they are; the stored rows by default
        :return: the batch
        """
        chosen = self.rows if rows is None else rows
        overwrite = self.overwrite_reference and chosen is self.rows
        return chosen.gather(slots, self.n_steps, self.gamma, self.device, overwrite)

    def __getstate__(self) -> dict[str, Any]:
        """The lock stays here, and the offline rows, unless something was added to what is in their file."""
        state = {key: value for key, value in self.__dict__.items() if key != "_lock"}
        return state if self.keep_interventions else state | {"offline": None, "offline_ratio": 0.0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({"keep_interventions": False} | state)
        self._lock = threading.RLock()


def _shapes(rows: ChunkRows) -> dict[str, Any]:
    return {"action": rows.actions.shape[1:]} | {key: value.shape[1:] for key, value in sorted(rows.obs.items())}
