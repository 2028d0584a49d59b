"""Stage 1: train the RL token on a frozen VLA's tokens of demonstrations."""

import math
import time
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import yaml

from rlt_gym.core.files import atomic_write, git_commit
from rlt_gym.data.demo_set import DemoReader
from rlt_gym.data.lerobot import LeRobotSettings
from rlt_gym.data.sources import demo_sources
from rlt_gym.rl_token.base import require_tokens
from rlt_gym.rl_token.decoder import RLTokenDecoder
from rlt_gym.rl_token.encoder import RLTokenConfig, RLTokenEncoder, count_parameters
from rlt_gym.rl_token.held_out import evaluate_token, probe_objects
from rlt_gym.rl_token.io import load_rl_token, read_autoencoder, save_rl_token
from rlt_gym.rl_token.moving import MovingTokens, moving_tokens
from rlt_gym.rl_token.token_shards import TokenShards
from rlt_gym.rl_token.tokens import Tokens, cache_tokens
from rlt_gym.rl_token.trainer import LOSSES, OPTIMIZERS, SCHEDULES, Autoencoder, TokenTrainer
from rlt_gym.vla.base import FrozenVLA
from rlt_gym.vla.demos import check_demos, frame_size
from rlt_gym.vla.registry import load_vla

#: Settings that a resumed training may change: none of them changes a step that was taken.
_FREE = {"resume", "steps", "epochs", "minutes", "progress", "threads", "device", "save_every", "memory_limit"}


