"""Where the right answer is known beforehand: values of small decision processes, counts of steps, a saved model."""

import io
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from rlt_models import Rows, fast, make_model, make_venv, random_obs
from run_helpers import same
from safetensors import safe_open
from stable_baselines3.common.logger import Logger

import rlt_gym
from rlt_gym.testing import FakeRLTokenVectorEnv
from rlt_sb3 import RLT
from rlt_sb3.experiment.checkpoints import write_checkpoint
from rlt_sb3.experiment.models import check_fits, load_model
from rlt_sb3.rlt.policies import RLTFeatures

pytestmark = pytest.mark.usefixtures("one_thread")

C, D, GAMMA = 4, 7, 0.9


def value_model(**kwargs) -> RLT:
    """A model whose observations are written by hand; ``proprio`` as it is, target actions without noise."""
    venv = make_venv(1)
    settings = dict(
        gamma=GAMMA, learning_rate=3e-3, tau=0.05, policy_delay=1, target_policy_noise=0.0, n_steps=1,
        q_bounds=None, critic_warmup_updates=10**6, buffer_size=400, policy_kwargs={"n_critics": 2},
    )  # fmt: skip
    model = make_model(venv=venv, **(settings | kwargs))
    model.set_logger(Logger(None, []))
    assert isinstance(model.observation_space, spaces.Dict)
    return model


def state(model: RLT, number: int) -> dict[str, np.ndarray]:
    """State number n: another token for each, always the same chunk of the VLA."""
    z = np.random.default_rng(number).normal(size=(1, *model.observation_space["z_rl"].shape))
    return {
        "z_rl": z.astype(np.float32),
        "proprio": np.full((1, 8), 0.1, np.float32),
        "vla_ref": np.full((1, C, D), 0.2, np.float32),
    }


def learned_q(model: RLT, numbers) -> np.ndarray:
    rng = np.random.default_rng(99)
    out = []
    for number in numbers:
        obs = {key: np.repeat(value, 8, axis=0) for key, value in state(model, number).items()}
        actions = th.as_tensor(rng.uniform(-1, 1, (8, C * D)).astype(np.float32))
        with th.no_grad():
            out.append(float(model.critic.q_values(model.policy.obs_to_tensor(obs)[0], actions).mean()))
    return np.array(out)


@pytest.mark.parametrize("n_steps", [1, 3])
def test_values_of_a_chain(n_steps):
    """
    Five chunks of 4, 4, 2, 4 and 3 control steps, whatever the action; reward 1 in the last control step.

    Q of a chunk is the reward discounted by the control steps before it, gamma^(d - p), the short chunks by their
    real length.
    """
    lengths = [4, 4, 2, 4, 3]
    model = value_model(n_steps=n_steps)
    rng = np.random.default_rng(0)
    for _ in range(60):
        for number, k in enumerate(lengths):
            last = number == len(lengths) - 1
            rewards = np.zeros(C, np.float32)
            rewards[k - 1] = float(last)
            info = {"step_rewards": rewards, "chunk_steps": k, "TimeLimit.truncated": False}
            chunk = rng.uniform(-1, 1, (1, C, D)).astype(np.float32)
            model.replay_buffer.add(
                state(model, number),
                state(model, number + 1),
                chunk,
                np.array([rewards.sum()]),
                np.array([last]),
                [info],
            )
    model.train(gradient_steps=1200, batch_size=64)
    exact = np.array([GAMMA ** (sum(lengths[n:]) - 1) for n in range(len(lengths))])
    np.testing.assert_allclose(learned_q(model, range(len(lengths))), exact, rtol=0.05)


