"""Where the CPU time of one of our simulators goes: MuJoCo's own timers, and clocks around our functions."""

from __future__ import annotations

import argparse
import ctypes
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import mujoco
import numba
import numpy as np

if TYPE_CHECKING:  # this import asks for folders unless prepare_libero was called, which whoever makes a simulator does
    from rlt_gym.libero.worker.simulator import LiberoSimulator

_clock_gettime = ctypes.CDLL(None).clock_gettime
_clock_gettime.argtypes, _clock_gettime.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_int
_THREAD_CPU_TIME = time.CLOCK_THREAD_CPUTIME_ID

#: MuJoCo's timers that no other of these contains.
_COLLISION, _CONSTRAINTS = ("POS_COLLISION",), ("POS_MAKE", "POS_PROJECT", "CONSTRAINT")


@numba.cfunc("float64()")
def _now() -> float:
    now = np.empty(2, np.int64)
    _clock_gettime(_THREAD_CPU_TIME, now.ctypes.data)
    return now[0] * 1e3 + now[1] * 1e-6


class Clocks:
    """CPU time that functions take, while the context is open."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._saved: list[tuple[Any, str, Any]] = []

    def watch(self, owner: Any, name: str, key: str) -> None:
        """Count the time of a function under a key."""
        function = getattr(owner, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            begun = time.thread_time()
            result = function(*arguments, **named)
            self.seconds[key] += time.thread_time() - begun
            return result

        self._saved.append((owner, name, function))
        setattr(owner, name, watched)

    def __enter__(self) -> Clocks:
        return self

    def __exit__(self, *error: object) -> None:
        for owner, name, function in self._saved:
            setattr(owner, name, function)


def _play(simulator: LiberoSimulator, chunks: np.ndarray, pictures: bool) -> float:
    begun = time.thread_time()
    for actions in chunks:
        simulator.step_chunk(actions, observe=pictures)
    return time.thread_time() - begun


def time_parts(simulator: LiberoSimulator, chunks: np.ndarray) -> dict[str, float]:
    """
    Play chunks three times from the same state: as they are, with clocks around functions, with MuJoCo's timers.

    :param simulator: It has drawn before.
    :param chunks: Actions (n, k, 7).
    :return: By part, ms of CPU per control step: ``all``; ``collision``, ``constraints``, ``dynamics`` (the rest of
        MuJoCo's step), ``controller``; ``predicate`` (LIBERO's goal, and what it shows in the scene); ``choose`` (what
        of the scene to draw, and its display lists), ``draw`` (OpenGL); ``rest``. ``reset`` (ms) is an episode's
        beginning with its ten settling steps, without pictures. ``contacts`` is their mean number.
    """
    from rlt_gym.libero.worker.simulator import SETTLE_STEPS

    steps = chunks.shape[0] * chunks.shape[1]
    simulator.reset("eval", 0)
    _play(simulator, chunks[:1], True)
    total = _play(simulator, chunks, True)
    renderer = simulator._renderer
    assert renderer is not None and simulator._loop is not None
    simulator.reset("eval", 0)
    _play(simulator, chunks[:1], True)
    with Clocks() as clocks:
        clocks.watch(simulator._loop, "step", "loop")
        clocks.watch(simulator.problem, "_check_success", "predicate")
        clocks.watch(simulator.problem, "_post_process", "predicate")
        clocks.watch(renderer, "_update_scene", "choose")
        if renderer._culling is not None:
            clocks.watch(renderer._culling, "apply", "choose")
        clocks.watch(mujoco, "mjr_render", "draw")
        clocks.watch(mujoco, "mjr_readPixels", "draw")
        _play(simulator, chunks, True)
    found = {key: 1e3 * value / steps for key, value in clocks.seconds.items()}

    simulator.reset("eval", 0)
    _play(simulator, chunks[:1], False)
    timers = simulator.data.timer
    assert _now.address is not None
    mujoco.set_mjcb_time(ctypes.cast(_now.address, ctypes.CFUNCTYPE(ctypes.c_double)))
    for timer in timers:
        timer.duration = 0.0
    contacts = []
    for actions in chunks:
        simulator.step_chunk(actions, observe=False)
        contacts.append(simulator.data.ncon)
    mujoco.set_mjcb_time(None)

    def timed(*names: str) -> float:
        return sum(timers[int(getattr(mujoco.mjtTimer, f"mjTIMER_{name}"))].duration for name in names) / steps

    parts = {"collision": timed(*_COLLISION), "constraints": timed(*_CONSTRAINTS)}
    parts["dynamics"] = timed("STEP") - sum(parts.values())
    parts["controller"] = max(found.pop("loop") - timed("STEP"), 0.0)
    parts.update({name: found.get(name, 0.0) for name in ("predicate", "choose", "draw")})
    everything = 1e3 * total / steps
    begun = time.thread_time()
    simulator.reset("eval", 0, observe=False)
    reset = 1e3 * (time.thread_time() - begun)
    return {
        "all": everything,
        **parts,
        "rest": everything - sum(parts.values()),
        "contacts": float(np.mean(contacts)),
        f"reset_and_{SETTLE_STEPS}_steps": reset,
    }


if __name__ == "__main__":  # it has no command of its own
    argparse.ArgumentParser(
        description=__doc__, epilog="python benchmarks/stock_libero.py --parts where prints what it measures."
    ).parse_args()
