"""``rlt encode-demos``: writes demonstrations as rows of RL tokens and reference chunks, for online training."""

import json
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tqdm import tqdm

from rlt_gym.core.files import atomic_write, git_commit
from rlt_gym.data.demo_set import resize_frames
from rlt_gym.data.lerobot import LeRobotDemo, LeRobotSettings
from rlt_gym.data.libero_hdf5 import Demo
from rlt_gym.data.sources import DemoSource, demo_sources
from rlt_gym.rl_token.base import Encoder
from rlt_gym.rl_token.env import check_chunk_length
from rlt_gym.rl_token.io import frozen_fingerprint, load_rl_token
from rlt_gym.vla.base import FrozenVLA, forward_seed
from rlt_gym.vla.batches import run_vla
from rlt_gym.vla.demos import check_demo_frames, check_demos
from rlt_gym.vla.registry import load_vla

#: Version of the layout; ``rlt_sb3.common.replay.offline`` reads it.
FORMAT = "rlt-transitions-1"


@dataclass
class EncodeDemosConfig(LeRobotSettings):
    """
    Settings of :func:`encode_demos`.

    :param demos: Demonstration files of ``rlt collect`` or of LIBERO itself, glob patterns or folders; folders of
        LeRobot datasets (versions 2 and 3, with the extra ``lerobot``).
    :param output: ``.safetensors`` file to write.
    :param vla: The frozen policy: a name or scheme of ``rlt list``, the path of a file that ``rlt train-vla`` wrote, or
        "package.module:Class" of an allowed package (``RLT_ALLOWED_IMPORTS``). Any other VLA is an argument of
        :func:`encode_demos` itself.
    :param vla_kwargs: Further arguments of whoever makes this VLA.
    :param rl_token: RL-token encoder: "auto" (the shipped one of the VLA), "mean" (the mean of the VLA's picture
        tokens), "none" (a single zero, for a VLA that gives no tokens), or the path of a file that ``rlt
        pretrain-token`` wrote.
    :param chunk_length: Control steps per row, that of the environment to train in.
    :param stride: Control steps from the beginning of a row to that of the next; must divide ``chunk_length``.
    :param instructions: Only the demonstrations of these tasks, in this order for ``task_ids``; ``None`` = all.
    :param task_ids: Task of each file, in sorted order of the files, then of each task of a LeRobot dataset; ``None`` =
        what the files and datasets of ``rlt collect`` say, else 0, 1, ... (LeRobot's own numbers are not LIBERO's).
    :param max_demos: Most demonstrations per task; ``None`` = all.
    :param batch_size: Observations per forward pass, at most the VLA's ``max_batch``.
    :param image_size: Frames are pooled to this edge first; ``None`` = as they are.
    :param device: Where VLA and encoder run.
    :param progress: Show a progress bar.
    """

    demos: list[str] = field(default_factory=list)
    output: str = "transitions.safetensors"
    vla: str = "mini"
    vla_kwargs: dict[str, Any] | None = None
    rl_token: str = "auto"
    chunk_length: int = 8
    stride: int = 2
    instructions: list[str] | None = None
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