@dataclass
class PretrainTokenConfig(LeRobotSettings):
    """
    Settings of :func:`pretrain_token`.

    :param demos: Demonstration files, glob patterns or folders, also of LeRobot datasets. Their tokens are computed
        first and kept in memory.
    :param vla: The frozen policy: a name or scheme of ``rlt list``, the path of a file that ``rlt train-vla`` wrote, or
        "package.module:Class" of an allowed package (``RLT_ALLOWED_IMPORTS``). Any other VLA is an argument of
        :func:`pretrain_token` itself. ``None`` = "mini", with ``tokens`` whichever they are of.
    :param vla_kwargs: Further arguments of whoever makes this VLA.
    :param output: ``.safetensors`` file to write; the report goes beside it with suffix ``.json``, the weights of the
        last step with ``_last`` in their name, and metrics, TensorBoard's events and the checkpoint into a folder with
        ``_training``.
    :param tokens: In place of ``demos``, a folder that ``rlt encode-tokens`` wrote, for sets of any size.
    :param alpha: Weight of the VLA's own loss of imitation on ``demos``: the VLA learns together with the RL token, and
        is written beside ``output`` with ``_vla`` in its name, a LeRobot policy as a folder. For VLAs that can learn
        here: MiniVLA; ACT, SmolVLA, PI0 and PI05 of LeRobot. Adam divides a gradient by its size, so any number > 0
        does nearly the same. 0 = the VLA stays frozen.
    :param vla_learning_rate: Peak learning rate of the VLA's weights, with ``alpha``, under the same schedule.
    :param init: An RL token of the same architecture with which the training begins.
    :param resume: Folder of an interrupted training, to go on with.
    :param z_dim: Width of the RL token, ``None`` = the VLA's width.
    :param width: Width of encoder and decoder; ``None`` = the VLA's width.
    :param layers: Layers of each.
    :param heads: Attention heads of each.
    :param mlp_ratio: Hidden width of their MLPs, in widths.
    :param kinds: Kinds of tokens to read, ``("all",)`` or e.g. ``("image",)``.
    :param context_dropout: See :class:`~rlt_gym.rl_token.encoder.RLTokenConfig`.
    :param steps: Gradient steps (paper: 2,000 to 10,000); ``None`` = 2,000, or with ``epochs`` as many as they take.
    :param epochs: Passes over the training rows. With ``steps``, whichever ends first.
    :param minutes: Wall-clock budget of the steps; ``None`` = no limit.
    :param batch_size: Observations per forward pass.
    :param accumulate: Forward passes per gradient step.
    :param loss: "mean", the squared error averaged over tokens and channels; "token", summed over channels and averaged
        over tokens; or "sum", summed over both and averaged over the batch, as the paper writes it.
    :param optimizer: "adamw" or "adam".
    :param learning_rate: Its peak rate.
    :param weight_decay: Its weight decay.
    :param schedule: After the warm-up "cosine", half a cosine down to 2 %, or "constant".
    :param warmup_steps: Linear warm-up.
    :param clip_norm: Norm to which gradients are cut.
    :param ema_decay: Decay of the moving average of the weights, which is what ``output`` gets. It begins as
        ``(1 + step) / (10 + step)``. 0 = no average.
    :param eval_every: Steps between computations of the held-out loss; ``output`` gets the weights with the lowest.
        ``None`` = twenty times.
    :param save_every: Steps between checkpoints for ``resume``; 0 = none.
    :param held_out: Fraction of each task's demonstrations (whole ones) for validation.
    :param frame_stride: Use one observation of ``demos`` in this many.
    :param max_demos: Most of ``demos`` per task; ``None`` = all.
    :param image_size: Frames of ``demos`` are average-pooled to this edge in pixels while they are loaded; ``None`` =
        to the size to which the VLA resizes them, if it says so and if that divides their own, else not at all.
    :param memory_limit: Most GiB of memory for the tokens of ``demos``.
    :param bfloat16: Train under bfloat16 autocast; ``None`` = if ``device`` has it in hardware.
    :param threads: torch threads, ``None`` = leave as they are.
    :param device: Device to train on.
    :param seed: Seed of initialization, split, order of the rows and context dropout.
    :param progress: Show a progress bar and the report.
    """

    demos: list[str] = field(default_factory=list)
    vla: str | None = None
    vla_kwargs: dict[str, Any] | None = None
    output: str = "rl_token.safetensors"
    tokens: str | None = None
    alpha: float = 0.0
    vla_learning_rate: float = 1e-4
    init: str | None = None
    resume: str | None = None
    z_dim: int | None = None
    width: int | None = None
    layers: int = 2
    heads: int = 4
    mlp_ratio: int = 2
    kinds: tuple[str, ...] = ("all",)
    context_dropout: float = 0.9
    steps: int | None = None
    epochs: float | None = None
    minutes: float | None = None
    batch_size: int = 64
    accumulate: int = 1
    loss: str = "mean"
    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    schedule: str = "cosine"
    warmup_steps: int = 100
    clip_norm: float = 1.0
    ema_decay: float = 0.999
    eval_every: int | None = None
    save_every: int = 500
    held_out: float = 0.1
    frame_stride: int = 4
    max_demos: int | None = None
    image_size: int | None = None
    memory_limit: float = 4.0
    bfloat16: bool | None = None
    threads: int | None = 1
    device: str = "cpu"
    seed: int = 0
    progress: bool = True

    #: shipped configurations, which ``--config`` takes by name
    configs: ClassVar[Traversable] = files("rlt_gym.rl_token") / "configs"

    def __post_init__(self) -> None:
        if self.steps is None and self.epochs is None:
            self.steps = 2000
        self.kinds = tuple(self.kinds)
        for name, least in (
            ("steps", 1), ("batch_size", 1), ("accumulate", 1), ("eval_every", 1), ("frame_stride", 1),
            ("save_every", 0), ("memory_limit", 0), ("learning_rate", 0), ("weight_decay", 0), ("warmup_steps", 0),
            ("alpha", 0), ("vla_learning_rate", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ValueError(f"PretrainTokenConfig.{name} is {value}; it must be at least {least}.")
        for name in ("epochs", "minutes", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"PretrainTokenConfig.{name} is {value}; it must be positive.")
        if not 0 < self.held_out < 1:
            raise ValueError(f"PretrainTokenConfig.held_out is {self.held_out}; it must be in (0, 1).")
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"PretrainTokenConfig.ema_decay is {self.ema_decay}; it must be in [0, 1).")
        for name, choices in (("loss", LOSSES), ("optimizer", OPTIMIZERS), ("schedule", SCHEDULES)):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"PretrainTokenConfig.{name} is {getattr(self, name)!r}; it must be one of {', '.join(choices)}."
                )
        if self.alpha and self.tokens is not None:
            raise ValueError(
                f"PretrainTokenConfig.alpha is {self.alpha}, and tokens on disk are those of a frozen VLA: give demos."
            )
        if Path(self.output).suffix != ".safetensors":
            raise ValueError(f"PretrainTokenConfig.output is {self.output!r}; it must end in .safetensors.")

    @property
    def folder(self) -> Path:
        """Where metrics and checkpoints go."""
        path = Path(self.output)
        return path.with_name(f"{path.stem}_training")


