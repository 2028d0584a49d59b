"""A module whose VLA settings name as ``"named_vla:NamedVLA"``."""

from dataclasses import replace

import torch
from toy_vla import ToyVLA


class NamedVLA(ToyVLA):
    """Made with a device and ``vla_kwargs``."""

    def __init__(self, device="cpu", gain=0.5) -> None:
        super().__init__(device, gain)
        self.spec = replace(self.spec, assets=None)


class DeafVLA(NamedVLA):
    """Says that it reads instructions, unless ``deaf`` is False."""

    def __init__(self, device="cpu", deaf=True) -> None:
        super().__init__(device)
        self.spec = replace(self.spec, language=deaf)


class RoughVLA(NamedVLA):
    """Rounds otherwise in batches of other sizes, as half precision does."""

    def __init__(self, device="cpu", dtype="bfloat16") -> None:
        super().__init__(device)
        self.spec = replace(self.spec, dtype=dtype)

    def forward(self, obs, tasks, *, seed=None):
        output = super().forward(obs, tasks, seed=seed)
        output.tokens = output.tokens.to(getattr(torch, self.spec.dtype))
        output.chunk[:, :, 5] += len(tasks) / 1000
        return output


def make(device="cpu"):
    """No class."""
    return NamedVLA(device)
