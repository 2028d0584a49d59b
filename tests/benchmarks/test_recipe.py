"""benchmarks/recipe.py: its queue, what it resumes; recipe_report.py: its numbers against sums done by hand."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmark_helpers import import_benchmark

FILE = """
common: --total_chunks 10
seeds: [0, 1]
tasks:
  one: --config demo
  two: {python: other, arguments: --config libero_goal_6}
settings:
  RLT: ""
  long returns: --rlt.n_steps 8
"""


@pytest.fixture
def recipe():
    return import_benchmark("recipe")


@pytest.fixture
def report():
    return import_benchmark("recipe_report")


@pytest.fixture
def runs(recipe, tmp_path):
    (tmp_path / "file.yaml").write_text(FILE)
    return recipe.queue(recipe.read_settings(tmp_path / "file.yaml"), tmp_path)


def evaluation(successes, n=4):
    rows = [
        {"task_id": 0, "init_index": i, "pair": i, "chunks": 2, "success": i < successes, "steps": 10} for i in range(n)
    ]
    return {"policy": "any", "split": "eval", "successes": successes, "n": n, "rows": rows}


def evaluations(practicing, deployed=None):
    points = [
        {"chunks": 100 * at, "control_steps": 1200 * at, "minutes": at, "candidate": evaluation(k)}
        | {"evaluation": evaluation(k if deployed is None else deployed)}
        for at, k in enumerate(practicing, start=1)
    ]
    config = {"algorithm": "rlt", "seed": 0}
    first = {"vla": evaluation(1), "rlt": evaluation(3), "vla_selection": evaluation(1)}
    return first | {"selection": points, "config": config, "minutes": 7.0, "control_frequency": 20}


def test_order_and_arguments_of_the_queue(runs, tmp_path):
    names = [run.folder.name for run in runs]
    assert names[:3] == ["RLT-one-seed0", "long_returns-one-seed0", "RLT-two-seed0"] and len(set(names)) == 8
    assert [run.seed for run in runs] == [0] * 4 + [1] * 4
    command = runs[3].command()
    assert command[0] == "other" and runs[0].command()[0] == sys.executable
    assert command[4:10] == ["--total_chunks", "10", "--config", "libero_goal_6", "--rlt.n_steps", "8"]
    assert command[10:16] == ["--out", str(tmp_path), "--name", "long_returns-two-seed0", "--seed", "0"]


def test_a_setting_can_name_a_file_for_each_task(recipe, tmp_path):
    path = tmp_path / "file.yaml"
    path.write_text("tasks: {a 1: '', b 2: ''}\nsettings: {own: '--env.rl_token {task}_x.safetensors'}\nseeds: [0]\n")
    words = [run.arguments for run in recipe.queue(recipe.read_settings(path), tmp_path)]
    assert words == [("--env.rl_token", "a_1_x.safetensors"), ("--env.rl_token", "b_2_x.safetensors")]


def test_an_interrupted_run_goes_on_and_a_finished_one_is_not_repeated(recipe, runs, monkeypatch):
    begun, interrupted, finished, new = runs[:4]
    for run, file in ((begun, "config.yaml"), (interrupted, "checkpoints/a/model.zip"), (finished, "report.html")):
        (run.folder / file).parent.mkdir(parents=True)
        (run.folder / file).touch()
    commands = []
    monkeypatch.setattr(recipe.subprocess, "run", lambda command, **_: commands.append(command))
    assert list(recipe.play(runs[:4], parallel=1)) == [begun, interrupted, new]
    assert "--resume" not in commands[0] and not begun.folder.exists()  # nothing to go on from
    assert commands[1][3:] == ["train", "--resume", str(interrupted.folder)]
    assert commands[2] == new.command()


def test_rows_have_the_load_of_the_machine(recipe, report, tmp_path, monkeypatch):
    """Four processes on two cores when the run begins, three when it ends."""
    (tmp_path / "file.yaml").write_text(FILE.replace("long returns", "utd 0.5"))
    runs = recipe.queue(recipe.read_settings(tmp_path / "file.yaml"), tmp_path)
    loads = iter([(4.0, 9.0, 9.0), (3.0, 9.0, 9.0)])

    def run(command, **_):
        (tmp_path / "utd_0.5-one-seed0").mkdir()
        (tmp_path / "utd_0.5-one-seed0" / "evaluations.json").write_text(json.dumps(evaluations([1])))

    monkeypatch.setattr(recipe.subprocess, "run", run)
    monkeypatch.setattr(recipe.os, "getloadavg", lambda: next(loads))
    monkeypatch.setattr(recipe.os, "cpu_count", lambda: 2)
    (played,) = recipe.play(runs[1:2], parallel=1)
    assert report.measure(played.key, played.folder)["load"] == {"began": 2.0, "ended": 1.5}
    assert {path.name for path in tmp_path.glob("utd*")} == {
        "utd_0.5-one-seed0", "utd_0.5-one-seed0.log", "utd_0.5-one-seed0.load.json",
    }  # fmt: skip
    (tmp_path / "utd_0.5-one-seed0.load.json").unlink()  # a run of an older version
    assert report.measure(played.key, played.folder)["load"] is None


def test_later_seeds_take_the_outcomes_of_the_frozen_vla(recipe, runs):
    one, other = runs[0], runs[4]
    assert (one.setting, one.task, one.seed) == (other.setting, other.task, 0) and other.seed == 1
    assert "--evaluation.vla_of" not in other.command()  # the first one has not begun
    one.folder.mkdir()
    (one.folder / "evaluations.json").write_text(json.dumps({"vla": evaluation(1)}))
    assert "--evaluation.vla_of" not in other.command()
    (one.folder / "evaluations.json").write_text(json.dumps(evaluations([1])))
    words = other.command()
    assert words[words.index("--evaluation.vla_of") + 1] == str(one.folder)
    assert "--evaluation.vla_of" not in one.command()
    # "long returns" differs in the algorithm only; the other task has a VLA of its own
    words = runs[5].command()
    assert runs[5].setting == "long returns" and words[words.index("--evaluation.vla_of") + 1] == str(one.folder)
    assert runs[6].task == "two" and "--evaluation.vla_of" not in runs[6].command()


def test_a_part_of_the_queue_takes_the_outcomes_that_another_part_has(recipe, runs, tmp_path):
    whole = recipe.read_settings(tmp_path / "file.yaml")
    one_setting = {"long returns": whole["settings"]["long returns"]}
    later, alone = recipe.queue(whole | {"seeds": [7], "settings": one_setting}, tmp_path, whole)
    assert (later.task, alone.task) == ("one", "two")
    runs[4].folder.mkdir()  # the first setting with seed 1, which this part leaves out
    (runs[4].folder / "evaluations.json").write_text(json.dumps(evaluations([1])))
    words = later.command()
    assert words[words.index("--evaluation.vla_of") + 1] == str(runs[4].folder)
    assert "--evaluation.vla_of" not in alone.command()


def test_settings_take_the_outcomes_from_one_another(recipe, runs, tmp_path):
    """Where the first setting is left out, another one with the same environment has played the frozen VLA."""
    first, other, later = runs[0], runs[1], runs[5]
    assert (other.setting, other.task, later.setting, later.task) == ("long returns", "one", "long returns", "one")
    other.folder.mkdir()
    (other.folder / "evaluations.json").write_text(json.dumps(evaluations([1])))
    for run in (first, later):
        words = run.command()
        assert words[words.index("--evaluation.vla_of") + 1] == str(other.folder)
    assert "--evaluation.vla_of" not in other.command()


@pytest.mark.parametrize(
    ("arguments", "own"),
    [
        ("", False),
        ("--rlt.n_steps 1", False),
        ("--env.rl_token mean", False),
        ("--env.kwargs.obs_stride 2 --rlt.utd 0.5", True),
        ("--env.vla=mini-slow", True),
        ("--env file.yaml", True),
        ("--config paper", True),
        ("--evaluation.n_states 3", True),
    ],
)
def test_settings_with_another_environment_play_the_vla_themselves(recipe, arguments, own):
    assert recipe.has_own_vla(arguments) == own


def test_measures_of_a_run(report, tmp_path):
    def measured(practicing, **deployed):
        (tmp_path / "evaluations.json").write_text(json.dumps(evaluations(practicing, **deployed)))
        return report.measure(("RLT", "one", 0), tmp_path)

    # 1 of 4 by the VLA; the practicing actor solves 0, 2, 4 while the VLA's chunks are deployed
    row = measured([0, 2, 4], deployed=1)
    assert report.key(row) == ("RLT", "one", 0)
    assert row["area"] == pytest.approx((0.125 + 0.25 + 0.75) / 3)
    assert (row["last"], row["held_out"]) == (1.0, 0.75)
    selection = row["selection"]
    assert selection["practicing"] == [0, 2, 4] and selection["deployed"] == [1] * 3 and selection["n"] == 4
    assert selection["vla"] == 1 and selection["chunks"] == [100, 200, 300]
    # 1,200 control steps are a minute; 0.55 and 0.9 are first reached at the third point
    assert (row["minutes_to_30_points"], row["minutes_to_90"], row["robot_minutes"]) == (3.0, 3.0, 3.0)
    assert (row["fixed"], row["broken"], row["p_value"]) == (2, 0, 0.5)
    assert row["steps_where_both_succeed"] == [10.0, 10.0]
    line = report.table([row]).splitlines()[-1]
    assert "| 1/4 (5 % to 70 %) | 3/4 (30 % to 95 %) | 2 / 0, 0.5 | - | 10 -> 10 | 0, 2, 4 of 4 (1) |" in line
    assert line.endswith("| 3.0, 3.0, 3.0 | 7 | 0/4 (VLA: 1/4) | 3600, 3600, 3600 |")
    row = measured([2, 3])
    assert (row["minutes_to_30_points"], row["minutes_to_90"]) == (2.0, None)
    assert report.table([row]).endswith("| 2.0, -, 2.0 | 7 | 2/4 (VLA: 1/4) | 2400, -, 2400 |")


def test_control_steps_at_another_frequency_and_without_one(report, tmp_path):
    """At 10 Hz, 2,400 control steps are four minutes."""
    for frequency, minutes in ((10, "4.0, -, 4.0"), (None, "-, -, -")):
        (tmp_path / "evaluations.json").write_text(json.dumps(evaluations([2, 3]) | {"control_frequency": frequency}))
        row = report.measure(("RLT", "one", 0), tmp_path)
        assert report.table([row]).endswith(f"| {minutes} | 7 | 2/4 (VLA: 1/4) | 2400, -, 2400 |")


def test_published_rows_have_lowest_points_and_control_steps(recipe, report):
    """Those of older versions have robot minutes at 20 Hz only."""
    rows = []
    for file in (recipe.ROOT / "benchmarks" / "recipes").glob("*.yaml"):
        made = recipe.ROOT / "benchmarks" / "results" / f"{file.stem}.json"
        rows += recipe.read_rows([made]).values() if made.exists() else []
    rows = [{name: row[name] for name in row.keys() - set(report.GOALS.values())} for row in rows]
    assert len(rows) > 200
    head, _, *lines = (line.strip("| ").split(" | ") for line in report.table(rows).splitlines())
    for row, cells in zip(rows, lines, strict=True):
        found = dict(zip(head, cells, strict=True))
        worst = sorted(row["selection"]["practicing"])[0]
        n, vla = row["selection"]["n"], row["selection"]["vla"]
        assert found["lowest evaluation of the practicing actor"] == f"{worst}/{n} (VLA: {vla}/{n})"
        goals = zip(
            found["practicing actor: control steps to +30 points, to 90 %, in all"].split(", "),
            found["practicing actor: robot minutes to +30 points, to 90 %, in all"].split(", "),
            strict=True,
        )
        for steps, minutes in goals:
            assert (steps == "-") == (minutes == "-")
            assert steps == "-" or abs(int(steps) / 1200 - float(minutes)) < 0.051


def test_runs_are_paired_with_that_of_the_first_setting(report, tmp_path):
    """On the states of the same task and seed. A solves 0 to 2 with seed 0 and 0 with seed 1; B solves 3 and all."""
    (tmp_path / "evaluations.json").write_text(json.dumps(evaluations([1])))
    rows = []
    for setting, seed, solved in (("A", 0, [0, 1, 2]), ("B", 0, [3]), ("B", 1, [0, 1, 2, 3]), ("A", 1, [0])):
        row = report.measure((setting, "one", seed), tmp_path)
        assert row["solved"] == "0/0 0/1 0/2"
        rows.append(row | {"solved": " ".join(f"0/{index}" for index in solved)})
    rows.append(rows[1] | {"seed": 2})  # A has no such run
    head, _, *lines = report.table(rows).splitlines()
    column = head.split(" | ").index("better / worse than A, McNemar p")
    assert [line.split(" | ")[column] for line in lines] == ["-", "1 / 3, 0.6", "3 / 0, 0.2", "-", "-"]


def test_table_with_the_seeds_of_a_setting_in_one_line(report, tmp_path):
    """A has seeds 1 and 0, in this order; B has seed 1 only, and solves another state."""
    rows = []
    for setting, seed, practicing in (("A", 1, [2, 4]), ("B", 1, [0, 1]), ("A", 0, [4, 4])):
        (tmp_path / "evaluations.json").write_text(json.dumps(evaluations(practicing)))
        rows.append(report.measure((setting, "one", seed), tmp_path))
    rows[1] |= {"solved": "0/3", "rlt": rows[1]["vla"]}
    rows[0]["wall_minutes"] = 12.6
    head, _, vla, a, b = report.by_setting(rows).splitlines()
    assert "| held-out states solved, seed 0; 1 | better / worse than A, McNemar p |" in head
    three, one = "3/4 (30 % to 95 %)", "1/4 (5 % to 70 %)"
    assert head.endswith("| practicing actor: control steps (robot minutes) to +30 points, to 90 %, in all | minutes |")
    assert vla == f"| one | frozen VLA | {one} | - | 1 of 4 | - | 1 of 4 | - | - |"
    early, late = "1200 (1.0), 1200 (1.0), 2400 (2.0)", "2400 (2.0), 2400 (2.0), 2400 (2.0)"
    assert a == f"| one | A | {three}; {three} | -; - | 4, 4; 2, 4 | 0.81; 0.56 | 4; 2 | {early}; {late} | 7; 13 |"
    assert b == f"| one | B | -; {one} | -; 1 / 3, 0.6 | -; 0, 1 | -; 0.12 | -; 0 | -; -, -, 2400 (2.0) | -; 7 |"


def test_learning_curves(report, tmp_path, monkeypatch):
    """Means over seeds, bands from the worst to the best, of the points that all seeds have; the VLA's line."""
    rows = []
    for seed, practicing in enumerate([[0, 2, 4], [2, 2]]):
        (tmp_path / "evaluations.json").write_text(json.dumps(evaluations(practicing)))
        rows.append(report.measure(("RLT", "one", seed), tmp_path))
    drawn = []
    monkeypatch.setattr(report.plt, "close", drawn.append)
    report.figure(rows, tmp_path / "curves.png")
    axes = drawn[0].axes[0]
    curve, vla = axes.lines
    assert axes.get_title() == "one" and curve.get_label() == "RLT, 2 seed(s)"
    assert axes.get_xlabel() == "action chunks of practice, 2 robot minutes in all"
    assert curve.get_xydata().tolist() == [[0, 0.25], [100, 0.25], [200, 0.5]] and vla.get_ydata()[0] == 0.25
    corners = axes.collections[0].get_paths()[0].vertices.tolist()
    assert [100, 0.0] in corners and [100, 0.5] in corners
    assert (tmp_path / "curves.png").stat().st_size > 0


