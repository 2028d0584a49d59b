"""Physics and pictures equal those of stock LIBERO, live and bit for bit.

``pytest -m exact`` plays two episodes of 300 control steps (or the expert's way to success) of eleven tasks, on the
official assets where ``RLT_LIBERO_ASSETS`` names them and on the embedded ones. The default run plays a short slice.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from run_helpers import ROOT

from rlt_gym.libero.vector_env import LiberoVectorEnv

SCRIPT = ROOT / "tests" / "helpers" / "compare_with_stock.py"
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


# ---------------------------------------------------------------- the switches that turn shortcuts off


def played(assets: str, folder, **switches) -> dict[str, np.ndarray]:
    """What two workers on two tasks (with a drawer; with the stove, a mirror) show in four chunks, and their states."""
    folder.mkdir()
    env = LiberoVectorEnv(
        2,
        "libero_goal",
        [0, 7],
        chunk_length=3,
        assets=assets,
        image_size=48,
        obs_stride=1,
        render_mode="rgb_array",
        critical_phase="intervention_hooks:note_state",
        critical_phase_kwargs={"folder": str(folder)},
        **switches,
    )
    try:
        shown = [env.reset(seed=3)[0]]
        actions = np.random.default_rng(0).uniform(-1, 1, (4, 2, 3, 7)) - [0, 0, 0.3, 0, 0, 0, 0]
        for chunk in np.clip(actions, -1, 1):
            obs, rewards, *_, infos = env.step(chunk)
            inner = {f"inner_{key}": value for key, value in infos["inner_obs"].items()}
            shown.append({**obs, **inner, "rewards": rewards, "step_rewards": infos["step_rewards"]})
        found = {f"{number} {key}": value for number, part in enumerate(shown) for key, value in part.items()}
        states = {f"states of {number}": np.fromfile(folder / str(pid)) for number, pid in enumerate(env.worker_pids)}
        return {**found, **states, "frames": env.render()}
    finally:
        env.close()


@pytest.mark.sim
@pytest.mark.parametrize("assets", ASSETS)
def test_nothing_changes_when_shortcuts_are_switched_off(assets, tmp_path):
    """Pictures, inner pictures, frames, rewards, proprioception and whole states, bit for bit."""
    if assets == "official" and not os.environ.get("RLT_LIBERO_ASSETS"):
        pytest.skip("RLT_LIBERO_ASSETS is not set")
    expected = played(assets, tmp_path / "exact", render="exact")
    assert {name.split()[-1] for name in expected} >= {"agentview", "wrist", "proprio", "inner_wrist"}
    assert all(len(expected[f"states of {number}"]) > 5 * 40 for number in range(2))
    for name, switches in (("stock", {"render": "stock"}), ("both", {"render": "stock", "compiled": False})):
        found = played(assets, tmp_path / name, **switches)
        assert found.keys() == expected.keys()
        different = [name for name in expected if not np.array_equal(found[name], expected[name])]
        assert not different, (switches, different)


@pytest.mark.sim
def test_switched_off_shortcuts_are_not_even_imported(tmp_path):
    """Neither by the zygote, which builds ahead, nor by its workers."""
    interpreter = tmp_path / "python"  # its own, so that it does not share the zygote of other environments
    interpreter.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    interpreter.chmod(0o755)
    shortcuts = {"culling", "triangles", "merged_boxes", "display_lists", "decimate", "camera_geometry", "shortcuts"}
    arguments = {"assets": "embedded", "image_size": 48, "worker_start": "zygote", "worker_python": interpreter}

    def loaded(**switches) -> set[str]:
        env = LiberoVectorEnv(1, "libero_goal", [1], **arguments, **switches)
        try:
            env.reset(seed=0)
            env.step(np.zeros((1, 8, 7)))
            question = {"task_id": 1, "arguments": {}}
            (names,) = env.call_workers("rlt_gym.libero.worker.fault_injection:loaded_modules", [question])
        finally:
            env.close()
        return {name.rpartition(".")[2] for name in names if name.startswith("rlt_gym.libero.")}

    assert not loaded(render="stock", compiled=False) & (shortcuts | {"controller"})
    assert loaded(render="exact") >= shortcuts | {"controller"}


def test_switches_are_checked_before_any_process_starts():
    with pytest.raises(ValueError, match=r"render must be one of \('exact', 'fast', 'stock'\), got 'best'"):
        LiberoVectorEnv(assets="embedded", render="best")
    with pytest.raises(ValueError, match="compiled must be True or False, got 1"):
        LiberoVectorEnv(assets="embedded", compiled=1)


# ---------------------------------------------------------------- culling, without a simulator


WINDOW = np.array([-0.4, 0.4, -0.4, 0.4, 1.0, 100.0])  # left, right, bottom, top at the near plane, near, far
AHEAD = np.hstack([np.eye(3), [[0.0], [0.0], [2.0]]])


def chosen_triangles(vertices, faces, size, samples, facing=1.0):
    """
    :return: Numbers of the triangles to draw, the parts they are drawn in, and the corners in pixels.
    """
    from rlt_gym.libero.rendering.triangles import BATCH, select_triangles

    screen, chosen = np.empty((len(vertices), 4)), np.empty(len(faces) + 1, dtype=np.int32)
    parts = np.empty(len(faces) // BATCH + 3, dtype=np.int64)
    count, number = select_triangles(
        vertices, faces, AHEAD, WINDOW, float(size), samples, facing, screen, chosen, parts
    )  # fmt: skip
    return chosen[:count].copy(), np.split(chosen[:count].copy(), parts[1:number]), screen


def small_triangles(rng, count, spread):
    """Small triangles, every other one a sliver, that look everywhere."""
    middle = rng.uniform(-spread, spread, (count, 1, 3)) * [1, 1, 0.3]
    corners = middle + rng.uniform(-1, 1, (count, 3, 3)) * rng.uniform(0.001, 0.03, (count, 1, 1))
    corners[::2, 2] = corners[::2, 1] + 0.02 * (corners[::2, 2] - corners[::2, 1])
    return corners.reshape(-1, 3), np.arange(3 * count, dtype=np.int32).reshape(-1, 3)


@pytest.mark.parametrize("facing", [1.0, -1.0])
def test_a_triangle_is_left_out_only_if_no_sample_can_see_it(facing):
    """Even after OpenGL has moved its corners by a fraction of a pixel. Checked by intersection at each sample."""
    rng = np.random.default_rng(0)
    vertices, faces = small_triangles(rng, 2000, 0.9)
    samples = np.array([(0.375, 0.125), (0.875, 0.375), (0.125, 0.625), (0.625, 0.875)])
    chosen, _, screen = chosen_triangles(vertices, faces, 32, samples, facing)
    assert np.all(np.diff(chosen) > 0)
    assert 100 < len(chosen) < 1000
    grid = np.stack(np.meshgrid(np.arange(32), np.arange(32)), axis=-1).reshape(-1, 1, 2)
    points = (grid + samples).reshape(-1, 2)
    for left_out in np.setdiff1d(np.arange(len(faces)), chosen):
        for _ in range(3):
            corners = screen[faces[left_out], :2] + rng.uniform(-1, 1, (3, 2)) / 256
            away = [corner - points for corner in corners]
            turns = [
                facing * (a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0]) for a, b in zip(away, away[1:] + away[:1], strict=True)
            ]
            assert not (np.array(turns) > 0).all(axis=0).any(), left_out


def test_batches_that_are_clipped_stay_so_and_are_not_mixed_with_others():
    """OpenGL must draw what is left of a batch of triangles in the way it would draw all of it."""
    from rlt_gym.libero.rendering.triangles import BATCH

    rng = np.random.default_rng(1)
    inside, faces = small_triangles(rng, 3 * BATCH, 0.3)
    partly, more = small_triangles(rng, 2 * BATCH, 1.2)
    vertices = np.concatenate([inside, partly, inside])
    faces = np.concatenate([faces, more + len(inside), faces + len(inside) + len(partly)])
    chosen, parts, screen = chosen_triangles(vertices, faces, 64, np.full((1, 2), 0.5))
    outside = (screen[faces, 3] < 0).any(axis=1)
    assert len(parts) >= 3 and np.array_equal(np.concatenate(parts), chosen)
    clipped = {int(batch) for batch in np.flatnonzero(outside) // BATCH}
    assert clipped == {3, 4}
    for part in parts:
        kinds = {int(index) // BATCH in clipped for index in part}
        assert len(kinds) == 1
        if kinds == {True}:
            assert outside[part].any() and len(part) <= BATCH


#: What the scenes below begin with. They are drawn in processes of their own: the GL back end is chosen on import.
DRAWING = """
import os
os.environ.setdefault("MUJOCO_GL", "osmesa")
os.environ.setdefault("PYOPENGL_PLATFORM", os.environ["MUJOCO_GL"])
os.environ.setdefault("LP_NUM_THREADS", "0")
import mujoco
import numpy as np
from rlt_gym.libero.rendering import renderer as render
from rlt_gym.libero.rendering import shortcuts


