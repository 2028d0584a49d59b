"""Collectors in this process, which answer in an order drawn from a seed and can be lost; no Ray."""

import pickle
import random
from functools import partial

import numpy as np
import torch as th
from stable_baselines3.common.vec_env import VecMonitor

from rlt_gym.testing import FakeRLTokenVectorEnv
from rlt_sb3 import RLT, GymnasiumVecEnv
from rlt_sb3.collectors.collector import Collector
from rlt_sb3.collectors.vec_env import CollectorVecEnv


class LostError(Exception):
    """A collector is lost."""


class NumberedVectorEnv(FakeRLTokenVectorEnv):
    """The fake task; ``proprio`` has the number of the episode and its steps, so no two observations are equal."""

    def _observe(self, env):
        obs = super()._observe(env)
        obs["proprio"][2], obs["proprio"][6] = self._episode(env).init_index, self._steps[env]
        return obs


def make_numbered(num_envs, **kwargs):
    return VecMonitor(GymnasiumVecEnv(NumberedVectorEnv(num_envs, **kwargs)), info_keywords=("is_success",))


class LocalWorkers:
    """
    Plays each call at once, with random generators of the collector's own, as a process has them.

    :param make: of each collector
    :param count: W
    :param seed: of the order in which answers arrive
    :param lose: worker -> number of its ``play`` call in which it dies
    """

    timeout = 60.0

    def __init__(self, make, count, seed=0, lose=None):
        self.make, self.count, self.lose = make, count, dict(lose or {})
        self.draw = random.Random(seed)
        self.plays, self.replaced, self.calls = [0] * count, [], 0
        self.state = [None] * count
        self.actors = [self._new() for _ in range(count)]
        self.described = [pickle.loads(pickle.dumps(actor.start())) for actor in self.actors]

    def _new(self):
        return Collector(self.make, _load)

    def call(self, worker, method, *arguments):
        self.calls += 1
        if method == "play":
            self.plays[worker] += 1
            if self.lose.get(worker) == self.plays[worker]:
                self.actors[worker] = None
        if self.actors[worker] is None:
            return (worker, self.calls, None)
        mine = np.random.get_state(), th.get_rng_state(), random.getstate()
        if self.state[worker] is not None:
            _set(self.state[worker])
        answer = getattr(self.actors[worker], method)(*pickle.loads(pickle.dumps(arguments)))
        self.state[worker] = np.random.get_state(), th.get_rng_state(), random.getstate()
        _set(mine)
        return (worker, self.calls, pickle.dumps(answer))

    def put(self, value):
        return value

    def answer(self, worker, reference, timeout=None):
        if reference[2] is None:
            raise LostError("lost")
        return pickle.loads(reference[2])

    def ready(self, references, timeout):
        return self.draw.choice(references)

    def replace(self, worker, failure, prepare):
        self.replaced.append(worker)
        self.actors[worker], self.state[worker] = self._new(), None
        self.actors[worker].start()
        return prepare()

    def close(self):
        for actor in self.actors:
            actor.close()


def _load(file, venv):
    return RLT.load(file, env=venv, device="cpu", buffer_size=16)


def _set(state):
    np.random.set_state(state[0])
    th.set_rng_state(state[1])
    random.setstate(state[2])


def local(workers=3, per_worker=2, order=0, lose=None, depth=2, seed=0, max_staleness=1000, **kwargs):
    """Collectors with the fake task."""
    found = LocalWorkers(partial(make_numbered, per_worker, **kwargs), workers, order, lose)
    return CollectorVecEnv(found, LostError, seed=seed, depth=depth, max_staleness=max_staleness)
