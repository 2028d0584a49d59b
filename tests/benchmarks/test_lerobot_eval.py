"""The arithmetic of ``benchmarks/lerobot_eval.py``; its simulators and policies are played by hand."""

import json

import numpy as np
import pytest
from benchmark_helpers import import_benchmark

pytest.importorskip("psutil")


@pytest.fixture
def benchmark():
    return import_benchmark("lerobot_eval")


def episode(success, steps):
    return {
        "outcome": (success, steps),
        "actions": np.zeros((steps, 7), dtype=np.float32),
        "pictures": np.zeros((2, 4, 4, 3), dtype=np.uint8),
        "proprio": np.zeros(8, dtype=np.float32),
    }


def test_equal_episodes_differ_in_nothing(benchmark):
    theirs, ours = episode(True, 5), episode(True, 5)
    theirs["actions"][2, 6] = 1.5  # LeRobot does not clip; the simulators do
    ours["actions"][2, 6] = 1.0
    assert benchmark.compare(theirs, ours) == {
        "lerobot-eval": [True, 5],
        "rlt eval": [True, 5],
        "largest_difference_of_actions": 0.0,
        "final_observation": {"share_of_other_pixels": 0.0, "largest_difference_of_state": 0.0},
    }


def test_what_differs_is_counted(benchmark):
    theirs, ours = episode(True, 5), episode(True, 5)
    ours["actions"][4, 0] = -0.25
    theirs["pictures"][1, 3, 3] = (0, 1, 255)  # one pixel of 32, also where uint8 would wrap around
    ours["pictures"][1, 3, 3] = (0, 2, 0)
    theirs["proprio"][7] = 0.5
    row = benchmark.compare(theirs, ours)
    assert row["largest_difference_of_actions"] == 0.25
    assert row["final_observation"] == {"share_of_other_pixels": 1 / 32, "largest_difference_of_state": 0.5}
    row = benchmark.compare(episode(True, 5), episode(True, 4))
    assert row["final_observation"] is None and row["largest_difference_of_actions"] == 0.0


def test_speeds_leave_the_policy_out_and_count_the_start(benchmark):
    result = benchmark.speeds(
        {
            "lerobot-eval": {"control_steps": 100, "cpu": 60.0, "policy_cpu": 10.0, "start_cpu": 50.0},
            "rlt eval": {"control_steps": 90, "cpu": 12.0, "policy_cpu": 9.0, "start_cpu": 6.0},
        }
    )
    assert [result[side]["speed"] for side in ("lerobot-eval", "rlt eval")] == [2.0, 30.0]
    assert [result[side]["speed_with_start"] for side in ("lerobot-eval", "rlt eval")] == [1.0, 10.0]
    assert (result["ratio"], result["ratio_with_start"]) == (15.0, 10.0)


def test_an_entry_keeps_the_others(benchmark, tmp_path):
    path = tmp_path / "results.json"
    for name, value in (("act", 1), ("smolvla", 2), ("act", 3)):
        benchmark.write(str(path), name, {"ratio": value})
    assert json.loads(path.read_text()) == {"act": {"ratio": 3}, "smolvla": {"ratio": 2}}
    assert [entry.name for entry in tmp_path.iterdir()] == ["results.json"]
