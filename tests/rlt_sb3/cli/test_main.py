"""The rlt command: help, configuration files and overrides, errors, exit status."""

import re
import signal
import subprocess
import sys
import time
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import yaml
from run_helpers import ROOT, environment
from vla_helpers import SHIPPED_VLAS

from rlt_sb3.cli.main import COMMANDS, main, parse, usage
from rlt_sb3.experiment.algorithms import algorithm_names
from rlt_sb3.experiment.config import shipped_configs

# `module:id` lets Gymnasium import the module that registers the id.
TOY = """
name: toy
env: {id: "toy_env:ToyRLToken-v0", num_envs: 2}
rlt: {learning_starts: 20, batch_size: 16, critic_warmup_updates: 5, utd: 1.0, policy_kwargs: {net_arch: [16]}}
evaluation: {n_states: 4, selection_states: 2, selection_every: 40, record_states: 2}
total_chunks: 60
"""


def run(*args, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "rlt_sb3", *map(str, args)],
        capture_output=True, text=True, env=environment(), timeout=300, **kwargs,
    )  # fmt: skip


def test_help_is_quick_to_reach():
    """No torch, no simulator, no argument parser for the overview."""
    code = (
        "import sys; from rlt_sb3.cli.main import main; main(['--help']);"
        "print({'torch', 'stable_baselines3', 'jsonargparse', 'libero', 'gymnasium'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
    for command in COMMANDS:
        assert f"  {command} " in done.stdout


def test_module_is_the_command():
    assert run("--help").stdout.strip() == usage()
    assert re.fullmatch(r"\d+\.\d+\.\d+", run("--version").stdout.strip())


def test_readme_table_lists_every_command():
    readme = (ROOT / "README.md").read_text()
    assert set(re.findall(r"^\| `rlt ([a-z-]+)", readme, flags=re.M)) == set(COMMANDS)


def settings_of(config_class, prefix=""):
    """Names of a command's settings, those of settings inside them too, as its help has them."""
    types = get_type_hints(config_class)
    for field in fields(config_class):
        kind, name = types[field.name], prefix + field.name
        if is_dataclass(kind):
            yield from settings_of(kind, f"{name}.")
        required = field.default is MISSING and field.default_factory is MISSING
        # the choices stand for a positional argument that has some
        yield f"{{{','.join(get_args(kind))}}}" if required and get_origin(kind) is Literal else name


@pytest.mark.parametrize("command", COMMANDS)
def test_help_describes_every_setting(command, capsys, monkeypatch):
    """In its own words, beside type and default, or in those of another setting that name it."""
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        parse(command, ["--help"])
    assert stop.value.code == 0
    shown = re.findall(r"^  (?:--)?([a-z][\w.]*|\{.*\})(.*(?:\n {4,}.*)*)", capsys.readouterr().out, flags=re.M)
    texts = {name: re.split(r"\s{2,}", text, maxsplit=1)[1] for name, text in shown}
    # those of algorithms are in test_algorithm_help.py
    texts = {
        name: text for name, text in texts.items() if name.split(".")[0] not in algorithm_names() or "." not in name
    }
    module, _, settings = COMMANDS[command][0].partition(":")
    wanted = set(settings_of(getattr(import_module(module), settings)))
    if command == "train":
        wanted = (wanted - {"algorithms"}) | set(algorithm_names())  # one section for each algorithm
    assert texts.keys() - {"config", "print_config"} == wanted
    wordless = {name for name in wanted if re.match(r"\((type|default|required)|$", texts[name])}
    assert {name for name in wordless if not any(f"``{name}``" in text for text in texts.values())} == set()


def test_list_tells_what_settings_take(capsys):
    assert main(["list"]) == 0
    names, heading, lines = {}, "", capsys.readouterr().out.splitlines()
    for line in lines:
        if line.startswith("  "):
            names[heading].append(line.split()[0])
        else:
            heading = line
            names[heading] = []
    assert set(names) == {"algorithm", "env.id", "env.vla", "env.suite", "config", "pretrain-token --config"}
    assert names["pretrain-token --config"] == ["molmoact2", "rlt", "rlt_a"]
    assert names["algorithm"] == algorithm_names() and {"LIBERO-v0", "RLToken-LIBERO-v0"} <= set(names["env.id"])
    assert sorted(names["env.vla"]) == ["lerobot:", *SHIPPED_VLAS, "openpi:", "rlt:"]
    assert (
        "  mini-slow         libero_goal 1, 8" in lines
        and "  libero_90       tasks 0 to 89, 400 control steps" in lines
    )
    assert names["env.suite"] == ["libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90"]
    assert names["config"] == list(shipped_configs())
    assert {"demo", "demo_quick", "libero_goal_1"} < set(names["config"])
    assert any(line.startswith("  demo  ") and "put the bowl on the stove" in line for line in lines)
    assert main(["list", "--suite", "libero_goal"]) == 0
    tasks = capsys.readouterr().out.splitlines()
    assert len(tasks) == 11 and tasks[2] == "  1  put the bowl on the stove"


def test_unknown_names_tell_the_choices(tmp_path, capsys):
    """Algorithm, suite and VLA, like the id of the environment below."""
    for args, choices in (
        (["list", "--suite", "libero_gaol"], "libero_spatial, libero_object, libero_goal, libero_10, libero_90"),
        (["train", "--env.suite", "libero_gaol"], "libero_spatial, libero_object, libero_goal, libero_10, libero_90"),
        (["train", "--env.vla", "maxi"], ", ".join(map(repr, SHIPPED_VLAS))),
        (["train", "--algorithm", "pppo"], ", ".join(algorithm_names())),
    ):
        assert main([*args, *(["--out", str(tmp_path)] if args[0] == "train" else [])]) == 2
        assert choices in capsys.readouterr().err, args
    assert list(tmp_path.iterdir()) == []


def test_config_file_and_overrides(tmp_path):
    (tmp_path / "c.yaml").write_text(TOY)
    config = parse("train", ["--config", str(tmp_path / "c.yaml"), "--env.num_envs", "3", "--rlt.bc_coef", "1e-1"])
    assert (config.name, config.env.num_envs, config.total_chunks) == ("toy", 3, 60)
    assert config.settings["bc_coef"] == 0.1 and config.settings["batch_size"] == 16
    assert config.evaluation.n_states == 4 and config.evaluation.videos
    assert parse("eval", ["runs/x", "--model", "vla"]).run == "runs/x"


def test_shipped_config_by_name(tmp_path, monkeypatch, capsys):
    """A file that exists wins; a folder of the name does not."""
    monkeypatch.chdir(tmp_path)
    assert parse("train", ["--config", "demo", "--seed", "3"]).name == "demo"
    (tmp_path / "demo").mkdir()
    config = parse("train", ["--config=demo", "--config", "demo_quick"])
    assert config.name == "demo_quick" and config.evaluation.selection_states == 4
    (tmp_path / "demo_quick").write_text(TOY)
    assert parse("train", ["--config", "demo_quick"]).name == "toy"
    for args in (["--config", "demmo"], ["--config=demmo"]):
        assert main(["train", *args]) == 2
        error = capsys.readouterr().err
        assert error.startswith(
            "rlt train: There is no file 'demmo', and no shipped configuration of that name: demo, "
        )
        assert error.count("\n") == 1


def test_train_eval_report(tmp_path):
    (tmp_path / "c.yaml").write_text(TOY)
    done = run("train", "--config", tmp_path / "c.yaml", "--out", tmp_path / "runs", "--seed", 3)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "toy"
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["seed"] == 3 and saved["env"]["num_envs"] == 2
    assert parse("train", ["--config", str(folder / "config.yaml")]).seed == 3
    assert "%|" not in done.stdout + done.stderr  # a log gets no bar, and its lines at most every 30 seconds

    assert run("eval", folder, "--n_states", 3).returncode == 0
    (folder / "report.html").unlink()
    assert run("report", folder).returncode == 0
    assert (folder / "report.html").is_file()


def test_errors_are_one_line_and_status_2(tmp_path, capsys):
    assert main([]) == 2
    assert main(["trian"]) == 2
    assert "unknown command 'trian'; choose one of collect" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2
    assert main(["eval", str(tmp_path)]) == 2
    assert main(["train", "--total_chunks", "0", "--out", str(tmp_path)]) == 2
    assert "total_chunks must be at least 1, got 0" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        parse("train", ["--total_chunk", "many"])
    assert stop.value.code == 2
    assert list(tmp_path.iterdir()) == []


def test_errors_of_the_environment_are_one_line(tmp_path, capsys, monkeypatch):
    """An unknown id is a wrong setting; simulators that do not start are not."""
    from rlt_gym.testing import FakeRLTokenVectorEnv
    from rlt_gym.workers.pool import WorkerError

    def broken(self, *args, **kwargs):
        raise WorkerError("LIBERO workers do not start. No module named 'libero'")

    for name in ("RLToken-LIBRO-v0", "RLToken-LIBERO-v7", "nowhere/X-v0"):
        assert main(["train", "--env.id", name, "--out", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"rlt train: env.id '{name}' cannot be made: ") and error.count("\n") == 1
        assert re.search(r"This package has .*\bLIBERO-v0, MetaWorld-v0, RLToken-LIBERO-v0,", error)
    monkeypatch.setattr(FakeRLTokenVectorEnv, "__init__", broken)
    # `module:id` lets the toy module register it
    monkeypatch.setenv("RLT_ALLOWED_IMPORTS", "toy_env")
    assert main(["train", "--env.id", "toy_env:FakeLIBERO-v0", "--out", str(tmp_path)]) == 2
    assert "has the observations ['agentview', 'proprio', 'wrist']; a run needs" in capsys.readouterr().err
    assert main(["train", "--env.id", "toy_env:FakeRLToken-v0", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "rlt train: LIBERO workers do not start. No module named 'libero'\n"
    assert list(tmp_path.iterdir()) == []


def test_interrupt_saves_and_exits_130(tmp_path):
    (tmp_path / "c.yaml").write_text(TOY)
    command = [sys.executable, "-m", "rlt_sb3", "train", "--config", tmp_path / "c.yaml", "--out", tmp_path / "runs"]
    process = subprocess.Popen(
        [*map(str, command), "--total_chunks", "1000000"],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # a shell that runs the tests in the background has its children ignore Ctrl-C
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        metrics = tmp_path / "runs" / "toy" / "metrics.csv"
        while process.poll() is None and not (metrics.is_file() and metrics.stat().st_size):
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        process.wait()
    assert (metrics.parent / "model.zip").stat().st_size > 0
    # goes on, with another budget, and comes to its end
    done = run("train", "--resume", metrics.parent, "--total_chunks", 60)
    assert done.returncode == 0, done.stderr
    assert (metrics.parent / "report.html").is_file()


def test_settings_inside_an_algorithms_mappings(tmp_path):
    """One entry changes, the others of the configuration stay."""
    (tmp_path / "c.yaml").write_text("rlt: {utd: 1.0, policy_kwargs: {critic_precision: auto, net_arch: [8]}}")
    arguments = ["--config", str(tmp_path / "c.yaml"), "--rlt.policy_kwargs.token_input", "false"]
    arguments += ["--rlt.policy_kwargs.net_arch=[16, 4]", "--rlt.gate.window", "8", "--rlt.utd", "2.5"]
    assert parse("train", arguments).settings == {
        "utd": 2.5,
        "policy_kwargs": {"critic_precision": "auto", "net_arch": [16, 4], "token_input": False},
        "gate": {"window": 8},
    }
    with pytest.raises(ValueError, match=r"--rlt.utd.end: rlt.utd is 1.0, which has no settings"):
        parse("train", [*arguments[:2], "--rlt.utd.end", "3"])
