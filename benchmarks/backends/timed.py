"""LIBERO's simulators with clocks, for benchmarks/throughput.py. In a folder of its own, which workers import from."""

import time

import numpy as np

from rlt_gym.libero.worker.backend import LiberoBackend

#: What ``observation["clocks"]`` has: seconds of wall time and of CPU time of the command just done.
CLOCKS = ("physics", "pictures", "reset", "physics_cpu", "pictures_cpu", "reset_cpu")


def now():
    """Wall time and CPU time of this process, which may draw with several threads."""
    return np.array([time.perf_counter(), time.process_time()])


class Timed:
    """A simulator whose observations say how long they took."""

    def __init__(self, simulator):
        self._simulator = simulator
        self._pictures, observe = np.zeros(2), simulator.observe

        def timed_observe():
            start = now()
            observation = observe()
            self._pictures += now() - start
            return observation

        simulator.observe = timed_observe

    def __getattr__(self, name):
        return getattr(self._simulator, name)

    def _clocks(self, start, reset):
        rest, pictures = now() - start - self._pictures, self._pictures
        none = np.zeros(2)
        parts = (none, none, rest + pictures) if reset else (rest, pictures, none)
        return np.transpose(parts).ravel()

    def reset(self, split, index, **settings):
        """Reset, with the clocks in the observation."""
        self._pictures, start = np.zeros(2), now()
        observation = self._simulator.reset(split, index, **settings)
        return {**observation, "clocks": self._clocks(start, True)}

    def step_chunk(self, actions, **settings):
        """Play a chunk, with the clocks in the observation."""
        self._pictures, start = np.zeros(2), now()
        result = self._simulator.step_chunk(actions, **settings)
        result.observation["clocks"] = self._clocks(start, False)
        return result


class TimedBackend(LiberoBackend):
    """Makes them."""

    def make(self, task_id):
        """Build a simulator with clocks."""
        return Timed(super().make(task_id))
