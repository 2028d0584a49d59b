"""rlt eval --vla, its parts and its resume; rlt compare. What is only counted runs on the fake, the rest on LIBERO."""

import itertools
import json
import math
import re
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from run_helpers import textbook_wilson

from rlt_gym.libero.suites.protocols import PROTOCOLS
from rlt_gym.testing import FakeLiberoVectorEnv
from rlt_sb3.cli.main import main
from rlt_sb3.evaluation.benchmark import KIND, BenchmarkResult, plan
from rlt_sb3.evaluation.evaluate import evaluate
from rlt_sb3.experiment import evaluate_vla
from rlt_sb3.experiment.config import EnvConfig, TrainConfig, save_config

FAKE = ["eval", "--vla", "rlt_gym.testing:FakeVLA", "--progress=false", "--assets", "embedded"]
GOAL = ["--suites", "libero_goal", "--tasks", "0", "3"]


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Fake simulators in the place of LIBERO's; the list of those that were made."""
    made = []

    def make_vec(env_id, num_envs, **settings):
        made.append({"env_id": env_id, "num_envs": num_envs, **settings})
        return FakeLiberoVectorEnv(num_envs, **settings)

    monkeypatch.setattr(gym, "make_vec", make_vec)
    monkeypatch.chdir(tmp_path)
    return made


def stopping(monkeypatch, after):
    """Ctrl-C after that many chunks; whoever is asked later is not stopped."""
    chunks = itertools.count(1)

    def check(self):
        if next(chunks) == after:
            raise KeyboardInterrupt

    monkeypatch.setattr("rlt_sb3.experiment.interrupt.Interrupt.check", check)


def load(name):
    return json.loads(Path(name).read_text())


def test_numbers_and_files(fake, capsys):
    command = [*FAKE, "--suites", "libero_goal", "libero_10", "--tasks", "0", "3", "--episodes", "5", "--films", "1"]
    assert main([*command, "--num-envs", "3", "--out", "a.json"]) == 0
    data = load("a.json")
    # of five states, those with even numbers succeed at control step 13
    for suite in ("libero_goal", "libero_10"):
        entry = data["suites"][suite]
        assert (entry["successes"], entry["n"], entry["mean_steps_to_success"]) == (6, 10, 13.0)
        assert entry["wilson_95"] == pytest.approx(textbook_wilson(6, 10))
        assert entry["tasks"]["3"]["successes"] == 3 and entry["tasks"]["3"]["instruction"] == "fake task 3"
        found = {
            (row["pair"], row["task_id"], row["init_index"], row["success"], row["steps"]) for row in entry["rows"]
        }
        horizon = {"libero_goal": 300, "libero_10": 520}[suite]
        assert found == {
            (2 * state + place, task, state, state % 2 == 0, 13 if state % 2 == 0 else horizon)
            for state in range(5)
            for place, task in enumerate((0, 3))
        }
        assert [row["pair"] for row in entry["rows"]] == list(range(10))
    assert data["complete"] and data["mean_of_suites"] == 0.6
    # one film per suite, of the first failing task's first failure
    assert {key: film["init_index"] for key, film in data["films"].items()} == {"libero_goal/0": 1, "libero_10/0": 1}
    assert sorted(file.name for file in Path("a-films").iterdir()) == [
        "libero_10-task0-state1.mp4", "libero_goal-task0-state1.mp4",
    ]  # fmt: skip
    page = Path("a.html").read_text()
    assert page.count("<video") == 2 and "60.0%" in page and not re.search(r'(src|href)="(?!data:)', page)
    assert [(env["suite"], env["num_envs"], env["max_episode_steps"]) for env in fake] == [
        ("libero_goal", 3, 300), ("libero_10", 3, 520),
    ]  # fmt: skip
    out = capsys.readouterr().out
    assert "mean of suites" in out and "6/10 (60%" in out


