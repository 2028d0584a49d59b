"""benchmarks/placements.py: whose place success depends on, on made-up outcomes and on LIBERO."""

import json
from math import erfc, sqrt

import numpy as np
import pytest
from benchmark_helpers import import_benchmark, run_benchmark


@pytest.fixture
def placements():
    return import_benchmark("placements")


def write_run(folder, vla, rlt, **changes):
    env = {"suite": "libero_goal", "task_ids": [2], "assets": "embedded"} | changes
    data = {"config": {"env": env, "algorithm": "rlt"}}
    for name, label, solved in (("vla", "frozen VLA", vla), ("rlt", "RLT", rlt)):
        rows = [
            {"task_id": env["task_ids"][i % len(env["task_ids"])], "init_index": i, "pair": i, "chunks": 2, "steps": 10}
            | {"success": bool(success)}
            for i, success in enumerate(solved)
        ]
        data[name] = {"policy": label, "split": "eval", "successes": int(sum(solved)), "n": len(rows), "rows": rows}
    folder.mkdir()
    (folder / "evaluations.json").write_text(json.dumps(data))
    return folder


def test_only_the_axis_that_matters_is_found(placements):
    rng = np.random.default_rng(0)
    where = {name: rng.uniform(-0.015, 0.015, (100, 2)) for name in ("bowl", "plate", "mug")}
    where["stove"] = np.zeros((100, 2))
    y = where["plate"][:, 1]
    # the VLA solves the upper half of the plate's places, the model all but the lowest tenth, each in both of two runs
    solved = {"frozen VLA": np.array([y > 0] * 2), "RLT": np.array([y > -0.012] * 2)}
    found = placements.differences(where, solved)
    assert [(name, axis) for name, axis, _, _ in found] == [("plate", "y")] and found[0][3] < 1e-10
    # groups that do not overlap have U = 0; Bonferroni: six axes that move, two policies
    lower = [int((y <= end).sum()) for end in (0.0, -0.012)]
    p = min(erfc((n * (100 - n) / 2 - 0.5) / sqrt(n * (100 - n) * 101 / 12) / sqrt(2)) for n in lower)
    assert found[0][3] == pytest.approx(12 * p, rel=1e-6, abs=0)
    lines = placements.table(found, solved).splitlines()
    assert lines[0] == "| object | axis | place in mm | frozen VLA | RLT | p |"
    assert lines[1] == "|---|---|---|---|---|---|"
    places = np.sort(y).reshape(4, 25)
    for line, group in zip(lines[2:], places, strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[2] == f"{1000 * group[0]:.0f} to {1000 * group[-1]:.0f}"
        assert cells[3] == f"{2 * (group > 0).sum()}/50" and cells[4] == f"{2 * (group > -0.012).sum()}/50"
    chance = {name: rng.random((1, 100)) < 0.5 for name in solved}
    assert placements.differences(where, chance) == []
    always = {name: np.ones((1, 100), bool) for name in solved}
    assert placements.differences(where, always) == []


def test_runs_of_one_task_are_added_up(placements, tmp_path):
    one = write_run(tmp_path / "one", [1, 0, 0, 1], [1, 1, 0, 1])
    two = write_run(tmp_path / "two", [1, 0, 0, 1], [0, 1, 0, 1])
    task, states, solved = placements.outcomes([one, two])
    assert task == ("libero_goal", 2, "embedded") and states == [0, 1, 2, 3]
    assert solved["RLT"].tolist() == [[True, True, False, True], [False, True, False, True]]
    assert solved["frozen VLA"].tolist() == [[True, False, False, True]] * 2
    for number, changes in enumerate(({"task_ids": [1]}, {"suite": "libero_spatial"}, {"assets": None})):
        other = write_run(tmp_path / f"other{number}", [1, 0, 0, 1], [1, 1, 0, 1], **changes)
        with pytest.raises(
            ValueError, match=r"other. differs from .*one in task, assets, algorithm or held-out states"
        ):
            placements.outcomes([one, other])
    many = write_run(tmp_path / "many", [1, 0], [1, 1], task_ids=[1, 2])
    with pytest.raises(ValueError, match=r"many must be of one task, it has \[1, 2\]"):
        placements.outcomes([many])


@pytest.mark.sim
@pytest.mark.expensive
def test_places_on_libero(tmp_path):
    """Objects move between states by centimeters, on the table; the same states have the same places."""
    run = write_run(tmp_path / "run", [1, 0, 1, 0], [1, 1, 1, 0])
    found = []
    for name in ("a.json", "b.json"):
        done = run_benchmark("placements", run, "--json", tmp_path / name)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "Success does not depend on where one object stands.\n"  # four states cannot tell
        found.append(json.loads((tmp_path / name).read_text()))
    assert found[0] == found[1] and found[0]["states"] == [0, 1, 2, 3]
    assert found[0]["solved"]["RLT"] == [[True, True, True, False]]
    bottle = np.array(found[0]["places"]["wine_bottle_1"])
    assert bottle.shape == (4, 2) and np.abs(bottle).max() < 0.5
    assert 1e-3 < bottle.std(axis=0).min() and bottle.std(axis=0).max() < 0.03
