"""The compiled control loop gives way to robosuite's own, and a scene is built as stock LIBERO builds it."""

import subprocess
import sys

import numpy as np
import pytest


def test_viewer_flags_are_left_out_for_a_moment_only():
    """Collisions are the same without, and the model can be copied again afterwards."""
    import copy

    import mujoco

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
def test_what_cannot_be_compiled_runs_through_robosuites_loop():
    """Run in a separate process, since importing LIBERO changes it."""
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
def test_fixtures_beside_an_open_drawer_stand_as_in_stock():
    """The drawer's random draws come before the cabinet's place. In a separate process, as above."""
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


@pytest.mark.sim
@pytest.mark.parametrize(
    ("suite", "task_id"), [("libero_spatial", 6), ("libero_spatial", 4), ("libero_goal", 1), ("libero_10", 5)]
)
def test_sampled_scenes_are_those_of_stock_liberos_hard_reset(suite: str, task_id: int):
    """
    Objects on a stove or cabinet stand on it, whatever was played before. In a separate process, as above.

    LIBERO's own soft reset adds the fixture's last place to its new one: a bowl of the first task falls beside the
    table, and the one in the drawer of the second stands elsewhere.
    """
    code = f"""
import numpy as np
from rlt_gym.libero.assets import resolve_assets
from rlt_gym.libero.worker.libero_import import prepare_libero
prepare_libero(resolve_assets("embedded").path)
from libero.libero.envs.env_wrapper import ControlEnv
from rlt_gym.libero.worker.simulator import LiberoSimulator
from rlt_gym.libero.suites.tasks import episode_seed, get_task
task = get_task({suite!r}, {task_id})
ours = LiberoSimulator({suite!r}, {task_id}, image_size=64)
for split, index in (("train", 5), ("selection", 0), ("eval", 60), ("train", 5)):
    ours.restart(split, index)
    stock = ControlEnv(bddl_file_name=str(task.bddl_file), has_offscreen_renderer=False, use_camera_obs=False)
    np.random.seed(episode_seed(task, split, index))
    stock.reset()
    movable = stock.env.objects_dict.values()
    for joint in [one.joints[-1] for one in movable]:
        assert np.array_equal(ours.data.joint(joint).qpos, stock.sim.data.get_joint_qpos(joint)), joint
    for fixture in stock.env.fixtures_dict.values():
        body = ours.model.body(fixture.root_body).id
        assert np.array_equal(ours.model.body_pos[body], stock.sim.model.body_pos[body]), fixture.name
print("same scenes")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "same scenes" in done.stdout, done.stderr[-2000:]


@pytest.mark.sim
@pytest.mark.parametrize("render", ["fast", "exact", "stock"])
def test_simulators_that_rest_with_their_gl_context_draw_what_they_drew_alone(render: str):
    """Each first draws while no other context is there. In a separate process, as above."""
    code = f"""
import numpy as np
from rlt_gym.libero.assets import resolve_assets
from rlt_gym.libero.worker.libero_import import prepare_libero
prepare_libero(resolve_assets("embedded").path)
from rlt_gym.libero.worker.simulator import LiberoSimulator
def play(simulator):
    simulator.reset("train", 0)
    seen = simulator.step_chunk(np.full((4, 7), 0.3)).observation
    return seen["agentview"].copy(), seen["wrist"].copy()
def same(simulator, alone):
    return all(np.array_equal(*pair) for pair in zip(play(simulator), alone))
simulators = [LiberoSimulator("libero_goal", task_id, 64, {render!r}) for task_id in (1, 3, 9)]
alone = []
for simulator in simulators:
    alone.append(play(simulator))
    simulator.close()
assert not any(np.array_equal(picture, alone[0][0]) for picture in (alone[1][0], alone[2][0]))
for turn in range(2):
    assert all(same(*pair) for pair in zip(simulators, alone)), turn
# the objects of a closed context are not the others'
simulators[0].close()
assert all(same(*pair) for pair in reversed(list(zip(simulators, alone))))
for simulator in simulators:
    simulator.close()
print("same pictures")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "same pictures" in done.stdout, done.stderr[-2000:]
