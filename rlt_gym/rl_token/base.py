"""The contract between an encoder of a frozen VLA's tokens and the rest of the package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from rlt_gym.vla.base import FrozenVLA, VLAOutput

if TYPE_CHECKING:
    import torch

Self = TypeVar("Self")


@runtime_checkable
class Encoder(Protocol):
    """
    Makes ``z_rl`` from a VLA's output.

    An environment never trains its encoder: loading puts an encoder that is a ``torch.nn.Module`` into evaluation mode
    and switches its gradients off.
    """

    @property
    def z_dim(self) -> int:
        """Width D of ``z_rl``."""
        ...

    def __call__(self, output: VLAOutput) -> torch.Tensor:
        """
        Make ``z_rl``.

        :param output: What the VLA gave for B observations; any bool mask.
        :return: ``z_rl``, floating (B, D); each row depends on the same row of ``output`` only.
        """
        ...

    def to(self: Self, device: torch.device | str) -> Self:
        """
        Move the encoder to a device.

        :param device: Where to move it.
        :return: The moved encoder (may be the same object).
        """
        ...

    def fingerprint(self) -> str:
        """
        Identify the encoder; runs and files of transitions store this.

        :return: Hash of weights and configuration.
        """
        ...

    def check_vla(self, vla: FrozenVLA) -> None:
        """
        Refuse a VLA that the encoder does not belong to.

        :param vla: The VLA to use it with.
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
            f"rl_token is a {type(encoder).__name__}; it must be 'auto', 'mean', 'none', another registered name, a "
            f".safetensors path or an encoder, but it lacks {', '.join(missing)} (see rlt_gym.rl_token.base.Encoder)."
        )
    return encoder  # type: ignore[return-value]


def require_tokens(vla: FrozenVLA) -> None:
    """
    Refuse a VLA that gives no tokens: there can be no RL token of it.

    :param vla: The VLA; ``no_tokens``, if it has this attribute, says why it gives none.
    :raises ValueError: If it gives none.
    """
    reason = getattr(vla, "no_tokens", None)
    if reason or vla.spec.kinds == ():
        because = f" ({reason})" if reason else ""
        raise ValueError(
            f"The VLA {vla.spec.name!r} gives no tokens{because}, so there is no RL token of it: use rl_token='none' "
            "(the learner sees proprioception and the VLA's chunk alone), or a server that gives tokens (`rlt serve`)."
        )
