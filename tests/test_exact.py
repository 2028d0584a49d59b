"""Physics and pictures equal those of stock LIBERO, live and bit for bit.

``pytest -m exact`` plays two episodes of 300 control steps (or the expert's way to success) of eleven tasks, on the
official assets where ``RLT_LIBERO_ASSETS`` names them and on the embedded ones. The default run plays a short slice.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parent / "compare_with_stock.py"
ASSETS = ["embedded", pytest.param("official", marks=pytest.mark.official)]

#: Over all four suites; with drawers (goal 0, 3, spatial 4, libero_10 3), stove (goal 1, 7, libero_10 2) and experts.
CASES = [
    ("libero_goal", 0, False),
    ("libero_goal", 1, True),
    ("libero_goal", 3, False),
    ("libero_goal", 7, False),
    ("libero_spatial", 3, False),
    ("libero_spatial", 4, False),
    ("libero_object", 1, False),
    ("libero_object", 6, False),
    ("libero_10", 2, False),
    ("libero_10", 3, False),
    ("libero_10", 7, False),
]


def compare(suite: str, task: int, assets: str, *options: str) -> dict:
    if assets == "official" and not os.environ.get("RLT_LIBERO_ASSETS"):
        pytest.skip("RLT_LIBERO_ASSETS is not set")
    command = [sys.executable, str(SCRIPT), suite, str(task), "--assets", assets, *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "identical" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    summary = json.loads(done.stdout.split("identical ")[1])
    print(summary)
    assert summary["largest_difference"] == 0.0
    return summary


@pytest.mark.exact
@pytest.mark.sim
@pytest.mark.parametrize("assets", ASSETS)
@pytest.mark.parametrize(("suite", "task", "expert"), CASES)
def test_two_episodes_equal_stock(suite, task, expert, assets):
    summary = compare(suite, task, assets, *(["--expert"] if expert else []))
    assert summary["objects_moved"] > 0.005
    assert summary["success"] or not expert


@pytest.mark.sim
def test_a_short_run_equals_stock():
    """Two episodes on one simulator: the soft reset must not remember the first one."""
    summary = compare("libero_goal", 1, "embedded", "--steps", "40")
    assert summary["steps"] == 80


@pytest.mark.sim
@pytest.mark.official
def test_a_short_run_on_official_meshes_equals_stock():
    """Meshes are cut into clusters and culled, and the stove is a mirror: the pictures must not tell."""
    assert compare("libero_goal", 0, "official", "--steps", "16", "--episodes", "1")["steps"] == 16


# ---------------------------------------------------------------- culling, without a simulator


def test_clusters_hold_every_triangle_once_and_in_order():
    from rlt_gym.libero.culling import split_faces

    rng = np.random.default_rng(0)
    normals = rng.normal(size=(1000, 3))
    normals /= np.linalg.norm(normals, axis=1, keepdims=True)
    groups = split_faces(rng.normal(size=(1000, 3)), normals, 64)
    assert max(map(len, groups)) <= 64
    assert np.array_equal(np.concatenate(groups), np.arange(1000))


def test_a_cluster_is_dropped_only_if_each_of_its_triangles_looks_away():
    from rlt_gym.libero.culling import cluster_bounds, seen

    rng = np.random.default_rng(1)
    everywhere = np.array([[0.0, 0.0, 0.0, 1.0]])  # a plane that everything is in front of
    dropped = 0
    for _ in range(300):
        middle = rng.normal(size=3)
        corners = middle + 0.1 * rng.normal(size=(1, 3)) + 0.2 * rng.normal(size=(8, 3, 3)) * [1, 1, 0.05]
        normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
        normals[normals[:, 2] < 0] *= -1  # they look up, more or less
        normals /= np.linalg.norm(normals, axis=1, keepdims=True)
        eye = 3 * rng.normal(size=3)
        centre, radius, axis, sine = cluster_bounds(corners, normals)
        kept = seen(eye, everywhere, centre[None], np.array([radius]), axis[None], np.array([sine]))[0]
        if not kept:
            dropped += 1
            assert (np.einsum("tki,ti->tk", corners - eye, normals) > 0).all()
    assert dropped > 20


def test_a_mesh_is_cut_only_where_nothing_of_it_is_clipped():
    from types import SimpleNamespace

    from rlt_gym.libero.culling import _unclipped

    scene = SimpleNamespace(camera=[SimpleNamespace(frustum_near=0.5, frustum_far=10.0)])
    planes = np.array([[0, 0, 1, 0], [1, 0, 1, 0], [-1, 0, 1, 0]], dtype=float)  # from the origin along z
    planes[1:] /= np.sqrt(2)
    centre = np.array([[0, 0, 2], [0, 0, 0.55], [1.95, 0, 2], [3, 0, 2], [0, 0, 9.95]], dtype=float)
    inside = _unclipped(scene, planes, centre, np.full(5, 0.1))  # type: ignore[arg-type]
    assert inside.tolist() == [True, False, False, False, False]


@pytest.mark.sim
def test_an_unknown_controller_runs_through_robosuites_loop():
    """In a process of its own, since importing LIBERO changes it."""
    code = """
