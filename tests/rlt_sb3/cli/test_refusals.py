"""Wrong files and wrong settings: one line, status 2, nothing begun."""

import copy
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch as th
import yaml

from rlt_sb3.cli.main import main
from rlt_sb3.experiment.config import config_file, load_config, shipped_configs
from rlt_sb3.experiment.models import resolve_settings


def refused(capsys, *args: str) -> str:
    """:return: the only line of the error"""
    try:
        status = main(list(args))
    except SystemExit as stop:
        status = stop.code
    out, err = capsys.readouterr()
    assert status == 2 and out == "" and err.count("\n") == 1, (out, err)
    assert err.startswith(f"rlt {args[0]}: ")
    return err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rlt:\n\tgamma: 0.9\n", r"c\.yaml cannot be read as YAML: .*'\\t'.* line 2, column 1"),
        ("rlt: {bc_coef: [\n", r"c\.yaml cannot be read as YAML: .* line 2, column 1"),
        ("- a\n- b\n", r"c\.yaml must hold settings, .* it holds a list"),
        ("nonsense: 3\n", r"c\.yaml: unknown setting 'nonsense' \(--help lists all\)\.$"),
        ("suite: x\n", r"c\.yaml: unknown setting 'suite'; did you mean env\.suite\? \("),
        ("env: {taskids: [1]}\n", r"c\.yaml: unknown setting 'env\.taskids'; did you mean env\.task_ids\? \("),
        ("taskids: [1]\n", r"c\.yaml: unknown setting 'taskids'; did you mean env\.task_ids\? \("),
        ("num_envs: 3\n", r"'num_envs'; did you mean env\.num_envs or evaluation\.num_envs\? \("),
        ("tcq: {gamma: 0.9}\n", r"unknown setting 'tcq'"),
        ("1: 3\n", r"c\.yaml: unknown setting '1' \("),
        ("env: {num_envs: many}\n", r"train: env\.num_envs must be of type int, got many\. \("),
        ("rlt: 5\n", r"train: rlt must be of type dict, got 5\. \("),
        ("env: 3\n", r"c\.yaml: env must hold settings, 'env: \{name: value\}', got 3\."),
        ("evaluation:\n", r"c\.yaml: evaluation must hold settings, .* got None\."),
        ("\xff\x00".encode("utf-16"), r"c\.yaml cannot be read as YAML"),
    ],
)
def test_files(tmp_path, capsys, text, message):
    path = tmp_path / "c.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    for option in (["--config", str(path)], [f"--config={path}"]):
        assert re.search(message, refused(capsys, "train", *option, "--out", str(tmp_path / "runs")))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["train", "collect", "train-vla", "pretrain-token", "eval"])
def test_missing_files(command, capsys):
    assert re.search(r"There is no file '.*nowhere\.yaml'", refused(capsys, command, "--config", "nowhere.yaml"))


def test_folders_and_unreadable_files(tmp_path, capsys):
    assert f"{str(tmp_path)!r} is a folder; --config takes a YAML file." in refused(
        capsys, "train", "--config", str(tmp_path)
    )
    assert f"{str(tmp_path)!r} is a folder" in refused(capsys, "collect", f"--config={tmp_path}")
    # a file that even root cannot read from its beginning
    if Path("/proc/self/mem").is_file():
        assert "'/proc/self/mem' cannot be read: Input/output error." in refused(
            capsys, "train", "--config", "/proc/self/mem"
        )
    assert "Argument --config: expected one argument." in refused(capsys, "train", "--config")


def test_arguments(capsys):
    assert "unrecognized arguments: --total_chunk" in refused(capsys, "train", "--total_chunk", "3")
    assert "required: run" in refused(capsys, "report")
    assert "Give one of a run (rlt eval RUN), --vla NAME and --merge FILES, got none" in refused(capsys, "eval")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("eval RUN --modle best", "--modle best; did you mean --model? (rlt eval --help)"),
        ("eval --vla mini --suits libero_goal", "--suits=libero_goal; did you mean --suites? ("),
        ("train --confg demo", "--confg demo; did you mean --config? (rlt train --help)"),
        ("train --env.taskids 1", "--env.taskids 1; did you mean --env.task_ids? ("),
        ("train --suite libero_goal", "--suite libero_goal; did you mean --env.suite? ("),
        ("train --tcq.gamma 1", "--tcq.gamma 1; did you mean --tqc.gamma? ("),
        ("train demo", "demo; did you mean --config demo? ("),
        ("train nothing", "nothing (rlt train --help)"),
        ("train --nothing 1", "--nothing 1 (rlt train --help)"),
        ("eval RUN again", "again (rlt eval --help)"),
    ],
)
def test_words_that_are_not_known(capsys, words, message):
    command = words.split()
    assert refused(capsys, *command).startswith(f"rlt {command[0]}: unrecognized arguments: {message}")


