"""RLT's networks: what actor and critics see, the clamp, rotations, and how proprio is normalized."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch as th
from rlt_models import (
    fast,
    make_model,
    make_venv,
    random_obs,
)

from rlt_sb3 import RLT
from rlt_sb3.common.torch_utils import AntiWindupClamp
from rlt_sb3.rlt.features import rotation_columns


def test_clamp_keeps_useful_gradients_at_the_border():
    x = th.tensor([-2.0, -1.0, 0.3, 1.0, 2.0])
    for sign, expected in ((1.0, [0, 0, 1, 1, 1]), (-1.0, [-1, -1, -1, 0, 0])):
        leaf = x.clone().requires_grad_()
        out = AntiWindupClamp.apply(leaf)
        assert th.equal(out.detach(), x.clamp(-1, 1))
        (sign * out).sum().backward()
        assert leaf.grad.tolist() == expected


def test_critic_does_not_see_the_reference_but_the_actor_does():
    model = make_model()
    th.nn.init.normal_(model.actor.mu[-1].weight)
    obs = {key: th.as_tensor(value) for key, value in random_obs(model, 8).items()}
    other = obs | {"vla_ref": -obs["vla_ref"]}
    actions = th.rand(8, 28)
    assert th.equal(model.critic.q_values(obs, actions), model.critic.q_values(other, actions))
    direct = make_model(policy_kwargs={"actor_mode": "direct"})
    assert not th.allclose(direct.actor(obs), direct.actor(other))


def test_ensemble_members_are_independent_and_interface_of_sb3():
    model = make_model(policy_kwargs={"n_critics": 3})
    obs = {key: th.as_tensor(value) for key, value in random_obs(model, 6).items()}
    actions = th.rand(6, 28)
    q = model.critic.q_values(obs, actions)
    assert q.shape == (3, 6) and not th.allclose(q[0], q[1])
    outputs = model.critic(obs, actions)
    assert len(outputs) == 3 and outputs[0].shape == (6, 1)
    assert th.allclose(th.cat(outputs, 1).T, q)
    assert th.allclose(model.critic.q1_forward(obs, actions)[:, 0], q[0])
    assert th.allclose(model.critic.q_values(obs, actions, th.tensor([2, 0])), q[[2, 0]])


def test_rotation_has_no_jump_at_pi():
    axis_angle = th.tensor([[np.pi - 1e-4, 0, 0], [-np.pi + 1e-4, 0, 0], [0, 0, 0], [0, 0, np.pi / 2]])
    columns = rotation_columns(axis_angle.float())
    assert th.allclose(columns[0], columns[1], atol=1e-3)
    assert th.allclose(columns[2], th.tensor([1.0, 0, 0, 0, 1, 0]))
    assert th.allclose(columns[3], th.tensor([0.0, 1, 0, -1, 0, 0]), atol=1e-6)


def test_predict_is_the_same_in_both_modes_and_repeatable():
    model = make_model(**fast(reference_dropout=0.9))
    model.learn(40)
    obs = random_obs(model, 20)
    results = []
    for mode in (True, False, True):
        model.policy.set_training_mode(mode)
        results.append(model.predict(obs)[0])
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])
    assert not np.array_equal(results[0], obs["vla_ref"])


def robot_of(*parts):
    return SimpleNamespace(proprio=tuple(SimpleNamespace(**part) for part in parts))


LIBERO_PROPRIO = (
    dict(name="position", size=3, kind="linear", center=(0.0, 0.0, 0.7), scale=(0.15, 0.15, 0.25)),
    dict(name="orientation", size=3, kind="axis_angle", center=(0.0,) * 3, scale=(1.0,) * 3),
    dict(name="fingers", size=2, kind="linear", center=(0.02, -0.02), scale=(0.02, 0.02)),
)


def test_proprio_is_normalized_as_the_robot_says(tmp_path):
    """Two rotations around one linear part: linear parts come first, each minus its center, over its scale."""
    venv = make_venv(2)
    turn = dict(name="wrist", size=3, kind="axis_angle", center=(), scale=())
    linear = dict(name="joints", size=2, kind="linear", center=(1.0, -1.0), scale=(2.0, 4.0))
    venv.unwrapped.env.metadata["robot"] = robot_of(turn, linear, turn)
    model = make_model(venv=venv)
    features = model.actor.features_extractor
    assert features.features_dim == model.observation_space["z_rl"].shape[0] + 2 + 6 + 6
    obs = {key: th.as_tensor(value) for key, value in random_obs(model, 5).items()}
    p = obs["proprio"]
    wanted = [(p[:, 3:5] - th.tensor([1.0, -1.0])) / th.tensor([2.0, 4.0])]
    wanted += [rotation_columns(p[:, :3]), rotation_columns(p[:, 5:])]
    assert th.allclose(features(obs)[:, -14:], th.cat(wanted, dim=1), atol=1e-6)
    model.save(tmp_path / "model.zip")  # which needs no environment any more
    loaded = RLT.load(tmp_path / "model.zip", device="cpu")
    assert th.equal(loaded.actor.features_extractor(obs), features(obs))
    own = make_model(venv=venv, policy_kwargs=dict(features_extractor_kwargs=dict(proprio_norm="none")))
    assert th.equal(own.actor.features_extractor(obs)[:, -8:], p)
    venv.unwrapped.env.metadata["robot"] = robot_of(turn, linear)
    with pytest.raises(ValueError, match="parts of proprio have 5 numbers, the observation has 8"):
        make_model(venv=venv)


def test_proprio_layout_without_a_robot_is_liberos():
    venv = make_venv(2)
    venv.unwrapped.env.metadata["robot"] = robot_of(*LIBERO_PROPRIO)
    described, plain = make_model(venv=venv), make_model()
    obs = {key: th.as_tensor(value) for key, value in random_obs(plain, 20).items()}
    assert th.equal(described.actor.features_extractor(obs), plain.actor.features_extractor(obs))
