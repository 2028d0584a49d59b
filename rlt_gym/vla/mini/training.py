"""Behavior cloning of a :class:`~rlt_gym.vla.mini.model.MiniVLA` on demonstration files."""

import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from rlt_gym.core.files import git_commit
from rlt_gym.core.training import has_bfloat16, warmup_cosine
from rlt_gym.data.demo_set import DemoReader, DemoSet, load_demo_set
from rlt_gym.data.lerobot import LeRobotSettings
from rlt_gym.data.sources import demo_sources
from rlt_gym.vla.mini.model import MiniVLA, MiniVLAConfig, MiniVLANet
from rlt_gym.vla.registry import load_vla


@dataclass
class TrainVLAConfig(LeRobotSettings):
    """
    Settings of :func:`train_vla`.

    :param demos: Demonstration files, glob patterns or folders, one file per task; folders of LeRobot datasets.
    :param output: ``.safetensors`` file to write; provenance goes beside it with suffix ``.json``.
    :param model: Architecture.
    :param init: MiniVLA to go on from (fine-tuning), a name of ``rlt list`` or a file. Its architecture and its
        normalization of proprioception are kept, whatever ``demos`` are. ``None`` = train from scratch.
    :param steps: Gradient steps.
    :param minutes: Wall-clock budget; the learning-rate schedule follows whichever of the two is nearer its end, so
        that a slow machine still ends with a decayed rate. ``None`` = only ``steps`` count (for exact repetition).
    :param batch_size: Rows per step.
    :param learning_rate: Peak rate of AdamW.
    :param warmup_steps: Linear warm-up.
    :param weight_decay: Of AdamW, on matrices only.
    :param ema_decay: Decay of the moving average of the weights; the average is written. The decay is smaller in the
        first steps.
    :param aux_weight: Weight of the auxiliary loss (object positions relative to the gripper, read from image tokens).
    :param gripper_weight: Weight of the gripper's error relative to a pose dimension's.
    :param shift_agentview: Largest random shift in pixels of the pooled frame of the robot's first camera.
    :param shift_wrist: The same for its other cameras.
    :param brightness: Largest relative change of brightness and contrast.
    :param proprio_noise: Standard deviation of noise on the normalized proprioception.
    :param held_out: Fraction of each task's demonstrations kept for the held-out loss.
    :param max_demos: Most demonstrations per task; ``None`` = all. Fewer make a weaker policy.
    :param blind: Learn a policy that cannot see: the weights of the first convolution are zero and stay so. It shows
        how much of a task can be solved without pictures.
    :param frame_stride: Keep one observation in this many in memory.
    :param bfloat16: Train under bfloat16 autocast; ``None`` = if ``device`` has it in hardware.
    :param threads: torch threads, ``None`` = leave as they are.
    :param device: Device to train on.
    :param seed: Seed of initialization, sampling and augmentation.
    :param eval_states: Number of selection states of each task to play after the training. The success rates go into
        the provenance. Needs files written by ``rlt collect``. 0 = play none.
    :param assets: LIBERO's assets to play them on; ``None`` = the environment's default.
    :param progress: Show a progress bar.
    """

    demos: list[str] = field(default_factory=list)
    output: str = "mini_vla.safetensors"
    model: MiniVLAConfig = field(default_factory=MiniVLAConfig)
    init: str | None = None
    steps: int = 4000
    minutes: float | None = None
    batch_size: int = 64
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    weight_decay: float = 0.01
    ema_decay: float = 0.998
    aux_weight: float = 0.2
    gripper_weight: float = 1.0
    shift_agentview: int = 1
    shift_wrist: int = 2
    brightness: float = 0.15
    proprio_noise: float = 0.05
    held_out: float = 0.05
    max_demos: int | None = None
    blind: bool = False
    frame_stride: int = 1
    bfloat16: bool | None = None
    threads: int | None = 1
    device: str = "cpu"
    seed: int = 0
    eval_states: int = 0
    assets: str | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "frame_stride"):
            if getattr(self, name) < 1:
                raise ValueError(f"TrainVLAConfig.{name} is {getattr(self, name)}; it must be at least 1.")
        if self.minutes is not None and self.minutes <= 0:
            raise ValueError(f"TrainVLAConfig.minutes is {self.minutes}; it must be positive or None.")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"TrainVLAConfig.held_out is {self.held_out}; it must be in [0, 1).")
        if Path(self.output).suffix != ".safetensors":
            raise ValueError(f"TrainVLAConfig.output is {self.output!r}; it must end in .safetensors.")


