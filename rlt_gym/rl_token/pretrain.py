"""Stage 1: train the RL token on demonstrations seen through a frozen VLA."""

import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from rlt_gym.core.files import git_commit
from rlt_gym.core.training import has_bfloat16, warmup_cosine
from rlt_gym.data.demo_set import frame_edge, load_demo_set
from rlt_gym.data.storage import ArrayStorage
from rlt_gym.rl_token.base import require_tokens
from rlt_gym.rl_token.decoder import RLTokenDecoder, reconstruction_loss
from rlt_gym.rl_token.encoder import RLTokenConfig, RLTokenEncoder, count_parameters
from rlt_gym.rl_token.io import load_rl_token, save_rl_token
from rlt_gym.rl_token.probe import evaluate_token, probe_objects
from rlt_gym.rl_token.token_cache import TokenCache, cache_tokens, check_demo_frames, check_demos
from rlt_gym.vla.base import FrozenVLA, VLASpec
from rlt_gym.vla.registry import load_vla


@dataclass
class PretrainTokenConfig:
    """
    Settings of :func:`pretrain_token`.

    :param demos: Demonstration files, glob patterns or folders, also of LeRobot datasets.
    :param vla: The frozen policy: a name or scheme of ``rlt list``, the path of a file that ``rlt train-vla`` wrote, or
        "package.module:Class" of an allowed package (``RLT_ALLOWED_IMPORTS``). Any other VLA is an argument of
        :func:`pretrain_token` itself.
    :param vla_kwargs: Further arguments of whoever makes this VLA.
    :param output: ``.safetensors`` file to write; the report goes beside it with suffix ``.json``.
    :param z_dim: Width of the RL token, ``None`` = the VLA's width.
    :param width: Width of encoder and decoder; ``None`` = the VLA's width.
    :param layers: Layers of each.
    :param heads: Attention heads of each.
    :param mlp_ratio: Hidden width of their MLPs, in widths.
    :param kinds: Kinds of tokens to read, ``("all",)`` or e.g. ``("image",)``.
    :param context_dropout: See :class:`~rlt_gym.rl_token.encoder.RLTokenConfig`.
    :param steps: Gradient steps (paper: 2,000 to 10,000).
    :param minutes: Wall-clock budget of the steps; ``None`` = only ``steps`` count.
    :param batch_size: Observations per step.
    :param learning_rate: Peak rate of AdamW.
    :param warmup_steps: Linear warm-up.
    :param held_out: Fraction of each task's demonstrations (whole ones) for validation.
    :param frame_stride: Use one observation in this many.
    :param max_demos: Most demonstrations per task; ``None`` = all.
    :param image_size: Frames are average-pooled to this edge in pixels while they are loaded; ``None`` = to the size to
        which the VLA resizes them, if it says so and if that divides their own, else not at all.
    :param memory_limit: Most GiB of memory for the frames of a camera, and for the tokens; larger arrays go to a
        temporary file.
    :param scratch: Folder of these files; ``None`` = the folder of ``output``.
    :param bfloat16: Train under bfloat16 autocast; ``None`` = if ``device`` has it in hardware.
    :param threads: torch threads, ``None`` = leave as they are.
    :param device: Device to train on.
    :param seed: Seed of initialization, split and sampling.
    :param progress: Show a progress bar and the report.
    """

    demos: list[str] = field(default_factory=list)
    vla: str = "mini"
    vla_kwargs: dict[str, Any] | None = None
    output: str = "rl_token.safetensors"
    z_dim: int | None = None
    width: int | None = None
    layers: int = 2
    heads: int = 4
    mlp_ratio: int = 2
    kinds: tuple[str, ...] = ("all",)
    context_dropout: float = 0.9
    steps: int = 2000
    minutes: float | None = None
    batch_size: int = 64
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    held_out: float = 0.1
    frame_stride: int = 4
    max_demos: int | None = None
    image_size: int | None = None
    memory_limit: float = 4.0
    scratch: str | None = None
    bfloat16: bool | None = None
    threads: int | None = 1
    device: str = "cpu"
    seed: int = 0
    progress: bool = True

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "frame_stride"):
            if getattr(self, name) < 1:
                raise ValueError(f"PretrainTokenConfig.{name} is {getattr(self, name)}; it must be at least 1.")
        if not self.memory_limit >= 0:
            raise ValueError(f"PretrainTokenConfig.memory_limit is {self.memory_limit}; it must be at least 0 (GiB).")
        if self.minutes is not None and self.minutes <= 0:
            raise ValueError(f"PretrainTokenConfig.minutes is {self.minutes}; it must be positive or None.")
        if not 0 < self.held_out < 1:
            raise ValueError(f"PretrainTokenConfig.held_out is {self.held_out}; it must be in (0, 1).")
        if Path(self.output).suffix != ".safetensors":
            raise ValueError(f"PretrainTokenConfig.output is {self.output!r}; it must end in .safetensors.")


