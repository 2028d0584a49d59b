"""benchmarks/gpu.py runs without a GPU on tiny networks, and says what fails."""

import json

import pytest
import torch
from benchmark_helpers import run_benchmark


@pytest.mark.expensive
def test_parts_on_the_cpu(tmp_path):
    words = "--device cpu --small --parts learner token --json".split()
    done = run_benchmark("gpu", *words, tmp_path / "gpu.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["device"] == "cpu" and found["learner"][0]["RLT / TD3"] > 0 and found["token"][0]["trained/s"] > 0
    assert "| 192 | 64 |" in done.stdout


def test_no_gpu_is_an_error_in_one_line():
    if not torch.cuda.is_available():
        done = run_benchmark("gpu")
        assert done.returncode == 2 and done.stderr.splitlines()[-1].endswith("tries the benchmark without one")
