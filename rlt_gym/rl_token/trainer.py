"""The gradient steps of stage 1: averaged weights, checkpoints, metrics, and the best weights by held-out loss."""

from __future__ import annotations

import copy
import csv
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from rlt_gym.core.files import atomic_write
from rlt_gym.core.training import has_bfloat16, warmup_cosine
from rlt_gym.rl_token.decoder import RLTokenDecoder, reconstruction_loss
from rlt_gym.rl_token.encoder import RLTokenEncoder
from rlt_gym.rl_token.moving import MovingTokens
from rlt_gym.rl_token.tokens import Tokens

if TYPE_CHECKING:
    from rlt_gym.rl_token.pretrain import PretrainTokenConfig

OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
LOSSES = ("mean", "token", "sum")
SCHEDULES = ("cosine", "constant")
#: Most held-out rows for the loss during training.
HELD_OUT_ROWS = 512
#: Columns of metrics.csv. The loss on held-out rows stands in the rows in which it was computed.
COLUMNS = (
    "step", "epoch", "learning_rate", "gradient_norm", "L_ro_mean", "L_ro_token", "L_ro_sum", "held_out_L_ro",
    "L_vla", "seconds",
)  # fmt: skip


@dataclass
class Autoencoder:
    """
    An encoder with the decoder that trains it.

    :param encoder: The encoder.
    :param decoder: The decoder.
    """

    encoder: RLTokenEncoder
    decoder: RLTokenDecoder

    def modules(self) -> nn.ModuleList:
        """Both as one module."""
        return nn.ModuleList([self.encoder, self.decoder])

    def losses(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor,
        context_dropout: float,
        generator: torch.Generator | None = None,
    ) -> dict[str, torch.Tensor]:
        """
        Compute the loss of a batch.

        :param tokens: (B, N, H) as the VLA gives them.
        :param mask: bool (B, N).
        :param context_dropout: Probability that an earlier token is blanked.
        :param generator: Source of the dropout.
        :return: As :func:`~rlt_gym.rl_token.decoder.reconstruction_loss`.
        """
        z = self.encoder.standardize(tokens)
        prediction = self.decoder(self.encoder.encode(z, mask), z, context_dropout, generator)
        return reconstruction_loss(prediction, z, mask)