def throw(data, reach, rng):
    "Put free bodies anywhere, turned anyhow."
    places = data.qpos.reshape(-1, 7)
    places[:, :3] = rng.uniform(-reach, reach, (len(places), 3))
    places[:, 3:] = rng.normal(size=(len(places), 4))


def sample(model, data):
    mujoco.mj_kinematics(model, data)
    mujoco.mj_camlight(model, data)
    return {name: np.array(getattr(data, name)) for name in render.KINEMATICS}
"""


def draws_the_same_pictures(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", DRAWING + code], capture_output=True, text=True)
    assert "same pictures" in done.stdout, done.stderr[-2000:]


@pytest.mark.sim
@pytest.mark.parametrize("mirror", [True, False])
def test_culled_pictures_equal_plain_ones(mirror):
    """A scene of MuJoCo's alone: things move a lot, a little and not at all, in and out of the view."""
    code = (
        f"material = 'material=\"m\"' if {mirror} else ''"
        + """
model = mujoco.MjModel.from_xml_string(f'''
<mujoco>
  <asset>
    <mesh name="ball" builtin="sphere" params="4" scale="0.1 0.1 0.1"/>
    <material name="m" reflectance="0.5"/>
  </asset>
  <worldbody>
    <light pos="1 1 3" castshadow="false"/>
    <camera name="c" pos="0 -1.2 0.7" xyaxes="1 0 0 0 0.5 0.87"/>
    <geom type="box" size="0.4 0.4 0.02" rgba="0.4 0.4 0.5 1" group="1" {material}/>
    <body pos="0 0 0.2"><freejoint/><geom type="mesh" mesh="ball" rgba="1 0 0 1" group="1"/></body>
    <body pos="0.3 0 0.2"><freejoint/><geom type="mesh" mesh="ball" rgba="0 1 0 1" group="1"/></body>
  </worldbody>
</mujoco>''')
data = mujoco.MjData(model)
culled = render.Renderer(model, 64)
assert culled._culling is not None
rng = np.random.default_rng(0)
samples, pictures = [], []
for number in range(90):
    if number % 10 == 0:
        data.qpos[:3] = rng.uniform(-0.6, 0.6, 3) + [0, 0, 0.5]
    data.qpos[7:10] += rng.uniform(-1, 1, 3) * (1e-5 if number % 3 else 3e-2)
    samples.append(sample(model, data))
    pictures.append(culled.render(samples[-1], "c"))
pictures.append(culled.render(samples[-1], "c", 96))
culled.close()
shortcuts.can_cull, shortcuts.geom_records = lambda *_: False, lambda *_: None
for quality in ("exact", "stock"):
    plain = render.Renderer(model, 64, quality)
    assert plain._culling is None
    expected = [plain.render(sample, "c") for sample in samples] + [plain.render(samples[-1], "c", 96)]
    plain.close()
    different = [int((a != b).sum()) for a, b in zip(pictures, expected)]
    assert not any(different), (quality, different)
assert len({picture.tobytes() for picture in expected}) > 20
print("same pictures")
"""
    )
    draws_the_same_pictures(code)


