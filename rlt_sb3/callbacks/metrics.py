"""What a run logs about its episodes, and where: metrics.csv, TensorBoard, Weights & Biases."""

from __future__ import annotations

import csv
import io
import json
import os
from collections import deque
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import KVWriter, TensorBoardOutputFormat, filter_excluded_keys

from rlt_sb3.common.chunks import executed_chunks

#: Control steps per second of LIBERO.
CONTROL_FREQUENCY = 20
#: Names of the seven numbers of an action, in keys.
ACTION_NAMES = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")


def throughput(successes: int, control_steps: int) -> float:
    """Successes per 10 simulated minutes, resets not counted (0 without a step)."""
    return successes * 600.0 * CONTROL_FREQUENCY / control_steps if control_steps else 0.0


class MetricsCallback(BaseCallback):
    """
    Success, throughput, distance to the VLA, age of the replay buffer and restarts of workers; see the table of keys in
    the documentation.

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
        self._record_age()
        return True

    def _record_distance(self, infos: list[dict[str, Any]]) -> None:
        """Root mean square of what was executed - vla_ref over the executed control steps, per action dimension."""
        last = self.model._last_obs
        if not isinstance(last, dict) or "vla_ref" not in last:
            return
        reference = np.clip(last["vla_ref"], -1.0, 1.0)
        chosen = np.reshape(self.locals["actions"], reference.shape)
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

    def state(self) -> dict[str, Any]:
        """Plain data from which :meth:`set_state` goes on."""
        return {
            "episodes": [[success, steps] for success, steps in self.episodes],
            "tasks": {str(task): list(outcomes) for task, outcomes in self.tasks.items()},
            "restarts": self.restarts,
            "stamps": [list(stamp) for stamp in self.stamps],
            "stored": self._stored,
            "last_updates": self._last_updates,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state`."""
        self.episodes.extend((bool(success), int(steps)) for success, steps in state["episodes"])
        self.tasks = {int(task): deque(seen, maxlen=self.window) for task, seen in state.get("tasks", {}).items()}
        self.restarts = state["restarts"]
        for rows, chunks, updates in state["stamps"]:
            self._stamp((rows, chunks, updates), 1)
        self._stored, self._last_updates = state["stored"], state["last_updates"]


class CSVWriter(KVWriter):
    """
    metrics.csv: one row per logged step, flushed, so that a killed run keeps it; steps increase strictly (what is
    logged twice for one step becomes one row).

    Stable-Baselines3's own writer begins an empty file, and writes two rows for a step that is logged twice.

    :param path: the file; rows up to ``last_step`` of an existing one are kept
    :param last_step: where a resumed run goes on; None to begin anew
    """

    STEP = "time/total_timesteps"

    def __init__(self, path: Path, last_step: int | None = None):
        self.path = path
        self.columns: list[str] = [self.STEP]
        self.rows: list[dict[str, str]] = []
        if last_step is not None and path.is_file():
            # what stands after the last line break was cut off when the run was killed
            whole = path.read_text().rpartition("\n")[0]
            reader = csv.DictReader(io.StringIO(whole))
            self.columns = list(reader.fieldnames or self.columns)
            self.rows = [row for row in reader if int(row[self.STEP]) <= last_step]
        self._file: TextIO | None = None
        self._rewrite()

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        """
        :param key_values: what to log; only numbers and texts
        :param key_excluded: keys that some formats leave out
        :param step: chunks so far
        """
        kept = filter_excluded_keys(key_values, key_excluded, "csv")
        row = {key: str(value) for key, value in kept.items() if isinstance(value, int | float | str | np.generic)}
        row[self.STEP] = str(step)
        new = sorted(row.keys() - set(self.columns))
        again = bool(self.rows) and self.rows[-1][self.STEP] == row[self.STEP]
        if again:
            self.rows[-1] |= row
        else:
            self.rows.append(row)
        if new or again:
            self.columns += new
            self._rewrite()
        else:
            assert self._file is not None
            self._file.write(self._text(self.rows[-1:]))
            self._file.flush()

    def _text(self, rows: list[dict[str, str]], header: bool = False) -> str:
        out = io.StringIO()
        writer = csv.DictWriter(out, self.columns, restval="", lineterminator="\n")
        if header:
            writer.writeheader()
        writer.writerows(rows)
        return out.getvalue()

    def _rewrite(self) -> None:
        self.close()
        temporary = self.path.with_name(f".{os.getpid()}.{self.path.name}")
        temporary.write_text(self._text(self.rows, header=True))
        os.replace(temporary, self.path)
        self._file = self.path.open("a")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class TensorBoardWriter(TensorBoardOutputFormat):
    """
    :param folder: of the event files
    :param last_step: where a resumed run goes on: later steps of older event files are hidden
    """

    def __init__(self, folder: Path, last_step: int | None = None):
        from torch.utils.tensorboard import SummaryWriter

        purge = None if last_step is None else last_step + 1
        self.writer = SummaryWriter(log_dir=str(folder), purge_step=purge)
        self._is_closed = False

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        """
        :param key_values: what to log
        :param key_excluded: not heeded: what Stable-Baselines3 keeps from TensorBoard is in metrics.csv, too
        :param step: chunks so far
        """
        super().write(key_values, dict.fromkeys(key_excluded, ()), step)


class WandbWriter(KVWriter):
    """
    Weights & Biases, ``pip install rlt[wandb]``. A resumed run goes on in the same W&B run.

    :param folder: the run's folder, where W&B keeps its files and the id is remembered
    :param settings: keyword arguments of ``wandb.init`` (project, entity, mode, tags, ...)
    :param name: name of the run
    :param config: shown with the run
    :raises ValueError: if wandb is not installed
    """

    def __init__(self, folder: Path, settings: dict[str, Any], name: str, config: dict[str, Any]):
        wandb = import_wandb()
        remembered = folder / "wandb.json"
        run_id = json.loads(remembered.read_text())["id"] if remembered.is_file() else None
        known = {"project": "rlt", "name": name, "dir": str(folder), "config": config, "id": run_id, "resume": "allow"}
        self.run = wandb.init(**(known | settings))
        remembered.write_text(json.dumps({"id": self.run.id}))

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        """
        :param key_values: what to log; only numbers
        :param key_excluded: keys that some formats leave out
        :param step: chunks so far
        """
        kept = filter_excluded_keys(key_values, key_excluded, "wandb")
        numbers = {key: float(value) for key, value in kept.items() if isinstance(value, int | float | np.generic)}
        self.run.log(numbers, step=step)

    def close(self) -> None:
        """End the W&B run."""
        self.run.finish()


def import_wandb() -> Any:
    """
    :return: the module
    :raises ValueError: if it is not installed; says how to get it
    """
    try:
        import wandb
    except ImportError as error:
        raise ValueError("The setting wandb needs the package of that name: pip install rlt[wandb]") from error
    return wandb
