"""rlt eval: shards and their merge, all checkpoints, the frozen VLA beside."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import toy_env  # noqa: F401
from run_helpers import environment, small, textbook_wilson

from rlt_sb3.cli.arguments import normalize
from rlt_sb3.cli.main import main
from rlt_sb3.evaluation.results import Evaluation
from rlt_sb3.evaluation.shards import parse_shard
from rlt_sb3.experiment.config import EnvConfig, EvalSettings, TrainConfig, save_config
from rlt_sb3.experiment.eval_config import EvalConfig
from rlt_sb3.experiment.evaluate_run import evaluate_run
from rlt_sb3.experiment.train import train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlt_sb3.experiment.report.write_report", lambda run: None)
        config = small(tmp_path_factory.mktemp("run"), total_chunks=80, evaluation=EvalSettings(7, 4, 40, videos=False))
        return train(config).run


def test_three_shards_are_one_evaluation(run, tmp_path, capsys):
    whole = evaluate_run(EvalConfig(run=str(run), n_states=11, progress=False, out=str(tmp_path / "whole.json")))
    files = []
    for k in (1, 2, 3):
        out = tmp_path / f"{k}.json"
        part = ["eval", str(run), "--shard", f"{k}/3", "--n_states", "11", "--progress=false", "--out", str(out)]
        assert main([*part, "--num_envs", str(k)]) == 0
        files.append(str(out))
    assert [r["pair"] for r in json.loads((tmp_path / "2.json").read_text())["rows"]] == [1, 4, 7, 10]
    assert main(["eval", "--merge", *files, "--out", str(tmp_path / "merged.json")]) == 0
    merged, single = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("merged", "whole"))
    assert Evaluation.from_dict(merged).rows == whole.rows
    for key in ("successes", "n", "wilson_95", "rows", "vla", "comparison", "per_task", "model_sha256"):
        assert merged[key] == single[key], key
    # 11 states: more than the run's own evaluation of the VLA, which was played again
    assert merged["vla"]["n"] == 11 and merged["vla"]["successes"] == 6
    capsys.readouterr()

    def refused(*names, status=1):
        assert main(["eval", "--merge", *names]) == status
        return capsys.readouterr().err

    assert "Missing: part 2/3" in refused(files[0], files[2])
    assert "Part 1/3 is there twice" in refused(*files, files[0])
    assert "is no part of an evaluation" in refused(str(tmp_path / "whole.json"), status=2)
    assert "There is no file" in refused(str(tmp_path / "nothing.json"), status=2)
    data = json.loads((tmp_path / "2.json").read_text())
    (tmp_path / "short.json").write_text(json.dumps(data | {"rows": data["rows"][:-1]}))
    assert "each of the initial states of part 2/3 once" in refused(files[0], str(tmp_path / "short.json"), files[2])
    (tmp_path / "other.json").write_text(json.dumps(data | {"model_sha256": "0"}))
    assert "belongs to another evaluation" in refused(files[0], str(tmp_path / "other.json"), files[2])
    assert main(["eval", str(run), "--shard", "4/3"]) == 2
    assert "1 <= k <= n, for example 1/3" in capsys.readouterr().err


@pytest.mark.sim
@pytest.mark.expensive
def test_two_shards_on_libero_are_one_evaluation(tmp_path, capsys):
    """
    Two tasks, two initial states of each: what simulators see in parts of the states is what they see in all. There are
    two everywhere: the networks' matrix products round differently for one row.
    """
    import torch

    from rlt_gym.rl_token.io import load_rl_token
    from rlt_gym.testing import FakeRLTokenVectorEnv
    from rlt_gym.vla import load_vla
    from rlt_sb3 import RLT, GymnasiumVecEnv

    env = EnvConfig(
        num_envs=2, suite="libero_goal", task_ids=[1, 8], chunk_length=8, assets="embedded", max_episode_steps=88
    )
    save_config(
        TrainConfig(name="run", env=env, evaluation=EvalSettings(4, 4, 40, videos=False)), tmp_path / "config.yaml"
    )
    width = load_rl_token("auto", load_vla("mini")).z_dim
    model = RLT(
        "MultiInputPolicy",
        GymnasiumVecEnv(FakeRLTokenVectorEnv(1, chunk_length=8, token_dim=width)),
        seed=0,
        gate=False,
    )
    with torch.no_grad():  # not the VLA, but near it
        model.actor_target.mu[-1].weight.normal_(std=0.003)
    model.save(tmp_path / "best_model.zip")
    common = ["eval", str(tmp_path), "--progress=false"]
    assert main([*common, "--out", str(tmp_path / "whole.json")]) == 0
    for k in (1, 2):
        part = ["--shard", f"{k}/2", "--num_envs", "2", "--out", str(tmp_path / f"{k}.json")]
        assert main([*common, *part]) == 0
    files = [str(tmp_path / "2.json"), str(tmp_path / "1.json")]
    assert main(["eval", "--merge", *files, "--out", str(tmp_path / "merged.json")]) == 0
    merged, whole = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("merged", "whole"))
    for key in ("successes", "n", "wilson_95", "rows", "vla", "comparison", "per_task", "model_sha256"):
        assert merged[key] == whole[key], key
    assert set(whole["per_task"]) == {"1", "8"} and [part["n"] for part in whole["per_task"].values()] == [2, 2]
    assert whole["rows"] != whole["vla"]["rows"]
    assert main([*common, "--tasks", "8", "--n_states", "2"]) == 0
    alone = json.loads((tmp_path / "eval-best-eval-tasks-8.json").read_text())
    for mine, all_tasks in ((alone, whole), (alone["vla"], whole["vla"])):
        rows = [row for row in all_tasks["rows"] if row["task_id"] == 8]
        assert [row | {"pair": 0} for row in mine["rows"]] == [row | {"pair": 0} for row in rows]


def test_all_checkpoints(run, capsys):
    assert main(["eval", str(run), "--all-checkpoints", "--progress=false"]) == 0
    out = capsys.readouterr().out
    data = json.loads((run / "eval-checkpoints-selection.json").read_text())
    assert list(data["checkpoints"]) == ["chunk-00000000", "chunk-00000040", "chunk-00000080"]
    # the untrained model is the VLA, and what was seen during training is seen again
    rows = [Evaluation.from_dict(entry).rows for entry in data["checkpoints"].values()]
    during = json.loads((run / "evaluations.json").read_text())
    assert rows[0] == Evaluation.from_dict(during["vla_selection"]).rows
    assert rows[1:] == [Evaluation.from_dict(point["evaluation"]).rows for point in during["selection"]]
    assert out.count("RLT (chunk-") == 3 and "frozen VLA" in out and out.count("<- best") == 1


@pytest.fixture
def by_module(run, tmp_path, monkeypatch):
    """The run, with an environment that another process finds, too."""
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("eval-*"))
    config = (copy / "config.yaml").read_text()
    assert "id: ToyRLToken-v0" in config
    (copy / "config.yaml").write_text(config.replace("id: ToyRLToken-v0", "id: toy_env:ToyRLToken-v0"))
    for name in ("PYTHONPATH", "OMP_NUM_THREADS", "RLT_ALLOWED_IMPORTS"):
        monkeypatch.setenv(name, environment()[name])
    return copy


def test_checkpoints_at_once_are_those_one_after_the_other(by_module, capsys):
    """Two processes, three checkpoints and the VLA, which the run has not played on as many states; chosen tasks."""
    command = ["eval", str(by_module), "--all-checkpoints", "--n_states", "9", "--progress=false", "--tasks", "3", "5"]
    written = by_module / "eval-checkpoints-selection-tasks-3-5.json"
    files, tables = [], []
    for more in ([], ["--max-parallel", "2"]):
        assert main([*command, *more]) == 0
        files.append(written.read_bytes())
        tables.append(capsys.readouterr().out)
    assert files[0] == files[1] and tables[0] == tables[1]
    data = json.loads(files[0])
    assert list(data["checkpoints"]) == ["chunk-00000000", "chunk-00000040", "chunk-00000080"]
    assert data["vla"]["n"] == 9
    for entry in (data["vla"], *data["checkpoints"].values()):
        assert [row["task_id"] for row in entry["rows"]] == [3, 5, 3, 5, 3, 5, 3, 5, 3]


def test_a_process_that_fails_ends_the_others(by_module, capsys):
    (by_module / "checkpoints" / "chunk-00000040" / "model.zip").write_bytes(b"no model")
    command = ["eval", str(by_module), "--all-checkpoints", "--max-parallel", "3", "--progress=false"]
    assert main([*command, "--n_states", "1000"]) == 1
    reported = capsys.readouterr().err
    assert "The evaluation of chunk-00000040 failed with exit status" in reported and "model.zip" in reported
    assert not children(os.getpid()) and not (by_module / "eval-checkpoints-selection.json").exists()
    with pytest.raises(ValueError, match="max_parallel must be 1, or with all_checkpoints"):
        evaluate_run(EvalConfig(run=str(by_module), max_parallel=2))
    with pytest.raises(ValueError, match="max_parallel must be 1"):
        evaluate_run(EvalConfig(run=str(by_module), all_checkpoints=True, max_parallel=0))


def children(pid):
    """Processes of a process, this package's only."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            command = Path(f"/proc/{child}/cmdline")
            if command.exists() and b"rlt_sb3" in command.read_bytes():
                found.append(int(child))
    return found


