"""Words of a command line: lists, switches, files before settings, settings inside dicts."""

import pytest
import yaml

from rlt_sb3.cli.arguments import normalize, read_words
from rlt_sb3.cli.main import main, parse
from rlt_sb3.experiment.config import TrainConfig
from rlt_sb3.experiment.eval_config import EvalConfig


@pytest.mark.parametrize(
    "words",
    [
        ["--env.task_ids", "0", "1"], ["--env.task_ids", "0,1"], ["--env.task_ids", "[0, 1]"],
        ["--env.task_ids=[0,1]"], ["--env.task-ids", "0", "1", "--seed", "3"], ["--seed=3", "--env.task_ids", "0", "1"],
    ],
)  # fmt: skip
def test_lists_in_a_section(words):
    assert parse("train", words).env.task_ids == [0, 1]


def test_a_list_of_the_command_line_replaces_that_of_the_file(tmp_path):
    (tmp_path / "c.yaml").write_text("env: {task_ids: [5, 6], suite: libero_goal}")
    config = parse("train", ["--env.task_ids", "7", "--config", str(tmp_path / "c.yaml")])
    assert (config.env.task_ids, config.env.suite) == ([7], "libero_goal")


def test_a_list_of_something_else_is_refused(capsys):
    with pytest.raises(SystemExit):
        parse("train", ["--env.task_ids", "0", "one"])
    error = capsys.readouterr().err
    assert error == "rlt train: env.task_ids must be of type list[int], got [0, 'one']. (rlt train --help)\n"


@pytest.mark.parametrize(
    ("words", "videos"),
    [
        (["--evaluation.videos"], True),
        (["--evaluation.videos", "false"], False),
        (["--evaluation.videos=false"], False),
    ],
)
def test_switches_in_a_section(words, videos):
    if videos is None:
        with pytest.raises(SystemExit):
            parse("train", words)
    else:
        assert parse("train", [*words, "--seed", "1"]).evaluation.videos is videos


def test_settings_override_files_wherever_they_stand(tmp_path):
    for name, seed in (("a", 1), ("b", 2)):
        (tmp_path / f"{name}.yaml").write_text(f"seed: {seed}\nname: {name}\n")
    a, b = (str(tmp_path / f"{name}.yaml") for name in "ab")
    config = parse("train", ["--seed", "7", "--config", a, f"--config={b}", "--rlt.gamma", "0.5"])
    assert (config.seed, config.name, config.settings) == (7, "b", {"gamma": 0.5})


def test_the_resumed_runs_configuration_comes_first(tmp_path, capsys):
    checkpoint = tmp_path / "run" / "checkpoints" / "chunk-00000010"
    checkpoint.mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("seed: 1\nname: saved\nlog_interval: 9\n")
    (tmp_path / "c.yaml").write_text("seed: 2\nname: mine\n")
    for resume in (["--resume", str(tmp_path / "run")], [f"--resume={checkpoint}"]):
        config = parse("train", ["--name", "given", "--config", str(tmp_path / "c.yaml"), *resume])
        assert (config.seed, config.name, config.log_interval) == (2, "given", 9)
        assert config.resume == resume[-1].removeprefix("--resume=")
    assert main(["train", "--resume", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("rlt train: There is nothing to resume in ")
    with pytest.raises(ValueError, match="Argument --resume: expected one argument"):
        parse("train", ["--resume"])


def test_other_words_keep_their_order():
    words = ["run", "--model", "vla", "--config=x", "--out", "-5", "--device", "cpu"]
    with pytest.raises(ValueError, match="There is no file 'x'"):
        read_words(words, EvalConfig)
    assert read_words([word for word in words if word != "--config=x"], EvalConfig).for_parser() == [
        "--run=run", "--model", "vla", "--out", "-5", "--device", "cpu"
    ]  # fmt: skip


def test_normalize():
    assert normalize(EvalConfig, ["r", "--all-checkpoints", "--num-envs", "3"]) == [
        "--run=r", "--all_checkpoints=true", "--num_envs", "3"
    ]  # fmt: skip
    assert normalize(TrainConfig, ["--rlt.bc_coef", "3", "--env.id=a=b"]) == ["--rlt.bc_coef", "3", "--env.id=a=b"]


def test_nested_values_are_those_of_files():
    config = parse(
        "train", ["--rlt.policy_kwargs.actor_tau", "1e-3", "--rlt.policy_kwargs.critic_precision", "float32"]
    )
    assert config.settings == {"policy_kwargs": {"actor_tau": 0.001, "critic_precision": "float32"}}
    config = parse("train", ["--rlt.bc_coef.start", "20", "--rlt.bc_coef.end=5", "--rlt.policy_kwargs.net_arch", "[8]"])
    assert config.settings == {"bc_coef": {"start": 20, "end": 5}, "policy_kwargs": {"net_arch": [8]}}
    with pytest.raises(ValueError, match=r"Argument --rlt\.gate\.share: expected one argument"):
        parse("train", ["--rlt.gate.share"])
    with pytest.raises(ValueError, match=r"--rlt\.gate\.share \[: "):
        parse("train", ["--rlt.gate.share", "["])


def test_the_printed_configuration_has_nested_settings(capsys):
    """Beside those of the file, which they override; what is printed can be used as a file."""
    words = ["--rlt.policy_kwargs.gripper_critic", "null", "--rlt.policy_kwargs.candidates=3", "--seed", "7"]
    with pytest.raises(SystemExit) as stop:
        parse("train", ["--config", "libero_goal_ten", *words, "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert stop.value.code == 0 and printed["seed"] == 7 and printed["total_chunks"] == 36000
    expected = {"gripper_flip": 0.02, "gripper_critic": None, "candidates": 3}
    assert printed["rlt"] == {"learning_starts": 2000, "policy_kwargs": expected}
