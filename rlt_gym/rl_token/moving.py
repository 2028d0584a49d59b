"""
Joint stage 1: the VLA goes on imitating demonstrations while the RL token is trained on its tokens.

The loss is ``L_ro + alpha * L_vla`` (arXiv 2604.23073, algorithm 1). No gradient of ``L_ro`` reaches the VLA, since its
tokens are constants in eq. (2); so ``alpha`` only scales the VLA's own gradients.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.functional import pad

from rlt_gym.core.imports import resolve_class
from rlt_gym.data.demo_set import DemoRows
from rlt_gym.data.lerobot import LeRobotSettings
from rlt_gym.rl_token.tokens import TokenOrigin, Tokens
from rlt_gym.vla.base import FrozenVLA, VLAOutput
from rlt_gym.vla.tokens import select_tokens

#: Most rows of one forward pass without gradients.
ROWS = 256


class Learner(Protocol):
    """
    A copy of a VLA with gradients.

    A VLA that can learn has an attribute ``learner``: such a class, or its name ``"package.module:Class"``; its
    arguments are the VLA, ``demos``, ``max_demos``, ``frame_stride`` and ``lerobot`` (how LeRobot datasets are read).
    """

    net: torch.nn.Module
    #: Of the file that :meth:`save` writes, "" = a folder.
    suffix: str

    @property
    def data(self) -> DemoRows:
        """The demonstrations."""

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        """Return what learns."""

    def look(self, rows: np.ndarray) -> VLAOutput:
        """
        Run the VLA on rows without gradients, as the frozen one would.

        :param rows: Rows of the demonstrations.
        :return: Its output.
        """

    def forward(self, rows: np.ndarray, rng: np.random.Generator | None = None) -> tuple[VLAOutput, torch.Tensor]:
        """
        Run the VLA on rows.

        :param rows: Rows of the demonstrations.
        :param rng: Source of augmentation and other chance.
        :return: Its output, and its own loss of imitation.
        """

    def save(self, path: str | os.PathLike[str], provenance: dict[str, Any]) -> FrozenVLA:
        """
        Write the VLA.

        :param path: File, or folder that is not there yet.
        :param provenance: How it was trained.
        :return: The frozen VLA as read back.
        """


class MovingTokens(Tokens):
    """
    The tokens that a learning VLA gives at present.

    :param vla: Where it begins.
    :param learner: Its copy that learns.
    :param kinds: Kinds of tokens that are read.
    :param alpha: Weight of its loss.
    :param learning_rate: Peak rate of AdamW for its weights.
    :raises ValueError: If it has no such tokens.
    """

    def __init__(
        self, vla: FrozenVLA, learner: Learner, kinds: tuple[str, ...], alpha: float, learning_rate: float
    ) -> None:
        self.learner, self.alpha, self.kinds, self.learning_rate = learner, alpha, kinds, learning_rate
        self.optimizer = torch.optim.AdamW(learner.parameters(), lr=learning_rate, betas=(0.9, 0.98))
        tokens, _ = select_tokens(learner.look(np.arange(1)), kinds)
        super().__init__(TokenOrigin.of(vla, kinds), learner.data, tokens.shape[1])

    @torch.no_grad()
    def batch(self, rows: np.ndarray, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Compute the tokens of some rows.

        :param rows: Row numbers (B,).
        :param device: Where to put them.
        :return: Tokens float32 (B, N, H), valid ones first, and mask bool (B, N).
        """
        parts = [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]
        found = [select_tokens(self.learner.look(part), self.kinds) for part in parts]
        most = max(mask.shape[1] for _, mask in found)
        tokens = [pad(tokens, (0, 0, 0, most - tokens.shape[1])) for tokens, _ in found]
        masks = [pad(mask, (0, most - mask.shape[1])) for _, mask in found]
        return torch.cat(tokens).to(device), torch.cat(masks).to(device)

    def learn(self, rows: np.ndarray, seed: int, share: float) -> tuple[torch.Tensor, torch.Tensor, float]:
        """
        Add the gradients of ``alpha`` times the VLA's own loss, and give the tokens from which the RL token learns.

        :param rows: Row numbers (B,).
        :param seed: Of the augmentation.
        :param share: Of the batch in a gradient step, in (0, 1].
        :return: Tokens (B, N, H) without gradients, mask (B, N), and the loss.
        """
        output, loss = self.learner.forward(rows, np.random.default_rng(seed))
        (self.alpha * share * loss).backward()
        tokens, mask = select_tokens(output, self.kinds)
        return tokens.detach(), mask, float(loss.detach())

    def step(self, rate: float, clip_norm: float) -> None:
        """
        Take an optimizer step with the gradients that were added.

        :param rate: Learning rate relative to its peak.
        :param clip_norm: Norm to which they are cut.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * rate
        torch.nn.utils.clip_grad_norm_(self.learner.parameters(), clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`load_state_dict` needs to go on."""
        return {"net": self.learner.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Go on from a saved state.

        :param state: Of :meth:`state_dict`.
        """
        self.learner.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])


def moving_tokens(
    vla: FrozenVLA,
    demos: list[str],
    max_demos: int | None,
    frame_stride: int,
    kinds: tuple[str, ...],
    alpha: float,
    learning_rate: float,
    lerobot: LeRobotSettings | None = None,
) -> MovingTokens:
    """
    Make the tokens of a VLA that learns.

    :param vla: The VLA.
    :param demos: Demonstrations with pictures.
    :param max_demos: Most of them per task; ``None`` = all.
    :param frame_stride: One observation in this many.
    :param kinds: Kinds of tokens to read.
    :param alpha: Weight of its own loss.
    :param learning_rate: Of its weights.
    :param lerobot: How LeRobot datasets are read; ``None`` = with the defaults.
    :return: The tokens.
    :raises ValueError: If the VLA cannot learn.
    """
    learner: Any = getattr(vla, "learner", None)
    if learner is None:
        raise ValueError(
            f"alpha is {alpha}, and the VLA {vla.spec.name!r} cannot learn here (it has no attribute learner): set "
            "alpha to 0, or fine-tune the VLA with the program that trained it."
        )
    if isinstance(learner, str):
        learner = resolve_class(learner, f"The attribute learner of the VLA {vla.spec.name!r}")
    return MovingTokens(vla, learner(vla, demos, max_demos, frame_stride, lerobot), kinds, alpha, learning_rate)
