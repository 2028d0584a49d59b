"""What a saved RLT model and its policy keep, and which files are refused."""

import base64
import json
import zipfile
from inspect import signature

import numpy as np
import pytest
import torch as th
from rlt_models import (
    Rows,
    fast,
    make_model,
    make_venv,
    random_obs,
)
from run_helpers import same

from rlt_sb3 import RLT, ChunkReplayBuffer
from rlt_sb3.common.noise import HeldNoise
from rlt_sb3.experiment.models import load_model
from rlt_sb3.rlt.policies import RLTPolicy

OTHER = dict(
    buffer_size=200, gamma=0.97, utd=1.5, n_steps=2, policy_delay=3, target_policy_noise=0.05, target_noise_clip=0.1,
    bc_coef=7.0, reference_dropout=0.2, exploration_std=0.02, critic_warmup_updates=6,
    q_bounds=(-1.0, 2.0), learning_starts=10, tau=0.01, train_freq=2, stats_window_size=7,
    action_scale=[1.0, 1.0, 1.0, 0.2, 0.2, 0.2, 1.0],
)  # fmt: skip
OF_POLICY = dict(
    actor_q="min", n_critics=4, n_target_critics=2, actor_mode="direct", actor_tau=0.02, critic_precision="bfloat16"
)


def test_save_and_load(tmp_path):
    model = make_model(**OTHER, policy_kwargs=OF_POLICY)
    model.learn(60)
    model.save(tmp_path / "model.zip")
    model.save_replay_buffer(tmp_path / "buffer.pkl")
    venv = make_venv(2)
    loaded = RLT.load(tmp_path / "model.zip", env=venv, device="cpu")
    for name, value in OTHER.items():
        if name not in ("train_freq", "stats_window_size"):
            assert getattr(loaded, name) == value, name
    for name, value in OF_POLICY.items():
        assert loaded.policy._get_constructor_parameters()[name] == value, name
    assert loaded.train_freq == model.train_freq and loaded._stats_window_size == 7
    assert loaded.policy.actor_mode == "direct" and loaded.critic.n_critics == 4
    first, second = model.get_parameters(), loaded.get_parameters()
    assert first.keys() == second.keys() == {"policy", "actor.optimizer", "critic.optimizer"}
    assert all(th.equal(first["policy"][key], second["policy"][key]) for key in first["policy"])
    state = [parameters["critic.optimizer"]["state"][0]["exp_avg"] for parameters in (first, second)]
    assert th.equal(*state)
    obs = random_obs(model, 10)
    assert np.array_equal(model.predict(obs)[0], loaded.predict(obs)[0])
    assert loaded._n_updates == model._n_updates and loaded.num_control_steps == model.num_control_steps

    loaded.load_replay_buffer(tmp_path / "buffer.pkl")
    assert isinstance(loaded.replay_buffer, ChunkReplayBuffer) and loaded.replay_buffer.size() == 60
    for name in ("actions", "step_rewards", "chunk_steps", "terminated", "truncated"):
        assert np.array_equal(getattr(model.replay_buffer.storage, name), getattr(loaded.replay_buffer.storage, name))
    updates = loaded._n_updates
    loaded.learn(20, reset_num_timesteps=False)
    assert loaded.num_timesteps == 80 and loaded._n_updates == updates + 30
    with pytest.raises(ValueError, match="2 environments"):
        RLT.load(tmp_path / "model.zip", env=make_venv(3)).load_replay_buffer(tmp_path / "buffer.pkl")


def test_a_policy_saved_on_its_own_keeps_every_argument(tmp_path):
    others = OF_POLICY | dict(actor_mode="residual", layer_norm=False, act_with="online", gripper_flip=0.1, gated=True)
    model = make_model(policy_kwargs=others | {"offset_search": False, "candidates": 4})
    model.policy.save(tmp_path / "policy.pth")
    first, loaded = model.policy, RLTPolicy.load(tmp_path / "policy.pth", device="cpu")
    arguments = first._get_constructor_parameters()
    assert arguments.keys() == signature(RLTPolicy).parameters.keys() and arguments["offset_search"] is False
    kept = loaded._get_constructor_parameters()
    for name in arguments.keys() - {"lr_schedule", "observation_space"}:
        assert kept[name] == arguments[name], name
    assert same(loaded.state_dict(), first.state_dict())
    for search in (True, {"share": 0.5}):
        model = make_model(policy_kwargs={"offset_search": search})
        model.policy.save(tmp_path / "policy.pth")
        assert RLTPolicy.load(tmp_path / "policy.pth", device="cpu").offset_search == search


def test_a_buffer_that_is_refused_does_not_replace_the_models(tmp_path):
    make_model(2, **fast()).learn(40).save_replay_buffer(tmp_path / "buffer.pkl")
    model = make_model(3, **fast()).learn(39)
    with pytest.raises(ValueError, match="was filled with 2 environments, the model has 3"):
        model.load_replay_buffer(tmp_path / "buffer.pkl")
    model.learn(30, reset_num_timesteps=False)
    assert model.replay_buffer.n_envs == 3 and model.replay_buffer.rows_stored == 69


