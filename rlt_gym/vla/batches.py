"""Forward passes of a frozen VLA over any number of rows, none larger than the VLA allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlt_gym.vla.base import FrozenVLA, VLAObs, VLAOutput

if TYPE_CHECKING:
    import torch


def run_vla(vla: FrozenVLA, obs: VLAObs, tasks: Sequence[str], seeds: Sequence[int] | None = None) -> VLAOutput:
    """
    Run a VLA on a batch, in parts of at most ``vla.spec.max_batch`` rows, and check what it gives.

    Everything in this package that runs a VLA does it here. Because a row's result does not depend on the other rows,
    the parts change nothing but the memory that is needed, and the rounding of a batch of another size.

    :param vla: The VLA.
    :param obs: Raw observations of B rows, see :data:`~rlt_gym.vla.base.VLAObs`.
    :param tasks: One instruction per row.
    :param seeds: One number per row, see :func:`~rlt_gym.vla.base.forward_seed`.
    :return: The outputs of all rows, in their order. Where parts have different numbers of tokens, the shorter ones are
        padded at their end (zeros, mask False).
    :raises ValueError: If an output breaks the contract.
    """
    tasks, count = list(tasks), len(tasks)
    size = vla.spec.max_batch or count
    if count <= size:
        return vla.forward(obs, tasks, seed=seeds).check(vla.spec, count)
    parts = []
    for start in range(0, count, size):
        rows = slice(start, start + size)
        part = {key: value[rows] for key, value in obs.items()}
        output = vla.forward(part, tasks[rows], seed=None if seeds is None else seeds[rows])
        parts.append(output.check(vla.spec, len(tasks[rows])))
    return _join(parts)


def _join(parts: Sequence[VLAOutput]) -> VLAOutput:
    import torch

    most = max(part.mask.shape[1] for part in parts)

    def padded(value: torch.Tensor) -> torch.Tensor:
        missing = most - value.shape[1]
        if not missing:
            return value
        return torch.cat([value, value.new_zeros((len(value), missing, *value.shape[2:]))], dim=1)

    functions = [part.from_noise for part in parts]

    def from_noise(noise: torch.Tensor) -> torch.Tensor:
        pieces = noise.split([len(part.chunk) for part in parts])
        return torch.cat([make(piece) for make, piece in zip(functions, pieces, strict=True) if make is not None])

    return VLAOutput(
        tokens=torch.cat([padded(part.tokens) for part in parts]),
        mask=torch.cat([padded(part.mask) for part in parts]),
        kind=torch.cat([padded(part.kind) for part in parts]),
        chunk=torch.cat([part.chunk for part in parts]),
        from_noise=None if None in functions else from_noise,
    )
