"""The list of mutations fits the packages; ``mutations.py`` itself is run by hand."""

import ast
import importlib.util
import shutil
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("mutations", Path(__file__).with_name("mutations.py"))
mutations = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(mutations)
MUTATIONS, ROOT, Mutation = mutations.MUTATIONS, mutations.ROOT, mutations.Mutation


def test_every_mutation_has_its_line(tmp_path):
    """Its fragment is in one line of its file, and what takes its place is another program."""
    assert len(MUTATIONS) >= 50
    for number, mutation in MUTATIONS.items():
        target = tmp_path / mutation.path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / mutation.path, target)
        before = mutation.apply(tmp_path)  # refuses what is not there exactly once
        after = target.read_text()
        changed = [a != b for a, b in zip(before.splitlines(), after.splitlines(), strict=True)]
        assert sum(changed) == 1, number
        assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(before)), number
        assert mutation.test_files and all((ROOT / name).is_file() for name in mutation.test_files), number


def test_mutations_differ():
    assert len({(mutation.file, mutation.old, mutation.new) for mutation in MUTATIONS.values()}) == len(MUTATIONS)
    assert len({mutation.what for mutation in MUTATIONS.values()}) == len(MUTATIONS)


@pytest.mark.parametrize("text", ["nothing = 1", "twice = 1\ntwice = 1"])
def test_a_line_that_has_changed_is_told(tmp_path, text):
    (tmp_path / "rlt_sb3").mkdir()
    (tmp_path / "rlt_sb3" / "a.py").write_text(text)
    with pytest.raises(ValueError, match=r"rlt_sb3/a.py has 'twice = 1' [02] times, it must be there once"):
        Mutation("x", "a.py", "twice = 1", "once = 1", "b.py").apply(tmp_path)
    assert (tmp_path / "rlt_sb3" / "a.py").read_text() == text
