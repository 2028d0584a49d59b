"""Exploration noise for action chunks, and the unit in which it is measured."""

from collections.abc import Sequence

import numpy as np
from stable_baselines3.common.noise import ActionNoise

#: one unit of action in standard deviations of the VLA's actions, and its limits. Noise of 0.05 units is 0.4 of the
#: VLA's own spread, at least 0.01 and at most 0.05 of an action in [-1, 1]
SPREADS, LOWEST_UNIT, HIGHEST_UNIT = 8.0, 0.2, 1.0


def unit_from_spread(chunks: np.ndarray) -> np.ndarray:
    """
    Measure one unit of action by the spread of the VLA's actions.

    :param chunks: actions of the VLA in [-1, 1], (N, C, d)
    :return: one unit of action per dimension (d,), from the spread that the VLA's actions have
    """
    spread = np.clip(chunks, -1.0, 1.0).reshape(-1, chunks.shape[-1]).std(0, dtype=float)
    return np.clip(SPREADS * spread, LOWEST_UNIT, HIGHEST_UNIT)


class HeldNoise(ActionNoise):
    """
    Gaussian noise that stays the same during all control steps of a chunk (smooth motion).

    :param chunk_length: control steps of a chunk, C
    :param sigma: standard deviation of each action dimension (d,)
    :raises ValueError: for a chunk length below 1, or a negative standard deviation
    """

    def __init__(self, chunk_length: int, sigma: Sequence[float] | np.ndarray):
        self.chunk_length, self.sigma = chunk_length, np.asarray(sigma, dtype=float)
        if chunk_length < 1:
            raise ValueError(f"chunk_length must be >= 1 (control steps), got {chunk_length!r}.")
        if self.sigma.ndim != 1 or (self.sigma < 0).any():
            raise ValueError(f"sigma must be one number >= 0 per action dimension, got {sigma!r}.")
        super().__init__()

    def __call__(self) -> np.ndarray:
        """Return noise of one chunk (C, d), equal rows."""
        return np.tile(np.random.normal(0.0, self.sigma), (self.chunk_length, 1))

    def __repr__(self) -> str:
        return f"HeldNoise(chunk_length={self.chunk_length}, sigma={self.sigma.tolist()})"
