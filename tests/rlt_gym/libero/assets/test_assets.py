"""The embedded asset pack loads in LIBERO's unmodified code, settles, and makes LIBERO's predicates true."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("libero")
from rlt_gym.libero.assets import embedded_assets
from rlt_gym.libero.suites.folders import libero_root
from rlt_gym.libero.worker.libero_import import prepare_libero

OBJECTS = ("akita_black_bowl_1", "cream_cheese_1", "wine_bottle_1", "plate_1")
OFFICIAL = os.environ.get("RLT_LIBERO_ASSETS")
GOAL_TASKS = (
    "open_the_middle_drawer_of_the_cabinet",
    "put_the_bowl_on_the_stove",
    "put_the_wine_bottle_on_top_of_the_cabinet",
    "open_the_top_drawer_and_put_the_bowl_inside",
    "put_the_bowl_on_top_of_the_cabinet",
    "push_the_plate_to_the_front_of_the_stove",
    "put_the_cream_cheese_in_the_bowl",
    "turn_on_the_stove",
    "put_the_bowl_on_the_plate",
    "put_the_wine_bottle_on_the_rack",
)


def _initial_states(task: str) -> np.ndarray:
    with zipfile.ZipFile(libero_root() / "init_files" / "libero_goal" / f"{task}.pruned_init") as archive:
        member = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        return np.asarray(pickle.loads(archive.read(member)))


def _make(task: str, assets: Path | str) -> Any:
    prepare_libero(assets)
    from libero.libero.envs.env_wrapper import ControlEnv

    bddl = libero_root() / "bddl_files" / "libero_goal" / f"{task}.bddl"
    np.random.seed(0)  # LIBERO places its fixtures with numpy's global generator
    env = ControlEnv(bddl_file_name=str(bddl), has_offscreen_renderer=False, use_camera_obs=False, hard_reset=False)
    np.random.seed(0)
    env.reset()
    return env


def _idle(env: Any, steps: int) -> None:
    for _ in range(steps):
        env.step([0.0] * 6 + [-1.0])


def _positions(env: Any) -> np.ndarray:
    return np.array([env.sim.data.get_body_xpos(f"{name}_main") for name in OBJECTS])


def _put(env: Any, name: str, position: Any, quat: Any = (1, 0, 0, 0)) -> None:
    env.sim.data.set_joint_qpos(f"{name}_joint0", np.concatenate([position, quat]))
    env.sim.data.set_joint_qvel(f"{name}_joint0", np.zeros(6))
    env.sim.forward()


def _holds(env: Any, *predicate: str) -> bool:
    return bool(env.env._eval_predicate(list(predicate)))


def _upright(env: Any, name: str) -> bool:
    return env.sim.data.get_body_xmat(f"{name}_main")[2, 2] > 0.995


@pytest.fixture(scope="module")
def pack() -> Path:
    return embedded_assets()


@pytest.fixture(scope="module")
def table(pack: Path) -> Iterator[Any]:
    env = _make("put_the_bowl_on_the_plate", pack)
    yield env
    env.close()


@pytest.fixture
def settled(table: Any) -> Any:
    table.set_init_state(_initial_states("put_the_bowl_on_the_plate")[0])
    _idle(table, 15)
    return table


@pytest.mark.sim
@pytest.mark.parametrize("task", GOAL_TASKS)
def test_every_goal_task_builds_and_settles(pack: Path, task: str) -> None:
    env = _make(task, pack)
    try:
        states = _initial_states(task)
        assert states.shape[1] == 1 + env.sim.model.nq + env.sim.model.nv
        env.set_init_state(states[0])
        start = _positions(env)
        assert not env.check_success()
        _idle(env, 15)
        assert not env.check_success()
        end = _positions(env)
        np.testing.assert_allclose(end[:, :2], start[:, :2], atol=2e-3)
        # Heights of the bodies' origins over the table of 0.9 m with LIBERO's own meshes.
        np.testing.assert_allclose(end[:, 2], (0.8984, 0.9089, 0.8989, 0.9025), atol=2e-3)
        assert np.abs(env.sim.data.qvel[9:]).max() < 0.05
    finally:
        env.close()


@pytest.mark.sim
def test_bowl_rests_on_plate(settled: Any) -> None:
    plate = settled.sim.data.get_body_xpos("plate_1_main").copy()
    assert not _holds(settled, "on", OBJECTS[0], "plate_1")
    _put(settled, OBJECTS[0], plate + np.array([0.005, 0, 0.03]))
    _idle(settled, 15)
    assert settled.check_success()
    assert _upright(settled, OBJECTS[0])


@pytest.mark.sim
@pytest.mark.parametrize(
    ("name", "site", "height"),
    [
        ("akita_black_bowl_1", "flat_stove_1_cook_region", 0.06),
        ("akita_black_bowl_1", "wooden_cabinet_1_top_side", 0.02),
        ("wine_bottle_1", "wooden_cabinet_1_top_side", 0.02),
    ],
)
def test_things_stand_on_fixtures(settled: Any, name: str, site: str, height: float) -> None:
    assert not _holds(settled, "on", name, site)
    _put(settled, name, settled.sim.data.get_site_xpos(site) + np.array([0.01, 0.01, height]))
    _idle(settled, 15)
    assert _holds(settled, "on", name, site)
    assert _upright(settled, name)


@pytest.mark.sim
def test_cream_cheese_lies_in_bowl(settled: Any) -> None:
    bowl = settled.sim.data.get_body_xpos(f"{OBJECTS[0]}_main").copy()
    _put(settled, "cream_cheese_1", bowl + np.array([0, 0, 0.06]))
    _idle(settled, 20)
    assert _holds(settled, "on", "cream_cheese_1", OBJECTS[0])


@pytest.mark.sim
def test_bottle_lies_on_rack(settled: Any) -> None:
    site = settled.sim.data.get_site_xpos("wine_rack_1_top_region").copy()
    lean = np.radians(31.3)
    uphill, normal = np.array([0, np.cos(lean), np.sin(lean)]), np.array([0, -np.sin(lean), np.cos(lean)])
    rack = settled.sim.data.get_body_xmat("wine_rack_1_main").copy()
    # Along the shelf, just above the board and behind the lip, against which it rolls.
    place = site + rack @ (0.03 * uphill + 0.017 * normal + np.array([-0.06, 0, 0]))
    _put(settled, "wine_bottle_1", place, (0.7071068, 0, -0.7071068, 0))
    _idle(settled, 20)
    assert _holds(settled, "on", "wine_bottle_1", "wine_rack_1_top_region")


@pytest.mark.sim
def test_drawers_are_hollow_and_open(settled: Any) -> None:
    for level in ("top", "middle", "bottom"):
        region = f"wooden_cabinet_1_{level}_region"
        joint = f"wooden_cabinet_1_{level}_level"
        assert not _holds(settled, "open", region)
        settled.sim.data.set_joint_qpos(joint, -0.158)
        settled.sim.forward()
        assert _holds(settled, "open", region)
        if level == "top":
            _put(settled, OBJECTS[0], settled.sim.data.get_site_xpos(region))
            _idle(settled, 15)
            assert _holds(settled, "in", OBJECTS[0], region)
            assert _upright(settled, OBJECTS[0])
        settled.sim.data.set_joint_qpos(joint, 0.0)
        settled.sim.forward()


@pytest.mark.sim
def test_drawers_and_knob_move_freely(settled: Any) -> None:
    """They touch nothing of their fixture, so that a light pull opens them against the damping of 50 N s/m."""
    model, data = settled.sim.model, settled.sim.data
    joints = [f"wooden_cabinet_1_{level}_level" for level in ("top", "middle", "bottom")]
    for joint in joints:
        data.qfrc_applied[model.get_joint_qvel_addr(joint)] = -20.0
    _idle(settled, 10)
    data.qfrc_applied[:] = 0.0
    for joint in joints:
        assert data.get_joint_qpos(joint) < -0.1
        data.set_joint_qpos(joint, 0.0)
        data.set_joint_qvel(joint, 0.0)
    settled.sim.forward()
    fixtures = ("wooden_cabinet_1", "flat_stove_1", "wine_rack_1")
    for contact in data.contact[: data.ncon]:
        names = [model.body_id2name(model.geom_bodyid[geom]) for geom in (contact.geom1, contact.geom2)]
        assert not all(name.startswith(fixtures) for name in names), names


@pytest.mark.sim
def test_knob_turns_the_stove_on(settled: Any) -> None:
    settled.sim.data.set_joint_qpos("flat_stove_1_button", 0.0)
    settled.sim.forward()
    assert not _holds(settled, "turnon", "flat_stove_1")
    settled.sim.data.set_joint_qpos("flat_stove_1_button", 1.0)
    settled.sim.forward()
    assert _holds(settled, "turnon", "flat_stove_1")
    _idle(settled, 1)
    site = settled.sim.model.site_name2id("flat_stove_1_burner")
    assert settled.sim.model.site_rgba[site][3] > 0


@pytest.mark.sim
def test_bowl_holds_water(settled: Any) -> None:
    """No gap in wall or floor: rays from inside, sideways and down, all meet the bowl."""
    import mujoco

    model, data = settled.sim.model._model, settled.sim.data._data
    body = model.body(f"{OBJECTS[0]}_main").id
    inside = {body, *(i for i in range(model.nbody) if model.body_parentid[i] == body)}
    origin = data.xpos[body] + np.array([0, 0, 0.03])
    group = np.array([0, 1, 0, 0, 0, 0], dtype=np.uint8)  # solid geoms are invisible to rays; the drawn ones match
    hit = np.zeros(1, dtype=np.int32)
    for angle in np.linspace(0, 2 * np.pi, 73):
        for tilt in (0.0, -0.4, -0.8, -1.2, -1.57):
            ray = np.array([np.cos(angle) * np.cos(tilt), np.sin(angle) * np.cos(tilt), np.sin(tilt)])
            distance = mujoco.mj_ray(model, data, origin, ray, group, 1, -1, hit)
            assert 0 < distance < 0.08
            assert model.geom_bodyid[hit[0]] in inside


@pytest.mark.official
@pytest.mark.sim
@pytest.mark.parametrize("task", [GOAL_TASKS[0], GOAL_TASKS[9]])
def test_settles_like_the_official_assets(pack: Path, task: str) -> None:
    rests = []
    states = _initial_states(task)[[0, 20, 49]]
    for assets in (pack, str(OFFICIAL)):
        env = _make(task, assets)
        names = [env.sim.model.joint_id2name(i) for i in range(env.sim.model.njnt)]
        ranges = {name: tuple(env.sim.model.jnt_range[i]) for i, name in enumerate(names)}
        rest = []
        for state in states:
            env.set_init_state(state)
            _idle(env, 40)
            rest.append(_positions(env))
        rests.append((names, ranges, np.array(rest)))
        env.close()
    assert rests[0][0] == rests[1][0]
    assert rests[0][1] == rests[1][1]
    np.testing.assert_allclose(rests[0][2], rests[1][2], atol=2e-3)
