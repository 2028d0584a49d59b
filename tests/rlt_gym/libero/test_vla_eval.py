"""LIBERO as a benchmark of vla-eval: its own harness and server play it; what they see and get is the environment's."""

import numpy as np
import pytest

pytest.importorskip("vla_eval")

from vla_eval.api import run, serve_background
from vla_eval.model_servers.predict import PredictModelServer

from rlt_gym.libero.vector_env import LiberoVectorEnv
from rlt_gym.libero.vla_eval import LiberoBenchmark
from rlt_gym.vla import load_vla

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
STEPS = 6
NAME = "rlt_gym.libero.vla_eval:LiberoBenchmark"


class Server(PredictModelServer):
    """Asks for both pictures and the state, as this package's VLAs read them."""

    def get_action_spec(self):
        return {}

    def get_observation_spec(self):
        return {}

    def get_observation_params(self):
        return {"send_wrist_image": True, "send_state": True, "quat_no_antipodal": True}


class Replayed(Server):
    """Plays known actions, and keeps what it is shown."""

    def __init__(self, actions):
        super().__init__()
        self.actions, self.shown = actions, []

    def predict(self, obs, ctx):
        self.shown.append(obs)
        return {"actions": self.actions[ctx.step % len(self.actions)]}


def evaluate(server, out, **entry):
    entry = {"benchmark": NAME, "episodes_per_task": 2, "max_tasks": 2, "recording": {"record_video": False}} | entry
    with serve_background(server) as handle:
        config = {"render": "cpu", "benchmarks": [entry]}
        (result,) = run(config, server_url=handle.url, output_dir=out, docker=False, no_save=True)
    return result


@pytest.mark.sim
def test_the_harness_sees_the_environment(tmp_path):
    """Two tasks, two of LIBERO's initial states each: every picture and every state is that of LIBERO-v0."""
    actions = np.random.default_rng(0).uniform(-1, 1, (STEPS, 7))
    server = Replayed(actions)
    params = {"suite": "libero_goal", "max_steps": STEPS, "env_kwargs": {"assets": "embedded"}}
    result = evaluate(server, tmp_path, params=params)
    assert [len(task["episodes"]) for task in result["tasks"]] == [2, 2]
    assert not any(episode["metrics"]["success"] for task in result["tasks"] for episode in task["episodes"])
    played = actions.copy()
    played[:, 6] = np.where(actions[:, 6] < 0, -1.0, 1.0)
    env = LiberoVectorEnv(
        1,
        "libero_goal",
        chunk_length=1,
        image_size=256,
        assets="embedded",
        init_states="eval",
        task_ids=[0, 1],
        max_episode_steps=STEPS,
    )
    seen = {}
    try:
        obs, infos = env.reset()  # it resets itself; tasks take turns: 0, 1, 0, 1
        for _ in range(4):
            instruction = infos["instruction"][0]
            for step in range(STEPS):
                seen.setdefault(instruction, []).append({key: value[0].copy() for key, value in obs.items()})
                obs, *_, infos = env.step(played[None, None, step])
    finally:
        env.close()
    shown = {}
    for given in server.shown:
        shown.setdefault(given["task_description"], []).append(given)
    assert set(shown) == set(seen) and [len(rows) for rows in shown.values()] == [2 * STEPS, 2 * STEPS]
    for instruction, rows in seen.items():
        for want, given in zip(rows, shown[instruction], strict=True):
            for camera in ("agentview", "wrist"):
                np.testing.assert_array_equal(given["images"][camera], want[camera][::-1, ::-1])
            np.testing.assert_array_equal(given["states"], want["proprio"].astype(np.float64))


class Mini(Server):
    """The shipped VLA; the harness's server plays its chunk step by step."""

    def __init__(self):
        super().__init__(chunk_size=8)
        self.vla = load_vla("mini")

    def predict(self, obs, ctx):
        size = self.vla.spec.check_frame_size()
        pictures = {}
        for camera, picture in obs["images"].items():
            blocks = picture[::-1, ::-1].reshape(size, 256 // size, size, 256 // size, 3)
            pictures[camera] = blocks.mean((1, 3)).round().astype(np.uint8)[None]
        state = obs["states"].astype(np.float32)[None]
        output = self.vla.forward({**pictures, "state": state}, [obs["task_description"]], seed=[0])
        return {"actions": output.chunk[0, :8].numpy()}


@pytest.mark.sim
@pytest.mark.expensive
def test_success_is_counted_and_ends_the_episode(tmp_path):
    params = {"suite": "libero_goal", "max_steps": 120, "env_kwargs": {"assets": "embedded", "render": "fast"}}
    result = evaluate(Mini(), tmp_path, params=params, episodes_per_task=3, tasks=["put the bowl on the stove"])
    (task,) = result["tasks"]
    episodes = task["episodes"]
    assert {episode["metrics"]["success"] for episode in episodes} == {True, False}
    assert all((episode["steps"] < 120) == episode["metrics"]["success"] for episode in episodes)


def test_the_rotation_is_the_shorter_one_unless_robosuites_is_asked_for():
    from scipy.spatial.transform import Rotation

    proprio = np.zeros(8, dtype=np.float32)
    proprio[3:6] = 3.5 * np.array([0.6, 0.0, -0.8])
    short = LiberoBenchmark("libero_goal")._state(proprio)[3:6]
    np.testing.assert_allclose(short, Rotation.from_rotvec(proprio[3:6]).as_rotvec(), atol=1e-6)
    assert np.linalg.norm(short) < np.pi
    kept = LiberoBenchmark("libero_goal", quat_no_antipodal=True)._state(proprio)
    np.testing.assert_array_equal(kept, proprio)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"suite": "libero_gaol"}, "Unknown LIBERO suite 'libero_gaol'"),
        ({"absolute_action": True}, "relative actions only"),
        ({"num_steps_wait": 0}, "num_steps_wait is 0; LIBERO-v0 lets objects settle for 10 steps"),
    ],
)
def test_what_it_cannot_do_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LiberoBenchmark(**arguments)
