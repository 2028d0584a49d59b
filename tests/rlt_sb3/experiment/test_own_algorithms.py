"""PPO, GRPO and residual SAC in runs: trained, evaluated, resumed; what they tell the run, their registration."""

import copy
import json
import random

import numpy as np
import pytest
import torch
from run_helpers import ROOT, quick, same, without_clocks

from rlt_sb3.experiment import algorithms
from rlt_sb3.experiment.algorithms import get_algorithm
from rlt_sb3.experiment.config import EvalSettings
from rlt_sb3.experiment.environment import make_training_env
from rlt_sb3.experiment.eval_config import EvalConfig
from rlt_sb3.experiment.evaluate_run import evaluate_run
from rlt_sb3.experiment.models import load_model, make_model, make_vec_env, resolve_settings
from rlt_sb3.experiment.train import resume, train

SMALL = {"policy_kwargs": {"net_arch": [8]}}
SETTINGS = {
    "ppo": SMALL | {"n_steps": 10, "batch_size": 20},
    "grpo": SMALL | {"group_size": 3, "groups": 2},
    "residual_sac": SMALL | {"learning_starts": 20, "batch_size": 8, "critic_warmup_updates": 5, "utd": 1.0},
}


def config_of(algorithm, out, **changes):
    evaluation = EvalSettings(4, 4, 40, videos=False)
    known = {"algorithm": algorithm, algorithm: SETTINGS[algorithm], "total_chunks": 160, "evaluation": evaluation}
    return quick(out, **(known | changes))


@pytest.mark.parametrize("name", SETTINGS)
def test_it_trains_is_evaluated_and_resumed(tmp_path, name):
    whole = train(config_of(name, tmp_path, name="whole"))
    data = json.loads((whole.run / "evaluations.json").read_text())
    assert data[name]["policy"] == get_algorithm(name).label and data["training"]["chunks"] >= 160
    assert evaluate_run(EvalConfig(run=str(whole.run), progress=False)).rows == whole.best.rows
    parts = train(config_of(name, tmp_path, name="parts", total_chunks=80)).run
    resume(parts, total_chunks=160)
    parameters = [load_model(name, run / "model.zip", device="cpu").get_parameters() for run in (whole.run, parts)]
    assert same(*parameters)
    rows = [without_clocks(run / "metrics.csv") for run in (whole.run, parts)]
    for row in rows[0] + rows[1]:
        row.pop("time/iterations", None)
    assert rows[0] == rows[1] and len(rows[0]) >= 4
    # the untrained model plays the VLA, so it was the first candidate for the best one
    begun = load_model(name, whole.run / "checkpoints" / "chunk-00000000" / "model.zip", device="cpu")
    env = make_training_env(config_of(name, tmp_path), "eval")
    obs, _ = env.reset(seed=0)
    assert (begun.predict(obs, deterministic=True)[0] == obs["vla_ref"]).all()


@pytest.mark.parametrize("name", SETTINGS)
def test_the_policy_knows_the_robot(tmp_path, name):
    """Proprioception is normalized as the environment's robot says, unless the settings say otherwise."""
    config = config_of(name, tmp_path)
    venv = make_vec_env(name, make_training_env(config, "train"))
    extractor = make_model(name, venv, config.settings, 0).policy
    features = getattr(extractor, "features_extractor", None) or extractor.actor.features_extractor
    assert features.rotations and features.features_dim >= 16 + 5 + 6
    config.settings["policy_kwargs"] = {"net_arch": [8], "features_extractor_kwargs": {"proprio_norm": "none"}}
    policy = make_model(name, venv, config.settings, 0).policy
    features = getattr(policy, "features_extractor", None) or policy.actor.features_extractor
    assert not features.rotations