@pytest.mark.parametrize("n_steps", [4, 100])
def test_labels_of_success_become_monte_carlo_returns(n_steps):
    """
    Returns at least as long as the episodes. A row's target is gamma^(control steps before the success), counted
    from where the row begins, or 0 after a failure; nothing is promised by the critics.
    """
    rng = np.random.default_rng(0)
    model = value_model(n_steps=n_steps, replay_buffer_kwargs={"timeout_is_failure": True})
    wanted = {}
    for episode in range(12):
        lengths = [C] * int(rng.integers(0, 4)) + [int(rng.integers(1, C + 1))]
        for number, k in enumerate(lengths):
            last, label = number == len(lengths) - 1, episode % 3 != 0
            rewards = np.zeros(C, np.float32)
            rewards[k - 1] = float(last and label)
            info = {"step_rewards": rewards, "chunk_steps": k, "TimeLimit.truncated": last and not label}
            here = 10 * episode + number
            obs, following = (state(model, n) | {"proprio": np.full((1, 8), n, np.float32)} for n in (here, here + 1))
            chunk = rng.uniform(-1, 1, (1, C, D)).astype(np.float32)
            model.replay_buffer.add(obs, following, chunk, np.array([rewards.sum()]), np.array([last]), [info])
            wanted[here] = GAMMA ** (sum(lengths[number:]) - 1) * label
    batch = model.replay_buffer.sample(400)
    assert set(batch.observations["proprio"][:, 0].int().tolist()) == wanted.keys()
    monte_carlo = [wanted[int(here)] for here in batch.observations["proprio"][:, 0]]
    np.testing.assert_allclose(batch.rewards[:, 0], monte_carlo, rtol=1e-5)
    np.testing.assert_allclose(model._targets(batch), monte_carlo, rtol=1e-5)


