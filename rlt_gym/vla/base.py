"""The contract between a frozen vision-language-action policy (VLA) and the rest of the package."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    import torch

#: Kinds of tokens in :attr:`VLAOutput.kind`.
TOKEN_KINDS: dict[str, int] = {"pad": 0, "image": 1, "text": 2, "state": 3, "action": 4}

#: Raw observation batch: ``agentview`` and ``wrist`` uint8 (B, H, W, 3) exactly as LIBERO gives them (upside down) and
#: ``state`` float32 (B, 8): eef position (m), axis-angle (rad), gripper qpos.
VLAObs = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class VLASpec:
    """
    What a caller must know about a VLA.

    :param name: Short name.
    :param token_dim: Width H of the tokens.
    :param horizon: Length T of the action chunk in control steps.
    :param action_dim: Numbers per action.
    :param max_tokens: Most tokens M an output can have, ``None`` if unknown.
    :param stochastic: Whether the chunk depends on ``seed``.
    :param cameras: Cameras that are read from the observation.
    :param image_size: Edge in pixels to which it resizes frames before it reads them, so that larger ones tell it
        nothing more; ``None`` = not said.
    :param assets: Kind of simulation assets it was trained on (``"embedded"``, ``"official"``), so that a benchmark can
        warn about others; ``None`` = not said.
    """

    name: str
    token_dim: int
    horizon: int
    action_dim: int = 7
    max_tokens: int | None = None
    stochastic: bool = False
    cameras: tuple[str, ...] = ("agentview", "wrist")
    image_size: int | None = None
    assets: str | None = None


@dataclass
class VLAOutput:
    """
    One batch of outputs.

    :param tokens: Final-layer embeddings, floating (B, M, H), detached, not inference tensors.
    :param mask: bool (B, M), True = valid; holes are allowed.
    :param kind: uint8 (B, M), see :data:`TOKEN_KINDS`.
    :param chunk: float32 (B, T, 7) in environment units: clipped to [-1, 1], gripper -1 open, +1 close.
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    kind: torch.Tensor
    chunk: torch.Tensor

    def check(self, spec: VLASpec, batch_size: int) -> VLAOutput:
        """
        Compare shapes, types and ranges with the contract.

        :param spec: The VLA's specification.
        :param batch_size: Number of observations that went in.
        :return: The output itself.
        :raises ValueError: If something does not fit.
        """
        import torch

        shape = tuple(self.tokens.shape)
        problems = []
        if (
            len(shape) != 3
            or shape[0] != batch_size
            or shape[2] != spec.token_dim
            or not self.tokens.is_floating_point()
        ):
            problems.append(f"tokens is {self.tokens.dtype} {shape}, not floating ({batch_size}, M, {spec.token_dim})")
        if self.mask.dtype != torch.bool or tuple(self.mask.shape) != shape[:2]:
            problems.append(f"mask is {self.mask.dtype} {tuple(self.mask.shape)}, not bool {shape[:2]}")
        if tuple(self.kind.shape) != shape[:2]:
            problems.append(f"kind has shape {tuple(self.kind.shape)}, not {shape[:2]}")
        wanted = (batch_size, spec.horizon, spec.action_dim)
        if self.chunk.dtype != torch.float32 or tuple(self.chunk.shape) != wanted:
            problems.append(f"chunk is {self.chunk.dtype} {tuple(self.chunk.shape)}, not float32 {wanted}")
        elif not bool((self.chunk.abs() <= 1.0).all()):  # also false for NaN
            problems.append("chunk has values outside [-1, 1] or NaN")
        if self.tokens.requires_grad or self.chunk.requires_grad:
            problems.append("tokens or chunk carry gradients; run the VLA under torch.no_grad()")
        if problems:
            raise ValueError(f"The VLA {spec.name!r} breaks the FrozenVLA contract: {'; '.join(problems)}.")
        return self


@runtime_checkable
class FrozenVLA(Protocol):
    """
    A policy that is only read, never trained.

    ``forward`` takes one batch with one instruction per row and must give each row the same result whatever the other
    rows are. Each VLA does its own flip, resize, tokenisation and normalisation.
    """

    @property
    def spec(self) -> VLASpec:
        """Shapes and names."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        ...

    def forward(self, obs: VLAObs, tasks: Sequence[str], *, seed: Sequence[int] | None = None) -> VLAOutput:
        """
        :param obs: Raw observations, see :data:`VLAObs`.
        :param tasks: One instruction per row.
        :param seed: One number per row; a stochastic VLA derives its noise from it.
        :return: Tokens and chunk.
        """
        ...

    def to(self, device: torch.device | str) -> FrozenVLA:
        """
        :param device: Where to move it.
        :return: The moved VLA (may be the same object).
        """
        ...

    def fingerprint(self) -> str:
        """Hash of weights and configuration; RL tokens, runs and files of transitions store it."""
        ...


def fingerprint(config: Mapping[str, Any], state: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> str:
    """
    Hash a model.

    :param config: JSON-able configuration.
    :param state: Named tensors.
    :param dtype: Floating tensors are hashed in this type, so that a model hashes alike before and after it was stored
        in it; ``None`` = as they are.
    :return: sha256, 64 hexadecimal digits.
    """
    import torch

    digest = hashlib.sha256(json.dumps(dict(config), sort_keys=True, default=str).encode())
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_vla(vla: object) -> FrozenVLA:
    """
    Check that an object obeys :class:`FrozenVLA`, as far as this can be seen without running it.

    :param vla: The object.
    :return: The object.
    :raises ValueError: Naming what is missing.
    """
    missing = [name for name in ("spec", "device", "forward", "to", "fingerprint") if not hasattr(vla, name)]
    if missing:
        raise ValueError(
            f"{type(vla).__name__} is no FrozenVLA: it lacks {', '.join(missing)} (see rlt_gym.vla.FrozenVLA)."
        )
    if not isinstance(vla.spec, VLASpec):  # type: ignore[attr-defined]
        raise ValueError(f"{type(vla).__name__}.spec is {type(vla.spec).__name__}; it must be a VLASpec.")  # type: ignore[attr-defined]
    return vla  # type: ignore[return-value]
