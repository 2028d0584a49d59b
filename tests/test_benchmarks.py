"""Benchmarks run at small sizes and write their numbers; what they measure is not checked here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(name, *arguments):
    call = [sys.executable, "-W", "ignore", BENCHMARKS / f"{name}.py", *arguments]
    done = subprocess.run(list(map(str, call)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    ("name", "arguments", "numbers"),
    [
        ("learner", "--dims 8 --batches 16 --updates 2 --rounds 1 --rows 60", {"results"}),
        ("server", "--clients 1,2 --seconds 0.5 --rounds 1", {"cores", "load_before", "results"}),
        ("tokens", "--rows 60 --tokens 4 --width 8 --rows_per_shard 20 --batches 2 --batch_size 8", {"disk_gb"}),
        ("throughput", "--envs 1 --seconds 1 --rounds 1", {"cores", "load", "results"}),
        ("faults", "--injections 2", {"faults"}),
    ],
)
def test_numbers_and_arguments_are_written(tmp_path, name, arguments, numbers):
    path = tmp_path / "new" / "numbers.json"
    assert "|" in run(name, *arguments.split(), "--json", path) or name == "tokens"
    found = json.loads(path.read_text())
    assert numbers <= set(found) and "json" not in found["arguments"]
    given = arguments.split()[0].lstrip("-").replace("-", "_")
    assert given in found["arguments"], "the arguments say how the numbers were made"


@pytest.mark.parametrize(
    ("name", "arguments", "shown"),
    [("buffer", "--rows 300 --dim 8", "SB3 / ours ="), ("gate", "--runs 5 --num-envs 1", "| ")],
)
def test_benchmarks_without_a_file_of_numbers_print_them(name, arguments, shown):
    assert shown in run(name, *arguments.split())
