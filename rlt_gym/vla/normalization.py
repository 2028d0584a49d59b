"""
From the numbers that a policy was trained on to those of the environment.

A checkpoint brings statistics of its data set. :class:`Normalization` has the three usual ones, :func:`to_chunk` makes
of a policy's output the chunk of a :class:`~rlt_gym.vla.base.VLAOutput`. NumPy arrays and tensors of torch go in, and
the same comes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlt_gym.core.gripper import Gripper

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Normalization:
    """
    ``value = normalized * scale + offset``, for each number of an action or a state.

    :param offset: What zero stands for.
    :param scale: What one stands for, beyond that; 0 where the data never change.
    :param mask: Which numbers were normalized; the others are left as they are. ``()`` = all of them.
    :raises ValueError: If the lengths differ, or a number is not finite.
    """

    offset: tuple[float, ...]
    scale: tuple[float, ...]
    mask: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "offset", tuple(float(value) for value in self.offset))
        object.__setattr__(self, "scale", tuple(float(value) for value in self.scale))
        object.__setattr__(self, "mask", tuple(bool(value) for value in self.mask) or (True,) * len(self.offset))
        lengths = [len(self.offset), len(self.scale), len(self.mask)]
        if len(set(lengths)) != 1:
            raise ValueError(f"Statistics have {lengths} numbers (offset, scale, mask); they must be equally long.")
        if not np.isfinite([*self.offset, *self.scale]).all():
            raise ValueError("Statistics have NaN or infinite numbers.")

    @classmethod
    def mean_std(
        cls, mean: Sequence[float], std: Sequence[float], mask: Sequence[bool] = (), epsilon: float = 0.0
    ) -> Normalization:
        """
        Zero mean and unit variance (LeRobot's ``MEAN_STD``: SmolVLA, PI0, ACT; openpi's pi0).

        :param mean: Mean of each number.
        :param std: Standard deviation of each number.
        :param mask: See :class:`Normalization`.
        :param epsilon: What the checkpoint's code adds to ``std`` (openpi: 1e-6).
        :return: The normalization.
        """
        return cls(tuple(mean), tuple(value + epsilon for value in std), tuple(mask))

    @classmethod
    def min_max(
        cls, low: Sequence[float], high: Sequence[float], mask: Sequence[bool] = (), epsilon: float = 0.0
    ) -> Normalization:
        """
        -1 stands for ``low``, 1 for ``high`` (LeRobot's ``MIN_MAX``: Diffusion).

        :param low: Smallest value of each number.
        :param high: Largest value of each number.
        :param mask: See :class:`Normalization`.
        :param epsilon: What the checkpoint's code adds to the width ``high - low``.
        :return: The normalization.
        :raises ValueError: If the lengths differ.
        """
        if len(low) != len(high):
            raise ValueError(f"Statistics have {len(low)} lower and {len(high)} upper limits.")
        half = [(b - a + epsilon) / 2 for a, b in zip(low, high, strict=True)]
        return cls(tuple(a + h for a, h in zip(low, half, strict=True)), tuple(half), tuple(mask))

    @classmethod
    def quantiles(
        cls, q01: Sequence[float], q99: Sequence[float], mask: Sequence[bool] = (), epsilon: float = 0.0
    ) -> Normalization:
        """
        -1 stands for the 1 % quantile, 1 for the 99 % quantile; values beyond them lie beyond [-1, 1].

        OpenVLA, OpenVLA-OFT, openpi's pi0.5 and LeRobot's ``QUANTILES`` have it.

        :param q01: 1 % quantile of each number.
        :param q99: 99 % quantile of each number.
        :param mask: See :class:`Normalization`; OpenVLA does not normalize the gripper.
        :param epsilon: What the checkpoint's code adds to ``q99 - q01`` (openpi: 1e-6, OpenVLA-OFT: 1e-8).
        :return: The normalization.
        """
        return cls.min_max(q01, q99, mask, epsilon)

    def unnormalize(self, values: Any) -> Any:
        """
        Undo the normalization.

        :param values: Normalized numbers (..., d).
        :return: Numbers in the data's units, of the same shape and type.
        :raises ValueError: If d is not the number of statistics.
        """
        offset, scale, mask = self._like(values)
        return values * (scale * mask + (1 - mask)) + offset * mask

    def normalize(self, values: Any) -> Any:
        """
        Normalize, e.g. the state that a policy reads. A number that never changes in the data becomes 0.

        :param values: Numbers (..., d) in the data's units.
        :return: Normalized numbers, of the same shape and type.
        :raises ValueError: If d is not the number of statistics.
        """
        offset, scale, mask = self._like(values)
        constant = scale == 0
        return (values - offset * mask) / (scale * mask + (1 - mask) + constant * mask) * (1 - constant * mask)

    def _like(self, values: Any) -> tuple[Any, Any, Any]:
        """Offset, scale and mask (0 or 1) as what the values are."""
        if values.shape[-1] != len(self.offset):
            raise ValueError(
                f"There are statistics of {len(self.offset)} numbers, and the values have {values.shape[-1]}."
            )
        parts = [[float(number) for number in part] for part in (self.offset, self.scale, self.mask)]
        if isinstance(values, np.ndarray):
            dtype = values.dtype if values.dtype.kind == "f" else np.float64
            offset, scale, mask = (np.asarray(part, dtype) for part in parts)
        else:
            offset, scale, mask = (values.new_tensor(part) for part in parts)
        return offset, scale, mask


def to_chunk(
    actions: torch.Tensor,
    normalization: Normalization | None = None,
    gripper: Gripper | str = Gripper.ENV,
    gripper_index: int = -1,
    binarize: bool = False,
    gradients: bool = False,
) -> torch.Tensor:
    """
    Make a chunk of a policy's output: undo its normalization, translate its gripper, and clip, in this order.

    What was normalized lies beyond [-1, 1] with good reason, so nothing is clipped before.

    :param actions: What the policy gives, (B, T, d) or with more numbers, of which the first d are the action.
    :param normalization: Its statistics; ``None`` = the numbers are the environment's already. Its length is d.
    :param gripper: What the gripper's number means after that.
    :param gripper_index: Place of the gripper in the action.
    :param binarize: See :meth:`~rlt_gym.core.gripper.Gripper.to_env`.
    :param gradients: Whether the chunk carries the gradients of the actions; a number that is clipped has none.
    :return: float32 (B, T, d) in [-1, 1], -1 opens, 1 closes.
    """
    values = (actions if gradients else actions.detach()).float()
    if normalization is not None:
        values = normalization.unnormalize(values[..., : len(normalization.offset)])
    chunk = values.clone()
    chunk[..., gripper_index] = Gripper(gripper).to_env(values[..., gripper_index], binarize)
    return chunk.clamp(-1.0, 1.0)