SCHEDULE = r"float \| schedule \(\{start: 20, end: 5, end_fraction: 0.5\}\)"
WRONG = [
    ("rlt", {"bc_coef": "abc"}, rf"rlt\.bc_coef must be of type {SCHEDULE}, got 'abc'"),
    ("rlt", {"bc_coef": {"start": 60, "end": -5}}, "bc_coef must be >= 0"),
    ("rlt", {"bc_coef": {"start": 60}}, r"rlt\.bc_coef must be a number or \{start: NUMBER"),
    ("rlt", {"learning_rate": "fast"}, rf"rlt\.learning_rate must be of type {SCHEDULE}"),
    ("rlt", {"learning_rate": -1}, "learning_rate must be >= 0"),
    ("rlt", {"gamma": 1.5}, r"gamma must be in \[0, 1\] \(discount per control step\), got 1.5"),
    ("rlt", {"gamma": "x"}, r"rlt\.gamma must be of type float, got 'x'"),
    ("rlt", {"tau": [1]}, r"rlt\.tau must be of type float, got \[1\]"),
    ("rlt", {"utd": "two"}, r"rlt\.utd must be of type float"),
    ("rlt", {"batch_size": 2.5}, r"rlt\.batch_size must be of type int, got 2\.5"),
    ("rlt", {"batch_size": True}, r"rlt\.batch_size must be of type int, got True"),
    ("rlt", {"buffer_size": "all"}, r"rlt\.buffer_size must be of type int"),
    ("rlt", {"learning_starts": None}, r"rlt\.learning_starts must be of type int, got None"),
    ("rlt", {"learning_starts": 1.5}, r"rlt\.learning_starts must be of type int, got 1\.5"),
    ("rlt", {"train_freq": "often"}, r"rlt\.train_freq must be of type int \| \[int, str\], got 'often'"),
    ("rlt", {"train_freq": 0}, "train_freq must be an integer >= 1"),
    ("rlt", {"train_freq": [1, "week"]}, r"train_freq must be .* or \(n, 'overlap'\), got \(1, 'week'\)"),
    ("rlt", {"train_freq": [1, "episode"]}, r"rlt\.train_freq must be counted in steps with 2 simulators, .* got \[1"),
    ("rlt", {"exploration_std": "wide"}, r"rlt\.exploration_std must be of type float \| list\[float\]"),
    ("rlt", {"action_scale": [1, 1, "x"]}, r"rlt\.action_scale must be of type .*list\[float\]"),
    (
        "rlt",
        {"action_scale": [1, 1], "exploration_std": [1, 1, 1]},
        "exploration_std must be >= 0, a number or 2 numbers",
    ),
    ("rlt", {"q_bounds": 3}, r"rlt\.q_bounds must be of type \[float, float\] \| null, got 3"),
    ("rlt", {"q_bounds": ["a", "b"]}, r"rlt\.q_bounds must be of type \[float, float\]"),
    ("rlt", {"q_bounds": [1, 0]}, "q_bounds must be None or"),
    ("rlt", {"target_policy_noise": "x"}, r"rlt\.target_policy_noise must be of type float"),
    ("rlt", {"verbose": "x"}, r"rlt\.verbose must be of type int, got 'x'"),
    ("rlt", {"action_noise": 3}, r"rlt\.action_noise must be left out \(it takes objects of Python\), got 3"),
    ("rlt", {"replay_buffer_class": "torch.nn:GELU"}, r"rlt\.replay_buffer_class must be of type class \| null"),
    ("rlt", {"gate": {"share": 2}}, r"gate\.share must be in"),
    ("rlt", {"gate": {"share": "half"}}, r"rlt\.gate\.share must be of type float, got 'half'"),
    ("rlt", {"gate": 0.5}, r"rlt\.gate must be of type .*dict\[str, any\].*, got 0\.5"),
    ("rlt", {"policy_kwargs": 3}, r"rlt\.policy_kwargs must be of type dict\[str, any\] \| null, got 3"),
    (
        "rlt",
        {"policy_kwargs": {"critics": 3}},
        r"Unknown RLT setting 'policy_kwargs\.critics'\. Valid settings: ",
    ),
    ("rlt", {"policy_kwargs": {"actor_mode": "soft"}}, "actor_mode must be one of"),
    (
        "rlt",
        {"policy_kwargs": {"net_arch": "big"}},
        r"rlt\.policy_kwargs\.net_arch must be of type list\[int\] \| ",
    ),
    ("rlt", {"policy_kwargs": {"net_arch": [0]}}, r"policy_kwargs cannot be used \(float division by zero\)"),
    ("rlt", {"policy_kwargs": {"offset_search": {"std": "a"}}}, r"offset_search\.std must be > 0 .*, got 'a'"),
    ("rlt", {"policy_kwargs": {"n_target_critics": "x"}}, r"n_target_critics must be of type int \| null, got 'x'"),
    ("rlt", {"policy_kwargs": {"optimizer_kwargs": {"speed": 1}}}, r"policy_kwargs cannot be used .*speed"),
    ("rlt", {"policy_kwargs": {"train_token": {}}}, r"train_token needs .* set env\.show_tokens to true"),
    ("rlt", {"replay_buffer_kwargs": {"offline_ratio": 2}}, "offline_ratio must be in"),
    (
        "rlt",
        {"replay_buffer_kwargs": {"offline_ratio": "x"}},
        r"rlt\.replay_buffer_kwargs\.offline_ratio must be",
    ),
    ("rlt", {"replay_buffer_kwargs": {"gamma": 0.5}}, r"Unknown RLT setting 'replay_buffer_kwargs\.gamma'"),
    ("tqc", {"gamma": "x"}, r"tqc\.gamma must be of type float, got 'x'"),
    ("tqc", {"gamma": 1.5}, r"tqc\.gamma must be in \[0, 1\] \(discount per chunk\), got 1\.5"),
    ("tqc", {"gama": 0.9, "seeds": 1}, r"Unknown TQC settings 'gama', 'seeds'\. Valid settings: learning_rate, "),
    ("tqc", {"buffer_size": -1}, r"tqc\.buffer_size must be >= 1, got -1"),
    ("tqc", {"learning_starts": -1}, r"tqc\.learning_starts must be >= 0, got -1"),
    ("tqc", {"batch_size": 0}, r"tqc\.batch_size must be >= 1"),
    ("tqc", {"tau": 0}, r"tqc\.tau must be in \(0, 1\]"),
    ("tqc", {"gradient_steps": 0}, r"tqc\.gradient_steps must be >= 1, or -1"),
    ("tqc", {"train_freq": 0}, r"tqc\.train_freq must be >= 1"),
    ("tqc", {"train_freq": [1, "week"]}, r"tqc cannot be used .*week"),
    ("tqc", {"train_freq": [1, "episode"]}, r"tqc\.train_freq must be counted in steps with 2 simulators"),
    ("tqc", {"learning_rate": "a"}, rf"tqc\.learning_rate must be of type {SCHEDULE}, got 'a'"),
    ("tqc", {"learning_rate": -1.0}, r"tqc\.learning_rate must be >= 0, got -1\.0"),
    ("tqc", {"learning_rate": {"start": 1, "end": "x"}}, r"tqc\.learning_rate must be a number or \{start: NUMBER"),
    ("tqc", {"ent_coef": "x"}, r"tqc cannot be used \(could not convert .*'x'"),
    (
        "tqc",
        {"top_quantiles_to_drop_per_net": 25},
        r"\(top_quantiles_to_drop_per_net=25 leaves none",
    ),
    ("tqc", {"policy_kwargs": {"net_arch": "big"}}, r"tqc\.policy_kwargs\.net_arch must be of type list"),
    ("tqc", {"policy_kwargs": {"n_critics": 0}}, "tqc cannot be used"),
    ("tqc", {"policy_kwargs": {"typo": 0}}, r"Unknown TQC setting 'policy_kwargs\.typo'\. Valid settings: net_arch, "),
    ("tqc", {"replay_buffer_kwargs": {"typo": 0}}, r"Unknown TQC setting 'replay_buffer_kwargs\.typo'"),
]


