"""
The examples with other RL libraries run, with few chunks on an environment without a simulator.

A library that is not installed here runs in its own environment (``scripts/library_env.sh NAME``, ``make libraries``).
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "libraries"
SETTINGS = ["--env", "toy_env:FakeRLToken-v0", "--steps", "40"]
#: example -> library, the module that it imports, further arguments, what it prints last
EXAMPLES = {
    "torchrl_sac.py": ("torchrl", [], r"loss \d.*, episodes [1-9]\d*, return \d.*"),
    "tianshou_sac.py": ("tianshou", [], r"episodes [1-9]\d*, returns \[.*\], critic loss \d.*"),
    "sbx_crossq.py": ("sbx", [], r"episodes [1-9]\d* last returns \[.*\]"),
    "skrl_sac.py": ("skrl", [], r"rows 40 rewards [1-9].*"),
    "minari_record.py": ("minari", ["--name", "toy/vla-v0"], r"episodes [1-9]\d* chunks 4\d\nreturns \[[01].0, .*\]"),
    "rllib_ppo.py": (
        "rllib",
        ["--mode", "vector_entry_point"],
        r"chunks [4-9]\d.*, return 0\.\d+, chunks an episode .*",
    ),
}
#: library -> the module that only its environment has; plain Ray brings the files of RLlib, which cannot be imported
MODULES = {"rllib": "tree"}


def python_of(library):
    """The interpreter with a library: this one, or that of the library's own environment."""
    name = MODULES.get(library, library)
    if importlib.util.find_spec(name):
        return sys.executable
    python = Path(os.environ.get("RLT_LIBRARIES", ROOT / ".venv-libraries")) / library / "bin" / "python"
    if not python.is_file():
        pytest.skip(f"{library} is not installed: scripts/library_env.sh {library} makes its environment")
    return str(python)


def run(python, arguments, folder):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "MINARI_DATASETS_PATH": str(folder)}
    done = subprocess.run(
        [python, *map(str, arguments)], capture_output=True, text=True, cwd=folder, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_tested():
    assert {path.name for path in FOLDER.iterdir() if path.is_file()} == {*EXAMPLES, "cleanrl_td3.py", "rl_zoo3.yml"}


def test_td3_in_one_file(tmp_path):
    settings = [*SETTINGS[:2], "--steps", "80", "--learning-starts", "30", "--selection-every", "40"]
    printed = run(
        sys.executable, [FOLDER / "cleanrl_td3.py", *settings, "--selection-states", "4", "--states", "6"], tmp_path
    )
    lines = printed.splitlines()
    rate = r"[0-{0}]/{0} \(\d+%, 95 % CI .*\)"
    assert re.fullmatch("selection, frozen VLA " + rate.format(4), lines[0])
    assert [re.match(r"selection, after (\d+) chunks ", line)[1] for line in lines[1:-3]] == ["40", "80"]
    assert re.fullmatch("held out, frozen VLA " + rate.format(6), lines[-3])
    assert re.fullmatch("held out, TD3 +" + rate.format(6), lines[-2]) and lines[-1].startswith("Comparison(fixed=")


@pytest.mark.expensive
@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name, tmp_path):
    library, arguments, last = EXAMPLES[name]
    printed = run(python_of(library), [FOLDER / name, *SETTINGS, *arguments], tmp_path)
    assert re.search(last + r"\s*$", printed), printed


@pytest.mark.expensive
@pytest.mark.parametrize("mode", ["sync", "vector_entry_point"])
def test_rllib_records_the_rows_of_the_raw_environment(mode, tmp_path):
    script = ROOT / "tests" / "helpers" / "rllib_rows.py"
    arguments = [script, FOLDER / "rllib_ppo.py", "toy_env:FakeRLToken-v0", mode, "40"]
    rows, ended = re.search(
        r"(\d+) rows of \d+ episodes equal, (\d+) ended", run(python_of("rllib"), arguments, tmp_path)
    ).groups()
    assert int(rows) >= 40 and int(ended) > 5


@pytest.mark.expensive
def test_rl_zoo(tmp_path):
    """The command that the file names, with another environment."""
    text = (FOLDER / "rl_zoo3.yml").read_text()
    command = " ".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    (tmp_path / "zoo.yml").write_text(re.sub(r"^RLToken-LIBERO-v0:", "FakeRLToken-v0:", text, flags=re.M))
    words = shlex.split(command.partition("python ")[2])
    other = {"RLToken-LIBERO-v0": "FakeRLToken-v0", "rlt_gym": "toy_env", "3600": "40"}
    words = ["zoo.yml" if word.endswith("rl_zoo3.yml") else other.get(word, word) for word in words]
    run(python_of("rl_zoo3"), [*words, "--log-folder", "logs"], tmp_path)
    assert (tmp_path / "logs" / "sac" / "FakeRLToken-v0_1" / "FakeRLToken-v0.zip").is_file()
