"""Writing files so that a reader never sees half of one."""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """
    Yield a temporary path beside ``path``; on a clean exit it replaces ``path``, on an exception it is removed.

    The temporary file lies in the same folder, since ``os.replace`` is atomic only inside one file system.

    :param path: Path of the finished file; missing parent folders are made.
    :return: A context manager that yields the path to write to (same suffix, not yet existing).
    :raises OSError: If the folder cannot be made or written.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        temporary = Path(folder) / target.name
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # some writers (safetensors) make files that only their owner can read
        os.replace(temporary, target)


@contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """
    Yield an empty folder beside ``path``; on a clean exit it becomes ``path``, on an exception it is removed.

    :param path: The finished folder, which is not there yet; missing parent folders are made.
    :return: A context manager that yields the folder to fill.
    :raises OSError: If the folder cannot be made or written, or ``path`` is there and not empty.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as parent:
        written = Path(parent) / target.name
        written.mkdir()
        yield written
        os.replace(written, target)


def write_json(path: str | os.PathLike[str], content: Any) -> None:
    """
    Write ``content`` as indented JSON, atomically.

    :param path: Target file.
    :param content: Anything ``json`` can write; other objects (paths, numpy scalars) are written as ``str``.
    """
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")


def git_commit() -> str | None:
    """
    Commit of the source tree this package lies in, for provenance records.

    :return: The hash, with ``-dirty`` behind it if tracked files differ, or ``None`` outside a git checkout.
    """
    here = Path(__file__).resolve().parent
    try:
        command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
