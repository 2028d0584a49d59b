"""Stage 1: train the RL token on demonstrations seen through a frozen VLA, and say how much it knows."""

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from rlt_gym.core.files import git_commit
from rlt_gym.data.libero_hdf5 import DemoSet, load_demo_set
from rlt_gym.rl_token.encoder import (
    RLTokenConfig,
    RLTokenDecoder,
    RLTokenEncoder,
    count_parameters,
    load_rl_token,
    reconstruction_loss,
    save_rl_token,
    select_tokens,
)
from rlt_gym.vla.base import FrozenVLA, load_vla
from rlt_gym.vla.mini.model import MiniVLA
from rlt_gym.vla.mini.training import cpu_has_bfloat16


@dataclass
class PretrainTokenConfig:
    """
    What :func:`pretrain_token` does.

    :param demos: Demonstration files, glob patterns or folders.
    :param vla: ``"mini"`` or a MiniVLA's ``.safetensors`` path (an object can be given to :func:`pretrain_token`).
    :param output: ``.safetensors`` file to write; the report goes beside it with suffix ``.json``.
    :param z_dim: Width of the RL token, ``None`` = the VLA's width.
    :param width: Width of encoder and decoder; likewise ``layers``, ``heads`` and ``mlp_ratio``.
    :param kinds: Kinds of tokens to read, ``("all",)`` or e.g. ``("image",)``.
    :param context_dropout: See :class:`~rlt_gym.rl_token.encoder.RLTokenConfig`.
    :param steps: Gradient steps (paper: 2,000 to 10,000).
    :param minutes: Wall-clock budget of the steps; ``None`` = only ``steps`` count.
    :param batch_size: Observations per step.
    :param learning_rate: Peak rate of AdamW.
    :param warmup_steps: Linear warm-up.
    :param held_out: Fraction of each task's demonstrations (whole ones) for validation.
    :param frame_stride: Use every so many-th observation.
    :param max_demos: Use at most so many demonstrations per task.
    :param image_size: Frames are pooled to this edge while loading; ``None`` = what the VLA reads.
    :param bfloat16: Train under bfloat16 autocast; ``None`` = if this processor has the instructions for it.
    :param threads: torch threads, ``None`` = leave as they are.
    :param device: Device to train on.
    :param seed: Seed of initialisation, split and sampling.
    :param progress: Show a progress bar and the report.
    """

    demos: list[str] = field(default_factory=list)
    vla: str = "mini"
    output: str = "rl_token.safetensors"
    z_dim: int | None = None
    width: int = 128
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
    bfloat16: bool | None = None
    threads: int | None = 1
    device: str = "cpu"
    seed: int = 0
    progress: bool = True

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "frame_stride"):
            if getattr(self, name) < 1:
                raise ValueError(f"PretrainTokenConfig.{name} is {getattr(self, name)}; it must be at least 1.")
        if self.minutes is not None and self.minutes <= 0:
            raise ValueError(f"PretrainTokenConfig.minutes is {self.minutes}; it must be positive or None.")
        if not 0 < self.held_out < 1:
            raise ValueError(f"PretrainTokenConfig.held_out is {self.held_out}; it must be in (0, 1).")
        if Path(self.output).suffix != ".safetensors":
            raise ValueError(f"PretrainTokenConfig.output is {self.output!r}; it must end in .safetensors.")


