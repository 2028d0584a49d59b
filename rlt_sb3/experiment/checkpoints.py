"""Checkpoints: all that a run needs to be resumed, in one folder that is complete or does not exist."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlt_sb3.common.errors import RunError

FOLDER = "checkpoints"
FORMAT = 2
MODEL, BUFFER, STATE, MANIFEST = "model.zip", "replay_buffer.pkl", "state.json", "manifest.json"


class CheckpointError(RunError):
    """Raised if a checkpoint cannot be written or read; the message says which one is still good."""


@dataclass(frozen=True)
class Checkpoint:
    """
    One folder ``checkpoints/chunk-00000800`` of a run.

    :param path: the folder
    """

    path: Path

    @property
    def chunks(self) -> int:
        """Chunks (transitions) collected when it was written."""
        return int(self.path.name.split("-")[-1])

    @property
    def model(self) -> Path:
        """The policy with its optimizers, as Stable-Baselines3 saves it."""
        return self.path / MODEL

    @property
    def resumable(self) -> bool:
        """Whether a run can be resumed from it: it still has all its files (older ones keep only the model)."""
        try:
            names = json.loads((self.path / MANIFEST).read_text())["sha256"]
        except (OSError, ValueError, KeyError, TypeError):
            names = [STATE]  # damaged: read_state says so
        return STATE in names and all((self.path / name).is_file() for name in names)

    def read_state(self) -> dict[str, Any]:
        """
        Verify every file and read the state.

        :return: the state that :func:`write_checkpoint` was given
        :raises CheckpointError: if something is missing or damaged
        """
        try:
            manifest = json.loads((self.path / MANIFEST).read_text())
            if manifest["format"] != FORMAT:
                raise ValueError(f"it has format {manifest['format']}, this version reads {FORMAT}")
            for name, digest in manifest["sha256"].items():
                if _sha256(self.path / name) != digest:
                    raise ValueError(f"{name} is damaged")
            return json.loads((self.path / STATE).read_text())
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"Checkpoint {self.path} cannot be read: {error}.{self._others()}") from error

    def _others(self) -> str:
        good = [c for c in resumable_checkpoints(self.path.parent.parent) if c.path.name != self.path.name]
        return f" Go on from another one: rlt train --resume {good[-1].path}" if good else ""


def all_checkpoints(run: Path) -> list[Checkpoint]:
    """
    List the checkpoints of a run, oldest first.

    :param run: folder of the run
    :return: complete checkpoints
    """
    return [Checkpoint(path) for path in sorted((run / FOLDER).glob("chunk-*")) if (path / MANIFEST).is_file()]


def resumable_checkpoints(run: Path) -> list[Checkpoint]:
    """
    List the checkpoints from which a run can be resumed, oldest first.

    :param run: folder of the run
    :return: those with a replay buffer
    """
    return [checkpoint for checkpoint in all_checkpoints(run) if checkpoint.resumable]


def find_checkpoint(path: Path) -> tuple[Path, Checkpoint | None]:
    """
    Find what ``--resume`` names.

    :param path: a run (its newest checkpoint is meant) or one of its checkpoints
    :return: folder of the run, checkpoint; no checkpoint if the run was interrupted before its training began
    :raises ValueError: if there is none
    """
    if path.parent.name == FOLDER and path.is_dir():
        checkpoint = Checkpoint(path)
        if not checkpoint.resumable:
            raise ValueError(
                f"{path} has a model only (replay buffer and state are kept in the newest ones), so a run cannot go on "
                f"from it; there is {[str(c.path) for c in resumable_checkpoints(path.parent.parent)]}."
            )
        return path.parent.parent, checkpoint
    found = resumable_checkpoints(path)
    begun = (path / "config.yaml").is_file() and not all_checkpoints(path) and not (path / "model.zip").exists()
    if not found and not begun:
        raise ValueError(
            f"There is no checkpoint in {path / FOLDER}. --resume takes the folder of a run, for example runs/demo, or "
            "one of its checkpoints."
        )
    return path, found[-1] if found else None


def write_checkpoint(run: Path, model: Any, state: dict[str, Any], keep: int = 2, resumable: bool = True) -> Checkpoint:
    """
    Save a run: model, optimizers, replay buffer (where the model has one), state.

    Nothing is visible before everything is on the disk.

    :param run: folder of the run
    :param model: model of Stable-Baselines3
    :param state: plain data for JSON
    :param keep: checkpoints that keep replay buffer and state; of older ones the model stays, for evaluation
    :param resumable: False leaves replay buffer and state out from the start
    :return: the checkpoint
    :raises CheckpointError: if it cannot be written (full disk); older checkpoints are untouched then
    """
    folder = run / FOLDER
    final = folder / f"chunk-{model.num_timesteps:08d}"
    temporary = folder / f".{os.getpid()}.{final.name}"
    old = folder / f".{os.getpid()}.old"
    try:
        temporary.mkdir(parents=True)
        model.save(temporary / MODEL)
        if resumable:
            if getattr(model, "replay_buffer", None) is not None:
                model.save_replay_buffer(temporary / BUFFER)
            (temporary / STATE).write_text(json.dumps(state))
        digests = {name: _sha256(temporary / name) for name in (MODEL, BUFFER, STATE) if (temporary / name).exists()}
        (temporary / MANIFEST).write_text(json.dumps({"format": FORMAT, "sha256": digests}))
        if final.exists():  # a resumed run passes here again
            os.replace(final, old)
        os.replace(temporary, final)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        good = resumable_checkpoints(run)
        hint = f" {good[-1].path} is complete: rlt train --resume {run} goes on from there." if good else ""
        raise CheckpointError(f"Checkpoint {final} could not be written: {error}.{hint}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
    for checkpoint in resumable_checkpoints(run)[:-keep]:
        (checkpoint.path / BUFFER).unlink(missing_ok=True)
        (checkpoint.path / STATE).unlink()
    return Checkpoint(final)


def later_checkpoints(run: Path, chunks: int) -> list[Checkpoint]:
    """
    List the checkpoints of a run after a number of chunks, oldest first.

    :param run: folder of the run
    :param chunks: chunks collected
    :return: checkpoints with more chunks
    """
    return [checkpoint for checkpoint in all_checkpoints(run) if checkpoint.chunks > chunks]


def discard_later(run: Path, chunks: int) -> None:
    """
    Remove the checkpoints of a run after a number of chunks, from where the resumed run takes another course.

    :param run: folder of the run
    :param chunks: chunks collected
    """
    for checkpoint in later_checkpoints(run, chunks):
        shutil.rmtree(checkpoint.path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -------------------------------------------------------------------- random numbers


def rng_state(model: Any) -> dict[str, Any]:
    """
    State of every global generator (Python, NumPy, torch on CPU and GPUs) and of the action space, for JSON.

    :param model: model of Stable-Baselines3
    """
    import torch

    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": _encode(torch.get_rng_state()),
        "cuda": [_encode(state) for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
        "action_space": _plain(model.action_space.np_random.bit_generator.state),
    }


def set_rng_state(state: dict[str, Any], model: Any) -> None:
    """
    Restore what :func:`rng_state` returned.

    :param state: of all generators
    :param model: model of Stable-Baselines3
    """
    import torch

    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_decode(state["torch"]))
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all([_decode(text) for text in state["cuda"]])
    model.action_space.np_random.bit_generator.state = state["action_space"]


def _encode(tensor: Any) -> str:
    return base64.b64encode(tensor.numpy().tobytes()).decode()


def _decode(text: str) -> Any:
    import torch

    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype=np.uint8).copy())


def _plain(value: Any) -> Any:
    """Convert arrays and NumPy numbers to Python's own types."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
