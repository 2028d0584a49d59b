"""Reads rows from files: demonstrations written by ``rlt encode-demos``, or the replay buffer of an earlier run."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv

from rlt_sb3.common.files import replacing
from rlt_sb3.common.fingerprint import Fingerprint, check_fingerprint
from rlt_sb3.common.replay.storage import TransitionStorage
from rlt_sb3.common.vec_env import metadata_of

FORMAT = "rlt-transitions-1"

_COLUMNS = (
    "actions", "step_rewards", "chunk_steps", "next_row", "terminated", "task_ids", "intervention", "successful",
)  # fmt: skip


def load_transitions(
    path: str | os.PathLike[str],
    observation_space: spaces.Dict,
    room: int = 0,
    fingerprint: Fingerprint | None = None,
) -> TransitionStorage:
    """
    Read a file of transitions.

    It is a safetensors file with ``obs/<key>`` (R, ...) for every key of the observation, ``actions`` (R, C, d),
    ``step_rewards`` (R, C), ``chunk_steps`` (R,; 0: an observation only), ``next_row`` (R,), the row whose observation
    is the next one, ``terminated`` and, optionally, ``truncated`` (R,), ``task_ids`` (R,), ``intervention`` (R, C),
    ``successful`` (R,), whether the row's episode ended in success.

    :param path: the file
    :param observation_space: flat Dict space of the environment
    :param room: further slots, for rows to be added
    :param fingerprint: of the environment's frozen models; None: they are not compared with the file's
    :return: the rows
    :raises ValueError: if the file is missing, unreadable, of another layout, made with other frozen models, or does
        not fit the observation space
    """
    from safetensors import SafetensorError, safe_open

    file = Path(path)
    if not file.is_file():
        raise ValueError(f"There is no file of transitions {file}; write one with `rlt encode-demos`.")
    try:
        with safe_open(file, framework="numpy") as opened:
            metadata = opened.metadata() or {}
            kind = metadata.get("format")
            arrays = {key: opened.get_tensor(key) for key in opened.keys()} if kind == FORMAT else {}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a readable safetensors file ({error}); write it again.") from error
    if kind != FORMAT:
        raise ValueError(f"{file} has the format {kind!r}; it must be {FORMAT!r}, as `rlt encode-demos` writes it.")
    advice = "Put those weights back, or write the file again (`rlt encode-demos`) with the environment's."
    check_fingerprint(str(file), _fingerprint_of_file(metadata), fingerprint, advice)
    missing = [key for key in (*_COLUMNS, *(f"obs/{name}" for name in observation_space.spaces)) if key not in arrays]
    if missing:
        raise ValueError(f"{file} lacks {missing}; write it again with `rlt encode-demos`.")
    for name, space in observation_space.spaces.items():
        if arrays[f"obs/{name}"].shape[1:] != space.shape:
            raise ValueError(
                f"{file} has {name} of shape {arrays[f'obs/{name}'].shape[1:]}, the environment {space.shape}: encode "
                "the demonstrations again with the VLA, RL token and chunk length of the environment."
            )
    actions, steps = arrays["actions"], arrays["chunk_steps"]
    size = len(actions)
    if len({len(value) for value in arrays.values()}) != 1 or actions.ndim != 3:
        raise ValueError(f"{file}: the columns differ in length or actions is not (R, C, d); write it again.")
    following = arrays["next_row"]
    if size and not (
        0 <= following.min() and following.max() < size and 0 <= steps.min() <= steps.max() <= actions.shape[1]
    ):
        raise ValueError(f"{file}: next_row or chunk_steps is out of range; write it again.")
    half = arrays["obs/z_rl"].dtype == np.float16 if "obs/z_rl" in arrays else False
    length, dims = actions.shape[1:]
    rows = TransitionStorage(room, observation_space, length, dims, "float16" if half else "float32", kept=max(size, 1))
    for name, array in rows.obs.items():
        array[:size] = arrays[f"obs/{name}"]
    rows.written = rows.kept
    rows.successful[:size] = arrays["successful"]
    truncated = arrays.get("truncated", np.zeros(size, dtype=bool))
    for slot in np.flatnonzero(steps > 0):
        rows.put_chunk(
            int(slot),
            actions[slot],
            arrays["step_rewards"][slot],
            int(steps[slot]),
            int(following[slot]),
            bool(arrays["terminated"][slot]),
            bool(truncated[slot]),
            int(arrays["task_ids"][slot]),
            arrays["intervention"][slot],
        )
    return rows


def save_transitions(
    path: str | os.PathLike[str],
    rows: TransitionStorage,
    provenance: dict[str, Any] | None = None,
    env: VecEnv | None = None,
) -> None:
    """
    Write rows, e.g. ``model.replay_buffer.storage`` of a run, in the form that :func:`load_transitions` reads.

    :param path: file to write, atomically
    :param rows: the rows
    :param provenance: where they come from, anything JSON can hold
    :param env: the environment they come from, e.g. ``model.get_env()``; the file then names its frozen models
    """
    from safetensors.numpy import save_file

    used = min(rows.written, rows.size)
    is_row = rows.is_row(np.arange(used))
    arrays = {f"obs/{key}": value[:used] for key, value in rows.obs.items()}
    for name in ("actions", "step_rewards", "terminated", "truncated", "task_ids", "intervention", "successful"):
        arrays[name] = getattr(rows, name)[:used]
    arrays["chunk_steps"] = np.where(is_row, rows.chunk_steps[:used], 0).astype(np.int16)
    arrays["next_row"] = np.where(is_row, rows.next_slot[:used], 0).astype(np.int32)
    provenance = (provenance or {}) | ({} if env is None else {"fingerprint": metadata_of(env).get("fingerprint")})
    metadata = {"format": FORMAT, "provenance": json.dumps(provenance, default=str)}
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as temporary:
        save_file({key: np.ascontiguousarray(value) for key, value in arrays.items()}, temporary, metadata=metadata)
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # safetensors makes files that only their owner can read


def _fingerprint_of_file(metadata: Mapping[str, str]) -> Fingerprint | None:
    return json.loads(metadata.get("provenance", "{}")).get("fingerprint")
