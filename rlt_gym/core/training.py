"""What the training of a VLA and that of an RL token share; no PyTorch is needed for it."""

import math
from pathlib import Path


def cpu_has_bfloat16() -> bool:
    """
    Whether this processor multiplies bfloat16 matrices in hardware (Linux x86 and Arm).

    :return: True if one of the processor's flags says so.
    """
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return any(flag in flags for flag in ("avx512_bf16", "amx_bf16", " bf16"))


def warmup_cosine(step: int, warmup_steps: int, done: float) -> float:
    """
    Learning rate relative to its peak: linear warm-up, then half a cosine down to 2 %.

    :param step: Gradient steps taken.
    :param warmup_steps: Length of the warm-up in gradient steps.
    :param done: Fraction of the training that is over, by steps or by wall clock.
    :return: Factor in (0, 1].
    """
    return min(1.0, (step + 1) / max(1, warmup_steps)) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
