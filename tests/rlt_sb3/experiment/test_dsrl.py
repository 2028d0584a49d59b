"""DSRL in runs: Stable-Baselines3's SAC on the noise of a flow-matching VLA, trained, evaluated and resumed."""

import json

import numpy as np
import pytest
from flow_vla import make_two_ways
from run_helpers import SMALL_SB3, quick, same, without_clocks
from stable_baselines3 import SAC

from rlt_sb3 import evaluate
from rlt_sb3.cli.main import main
from rlt_sb3.common.flat_actions import WholeChunkReplayBuffer
from rlt_sb3.evaluation.results import Evaluation
from rlt_sb3.experiment.config import EvalSettings, TrainConfig
from rlt_sb3.experiment.eval_config import EvalConfig
from rlt_sb3.experiment.evaluate_run import evaluate_run
from rlt_sb3.experiment.models import as_predictor, in_env, load_model, make_model, make_vec_env, resolve_settings
from rlt_sb3.experiment.report import read_metrics
from rlt_sb3.experiment.serve import RunService
from rlt_sb3.experiment.train import resume, train
from rlt_sb3.rlt.features import RLTFeatures


@pytest.fixture(autouse=True)
def allowed(monkeypatch):
    monkeypatch.setenv("RLT_ALLOWED_IMPORTS", "flow_vla")


def config_of(out, **changes):
    evaluation = EvalSettings(4, 4, 40, videos=False)
    known = {"algorithm": "dsrl", "dsrl": SMALL_SB3, "total_chunks": 80, "evaluation": evaluation}
    return quick(out, "flow_vla:TwoWays-v0", **(known | changes))


def test_a_run_by_the_command_is_evaluated_and_resumed(tmp_path, capsys):
    words = "train --algorithm dsrl --name whole --env.id flow_vla:TwoWays-v0 --env.num_envs 2 --total_chunks 80"
    words += " --dsrl.learning_starts 10 --dsrl.batch_size 16 --dsrl.gradient_steps 1 --dsrl.bound 2"
    words += " --dsrl.policy_kwargs.net_arch [16] --env.render_mode null --log_interval 2 --progress false --seed 0"
    words += " --evaluation.n_states 4 --evaluation.selection_states 4 --evaluation.selection_every 40"
    assert main([*words.split(), "--evaluation.videos", "false", "--out", str(tmp_path)]) == 0
    assert "DSRL" in capsys.readouterr().out
    whole = tmp_path / "whole"
    data = json.loads((whole / "evaluations.json").read_text())
    assert data["dsrl"]["policy"] == "DSRL" and data["training"]["chunks"] == 80
    # whoever plays the model in an environment of chunks makes the same chunks of its noise
    rows = evaluate_run(EvalConfig(run=str(whole), progress=False)).rows
    assert rows == Evaluation.from_dict(data["dsrl"]).rows
    distances = read_metrics(whole)["rollout/vla_distance_x"]
    assert 0 < np.nanmax(distances) <= 2  # of the chunks played, not of the noise
    model = load_model("dsrl", whole / "model.zip", device="cpu")
    assert type(model) is SAC and isinstance(model.actor.features_extractor, RLTFeatures)
    assert model.action_space.shape == (7,) and model.action_space.high.max() == 2.0

    parts = train(config_of(tmp_path, name="parts", total_chunks=40, dsrl=SMALL_SB3 | {"bound": 2.0})).run
    resume(parts, total_chunks=80)
    assert same(*(load_model("dsrl", run / "model.zip", device="cpu").get_parameters() for run in (whole, parts)))
    metrics = [without_clocks(run / "metrics.csv") for run in (whole, parts)]
    assert metrics[0] == metrics[1] and len(metrics[0]) > 3
    with pytest.raises(ValueError, match=r"A run of DSRL cannot be served: play it with rlt eval"):
        RunService(whole)


def test_it_steers_the_vla_to_the_right_side():
    """The VLA goes to either side; which is right can be seen in the observation, and only the noise decides."""
    settings = {"learning_starts": 50, "batch_size": 64, "learning_rate": 2e-3, "policy_kwargs": {"net_arch": [32]}}
    env = make_two_ways(2)
    venv = make_vec_env("dsrl", env, settings)
    assert venv.action_space.shape == (7,) and venv.action_space.high.max() == 1.5
    model = make_model("dsrl", venv, settings, 0)
    assert type(model) is SAC and type(model.replay_buffer) is WholeChunkReplayBuffer
    assert not model.replay_buffer.handle_timeout_termination and model.gamma == 0.99**4
    vla = evaluate("vla", env, 40)
    model.learn(150)
    steered = evaluate(in_env("dsrl", as_predictor("dsrl", model), env, settings), env, 40)
    assert vla.successes <= 24 and steered.successes >= 36


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match=r"The VLA 'mini.*' takes no noise from outside"):
        train(TrainConfig(name="x", out=str(tmp_path), algorithm="dsrl", progress=False))
    with pytest.raises(ValueError, match=r"env\.kwargs .*needs_noise.*|.*needs_noise"):
        train(quick(tmp_path, algorithm="dsrl", dsrl=SMALL_SB3))
    with pytest.raises(ValueError, match=r"dsrl asks the VLA in this process, and rollout.workers is 2"):
        config = config_of(tmp_path)
        config.rollout.workers = 2
        config.check()
    for settings, message in (
        ({"bound": 0.0}, "bound must be a number > 0, got 0.0"),
        ({"parts": 0}, "parts must be an integer >= 1, got 0"),
        ({"n_steps": 3}, "dsrl.n_steps must be 1, got 3"),
        ({"gamma": 2.0}, r"dsrl.gamma must be in \[0, 1\]"),
        ({"typo": 2.0}, r"Unknown DSRL setting 'typo'\. Valid settings: .*bound, parts"),
        ({"policy_kwargs": {"features_extractor_kwargs": {"typo": 1}}}, "dsrl cannot be used"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve_settings("dsrl", settings)
    resolve_settings("dsrl", {"policy_kwargs": {"features_extractor_kwargs": {"proprio_norm": "none"}}})
    assert list(tmp_path.iterdir()) == []
