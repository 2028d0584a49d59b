"""``train_vla`` with a small random ACT of LeRobot: a copy learns from critics and actor, the frozen policy plays."""

import numpy as np
import pytest

pytest.importorskip("lerobot", reason="needs the extra 'lerobot' (scripts/lerobot_env.sh)")

import lerobot_policies as tiny
import torch as th
from trained_vla import GATE, make_env, make_model, same, weights_of

from rlt_gym.vla.registry import load_vla
from rlt_sb3 import RLT

#: Weights of ACT that change nothing when it acts, or next to nothing: its latent is zero, and its decoder's first
#: attention is over equal numbers.
IDLE = ("encoder_latent_input_proj.weight", "decoder.layers.0.self_attn.in_proj_weight")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make_act(tmp_path_factory.mktemp("act") / "policy")


def act_env(folder, show_pictures=True):
    with th.random.fork_rng(devices=[]):
        th.manual_seed(0)  # the same encoder each time
        return make_env(show_pictures, load_vla(f"lerobot:{folder}"), image_size=64)


@pytest.mark.parametrize("part", ["head", "lora", "all"])
def test_what_moves(folder, part):
    if part == "lora":
        pytest.importorskip("peft", exc_type=ImportError)
    model = make_model(
        act_env(folder), train_vla={"part": part, "learning_rate": 3e-3, "rank": 2}, gate=GATE, batch_size=4
    )
    start, vla = weights_of(model), model.env.get_attr("vla")[0]
    frozen, shared = vla.fingerprint(), [value.clone() for value in model.policy.vla.state_dict().values()]
    obs, _ = model.policy.obs_to_tensor(model.env.reset())
    features = model.actor.features_extractor
    z_rl, chunk = features.run(obs)
    assert th.allclose(chunk, obs["vla_ref"], atol=1e-6) and not th.equal(chunk[0], chunk[1])
    assert part == "head" or th.allclose(z_rl, obs["z_rl"], atol=1e-5)
    model.learn(24)
    names, moved = list(model.policy.vla.moving), weights_of(model)
    stayed = [name for name, one, other in zip(names, start, moved, strict=True) if th.equal(one, other)]
    assert all(name.endswith(IDLE) for name in stayed) and len(moved) >= {"head": 20, "lora": 8, "all": 60}[part]
    assert same(moved, weights_of(model, "actor")) and same(start, weights_of(model, "actor_deployed"))
    assert not same(moved, weights_of(model, "actor_target"))  # a slow copy
    assert same(shared, list(model.policy.vla.state_dict().values()))
    assert not any(module.training for module in model.policy.vla.modules())
    token, reference = features.run(obs)
    assert float((reference - obs["vla_ref"]).abs().max()) > 1e-5
    assert th.equal(token, z_rl) == (part == "head")
    vla._digest = None
    again = model.env.reset()
    assert vla.fingerprint() == load_vla(f"lerobot:{folder}").fingerprint() == frozen
    assert np.array_equal(model.predict(again, deterministic=True)[0], again["vla_ref"])  # no actor has beaten the VLA


def test_before_its_first_step_the_copy_changes_nothing(folder):
    """Bit for bit: no actor is updated here, so the copy does not move either."""
    settings = {"policy_delay": 1000, "gate": GATE, "batch_size": 4}
    frozen = make_model(act_env(folder, show_pictures=False), **settings).learn(16)
    late = make_model(act_env(folder), train_vla={"part": "all", "learning_rate": 1.0}, **settings).learn(16)
    assert late._n_updates == frozen._n_updates > 10 and not late.critic.features_extractor.moved
    for name, value in frozen.policy.state_dict().items():
        assert th.equal(value, late.policy.state_dict()[name]), name


def test_the_gate_plays_the_frozen_policy_and_a_saved_run_has_the_copy(folder, tmp_path):
    gate = {"share": 1.0, "window": 50}
    model = make_model(act_env(folder), train_vla={"learning_rate": 1e-2}, gate=gate, batch_size=4).learn(24)
    chunks = model.replay_buffer.storage
    rows = chunks.is_row(np.arange(chunks.size))
    assert rows.sum() > 4 and np.array_equal(chunks.actions[rows], chunks.obs["vla_ref"][rows])
    obs, _ = model.policy.obs_to_tensor(model._last_obs)
    reference = model.actor.features_extractor.see(obs)["vla_ref"]
    assert float((reference - obs["vla_ref"]).abs().max()) > 1e-3  # although the copy has moved
    model.policy.deploy(model.policy.training_actor.state_dict())
    model.save(tmp_path / "model.zip")
    loaded = RLT.load(tmp_path / "model.zip")  # no environment
    assert same(list(model.policy.state_dict().values()), list(loaded.policy.state_dict().values()))
    played = loaded.predict(model._last_obs)[0]
    assert np.array_equal(model.predict(model._last_obs)[0], played)
    assert not np.array_equal(played, model._last_obs["vla_ref"])
