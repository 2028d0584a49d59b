"""Wrong files and wrong settings: one line, status 2, nothing begun."""

import re

import pytest

from rlt_sb3.cli.main import main


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
        ("rlt: {bc_coef: [\n", r"c\.yaml cannot be read as YAML: .* line 2, column 1"),
        ("- a\n- b\n", r"c\.yaml must hold settings, .* it holds a list"),
        ("nonsense: 3\n", r"'nonsense' is not accepted \(rlt train --help\)"),
        ("env: {num_envs: many}\n", r"env\.num_envs.*int.*many"),
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


def test_arguments(capsys):
    assert "unrecognized arguments: --total_chunk" in refused(capsys, "train", "--total_chunk", "3")
    assert "required: run" in refused(capsys, "eval")
