"""Statistics of successes: Wilson's interval of a rate, McNemar's test of paired outcomes."""

from __future__ import annotations


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


def mcnemar_p(fixed: int, broken: int) -> float:
    """McNemar's exact two-sided test on the pairs that differ.

    :param fixed: states that only the second policy solves
    :param broken: states that only the first policy solves
    :return: p value
    """
    from scipy.stats import binomtest

    return float(binomtest(fixed, fixed + broken, 0.5).pvalue) if fixed + broken else 1.0