def pretrain_token(config: PretrainTokenConfig, vla: FrozenVLA | None = None) -> RLTokenEncoder:
    """
    Train an RL token by eq. (2) with a frozen VLA, write it, and report on demonstrations that were held out.

    :param config: What to do.
    :param vla: The VLA, if it is not one that ``config.vla`` can name.
    :return: The frozen encoder as read back from ``config.output``.
    :raises ValueError: If files are missing or damaged, no demonstration can be held out, tokens are another VLA's, the
        settings differ from those of the training to resume, or the loss diverges.
    """
    import torch._dynamo  # first, since loading it after OSMesa crashes the process

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    began = time.monotonic()
    if config.resume is not None:
        _check_resume(config)
    tokens = _tokens(config, vla)
    train_rows, held_rows = tokens.rows.split(config.held_out, config.seed)
    if not len(held_rows):
        raise ValueError(
            "No demonstration can be held out: a task needs at least two. Collect more with `rlt collect`."
        )
    model = _model(config, tokens, train_rows)
    trainer = TokenTrainer(config, model, tokens, train_rows, held_rows, config.folder)
    if config.resume is None:
        _save_settings(config)
    else:
        trainer.load()
    history = trainer.run()
    best = trainer.best
    if isinstance(tokens, MovingTokens):
        tokens = _finish_vla(config, tokens, [best, trainer.average])
    report = _report(best, tokens, train_rows, held_rows)
    provenance: dict[str, Any] = {
        "kind": "rl_token",
        "config": asdict(config),
        "git_commit": git_commit(),
        "vla": tokens.origin.vla,
        "demos": tokens.rows.files,
        "rows": {"train": len(train_rows), "held_out": len(held_rows)},
        "parameters": {"encoder": count_parameters(best.encoder), "decoder": count_parameters(best.decoder)},
        "train": history,
        "held_out": report,
        "wall_seconds": round(time.monotonic() - began, 1),
        "torch": torch.__version__,
    }
    output = Path(config.output)
    last = trainer.average
    at_last = provenance | {"held_out": _report(last, tokens, train_rows, held_rows)}
    save_rl_token(output.with_name(f"{output.stem}_last.safetensors"), last.encoder, last.decoder, at_last)
    save_rl_token(output, best.encoder, best.decoder, provenance)
    if config.progress:
        print("\n".join(f"{key:>28}: {value:.4f}" for key, value in report.items()))
    trained = load_rl_token(output, device=config.device)
    assert isinstance(trained, RLTokenEncoder)
    return trained


def _vla_path(config: PretrainTokenConfig, moving: MovingTokens) -> Path:
    """Return where the VLA that learns will be written."""
    output = Path(config.output)
    return output.with_name(f"{output.stem}_vla{moving.learner.suffix}")


def _finish_vla(config: PretrainTokenConfig, moving: MovingTokens, models: list[Autoencoder]) -> Tokens:
    """Write the VLA that has learned, bind the encoders to it, and return its tokens."""
    vla = moving.learner.save(_vla_path(config, moving), {"joint": asdict(config)})
    for model in models:
        model.encoder.vla_fingerprint, model.encoder.vla_name = vla.fingerprint(), vla.spec.name
    # the VLA is written already: a limit must not lose the token now
    return _frozen_tokens(replace(config, memory_limit=math.inf), load_vla(vla, config.device))


def _report(model: Autoencoder, tokens: Tokens, train_rows: np.ndarray, held_rows: np.ndarray) -> dict[str, float]:
    """Measure an encoder and its decoder on held-out demonstrations."""
    found = evaluate_token(model.encoder, model.decoder, tokens, train_rows, held_rows)
    return found | probe_objects(model.encoder, tokens, train_rows, held_rows)


def _tokens(config: PretrainTokenConfig, vla: FrozenVLA | None) -> Tokens:
    """Read tokens from disk, or compute those of demonstrations."""
    if (config.tokens is None) == (not config.demos):
        raise ValueError("Give either demos or tokens (a folder that `rlt encode-tokens` wrote).")
    if vla is None and (config.vla is not None or config.tokens is None):
        vla = load_vla(config.vla or "mini", config.device, config.vla_kwargs)
    elif vla is not None:
        vla = load_vla(vla, config.device)
    if vla is not None:
        require_tokens(vla)
    if config.tokens is None:
        assert vla is not None
        check_demos(vla.spec, demo_sources(config.demos, config))
        vla.spec.check_kinds(config.kinds)
        if config.alpha:
            moving = moving_tokens(
                vla, config.demos, config.max_demos, config.frame_stride, config.kinds, config.alpha,
                config.vla_learning_rate, config,
            )  # fmt: skip
            if _vla_path(config, moving).is_dir():
                raise ValueError(f"{_vla_path(config, moving)} is there already: remove it, or choose another output.")
            return moving
        return _frozen_tokens(config, vla)
    tokens = TokenShards(config.tokens)
    if vla is not None and vla.fingerprint() != tokens.origin.fingerprint:
        raise ValueError(
            f"{config.tokens} has tokens of the VLA {tokens.origin.vla!r} with fingerprint "
            f"{tokens.origin.fingerprint[:12]}..., not of {vla.spec.name!r} with {vla.fingerprint()[:12]}...: encode "
            "them with this VLA, or leave out --vla."
        )
    if tokens.origin.kinds != config.kinds:
        raise ValueError(
            f"{config.tokens} has the kinds {list(tokens.origin.kinds)}, and kinds is {list(config.kinds)}: encode the "
            f"tokens again, or give --kinds '[{', '.join(tokens.origin.kinds)}]'."
        )
    return tokens