class TokenTrainer:
    """
    Trains an encoder and its decoder.

    Which rows a step reads and what its context dropout blanks depend on the seed and the number of the step only, so
    a resumed training goes on exactly as one that was not interrupted (on a CPU, bit for bit).

    :param config: Settings.
    :param model: What to train, on its device.
    :param tokens: The VLA's tokens; if they are :class:`~rlt_gym.rl_token.moving.MovingTokens`, the VLA learns as well.
    :param train_rows: Rows to train on.
    :param held_rows: Rows for the held-out loss.
    :param folder: Where metrics and the checkpoint go.
    """

    def __init__(
        self,
        config: PretrainTokenConfig,
        model: Autoencoder,
        tokens: Tokens,
        train_rows: np.ndarray,
        held_rows: np.ndarray,
        folder: Path,
    ) -> None:
        self.config = config
        self.model = model
        self.tokens = tokens
        self.moving = tokens if isinstance(tokens, MovingTokens) else None
        self.train_rows = train_rows
        self.held_rows = held_rows[:: max(1, len(held_rows) // HELD_OUT_ROWS)]
        self.folder = folder
        self.average = copy.deepcopy(model) if config.ema_decay else model
        self.bfloat16 = has_bfloat16(config.device) if config.bfloat16 is None else config.bfloat16
        self.parameters = list(model.modules().parameters())
        self.optimizer = OPTIMIZERS[config.optimizer](
            self.parameters, lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=config.weight_decay, fused=True
        )
        self.best = copy.deepcopy(self.average)
        self.state: dict[str, Any] = {"step": 0, "seconds": 0.0, "best_loss": math.inf, "best_step": 0, "smooth": {}}
        rows_per_step = config.batch_size * config.accumulate
        self.epochs_per_step = rows_per_step / len(train_rows)
        counts = [] if config.steps is None else [config.steps]
        if config.epochs is not None:
            counts.append(math.ceil(config.epochs * len(train_rows) / rows_per_step))
        self.total = min(counts)
        self.eval_every = config.eval_every or max(1, self.total // 20)

    def batch_rows(self, number: int) -> np.ndarray:
        """
        Choose the rows of a batch: every row once per epoch, in an order of the epoch's own.

        :param number: Of the batch, counted from 0.
        :return: Row numbers (batch_size,).
        """
        size, count = self.config.batch_size, len(self.train_rows)
        places = np.arange(number * size, (number + 1) * size)
        orders = {
            epoch: np.random.default_rng([self.config.seed, int(epoch)]).permutation(count)
            for epoch in np.unique(places // count)
        }
        return self.train_rows[[orders[place // count][place % count] for place in places]]

    def run(self) -> dict[str, Any]:
        """
        Take the steps that are left.

        Afterwards :attr:`best` has the averaged weights with the lowest held-out loss, and :attr:`average` those of the
        last step.

        :return: Smoothed training losses, steps, epochs, seconds per step, and when the best weights were found.
        :raises ValueError: If the loss is not finite.
        """
        config, state = self.config, self.state
        began = time.monotonic() - state["seconds"]
        done = self._done(state["seconds"])
        bar = tqdm(
            total=self.total, initial=state["step"], disable=not config.progress, desc="pretrain-token", mininterval=2.0
        )
        with _Metrics(self.folder, state["step"]) as metrics, bar:
            while done < 1.0:
                row = self._step(done)
                state["seconds"] = time.monotonic() - began
                done = self._done(state["seconds"])
                if state["step"] % self.eval_every == 0 or done >= 1.0:
                    row["held_out_L_ro"] = self.evaluate()
                    # a VLA that moves leaves earlier weights behind
                    if row["held_out_L_ro"] < state["best_loss"] or self.moving is not None:
                        state["best_loss"], state["best_step"] = row["held_out_L_ro"], state["step"]
                        self.best = copy.deepcopy(self.average)
                metrics.write({**row, "seconds": state["seconds"]})
                if config.save_every and state["step"] % config.save_every == 0:
                    self.save()
                bar.update()
                if state["step"] % 20 == 0:
                    bar.set_postfix({key: f"{value:.4f}" for key, value in state["smooth"].items()}, refresh=False)
        return {
            **state["smooth"],
            "steps": state["step"],
            "epochs": state["step"] * self.epochs_per_step,
            "seconds_per_step": state["seconds"] / state["step"],
            "best_step": state["best_step"],
            "best_held_out_L_ro": state["best_loss"],
        }

    def _done(self, seconds: float) -> float:
        """Fraction of the training that is over, by steps or by wall clock."""
        done = self.state["step"] / self.total
        return done if self.config.minutes is None else max(done, seconds / (60 * self.config.minutes))

    def _step(self, done: float) -> dict[str, float]:
        """Take one optimizer step, return its row of the metrics."""
        config, step = self.config, self.state["step"]
        rate = warmup_cosine(step, config.warmup_steps, done if config.schedule == "cosine" else 0.0)
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate * rate
        self.optimizer.zero_grad(set_to_none=True)
        sums: dict[str, float] = {}
        for part in range(config.accumulate):
            number = step * config.accumulate + part
            noise = torch.Generator(self.device).manual_seed(config.seed * 2**32 + number)
            rows, share = self.batch_rows(number), 1 / config.accumulate
            if self.moving is None:
                tokens, mask = self.tokens.batch(rows, self.device)
            else:
                tokens, mask, imitation = self.moving.learn(rows, config.seed * 2**32 + number, share)
                sums["L_vla"] = sums.get("L_vla", 0.0) + imitation * share
            losses = self._losses(self.model, tokens, mask, config.context_dropout, noise)
            (losses[config.loss] / config.accumulate).backward()
            for key, value in losses.items():
                sums[f"L_ro_{key}"] = sums.get(f"L_ro_{key}", 0.0) + float(value.detach()) / config.accumulate
        if not math.isfinite(sums["L_ro_mean"]):
            raise ValueError(f"Training diverged in step {step + 1} (loss is not finite); lower learning_rate.")
        norm = nn.utils.clip_grad_norm_(self.parameters, config.clip_norm)
        self.optimizer.step()
        if self.moving is not None:
            self.moving.step(rate, config.clip_norm)
        step = self.state["step"] = step + 1
        if self.average is not self.model:
            decay = min(config.ema_decay, (1 + step) / (10 + step))
            with torch.no_grad():
                average = [p.detach() for p in self.average.modules().parameters()]
                torch._foreach_lerp_(average, [p.detach() for p in self.parameters], 1 - decay)
        smooth = self.state["smooth"]
        for key, number in sums.items():
            smooth[key] = 0.98 * smooth.get(key, number) + 0.02 * number
        about = {"step": step, "epoch": step * self.epochs_per_step, "learning_rate": config.learning_rate * rate}
        return about | {"gradient_norm": float(norm)} | sums

    def _losses(
        self,
        model: Autoencoder,
        tokens: torch.Tensor,
        mask: torch.Tensor,
        context_dropout: float,
        noise: torch.Generator | None = None,
    ) -> dict[str, torch.Tensor]:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bfloat16):
            return model.losses(tokens, mask, context_dropout, noise)

    @property
    def device(self) -> torch.device:
        """Where it trains."""
        return self.model.encoder.e_rl.device

    @torch.no_grad()
    def evaluate(self) -> float:
        """
        Compute the loss of the averaged weights on held-out rows, without chance.

        A decoder that was trained with context dropout sees ``z_rl`` alone, since that is what stage 2 gets; one that
        was trained without sees every earlier token, as in its training.

        :return: Mean squared error per token and channel.
        """
        total, context_dropout = 0.0, float(self.config.context_dropout > 0)
        for part in self.tokens.batches(self.held_rows):
            loss = self._losses(self.average, *self.tokens.batch(part, self.device), context_dropout)["mean"]
            total += float(loss) * len(part) / len(self.held_rows)
        return total

    def save(self) -> None:
        """Write what :meth:`load` needs, atomically: a killed training loses no more than ``save_every`` steps."""
        models = {"model": self.model, "average": self.average, "best": self.best}
        content = {name: model.modules().state_dict() for name, model in models.items()}
        content |= {"optimizer": self.optimizer.state_dict(), "state": self.state}
        if self.moving is not None:
            content["vla"] = self.moving.state_dict()
        with atomic_write(checkpoint_path(self.folder)) as temporary:
            torch.save(content, temporary)

    def load(self) -> None:
        """
        Go on from the checkpoint in :attr:`folder`.

        :raises ValueError: If there is none, or it cannot be read.
        """
        path = checkpoint_path(self.folder)
        try:
            content = torch.load(path, map_location=self.device, weights_only=True)
            for name, model in (("model", self.model), ("average", self.average), ("best", self.best)):
                model.modules().load_state_dict(content[name])
            self.optimizer.load_state_dict(content["optimizer"])
            if self.moving is not None:
                self.moving.load_state_dict(content["vla"])
            self.state = content["state"]
        except FileNotFoundError as error:
            raise ValueError(f"There is no checkpoint {path}: the training was stopped before it.") from error
        except Exception as error:  # torch.load raises errors of many classes for a damaged file
            raise ValueError(f"{path} cannot be read ({' '.join(str(error).split())[:200]}): begin anew.") from error


def checkpoint_path(folder: Path) -> Path:
    """
    Name the file of the checkpoint.

    :param folder: Of the training.
    :return: Its path.
    """
    return folder / "checkpoint.pt"


class _Metrics:
    """
    Writes metrics.csv and TensorBoard's events, a row per step.

    :param folder: Where they go.
    :param step: Steps that were taken before; later rows of an interrupted training are removed.
    """

    def __init__(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.csv"
        kept = []
        if step and path.exists():
            with open(path, newline="") as file:
                kept = [row for row in csv.DictReader(file) if int(row["step"]) <= step]
        with atomic_write(path) as temporary, open(temporary, "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(kept)
        self._file = open(path, "a", newline="")
        self._csv = csv.DictWriter(self._file, COLUMNS)
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)

    def write(self, row: dict[str, float]) -> None:
        """
        Add a step.

        :param row: Column -> number.
        """
        self._csv.writerow(row)
        self._file.flush()
        for key, value in row.items():
            if key != "step":
                self._board.add_scalar(f"pretrain_token/{key}", value, int(row["step"]))

    def __enter__(self) -> _Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._board.close()