@pytest.mark.parametrize(("name", "section", "message"), WRONG, ids=[f"{case[0]}-{case[1]}" for case in WRONG])
def test_values_of_the_algorithm(tmp_path, capsys, monkeypatch, name, section, message):
    def started(*args, **kwargs):
        raise AssertionError("simulators were started")

    monkeypatch.setattr("rlt_sb3.experiment.train.make_training_env", started)
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({"algorithm": name, name: section, "out": str(tmp_path / "runs")}))
    assert re.search(message, refused(capsys, "train", "--config", str(path)))
    assert not (tmp_path / "runs").exists()


def test_names_in_sections_of_other_algorithms(tmp_path, capsys, monkeypatch):
    """A run with TQC in the same file would meet them much later."""

    def started(*args, **kwargs):
        raise AssertionError("simulators were started")

    monkeypatch.setattr("rlt_sb3.experiment.train.make_training_env", started)
    out = ["--out", str(tmp_path / "runs")]
    for given, message in (
        (["--tqc.foo", "1"], "rlt train: Unknown TQC setting 'foo'. Valid settings: learning_rate, "),
        (
            ["--tqc.policy_kwargs.typo", "1"],
            "rlt train: Unknown TQC setting 'policy_kwargs.typo'. Valid settings: net_arch",
        ),
        (["--algorithm", "tqc", "--rlt.bc_coeff", "1"], "rlt train: Unknown RLT setting 'bc_coeff'. Valid settings: "),
    ):
        assert refused(capsys, "train", *given, *out).startswith(message)
    assert not (tmp_path / "runs").exists()
    with pytest.raises(AssertionError, match="simulators were started"):
        main(["train", *out, "--tqc.gamma", "0.9", "--tqc.policy_kwargs.net_arch", "[8]"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["--config", "demo", "--rlt.learning_starts", "5000"],
            r"\(3,600\) must exceed rlt\.learning_starts \(5,000\): ",
        ),
        (["--config", "demo", "--total_chunks", "200"], r"\(200\) must exceed rlt\.learning_starts \(200\): the VLA "),
        (
            ["--algorithm", "tqc", "--total_chunks", "500"],
            r"\(500\) must exceed tqc\.learning_starts \(500\): the VLA ",
        ),
    ],
)
def test_a_budget_that_ends_in_the_warm_up(tmp_path, capsys, monkeypatch, given, message):
    """Learning begins after the last chunk of the warm-up."""

    def started(*args, **kwargs):
        raise AssertionError("simulators were started")

    monkeypatch.setattr("rlt_sb3.experiment.train.make_training_env", started)
    assert re.search(f"total_chunks {message}", refused(capsys, "train", *given, "--out", str(tmp_path / "runs")))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("given", [["--total_chunks", "201"], ["--algorithm", "ppo", "--total_chunks", "1"]])
