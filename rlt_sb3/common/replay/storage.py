"""Stores chunks: one slot per observation, with a pointer to the slot of the next observation."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch as th
from gymnasium import spaces

from rlt_sb3.common.replay.task_index import TaskIndex

TensorDict = dict[str, th.Tensor]


class ChunkBatch(NamedTuple):
    """
    Batch of chunks; the first six fields are those of SB3's ``DictReplayBufferSamples``.

    :param observations: before the chunk
    :param actions: executed chunks, flat (B, C*d)
    :param next_observations: where the value is bootstrapped from
    :param dones: (B, 1), 1 for terminations only
    :param rewards: returns over the used chunks (B, 1)
    :param discounts: gamma to the number of control steps in that return (B, 1)
    :param mask: (B, C) bool, True for the control steps of the first chunk that were executed
    :param bc_target: (B, C*d), what the actor is pulled to: ``vla_ref``, or the executed action where someone had
        taken over
    :param task_ids: (B,) int64
    :param successful: (B, 1), 1 where the row's episode is known to have ended in success
    """

    observations: TensorDict
    actions: th.Tensor
    next_observations: TensorDict
    dones: th.Tensor
    rewards: th.Tensor
    discounts: th.Tensor
    mask: th.Tensor
    bc_target: th.Tensor
    task_ids: th.Tensor
    successful: th.Tensor


def join_batches(batches: Sequence[ChunkBatch]) -> ChunkBatch:
    """
    Join batches into one.

    :param batches: batches with the same keys
    :return: one batch, rows in the given order
    """
    if len(batches) == 1:
        return batches[0]
    columns: list[Any] = []
    for column in zip(*batches, strict=True):
        if isinstance(column[0], dict):
            columns.append({key: th.cat([part[key] for part in column]) for key in column[0]})
        else:
            columns.append(th.cat(column))
    return ChunkBatch(*columns)


def split_batch(batch: ChunkBatch, count: int, size: int) -> list[ChunkBatch]:
    """
    Split a batch into batches of equal size.

    :param batch: count * size rows
    :param count: number of parts
    :param size: rows of each
    :return: the parts, views of the batch
    """
    if count == 1:
        return [batch]
    columns: list[Any] = []
    for column in batch:
        if isinstance(column, dict):
            parts = {key: value.split(size) for key, value in column.items()}
            columns.append([{key: parts[key][n] for key in parts} for n in range(count)])
        else:
            columns.append(column.split(size))
    return [ChunkBatch(*values) for values in zip(*columns, strict=True)]


def _to_device(values: np.ndarray, device: th.device) -> th.Tensor:
    """Copy an array to a device. Python does not wait until a GPU has made its copy."""
    tensor = th.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class TransitionStorage:
    """
    A ring of slots, each with an observation and, once it is known, the chunk that was executed from there.

    Every observation is kept once: the next observation of a row is the slot that its pointer names. That slot was
    always filled later, so the ring overwrites it later, and no pointer of a living row can dangle. The final
    observation of an episode takes another slot. Memory is fixed: :attr:`bytes_per_slot` times the slots.

    :param size: number of slots that are used in turn
    :param observation_space: flat Dict space
    :param chunk_length: control steps per chunk, C
    :param action_dim: numbers per control step, d
    :param z_rl_dtype: "float32", or "float16" to keep ``z_rl`` in half the memory
    :param kept: further slots, written first and never overwritten
    :raises ValueError: for another ``z_rl_dtype``
    """

    def __init__(
        self,
        size: int,
        observation_space: spaces.Dict,
        chunk_length: int,
        action_dim: int,
        z_rl_dtype: str = "float32",
        kept: int = 0,
    ):
        if z_rl_dtype not in ("float32", "float16"):
            raise ValueError(f"z_rl_dtype must be 'float32' or 'float16', got {z_rl_dtype!r}.")
        self.size, self.kept = int(size) + int(kept), int(kept)
        self.chunk_length, self.action_dim = chunk_length, action_dim
        self.written = 0  # observations ever written
        self.obs: dict[str, np.ndarray] = {}
        for key, space in observation_space.spaces.items():
            assert space.shape is not None
            dtype = np.dtype(z_rl_dtype) if key == "z_rl" else np.dtype(space.dtype)
            if dtype == np.float64:
                dtype = np.dtype(np.float32)
            self.obs[key] = np.zeros((self.size, *space.shape), dtype=dtype)
        self.actions = np.zeros((self.size, chunk_length, action_dim), dtype=np.float32)
        self.step_rewards = np.zeros((self.size, chunk_length), dtype=np.float32)
        self.intervention = np.zeros((self.size, chunk_length), dtype=bool)
        self.chunk_steps = np.zeros(self.size, dtype=np.int16)
        self.terminated = np.zeros(self.size, dtype=bool)
        self.truncated = np.zeros(self.size, dtype=bool)
        self.successful = np.zeros(self.size, dtype=bool)  # the episode is over and was a success
        self.task_ids = np.zeros(self.size, dtype=np.int32)
        self.next_slot = np.zeros(self.size, dtype=np.int32)
        self.index = TaskIndex(self.size)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes per slot in all arrays, without the lists that rows are drawn from (8 to 12 more)."""
        return sum(array.nbytes for array in self._arrays().values()) // self.size

    @property
    def count(self) -> int:
        """Number of rows that can be drawn."""
        return sum(self.index.counts.values())

    @property
    def counts(self) -> dict[int, int]:
        """Number of rows that can be drawn, per task."""
        return {task: count for task, count in sorted(self.index.counts.items()) if count}

    def is_row(self, slots: np.ndarray | int) -> Any:
        """
        Tell whether slots hold complete rows.

        :param slots: slots
        :return: whether each holds a complete row, not only an observation
        """
        return self.index.where[slots] >= 0

    def _arrays(self) -> dict[str, np.ndarray]:
        named = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        return named | {f"obs/{key}": value for key, value in self.obs.items()}

    # ------------------------------------------------------------------------------------------------- writing

    def slot_of(self, number: int) -> int:
        """
        Compute the slot of an observation.

        :param number: an observation, counted from 0 in the order of writing
        :return: the slot that it was or will be written to
        """
        return number if number < self.kept else self.kept + (number - self.kept) % (self.size - self.kept)

    def living(self, number: int, room: int = 0) -> bool:
        """
        Tell whether an observation is still stored.

        :param number: an observation that was written, counted from 0
        :param room: observations still to be written
        :return: whether it has not been overwritten, and will not be by those
        """
        return number < self.kept or number >= self.written + room - (self.size - self.kept)

    def put_observation(self, obs: Mapping[str, np.ndarray], index: int | None) -> int:
        """
        Write an observation to the oldest slot.

        :param obs: observations
        :param index: which one, if they are a batch
        :return: the slot
        """
        slot = self.slot_of(self.written)
        if self.index.where[slot] >= 0:
            self.index.remove(slot, int(self.task_ids[slot]))
        for key, array in self.obs.items():
            array[slot] = obs[key] if index is None else obs[key][index]
        self.intervention[slot] = False  # read together with the observation, also before there is a chunk
        self.successful[slot] = False
        self.written += 1
        return slot

    def holds(self, slot: int, obs: Mapping[str, np.ndarray], index: int) -> bool:
        """
        Compare a slot with an observation.

        :param slot: a slot
        :param obs: batched observations
        :param index: which one of the batch
        :return: whether the slot has exactly this observation
        """
        for key, array in self.obs.items():
            mine = array[slot]
            if not np.array_equal(mine, np.asarray(obs[key][index]).astype(mine.dtype, copy=False)):
                return False
        return True

    def put_chunk(
        self,
        slot: int,
        action: np.ndarray,
        step_rewards: np.ndarray,
        chunk_steps: int,
        next_slot: int,
        terminated: bool,
        truncated: bool,
        task_id: int,
        intervention: np.ndarray | None = None,
    ) -> None:
        """
        Complete a slot to a row that can be drawn.

        :param slot: slot of the observation before the chunk
        :param action: (C, d)
        :param step_rewards: (C,), zeros from ``chunk_steps`` on
        :param chunk_steps: executed control steps, 1..C
        :param next_slot: slot of the observation after them
        :param terminated: whether the episode ended there in a terminal state
        :param truncated: whether it was cut off there
        :param task_id: any integer
        :param intervention: (C,) bool, which control steps someone else chose
        """
        self.actions[slot] = action
        self.step_rewards[slot] = step_rewards
        self.chunk_steps[slot] = chunk_steps
        self.next_slot[slot] = next_slot
        self.terminated[slot] = terminated
        self.truncated[slot] = truncated
        self.task_ids[slot] = task_id
        if intervention is not None:
            self.intervention[slot] = intervention
        self.index.add(slot, task_id)

    def mark_success(self, numbers: Sequence[int]) -> None:
        """
        Say that an episode has ended in success.

        :param numbers: its observations, counted from 0 in the order of writing; overwritten ones may be among them
        """
        self.successful[[self.slot_of(number) for number in numbers if self.living(number)]] = True

    # ------------------------------------------------------------------------------------------------- reading

    def returns(self, slots: np.ndarray, n_steps: int, gamma: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """
        Compute returns over consecutive chunks.

        :param slots: rows to begin at (B,)
        :param n_steps: chunks in a return, fewer where an episode ends or the next chunk is not known
        :param gamma: discount per control step
        :return: returns (B,), discounts of the bootstrap (B,), rows of the last chunks used (B,)
        """
        powers = gamma ** np.arange(self.chunk_length)
        totals = self.step_rewards[slots] @ powers
        steps = self.chunk_steps[slots].astype(np.int64)
        last = slots.copy()
        going = np.arange(len(slots))
        for _ in range(n_steps - 1):
            ended = self.terminated[last[going]] | self.truncated[last[going]]
            following = self.next_slot[last[going]]
            goes_on = ~ended & self.is_row(following)
            going, following = going[goes_on], following[goes_on]
            if not len(going):
                break
            totals[going] += gamma ** steps[going] * (self.step_rewards[following] @ powers)
            steps[going] += self.chunk_steps[following]
            last[going] = following
        return totals, gamma**steps, last

    def gather(
        self, slots: np.ndarray, n_steps: int, gamma: float, device: th.device, overwrite_reference: bool = False
    ) -> ChunkBatch:
        """
        Build the batch of chosen rows.

        :param slots: rows (B,)
        :param n_steps: chunks in a return
        :param gamma: discount per control step
        :param device: where the batch goes
        :param overwrite_reference: also replace ``vla_ref`` by the executed action where someone else chose it
        :return: the batch
        """
        slots = slots.astype(np.int64)
        totals, discounts, last = self.returns(slots, n_steps, gamma)
        following = self.next_slot[last].astype(np.int64)

        def column(values: np.ndarray) -> th.Tensor:
            return _to_device(values.astype(np.float32)[:, None], device)

        first, second = th.from_numpy(slots), th.from_numpy(following)
        observations, next_observations = self._observations(first, device), self._observations(second, device)
        actions = self._take(self.actions, first, device).flatten(1)
        bc_target = self._bc_target(slots, observations, actions, device)
        if overwrite_reference and "vla_ref" in observations:
            observations["vla_ref"] = bc_target.view_as(observations["vla_ref"])
            next_actions = self._take(self.actions, second, device).flatten(1)
            replaced = self._bc_target(following, next_observations, next_actions, device)
            next_observations["vla_ref"] = replaced.view_as(next_observations["vla_ref"])
        mask = np.arange(self.chunk_length) < self.chunk_steps[slots][:, None]
        return ChunkBatch(
            observations=observations,
            actions=actions,
            next_observations=next_observations,
            dones=column(self.terminated[last]),
            rewards=column(totals),
            discounts=column(discounts),
            mask=_to_device(mask, device),
            bc_target=bc_target,
            task_ids=_to_device(self.task_ids[slots].astype(np.int64), device),
            successful=column(self.successful[slots]),
        )

    def _bc_target(
        self, slots: np.ndarray, observations: TensorDict, actions: th.Tensor, device: th.device
    ) -> th.Tensor:
        if "vla_ref" not in observations:  # no reference in this environment: the target is the executed action
            return actions
        reference = observations["vla_ref"].flatten(1)
        taken_over = self.intervention[slots]
        if not taken_over.any():
            return reference
        chosen = _to_device(taken_over, device).repeat_interleave(self.action_dim, dim=1)
        return th.where(chosen, actions, reference)

    def _observations(self, index: th.Tensor, device: th.device) -> TensorDict:
        return {key: self._take(array, index, device) for key, array in self.obs.items()}

    @staticmethod
    def _take(array: np.ndarray, index: th.Tensor, device: th.device) -> th.Tensor:
        rows = th.from_numpy(array)
        # A GPU copies from pinned memory while Python goes on. PyTorch keeps that memory and uses it again.
        place = th.empty((len(index), *rows.shape[1:]), dtype=rows.dtype, pin_memory=device.type == "cuda")
        taken = th.index_select(rows, 0, index, out=place).to(device, non_blocking=True)
        return taken.float() if taken.dtype == th.float16 else taken

    # ------------------------------------------------------------------------------------------------- pickling

    def __getstate__(self) -> dict[str, Any]:
        """
        Keep only what has been written, so that an almost empty ring makes a small file.

        All arrays are views: pickle writes them to a file without a copy.
        """
        state = self.__dict__.copy()
        used = min(self.written, self.size)
        for name, value in state.items():
            if isinstance(value, np.ndarray):
                state[name] = value[:used]
        state["obs"] = {key: value[:used] for key, value in self.obs.items()}
        lists = {task: rows[: self.index.counts[task]] for task, rows in self.index.lists.items()}
        state["index"] = (self.index.where[:used], lists)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        size = state["size"]

        def grow(array: np.ndarray) -> np.ndarray:
            if len(array) == size:
                return array
            grown = np.zeros((size, *array.shape[1:]), dtype=array.dtype)
            grown[: len(array)] = array
            return grown

        where, lists = state.pop("index")
        self.__dict__.update({name: grow(v) if isinstance(v, np.ndarray) else v for name, v in state.items()})
        self.obs = {key: grow(value) for key, value in state["obs"].items()}
        self.index = TaskIndex(size)
        self.index.where[: len(where)] = where
        self.index.lists = lists
        self.index.counts = {task: len(rows) for task, rows in lists.items()}
