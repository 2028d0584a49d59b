"""What a run logs about its episodes, and where: metrics.csv, TensorBoard, Weights & Biases."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from rlt_sb3.callbacks.base import StatefulCallback
from rlt_sb3.common.chunks import executed_chunks

#: Control steps per second of LIBERO.
CONTROL_FREQUENCY = 20
#: Names of the seven numbers of an action, in keys.
ACTION_NAMES = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")


def throughput(successes: int, control_steps: int) -> float:
    """Successes per 10 simulated minutes, resets not counted (0 without a step)."""
    return successes * 600.0 * CONTROL_FREQUENCY / control_steps if control_steps else 0.0


class MetricsCallback(StatefulCallback):
    """
    Success, throughput, distance to the VLA, restarts of workers, and the age of the replay buffer where there is one;
    see the table of keys in the documentation.

    :param window: episodes over which success and throughput are averaged
    """

    def __init__(self, window: int = 100):
        super().__init__()
        self.window = window
        self.episodes: deque[tuple[bool, int]] = deque(maxlen=window)
        self.tasks: dict[int, deque[bool]] = {}  # task -> successes and failures
        self.restarts = 0
        # of every vector step with rows in the buffer, oldest first: rows, chunks and critic updates at that time
        self.stamps: deque[tuple[int, int, int]] = deque()
        self._sums = np.zeros(3)
        self._stored = 0
        self._last_updates = 0

    def _on_step(self) -> bool:
        infos, dones = self.locals["infos"], self.locals["dones"]
        self.restarts += sum(bool(info.get("worker_restarted")) for info in infos)
        for info, done in zip(infos, dones, strict=True):
            if done and not info.get("worker_restarted"):
                steps = info.get("episode_steps", info.get("episode", {}).get("l", 0))
                success = bool(info.get("is_success", False))
                self.episodes.append((success, int(steps)))
                self.tasks.setdefault(int(info.get("task_id", 0)), deque(maxlen=self.window)).append(success)
        self.logger.record("time/chunks", self.num_timesteps)
        self.logger.record("rollout/worker_restarts", self.restarts)
        if self.episodes:
            solved = [steps for success, steps in self.episodes if success]
            total = sum(steps for _, steps in self.episodes)
            self.logger.record("rollout/throughput", throughput(len(solved), total))
            if solved:
                self.logger.record("rollout/steps_to_success", float(np.mean(solved)))
        if len(self.tasks) > 1:
            for task, outcomes in sorted(self.tasks.items()):
                self.logger.record(f"rollout/success_rate_task_{task}", float(np.mean(outcomes)))
        self._record_distance(infos)
        if getattr(self.model, "replay_buffer", None) is not None:
            self._record_age()
        return True

    def _record_distance(self, infos: list[dict[str, Any]]) -> None:
        """Root mean square of what was executed - vla_ref over the executed control steps, per action dimension."""
        last = self.model._last_obs
        if not isinstance(last, dict) or "vla_ref" not in last:
            return
        reference = np.clip(last["vla_ref"], -1.0, 1.0)
        # on-policy algorithms of Stable-Baselines3 store what they sampled and play it clipped
        chosen = np.reshape(self.locals.get("clipped_actions", self.locals["actions"]), reference.shape)
        critical = np.array([info.get("critical_chunk", True) for info in infos], dtype=bool)
        played = np.where(critical[:, None, None], chosen, reference)  # before the critical phase it is the VLA's
        squared = (executed_chunks(played, infos) - reference) ** 2
        steps = np.array([info.get("chunk_steps", reference.shape[1]) for info in infos])
        mask = np.arange(reference.shape[1]) < steps[:, None]
        if not mask.any():
            return
        per_dim = np.sqrt(squared[mask].mean(axis=0))
        names = ACTION_NAMES if len(per_dim) == len(ACTION_NAMES) else [str(i) for i in range(len(per_dim))]
        for name, value in zip(names, per_dim, strict=True):
            self.logger.record_mean(f"rollout/vla_distance_{name}", float(value))

    def _record_age(self) -> None:
        """Mean age of the buffer's rows before this step's are stored, in chunks collected and in critic updates."""
        model: Any = self.model
        buffer, chunks = model.replay_buffer, self.num_timesteps
        envs = self.training_env.num_envs
        # stride and restarted workers make rows per chunk vary; SB3's own buffers count vector steps
        stored = getattr(buffer, "rows_stored", chunks - envs)
        if stored > self._stored:
            self._stamp((stored - self._stored, chunks - envs, self._last_updates), 1)
            self._stored = stored
        self._last_updates = self.model._n_updates
        capacity = buffer.buffer_size * (1 if hasattr(buffer, "rows_stored") else envs)
        while self.stamps and self._sums[0] - self.stamps[0][0] >= capacity:
            self._stamp(self.stamps[0], -1)
        rows = self._sums[0]
        self.logger.record("buffer/rows", int(min(rows, capacity)))
        if rows:
            self.logger.record("buffer/age_chunks", chunks - self._sums[1] / rows)
            self.logger.record("buffer/age_updates", self.model._n_updates - self._sums[2] / rows)

    def _stamp(self, stamp: tuple[int, int, int], sign: int) -> None:
        if sign > 0:
            self.stamps.append(stamp)
        else:
            self.stamps.popleft()
        rows, chunks, updates = stamp
        self._sums += sign * np.array([rows, rows * chunks, rows * updates])

    def state_dict(self) -> dict[str, Any]:
        """
        :return: the last episodes, restarts of workers, and when the buffer's rows were stored
        """
        return {
            "episodes": [[success, steps] for success, steps in self.episodes],
            "tasks": {str(task): list(outcomes) for task, outcomes in self.tasks.items()},
            "restarts": self.restarts,
            "stamps": [list(stamp) for stamp in self.stamps],
            "stored": self._stored,
            "last_updates": self._last_updates,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        :param state: from :meth:`state_dict`
        """
        episodes = ((bool(success), int(steps)) for success, steps in state["episodes"])
        self.episodes = deque(episodes, maxlen=self.window)
        self.tasks = {int(task): deque(seen, maxlen=self.window) for task, seen in state["tasks"].items()}
        self.restarts = state["restarts"]
        self.stamps.clear()
        self._sums[:] = 0
        for rows, chunks, updates in state["stamps"]:
            self._stamp((rows, chunks, updates), 1)
        self._stored, self._last_updates = state["stored"], state["last_updates"]
