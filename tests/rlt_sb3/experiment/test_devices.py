"""Where a run trains and with how many threads, unless its configuration says so."""

import pytest
import torch
from run_helpers import quick
from toy_algorithms import ON_POLICY, WARM_TD3

from rlt_sb3.experiment.algorithms import get_algorithm
from rlt_sb3.experiment.environment import set_threads
from rlt_sb3.experiment.models import make_model
from rlt_sb3.experiment.train import train


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


class Made(Exception):
    """Raised in the place of making a model."""


@pytest.mark.parametrize("name", ["rlt", "tqc"])
def test_the_class_chooses_the_device(name, monkeypatch):
    """A run passes none, and the class's own default is a GPU where there is one."""
    given = {}

    def made(self, *args, **kwargs):
        given.update(kwargs)
        raise Made

    algorithm = get_algorithm(name)
    assert algorithm.device({}) == "auto" and algorithm.device({"device": "cuda:1"}) == "cuda:1"
    assert {setting.name: setting.default for setting in algorithm.settings()}["device"] == "auto"
    space = {"vla_ref": torch.zeros(8, 7)}
    venv = type("Venv", (), {"num_envs": 2, "observation_space": space, "action_space": torch.zeros(56)})()
    monkeypatch.setattr("rlt_sb3.experiment.models.resolve_settings", lambda name, settings: settings)
    monkeypatch.setattr(algorithm.load_class(), "__init__", made)
    with pytest.raises(Made):
        make_model(name, venv, {}, 0)
    assert given["seed"] == 0 and "device" not in given
    with pytest.raises(Made):
        make_model(name, venv, {"device": "cpu"}, 0)
    assert given["device"] == "cpu"


def test_an_algorithm_of_somebody_else_may_have_a_device():
    assert WARM_TD3.device({}) == "cpu" and WARM_TD3.device({"device": "auto"}) == "auto"
    assert ON_POLICY.device({}) == "auto"


def test_threads():
    """No tensor is on the device "meta", which every machine has and which is not the CPU."""
    set_threads(None, "meta")
    assert torch.get_num_threads() == 3
    set_threads(None, "cpu")
    assert torch.get_num_threads() == 1
    set_threads(2, "cpu")
    assert torch.get_num_threads() == 2
    set_threads(1, "meta")
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(("given", "found"), [(None, 1), (2, 2)])
def test_threads_of_a_run(tmp_path, monkeypatch, given, found):
    monkeypatch.setattr("rlt_sb3.experiment.report.write_report", lambda run: None)
    config = quick(tmp_path, total_chunks=40, torch_threads=given)
    config.settings["device"] = "cpu"
    train(config)
    assert torch.get_num_threads() == found