def test_statistics_of_proprio_have_any_shape():
    """Statistics of the shapes (P,) and (P, 1, 1) are the same, and what a formula says."""
    rng = np.random.default_rng(0)
    proprio, center, scale = rng.normal(size=(8, 8)), rng.normal(size=8), rng.uniform(0.5, 2, 8)
    space = make_venv(1).observation_space
    obs = {"z_rl": th.zeros(8, *space["z_rl"].shape), "proprio": th.as_tensor(proprio)}
    for shape in ((8,), (8, 1), (1, 8), (8, 1, 1)):
        statistics = (center.reshape(shape), scale.reshape(shape).tolist())
        features = RLTFeatures(space, proprio_norm=statistics)(obs)
        np.testing.assert_allclose(features[:, -8:], (proprio - center) / scale, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("handled", [True, False])
def test_values_where_every_episode_runs_into_the_time_limit(handled):
    """Two states that lead to each other, cut off after every chunk; taken for terminals, the rest would be 0."""
    model = value_model(replay_buffer_kwargs={"timeout_is_failure": not handled})
    rng = np.random.default_rng(0)
    pay = {0: 0.0, 1: 0.3}
    for n in range(200):
        number = n % 2
        info = {"step_rewards": np.array([pay[number], 0, 0, 0]), "chunk_steps": C, "TimeLimit.truncated": True}
        chunk = rng.uniform(-1, 1, (1, C, D)).astype(np.float32)
        obs, following = state(model, number), state(model, 1 - number)
        model.replay_buffer.add(obs, following, chunk, np.array([pay[number]]), np.array([True]), [info])
    model.train(gradient_steps=1500, batch_size=64)
    discount = GAMMA**C
    bootstrapped = np.linalg.solve([[1.0, -discount], [-discount, 1.0]], [pay[0], pay[1]])
    wanted = bootstrapped if handled else np.array([pay[0], pay[1]])
    np.testing.assert_allclose(learned_q(model, (0, 1)), wanted, rtol=0.05, atol=0.01)


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("chunk_length", [1, 3, 7])
def test_steps_are_counted_once(num_envs, chunk_length):
    """Chunks and control steps of the model are those that the environments counted."""
    venv = make_venv(num_envs, chunk_length=chunk_length)
    env = venv.unwrapped.env.unwrapped
    counted = [0, 0]
    control_step, step = env._control_step, env.step

    def count_control(index, action):
        counted[0] += 1
        return control_step(index, action)

    def count_chunks(actions):
        counted[1] += len(actions)
        return step(actions)

    env._control_step, env.step = count_control, count_chunks
    model, rows = make_model(venv=venv, **fast()), Rows()
    model.learn(60, callback=rows)
    assert model.num_timesteps == counted[1] == 60
    assert model.num_control_steps == counted[0] == sum(info["chunk_steps"] for info in rows.infos)


CODE = """
import sys
import numpy as np, torch
from rlt_sb3 import RLT
torch.set_num_threads(1)
obs = dict(np.load(sys.argv[2]))
np.save(sys.argv[3], RLT.load(sys.argv[1], device="cpu").predict(obs, deterministic=True)[0])
"""


def test_a_saved_model_plays_the_same_in_another_process(tmp_path):
    """A model as `save` and as a run's checkpoint has it. Its tensors need no unpickling of code."""
    model = make_model(**fast())
    model.learn(60)
    model.save(tmp_path / "model.zip")
    checkpoint = write_checkpoint(tmp_path, model, {}).model
    obs = random_obs(model, 20)
    np.savez(tmp_path / "obs.npz", **obs)
    files = [str(path) for path in (checkpoint, tmp_path / "obs.npz", tmp_path / "actions.npy")]
    subprocess.run([sys.executable, "-c", CODE, *files], check=True, timeout=300)
    actions = model.predict(obs, deterministic=True)[0]
    assert np.array_equal(np.load(tmp_path / "actions.npy"), actions)
    assert not np.allclose(actions, obs["vla_ref"])
    for path in (tmp_path / "model.zip", checkpoint):
        with zipfile.ZipFile(path) as archive:
            parts = {
                name[:-4]: th.load(io.BytesIO(archive.read(name)), weights_only=True)
                for name in archive.namelist()
                if name.endswith(".pth")
            }
        for name, parameters in model.get_parameters().items():
            assert same(parameters, parts[name]), name


def test_shipped_weights_need_no_unpickling():
    """Whatever is not text is in the safetensors format, which cannot hold code."""
    files = [
        file
        for file in (Path(rlt_gym.__file__).parent / "vla" / "mini" / "weights").iterdir()
        if file.suffix != ".json"
    ]
    assert len(files) >= 4
    for file in files:
        with safe_open(file, "pt") as tensors:
            assert all(isinstance(tensors.get_tensor(key), th.Tensor) for key in tensors.keys())


def test_other_networks_are_refused(tmp_path):
    """Refused are another architecture, algorithm or space, whichever way a file comes in."""
    path = tmp_path / "model.zip"
    make_model().save(path)
    for other in (dict(n_critics=3), dict(token_input=False), dict(net_arch=[16])):
        with pytest.raises((RuntimeError, ValueError), match=r"size|shape|Missing|Unexpected"):
            make_model(policy_kwargs=other).set_parameters(path, device="cpu")
    for setting, value in (("n_critics", 3), ("actor_mode", "direct"), ("reference_input", False)):
        with pytest.raises(ValueError, match="policy kwargs"):
            RLT.load(path, policy_kwargs={setting: value})
        with pytest.raises(ValueError, match=f"Unknown RLT setting '{setting}'. Valid settings: .*policy_kwargs"):
            RLT.load(path, **{setting: value})
    with pytest.raises(ValueError, match="policy kwargs"):
        RLT.load(path, policy_kwargs={"net_arch": [16]})
    with pytest.raises(ValueError, match="spaces do not match"):
        RLT.load(path, env=make_venv(1, token_dim=8))
    with pytest.raises(ValueError, match=r"model\.zip cannot be loaded as a model of TQC"):
        load_model("tqc", path)
    loaded = load_model("rlt", path)
    check_fits(loaded, FakeRLTokenVectorEnv(1), path)
    for arguments in (dict(token_dim=8), dict(chunk_length=5)):
        with pytest.raises(ValueError, match=r"model\.zip was trained on observations of the shapes"):
            check_fits(loaded, FakeRLTokenVectorEnv(1, **arguments), path)