import warnings
import numpy as np
from rlt_gym.assets import resolve_assets
from rlt_gym.libero.bootstrap import prepare_libero
prepare_libero(resolve_assets("embedded").path)
from rlt_gym.libero.simulator import LiberoSimulator
actions = np.random.default_rng(0).uniform(-1, 1, (10, 7))
def play(simulator):
    simulator.reset("eval", 0, observe=False)
    proprio = simulator.step_chunk(actions, observe=False).observation["proprio"]
    return np.concatenate([simulator.data.qpos, simulator.data.qvel, proprio])
expected = play(LiberoSimulator("libero_goal", 1))
LiberoSimulator._is_default_controller = lambda self: False
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    simulator = LiberoSimulator("libero_goal", 1)
assert any("robosuite's own loop" in str(w.message) for w in caught), caught
assert np.array_equal(play(simulator), expected)
print("same states")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "same states" in done.stdout, done.stderr[-2000:]


@pytest.mark.sim
def test_fixtures_stand_where_stock_puts_them_in_a_scene_with_an_open_drawer():
    """The drawer's random draws come before the cabinet's place. In a process of its own, as above."""
    code = """
import numpy as np
from rlt_gym.assets import resolve_assets
from rlt_gym.libero.bootstrap import prepare_libero
prepare_libero(resolve_assets("embedded").path)
from libero.libero.envs.env_wrapper import ControlEnv
from rlt_gym.libero.simulator import LiberoSimulator
from rlt_gym.libero.tasks import episode_seed, get_task, load_init_states
task = get_task("libero_spatial", 4)
ours = LiberoSimulator("libero_spatial", 4)
for index in (3, 4):
    ours.restart("eval", index)
    stock = ControlEnv(bddl_file_name=str(task.bddl_file), has_offscreen_renderer=False, use_camera_obs=False)
    np.random.seed(episode_seed(task, "eval", index))
    stock.reset()
    stock.set_init_state(load_init_states(task)[index])
    names = [ours.model.body(i).name for i in range(ours.model.nbody)]
    assert "wooden_cabinet_1_main" in names
    for name in names:
        body = ours.model.body(name).id
        assert np.array_equal(ours.data.xpos[body], stock.sim.data.xpos[body]), name
        assert np.array_equal(ours.data.xquat[body], stock.sim.data.xquat[body]), name
print("same scene")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "same scene" in done.stdout, done.stderr[-2000:]


# ---------------------------------------------------------------- coarse meshes, without a simulator


def test_coarse_meshes_stay_close_and_keep_their_orientation():
    from rlt_gym.libero.decimate import cluster_vertices, kept_faces

    # a sphere of radius 0.1 from a grid of latitudes and longitudes, triangles facing outwards
    rings, around = 60, 120
    polar, azimuth = np.linspace(0.01, np.pi - 0.01, rings), np.linspace(0, 2 * np.pi, around, endpoint=False)
    polar, azimuth = (grid.ravel() for grid in np.meshgrid(polar, azimuth, indexing="ij"))
    vertices = 0.1 * np.stack([np.sin(polar) * np.cos(azimuth), np.sin(polar) * np.sin(azimuth), np.cos(polar)], 1)
    ring, turn = (grid.ravel() for grid in np.meshgrid(np.arange(rings - 1), np.arange(around), indexing="ij"))
    a, b = ring * around + turn, ring * around + (turn + 1) % around
    faces = np.concatenate([np.stack([a, a + around, b], 1), np.stack([b, a + around, b + around], 1)])

    number, moved = cluster_vertices(vertices, 0.01)
    assert np.linalg.norm(moved - vertices, axis=1).max() < 0.01 * np.sqrt(3)
    for cell in np.unique(number)[:20]:
        assert np.allclose(moved[number == cell], vertices[number == cell].mean(axis=0))
    keep = kept_faces(number[faces])
    assert len(keep) < 0.35 * len(faces)
    corners = moved[faces[keep]]
    normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    outwards = np.einsum("ni,ni->n", normals, corners.mean(axis=1)) > 0
    assert outwards.mean() > 0.97
    kinds = {tuple(np.roll(c, -int(np.argmin(c)))) for c in number[faces].tolist() if len(set(c)) == 3}
    assert len(kinds) == len(keep)
