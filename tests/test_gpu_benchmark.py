"""benchmarks/gpu.py runs without a GPU on tiny networks, and says what fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent


def run(*arguments):
    call = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(call, capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.expensive
def test_parts_on_the_cpu(tmp_path):
    done = run("--device", "cpu", "--small", "--parts", "learner", "token", "--json", tmp_path / "gpu.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["device"] == "cpu" and found["learner"][0]["RLT / TD3"] > 0 and found["token"][0]["trained/s"] > 0
    assert "| 192 | 64 |" in done.stdout


def test_no_gpu_is_an_error_in_one_line():
    if not torch.cuda.is_available():
        done = run()
        assert done.returncode == 2 and done.stderr.splitlines()[-1].endswith("tries the benchmark without one")