def test_only_tasks_that_all_settings_have_finished_are_compared(report):
    rows = [
        {"setting": setting, "task": task, "seed": seed, "area": 10 * seed + (setting == "b") + 0.1 * (task == "y")}
        for setting in "ab"
        for task in "xy"
        for seed in (0, 1)
    ]
    assert {name: values.tolist() for name, values in report.matrices(rows, "area").items()} == {
        "a": [[0, 0.1], [10, 10.1]],
        "b": [[1, 1.1], [11, 11.1]],
    }
    assert report.matrices(rows[:-1], "area")["b"].tolist() == [[1], [11]]


def test_settings_that_are_better_on_every_task_and_seed(report):
    pytest.importorskip("rliable")
    scores = {"a": [0.2, 0.4], "b": [0.8, 0.9]}
    rows = [
        {"setting": name, "task": str(task), "seed": seed} | dict.fromkeys(report.SCORES, value + 0.01 * seed)
        for name, values in scores.items()
        for task, value in enumerate(values)
        for seed in (0, 1)
    ]
    first, second = [row for row in report.aggregate(rows) if row["score"] == "area"]
    # the middle half of 0.20, 0.21, 0.40, 0.41
    assert first["iqm"] == pytest.approx(np.mean([0.21, 0.40])) and "better" not in first
    assert second["better"] == 1.0 and second["better_95"] == [1.0, 1.0] and second["runs"] == 4
    assert first["iqm_95"][0] <= first["iqm"] <= first["iqm_95"][1] < second["iqm_95"][0]
    assert "| 0.85 (" in report.comparison([second])


