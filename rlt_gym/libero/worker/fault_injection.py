"""Ways to break a worker from inside, for the tests of supervision and ``benchmarks/faults.py``."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any


def shout(simulator: Any, size: int = 1 << 20) -> None:
    """
    Print ``size`` bytes to stdout and to stderr, from Python and from C, as a noisy library does.

    :param simulator: Not used.
    :param size: Bytes for each stream.
    """
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.write("x" * (size // 2))
        stream.flush()
        os.write(descriptor, b"y" * (size // 2))


def raise_at_step(simulator: Any, after: int = 1) -> None:
    """
    Raise an exception in the simulator in the middle of a chunk, after some more control steps.

    :param simulator: The worker's simulator.
    :param after: Control steps that still work.
    """
    control_step, left = simulator._control_step, [after]

    def failing(action: Any) -> bool:
        if left[0] == 0:
            raise RuntimeError("injected failure of the simulator")
        left[0] -= 1
        return control_step(action)

    simulator._control_step = failing


def hang_at_step(simulator: Any, seconds: int = 3600) -> None:
    """
    Let the next control step hang in C code that does not release the interpreter lock.

    :param simulator: The worker's simulator.
    :param seconds: How long it hangs.
    """
    sleep = ctypes.PyDLL(None).sleep  # CDLL would let go of it
    simulator._control_step = lambda action: sleep(seconds)


def crash_at_step(simulator: Any) -> None:
    """
    Let the next control step end in a segmentation fault.

    :param simulator: The worker's simulator.
    """
    simulator._control_step = lambda action: ctypes.string_at(0)


def lose_gl(simulator: Any) -> None:
    """
    Destroy the renderer's GL context, as a driver reset does.

    :param simulator: The worker's simulator.
    """
    simulator.pictures({"frame": "agentview"})
    simulator._renderer._gl.free()


def loaded_modules(simulator: Any) -> list[str]:
    """
    List what this process has imported.

    :param simulator: Not used.
    :return: Names of modules.
    """
    return sorted(sys.modules)