@dataclass
class TokenCache:
    """
    A VLA's tokens of many observations, float16.

    :param tokens: Selected tokens (R, N, H), valid ones first.
    :param mask: bool (R, N).
    """

    tokens: torch.Tensor
    mask: torch.Tensor

    def batch(self, rows: np.ndarray | torch.Tensor, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
        """
        :param rows: Row numbers.
        :param device: Where to put them.
        :return: Tokens float32 and mask.
        """
        index = torch.as_tensor(rows)
        return self.tokens[index].to(device).float(), self.mask[index].to(device)


def cache_tokens(
    vla: FrozenVLA, data: DemoSet, kinds: tuple[str, ...], batch_size: int = 64, progress: bool = False
) -> TokenCache:
    """
    Run a frozen VLA over demonstrations once.

    :param vla: The VLA.
    :param data: Demonstrations.
    :param kinds: Kinds of tokens to keep.
    :param batch_size: Observations per forward pass.
    :param progress: Show a progress bar.
    :return: The tokens of every row of ``data``.
    """
    blocks = []
    for start in tqdm(range(0, len(data), batch_size), disable=not progress, desc="tokens", mininterval=2.0):
        part = slice(start, start + batch_size)
        obs = {"agentview": data.agentview[part], "wrist": data.wrist[part], "state": data.proprio[part]}
        tasks = [data.instructions[task] for task in data.task[part]]
        output = vla.forward(obs, tasks, seed=list(range(start, start + len(tasks)))).check(vla.spec, len(tasks))
        tokens, mask = select_tokens(output, kinds)
        blocks.append((tokens.half().cpu(), mask.cpu()))
    count = max(mask.shape[1] for _, mask in blocks)
    width = vla.spec.token_dim
    cache = TokenCache(
        torch.zeros(len(data), count, width, dtype=torch.float16), torch.zeros(len(data), count, dtype=torch.bool)
    )
    start = 0
    for tokens, mask in blocks:
        cache.tokens[start : start + len(mask), : mask.shape[1]] = tokens
        cache.mask[start : start + len(mask), : mask.shape[1]] = mask
        start += len(mask)
    return cache


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
    vla = load_vla(config.vla if vla is None else vla, config.device)
    size = config.image_size or (vla.config.image_size if isinstance(vla, MiniVLA) else vla.spec.image_size or 128)
    data = load_demo_set(config.demos, size, config.max_demos, config.frame_stride)
    train_rows, held_rows = data.split(config.held_out, config.seed)
    if not len(held_rows):
        raise ValueError(
            "No demonstration can be held out: a task needs at least two. Collect more with `rlt collect`."
        )
    cache = cache_tokens(vla, data, config.kinds, config.batch_size, config.progress)

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
    history = _optimise(config, encoder, decoder, cache, train_rows)
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


def _statistics(cache: TokenCache, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean per place and channel (N, H), and the channels' deviations from it (H,), over at most 2000 rows."""
    tokens, mask = cache.batch(rows[:: max(1, len(rows) // 2000)], "cpu")
    tokens *= mask[..., None]
    mean = tokens.sum(dim=0) / mask.sum(dim=0).clamp_min(1)[:, None]
    variance = ((tokens - mean).square() * mask[..., None]).sum(dim=(0, 1)) / mask.sum()
    return mean, variance.sqrt()


def _optimise(
    config: PretrainTokenConfig, encoder: RLTokenEncoder, decoder: RLTokenDecoder, cache: TokenCache, rows: np.ndarray
) -> dict[str, float]:
    parameters = [*encoder.parameters(), *decoder.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    bfloat16 = cpu_has_bfloat16() if config.bfloat16 is None else config.bfloat16
    rng = np.random.default_rng(config.seed)
    noise = torch.Generator(config.device).manual_seed(config.seed)
    began, step, done = time.monotonic(), 0, 0.0
    smooth: dict[str, float] = {}
    bar = tqdm(total=config.steps, disable=not config.progress, desc="pretrain-token", mininterval=2.0)
    while step < config.steps and done < 1.0:
        rate = min(1.0, (step + 1) / max(1, config.warmup_steps)) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
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


def _batches(rows: np.ndarray, size: int = 256) -> Iterator[np.ndarray]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def evaluate_token(
    encoder: RLTokenEncoder, decoder: RLTokenDecoder, cache: TokenCache, train_rows: np.ndarray, held_rows: np.ndarray
) -> dict[str, float]:
    """
    Mean squared errors on held-out rows, in standardised token units. ``z_only`` blanks every earlier token, so that it
    measures ``z_rl`` alone; ``shuffled`` gives each row another row's ``z_rl``; ``position_mean`` predicts each place's
    mean over the training rows and is what a token without information reaches.

    :param encoder: The encoder.
    :param decoder: Its decoder.
    :param cache: Tokens.
    :param train_rows: Rows for the baseline's mean.
    :param held_rows: Rows to evaluate.
    :return: Named numbers.
    """
    device = encoder.e_rl.device
    with torch.no_grad():
        sums, counts = torch.zeros(0), torch.zeros(0)
        for part in _batches(train_rows[:: max(1, len(train_rows) // 4000)]):
            tokens, mask = cache.batch(part, device)
            z = encoder.standardize(tokens) * mask[..., None]
            sums, counts = (z.sum(0), mask.sum(0)) if not len(counts) else (sums + z.sum(0), counts + mask.sum(0))
        center = sums / counts.clamp_min(1)[:, None]
        totals: dict[str, float] = {}
        held_rows = np.random.default_rng(0).permutation(held_rows)[:2048]  # mixed, so that shuffling crosses episodes
        for part in _batches(held_rows):
            tokens, mask = cache.batch(part, device)
            z = encoder.standardize(tokens)
            z_rl = encoder.encode(z, mask)
            other = z_rl.roll(1, dims=0)
            losses = {
                "L_ro_teacher_forced": decoder(z_rl, z),
                "L_ro_teacher_forced_shuffled": decoder(other, z),
                "L_ro_z_only": decoder(z_rl, z, 1.0),
                "L_ro_z_only_shuffled": decoder(other, z, 1.0),
                "L_ro_position_mean": center.expand_as(z),
            }
            for key, prediction in losses.items():
                share = float(reconstruction_loss(prediction, z, mask)["mean"]) * len(part) / len(held_rows)
                totals[key] = totals.get(key, 0.0) + share
    totals["explained_by_z_only"] = 1 - totals["L_ro_z_only"] / max(totals["L_ro_position_mean"], 1e-12)
    return totals


def probe_objects(
    encoder: RLTokenEncoder, cache: TokenCache, data: DemoSet, train_rows: np.ndarray, held_rows: np.ndarray
) -> dict[str, float]:
    """
    Held-out R2 of ridge regressions to object positions: does ``z_rl`` know where things are, beyond what the arm's own
    position gives away?

    :param encoder: The encoder.
    :param cache: Tokens.
    :param data: Demonstrations with ``object_positions``.
    :param train_rows: Rows to fit on.
    :param held_rows: Rows to evaluate on.
    :return: ``probe_r2_{proprio,z_rl,z_rl_proprio}``; empty if the files have no object positions.
    """
    train_rows, held_rows = train_rows[:: max(1, len(train_rows) // 6000)], held_rows[:: max(1, len(held_rows) // 2000)]
    targets = data.object_positions.reshape(len(data), -1).astype(np.float64)
    usable = np.isfinite(targets[train_rows]).all(axis=0) & np.isfinite(targets[held_rows]).all(axis=0)
    if not usable.any():
        return {}
    targets = targets[:, usable]
    targets = targets[:, targets[train_rows].std(axis=0) > 5e-3]  # 5 mm: leave out what never moves
    if not targets.shape[1]:
        return {}
    features = {}
    for name, rows in (("train", train_rows), ("held", held_rows)):
        with torch.no_grad():
            parts = []
            for part in _batches(rows):
                tokens, mask = cache.batch(part, encoder.e_rl.device)
                parts.append(encoder.encode(encoder.standardize(tokens), mask).cpu().numpy())
        z_rl, proprio = np.concatenate(parts).astype(np.float64), data.proprio[rows].astype(np.float64)
        features[name] = {"proprio": proprio, "z_rl": z_rl, "z_rl_proprio": np.concatenate([z_rl, proprio], axis=1)}
    return {
        f"probe_r2_{key}": _ridge_r2(
            features["train"][key], targets[train_rows], features["held"][key], targets[held_rows]
        )
        for key in features["train"]
    }


def _ridge_r2(x: np.ndarray, y: np.ndarray, x_held: np.ndarray, y_held: np.ndarray, penalty: float = 1e-2) -> float:
    """Pooled R2 over the outputs, each in units of its training deviation; inputs standardised."""
    mean, std = x.mean(axis=0), x.std(axis=0) + 1e-8
    x, x_held = (x - mean) / std, (x_held - mean) / std
    center, scale = y.mean(axis=0), y.std(axis=0)
    weights = np.linalg.solve(x.T @ x + penalty * len(x) * np.eye(x.shape[1]), x.T @ ((y - center) / scale))
    residual = (y_held - center) / scale - x_held @ weights
    return float(1 - (residual**2).sum() / (((y_held - y_held.mean(axis=0)) / scale) ** 2).sum())
