"""rlt doctor: says what works, names the command for what does not, and exits with 0 only if training can run."""

import os
import subprocess
import sys

import pytest

from rlt_sb3.cli import doctor


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "rlt_sb3", "doctor", "--assets", "embedded", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, env={**os.environ, **environment})


@pytest.mark.sim
def test_it_plays_a_suite_and_finds_nothing_wrong():
    done = run("--suites", "[libero_goal]")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Training can run." in done.stdout and "PROBLEM" not in done.stdout
    assert "assets in use: embedded" in done.stdout
    assert "libero_goal: ready in" in done.stdout and " MB" in done.stdout


def test_a_problem_is_named_with_its_remedy_and_fails(tmp_path):
    done = run("--suites", "[]", RLT_WORKER_PYTHON=str(tmp_path / "python"), MUJOCO_GL="nonsense")
    assert done.returncode == 1
    remedies = done.stdout.split("To do:")[1]
    assert "unset RLT_WORKER_PYTHON" in remedies
    assert "export MUJOCO_GL=" in remedies or doctor.GL_FIXES["osmesa"] in remedies


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RLT_CACHE", str(tmp_path / "file" / "cache"))
    findings = [finding for finding in doctor.check_places() if not finding.ok]
    assert len(findings) == 1 and "export RLT_CACHE=" in findings[0].fix


def test_an_unknown_suite_is_an_error():
    with pytest.raises(ValueError, match="libero_gaol"):
        doctor.doctor(doctor.DoctorConfig(suites=["libero_gaol"]))
