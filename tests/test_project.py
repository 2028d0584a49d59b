"""Rules of the project that no other test would notice."""

import ast
import importlib
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("rlt_gym", "rlt_sb3")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
#: dotted name -> file
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCES}


def imports(path):
    """Modules that a file imports, anywhere in it but for type checkers only."""
    todo = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively, which these tests do not follow"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module for name in names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo.extend(node.orelse)
        else:
            todo.extend(ast.iter_child_nodes(node))


def circles(arrows):
    """Nodes from which others lead back to themselves."""

    def reached(start):
        found, todo = set(), [start]
        while todo:
            new = set(arrows.get(todo.pop(), ())) - found - {start}
            found |= new
            todo.extend(new)
        return found

    return sorted(node for node in arrows if any(node in arrows.get(other, ()) for other in reached(node)))


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "d": {"a", "d"}}) == []
    assert circles({"a": {"b"}, "b": {"c", "d"}, "c": {"b"}, "d": {"e"}}) == ["b", "c"]


@pytest.mark.parametrize("unit", ["file", "folder"])
def test_no_circle_of_imports(unit):
    """A folder is its own files: what lies in a folder inside it is another one."""
    arrows = defaultdict(set)
    for path in SOURCES:
        for name in imports(path):
            if name in MODULES:
                ends = (path, MODULES[name])
                start, end = (str(p.relative_to(ROOT)) for p in (ends if unit == "file" else [p.parent for p in ends]))
                arrows[start].add(end)
    assert len(arrows) > (10 if unit == "folder" else 50)
    assert circles(arrows) == []


def test_imports_go_one_way():
    """
    ``rlt_gym`` knows neither ``rlt_sb3`` nor Stable-Baselines3. Of ``rlt_sb3``, the command line and the run harness
    alone may know ``rlt_gym``; what a library user imports does not know the harness.
    """
    for path in SOURCES:
        package, *rooms = path.relative_to(ROOT).parts
        if package == "rlt_gym":
            forbidden = ("rlt_sb3", "stable_baselines3", "sb3_contrib")
        elif rooms[0] in ("cli", "experiment"):
            continue
        elif rooms[0] == "__main__.py":
            forbidden = ("rlt_gym",)
        else:
            forbidden = ("rlt_gym", "rlt_sb3.cli", "rlt_sb3.experiment")
        found = [name for name in imports(path) if any(f"{name}.".startswith(f"{prefix}.") for prefix in forbidden)]
        assert not found, f"{path} imports {found}"


#: Modules that run code which a message, or a file, names.
PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "multiprocessing", "shelve"}


def test_nothing_of_ours_reads_pickles_from_a_socket():
    """Nor writes any: only LIBERO's own files of initial states are pickles. (Ray's messages are, see the page.)"""
    found = {
        str(path.relative_to(ROOT))
        for package in ("rlt_gym", "rlt_sb3")
        for path in (ROOT / package).rglob("*.py")
        if PICKLES & {name.split(".")[0] for name in imports(path)}
    }
    assert found == {"rlt_gym/libero/suites/tasks.py"}
    text = (ROOT / "rlt_gym/libero/suites/tasks.py").read_text()
    assert text.count("pickle.") == 1 and "pickle.loads(archive.read(name))" in text


def test_constructors_take_33_arguments_at_most():
    long = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                arguments = node.args
                count = len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]) - 1  # less self
                if count > 33:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {count}")
    assert long == []


def test_long_files_say_why():
    """A file of more than 450 lines begins its docstring, or the comment above it, with the reason."""
    for path in SOURCES:
        lines = path.read_text().splitlines()
        if len(lines) > 450:
            assert "Long because" in "\n".join(lines[:10]), f"{path} has {len(lines)} lines: does it hold one thing?"


@pytest.mark.parametrize("package", PACKAGES)
def test_import_loads_neither_simulator_nor_torch(package):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", f"import {package}"], capture_output=True, text=True, check=True
    )
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert package in loaded
    assert not loaded & {
        "libero",
        "robosuite",
        "mujoco",
        "torch",
        "stable_baselines3",
        "numba",
        "h5py",
        "websockets",
        "msgpack",
    }


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


