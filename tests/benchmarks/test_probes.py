"""benchmarks/probes.py: what RLT's networks read, and the rank correlation with what practice solves."""

import json

import numpy as np
import pytest
from benchmark_helpers import import_benchmark, run_benchmark
from vla_helpers import write_demos

from rlt_gym.rl_token.encode_tokens import EncodeTokensConfig, encode_tokens
from rlt_gym.rl_token.io import load_rl_token
from rlt_gym.rl_token.token_shards import TokenShards
from rlt_gym.vla.batches import run_vla
from rlt_gym.vla.registry import load_vla

pytest.importorskip("sklearn")


@pytest.fixture
def probes():
    return import_benchmark("probes")


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    return write_demos(tmp_path_factory.mktemp("demos") / "a.hdf5", "push", demos=6, size=64)


def test_p_counts_the_orders(probes):
    """Of the 24 orders of four numbers, two have |rho| = 1 and eight |rho| >= 0.8."""
    assert probes.rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx((1.0, 2 / 24))
    assert probes.rank_correlation([1, 2, 3, 4], [20, 10, 30, 40]) == pytest.approx((0.8, 8 / 24))
    assert probes.rank_correlation([4, 3, 2, 1], [20, 10, 30, 40]) == pytest.approx((-0.8, 8 / 24))
    assert all(np.isnan(probes.rank_correlation([1, 1, 1], [20, 10, 30]))), "equal numbers have no order"


@pytest.mark.parametrize("token", ["auto", "mean-all", "none"])
def test_features_are_what_the_environment_shows(probes, demos, tmp_path, token):
    vla = load_vla("mini")
    output = str(tmp_path / "tokens")
    encode_tokens(EncodeTokensConfig([str(demos)], output, "mini", kinds=("all",), progress=False), vla)
    shards = TokenShards(output)
    found = probes.features(token, vla, shards)
    rows = shards.rows
    pictures = shards.pictures(np.arange(len(rows)))[:, 0]
    assert len(found) == len(rows) == len(pictures)
    np.testing.assert_array_equal(found[:, -8:], rows.proprio.astype(float))
    encoder = load_rl_token(token, vla)
    obs = {"agentview": pictures, "wrist": pictures, "state": rows.proprio}  # both views of these demonstrations
    expected = encoder(run_vla(vla, obs, ["push"] * len(rows))).detach().numpy()
    np.testing.assert_allclose(found[:, :-8], expected, atol=2e-2)  # shards have float16


def test_the_command_as_a_user_runs_it(demos, tmp_path):
    words = ["probes", "--vla", "mini", "--demos", demos, "--tokens", "auto", "none", "--solved", "9"]
    report = tmp_path / "probes.json"
    done = run_benchmark(*words, "4", "--json", report)
    assert done.returncode == 0, done.stderr
    assert "| rank correlation, n = 2 |" in done.stdout and "| `none` |" in done.stdout
    content = json.loads(report.read_text())
    assert set(content["scores"]) == {"auto", "none"} and "phase of the episode" in content["rank_correlations"]
    refused = run_benchmark(*words)
    assert refused.returncode == 2 and "1 numbers for 2 tokens" in refused.stderr
