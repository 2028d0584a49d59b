"""Contact sheets: one labeled picture of every task of a suite, to look at."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from rlt_gym.libero.suites.tasks import get_tasks

_LABEL = 30
"""Pixels below each picture: two lines of text."""


def task_picture(suite: str, task_id: int, size: int) -> np.ndarray:
    """
    Draw the first initial state of a task.

    :param suite: Name of the suite.
    :param task_id: Index of the task in it.
    :param size: Side in pixels.
    :return: uint8 (size, size, 3): LIBERO's agentview of the first initial state, the right way up.
    """
    from rlt_gym.libero.worker.simulator import LiberoSimulator

    simulator = LiberoSimulator(suite, task_id, image_size=size)
    try:
        return simulator.reset("eval", 0)["agentview"][::-1]
    finally:
        simulator.close()


def contact_sheet(pictures: list[tuple[str, np.ndarray]], columns: int) -> Image.Image:
    """
    Put labeled pictures on one sheet.

    :param pictures: (label, uint8 (size, size, 3)) each.
    :param columns: Pictures in a row.
    :return: The sheet.
    """
    size = len(pictures[0][1])
    rows = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (columns * (size + 4) + 4, rows * (size + _LABEL + 4) + 4), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=10)
    for number, (label, picture) in enumerate(pictures):
        x, y = 4 + (number % columns) * (size + 4), 4 + (number // columns) * (size + _LABEL + 4)
        sheet.paste(Image.fromarray(np.ascontiguousarray(picture)), (x, y))
        lines = textwrap.wrap(label, width=size // 5)
        if len(lines) > 2:
            lines = [lines[0], lines[1][: size // 5 - 3] + "..."]
        draw.text((x, y + size + 2), "\n".join(lines), fill="black", font=font, spacing=2)
    return sheet


def write_sheet(suite: str, path: Path, size: int = 160, columns: int = 5) -> None:
    """
    Draw a suite with the assets that :func:`rlt_gym.libero.worker.libero_import.prepare_libero` was given.

    :param suite: Name of the suite.
    :param path: A ``.jpg`` or ``.png`` file.
    :param size: Side of each picture in pixels.
    :param columns: Pictures in a row.
    """
    tasks = get_tasks(suite)
    pictures = [(f"{task.task_id} {task.instruction}", task_picture(suite, task.task_id, size)) for task in tasks]
    path.parent.mkdir(parents=True, exist_ok=True)
    contact_sheet(pictures, columns).save(path, quality=85)