def test_runs_of_another_machine_are_not_repeated(recipe, tmp_path, monkeypatch, capsys):
    """A queue in two parts: the second command makes what the first one has not made, and its tables have all runs."""
    monkeypatch.setattr(recipe, "aggregate", lambda rows: [])  # needs rliable
    monkeypatch.setattr(recipe, "load_rliable", lambda: None)
    (tmp_path / "file.yaml").write_text(FILE)
    made = []

    def run(command, **_):
        folder = Path(command[command.index("--out") + 1]) / command[command.index("--name") + 1]
        folder.mkdir()
        (folder / "evaluations.json").write_text(json.dumps(evaluations([1, 3])))
        (folder / "report.html").touch()
        made.append(folder.name)

    def command(out, *arguments):
        common = ["recipe.py", "--settings", str(tmp_path / "file.yaml"), "--parallel", "1"]
        monkeypatch.setattr(
            sys, "argv", [*common, "--out", str(tmp_path / out), "--json", str(tmp_path / f"{out}.json"), *arguments]
        )
        recipe.main()
        return capsys.readouterr().out

    monkeypatch.setattr(recipe.subprocess, "run", run)
    command("a", "--tasks", "two", "--only", "RLT")
    assert made == ["RLT-two-seed0", "RLT-two-seed1"]
    made.clear()
    table = command("b", "--rows", str(tmp_path / "a.json"))
    assert len(made) == 6 and not {"RLT-two-seed0", "RLT-two-seed1"} & set(made)
    rows = json.loads((tmp_path / "b.json").read_text())["runs"]
    assert len({(row["setting"], row["task"], row["seed"]) for row in rows}) == 8
    assert "| two | RLT | 1 |" in table and "| two | long returns | 1 |" in table
    made.clear()
    (tmp_path / "two.json").write_text(json.dumps({"runs": [rows[0] | {"seed": 99}, rows[1] | {"area": -1.0}]}))
    table = command("two", "--rows", str(tmp_path / "b.json"), "--only", rows[1]["setting"])
    kept, replaced, *others = json.loads((tmp_path / "two.json").read_text())["runs"]
    assert not made and kept == rows[0] | {"seed": 99} and replaced == rows[1]  # in the file, not in the table
    assert {row["setting"] for row in others} == {rows[1]["setting"]} and "| 99 |" not in table
    late = tmp_path / "late.json"  # another command writes this file while the runs are made
    monkeypatch.setattr(recipe, "aggregate", lambda _: late.write_text(json.dumps({"runs": rows[:1]})) and [])
    command("late", "--rows", str(tmp_path / "b.json"), "--tasks", rows[-1]["task"], "--only", rows[-1]["setting"])
    first, *others = json.loads(late.read_text())["runs"]
    assert first == rows[0] and len(others) == 2 and rows[-1] in others
    for arguments, says in (
        (["--rows", str(tmp_path / "a.json"), str(tmp_path / "b.json")], "has runs that a file before it has as well"),
        (["--rows", str(tmp_path / "file.yaml")], "must have been written by --json"),
        (["--tasks", "three"], r"has no tasks ['three'], it has ['one', 'two']"),
    ):
        with pytest.raises(SystemExit):
            command("c", *arguments)
        assert says in capsys.readouterr().err and not (tmp_path / "c").exists()


