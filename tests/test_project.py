"""Rules of the project that no other test would notice."""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("rlt_gym", "rlt_sb3")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imports(path):
    """Modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_imports_go_one_way():
    """``rlt_gym`` never imports ``rlt_sb3``, of which the command line and the run harness alone may import both."""
    for path in SOURCES:
        package, *rooms = path.relative_to(ROOT).parts
        forbidden = ("rlt_sb3", "stable_baselines3") if package == "rlt_gym" else ("rlt_gym",)
        if package == "rlt_sb3" and rooms[0] in ("cli", "experiment"):
            continue
        found = [name for name in imports(path) if name.split(".")[0] in forbidden]
        assert not found, f"{path} imports {found}"


def test_import_loads_neither_simulator_nor_torch():
    code = (
        "import sys, rlt_gym, rlt_sb3;"
        "print({'libero', 'robosuite', 'mujoco', 'torch', 'stable_baselines3'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_constraints_meet_the_requirements():
    """constraints.txt pins what pyproject.toml asks for, without local version suffixes."""
    import tomllib

    def normal(name):
        return re.sub(r"[-_.]+", "-", name).lower()

    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    assert not [line for line in lines if "+" in line]
    pinned = {normal(name) for name in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "torch>=2.8" in project["dependencies"]
    needed = {normal(re.match(r"[A-Za-z0-9_.-]+", line)[0]) for line in project["dependencies"]}
    assert needed <= pinned


def test_make_targets_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in "demo test pytest type lint format check doc clean".split():
        assert re.search(rf"^{target}:", makefile, flags=re.M), target
    readme = (ROOT / "README.md").read_text().split("```")[1]
    assert [line.split("#")[0].strip() for line in readme.strip().splitlines()] == ["make demo", "make test"]


def test_packages_are_typed_and_files_short():
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").is_file()
    for path in SOURCES:
        assert len(path.read_text().splitlines()) <= 600, f"{path} is long: does it hold one thing?"