@pytest.mark.sim
def test_whole_geoms_outside_the_picture_are_left_out():
    """A scene without meshes: boxes, a cylinder and something invisible, which move in and out of the view."""
    code = """
kinds = [("box", "0.3 0.01 0.02"), ("box", "0.05 0.05 0.25"), ("cylinder", "0.02 0.3"), ("capsule", "0.03 0.1")]
bodies = "".join(
    f'<body pos="0 0 0.2"><freejoint/><geom type="{kind}" size="{size}" group="1"/>'
    f'<site type="cylinder" size="0.02 5" rgba="1 0 0 {-0.5 if number % 2 else 0.5}"/></body>'
    for number, (kind, size) in enumerate(kinds * 3)
)
model = mujoco.MjModel.from_xml_string(f'''
<mujoco>
  <worldbody>
    <light pos="1 1 3" castshadow="false"/>
    <camera name="c" pos="0 -1.2 0.7" xyaxes="1 0 0 0 0.5 0.87"/>
    <geom type="plane" size="3 3 0.1" rgba="0.4 0.4 0.5 1" group="1"/>
    {bodies}
  </worldbody>
</mujoco>''')
data = mujoco.MjData(model)
culled = render.Renderer(model, 64, "fast")
rng = np.random.default_rng(0)
samples, pictures, drawn = [], [], []
for _ in range(60):
    throw(data, 1.5, rng)
    samples.append(sample(model, data))
    pictures.append(culled.render(samples[-1], "c"))
    drawn.append(culled._scene.ngeom)
culled.close()
shortcuts.geom_records = lambda *_: None
plain = render.Renderer(model, 64, "fast")
expected = [plain.render(sample, "c") for sample in samples]
different = [int((a != b).sum()) for a, b in zip(pictures, expected)]
assert not any(different), different
assert np.mean(drawn) < 0.8 * plain._scene.ngeom, (np.mean(drawn), plain._scene.ngeom)
assert len({picture.tobytes() for picture in expected}) > 50
print("same pictures")
"""
    draws_the_same_pictures(code)


