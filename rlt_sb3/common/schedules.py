"""Settings that change while chunks are collected."""

from dataclasses import dataclass
from numbers import Real

import numpy as np
from stable_baselines3.common.type_aliases import Schedule
from stable_baselines3.common.utils import FloatSchedule


@dataclass(frozen=True)
class ChunkSchedule:
    """
    A value that changes linearly over the first chunks, whatever the length of training.

    Stable-Baselines3's schedules count in shares of the whole training: a longer budget would stretch them, and a run
    that is resumed with a larger one would go back on its schedule.

    :param start: value before the first chunk
    :param end: value from ``chunks`` on
    :param chunks: number of chunks over which it changes
    :raises ValueError: for values that are no numbers, or ``chunks`` below 1
    """

    start: float
    end: float
    chunks: int

    def __post_init__(self) -> None:
        numbers = all(isinstance(v, Real) and not isinstance(v, bool) for v in (self.start, self.end))
        if not numbers or not isinstance(self.chunks, int) or self.chunks < 1:
            raise ValueError(f"A ChunkSchedule takes two numbers and an integer >= 1 (chunks), got {self}.")

    def __call__(self, collected: int) -> float:
        """
        Compute the value after a number of chunks.

        :param collected: chunks so far
        :return: the value now
        """
        return float(self.start + (self.end - self.start) * min(collected / self.chunks, 1.0))


def lowest_value(given: float | Schedule) -> float:
    """
    Find the lowest value of a number or a schedule: at the beginning, in the middle and at the end of training.

    :param given: as Stable-Baselines3 takes it, for example for a learning rate
    :return: the lowest of the three; NaN if one of them is
    """
    return float(np.min([FloatSchedule(given)(remaining) for remaining in (1.0, 0.5, 0.0)]))
