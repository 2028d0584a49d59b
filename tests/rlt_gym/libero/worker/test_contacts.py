"""Contacts of groups of geoms, asked as robosuite asks for them, get robosuite's own answers."""

import json
import subprocess
import sys

import pytest

PLAY = """
import json, sys
import numpy as np
from rlt_gym.libero.assets import resolve_assets
from rlt_gym.libero.worker.libero_import import prepare_libero

prepare_libero(resolve_assets("embedded").path)
from robosuite.environments.base import MujocoEnv

from rlt_gym.libero.worker.contacts import ContactCheck
from rlt_gym.libero.worker.simulator import LiberoSimulator

simulator = LiberoSimulator("libero_spatial", 3)
problem = simulator.problem
assert isinstance(problem.check_contact, ContactCheck)
models = [*problem.objects_dict.values(), *problem.fixtures_dict.values(), problem.robots[0].gripper]
names = models[0].contact_geoms
groups = [*models, names, names[0], names[:1] + models[1].contact_geoms, "no such geom", []]
rng, seen = np.random.default_rng(0), {True: 0, False: 0}
for episode in range(2):
    simulator.reset("eval", episode, observe=False)
    for _ in range(2):
        actions = rng.uniform(-1, 1, (8, 7)) - [0, 0, 0.6, 0, 0, 0, 0]
        simulator.step_chunk(np.clip(actions, -1, 1), observe=False)
        for one in groups:
            for other in (*groups, None):
                answer = problem.check_contact(one, other)
                assert answer is MujocoEnv.check_contact(problem, one, other), (one, other)
                seen[answer] += 1
print(json.dumps([seen[True], seen[False]]))
"""


@pytest.mark.sim
def test_answers_are_those_of_robosuite():
    done = subprocess.run([sys.executable, "-c", PLAY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    yes, no = json.loads(done.stdout.splitlines()[-1])
    assert yes > 20 and no > 100