def make_commands():
    """What README and CONTRIBUTING tell to type: in a block of code, or between backticks."""
    texts = [(ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md")]
    found = [command for text in texts for command in re.findall(r"(?:^|`)(make [^#`\n]+)", text, flags=re.M)]
    return sorted({command.strip() for command in found})


def test_readme_begins_with_two_commands():
    first = (ROOT / "README.md").read_text().split("```")[1]
    assert [line.split("#")[0].strip() for line in first.strip().splitlines()] == ["make demo", "make test"]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("command", make_commands())
def test_documented_make_commands_do_something(command):
    """``make -n`` prints the commands of a target and runs none; a target that does not exist is an error."""
    done = subprocess.run([*command.split(), "-n"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Nothing to be done" not in done.stdout and done.stdout.strip()


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed(package):
    assert (ROOT / package / "py.typed").is_file()


def test_the_documented_tree_is_that_of_the_packages():
    command = [sys.executable, "scripts/tree.py"]
    tree = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert tree.strip() in (ROOT / "docs/guide/where_things_live.md").read_text(), "run: scripts/tree.py --write"
    for name in re.findall(
        r"`(rlt_(?:gym|sb3)/[\w/.]+|tests/[\w/.]+)`", (ROOT / "docs/guide/where_things_live.md").read_text()
    ):
        assert (ROOT / name).exists(), name


def public(node, owners=()):
    """Public classes and functions, with the classes they are in."""
    for child in node.body:
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield child, owners
            yield from public(child, (*owners, child))
        elif isinstance(child, ast.FunctionDef) and not child.name.startswith("_"):
            yield child, owners


def arguments_of(node, in_class):
    """Names that the docstring of a function or class must describe, and those that it may describe besides."""
    named = {ast.unparse(decorator).partition("(")[0] for decorator in node.decorator_list}
    if "overload" in named:
        return set(), set()
    if isinstance(node, ast.ClassDef):
        constructors = [child for child in node.body if getattr(child, "name", None) == "__init__"]
        if "dataclass" in named and not constructors:
            fields = [child for child in node.body if isinstance(child, ast.AnnAssign)]
            settings = {
                ast.unparse(field.target) for field in fields if "ClassVar" not in ast.unparse(field.annotation)
            }
            return {name for name in settings if not name.startswith("_")}, settings
        return arguments_of(constructors[0], True) if constructors else (set(), None)
    arguments = node.args
    names = [argument.arg for argument in arguments.posonlyargs + arguments.args + arguments.kwonlyargs]
    names = names[1:] if in_class and "staticmethod" not in named else names
    starred = {argument.arg for argument in (arguments.vararg, arguments.kwarg) if argument}
    return {name for name in names if name != "ctx" and not name.startswith("_")}, {*names, *starred}


def wrong_params(path, text):
    """
    Arguments that the docstrings of a file do not describe, and those they describe that do not exist.

    A method may leave them to the base class that documents it, and a function to another one to which it refers.
    """
    docstring_parser = pytest.importorskip("docstring_parser")

    def overrides(owners, name):
        owner = importlib.import_module(next(module for module, file in MODULES.items() if file == path))
        for node in owners:
            owner = getattr(owner, node.name)
        return any(name in vars(base) for base in owner.__mro__[1:-1])

    for node, owners in public(ast.parse(text)):
        docstring = ast.get_docstring(node) or ""
        described = {param.arg_name.lstrip("*") for param in docstring_parser.parse(docstring).params}
        needed, possible = arguments_of(node, bool(owners))
        wrong = set() if possible is None else described - possible
        if "arguments from" not in docstring:
            wrong |= needed - described
        if wrong and not (owners and isinstance(node, ast.FunctionDef) and overrides(owners, node.name)):
            yield f"{path.name}:{node.lineno} {node.name}: {', '.join(sorted(wrong))}"


def test_wrong_params_are_found():
    text = 'def f(a, b):\n    """\n    Add.\n\n    :param a: one\n    :param c: none\n    """\n'
    assert list(wrong_params(Path("x.py"), text)) == ["x.py:1 f: b, c"]
    text = 'class A:\n    """Hold."""\n\n    def __init__(self, size):\n        pass\n'
    assert list(wrong_params(Path("x.py"), text)) == ["x.py:1 A: size"]
    text = '@dataclass\nclass A:\n    """\n    Hold.\n\n    :param x: one\n    """\n\n    x: int\n    y: int = 1\n'
    assert list(wrong_params(Path("x.py"), text)) == ["x.py:2 A: y"]


def test_docstrings_describe_each_argument():
    assert [line for path in SOURCES for line in wrong_params(path, path.read_text())] == []
