"""Scenes that change from episode to episode: by the seed alone, undone by the next, drawn without old colors."""

import subprocess
import sys

import numpy as np
import pytest

from rlt_gym.libero.vector_env import LiberoVectorEnv
from rlt_gym.libero.worker.perturbations import (
    KINDS,
    _product,
    _quaternion,
    check_perturbations,
    drawn,
    friction_factor,
)

ALL = dict.fromkeys(KINDS, 1.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lights": 1}, "keys of light, color, camera, friction, placement, got 'lights'"),
        ({"light": 3}, r"perturbations\['light'\] must be a number from 0 to 2, got 3"),
        ({"light": True}, "must be a number from 0 to 2, got True"),
        ({"camera": float("nan")}, "must be a number from 0 to 2, got nan"),
        (["light"], r"must be a dict of strengths for light, .*, got \['light'\]"),
    ],
)
def test_what_cannot_be_is_refused_before_a_process_starts(given, message):
    with pytest.raises(ValueError, match=message):
        LiberoVectorEnv(perturbations=given)


def test_numbers_follow_from_seed_and_kind_alone():
    assert check_perturbations(None) == {} and check_perturbations({"light": 0, "color": 1}) == {"color": 1.0}
    first, again, other = drawn("light", 1.0, 7, 5), drawn("light", 1.0, 7, 5), drawn("color", 1.0, 7, 5)
    assert (first == again).all() and not (first == other).any() and np.abs(first).max() <= 1
    np.testing.assert_allclose(drawn("light", 0.5, 7, 5), first / 2)
    factors = [friction_factor(1.0, seed) for seed in range(300)]
    assert 0.5 <= min(factors) < 0.55 and 1.8 < max(factors) <= 2 and abs(np.mean(np.log(factors))) < 0.1


def test_quaternions_against_rotation_matrices():
    from scipy.spatial.transform import Rotation

    rng = np.random.default_rng(0)
    for first, second in zip(rng.normal(size=(5, 3)), 0.1 * rng.normal(size=(5, 3)), strict=True):
        found = _product(_quaternion(first), _quaternion(second))
        expected = (Rotation.from_rotvec(first) * Rotation.from_rotvec(second)).as_quat(scalar_first=True)
        np.testing.assert_allclose(found, expected if expected @ found > 0 else -expected, atol=1e-12)


@pytest.mark.sim
def test_pictures_and_states_on_libero():
    """In a process of its own, since importing LIBERO changes it."""
    code = """
import mujoco
import numpy as np
from rlt_gym.libero.assets import resolve_assets
from rlt_gym.libero.worker.libero_import import prepare_libero
prepare_libero(resolve_assets("embedded").path)
from rlt_gym.libero.worker.simulator import LiberoSimulator
ALL = dict(light=1.0, color=1.0, camera=1.0, friction=1.0, placement=1.0)
def play(simulator, index):
    simulator.reset("train", index)
    seen = simulator.step_chunk(np.full((4, 7), 0.3)).observation
    return seen["agentview"].copy(), seen["wrist"].copy(), simulator.data.qpos.copy(), seen["proprio"]
def same(a, b):
    return [bool(np.array_equal(x, y)) for x, y in zip(a, b)]
plain = LiberoSimulator("libero_goal", 1, 64)
calm = [play(plain, index) for index in range(2)]
friction = plain.model.geom_friction.copy()
plain.close()
# no shortcut of "exact" keeps an old color, light or camera: "stock" has none
changed = LiberoSimulator("libero_goal", 1, 64, perturbations=ALL)
episodes = [play(changed, index) for index in (0, 1, 0)]
assert all(same(episodes[0], episodes[2])), "an episode depends on the one before"
assert not any(same(episodes[0], calm[0])[:3])
changed.close()
stock = LiberoSimulator("libero_goal", 1, 64, "stock", perturbations=ALL)
for index in range(2):
    assert all(same(play(stock, index), episodes[index])), "exact is not stock"
stock.close()
fast = LiberoSimulator("libero_goal", 1, 64, "fast", perturbations=ALL)
two = [play(fast, index) for index in (0, 1)]
fast.close()
new = LiberoSimulator("libero_goal", 1, 64, "fast", perturbations=ALL)
assert all(same(play(new, 1), two[1])), "fast keeps something of the episode before"
new.close()
# what each kind changes, and what it does not: agentview, wrist, state
for kind, expected in (("light", [0, 0, 1]), ("color", [0, 0, 1]), ("camera", [0, 1, 1]), ("placement", [0, 0, 0])):
    one = LiberoSimulator("libero_goal", 1, 64, perturbations={kind: 1.0})
    assert same(play(one, 0), calm[0])[:3] == [bool(x) for x in expected], (kind, same(play(one, 0), calm[0]))
    if kind == "placement":
        one.restart("train", 0)
        before = one.data.qpos.copy()
        one._perturbations = None
        one.restart("train", 0)
        moved = np.flatnonzero(before != one.data.qpos)
        joints = [one.model.joint(m.joints[-1]) for m in one.problem.objects_dict.values()]
        assert set(moved) <= {int(j.qposadr[0]) + k for j in joints for k in (0, 1)} and len(moved) == 2 * len(joints)
        assert np.abs(before - one.data.qpos).max() <= 0.02
    one.close()
one = LiberoSimulator("libero_goal", 1, 64, perturbations={"friction": 2.0})
for index in (0, 1):
    one.restart("train", index)
    ratio = one.model.geom_friction[:, 0] / friction[:, 0]
    assert np.allclose(ratio, ratio[0]) and 0.25 <= ratio[0] <= 4 and ratio[0] != 1
    assert (one.model.geom_friction[:, 1:] == friction[:, 1:]).all()
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.endswith("fine\n"), done.stderr


@pytest.mark.sim
def test_environments_play_the_same_changes_and_name_their_seed():
    found = []
    for num_envs in (1, 2):
        env = LiberoVectorEnv(
            num_envs, "libero_goal", [1], assets="embedded", render="fast", image_size=64, perturbations=ALL, seed=3
        )
        obs, infos = env.reset(options={"init_states": "eval"})
        found.append((obs["agentview"][-1], int(infos["perturbation_seed"][-1])))
        assert env.metadata["perturbations"] == ALL
        env.close()
    assert (found[0][0] == found[1][0]).all() and found[0][1] == found[1][1]
