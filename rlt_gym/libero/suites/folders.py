"""The folders of the installed LIBERO, and of the files that this package makes from it."""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=None)
def libero_root() -> Path:
    """
    Find LIBERO's folder.

    :return: The folder ``libero/libero`` of the installed package, found without importing it.
    :raises ImportError: LIBERO is not installed.
    """
    spec = importlib.util.find_spec("libero")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("LIBERO is not installed: run `pip install hf-libero`")
    return Path(next(iter(spec.submodule_search_locations))) / "libero"


def cache_dir() -> Path:
    """
    Where files are kept that can be made again.

    :return: ``$RLT_CACHE``, else ``$XDG_CACHE_HOME/rlt``, else ``~/.cache/rlt``.
    """
    if "RLT_CACHE" in os.environ:
        return Path(os.environ["RLT_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rlt"