def test_a_missing_package_is_named_before_any_run(recipe, tmp_path, monkeypatch, capsys):
    (tmp_path / "file.yaml").write_text(FILE)
    monkeypatch.setitem(sys.modules, "rliable", None)
    monkeypatch.setattr(recipe.subprocess, "run", lambda *args, **kwargs: pytest.fail("a run has begun"))
    monkeypatch.setattr(
        sys, "argv", ["recipe.py", "--settings", str(tmp_path / "file.yaml"), "--out", str(tmp_path / "out")]
    )
    with pytest.raises(SystemExit):
        recipe.main()
    assert "pip install 'rlt[benchmarks]'" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_bad_settings_files(recipe, tmp_path):
    path = tmp_path / "bad.yaml"
    for text in ("seeds: [0]", "tasks: {a: b}\nsettings: {c: d}\nseeds: []", FILE + "tries: 3", "[]"):
        path.write_text(text)
        with pytest.raises(ValueError, match="must have tasks, settings and seeds"):
            recipe.read_settings(path)
    path.write_text(json.dumps({"seeds": [0], "settings": {"a": ""}, "tasks": {"b": {"config": "demo"}}}))
    with pytest.raises(ValueError, match=r"Task 'b' of .* may have python and arguments, got"):
        recipe.read_settings(path)


def test_published_rows_are_of_their_settings_file(recipe):
    """A command writes ``results/NAME.json`` for ``recipes/NAME.yaml``: no other benchmark may have this name."""
    published = []
    for file in sorted((recipe.ROOT / "benchmarks" / "recipes").glob("*.yaml")):
        settings, rows = recipe.read_settings(file), recipe.ROOT / "benchmarks" / "results" / f"{file.stem}.json"
        if rows.exists():
            published += [file.stem]
            made = recipe.read_rows([rows])
            allowed = {run.key for run in recipe.queue(settings, Path())}
            assert made.keys() <= allowed, sorted(made.keys() - allowed)
    assert {"held_out", "results_page"} <= set(published)