def pretrain_token(config: PretrainTokenConfig, vla: FrozenVLA | None = None) -> RLTokenEncoder:
    """
    Train an RL token by eq. (2) with a frozen VLA, write it, and report on demonstrations that were held out.

    :param config: What to do.
    :param vla: The VLA, if it is not one that ``config.vla`` can name.
    :return: The frozen encoder as read back from ``config.output``.
    :raises ValueError: If files are missing or damaged, no demonstration can be held out, or the loss diverges.
    """
    import torch._dynamo  # first, since loading it after OSMesa crashes the process

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    began = time.monotonic()
    vla = load_vla(config.vla, config.device, config.vla_kwargs) if vla is None else load_vla(vla, config.device)
    require_tokens(vla)
    check_demos(vla.spec, config.demos)
    vla.spec.check_kinds(config.kinds)
    folder = Path(config.output).parent if config.scratch is None else config.scratch
    storage = ArrayStorage(int(config.memory_limit * 2**30), folder)
    size = _frame_size(config, vla.spec)
    data = load_demo_set(config.demos, size, config.max_demos, config.frame_stride, storage=storage)
    train_rows, held_rows = data.split(config.held_out, config.seed)
    if not len(held_rows):
        raise ValueError(
            "No demonstration can be held out: a task needs at least two. Collect more with `rlt collect`."
        )
    cache = cache_tokens(vla, data, config.kinds, config.batch_size, config.progress, storage)
    data = data.without_frames()

    torch.manual_seed(config.seed)
    model = RLTokenConfig(
        token_dim=vla.spec.token_dim,
        max_tokens=vla.spec.max_tokens or cache.tokens.shape[1],
        z_dim=config.z_dim,
        width=config.width,
        layers=config.layers,
        heads=config.heads,
        mlp_ratio=config.mlp_ratio,
        kinds=config.kinds,
        context_dropout=config.context_dropout,
    )
    encoder, decoder = RLTokenEncoder(model, vla.fingerprint(), vla.spec.name), RLTokenDecoder(model)
    encoder.set_statistics(*_statistics(cache, train_rows))
    encoder.to(config.device)
    decoder.to(config.device)
    history = _optimize(config, encoder, decoder, cache, train_rows)
    if not math.isfinite(history["L_ro_mean"]):
        raise ValueError("Training diverged (loss is not finite); lower learning_rate.")
    report = evaluate_token(encoder, decoder, cache, train_rows, held_rows)
    report |= probe_objects(encoder, cache, data, train_rows, held_rows)
    provenance: dict[str, Any] = {
        "kind": "rl_token",
        "config": asdict(config),
        "git_commit": git_commit(),
        "vla": vla.spec.name,
        "demos": data.files,
        "rows": {"train": len(train_rows), "held_out": len(held_rows)},
        "parameters": {"encoder": count_parameters(encoder), "decoder": count_parameters(decoder)},
        "train": history,
        "held_out": report,
        "wall_seconds": round(time.monotonic() - began, 1),
        "torch": torch.__version__,
    }
    save_rl_token(config.output, encoder, decoder, provenance)
    if config.progress:
        print("\n".join(f"{key:>28}: {value:.4f}" for key, value in report.items()))
    trained = load_rl_token(config.output, vla, config.device)
    assert isinstance(trained, RLTokenEncoder)
    return trained


def _frame_size(config: PretrainTokenConfig, spec: VLASpec) -> int:
    """
    Edge in pixels of the frames that the VLA is shown.

    :raises ValueError: If it is smaller than what the VLA reads.
    """
    edge = frame_edge(config.demos)
    size = config.image_size or (spec.image_size if spec.image_size and edge % spec.image_size == 0 else edge)
    check_demo_frames(spec, size)
    return size


def _statistics(cache: TokenCache, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean per place and channel (N, H), and the channels' deviations from it (H,), over at most 2000 rows."""
    parts = list(cache.batches(rows[:: max(1, len(rows) // 2000)], most=len(rows), limit=1 << 30))
    total, count = torch.zeros(cache.tokens.shape[1:]), torch.zeros(cache.mask.shape[1:], dtype=torch.int64)
    for part in parts:
        tokens, mask = cache.batch(part, "cpu")
        total, count = total + (tokens * mask[..., None]).sum(dim=0), count + mask.sum(dim=0)
    mean = total / count.clamp_min(1)[:, None]
    squares = torch.zeros(mean.shape[1])
    for part in parts:
        tokens, mask = cache.batch(part, "cpu")
        squares = squares + ((tokens * mask[..., None] - mean).square() * mask[..., None]).sum(dim=(0, 1))
    return mean, (squares / count.sum()).sqrt()


def _optimize(
    config: PretrainTokenConfig, encoder: RLTokenEncoder, decoder: RLTokenDecoder, cache: TokenCache, rows: np.ndarray
) -> dict[str, float]:
    parameters = [*encoder.parameters(), *decoder.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    bfloat16 = has_bfloat16(config.device) if config.bfloat16 is None else config.bfloat16
    rng = np.random.default_rng(config.seed)
    noise = torch.Generator(config.device).manual_seed(config.seed)
    began, step, done = time.monotonic(), 0, 0.0
    smooth: dict[str, float] = {}
    bar = tqdm(total=config.steps, disable=not config.progress, desc="pretrain-token", mininterval=2.0)
    while step < config.steps and done < 1.0:
        rate = warmup_cosine(step, config.warmup_steps, done)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * rate
        tokens, mask = cache.batch(rng.choice(rows, config.batch_size), config.device)
        z = encoder.standardize(tokens)
        with torch.autocast(torch.device(config.device).type, dtype=torch.bfloat16, enabled=bfloat16):
            prediction = decoder(encoder.encode(z, mask), z, config.context_dropout, noise)
            losses = reconstruction_loss(prediction, z, mask)
        optimizer.zero_grad(set_to_none=True)
        losses["mean"].backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        for key, value in losses.items():
            number = float(value.detach())
            smooth[f"L_ro_{key}"] = 0.98 * smooth.get(f"L_ro_{key}", number) + 0.02 * number
        done = step / config.steps
        if config.minutes is not None:
            done = max(done, (time.monotonic() - began) / (60 * config.minutes))
        bar.update()
        if step % 20 == 0:
            bar.set_postfix({key: f"{value:.4f}" for key, value in smooth.items()}, refresh=False)
    bar.close()
    return {**smooth, "steps": step, "seconds_per_step": (time.monotonic() - began) / step}
