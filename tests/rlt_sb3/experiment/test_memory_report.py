"""A run whose VLA or RL token learns says what this takes, when it begins and in its report."""

import json

import remote_env  # (registers RemoteLibero-v0)
from run_helpers import SMALL_RLT, quick
from vla_helpers import write_fake_token

from rlt_sb3.experiment.config import EvalSettings
from rlt_sb3.experiment.report import write_report
from rlt_sb3.experiment.train import train

assert remote_env.make


def test_memory_is_reported(tmp_path, capsys):
    """A row: 60 float16 numbers of tokens, 8 + 8 + 28 float32 numbers of the observation, 28 of the chunk."""
    networks = {"net_arch": [16], "n_critics": 2, "train_token": {}}
    config = quick(
        tmp_path, "RemoteLibero-v0", total_chunks=24, evaluation=EvalSettings(2, 2, 24, videos=False),
        rlt=SMALL_RLT | {"buffer_size": 1000, "policy_kwargs": networks},
    )  # fmt: skip
    config.env.vla, config.env.show_tokens = "rlt_gym.testing.vla:FakeVLA", True
    config.env.rl_token = str(write_fake_token(tmp_path / "token.safetensors"))
    run = train(config).run
    expected = "Memory: 1000 rows of 408 bytes (0.00 GiB when full)."
    assert expected in capsys.readouterr().out and expected in (run / "report.html").read_text()
    results = json.loads((run / "evaluations.json").read_text())
    assert results.pop("memory") == expected
    (run / "evaluations.json").write_text(json.dumps(results))
    assert "Memory" not in write_report(run).read_text()  # as of a run in which neither learns
