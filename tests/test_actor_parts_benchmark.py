"""benchmarks/actor_parts.py: the parts of an actor add up to what it plays."""

import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch as th

from tests.helpers.rlt_models import make_model, random_obs

ROOT = Path(__file__).parent.parent


@pytest.fixture
def actor_parts(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # as when it is run as a script
    return importlib.import_module("actor_parts")


def test_parts_add_up(actor_parts):
    model = make_model()
    actor = model.policy.training_actor
    with th.no_grad():
        actor.mu[-1].bias += th.linspace(-0.05, 0.05, len(actor.mu[-1].bias))
        actor.offset[0] += th.linspace(0.01, 0.03, actor.offset[0].numel()).view_as(actor.offset[0])
    before = {name: value.clone() for name, value in actor.state_dict().items()}
    obs = random_obs(model, 16)
    obs["vla_ref"] = np.clip(obs["vla_ref"], -0.5, 0.5)  # far from the limits of actions
    reference = obs["vla_ref"]
    played = {part: actor_parts.as_function(model, part)(obs) - reference for part in actor_parts.PARTS}
    closes = reference[..., actor.gripper].mean(1) > 0
    assert 0 < closes.sum() < 16
    due = actor.offset[0].numpy()[closes.astype(int)][:, None]
    np.testing.assert_allclose(played["offset"], np.broadcast_to(due, reference.shape), atol=1e-6)
    np.testing.assert_allclose(
        played["network"].reshape(16, -1), np.tile(actor.mu[-1].bias.detach(), (16, 1)), atol=1e-6
    )
    np.testing.assert_allclose(played["whole"], played["offset"] + played["network"], atol=1e-6)
    for part, where in (("network while closed", closes), ("network while open", ~closes)):
        np.testing.assert_array_equal(played[part][where], played["whole"][where])
        np.testing.assert_array_equal(played[part][~where], played["offset"][~where])
    assert all(th.equal(value, before[name]) for name, value in actor.state_dict().items())


def test_what_the_network_adds_is_compared_with_the_offset(actor_parts):
    """With one bias of all states and control steps, and another one."""
    model = make_model(action_scale=[0.5] * 6 + [1.0])
    actor = model.policy.training_actor
    network, offset = np.array([0.03, 0, 0, 0, 0, 0.04, 0.2]), np.array([[0.03, 0, 0, 0, 0, -0.04, 0], [0.0] * 7])
    with th.no_grad():
        actor.mu[-1].bias += th.tensor(np.tile(network, 4))
        actor.offset[0] += th.tensor(offset)
    obs = random_obs(model, 16)
    obs["vla_ref"] = np.clip(obs["vla_ref"], -0.5, 0.5)
    opens, closes = actor_parts.network_beside_offset(model, [obs, obs])
    assert opens["rows"] + closes["rows"] == 32 and (opens["gripper"], closes["gripper"]) == ("opens", "closes")
    for row, cosine in ((opens, (0.03**2 - 0.04**2) / 0.05**2), (closes, 0.0)):
        assert row["mean"] == pytest.approx(0.1, abs=1e-5) and row["spread"] < 1e-5
        assert row["cosine"] == pytest.approx(cosine, abs=1e-4)


def test_a_folder_without_a_run_is_refused_in_one_line(tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "actor_parts.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and str(tmp_path) in done.stderr.splitlines()[-1]
