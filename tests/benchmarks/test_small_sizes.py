"""Benchmarks run at small sizes and write their numbers; what they measure is not checked here."""

import json

import pytest
from benchmark_helpers import run_benchmark


@pytest.mark.parametrize(
    ("name", "arguments", "shown", "numbers"),
    [
        ("learner", "--dims 8 --batches 16 --updates 2 --rounds 1 --rows 60", "| 8 | 16 |", {"results"}),
        ("server", "--clients 1,2 --seconds 0.5 --rounds 1", "| 2 | ", {"cores", "load_before", "results"}),
        pytest.param(
            *("throughput", "--envs 1 --seconds 1 --rounds 1", "| 1 | ", {"cores", "load", "results"}),
            marks=pytest.mark.expensive,
        ),
        pytest.param(
            *("faults", "--injections 2", "| SIGKILL of the parent | 1 |", {"faults"}), marks=pytest.mark.expensive
        ),
    ],
)
def test_numbers_and_arguments_are_written(tmp_path, name, arguments, shown, numbers):
    path = tmp_path / "new" / "numbers.json"
    done = run_benchmark(name, *arguments.split(), "--json", path)
    assert done.returncode == 0 and shown in done.stdout, done.stderr
    found = json.loads(path.read_text())
    assert numbers <= set(found) and "json" not in found["arguments"]
    given = {word.lstrip("-").replace("-", "_") for word in arguments.split() if word.startswith("--")}
    assert given <= set(found["arguments"]), "the arguments say how the numbers were made"


@pytest.mark.parametrize(
    ("name", "arguments", "shown"),
    [
        ("buffer", "--rows 300 --dim 8", "SB3 / ours ="),
        pytest.param(*("workers", "--turns 1,8 --render fast", "closed / kept"), marks=pytest.mark.expensive),
        pytest.param(*("gate", "--runs 5 --num-envs 1", "| "), marks=pytest.mark.expensive),
    ],
)
def test_benchmarks_without_a_file_of_numbers_print_them(name, arguments, shown):
    done = run_benchmark(name, *arguments.split())
    assert done.returncode == 0 and shown in done.stdout, done.stderr
