"""A second simulator for workers, which counts; workers find it by its name, in this folder."""

import time
import weakref
from typing import ClassVar

import numpy as np

from rlt_gym.workers.backend import ChunkResult


class Counter:
    """Each control step adds its action to a number; the goal is to reach the task's number."""

    def __init__(self, task_id, width):
        self.goal, self.width = task_id, width

    def observe(self):
        return {"camera": np.full((4, self.width, 3), int(self.count), np.uint8), "count": np.array([self.count])}

    def episode_seed(self, split, index):
        return index

    def reset(self, split, index):
        self.count = float(index)
        return self.observe()

    def step_chunk(self, actions, *, observe_at=(), choose=None, until_success=True):
        rewards, inner = [], []
        for step, action in enumerate(actions, start=1):
            self.count += float(action[0] if choose is None else choose(action)[0])
            rewards.append(float(self.count >= self.goal))
            if rewards[-1] and until_success:
                break
            if step in observe_at:
                inner.append(self.observe())
        return ChunkResult(self.observe(), np.array(rewards, np.float32), bool(rewards[-1]), inner)

    def frame(self, size):
        return np.full((size, size, 3), int(self.count), np.uint8)

    def close(self):
        pass


class CounterBackend:
    simulator = Counter

    def __init__(self, width):
        self.make = self.warm_up = lambda task_id: self.simulator(task_id, width)


class SlowCounterBackend(CounterBackend):
    """Takes a while to import, as one that compiles code does."""

    def __init__(self, width):
        super().__init__(width)
        time.sleep(1.5)


EVERYONE = weakref.WeakSet()


class Counted(Counter):
    """Says how many like it exist in its process: those that have played, and the others."""

    def __init__(self, task_id, width):
        super().__init__(task_id, width)
        EVERYONE.add(self)

    def observe(self):
        played = sum(hasattr(simulator, "count") for simulator in EVERYONE)
        return {**super().observe(), "census": np.array([played, len(EVERYONE) - played])}


class CensusBackend(CounterBackend):
    simulator = Counted


class Closed(Counter):
    """Says which tasks' simulators were closed in its process, in order."""

    closed: ClassVar[list[int]] = []

    def observe(self):
        return {**super().observe(), "closed": np.array(self.closed)}

    def close(self):
        self.closed.append(self.goal)


class Resting(Closed):
    rests_open = True


class ClosedBackend(CounterBackend):
    simulator = Closed


class RestingBackend(CounterBackend):
    simulator = Resting