def test_load_without_env_and_with_changed_settings(tmp_path):
    model = make_model()
    model.save(tmp_path / "model.zip")
    obs = random_obs(model, 3)
    assert np.array_equal(RLT.load(tmp_path / "model.zip").predict(obs)[0], obs["vla_ref"])
    assert RLT.load(tmp_path / "model.zip", bc_coef=1.0).bc_coef == 1.0
    with pytest.raises(ValueError, match="bc_coef"):
        RLT.load(tmp_path / "model.zip", bc_coef=-1.0)


@pytest.mark.parametrize(("before", "now"), [(2, 3), (3, 1), (1, 2)])
def test_action_noise_in_another_number_of_environments(tmp_path, before, now):
    """Each environment has noise of its own."""
    model = make_model(before, **fast(action_noise=HeldNoise(4, [0.1] * 7), exploration_std=0.0))
    model.learn(30)
    model.save(tmp_path / "model.zip")
    loaded, rows = RLT.load(tmp_path / "model.zip", env=make_venv(now), learning_starts=0), Rows()
    loaded.learn(30, reset_num_timesteps=False, callback=rows)
    added = rows.actions[0] - rows.obs[0]["vla_ref"]
    assert added.shape == (now, 4, 7) and len(np.unique(added.round(6), axis=0)) == now and np.abs(added).max() > 0.01


def test_the_gap_of_a_loaded_model_follows_its_discount_and_range(tmp_path):
    make_model(gamma=0.97, q_bounds=(0.0, 1.0)).save(tmp_path / "model.zip")
    changed = RLT.load(tmp_path / "model.zip", env=make_venv(2), gamma=0.5, q_bounds=(-1.0, 2.0))
    assert (changed._value_bias.gamma, changed._value_bias.span) == (0.5, 3.0)
    same_as_before = RLT.load(tmp_path / "model.zip")
    assert (same_as_before._value_bias.gamma, same_as_before._value_bias.span) == (0.97, 1.0)


def test_a_loaded_buffer_goes_on_with_the_models_settings(tmp_path):
    """Its rows are those of the file, its returns those of the model: rewards of one chunk in, of two out."""
    model = make_model(**fast(gamma=0.9, n_steps=1))
    model.learn(120)
    model.save(tmp_path / "model.zip")
    model.save_replay_buffer(tmp_path / "buffer.pkl")
    loaded = RLT.load(tmp_path / "model.zip", env=make_venv(2), device="cpu", gamma=0.5, n_steps=2)
    loaded.load_replay_buffer(tmp_path / "buffer.pkl")
    buffer = loaded.replay_buffer
    slots = np.flatnonzero(buffer.storage.is_row(np.arange(buffer.storage.size)))
    batch = buffer._gather(slots)
    for slot, total, discount in zip(slots, batch.rewards.flatten(), batch.discounts.flatten(), strict=True):
        rewards = []
        for _ in range(2):
            rewards += buffer.storage.step_rewards[slot][: buffer.storage.chunk_steps[slot]].tolist()
            slot = buffer.storage.next_slot[slot]
            if not buffer.storage.is_row(slot):
                break
        assert total.item() == pytest.approx(sum(0.5**j * reward for j, reward in enumerate(rewards)))
        assert discount.item() == pytest.approx(0.5 ** len(rewards))
    assert batch.rewards.any()


def change_data(path, **changes):
    """Rewrite the settings in a saved model; None removes one."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    data = json.loads(parts["data"]) | changes
    parts["data"] = json.dumps({key: value for key, value in data.items() if value is not None}).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)


def test_models_of_other_versions_are_refused_with_one_line(tmp_path):
    path = tmp_path / "model.zip"
    make_model().save(path)
    gone = base64.b64encode(b"crlt_sb3.no_such_module\nGone\n.").decode()  # pickle of a class that has moved
    moved = {":type:": "<class 'type'>", ":serialized:": gone}
    change_data(path, saved_format=None, n_critics=5, actor_mode="residual", trials=moved)
    for file in (path, str(path), str(path)[:-4]):
        with pytest.raises(ValueError, match=r"model.* was saved by another version of rlt.*: train it again") as error:
            RLT.load(file, device="cpu")
        assert "\n" not in str(error.value)
    with path.open("rb") as opened, pytest.raises(ValueError, match="was saved by another version of rlt"):
        RLT.load(opened, device="cpu")
    change_data(path, saved_format=10**6)
    with pytest.raises(ValueError, match="format 1000000"):
        RLT.load(path, device="cpu")
    with pytest.raises(ValueError, match=r"cannot be loaded as a model of RLT .*saved by another version"):
        load_model("rlt", path, device="cpu")
    # of this version, and with old names of arguments
    make_model().save(path)
    with path.open("rb") as opened:
        assert RLT.load(opened, device="cpu").bc_coef == 20.0
    with pytest.raises(ValueError, match=r"Unknown RLT setting 'trial_share'\. Valid settings: .*gate"):
        RLT.load(path, device="cpu", trial_share=0.5)
    with pytest.raises(TypeError, match="trial_share"):
        make_model(trial_share=0.5)


def test_policy_alone_saves_and_loads(tmp_path):
    model = make_model(policy_kwargs=dict(n_critics=2, net_arch=[8], layer_norm=False))
    model.policy.save(tmp_path / "policy.pt")
    loaded = RLTPolicy.load(tmp_path / "policy.pt")
    assert loaded.layer_norm is False and loaded.net_arch == [8]
    obs = random_obs(model, 3)
    assert np.array_equal(model.predict(obs)[0], loaded.predict(obs)[0])
