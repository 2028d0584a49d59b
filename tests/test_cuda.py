"""VLA, encoder and learner give on a GPU what they give on the CPU; without a GPU the same code runs on the CPU."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from rlt_gym.rl_token.io import load_rl_token
from rlt_gym.testing import FakeRLTokenVectorEnv
from rlt_gym.vla import load_vla
from rlt_sb3 import RLT, GymnasiumVecEnv

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("device", DEVICES)
def test_the_shipped_vla_and_its_rl_token(device):
    here, there, rng = load_vla("mini"), load_vla("mini", device), np.random.default_rng(0)
    size = here.spec.frame_size
    obs = {camera: rng.integers(0, 256, (3, size, size, 3), dtype=np.uint8) for camera in here.spec.cameras}
    obs["state"] = rng.normal(size=(3, 8)).astype(np.float32)
    tasks = ["open the drawer", "lift the bowl", "push the plate"]
    expected, output = here.forward(obs, tasks), there.forward(obs, tasks)
    assert output.tokens.device.type == device and here.fingerprint() == there.fingerprint()
    torch.testing.assert_close(output.tokens.cpu(), expected.tokens, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(output.chunk.cpu(), expected.chunk, atol=2e-3, rtol=0)
    z_rl = load_rl_token("auto", there, device)(output)
    assert z_rl.device.type == device
    torch.testing.assert_close(z_rl.cpu(), load_rl_token("auto", here)(expected), atol=5e-3, rtol=5e-3)


LAUNCHED, RECORDED = (pytest.param("cuda", graphs, marks=pytest.mark.cuda) for graphs in (False, True))


@pytest.mark.parametrize(("device", "graphs"), [("cpu", True), LAUNCHED, RECORDED])
def test_updates_of_the_learner(device, graphs):
    """Equal rows, equal weights at first, nothing random in an update: equal weights afterwards."""

    def learner(on, graphs=True):
        env = GymnasiumVecEnv(FakeRLTokenVectorEnv(2, chunk_length=4, token_dim=16, seed=0))
        settings = {"learning_starts": 60, "critic_warmup_updates": 0, "reference_dropout": 0.0, "gate": False}
        networks = {"net_arch": [32, 32], "critic_precision": "float32", "cuda_graphs": graphs}
        networks["offset_search"] = {"opening": 0}  # else the actor is not updated while the search opens
        model = RLT("MultiInputPolicy", env, batch_size=32, seed=0, device=on, policy_kwargs=networks, **settings)
        return model.learn(60)  # chunks of the VLA only: the rows do not depend on the device

    here, there = learner("cpu"), learner(device, graphs)
    there.policy.load_state_dict(here.policy.state_dict())
    before = {name: value.clone() for name, value in here.policy.state_dict().items()}
    for model in (here, there):
        model.num_timesteps = 10**6
        np.random.seed(1)
        model.train(gradient_steps=16, batch_size=32)
    moved = []
    for name, value in here.policy.state_dict().items():
        found = there.policy.state_dict()[name]
        assert found.device.type == device
        torch.testing.assert_close(found.cpu(), value, atol=1e-4, rtol=1e-3, msg=name)
        moved += [] if torch.equal(value, before[name]) else [name.split(".")[0]]
    assert len(moved) > 10 and "actor" in moved
    recorded = 0 if there._graphs is None else len(there._graphs.recorded)
    assert recorded == (2 if device == "cuda" and graphs else 0)  # with and without the actor's update


@pytest.mark.parametrize("device", DEVICES)
def test_batches_of_the_replay_buffer(device):
    """Copies to a GPU run beside Python: many batches are drawn before the first one is read."""

    def draw(on):
        env = GymnasiumVecEnv(FakeRLTokenVectorEnv(2, chunk_length=4, token_dim=256, seed=0))
        model = RLT("MultiInputPolicy", env, seed=0, device=on, learning_starts=1000).learn(300)
        np.random.seed(0)
        return [batch for _ in range(20) for batch in model.replay_buffer.sample_batches(5, 64)]

    for expected, found in zip(draw("cpu"), draw(device), strict=True):
        for one, other in zip(expected, found, strict=True):
            for key in one if isinstance(one, dict) else [...]:
                assert other[key].device.type == device
                torch.testing.assert_close(other[key].cpu(), one[key], rtol=0, atol=0)


LEARN = """
import hashlib, sys
from rlt_gym.testing import FakeRLTokenVectorEnv
from rlt_sb3 import RLT, GymnasiumVecEnv
from rlt_sb3.experiment.environment import set_deterministic

set_deterministic(True)
env = GymnasiumVecEnv(FakeRLTokenVectorEnv(2, chunk_length=4, token_dim=16, seed=0))
settings = dict(learning_starts=40, critic_warmup_updates=20, batch_size=32)
model = RLT("MultiInputPolicy", env, seed=int(sys.argv[2]), device=sys.argv[1], **settings).learn(240)
weights = b"".join(value.cpu().numpy().tobytes() for value in model.policy.state_dict().values())
print(model._n_updates, hashlib.sha256(weights).hexdigest())
"""


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.expensive), DEVICES[1]])
def test_equal_seeds_learn_equal_weights(device):
    """In processes of their own, because torch must not have used the GPU before it is told to be deterministic."""

    def learn(seed):
        call = [sys.executable, "-W", "ignore", "-c", LEARN, device, str(seed)]
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout.split()

    one, again, other = learn(0), learn(0), learn(1)
    assert one == again and one != other
    assert int(one[0]) > 100


@pytest.mark.cuda
def test_pictures_of_egl_are_those_of_osmesa(monkeypatch):
    """The GPU rounds edges and textures in another way, so pixels differ a little, and states do not at all."""
    from rlt_gym.libero.vector_env import LiberoVectorEnv

    shown = []
    for backend in ("egl", "osmesa"):
        monkeypatch.setenv("MUJOCO_GL", backend)
        monkeypatch.setenv("PYOPENGL_PLATFORM", backend)
        env = LiberoVectorEnv(1, "libero_goal", [1], assets="embedded", seed=0)
        try:
            env.reset(seed=0)
            shown.append(env.step(np.zeros(env.action_space.shape, np.float32))[0])
        finally:
            env.close()
    egl, osmesa = shown
    np.testing.assert_array_equal(egl["proprio"], osmesa["proprio"])
    for camera in ("agentview", "wrist"):
        assert egl[camera].std() > 10
        assert np.abs(egl[camera].astype(float) - osmesa[camera].astype(float)).mean() < 3.0