def test_viewer_flags_are_left_out_for_a_moment_only():
    """Collisions are the same without, and the model can be copied again afterwards."""
    import copy

    import mujoco
    import numpy as np

    from rlt_gym.libero.worker.controller import without_viewer_flags

    model = mujoco.MjModel.from_xml_string("""
    <mujoco>
      <asset><mesh name="ball" builtin="sphere" params="3" scale="0.1 0.1 0.1"/></asset>
      <worldbody>
        <geom type="plane" size="3 3 1"/>
        <body pos="0 0 0.09"><freejoint/><geom type="mesh" mesh="ball"/><geom type="box" size="0.05 0.05 0.05"/></body>
        <body pos="0 0.1 0.09"><freejoint/><geom type="mesh" mesh="ball"/><geom type="box" size="0.1 0.1 0.1"/></body>
      </worldbody>
    </mujoco>""")
    volumes = model.nbvh
    bodies = int(model.body_bvhnum.sum())
    expected, data = mujoco.MjData(model), mujoco.MjData(model)
    for _ in range(20):
        mujoco.mj_step(model, expected)
        with without_viewer_flags(model):
            assert bodies <= model.nbvh < volumes
            mujoco.mj_step(model, data)
        assert model.nbvh == volumes
    assert data.ncon == expected.ncon > 0
    np.testing.assert_array_equal(data.qpos, expected.qpos)
    assert copy.copy(model).nbvh == volumes


