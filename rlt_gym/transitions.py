"""``rlt encode-demos``: demonstrations as the frozen VLA and the RL token see them, for mixing into online training."""

import json
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tqdm import tqdm

from rlt_gym.demos import Demo, DemoFile, expand_paths, resize_frames
from rlt_gym.rl_token import RLTokenEncoder, load_rl_token
from rlt_gym.rl_token_env import check_chunk_length
from rlt_gym.utils.files import atomic_write, git_commit
from rlt_gym.vla.base import FrozenVLA, load_vla

#: Version of the layout; ``rlt_sb3.common.offline`` reads it.
FORMAT = "rlt-transitions-1"


@dataclass
class EncodeDemosConfig:
    """
    What :func:`encode_demos` does.

    :param demos: Demonstration files of ``rlt collect`` or of LIBERO itself, glob patterns or folders.
    :param output: ``.safetensors`` file to write.
    :param vla: ``"mini"`` or a MiniVLA's ``.safetensors`` path; likewise ``rl_token``.
    :param rl_token: ``"auto"`` or a path.
    :param chunk_length: Control steps per row, that of the environment to train in.
    :param stride: A row begins every so many control steps; must divide ``chunk_length``.
    :param task_ids: Task of each file, in sorted order of the files; ``None`` = what the files say, else 0, 1, ...
    :param max_demos: Use at most so many demonstrations per file.
    :param batch_size: Observations per forward pass.
    :param image_size: Frames are pooled to this edge first; ``None`` = as they are.
    :param device: Where VLA and encoder run.
    :param progress: Show a progress bar.
    """

    demos: list[str] = field(default_factory=list)
    output: str = "transitions.safetensors"
    vla: str = "mini"
    rl_token: str = "auto"
    chunk_length: int = 8
    stride: int = 2
    task_ids: list[int] | None = None
    max_demos: int | None = None
    batch_size: int = 64
    image_size: int | None = None
    device: str = "cpu"
    progress: bool = True

    def __post_init__(self) -> None:
        if Path(self.output).suffix != ".safetensors":
            raise ValueError(f"output is {self.output!r}; it must end in .safetensors.")
        if self.stride < 1 or self.chunk_length % self.stride:
            raise ValueError(
                f"stride is {self.stride}; it must divide chunk_length {self.chunk_length}, so that every row ends "
                "where another one begins."
            )
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; it must be at least 1.")


