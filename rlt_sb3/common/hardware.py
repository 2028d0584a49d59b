"""What the processor can do."""

from functools import cache
from pathlib import Path


@cache
def cpu_has_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 matrices in hardware (Linux, x86 and Arm)."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return any(flag in flags for flag in ("avx512_bf16", "amx_bf16", " bf16"))
