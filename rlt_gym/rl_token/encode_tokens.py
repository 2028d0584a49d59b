"""``rlt encode-tokens``: writes a frozen VLA's tokens of demonstrations to disk, for ``rlt pretrain-token``."""

from collections.abc import Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from rlt_gym.data.demo_set import DemoReader
from rlt_gym.data.lerobot import LeRobotSettings
from rlt_gym.rl_token.base import require_tokens
from rlt_gym.rl_token.token_shards import DTYPES, TokenWriter
from rlt_gym.rl_token.tokens import EncodedRows, TokenOrigin, encode_rows
from rlt_gym.vla.base import FrozenVLA
from rlt_gym.vla.demos import check_demos, frame_size
from rlt_gym.vla.registry import load_vla


@dataclass
class EncodeTokensConfig(LeRobotSettings):
    """
    Settings of :func:`encode_tokens`.

    :param demos: Demonstration files, glob patterns or folders, also of LeRobot datasets.
    :param output: Folder to write. If the command was interrupted, the same command goes on in it; if it was not, the
        same command compares every shard with its checksum and writes damaged ones anew.
    :param vla: The frozen policy: a name or scheme of ``rlt list``, the path of a file that ``rlt train-vla`` wrote, or
        "package.module:Class" of an allowed package (``RLT_ALLOWED_IMPORTS``). Any other VLA is an argument of
        :func:`encode_tokens` itself.
    :param vla_kwargs: Further arguments of whoever makes this VLA.
    :param kinds: Kinds of tokens to keep, ``("all",)`` or e.g. ``("image",)``.
    :param dtype: Type of the tokens on disk: "float16", "bfloat16" or "float32".
    :param frame_stride: Use one observation in this many.
    :param max_demos: Most demonstrations per task; ``None`` = all.
    :param successes_only: Leave out demonstrations and rollouts that did not solve their task.
    :param image_size: Frames are average-pooled to this edge in pixels while they are loaded; ``None`` = to the size to
        which the VLA resizes them, if it says so and if that divides their own, else not at all.
    :param picture_size: Edge in pixels of the small pictures that are kept for ``rlt probe``.
    :param rows_per_shard: Observations per file.
    :param batch_size: Observations per forward pass, at most the VLA's ``max_batch``.
    :param device: Where the VLA runs.
    :param progress: Show a progress bar.
    """

    demos: list[str] = field(default_factory=list)
    output: str = "tokens"
    vla: str = "mini"
    vla_kwargs: dict[str, Any] | None = None
    kinds: tuple[str, ...] = ("all",)
    dtype: str = "float16"
    frame_stride: int = 4
    max_demos: int | None = None
    successes_only: bool = True
    image_size: int | None = None
    picture_size: int = 64
    rows_per_shard: int = 256
    batch_size: int = 64
    device: str = "cpu"
    progress: bool = True

    def __post_init__(self) -> None:
        for name in ("frame_stride", "picture_size", "rows_per_shard", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}.")


def encode_tokens(config: EncodeTokensConfig, vla: FrozenVLA | None = None) -> Path:
    """
    Write the tokens of demonstrations.

    What is in memory is one shard, the pictures of one demonstration, and the VLA.

    :param config: What to do.
    :param vla: The VLA, if it is not one that ``config.vla`` can name.
    :return: The folder.
    :raises ValueError: If files are missing or damaged, or the folder holds something else.
    """
    vla = load_vla(config.vla, config.device, config.vla_kwargs) if vla is None else load_vla(vla, config.device)
    require_tokens(vla)
    demos = DemoReader(config.demos, config.max_demos, config.frame_stride, config.successes_only, config)
    check_demos(vla.spec, demos.sources)
    vla.spec.check_kinds(config.kinds)
    size = frame_size(vla.spec, demos.edge, config.image_size)
    settings: dict[str, Any] = {
        "dtype": config.dtype,
        "image_size": size,
        "picture_size": config.picture_size,
        "batch_size": config.batch_size,  # a batch of another size rounds otherwise
        "frame_stride": config.frame_stride,
    }
    if any(source.number is not None for source in demos.sources):  # a LeRobot dataset
        settings |= config.lerobot
    origin = TokenOrigin.of(vla, config.kinds)
    writer = TokenWriter(config.output, origin, demos.rows, config.rows_per_shard, settings, demos.robot)
    upside_down = {camera.key for camera in demos.robot.cameras if camera.upside_down}
    dtype = DTYPES[config.dtype]
    kept = 0
    with tqdm(total=len(demos.rows), disable=not config.progress, desc="tokens", mininterval=2.0) as bar:
        for number, rows in enumerate(writer.shards):
            if writer.intact(number):
                kept += 1
            else:
                found, pictures = [], []
                for part in encode_rows(vla, demos, config.kinds, size, config.batch_size, rows.start, rows.stop):
                    pictures.append(_pictures(part, config.picture_size, upside_down))
                    found.append(replace(part, frames={}))  # large ones do not wait for the rest of the shard
                writer.write(number, **_joined(found, dtype), pictures=np.concatenate(pictures))
            bar.update(rows.stop - rows.start)
    writer.close()
    if config.progress:
        written = len(writer.shards) - kept
        print(f"{len(demos.rows)} rows in {config.output}: {written} shards written, {kept} found intact")
    return Path(config.output)


def _joined(found: list[EncodedRows], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tokens, their mask and kinds of all batches of a shard, padded to equally many tokens."""
    most = max(part.mask.shape[1] for part in found)

    def padded(value: torch.Tensor) -> torch.Tensor:
        missing = most - value.shape[1]
        return torch.nn.functional.pad(value, (0, 0) * (value.dim() - 2) + (0, missing)).cpu()

    return {
        "tokens": torch.cat([padded(part.tokens).to(dtype) for part in found]),
        "mask": torch.cat([padded(part.mask) for part in found]),
        "kind": torch.cat([padded(part.kind) for part in found]),
    }


def _pictures(part: EncodedRows, size: int, upside_down: Set[str]) -> np.ndarray:
    """Small upright pictures of a batch, (r, cameras, size, size, 3); ``upside_down``: the cameras that hang so."""

    def small(frame: np.ndarray) -> np.ndarray:
        return np.asarray(Image.fromarray(frame).resize((size, size)))

    upright = [frames[:, ::-1] if camera in upside_down else frames for camera, frames in part.frames.items()]
    return np.stack([[small(frame) for frame in views] for views in zip(*upright, strict=True)])