def test_a_budget_beyond_the_warm_up(tmp_path, monkeypatch, given):
    """PPO has none."""

    def started(*args, **kwargs):
        raise AssertionError("simulators were started")

    monkeypatch.setattr("rlt_sb3.experiment.train.make_training_env", started)
    with pytest.raises(AssertionError, match="simulators were started"):
        main(["train", *given, "--out", str(tmp_path)])


CASES = [("rlt", name) for name in shipped_configs()] + [("tqc", None)]


@pytest.mark.parametrize(("algorithm", "name"), CASES)
def test_shipped_configurations_pass_and_draw_nothing(algorithm, name):
    """The global generators are as before, and so are the settings."""
    settings = {"policy_kwargs": {"net_arch": [8]}, "train_freq": [1, "step"], "ent_coef": "auto_0.1"}
    if name is not None:
        settings = load_config(Path(config_file(name))).settings
    given = copy.deepcopy(settings)
    before = th.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    resolve_settings(algorithm, settings)
    assert th.equal(th.get_rng_state(), before[0]) and random.getstate() == before[2]
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert settings == given


COMMANDS_WITH_DEVICE = {
    "pretrain-token": ["--demos", '["a.hdf5"]'],
    "encode-demos": ["--demos", '["a.hdf5"]'],
    "train-vla": ["--demos", '["a.hdf5"]', "--output", "vla.safetensors"],
    "eval": ["nowhere"],
}


@pytest.mark.parametrize("command", COMMANDS_WITH_DEVICE)
@pytest.mark.parametrize("device", ["cuda:99", "gpu"])
def test_devices(command, device, capsys):
    line = refused(capsys, command, *COMMANDS_WITH_DEVICE[command], "--device", device)
    assert f"Device '{device}' cannot be used here" in line and "choose one of cpu" in line


def test_settings_of_the_environment(tmp_path, capsys):
    """What make_vec's environment does not take, without a simulator."""
    arguments = ["--env.id", "RLToken-LIBERO-v0", "--env.kwargs", "{controller: JOINT_POSITION}"]
    line = refused(capsys, "train", "--out", str(tmp_path / "runs"), *arguments)
    assert "env.kwargs {'controller': 'JOINT_POSITION'} do not fit env.id 'RLToken-LIBERO-v0'" in line
    assert "unexpected keyword argument 'controller'; besides its own" in line
    assert not (tmp_path / "runs").exists()


def test_errors_inside_an_environment_stay_errors(tmp_path, monkeypatch):
    def broken(self, *args, **kwargs):
        raise TypeError("can only concatenate str")

    monkeypatch.setattr("rlt_gym.testing.FakeRLTokenVectorEnv.__init__", broken)
    monkeypatch.setenv("RLT_ALLOWED_IMPORTS", "toy_env")
    with pytest.raises(TypeError, match="concatenate"):
        main(["train", "--out", str(tmp_path), "--env.id", "toy_env:FakeRLToken-v0"])
