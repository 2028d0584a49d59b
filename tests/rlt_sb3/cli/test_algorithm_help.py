"""``rlt train --help``: every setting of the algorithms, and every option that the documentation names."""

import inspect
import re
from importlib.metadata import EntryPoint

import pytest
from run_helpers import ROOT

from rlt_sb3.cli.algorithm_help import algorithm_help, default_text
from rlt_sb3.cli.main import COMMANDS, parse
from rlt_sb3.experiment import algorithms


def entries(text: str) -> dict[str, str]:
    """:return: option -> its text in one line"""
    found = re.findall(r"^  --([a-z][\w.-]*)[^\n]*?(?:\s{2,}|\n\s+)(\S.*(?:\n {4,}.*)*)", text, flags=re.M)
    return {name: " ".join(described.split()) for name, described in found}


def arguments(owner: type, *without: str) -> set[str]:
    return set(inspect.signature(owner).parameters) - set(without)


def test_every_setting_of_rlt():
    """Names from the classes themselves; each has a text before its type and default."""
    from rlt_sb3 import RLT, ChunkReplayBuffer
    from rlt_sb3.common.policy_gate import PolicyGate
    from rlt_sb3.rlt.policies import RLTPolicy

    made = ("observation_space", "action_space")
    wanted = {f"rlt.{name}" for name in arguments(RLT, "policy", "env", "seed", "tensorboard_log", "_init_setup_model")}
    wanted -= {"rlt.action_noise"}  # an object, which no file can hold
    wanted |= {f"rlt.gate.{name}" for name in arguments(PolicyGate)}
    of_policy = arguments(RLTPolicy, *made, "lr_schedule", "gated")
    wanted |= {f"rlt.policy_kwargs.{name}" for name in of_policy}
    of_buffer = arguments(ChunkReplayBuffer, *made, "buffer_size", "device", "n_envs", "n_steps", "gamma")
    wanted |= {f"rlt.replay_buffer_kwargs.{name}" for name in of_buffer}
    shown = entries(algorithm_help("rlt"))
    assert set(shown) == wanted and len(wanted) > 50
    for name, text in shown.items():
        assert re.fullmatch(r"[^(].* \(type: [^()]+, default: .+\)", text), (name, text)
    assert "Half of it during the opening of the search for an offset" in shown["rlt.gate.share"]
    gamma, rate = (inspect.signature(RLT).parameters[name].default for name in ("gamma", "learning_rate"))
    assert shown["rlt.gamma"] == f"discount per control step (type: float, default: {gamma})"
    assert f"(type: float | schedule, default: {rate})" in shown["rlt.learning_rate"]
    assert "(type: class, default: torch.nn.modules.activation:ReLU)" in shown["rlt.policy_kwargs.activation_fn"]


def test_the_baseline_has_the_defaults_of_runs():
    shown = entries(algorithm_help("tqc"))
    assert "default: 50000)" in shown["tqc.buffer_size"]
    assert f"default: {0.99**8:.4g} for 2 simulators and chunks of 8 control steps)" in shown["tqc.gamma"]
    assert "default: 4 for 2 simulators" in shown["tqc.gradient_steps"]
    assert "(type: str, default: auto)" in shown["tqc.device"]
    assert {"tqc.policy_kwargs.n_quantiles", "tqc.replay_buffer_kwargs.handle_timeout_termination"} <= set(shown)


def test_help_of_train_shows_all_algorithms(capsys, monkeypatch):
    """Also with a configuration, and although one of another package cannot be imported."""
    point = EntryPoint("absent", "no_such_module:X", algorithms.GROUP)
    monkeypatch.setattr(
        algorithms, "entry_points", lambda group, name=None: [point] if name in (None, point.name) else []
    )
    for args in (["--help"], ["--config", "demo", "--help"], ["-h"]):
        with pytest.raises(SystemExit) as stop:
            parse("train", args)
        assert stop.value.code == 0
        out = capsys.readouterr().out
        assert len(entries(out)) > 100 and "rlt.policy_kwargs.n_critics" in entries(out)
        assert "settings of RLT, with --algorithm rlt:" in out and "settings of TQC, with --algorithm tqc:" in out
        assert "absent: its settings cannot be shown (No module named 'no_such_module')." in out
    with pytest.raises(SystemExit):
        parse("eval", ["--help"])
    assert "rlt.gamma" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"), (True, "true"), (0.00030, "0.0003"), (20, "20"), ((0.0, 1.0), "[0, 1]"), ("auto", "auto"),
        ({"share": 0.5, "window": 16}, "{share: 0.5, window: 16}"),
    ],
)  # fmt: skip
def test_defaults_are_written_as_in_a_file(value, text):
    assert default_text(value) == text


def test_default_that_is_a_schedule():
    from stable_baselines3.common.utils import LinearSchedule

    assert default_text(LinearSchedule(60.0, 5.0, 0.25)) == "{start: 60.0, end: 5.0, end_fraction: 0.25}"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_documentation_names_only_options_that_exist(command, capsys, monkeypatch):
    """README and the guide: ``rlt COMMAND ... --option``, and ``--section.option`` anywhere, are in --help."""
    monkeypatch.setenv("COLUMNS", "200")
    pages = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
    named: set[str] = set()
    for page in pages:
        text = page.read_text()
        for line in re.findall(rf"\brlt {command}(?![\w-])([^`\n]*)", text):
            named |= set(re.findall(r"--([a-z][\w.-]*)", line.partition("#")[0]))
        if command == "train":
            named |= set(re.findall(r"--((?:rlt|tqc|env|evaluation)\.[a-z][\w.]*)", text))
    with pytest.raises(SystemExit):
        parse(command, ["--help"])
    shown = set(re.findall(r"^  (?:-h, )?--([a-z][\w.-]*)", capsys.readouterr().out, flags=re.M))
    assert {name.replace("-", "_") for name in named} - shown == set()
    if command in ("train", "eval"):
        assert len(named) >= 5, "the pages are not read"
