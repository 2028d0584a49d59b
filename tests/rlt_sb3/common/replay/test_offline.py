"""Demonstrations as transitions: written on the gym side, read by the algorithm."""

import json

import numpy as np
import pytest
import torch
from offline_helpers import WIDTH, C, CountingVLA, ReadingEncoder, action, space
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from stable_baselines3.common.vec_env import VecMonitor

from rlt_gym.data.libero_hdf5 import DemoWriter
from rlt_gym.rl_token.encode_demos import EncodeDemosConfig, encode_demos
from rlt_gym.rl_token.io import frozen_fingerprint
from rlt_gym.testing import FakeRLTokenVectorEnv
from rlt_sb3 import RLT, GymnasiumVecEnv
from rlt_sb3.common.replay.offline import load_transitions, save_transitions


def write_demos(path, lengths=(11, 3, 8), successes=(True, True, False), **env_args) -> str:
    with DemoWriter(path, "do it", env_args) as writer:
        for demo, (length, success) in enumerate(zip(lengths, successes, strict=True)):
            state = np.zeros((length, 8), np.float32)
            state[:, 0], state[:, 1] = np.arange(length), demo
            frames = np.broadcast_to(np.arange(length, dtype=np.uint8)[:, None, None, None], (length, 8, 8, 3))
            actions = np.array([[action(demo, t)] * 7 for t in range(length)], np.float32)
            writer.add(actions, state, success=success, agentview=frames, wrist=frames)
    return str(path)


def encode(tmp_path, token=None, **kwargs):
    demos = write_demos(tmp_path / "demos" / "a.hdf5", task_id=5)
    config = EncodeDemosConfig([demos], str(tmp_path / "t.safetensors"), chunk_length=C, progress=False, **kwargs)
    return encode_demos(config, CountingVLA(), token or ReadingEncoder())


@pytest.mark.parametrize("stride", [1, 2, 4])
def test_rows_of_demonstrations_against_a_walk_through_them(tmp_path, stride):
    rows = load_transitions(encode(tmp_path, stride=stride, batch_size=3), space())
    slots = np.flatnonzero(rows.is_row(np.arange(rows.size)))
    batch = rows.gather(slots, 1, 0.9, torch.device("cpu"))
    lengths, seen = (11, 3, 8), set()
    for i in range(len(slots)):
        step, demo = (int(x) for x in batch.observations["proprio"][i, :2])
        seen.add((demo, step))
        assert batch.observations["z_rl"][i, 8] == step  # the picture of the same step
        end = min(step + C, lengths[demo])
        success = demo < 2 and end == lengths[demo]
        assert batch.mask[i].sum() == end - step and batch.dones[i] == success
        assert batch.rewards[i] == pytest.approx(0.9 ** (end - step - 1) if success else 0.0)
        assert batch.discounts[i] == pytest.approx(0.9 ** (end - step))
        if not success:
            assert batch.next_observations["proprio"][i, :2].tolist() == [end, demo]
        wanted = [action(demo, min(step + j, lengths[demo] - 1)) for j in range(C)]
        np.testing.assert_allclose(batch.actions[i].view(C, 7)[:, 0], wanted, rtol=1e-6)
        target = [wanted[j] if step + j < lengths[demo] else step / 100 for j in range(C)]
        np.testing.assert_allclose(batch.bc_target[i].view(C, 7)[:, 3], target, rtol=1e-6)
    assert seen == {
        (demo, step)
        for demo in range(3)
        for step in range(0, lengths[demo], stride)
        if demo < 2 or step + C < lengths[demo]
    }
    assert rows.counts == {5: len(seen)}


def test_training_with_demonstrations(tmp_path):
    venv = GymnasiumVecEnv(FakeRLTokenVectorEnv(2, chunk_length=C, token_dim=WIDTH))
    settings = dict(learning_starts=10, critic_warmup_updates=2, batch_size=16, device="cpu", utd=0.2)
    path = str(encode(tmp_path))
    model = RLT(
        "MultiInputPolicy", venv, replay_buffer_kwargs={"offline_data": path, "offline_ratio": 0.25}, **settings
    )
    model.learn(30)
    assert (model.replay_buffer.sample(16).task_ids == 5).sum() == 4
    model.save(tmp_path / "model.zip")
    model.save_replay_buffer(tmp_path / "buffer.pkl")
    loaded = RLT.load(tmp_path / "model.zip", env=venv, device="cpu")
    loaded.load_replay_buffer(tmp_path / "buffer.pkl")
    loaded.learn(4, reset_num_timesteps=False)
    assert (loaded.replay_buffer.sample(16).task_ids == 5).sum() == 4
    with pytest.raises(ValueError, match="offline_data"):
        RLT("MultiInputPolicy", venv, replay_buffer_kwargs={"offline_ratio": 0.25}, **settings)
    nowhere = {"offline_data": str(tmp_path / "no"), "offline_ratio": 0.5}
    missing = RLT("MultiInputPolicy", venv, replay_buffer_kwargs=nowhere, **settings)
    with pytest.raises(ValueError, match="encode-demos"):
        missing.learn(1)