def _frozen_tokens(config: PretrainTokenConfig, vla: FrozenVLA) -> Tokens:
    demos = DemoReader(config.demos, config.max_demos, config.frame_stride, lerobot=config)
    size = frame_size(vla.spec, demos.edge, config.image_size)
    return cache_tokens(vla, demos, config.kinds, size, config.batch_size, config.progress, config.memory_limit)


def _model(config: PretrainTokenConfig, tokens: Tokens, train_rows: np.ndarray) -> Autoencoder:
    """Make encoder and decoder, new or from ``config.init``, on the device."""
    origin = tokens.origin
    torch.manual_seed(config.seed)
    wanted = RLTokenConfig(
        token_dim=origin.token_dim,
        max_tokens=origin.max_tokens or tokens.count,
        z_dim=config.z_dim,
        width=config.width,
        layers=config.layers,
        heads=config.heads,
        mlp_ratio=config.mlp_ratio,
        kinds=config.kinds,
        context_dropout=config.context_dropout,
    )
    if config.init is None:
        encoder, decoder = RLTokenEncoder(wanted, origin.fingerprint, origin.vla), RLTokenDecoder(wanted)
        encoder.set_statistics(*_statistics(tokens, train_rows))
    else:
        encoder, decoder = read_autoencoder(config.init)
        names = [field.name for field in fields(wanted) if field.name != "context_dropout"]
        differ = {name: getattr(encoder.config, name) for name in names}
        differ = {name: value for name, value in differ.items() if value != getattr(wanted, name)}
        if differ:
            raise ValueError(f"{config.init} has {differ}: give the same settings, or leave out --init.")
        if encoder.vla_fingerprint != origin.fingerprint:
            raise ValueError(
                f"{config.init} belongs to the VLA {encoder.vla_name!r}, and the tokens to {origin.vla!r}."
            )
        encoder.config = decoder.config = wanted
    return Autoencoder(encoder.to(config.device), decoder.to(config.device))


def _plain(config: PretrainTokenConfig) -> dict[str, Any]:
    """Return the settings as YAML has them."""
    return {**asdict(config), "kinds": list(config.kinds)}


def _save_settings(config: PretrainTokenConfig) -> None:
    with atomic_write(config.folder / "config.yaml") as temporary:
        temporary.write_text(yaml.safe_dump(_plain(config), sort_keys=False), encoding="utf-8")


def _check_resume(config: PretrainTokenConfig) -> None:
    """
    Compare the settings with those of the training to resume.

    :raises ValueError: If the folder is not the one of ``output``, has no settings, or others.
    """
    path = config.folder / "config.yaml"
    if Path(str(config.resume)).resolve() != config.folder.resolve():
        raise ValueError(f"resume is {config.resume}, and the training of {config.output} is in {config.folder}.")
    try:
        # a training of an earlier version has no settings that came later
        saved = _plain(PretrainTokenConfig()) | yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"There is no training to resume in {config.resume} ({error}).") from error
    given = _plain(config)
    differ = [name for name in given if name not in _FREE and given[name] != saved.get(name)]
    if differ:
        changes = ", ".join(f"{name} {saved.get(name)!r} -> {given[name]!r}" for name in differ)
        raise ValueError(f"A resumed training keeps its settings, and these differ: {changes}. Begin anew.")


def _statistics(tokens: Tokens, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean per place and channel (N, H), and the channels' deviations from it (H,), over at most 2000 rows."""
    parts = list(tokens.batches(rows[:: max(1, len(rows) // 2000)], most=len(rows), limit=1 << 30))
    total, count = torch.zeros(tokens.count, tokens.origin.token_dim), torch.zeros(tokens.count, dtype=torch.int64)
    for part in parts:
        found, mask = tokens.batch(part, "cpu")
        total, count = total + (found * mask[..., None]).sum(dim=0), count + mask.sum(dim=0)
    mean = total / count.clamp_min(1)[:, None]
    squares = torch.zeros(mean.shape[1])
    for part in parts:
        found, mask = tokens.batch(part, "cpu")
        squares = squares + ((found * mask[..., None] - mean).square() * mask[..., None]).sum(dim=(0, 1))
    return mean, (squares / count.sum()).sqrt()