def encode_demos(config: EncodeDemosConfig, vla: FrozenVLA | None = None, encoder: Encoder | None = None) -> Path:
    """
    Write a file of transitions.

    :param config: What to do.
    :param vla: The VLA, if it is not one that ``config.vla`` can name.
    :param encoder: The RL token, if it is not one that ``config.rl_token`` can name.
    :return: The file.
    :raises ValueError: If files are missing or damaged or nothing in them gives a row.
    """
    vla = load_vla(config.vla, config.device, config.vla_kwargs) if vla is None else load_vla(vla, config.device)
    token = load_rl_token(config.rl_token if encoder is None else encoder, vla, config.device)
    check_chunk_length(config.chunk_length, vla)
    sources = _sources(config)
    check_demos(vla.spec, [source for source, _ in sources])
    columns: dict[str, list[np.ndarray]] = {}
    count = number = 0
    for source, task_id in sources:
        demos = islice(source.demos(), config.max_demos)  # one at a time: the file is open while they are read
        for demo in tqdm(demos, desc=source.instruction, unit="demo", disable=not config.progress):
            success = bool(demo.attrs.get("success", True))
            rows = cut_demo(demo.actions, success, config.chunk_length, config.stride)
            rows["next_row"] = rows["next_row"] + np.int32(count)
            rows |= _tokens(demo, number, source.instruction, config, vla, token)
            number += 1
            size = len(rows["actions"])
            rows["task_ids"] = np.full(size, task_id, dtype=np.int32)
            rows["successful"] = np.full(size, success)
            rows["intervention"] = np.arange(config.chunk_length) < rows["chunk_steps"][:, None]
            count += size
            for key, value in rows.items():
                columns.setdefault(key, []).append(value)
    if not columns or not sum(int((steps > 0).sum()) for steps in columns["chunk_steps"]):
        names = ", ".join(source.name for source, _ in sources)
        raise ValueError(f"No demonstration in {names} gives a row: collect some with `rlt collect`.")
    arrays = {key: np.ascontiguousarray(np.concatenate(parts)) for key, parts in columns.items()}
    provenance: dict[str, Any] = {
        "config": asdict(config),
        "vla": vla.spec.name,
        "fingerprint": frozen_fingerprint(vla, token),
        "commit": git_commit(),
    }
    with atomic_write(config.output) as temporary:
        save_file(arrays, temporary, metadata={"format": FORMAT, "provenance": json.dumps(provenance, default=str)})
    if config.progress:
        print(f"{int((arrays['chunk_steps'] > 0).sum())} rows of {len(sources)} tasks -> {config.output}")
    return Path(config.output)


def _sources(config: EncodeDemosConfig) -> list[tuple[DemoSource, int]]:
    """Find the requested demonstrations and their task ids, in the order of ``task_ids``."""
    sources = demo_sources(config.demos, config)
    ids = [
        int(source.made.get("task_id", number if source.number is None else source.number))
        for number, source in enumerate(sources)
    ]
    pairs = list(zip(sources, ids, strict=True))
    if config.instructions is not None:
        known = [source.instruction for source in sources]
        missing = sorted(set(config.instructions) - set(known))
        if missing:
            raise ValueError(f"There are no demonstrations of {missing}; there are some of {sorted(set(known))}.")
        pairs = [pair for name in config.instructions for pair in pairs if pair[0].instruction == name]
    if config.task_ids is not None:
        if len(config.task_ids) != len(pairs):
            raise ValueError(
                f"task_ids has {len(config.task_ids)} numbers for {len(pairs)} tasks; it needs one for each."
            )
        pairs = [(source, task_id) for (source, _), task_id in zip(pairs, config.task_ids, strict=True)]
    for source, _ in pairs:
        if float(source.made.get("noise", 0.0)) > 0.0:
            warnings.warn(
                f"{source.name} was collected with noise={source.made['noise']}: its actions are the expert's "
                "wishes, not exactly what was executed. Critics learn from such rows as from a noisy environment; "
                "collect with --noise 0 to avoid it.",
                stacklevel=3,
            )
    return pairs


def _tokens(
    demo: Demo | LeRobotDemo, number: int, instruction: str, config: EncodeDemosConfig, vla: FrozenVLA, encoder: Encoder
) -> dict[str, np.ndarray]:
    """``obs/z_rl``, ``obs/vla_ref`` and ``obs/proprio`` of every stride-th observation."""
    frames = {camera: demo.frames(camera, config.stride) for camera in vla.spec.cameras}
    if config.image_size is not None:
        frames = {camera: resize_frames(value, config.image_size) for camera, value in frames.items()}
    check_demo_frames(vla.spec, next(iter(frames.values())).shape[1])
    proprio = demo.proprio[:: config.stride]
    parts: dict[str, list[np.ndarray]] = {"obs/z_rl": [], "obs/vla_ref": []}
    for rows in _slices(len(proprio), config.batch_size):
        obs = {camera: value[rows] for camera, value in frames.items()} | {"state": proprio[rows]}
        size = len(obs["state"])
        steps = range(rows.start * config.stride, (rows.start + size) * config.stride, config.stride)
        output = run_vla(vla, obs, [instruction] * size, [forward_seed(number, step) for step in steps])
        parts["obs/z_rl"].append(encoder(output).float().cpu().numpy())
        parts["obs/vla_ref"].append(output.chunk[:, : config.chunk_length].float().cpu().numpy())
    return {key: np.concatenate(value) for key, value in parts.items()} | {"obs/proprio": proprio.astype(np.float32)}


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, length, size))
