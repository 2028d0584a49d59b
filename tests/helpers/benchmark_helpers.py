"""Benchmarks as a user runs them, in a process of their own, and their functions."""

import importlib
from pathlib import Path

import pytest
from python_files import run_file

ROOT = Path(__file__).parents[2]


def run_benchmark(name, *arguments):
    """
    Run a file of ``benchmarks/`` in the repository's root.

    :param name: of the file, without ``.py``
    :param arguments: of its command line
    :return: the finished process, with its output as text
    """
    return run_file(ROOT / "benchmarks" / f"{name}.py", *arguments, cwd=ROOT)


def import_benchmark(name):
    """
    Import a file of ``benchmarks/``, which finds the files beside it as when it is run.

    :param name: of the file, without ``.py``
    :return: the module
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        return importlib.import_module(name)