def cut_demo(actions: np.ndarray, success: bool, chunk_length: int, stride: int) -> dict[str, np.ndarray]:
    """
    Cut a demonstration into rows.

    A success earns reward 1 in the last control step and ends the episode. A demonstration without success has no
    observation after its last action, so its last rows cannot be bootstrapped and are left out.

    :param actions: Executed actions (T, 7).
    :param success: Whether the last one solved the task.
    :param chunk_length: C.
    :param stride: Control steps between the beginnings of rows; divides C.
    :return: For the observations at control steps 0, stride, 2 stride, ... < T: ``actions`` (R, C, 7), past the end the
        last one repeated; ``step_rewards`` (R, C); ``chunk_steps`` (R,), 0 where there is no row; ``next_row`` (R,),
        the row of the next observation; ``terminated`` (R,).
    """
    length = len(actions)
    starts = np.arange(0, length, stride)
    index = starts[:, None] + np.arange(chunk_length)
    steps = np.minimum(chunk_length, length - starts)
    ends = starts + steps
    terminated = (ends == length) & success
    next_row = np.minimum(ends // stride, len(starts) - 1)
    if not success:
        steps = np.where(ends < length, steps, 0)
    return {
        "actions": actions[np.minimum(index, length - 1)].astype(np.float32),
        "step_rewards": ((index == length - 1) & success).astype(np.float32),
        "chunk_steps": steps.astype(np.int16),
        "next_row": np.where(terminated, np.arange(len(starts)), next_row).astype(np.int32),
        "terminated": terminated,
    }


def encode_demos(
    config: EncodeDemosConfig, vla: FrozenVLA | None = None, encoder: RLTokenEncoder | None = None
) -> Path:
    """
    Write a file of transitions.

    :param config: What to do.
    :param vla: The VLA, if it is not one that ``config.vla`` can name; likewise ``encoder``.
    :return: The file.
    :raises ValueError: If files are missing or damaged or nothing in them gives a row.
    """
    vla = load_vla(config.vla if vla is None else vla, config.device)
    token = load_rl_token(config.rl_token if encoder is None else encoder, vla, config.device)
    check_chunk_length(config.chunk_length, vla)
    paths = expand_paths(config.demos)
    if config.task_ids is not None and len(config.task_ids) != len(paths):
        raise ValueError(f"task_ids has {len(config.task_ids)} numbers for {len(paths)} files; it needs one for each.")
    columns: dict[str, list[np.ndarray]] = {}
    count = 0
    for number, path in enumerate(paths):
        with DemoFile(path) as file:
            task_id = int(file.env_args.get("task_id", number)) if config.task_ids is None else config.task_ids[number]
            if float(file.env_args.get("noise", 0.0)) > 0.0:
                warnings.warn(
                    f"{path.name} was collected with noise={file.env_args['noise']}: its actions are the expert's "
                    "wishes, not exactly what was executed. Critics learn from such rows as from a noisy environment; "
                    "collect with --noise 0 to avoid it.",
                    stacklevel=2,
                )
            demos = list(file)[: config.max_demos]
            for demo in tqdm(demos, desc=file.instruction, unit="demo", disable=not config.progress):
                rows = cut_demo(demo.actions, bool(demo.attrs.get("success", True)), config.chunk_length, config.stride)
                rows["next_row"] = rows["next_row"] + np.int32(count)
                rows |= _tokens(demo, file.instruction, config, vla, token)
                size = len(rows["actions"])
                rows["task_ids"] = np.full(size, task_id, dtype=np.int32)
                rows["successful"] = np.full(size, bool(demo.attrs.get("success", True)))
                rows["intervention"] = np.arange(config.chunk_length) < rows["chunk_steps"][:, None]
                count += size
                for key, value in rows.items():
                    columns.setdefault(key, []).append(value)
    if not columns or not sum(int((steps > 0).sum()) for steps in columns["chunk_steps"]):
        raise ValueError(f"Nothing in {', '.join(path.name for path in paths)} gives a row: no demonstrations?")
    arrays = {key: np.ascontiguousarray(np.concatenate(parts)) for key, parts in columns.items()}
    provenance: dict[str, Any] = {
        "config": asdict(config),
        "vla": vla.spec.name,
        "vla_fingerprint": vla.fingerprint(),
        "commit": git_commit(),
    }
    with atomic_write(config.output) as temporary:
        save_file(arrays, temporary, metadata={"format": FORMAT, "provenance": json.dumps(provenance, default=str)})
    if config.progress:
        print(f"{int((arrays['chunk_steps'] > 0).sum())} rows of {len(paths)} files -> {config.output}")
    return Path(config.output)


def _tokens(
    demo: Demo, instruction: str, config: EncodeDemosConfig, vla: FrozenVLA, encoder: RLTokenEncoder
) -> dict[str, np.ndarray]:
    """``obs/z_rl``, ``obs/vla_ref`` and ``obs/proprio`` of every stride-th observation."""
    frames = {camera: demo.frames(camera, config.stride) for camera in ("agentview", "wrist")}
    if config.image_size is not None:
        frames = {camera: resize_frames(value, config.image_size) for camera, value in frames.items()}
    proprio = demo.proprio[:: config.stride]
    parts: dict[str, list[np.ndarray]] = {"obs/z_rl": [], "obs/vla_ref": []}
    for rows in _slices(len(proprio), config.batch_size):
        obs = {camera: value[rows] for camera, value in frames.items()} | {"state": proprio[rows]}
        size = len(obs["state"])
        output = vla.forward(obs, [instruction] * size, seed=list(range(rows.start, rows.start + size)))
        output.check(vla.spec, size)
        parts["obs/z_rl"].append(encoder(output).float().cpu().numpy())
        parts["obs/vla_ref"].append(output.chunk[:, : config.chunk_length].float().cpu().numpy())
    return {key: np.concatenate(value) for key, value in parts.items()} | {"obs/proprio": proprio.astype(np.float32)}


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, length, size))
