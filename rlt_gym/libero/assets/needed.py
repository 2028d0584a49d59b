"""Which files of LIBERO's assets a task needs, and which of them a folder lacks."""

from __future__ import annotations

import functools
import posixpath
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from pathlib import Path

from rlt_gym.libero.assets.catalog import CATALOG
from rlt_gym.libero.assets.rooms import ROOMS
from rlt_gym.libero.assets.schema import Asset, Scene
from rlt_gym.libero.suites.tasks import SUITE_HORIZONS, LiberoTask, get_tasks

_BY_CATEGORY = {Path(entry.path).stem: entry for entry in CATALOG if isinstance(entry, Asset)}


def _section(text: str, name: str) -> str:
    found = re.search(rf"\(:{name}(.*?)\)", text, flags=re.DOTALL)
    return found.group(1) if found else ""


def task_entries(task: LiberoTask) -> list[Asset | Scene]:
    """
    List what LIBERO loads for a task.

    :param task: A task.
    :return: What of the catalog LIBERO loads for it: its room first, then its fixtures and objects.
    :raises ValueError: If its BDDL file names something that the catalog lacks.
    """
    text = task.bddl_file.read_text()
    problem = re.search(r"\(problem\s+(\w+)\)", text)
    if problem is None or problem.group(1).lower() not in ROOMS:
        found = None if problem is None else problem.group(1)
        raise ValueError(f"{task.bddl_file}: unknown problem {found!r}; known are {', '.join(ROOMS)}")
    entries: list[Asset | Scene] = [ROOMS[problem.group(1).lower()]]
    for name in ("fixtures", "objects"):
        for category in re.findall(r"-\s+(\w+)", _section(text, name)):
            # "main_table - table": a table or the floor comes with the room.
            if category == "floor" or category.endswith("table"):
                continue
            if category not in _BY_CATEGORY:
                raise ValueError(f"{task.bddl_file}: the catalog has no {category!r}; is this the installed LIBERO's?")
            if _BY_CATEGORY[category] not in entries:
                entries.append(_BY_CATEGORY[category])
    return entries


@functools.cache
def _missing_of(folder: Path, path: str) -> tuple[str, ...]:
    """List the files missing for one XML file: itself, and all meshes and textures that it names."""
    if not (folder / path).is_file():
        return (path,)
    try:
        root = ET.parse(folder / path).getroot()
    except ET.ParseError as error:
        return (f"{path} (no XML: {error})",)
    base = posixpath.dirname(path)
    compiler = root.find("compiler")
    folders = {} if compiler is None else {"mesh": compiler.get("meshdir"), "texture": compiler.get("texturedir")}
    missing = []
    for tag in ("mesh", "texture"):
        for element in root.iter(tag):
            file = element.get("file")
            if file is not None:
                file = posixpath.normpath(posixpath.join(base, folders.get(tag) or "", file))
                if not (folder / file).is_file():
                    missing.append(file)
    return tuple(missing)


def missing_for(folder: Path, task: LiberoTask) -> list[str]:
    """
    List the files that a task needs and that a folder lacks.

    :param folder: Folder laid out like LIBERO's ``assets``.
    :param task: A task.
    :return: Files that the task needs and that are not there, meshes and textures included.
    """
    return sorted({file for entry in task_entries(task) for file in _missing_of(folder, entry.path)})


def missing_by_suite(folder: Path, suites: Iterable[str] = SUITE_HORIZONS) -> dict[str, dict[int, list[str]]]:
    """
    List the missing files of all tasks of some suites.

    :param folder: Folder laid out like LIBERO's ``assets``.
    :param suites: Which suites.
    :return: Per suite, the missing files of each task that lacks any.
    """
    _missing_of.cache_clear()
    lacking = {suite: {task.task_id: missing_for(folder, task) for task in get_tasks(suite)} for suite in suites}
    return {suite: {i: files for i, files in tasks.items() if files} for suite, tasks in lacking.items()}