class ObjectHead(nn.Module):
    """
    Auxiliary read-out of object positions: each object attends over the image tokens and sums their votes.

    :param width: Token width.
    :param count: Number of object slots.
    """

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.votes = nn.Linear(width, 4 * count)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """
        Read positions from image tokens.

        :param tokens: Image tokens (B, M, width).
        :return: Positions (B, count, 3), standardized.
        """
        logits, values = self.votes(tokens).float().split([self.count, 3 * self.count], dim=-1)
        values = values.view(*values.shape[:2], self.count, 3)
        return (logits.softmax(dim=1)[..., None] * values).sum(dim=1)


def random_shift(frames: np.ndarray, amount: int, rng: np.random.Generator) -> np.ndarray:
    """
    Shift each frame by its own whole number of pixels, edges replicated.

    :param frames: uint8 (B, S, S, 3).
    :param amount: Largest shift in pixels.
    :param rng: Source of randomness.
    :return: A new array of the same shape.
    """
    if amount == 0:
        return frames
    size = frames.shape[1]
    shift = rng.integers(-amount, amount + 1, size=(2, len(frames), 1))
    rows, columns = np.clip(np.arange(size) + shift, 0, size - 1)
    return frames[np.arange(len(frames))[:, None, None], rows[:, :, None], columns[:, None, :]]


class Batches:
    """
    Turns rows of a :class:`DemoSet` into network inputs and targets.

    :param config: Settings; of the training, augmentation and weights of the loss are used.
    :param data: Demonstrations.
    :param net: The network.
    :param train_rows: Rows from which the scale of object positions is measured.
    """

    def __init__(self, config: TrainVLAConfig, data: DemoSet, net: MiniVLANet, train_rows: np.ndarray) -> None:
        self.config, self.data, self.net = config, data, net
        self.device = torch.device(config.device)
        self.proprio_std = net.proprio_std.cpu().numpy()
        relative = data.object_positions - data.proprio[:, None, :3]
        self.has_objects = relative.shape[1] > 0 and bool(np.isfinite(relative).any())
        if self.has_objects:
            center = np.nanmean(relative[train_rows], axis=(0, 1))
            scale = np.nanstd(relative[train_rows], axis=(0, 1)) + 1e-3
            self.objects = ((relative - center) / scale).astype(np.float32)

    def inputs(self, rows: np.ndarray, rng: np.random.Generator | None) -> tuple[Any, ...]:
        """
        Make network inputs.

        :param rows: Rows (B,).
        :param rng: Source of the augmentation; ``None`` = no augmentation.
        :return: Arguments of :meth:`~rlt_gym.vla.mini.model.MiniVLANet.forward`.
        """
        config, data = self.config, self.data
        frames, proprio = [data.pictures[camera][rows] for camera in self.net.robot.camera_keys], data.proprio[rows]
        if rng is not None:
            shifts = [config.shift_wrist if number else config.shift_agentview for number in range(len(frames))]
            frames = [random_shift(frame, shift, rng) for frame, shift in zip(frames, shifts, strict=True)]
            noise = config.proprio_noise * self.proprio_std * rng.standard_normal(proprio.shape)
            proprio = (proprio + noise).astype(np.float32)
        images = self.net.normalized([torch.from_numpy(frame).to(self.device) for frame in frames])
        if rng is not None:
            gain = 1 + config.brightness * rng.uniform(-1, 1, (len(rows), 1, 1, 1))
            bias = 2 * config.brightness * rng.uniform(-1, 1, (len(rows), 1, 1, 1))  # frames have unit scale about 0
            a, b = (torch.as_tensor(x, dtype=torch.float32, device=self.device) for x in (gain, bias))
            images = [image * a + b for image in images]
        text = self.net.text_batch([data.instructions[task] for task in data.task[rows]])
        return (images, torch.from_numpy(proprio).to(self.device), *text)

    def losses(
        self, rows: np.ndarray, tokens: torch.Tensor, chunk: torch.Tensor, head: ObjectHead | None
    ) -> dict[str, torch.Tensor]:
        """
        Compute the L1 loss of the chunk (masked mean), split for the log, and the auxiliary loss.

        :param rows: Rows (B,).
        :param tokens: The network's tokens (B, N, width).
        :param chunk: Its chunk (B, T, d).
        :param head: Reads positions of objects; ``None`` = no auxiliary loss.
        :return: ``action``; ``pose`` and ``gripper`` if the robot has one; ``aux`` with a head.
        """
        target, mask = (torch.from_numpy(x).to(self.device) for x in self.data.chunks(rows, self.config.model.horizon))
        error = (chunk.float() - target).abs() * mask[..., None]
        per_dim = error.sum(dim=(0, 1)) / mask.sum()
        weight, gripper = torch.ones_like(per_dim), self.net.robot.gripper_index
        if gripper is not None:
            weight[gripper] = self.config.gripper_weight
        out = {"action": (per_dim * weight).sum() / weight.sum()}
        if gripper is not None:
            pose = torch.arange(len(per_dim), device=self.device) != gripper
            out |= {"pose": per_dim[pose].mean(), "gripper": per_dim[gripper]}
        if head is not None:
            objects = torch.from_numpy(self.objects[rows]).to(self.device)
            known = torch.isfinite(objects)
            difference = head(tokens[:, : -self.config.model.horizon - 2]) - torch.nan_to_num(objects)
            out["aux"] = F.smooth_l1_loss(difference[known], torch.zeros_like(difference[known]))
        return out


