"""What a run logs about its episodes, and where: metrics.csv, TensorBoard, Weights & Biases."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from stable_baselines3.common.vec_env import VecEnv

from rlt_sb3.callbacks.base import StatefulCallback
from rlt_sb3.common.chunk_outcome import ChunkOutcome, outcomes_of
from rlt_sb3.common.robot_time import control_frequency
from rlt_sb3.common.vec_env import metadata_of


def action_names(env: VecEnv | None, size: int) -> tuple[str, ...]:
    """
    Name the numbers of an action, for keys of the log.

    :param env: an environment
    :param size: how many numbers an action has
    :return: the names; their places where the environment does not name them
    """
    robot = metadata_of(env).get("robot")
    names = () if robot is None else tuple(robot.action_names)
    return names if len(names) == size else tuple(str(place) for place in range(size))


def throughput(successes: int, control_steps: int, frequency: float) -> float:
    """Successes per 10 simulated minutes, resets not counted (0 without a step).

    :param successes: number of successes
    :param control_steps: control steps of all episodes
    :param frequency: control steps per second
    """
    return successes * 600.0 * frequency / control_steps if control_steps else 0.0


class MetricsCallback(StatefulCallback):
    """
    Logs success, throughput, distance to the VLA, restarts of workers, and the age of the replay buffer's rows.

    The documentation has a table of the keys.

    :param window: episodes over which success and throughput are averaged
    """

    def __init__(self, window: int = 100):
        super().__init__()
        self.window = window
        self.episodes: deque[tuple[bool, int]] = deque(maxlen=window)
        self.tasks: dict[int, deque[bool]] = {}  # task -> successes and failures
        self.wrong: deque[bool] = deque(maxlen=window)  # verdicts of a reward model that the simulator does not share
        self.restarts = 0
        # of every vector step with rows in the buffer, oldest first: rows, chunks and critic updates at that time
        self.stamps: deque[tuple[int, int, int]] = deque()
        self._sums = np.zeros(3)
        self._stored = 0
        self._last_updates = 0

    def _on_step(self) -> bool:
        infos, dones = self.locals["infos"], self.locals["dones"]
        outcomes = outcomes_of(infos, self.locals["actions"], self.locals["rewards"])
        self.restarts += sum(outcome.broken for outcome in outcomes)
        for info, outcome, done in zip(infos, outcomes, dones, strict=True):
            if done and not outcome.broken:
                chunks = info.get("episode", {}).get("l", 0)  # of VecMonitor; the outcome knows the control steps
                steps = outcome.episode_steps if outcome.episode_steps is not None else chunks * len(outcome.executed)
                self.episodes.append((outcome.success, int(steps)))
                self.tasks.setdefault(outcome.task_id, deque(maxlen=self.window)).append(outcome.success)
                if outcome.goal_reached is not None:
                    self.wrong.append(outcome.success != outcome.goal_reached)
        self.logger.record("time/chunks", self.num_timesteps)
        self.logger.record("rollout/worker_restarts", self.restarts)
        if self.episodes:
            solved = [steps for success, steps in self.episodes if success]
            total = sum(steps for _, steps in self.episodes)
            frequency = control_frequency(self.training_env)
            if frequency is not None:
                self.logger.record("rollout/throughput", throughput(len(solved), total, frequency))
            if solved:
                self.logger.record("rollout/steps_to_success", float(np.mean(solved)))
        if self.wrong:
            self.logger.record("rollout/judged_wrongly", float(np.mean(self.wrong)))
        if len(self.tasks) > 1:
            for task, successes in sorted(self.tasks.items()):
                self.logger.record(f"rollout/success_rate_task_{task}", float(np.mean(successes)))
        self._record_distance(outcomes)
        if getattr(self.model, "replay_buffer", None) is not None:
            self._record_age()
        return True

    def _record_distance(self, outcomes: list[ChunkOutcome]) -> None:
        """Log the root mean square of executed action - vla_ref over the executed steps, per action dimension."""
        last = self.model._last_obs
        if not isinstance(last, dict) or "vla_ref" not in last:
            return
        reference = np.clip(last["vla_ref"], -1.0, 1.0)
        executed = np.reshape([outcome.executed for outcome in outcomes], reference.shape)
        # before the critical phase the VLA's chunk is played, and only an env in which someone can take over lists it
        listed = np.array([outcome.critical or outcome.intervention is not None for outcome in outcomes], dtype=bool)
        squared = (np.where(listed[:, None, None], executed, reference) - reference) ** 2
        steps = np.array([outcome.steps for outcome in outcomes])
        mask = np.arange(reference.shape[1]) < steps[:, None]
        if not mask.any():
            return
        per_dim = np.sqrt(squared[mask].mean(axis=0))
        for name, value in zip(action_names(self.training_env, len(per_dim)), per_dim, strict=True):
            self.logger.record_mean(f"rollout/vla_distance_{name}", float(value))

    def _record_age(self) -> None:
        """Log the mean age of the buffer's rows before this step's are stored, in chunks and in critic updates."""
        model: Any = self.model
        buffer, chunks = model.replay_buffer, self.num_timesteps
        envs = len(self.locals["infos"])
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
        Return what a resumed run needs to know.

        :return: the last episodes and verdicts on them, restarts of workers, and when the buffer's rows were stored
        """
        return {
            "episodes": [[success, steps] for success, steps in self.episodes],
            "tasks": {str(task): list(outcomes) for task, outcomes in self.tasks.items()},
            "wrong": list(self.wrong),
            "restarts": self.restarts,
            "stamps": [list(stamp) for stamp in self.stamps],
            "stored": self._stored,
            "last_updates": self._last_updates,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Continue where the saved run stopped.

        :param state: from :meth:`state_dict`
        """
        episodes = ((bool(success), int(steps)) for success, steps in state["episodes"])
        self.episodes = deque(episodes, maxlen=self.window)
        self.tasks = {int(task): deque(seen, maxlen=self.window) for task, seen in state["tasks"].items()}
        self.wrong = deque(state.get("wrong", ()), maxlen=self.window)  # earlier versions did not save it
        self.restarts = state["restarts"]
        self.stamps.clear()
        self._sums[:] = 0
        for rows, chunks, updates in state["stamps"]:
            self._stamp((rows, chunks, updates), 1)
        self._stored, self._last_updates = state["stored"], state["last_updates"]