def test_rows_of_an_earlier_run(tmp_path):
    venv = GymnasiumVecEnv(FakeRLTokenVectorEnv(2, chunk_length=C, token_dim=WIDTH, obs_stride=2))
    model = RLT("MultiInputPolicy", venv, learning_starts=1000, device="cpu", buffer_size=90)
    model.learn(120)
    rows = model.replay_buffer.storage
    save_transitions(tmp_path / "run" / "rows.safetensors", rows, {"run": "demo"})
    loaded = load_transitions(tmp_path / "run" / "rows.safetensors", space())
    slots = np.flatnonzero(rows.is_row(np.arange(rows.size)))
    assert np.array_equal(slots, np.flatnonzero(loaded.is_row(np.arange(loaded.size))))
    for mine, theirs in zip(*(x.gather(slots, 2, 0.9, torch.device("cpu")) for x in (rows, loaded)), strict=True):
        pairs = zip(mine.values(), theirs.values(), strict=True) if isinstance(mine, dict) else [(mine, theirs)]
        assert all(torch.equal(a, b) for a, b in pairs)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["rows.safetensors"]


def test_files_that_do_not_fit(tmp_path):
    path = encode(tmp_path)
    other = FakeRLTokenVectorEnv(chunk_length=C, token_dim=WIDTH + 1).single_observation_space
    with pytest.raises(ValueError, match="z_rl of shape"):
        load_transitions(path, other)
    arrays = load_file(path)
    save_file(arrays, tmp_path / "plain.safetensors")
    with pytest.raises(ValueError, match="format None"):
        load_transitions(tmp_path / "plain.safetensors", space())
    del arrays["actions"]
    save_file(arrays, tmp_path / "less.safetensors", metadata={"format": "rlt-transitions-1"})
    with pytest.raises(ValueError, match="actions"):
        load_transitions(tmp_path / "less.safetensors", space())
    (tmp_path / "broken.safetensors").write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="readable"):
        load_transitions(tmp_path / "broken.safetensors", space())


def test_files_made_with_other_weights(tmp_path):
    """Demonstrations and rows of a run name what they were made with; training refuses them on anything else."""
    settings = dict(learning_starts=10, device="cpu")

    def model_with(file, fingerprint):
        env = FakeRLTokenVectorEnv(2, chunk_length=C, token_dim=WIDTH)
        env.metadata["fingerprint"] = fingerprint
        offline = {"offline_data": str(file), "offline_ratio": 0.5}
        return RLT("MultiInputPolicy", VecMonitor(GymnasiumVecEnv(env)), replay_buffer_kwargs=offline, **settings)

    token = ReadingEncoder()
    present = frozen_fingerprint(CountingVLA(), token)
    demos, rows = encode(tmp_path, token), tmp_path / "rows.safetensors"
    model = model_with(demos, present).learn(8)
    save_transitions(rows, model.replay_buffer.storage, {"run": "demo"}, model.get_env())
    with safe_open(rows, framework="numpy") as file:
        assert json.loads(file.metadata()["provenance"]) == {"run": "demo", "fingerprint": present}
    for path in (demos, rows):
        model_with(path, present).learn(2)
        with pytest.raises(ValueError, match=rf"{path.name} was made with other .*: vla f{{12}}\.\.\. \(here: 0{{12}}"):
            model_with(path, present | {"vla": "0" * 64}).learn(2)
        model_with(path, None).learn(2)
    save_transitions(rows, model.replay_buffer.storage)
    model_with(rows, {"vla": "0" * 64}).learn(2)  # nobody knows what these rows were made with


def test_settings_of_the_writer(tmp_path):
    with pytest.raises(ValueError, match="divide"):
        EncodeDemosConfig(chunk_length=8, stride=3)
    with pytest.raises(ValueError, match="safetensors"):
        EncodeDemosConfig(output="rows.npz")
    with pytest.raises(ValueError, match="task_ids"):
        encode(tmp_path, task_ids=[1, 2])
    noisy = write_demos(tmp_path / "noisy.hdf5", noise=0.3)
    config = EncodeDemosConfig([noisy], str(tmp_path / "n.safetensors"), chunk_length=C, progress=False)
    with pytest.warns(UserWarning, match="noise=0.3"):
        encode_demos(config, CountingVLA(), ReadingEncoder())
    assert not list(tmp_path.glob(".*"))
