"""Ids known without an import of ours: ``_rlt_autoload.py``, which installed packages load when Python starts."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
IDS = ("LIBERO-v0", "MetaWorld-v0", "RLToken-LIBERO-v0", "RLToken-MetaWorld-v0")


def run(code, *options, **environment):
    known = {key: value for key, value in os.environ.items() if key != "RLT_NO_AUTOLOAD"}
    return subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True, env=known | environment, timeout=120
    )


@pytest.fixture
def installed(tmp_path):
    """Runs code where nothing but the module and stand-ins of Gymnasium and rlt_gym can be imported."""
    shutil.copy(ROOT / "_rlt_autoload.py", tmp_path)
    (tmp_path / "gymnasium").mkdir()
    (tmp_path / "gymnasium" / "__init__.py").write_text("import gymnasium.core; print('gymnasium')")
    (tmp_path / "gymnasium" / "core.py").touch()
    (tmp_path / "rlt_gym.py").write_text("import gymnasium.core; print('rlt_gym')")

    def run_there(code, **environment):
        start = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import _rlt_autoload; "
        done = run(start + code, "-I", "-S", **environment)
        assert done.returncode == 0, done.stderr
        return done

    run_there.folder = tmp_path
    return run_there


def test_ids_are_known_without_an_import_of_ours():
    done = run(f"import gymnasium as g; print(*(g.spec(name).id for name in {IDS}))")
    assert done.stdout.split() == list(IDS) and done.stderr == ""


def test_runs_do_not_need_it():
    code = "from rlt_sb3.experiment.environment import registered_ids; print(*registered_ids())"
    assert run(code, RLT_NO_AUTOLOAD="1").stdout.split() == list(IDS)


@pytest.mark.parametrize("value", ["1", "yes"])
def test_switched_off(value):
    """The plain id is unknown; the two forms that the documentation leads with do not need the mechanism."""
    done = run("import gymnasium as g; print([name for name in g.registry if 'LIBERO' in name])", RLT_NO_AUTOLOAD=value)
    assert done.stdout.strip() == "[]" and done.stderr == ""
    done = run(f"import gymnasium as g, rlt_gym; print(*(g.spec(name).id for name in {IDS}))", RLT_NO_AUTOLOAD=value)
    assert done.stdout.split() == list(IDS)
    for make in ("make", "make_vec"):
        code = f"import gymnasium as g; env = g.{make}('rlt_gym:RLToken-LIBERO-v0', vla='unknown')"
        assert "allowed are 'mini'" in run(code, RLT_NO_AUTOLOAD=value).stderr  # the environment's own complaint


def test_0_leaves_it_on(installed):
    assert installed("import gymnasium", RLT_NO_AUTOLOAD="0").stdout.split() == ["gymnasium", "rlt_gym"]


def test_waits_for_gymnasium(installed):
    assert (
        installed("import json; print('rlt_gym' in sys.modules, 'gymnasium' in sys.modules)").stdout == "False False\n"
    )
    assert installed("import rlt_gym").stdout.split() == ["gymnasium", "rlt_gym"]
    code = "import gymnasium.core; print([finder for finder in sys.meta_path if not isinstance(finder, type)])"
    assert installed(code).stdout.split() == ["gymnasium", "rlt_gym", "[]"]  # and leaves nothing behind


def test_a_search_for_gymnasium_is_no_import(installed):
    """Packages ask ``find_spec`` whether Gymnasium is there, long before someone imports it."""
    code = "import importlib.util; assert importlib.util.find_spec('gymnasium'); print('found'); import gymnasium"
    assert installed(code).stdout.split() == ["found", "gymnasium", "rlt_gym"]


def test_does_no_harm(installed):
    """rlt_gym is gone or broken, Gymnasium is gone or broken: errors are those that there would be anyway."""
    package = installed.folder / "rlt_gym.py"
    package.write_text("import nowhere")
    done = installed("import gymnasium; print(gymnasium.core.__name__)")
    assert done.stdout.split() == ["gymnasium", "gymnasium.core"]
    assert "rlt_gym cannot be imported (ModuleNotFoundError: No module named 'nowhere')" in done.stderr
    package.unlink()
    done = installed("import gymnasium")
    assert done.stdout == "gymnasium\n" and done.stderr == ""
    shutil.rmtree(installed.folder / "gymnasium")
    code = """
try: import gymnasium
except ModuleNotFoundError as error: print(error)
"""
    assert installed(code).stdout == "No module named 'gymnasium'\n"


def test_start_up_file_is_one_import():
    assert (ROOT / "rlt-gymnasium.pth").read_text() == "import _rlt_autoload\n"
