"""What a user might let run inside a worker; found by its name, in this folder."""

import ctypes
import os

import numpy as np


class EveryThird:
    """Takes over at control steps 2, 5, 8, ... with an action that depends on the step and the episode's randomness."""

    def __init__(self, size=0.5):
        self.size = size

    def reset(self, simulator, rng):
        self.draw = rng.uniform(-1, 1)
        self.first_seen = None

    def act(self, simulator, proposed, step):
        assert proposed.shape == (7,) and simulator.task.suite == "libero_goal"
        if step % 3 != 2:
            return None
        return [self.size, self.draw, 0.01 * step, 0, 0, 0, 2.0 * (-1) ** step]


def downwards(simulator, proposed, step, speed=1.0):
    return np.array([0, 0, -speed, 0, 0, 0, -1])


def wrong(simulator, proposed, step):
    return np.zeros(6)


def below(simulator, height):
    return simulator.proprio()[2] < height


def note_state(simulator, folder):
    """Append the simulator's whole state to a file of this worker's own."""
    with open(os.path.join(folder, str(os.getpid())), "ab") as file:
        np.concatenate([simulator.data.qpos, simulator.data.qvel]).tofile(file)
    return False


def hang(simulator, proposed, step, folder):
    """Says by a file that the worker is inside a step, and hangs in C code that keeps the interpreter lock."""
    with open(os.path.join(folder, "inside"), "w"):
        pass
    ctypes.PyDLL(None).sleep(3600)


class NoPredicate:
    def act(self, simulator):
        return True


NUMBER = 3


MODELS = []


def models_are(simulator, number):
    """Whether the simulators that this worker has played so far have this number of MuJoCo models between them."""
    model = simulator.problem.sim.model._model
    if all(model is not seen for seen in MODELS):
        MODELS.append(model)
    return len(MODELS) == number
