"""Replay buffer for action chunks: rewards are kept per control step."""

from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer
from stable_baselines3.common.type_aliases import DictReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize


class ChunkReplayBuffer(DictReplayBuffer):
    r"""
    Replay buffer whose rows are executed action chunks.

    A row holds one chunk of at most :math:`C` control steps with its reward at each of them and the number
    :math:`k \le C` of executed steps (a chunk is cut short when the episode ends inside it). Both come from
    ``infos[i]["step_rewards"]`` (C,) and ``infos[i]["chunk_steps"]``. Without them (any other environment) the
    reward is taken as earned in the first control step and the chunk as complete, k = C.

    Samples are returns over ``n_steps`` consecutive chunks of one sub-environment,

    .. math:: R = \sum_{m} \gamma^{K_m} \sum_{j<k_m} \gamma^j r_{m,j}, \qquad K_m = \sum_{l<m} k_l,

    with ``discounts`` :math:`= \gamma^{\sum_m k_m}` for the bootstrap from the ``next_observations`` of the last
    chunk used. With ``n_steps=1`` this is eq. 3 of the RL Token paper. The sum stops at the end of an episode, at the
    newest row and where :meth:`end_trajectories` was called. ``dones`` is 1 for terminations only: after a time-out
    the value of the last observation is used.

    Rows of another origin (demonstrations) can be mixed in by overriding :meth:`_draw`, which chooses the rows.

    :param buffer_size: number of rows (divided among the sub-environments)
    :param observation_space: flat Dict space
    :param action_space: Box of shape (C, d); another shape counts as one control step per row
    :param device: where samples go
    :param n_envs: number of sub-environments
    :param optimize_memory_usage: not supported
    :param handle_timeout_termination: if False, a time-out counts as a termination
    :param n_steps: number of chunks in the return
    :param gamma: discount per control step
    :raises ValueError: if ``n_steps`` < 1 or ``gamma`` is outside [0, 1]
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
    ):
        if not isinstance(n_steps, int | np.integer) or n_steps < 1:
            raise ValueError(f"n_steps must be an integer >= 1 (number of chunks in a return), got {n_steps!r}.")
        if not 0.0 <= gamma <= 1.0:
            raise ValueError(f"gamma must be in [0, 1] (discount per control step), got {gamma!r}.")
        super().__init__(
            buffer_size,
            observation_space,
            action_space,
            device=device,
            n_envs=n_envs,
            optimize_memory_usage=optimize_memory_usage,
            handle_timeout_termination=handle_timeout_termination,
        )
        self.n_steps = int(n_steps)
        self.gamma = float(gamma)
        shape = action_space.shape
        self.chunk_length = int(shape[0]) if len(shape) == 2 else 1
        self.step_rewards = np.zeros((self.buffer_size, self.n_envs, self.chunk_length), dtype=np.float32)
        self.chunk_steps = np.full((self.buffer_size, self.n_envs), self.chunk_length, dtype=np.int32)
        # True where the next row of this sub-environment is not the continuation, although the episode went on
        self.cuts = np.zeros((self.buffer_size, self.n_envs), dtype=bool)

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
        Store one row per sub-environment.

        :param obs: observations before the chunk
        :param next_obs: observations after it (the final ones where the episode ended)
        :param action: chunks, (n_envs, C, d)
        :param reward: sums over the chunks, (n_envs,)
        :param done: terminated or truncated, (n_envs,)
        :param infos: ``step_rewards``, ``chunk_steps`` and ``TimeLimit.truncated`` are read
        :raises ValueError: if ``step_rewards`` or ``chunk_steps`` do not fit the chunk length
        """
        row = self.pos
        self.step_rewards[row] = 0.0
        self.cuts[row] = False
        for index, info in enumerate(infos):
            if "step_rewards" not in info or "chunk_steps" not in info:
                self.step_rewards[row, index, 0] = reward[index]
                self.chunk_steps[row, index] = self.chunk_length
                continue
            rewards, steps = np.asarray(info["step_rewards"], dtype=np.float32), int(info["chunk_steps"])
            if rewards.shape != (self.chunk_length,) or not 1 <= steps <= self.chunk_length:
                raise ValueError(
                    f"Expected info['step_rewards'] of shape ({self.chunk_length},) and 1 <= info['chunk_steps'] <= "
                    f"{self.chunk_length}, got shape {rewards.shape} and {steps}."
                )
            self.step_rewards[row, index, :steps] = rewards[:steps]
            self.chunk_steps[row, index] = steps
        super().add(obs, next_obs, action, reward, done, infos)

    def end_trajectories(self) -> None:
        """
        Say that the rows to come do not continue the newest ones (the environment was reset from outside), so that
        no return runs across.
        """
        if self.size() > 0:
            self.cuts[(self.pos - 1) % self.buffer_size] = True

    def sample(  # type: ignore[override]
        self, batch_size: int, env: VecNormalize | None = None
    ) -> DictReplayBufferSamples:
        """
        :param batch_size: number of samples
        :param env: must be None; normalised rewards would not fit the per-step rewards
        :return: batch with ``rewards`` (B, 1) = n-chunk returns, ``discounts`` (B, 1), ``dones`` (B, 1)
        :raises ValueError: if the buffer is empty
        """
        if self.size() == 0:
            raise ValueError("The replay buffer is empty: store transitions before sampling.")
        return self._gather(*self._draw(batch_size))

    def _draw(self, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """
        Choose rows uniformly, with replacement.

        :param batch_size: how many
        :return: row indices (B,) and sub-environment indices (B,)
        """
        return np.random.randint(0, self.size(), size=batch_size), np.random.randint(0, self.n_envs, size=batch_size)

    def _get_samples(  # type: ignore[override]
        self, batch_inds: np.ndarray, env: VecNormalize | None = None
    ) -> DictReplayBufferSamples:
        return self._gather(batch_inds, np.random.randint(0, self.n_envs, size=len(batch_inds)))

    def _gather(self, rows: np.ndarray, envs: np.ndarray) -> DictReplayBufferSamples:
        """
        Build the batch for chosen rows.

        :param rows: row indices (B,)
        :param envs: sub-environment indices (B,)
        :return: the batch
        """
        returns, discounts, last = self._returns(rows, envs)
        # one flat take per array is several times faster than two-dimensional fancy indexing
        first_flat, last_flat = rows * self.n_envs + envs, last * self.n_envs + envs
        dones = self.dones[last, envs] * (1.0 - self.timeouts[last, envs])
        return DictReplayBufferSamples(
            observations={key: self._take(value, first_flat) for key, value in self.observations.items()},
            actions=self._take(self.actions, first_flat),
            next_observations={key: self._take(value, last_flat) for key, value in self.next_observations.items()},
            dones=self.to_torch(dones.astype(np.float32)[:, None], copy=False),
            rewards=self.to_torch(returns.astype(np.float32)[:, None], copy=False),
            discounts=self.to_torch(discounts.astype(np.float32)[:, None], copy=False),
        )

    def _take(self, array: np.ndarray, flat: np.ndarray) -> th.Tensor:
        merged = array.reshape(self.buffer_size * self.n_envs, *array.shape[2:])  # a view: the arrays are contiguous
        return self.to_torch(merged.take(flat, axis=0), copy=False)

    def _returns(self, rows: np.ndarray, envs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """
        n-chunk returns.

        :param rows: row indices (B,)
        :param envs: sub-environment indices (B,)
        :return: returns (B,), discounts of the bootstrap (B,), row whose next observation is bootstrapped from (B,)
        """
        offsets = np.arange(self.n_steps)
        idx = (rows[:, None] + offsets) % self.buffer_size  # (B, n)
        env = envs[:, None]
        newest = (self.pos - 1) % self.buffer_size
        stop = (self.dones[idx, env] > 0) | self.cuts[idx, env] | (idx == newest)
        # a chunk is used if no earlier one of the window stopped the sum
        used = np.ones_like(stop)
        used[:, 1:] = ~np.logical_or.accumulate(stop[:, :-1], axis=1)
        powers = self.gamma ** np.arange(self.chunk_length)
        chunk_rewards = self.step_rewards[idx, env] @ powers  # (B, n), float64
        steps = self.chunk_steps[idx, env] * used
        before = np.cumsum(steps, axis=1) - steps
        returns = (self.gamma**before * chunk_rewards * used).sum(axis=1)
        last = idx[np.arange(len(rows)), used.sum(axis=1) - 1]
        return returns, self.gamma ** steps.sum(axis=1), last

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the filled rows only; an almost empty buffer makes a small file."""
        state = self.__dict__.copy()
        if not self.full:
            for name, value in state.items():
                if isinstance(value, np.ndarray) and value.shape[:1] == (self.buffer_size,):
                    state[name] = value[: self.pos].copy()
                elif name in ("observations", "next_observations"):
                    state[name] = {key: array[: self.pos].copy() for key, array in value.items()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        size = state["buffer_size"]

        def grow(array: np.ndarray) -> np.ndarray:
            grown = np.zeros((size, *array.shape[1:]), dtype=array.dtype)
            grown[: len(array)] = array
            return grown

        self.__dict__.update(state)
        if not self.full:
            for name, value in state.items():
                if isinstance(value, np.ndarray) and value.shape[:2] == (self.pos, self.n_envs):
                    setattr(self, name, grow(value))
                elif name in ("observations", "next_observations"):
                    setattr(self, name, {key: grow(array) for key, array in value.items()})