def test_ctrl_c_leaves_no_process(by_module):
    command = [sys.executable, "-m", "rlt_sb3", "eval", str(by_module), "--all-checkpoints", "--max-parallel", "2"]
    process = subprocess.Popen(
        [*command, "--n_states", "1000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        while process.poll() is None and len(started := children(process.pid)) < 2:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert len(started) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in started)
    finally:
        process.kill()
        process.wait()


def test_checkpoints_are_not_cut_in_parts(run, capsys):
    assert main(["eval", str(run), "--all-checkpoints", "--shard", "1/2", "--progress=false"]) == 2
    assert "shard cannot be used with all_checkpoints" in capsys.readouterr().err


def test_table_has_both_policies_and_every_task(run, capsys):
    result = evaluate_run(EvalConfig(run=str(run), progress=False))
    out = capsys.readouterr().out
    assert f"frozen VLA                     all  {4}/{7}" in out
    assert str(result) in out and "McNemar" in out
    assert evaluate_run(EvalConfig(run=str(run), progress=False)).rows == result.rows


def test_every_task_has_its_own_numbers(run, tmp_path, capsys):
    """Eight states of three tasks. The VLA solves the even ones: 0 and 6 of task 3, 4 of task 5, 2 of task 6."""
    common = ["eval", str(run), "--tasks", "3", "5", "6", "--n_states", "8", "--progress=false"]
    for model, policies in (("vla", ["frozen VLA"]), ("last", ["frozen VLA", "RLT (last)"])):
        out = tmp_path / f"{model}.json"
        assert main([*common, "--model", model, "--out", str(out)]) == 0
        table = capsys.readouterr().out.splitlines()
        data = json.loads(out.read_text())
        outcomes = {data["policy"]: data["rows"], "frozen VLA": (data if model == "vla" else data["vla"])["rows"]}
        assert sorted(outcomes) == sorted(policies)
        expected = [f"{'policy':<28}  task  success"]
        for policy in policies:
            counts = {}
            for row in outcomes[policy]:
                for task in ("all", row["task_id"]):
                    k, n = counts.get(task, (0, 0))
                    counts[task] = (k + row["success"], n + 1)
            if policy == "frozen VLA":
                assert counts == {"all": (4, 8), 3: (2, 3), 5: (1, 3), 6: (1, 2)}
            for task, name in (("all", policy), (3, ""), (5, ""), (6, "")):
                k, n = counts[task]
                low, high = textbook_wilson(k, n)
                expected.append(f"{name:<28} {task:>5}  {k}/{n} ({k / n:.0%}, 95 % CI {low:.0%} to {high:.0%})")
        assert table[: len(expected)] == expected
        assert list(data["per_task"]) == ["3", "5", "6"]
        for task, part in data["per_task"].items():  # of the model asked for, the last one in the table
            k, n = counts[int(task)]
            assert (part["successes"], part["n"]) == (k, n)
            assert part["wilson_95"] == pytest.approx(textbook_wilson(k, n), abs=1e-12)
            assert part["rows"] == [row for row in data["rows"] if row["task_id"] == int(task)]


def test_tasks_are_chosen(run, capsys):
    """The frozen VLA plays them, too: what the run has of it is of other states. Other files stay as they are."""
    evaluate_run(EvalConfig(run=str(run), progress=False))
    before = (run / "eval-best-eval.json").read_bytes()
    for form in (["--tasks", "3,5"], ["--tasks", "3", "5"], ["--tasks=[3, 5]"]):
        assert main(["eval", str(run), *form, "--n_states", "6", "--progress=false"]) == 0
        path = run / "eval-best-eval-tasks-3-5.json"
        data = json.loads(path.read_text())
        path.unlink()
        assert {task: part["n"] for task, part in data["per_task"].items()} == {"3": 3, "5": 3}
        assert [row["task_id"] for row in data["vla"]["rows"]] == [3, 5] * 3
    assert (run / "eval-best-eval.json").read_bytes() == before
    capsys.readouterr()
    for bad in ("3,3", "[]"):
        assert main(["eval", str(run), "--tasks", bad]) == 2
        assert "tasks must be one or more different numbers" in capsys.readouterr().err


def test_no_checkpoints(run, tmp_path):
    shutil.copytree(run, tmp_path / "old", ignore=shutil.ignore_patterns("checkpoints"))
    with pytest.raises(ValueError, match="has no checkpoints"):
        evaluate_run(EvalConfig(run=str(tmp_path / "old"), all_checkpoints=True))


def test_forms_of_the_command_line():
    assert normalize(EvalConfig, ["r", "--all-checkpoints", "--num-envs", "3"]) == [
        "--run=r", "--all_checkpoints=true", "--num_envs", "3",
    ]  # fmt: skip
    assert normalize(EvalConfig, ["--beside-vla", "false", "--out", "o", "r"]) == [
        "--beside_vla=false", "--out=o", "--run=r",
    ]  # fmt: skip
    assert normalize(EvalConfig, ["--merge", "a", "b", "--out", "c"]) == ['--merge=["a", "b"]', "--out=c"]
    assert normalize(EvalConfig, ["r", "--tasks", "3,5", "8"]) == ["--run=r", "--tasks=[3,5,8]"]
    assert normalize(EvalConfig, ["--vla", "mini", "--suites", "a", "b"]) == ["--vla=mini", '--suites=["a", "b"]']
    assert parse_shard(None) == (0, 1) and parse_shard("2/3") == (1, 3)
    for bad in ("0/3", "3", "a/b", "1/2/3"):
        with pytest.raises(ValueError, match="shard must be k/n"):
            parse_shard(bad)
