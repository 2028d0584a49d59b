"""Statistics of successes: Wilson's interval of a rate, exact tests of two samples and of paired outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import comb

import numpy as np


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a success probability.

    :param successes: number of successes
    :param n: number of trials; 0 gives the whole range
    :param confidence: level
    :return: lower and upper bound
    """
    from scipy.stats import binomtest

    if n == 0:
        return 0.0, 1.0
    bounds = binomtest(successes, n).proportion_ci(confidence_level=confidence, method="wilson")
    return float(bounds.low), float(bounds.high)


def mcnemar_p(fixed: int, broken: int, alternative: str = "two-sided") -> float:
    """McNemar's exact test on the pairs that differ.

    :param fixed: states that only the second policy solves
    :param broken: states that only the first policy solves
    :param alternative: "two-sided", or "greater": the second policy solves more
    :return: p value
    """
    from scipy.stats import binomtest

    return float(binomtest(fixed, fixed + broken, 0.5, alternative=alternative).pvalue) if fixed + broken else 1.0


@lru_cache(maxsize=100_000)
def fisher_p(*tables: tuple[int, int, int, int]) -> float:
    """Fisher's exact one-sided test: whether one sample has more successes than another beyond chance.

    :param tables: ``(successes, n, successes of the other sample, its n)``. Several tables are strata, for instance
        tasks: only differences within a table count (the exact form of the Mantel-Haenszel test)
    :return: p value: the probability of at least this many successes, given the successes of both samples together
    """
    distribution, observed = np.ones(1), 0
    for k, n, other_k, other_n in tables:
        both = k + other_k
        ways = [comb(n, i) * comb(other_n, both - i) if i <= both else 0 for i in range(n + 1)]
        distribution = np.convolve(distribution, [way / comb(n + other_n, both) for way in ways])
        observed += k
    return min(float(distribution[observed:].sum()), 1.0)


def mann_whitney_p(sample: Sequence[float], other: Sequence[float]) -> float:
    """Mann and Whitney's one-sided test: whether the numbers of one sample are smaller beyond chance.

    :param sample: numbers
    :param other: numbers of the other sample
    :return: p value; 1 where a sample is empty or all numbers are equal
    """
    from scipy.stats import mannwhitneyu

    if not len(sample) or not len(other) or len({*sample, *other}) == 1:
        return 1.0
    return float(mannwhitneyu(sample, other, alternative="less").pvalue)
