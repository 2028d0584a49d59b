"""Exploration noise for action chunks."""

from collections.abc import Sequence

import numpy as np
from stable_baselines3.common.noise import ActionNoise


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
        """:return: noise of one chunk (C, d), equal rows"""
        return np.tile(np.random.normal(0.0, self.sigma), (self.chunk_length, 1))

    def __repr__(self) -> str:
        return f"HeldNoise(chunk_length={self.chunk_length}, sigma={self.sigma.tolist()})"
