"""What code of the workers may import: Python 3.8, LIBERO's own stack and each other."""

import ast
import sys
from pathlib import Path

import pytest

import rlt_gym

PACKAGE = Path(rlt_gym.__file__).parent
#: The rooms whose code runs under a worker's interpreter; ruff is told the same ones in pyproject.toml.
ROOMS = ("rlt_gym.workers", "rlt_gym.libero.suites", "rlt_gym.libero.worker", "rlt_gym.libero.rendering")


def imports_of(name):
    """Modules that a module of a worker imports, anywhere in it; it must be Python 3.8."""
    path = PACKAGE.joinpath(*name.split(".")[1:]).with_suffix(".py")
    tree = ast.parse(path.read_text(), feature_version=(3, 8))
    future = False
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            future = future or node.module == "__future__"
            base = node.module or ""
            for alias in node.names:
                member = PACKAGE.joinpath(*base.split(".")[1:], f"{alias.name}.py")
                yield f"{base}.{alias.name}" if base.startswith("rlt_gym") and member.is_file() else base
        elif isinstance(node, ast.Call) and any(keyword.arg == "strict" for keyword in node.keywords):
            pytest.fail(f"{name}.py:{node.lineno}: zip(strict=) is of Python 3.10")
    assert future, f"{name}.py: annotations are evaluated without `from __future__ import annotations`"


def test_worker_modules_are_python_3_8_and_need_only_libero():
    """All that the processes of launch.py reach inside this package."""
    # robosuite brings numba, and numba llvmlite
    allowed = {"libero", "numpy", "mujoco", "robosuite", "numba", "llvmlite", "OpenGL", *sys.stdlib_module_names}
    started = (
        "workers.launch",
        "workers.zygote",
        "workers.gl",
        "workers.worker",
        "libero.worker.backend",  # named in the settings
        "libero.worker.fault_injection",
    )
    open_, known = {f"rlt_gym.{name}" for name in started}, set()
    while open_:
        name = open_.pop()
        known.add(name)
        for module in imports_of(name):
            if module.split(".")[0] in allowed:
                continue
            assert module.startswith(ROOMS), f"{name} imports {module}"
            open_ |= {module} - known
    reached = {name.rpartition(".")[2] for name in known}
    assert {"libero_import", "simulator", "renderer", "tasks", "channel", "watchdog"} <= reached
    assert {"culling", "controller", "folders", "shared_memory", "hooks"} <= reached


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("workers/*.py")), ids=lambda path: path.stem)
def test_workers_know_no_benchmark(path):
    """Not even in a string that is imported later; test_backend.py plays another simulator."""
    if path.stem == "__init__":
        assert all(isinstance(node, ast.Expr) for node in ast.parse(path.read_text()).body)  # a docstring at most
        return
    others = [name for name in imports_of(f"rlt_gym.workers.{path.stem}") if name.startswith("rlt_gym.")]
    assert all(name.startswith("rlt_gym.workers.") for name in others), others
    code = ast.parse(path.read_text())
    strings = [node.value for node in ast.walk(code) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert not [text for text in strings if text.startswith("rlt_gym.libero")]