def _row_stream(rows: np.ndarray, batch_size: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Endless shuffled batches; each row once per epoch."""
    pool = np.zeros(0, dtype=np.int64)
    while True:
        while len(pool) < batch_size:
            pool = np.concatenate([pool, rng.permutation(rows)])
        yield pool[:batch_size]
        pool = pool[batch_size:]


def train_vla(config: TrainVLAConfig) -> MiniVLA:
    """
    Train a MiniVLA on demonstrations and write it. Demonstrations and rollouts that failed are left out.

    :param config: What to do.
    :return: The frozen policy as read back from ``config.output``.
    :raises ValueError: If demonstrations are missing or damaged, ``init`` is no MiniVLA or fits neither them nor
        ``model``, or the training diverges.
    """
    import torch._dynamo

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    began = time.monotonic()
    start = None if config.init is None else _start(config)
    if start is not None:
        config = replace(config, model=start.config)
    reader = DemoReader(config.demos, lerobot=config)
    if reader.failures and config.progress:
        print(f"{reader.failures} episodes failed and are left out")
    size = config.model.image_size
    data = load_demo_set(config.demos, size, config.max_demos, config.frame_stride, lerobot=config)
    train_rows, held_rows = data.split(config.held_out, config.seed)
    torch.manual_seed(config.seed)
    rng = np.random.default_rng(config.seed)
    net = MiniVLANet(config.model, data.robot)
    if start is not None:
        net.load_state_dict(start.net.state_dict())
    else:
        net.proprio_mean.copy_(torch.from_numpy(data.proprio[train_rows].mean(axis=0)))
        net.proprio_std.copy_(torch.from_numpy(data.proprio[train_rows].std(axis=0) + 1e-3))
    if config.blind:
        with torch.no_grad():
            net.conv1.weight.zero_()
        net.conv1.weight.requires_grad_(False)
    net.to(config.device)
    batches = Batches(config, data, net, train_rows)
    head = None
    if config.aux_weight > 0 and batches.has_objects:
        head = ObjectHead(config.model.width, batches.objects.shape[1]).to(config.device)
    history = _optimize(config, net, head, batches, train_rows, rng)
    held_out = _evaluate(batches, net, head, held_rows) if len(held_rows) else {}
    if not math.isfinite(history["action"]):
        raise ValueError("Training diverged (loss is not finite); lower learning_rate.")
    provenance: dict[str, Any] = {
        "kind": "mini_vla",
        "config": asdict(config),
        "git_commit": git_commit(),
        "init": None if start is None else {"vla": config.init, "fingerprint": start.fingerprint()},
        "demos": data.files,
        "failures_left_out": reader.failures,
        "assets": _said(config, "assets"),
        "render": _said(config, "render"),
        "frame_size": reader.edge,
        "instructions": data.instructions,
        "rows": {"train": len(train_rows), "held_out": len(held_rows)},
        "parameters": sum(p.numel() for p in net.parameters()),
        "train_losses": history,
        "held_out_losses": held_out,
        "wall_seconds": round(time.monotonic() - began, 1),
        "torch": torch.__version__,
        "success_rates": None,
    }
    MiniVLA(net, provenance).save(config.output)
    if config.eval_states:
        provenance["success_rates"] = _success_rates(config)
        MiniVLA(net, provenance).save(config.output)
    if config.progress:
        print(
            "held-out losses:",
            {key: round(value, 4) for key, value in held_out.items()},
            "->",
            os.fspath(config.output),
        )
    return MiniVLA.load(config.output)


def _start(config: TrainVLAConfig) -> MiniVLA:
    """Load the MiniVLA to go on from, and refuse one that fits neither the demonstrations nor the architecture."""
    assert config.init is not None
    start = load_vla(config.init)
    if not isinstance(start, MiniVLA):
        raise ValueError(
            f"init is {config.init!r}, a {type(start).__name__}; rlt train-vla goes on from a MiniVLA only."
        )
    if config.model not in (MiniVLAConfig(), start.config):
        raise ValueError(f"init {config.init!r} has the architecture {start.config}, and model asks for another one.")
    for source in demo_sources(config.demos, config):
        try:
            start.spec.check_render(source.made.get("render"))
        except ValueError as error:
            raise ValueError(f"{source.name} has other pictures than init {config.init!r}: {error}") from error
    return start


def _said(config: TrainVLAConfig, setting: str) -> str | None:
    """Return a setting with which all demonstrations were collected, ``None`` if it is unknown or they differ."""
    values = {source.made.get(setting) for source in demo_sources(config.demos, config)}
    return values.pop() if len(values) == 1 else None


def _success_rates(config: TrainVLAConfig) -> dict[str, Any]:
    from rlt_gym.vla.success_rates import success_rates

    played: dict[str, Any] = {"split": "selection"}
    settings: dict[str, Any] = {} if config.assets is None else {"assets": config.assets}
    # demonstrations and rollouts of a task may lie in several files
    tasks = {
        (source.made["suite"], source.made["task_id"]): source.made for source in demo_sources(config.demos, config)
    }
    for (suite, task_id), made in tasks.items():
        settings["env_id"] = made.get("env_id", "LIBERO-v0")
        vla = MiniVLA.load(config.output)
        played |= success_rates(vla, suite, [task_id], config.eval_states, progress=config.progress, **settings)
    return played


def _optimize(
    config: TrainVLAConfig,
    net: MiniVLANet,
    head: ObjectHead | None,
    batches: Batches,
    rows: np.ndarray,
    rng: np.random.Generator,
) -> dict[str, float]:
    """Run the steps, leave the averaged weights in ``net``, return smoothed losses."""
    modules: list[nn.Module] = [net] if head is None else [net, head]
    parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
    matrices, vectors = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.98), fused=True)
    bfloat16 = has_bfloat16(config.device) if config.bfloat16 is None else config.bfloat16
    average = [p.detach().clone() for p in parameters]
    smooth: dict[str, float] = {}
    stream = _row_stream(rows, config.batch_size, rng)
    began = time.monotonic()
    step, done = 0, 0.0
    bar = tqdm(total=config.steps, disable=not config.progress, desc="train-vla", mininterval=2.0)
    while step < config.steps and done < 1.0:
        rate = warmup_cosine(step, config.warmup_steps, done)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * rate
        picked = next(stream)
        inputs = batches.inputs(picked, rng)
        with torch.autocast(batches.device.type, dtype=torch.bfloat16, enabled=bfloat16):
            tokens, chunk = net(*inputs)
            losses = batches.losses(picked, tokens, chunk, head)
        loss = losses["action"] + config.aux_weight * losses.get("aux", torch.zeros(()).to(batches.device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        decay = min(config.ema_decay, (1 + step) / (10 + step))
        with torch.no_grad():
            torch._foreach_lerp_(average, [p.detach() for p in parameters], 1 - decay)
        for key, value in losses.items():
            smooth[key] = (
                float(value.detach()) if key not in smooth else 0.98 * smooth[key] + 0.02 * float(value.detach())
            )
        done = step / config.steps
        if config.minutes is not None:
            done = max(done, (time.monotonic() - began) / (60 * config.minutes))
        bar.update()
        if step % 20 == 0:
            bar.set_postfix({key: f"{value:.3f}" for key, value in smooth.items()}, refresh=False)
    bar.close()
    with torch.no_grad():
        torch._foreach_copy_([p.data for p in parameters], average)
    return {**smooth, "steps": step, "seconds_per_step": (time.monotonic() - began) / step}


def _evaluate(batches: Batches, net: MiniVLANet, head: ObjectHead | None, rows: np.ndarray) -> dict[str, float]:
    """Losses on held-out rows (at most 2048 of them, evenly spread), averaged weights, no augmentation."""
    rows = rows[:: max(1, len(rows) // 2048)]
    total: dict[str, float] = {}
    net.eval()
    with torch.no_grad():
        for start in range(0, len(rows), 256):
            part = rows[start : start + 256]
            tokens, chunk = net(*batches.inputs(part, None))
            for key, value in batches.losses(part, tokens, chunk, head).items():
                total[key] = total.get(key, 0.0) + float(value) * len(part) / len(rows)
    return total
