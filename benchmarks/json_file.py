"""The file that ``--json`` of a benchmark names."""

import argparse
from typing import Any

from rlt_gym.core import files


def write_json(arguments: argparse.Namespace, **found: Any) -> None:
    """
    Write what a benchmark has found, with its arguments (paths as text); without ``--json`` do nothing.

    :param arguments: of the command line, ``json`` among them
    :param found: further entries of the file
    """
    if not arguments.json:
        return
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    files.write_json(arguments.json, {"arguments": settings, **found})
