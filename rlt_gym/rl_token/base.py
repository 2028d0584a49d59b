"""The contract of what stands between a frozen VLA and a policy: an encoder of the VLA's tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from rlt_gym.vla.base import FrozenVLA, VLAOutput

if TYPE_CHECKING:
    import torch

Self = TypeVar("Self")


@runtime_checkable
class Encoder(Protocol):
    """
    Makes ``z_rl`` of what a VLA gave. It is only read, never trained, once an environment has it; one that is a
    ``torch.nn.Module`` is put into evaluation mode and loses its gradients when it is loaded.
    """

    @property
    def z_dim(self) -> int:
        """Width D of ``z_rl``."""
        ...

    def __call__(self, output: VLAOutput) -> torch.Tensor:
        """
        :param output: What the VLA gave for B observations; any bool mask.
        :return: ``z_rl``, floating (B, D); each row depends on the same row of ``output`` only.
        """
        ...

    def to(self: Self, device: torch.device | str) -> Self:
        """
        :param device: Where to move it.
        :return: The moved encoder (may be the same object).
        """
        ...

    def fingerprint(self) -> str:
        """Hash of weights and configuration; runs and files of transitions store it."""
        ...

    def check_vla(self, vla: FrozenVLA) -> None:
        """
        :param vla: The VLA it shall be used with.
        :raises ValueError: If it cannot read this VLA's tokens, or was made for another one's.
        """
        ...


def check_encoder(encoder: object) -> Encoder:
    """
    Check that an object obeys :class:`Encoder`, as far as this can be seen without running it.

    :param encoder: The object.
    :return: The object.
    :raises ValueError: Naming what is missing.
    """
    missing = [name for name in ("z_dim", "to", "fingerprint", "check_vla") if not hasattr(encoder, name)]
    if missing or not callable(encoder):
        missing += [] if callable(encoder) else ["__call__"]
        raise ValueError(
            f"rl_token is a {type(encoder).__name__}; it must be 'auto', 'mean', another registered name, a "
            f".safetensors path or an encoder, but it lacks {', '.join(missing)} (see rlt_gym.rl_token.base.Encoder)."
        )
    return encoder  # type: ignore[return-value]