def test_grpo_makes_the_environment_with_its_groups(tmp_path):
    assert make_training_env(config_of("grpo", tmp_path), "train").group_size == 3
    assert make_training_env(config_of("grpo", tmp_path, grpo={}), "train").group_size == 8
    assert make_training_env(config_of("ppo", tmp_path), "train").group_size == 1


def test_one_file_registers_each():
    """No other file names it: a new file in that folder is all that another one takes."""
    folder = ROOT / "rlt_sb3" / "experiment" / "registered"
    assert {path.stem for path in folder.glob("[a-z]*.py")} == set(algorithms._registered)
    general = [
        path
        for room in ("experiment", "cli", "common", "callbacks")
        for path in (folder.parents[1] / room).rglob("*.py")
    ]
    for name in ("dsrl", "grpo", "residual_sac"):
        assert [path for path in general if path.stem != name and name in path.read_text()] == []


REFUSED = [
    ("grpo", {"group_size": 1}, "group_size must be >= 2, got 1"),
    ("grpo", {"max_grad_norm": -1.0}, "max_grad_norm must be > 0, got -1.0"),
    ("grpo", {"policy_kwargs": {"parts": 0}}, r"grpo cannot be used \(parts must be a divisor"),
    ("residual_sac", {"utd": 0.0}, "utd must be > 0, got 0"),
    ("residual_sac", {"learning_rate": -1}, "learning_rate must be >= 0, got -1"),
    ("residual_sac", {"ent_coef": "x"}, r"residual_sac cannot be used \(could not convert .*'x'"),
    ("residual_sac", {"policy_kwargs": {"scale": -1}}, r"residual_sac cannot be used \(scale must be > 0, got -1\)"),
    ("residual_sac", {"policy_kwargs": {"n_critics": 0}}, "residual_sac cannot be used"),
    ("residual_sac", {"policy_kwargs": {"net_arch": [0]}}, "residual_sac cannot be used"),
    ("residual_sac", {"replay_buffer_kwargs": {"offline_ratio": 2}}, r"offline_ratio must be in \[0, 1\]"),
    ("ppo", {"policy_kwargs": {"typo": 1}}, r"Unknown PPO setting 'policy_kwargs\.typo'"),
    ("ppo", {"policy_kwargs": {"parts": 0}}, r"ppo cannot be used \(parts must be a divisor"),
    ("ppo", {"n_steps": 0}, r"ppo\.n_steps must be >= 2, got 0"),
    ("ppo", {"batch_size": 1}, r"ppo\.batch_size must be >= 2, got 1"),
    ("ppo", {"n_epochs": 0}, r"ppo\.n_epochs must be >= 1, got 0"),
    ("ppo", {"gamma": 2}, r"ppo\.gamma must be in \[0, 1\] \(discount per chunk\), got 2"),
    ("ppo", {"target_kl": -1}, r"ppo\.target_kl must be > 0, or null for no limit, got -1"),
    ("ppo", {"learning_rate": -1}, r"ppo\.learning_rate must be >= 0, got -1"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "settings", "message"), REFUSED, ids=[f"{name}-{case}" for name, case, _ in REFUSED])
def test_settings_are_refused_before_a_run_starts(name, settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        resolve_settings(name, settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ppo", {"policy_kwargs": {"parts": 3, "features_extractor_kwargs": {"proprio_norm": "none"}}}),
        ("ppo", {"clip_range": {"start": 0.2, "end": 0.1}, "device": "auto"}),
        ("grpo", {"policy_kwargs": {"parts": 2, "net_arch": [8]}, "group_size": 4}),
        (
            "residual_sac",
            {"policy_kwargs": {"parts": 2}, "replay_buffer_kwargs": {"stride": 2}, "ent_coef": "auto_0.1"},
        ),
    ],
)
def test_settings_that_can_be_used_pass_and_draw_nothing(name, settings):
    given = copy.deepcopy(settings)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    resolve_settings(name, settings)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[2]
    assert np.array_equal(np.random.get_state()[1], before[1]) and settings == given