@pytest.mark.sim
def test_small_boxes_of_a_body_are_drawn_as_one_in_the_same_picture():
    """Two kinds of boxes turned every way on two bodies, some large or transparent: those stay as they are."""
    code = """
rng = np.random.default_rng(0)
def boxes(count, rgba, most=0.08):
    rows = zip(rng.uniform(-0.2, 0.2, (count, 3)), rng.uniform(0.02, most, (count, 3)), rng.normal(size=(count, 4)))
    return "".join(
        '<geom type="box" group="1" rgba="%s" pos="%s" size="%s" quat="%s"/>'
        % (rgba, *(" ".join(map(str, numbers)) for numbers in row)) for row in rows
    )
colours = ("0.8 0.2 0.1 1", "0.1 0.3 0.8 1")
body = "<body><freejoint/>" + "".join(boxes(10, c) for c in colours) + "%s</body>"
model = mujoco.MjModel.from_xml_string(f'''
<mujoco>
  <visual><headlight ambient="0.3 0.3 0.3" diffuse="0.5 0.5 0.5"/></visual>
  <worldbody>
    <light pos="1 1 3" castshadow="false"/>
    <camera name="c" pos="0 -1.2 0.7" xyaxes="1 0 0 0 0.5 0.87"/>
    <geom type="plane" size="3 3 1" rgba="0.4 0.4 0.5 1" group="1"/>
    {body % boxes(2, "0 1 0 0.5")}{body % boxes(2, colours[0], 0.6)}
  </worldbody>
</mujoco>''')
data = mujoco.MjData(model)
merged = render.Renderer(model, 128, "fast")
samples, pictures, drawn = [], [], []
for _ in range(20):
    throw(data, 0.5, rng)
    samples.append(sample(model, data))
    pictures.append(merged.render(samples[-1], "c"))
    drawn.append(merged._scene.ngeom)
merged.close()
shortcuts.geom_records = lambda *_: None
plain = render.Renderer(model, 128, "fast")
expected = [plain.render(sample, "c") for sample in samples]
assert plain._scene.ngeom == 1 + 2 * 22 and max(drawn) <= 1 + 4 + 2 + 2, drawn
assert len({picture.tobytes() for picture in expected}) == 20
difference = np.abs(np.array(pictures).astype(int) - np.array(expected)).max(axis=-1)
assert difference.mean() < 0.3 and (difference > 8).mean() < 1e-3, (difference.mean(), (difference > 8).mean())
print("same pictures", difference.mean(), (difference > 8).mean())
"""
    draws_the_same_pictures(code)


@pytest.mark.sim
def test_what_cannot_be_compiled_runs_through_robosuites_loop():
    """In a process of its own, since importing LIBERO changes it."""
    code = """
import warnings
import numpy as np
from rlt_gym.libero.assets import resolve_assets
from rlt_gym.libero.worker.libero_import import prepare_libero
prepare_libero(resolve_assets("embedded").path)
from rlt_gym.libero.worker import controller
from rlt_gym.libero.worker.simulator import LiberoSimulator
actions = np.random.default_rng(0).uniform(-1, 1, (10, 7))
def play(simulator):
    simulator.reset("eval", 0, observe=False)
    proprio = simulator.step_chunk(actions, observe=False).observation["proprio"]
    return np.concatenate([simulator.data.qpos, simulator.data.qvel, proprio])
expected = play(LiberoSimulator("libero_goal", 1))
def check(words):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        simulator = LiberoSimulator("libero_goal", 1)
    assert any(words in str(w.message) and "robosuite's own loop" in str(w.message) for w in caught), caught
    assert not simulator.compiled
    return simulator
find = controller.find_functions
controller.find_functions = lambda: None
check("not found in this MuJoCo")
controller.find_functions = find
controller._is_default_controller = lambda problem: False
assert np.array_equal(play(check("OSC_POSE")), expected)
with warnings.catch_warnings():
    warnings.simplefilter("error")
    asked = LiberoSimulator("libero_goal", 1, compiled=False)
assert not asked.compiled and np.array_equal(play(asked), expected)
print("same states")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "same states" in done.stdout, done.stderr[-2000:]


@pytest.mark.sim
def test_fixtures_stand_where_stock_puts_them_in_a_scene_with_an_open_drawer():
    """The drawer's random draws come before the cabinet's place. In a process of its own, as above."""
    code = """
import numpy as np
from rlt_gym.libero.assets import resolve_assets
from rlt_gym.libero.worker.libero_import import prepare_libero
prepare_libero(resolve_assets("embedded").path)
from libero.libero.envs.env_wrapper import ControlEnv
from rlt_gym.libero.worker.simulator import LiberoSimulator
from rlt_gym.libero.suites.tasks import episode_seed, get_task, load_init_states
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
    from rlt_gym.libero.rendering.decimate import cluster_vertices, kept_faces

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