def test_what_will_be_played_is_said_first(fake, monkeypatch, capsys):
    """A user who did not choose gets 2,000 episodes."""
    stopping(monkeypatch, after=1)
    plays = "rlt_gym.testing:FakeVLA plays "
    choose = ". --suites, --tasks and --episodes choose others; rlt list says what a shipped VLA has learned."
    four = "libero_spatial, libero_object, libero_goal, libero_10: 4 suites, 40 tasks, 2,000 episodes"
    assert main([*FAKE, "--out", "all.json"]) == 130
    assert capsys.readouterr().out.splitlines()[0] == plays + four + choose
    one = [*FAKE, "--suites", "libero_goal", "--tasks", "1", "--episodes", "4", "--num-envs", "1", "--out", "one.json"]
    stopping(monkeypatch, after=5)
    assert main(one) == 130
    assert capsys.readouterr().out.splitlines()[0] == f"{plays}libero_goal: 1 suite, 1 task, 4 episodes{choose}"
    assert main(one) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == f"{plays}libero_goal: 1 suite, 1 task, 3 of 4 episodes left{choose}"


def test_interrupted_and_resumed_is_the_uninterrupted_one(fake, monkeypatch, capsys):
    command = [*FAKE, *GOAL, "--episodes", "4", "--num-envs", "2", "--vla_kwargs.stochastic", "true"]
    assert main([*command, "--out", "whole.json"]) == 0
    with monkeypatch.context() as patch:
        stopping(patch, after=50)  # chunks; in the second task
        assert main([*command, "--out", "part.json"]) == 130
    part = load("part.json")
    done = sum(len(suite["rows"]) for suite in part["suites"].values())
    assert not part["complete"] and 0 < done < 8
    assert f"{done} of 8 episodes are in part.json" in capsys.readouterr().out
    played = []
    monkeypatch.setattr(BenchmarkResult, "add", _recording(BenchmarkResult.add, played))
    assert main([*command, "--out", "part.json"]) == 0
    assert len(played) == 8 - done
    assert Path("part.json").read_text() == Path("whole.json").read_text().replace("whole-films", "part-films")
    # complete: nothing is played
    before = len(fake)
    assert main([*command, "--out", "part.json"]) == 0 and len(fake) == before
    assert "part.json is complete" in capsys.readouterr().out
    # another evaluation does not go into the same file
    assert main([*command, "--out", "part.json", "--chunk-length", "4"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "protocol.chunk_length is 4, not 8" in err
    assert main([*command, "--shard", "1/2", "--out", "part.json"]) == 1
    assert "shard is (1, 2), not None" in capsys.readouterr().err


def _recording(function, calls):
    def record(*args, **kwargs):
        calls.append(args)
        return function(*args, **kwargs)

    return record


def test_shards_are_the_whole(fake, capsys):
    command = [*FAKE, "--suites", "libero_goal", "libero_object", "--tasks", "0", "3", "--episodes", "5"]
    assert main([*command, "--num-envs", "3", "--out", "whole.json"]) == 0
    files = []
    for k in (2, 3, 1):
        files.append(f"{k}.json")
        assert main([*command, "--shard", f"{k}/3", "--num-envs", "3", "--out", files[-1]]) == 0
    sizes = [sum(len(suite["rows"]) for suite in load(file)["suites"].values()) for file in files]
    assert sizes == [7, 6, 7]
    Path("m").mkdir()
    assert main(["eval", "--merge", *files, "--out", "m/merged.json"]) == 0
    merged, whole = load("m/merged.json"), load("whole.json")
    assert merged | {"films": 0} == whole | {"films": 0}
    assert {key: film["init_index"] for key, film in merged["films"].items()} == {
        key: film["init_index"] for key, film in whole["films"].items()
    }
    assert all((Path("m") / film["file"]).is_file() for film in merged["films"].values())
    capsys.readouterr()

    def refused(*names):
        assert main(["eval", "--merge", *names]) == 1
        return capsys.readouterr().err

    assert "Missing: part 3/3" in refused("1.json", "2.json")
    assert "Part 1/3 is there twice" in refused("1.json", "2.json", "1.json")
    assert "is a whole evaluation" in refused("1.json", "whole.json")
    data = load("3.json")
    data["suites"]["libero_goal"]["rows"].pop()
    Path("short.json").write_text(json.dumps(data))
    assert "lacks 1 of 6 initial states" in refused("1.json", "2.json", "short.json")
    data = load("3.json") | {"policy": "x"}
    Path("other.json").write_text(json.dumps(data))
    assert "policy is 'x', not 'rlt_gym.testing:FakeVLA'" in refused("1.json", "2.json", "other.json")


def test_plan_is_every_state_once():
    tasks = {"libero_goal": [4, 1], "libero_10": [0]}
    whole = plan(tasks, 3)
    assert {(p.suite, p.task_id, p.init_index) for p in whole} == {
        *itertools.product(["libero_goal"], [1, 4], range(3)), *itertools.product(["libero_10"], [0], range(3)),
    }  # fmt: skip
    assert [(p.pair, p.task_id, p.init_index) for p in whole][:6] == [
        (0, 4, 0), (2, 4, 1), (4, 4, 2), (1, 1, 0), (3, 1, 1), (5, 1, 2),
    ]  # fmt: skip
    parts = [plan(tasks, 3, (k, 4)) for k in range(4)]
    assert sorted(itertools.chain(*parts), key=str) == sorted(whole, key=str)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


#: horizons of spatial, object, goal, 10, 90; chunk, pixels, episodes, as their authors have them
STATED = {
    "rlt": ([220, 280, 300, 520, 400], 8, None, 50),
    "openpi": ([220, 280, 300, 520, 400], 5, 256, 50),
    "lerobot": ([280, 280, 300, 520, 400], None, 360, 10),
    "vla-eval": ([220, 280, 300, 520, 400], None, 256, 50),
}


@pytest.mark.parametrize("name", PROTOCOLS)
def test_protocols_are_stated(name, fake, capsys):
    horizons, chunk, size, episodes = STATED[name]
    suites = ["libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90"]
    arguments = [*FAKE, "--vla_kwargs.horizon", "12", "--suites", *suites, "--tasks", "2", "--films", "0"]
    assert main([*arguments, "--protocol", name, "--episodes", "1", "--out", "a.json"]) == 0
    data = load("a.json")
    protocol = data["protocol"]
    assert protocol["horizons"] == dict(zip(suites, horizons, strict=True)) and protocol["settle_steps"] == 10
    assert (protocol["name"], protocol["chunk_length"], protocol["image_size"]) == (name, chunk, size)
    assert protocol["changed"] == ["episodes"] and PROTOCOLS[name].episodes == episodes
    played = {"chunk_length": chunk or 12, "image_size": size or 128, "render": "exact", "assets": "embedded"}
    assert data["played"] == played
    for env, horizon in zip(fake, horizons, strict=True):
        assert env["max_episode_steps"] == horizon and env["init_states"] == "eval"
        assert {key: env[key] for key in ("chunk_length", "image_size", "render")} == {
            key: played[key] for key in ("chunk_length", "image_size", "render")
        }
    out = capsys.readouterr().out
    assert f"libero_spatial {horizons[0]}" in out and "after 10 to settle" in out
    assert f"every {chunk or 12} of 12 control steps" in out


def test_the_worker_settles_as_the_protocols_say():
    text = (Path(evaluate_vla.__file__).parents[2] / "rlt_gym/libero/worker/simulator.py").read_text()
    assert "\nSETTLE_STEPS = 10\n" in text and {p.settle_steps for p in PROTOCOLS.values()} == {10}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suites", "libero_golf"], "Unknown LIBERO suite 'libero_golf'. Available: libero_spatial"),
        (["--suites", "libero_goal", "libero_goal"], "suites must be one or more different names"),
        (["--protocol", "lerobt"], "Unknown protocol 'lerobt'; choose one of rlt, openpi, lerobot, vla-eval"),
        (["--tasks", "10"], "Unknown task 10 of libero_spatial"),
        (["--tasks", "1", "1"], "tasks must be one or more different numbers"),
        (["--chunk-length", "9"], "chunk_length is 9; with the VLA 'fake' it must be from 1 to 8"),
        (["--episodes", "0"], "episodes must be from 1 to 500, got 0"),
        (["--image-size", "513"], "image_size must be from 16 to 512 pixels, got 513"),
        (["--max-episode-steps", "0"], "max_episode_steps must be from 1 to 100000, got 0"),
        (["--num-envs", "0"], "num_envs must be at least 1, got 0"),
        (["--shard", "0/2"], "shard must be k/n with 1 <= k <= n"),
        (["--suites", "libero_goal", "--tasks", "1", "--episodes", "1", "--shard", "2/2"], "has no initial state"),
        (["--vla_kwargs.hue", "red"], "cannot be made with vla_kwargs"),
        (
            ["--perturbations", "{hue: 1}"],
            "perturbations must have keys of light, color, texture, camera, friction, placement",
        ),
        (["--perturbations", "{light: 3}"], "perturbations['light'] must be a number from 0 to 2, got 3"),
        (["--assets", "nowhere"], "assets='nowhere' is no folder"),
        (["runs/demo"], "Give one of a run (rlt eval RUN), --vla NAME and --merge FILES, got run and vla."),
        (["--n-states", "4"], "n_states cannot be used with a VLA: leave it out."),
        (["--model", "last", "--split", "selection"], "model, split cannot be used with a VLA: leave them out."),
    ],
)
def test_refusals_come_before_simulators(arguments, message, fake, capsys):
    assert main([*FAKE, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err and not fake


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "got none of them"),
        (["runs/demo", "--suites", "libero_goal", "--films", "0"], "suites, films cannot be used with a run"),
        (["--merge", "a.json", "--vla", "mini"], "got vla and merge"),
        (["--vla", "minni"], "Unknown VLA 'minni'"),
        # the pictures that the VLA was trained on are not those of this protocol
        (["--vla", "mini", "--protocol", "openpi", "--assets", "embedded"], "image_size is 256; the VLA 'mini' needs"),
        (["--vla", "mini", "--protocol", "openpi", "--image-size", "128", "--assets", "embedded"], "render is 'exact'"),
    ],
)
def test_refusals_of_other_commands(arguments, message, fake, capsys):
    assert main(["eval", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and message in err and not fake


def binomial_p(fixed, broken):
    """Two-sided exact test of a fair coin, from the definition."""
    n = fixed + broken
    weights = [math.comb(n, k) / 2**n for k in range(n + 1)]
    return min(1.0, sum(w for w in weights if w <= weights[fixed] * (1 + 1e-9)))


def test_compare(fake, capsys):
    command = [*FAKE, "--suites", "libero_goal", "libero_object", "--tasks", "0", "3", "--episodes", "6"]
    assert main([*command, "--films", "0", "--out", "a.json"]) == 0
    data, changed = load("a.json"), np.random.default_rng(0)
    counts = dict.fromkeys(itertools.product([False, True], [False, True]), 0)
    for suite in data["suites"].values():
        for row in suite["rows"]:
            before, row["success"] = row["success"], bool(changed.random() < 0.7)
            counts[before, row["success"]] += 1
    data["vla"] = data["vla"] | {"fingerprint": "another"}
    Path("b.json").write_text(json.dumps(data))
    capsys.readouterr()
    assert main(["compare", "a.json", "b.json", "--out", "c.json"]) == 0
    out, whole = capsys.readouterr().out, load("c.json")["all"]
    fixed, broken = counts[False, True], counts[True, False]
    assert fixed > 0 and broken > 0
    assert whole == {
        "fixed": fixed, "broken": broken, "both": counts[True, True], "neither": counts[False, False],
        "p_value": pytest.approx(binomial_p(fixed, broken)),
    }  # fmt: skip
    assert f"12/24 -> {fixed + counts[True, True]}/24: {fixed} fixed, {broken} broken" in out
    parts = load("c.json")["suites"]
    assert sum(part["fixed"] for part in parts.values()) == fixed and len(load("c.json")["states"]) == 24
    # fewer episodes: the common ones are paired, and what is left out is said
    for suite in data["suites"].values():
        suite["rows"] = [row for row in suite["rows"] if row["init_index"] < 2]
    Path("d.json").write_text(json.dumps(data))
    assert main(["compare", "a.json", "d.json"]) == 0
    assert "left out: 16 states that only a.json has" in capsys.readouterr().out
    # another protocol
    assert main([*command, "--films", "0", "--protocol", "openpi", "--out", "e.json"]) == 0
    capsys.readouterr()
    assert main(["compare", "a.json", "e.json"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "chunk_length is 5, not 8" in err and "--any-protocol" in err
    assert main(["compare", "a.json", "e.json", "--any-protocol"]) == 0
    assert "DIFFERENT PROTOCOLS: chunk_length is 5, not 8" in capsys.readouterr().out


def test_changed_scenes_are_stated_and_are_another_evaluation(fake, capsys):
    command = [*FAKE, *GOAL, "--episodes", "2", "--films", "0"]
    assert main([*command, "--out", "plain.json"]) == 0
    capsys.readouterr()
    assert main([*command, "--perturbations", "{light: 1, camera: 0.5, color: 0}"]) == 0
    name = "eval-rlt_gym.testing-FakeVLA-rlt-light1-camera0.5-color0.json"
    assert [env["perturbations"] for env in fake] == [None, {"light": 1.0, "camera": 0.5}]
    assert load(name)["played"]["perturbations"] == {"light": 1.0, "camera": 0.5}
    assert "perturbations" not in load("plain.json")["played"]  # as files of before
    stated = re.compile(r"changed scenes\s+light 1, camera 0.5\n")
    assert stated.search(capsys.readouterr().out)
    assert "light 1, camera 0.5" in Path(name).with_suffix(".html").read_text()
    assert main(["compare", "plain.json", name]) == 1
    assert "perturbations.light is 1.0, not None" in capsys.readouterr().err
    assert main([*command, "--perturbations", "{light: 2}", "--out", name]) == 1
    assert "has another evaluation" in capsys.readouterr().err and len(fake) == 2


COMPARE, MERGE = ["compare", "a.json", "b.json"], ["eval", "--merge", "a.json"]


@pytest.mark.parametrize(
    ("command", "text", "message"),
    [
        (COMPARE, None, "There is no file a.json."),
        (MERGE, None, "There is no file a.json."),
        (COMPARE, "{}", "a.json is no evaluation: give a JSON file that rlt eval --vla wrote."),
        (COMPARE, "no JSON", "a.json is no evaluation: give a JSON file that rlt eval --vla wrote."),
        (COMPARE, json.dumps({"kind": KIND}), "a.json is damaged: evaluate again with rlt eval --vla"),
        (MERGE, "{}", "a.json is no part of an evaluation: --merge takes the JSON files of rlt eval --shard."),
        (MERGE, "[3]", "a.json is no part of an evaluation"),
        (MERGE, '{"shard": [1, 2]}', "a.json is no part of an evaluation"),
    ],
)
def test_files_that_are_no_evaluation(tmp_path, monkeypatch, capsys, command, text, message):
    """One line in words, without an error of Python."""
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("a.json").write_text(text)
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"rlt {command[0]}: {message}") and error.count("\n") == 1 and "Error" not in error


ON_LIBERO = [
    "eval", "--vla", "mini", "--suites", "libero_goal", "--tasks", "1", "8", "--episodes", "2", "--num-envs", "2",
    "--max-episode-steps", "88", "--assets", "embedded", "--progress=false",
]  # fmt: skip


@pytest.mark.sim
def test_on_libero(tmp_path, monkeypatch):
    """Two tasks, two states each: interrupted and resumed it is what an RL token's environment plays at once."""
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        stopping(patch, after=13)
        assert main([*ON_LIBERO, "--out", "part.json"]) == 130
    assert 0 < len(load("part.json")["suites"]["libero_goal"]["rows"]) < 4
    assert main([*ON_LIBERO, "--out", "part.json"]) == 0
    env = gym.make_vec(
        "RLToken-LIBERO-v0", num_envs=2, suite="libero_goal", task_ids=[1, 8], max_episode_steps=88, vla="mini",
        assets="embedded", seed=0,
    )  # fmt: skip
    try:
        rows = evaluate("vla", env, 4).to_dict()["rows"]
    finally:
        env.close()
    assert load("part.json")["suites"]["libero_goal"]["rows"] == rows
    assert {row["success"] for row in rows} == {True, False}


@pytest.mark.sim
def test_changed_scenes_are_those_of_a_run(tmp_path, monkeypatch):
    """``rlt eval RUN`` and ``rlt eval --vla`` play the frozen VLA in the same scenes, which are not the usual ones."""
    monkeypatch.chdir(tmp_path)
    env = EnvConfig(suite="libero_goal", task_ids=[1], num_envs=2, assets="embedded", kwargs={"max_episode_steps": 64})
    Path("run").mkdir()
    save_config(TrainConfig(env=env), Path("run/config.yaml"))
    changes = ["--perturbations", "{placement: 2, camera: 2}"]
    assert main(["eval", "run", "--model", "vla", "--n-states", "2", "--progress=false", *changes]) == 0
    rows = load("run/eval-vla-eval-placement2-camera2.json")["rows"]
    of_vla = [*ON_LIBERO, "--tasks", "1", "--max-episode-steps", "64", "--films", "0"]
    assert main([*of_vla, *changes, "--out", "changed.json"]) == 0
    assert load("changed.json")["suites"]["libero_goal"]["rows"] == rows
    assert main([*of_vla, "--out", "plain.json"]) == 0
    assert load("plain.json")["suites"]["libero_goal"]["rows"] != rows


@pytest.mark.sim
@pytest.mark.expensive
def test_resumed_and_in_parts_on_libero(tmp_path, monkeypatch):
    """The files are those of an evaluation that was not interrupted; the fakes above have the other cases."""
    monkeypatch.chdir(tmp_path)
    assert main([*ON_LIBERO, "--out", "whole.json"]) == 0
    with monkeypatch.context() as patch:
        stopping(patch, after=13)
        assert main([*ON_LIBERO, "--out", "part.json"]) == 130
    assert main([*ON_LIBERO, "--out", "part.json"]) == 0
    assert Path("part.json").read_text() == Path("whole.json").read_text().replace("whole-films", "part-films")
    for k in (1, 2):
        assert main([*ON_LIBERO, "--shard", f"{k}/2", "--out", f"{k}.json"]) == 0
    assert main(["eval", "--merge", "1.json", "2.json", "--out", "merged.json"]) == 0
    assert load("merged.json")["suites"] == load("whole.json")["suites"]


def test_the_mean_of_suites_gives_each_the_same_weight():
    header = {"policy": "x", "tasks": {"a": [0], "b": [0, 1]}, "episodes": 2}
    result = BenchmarkResult(header)
    for place in result.places:
        result.add(place, "do it", place.suite == "a" or place.pair == 0, 5, 1)
    assert [suite.rate for suite in result.suites.values()] == [1.0, 0.25] and result.mean_of_suites == 0.625
