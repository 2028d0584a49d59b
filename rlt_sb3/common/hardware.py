"""Which precisions the processor and the devices support."""

from functools import cache
from pathlib import Path

import torch as th


@cache
def has_bfloat16(device: th.device) -> bool:
    """
    Tell whether a device multiplies bfloat16 matrices in hardware.

    :param device: where the matrices are
    :return: whether it multiplies bfloat16 matrices in hardware
    """
    if device.type == "cuda":
        return th.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and cpu_has_bfloat16()


@cache
def cpu_has_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 matrices in hardware (Linux, x86 and Arm)."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return any(flag in flags for flag in ("avx512_bf16", "amx_bf16", " bf16"))
