"""The page of ``rlt probe``: one file with tables, pictures with attention, and maps whose points have pictures."""

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader
from PIL import Image

from rlt_gym.core.files import atomic_write
from rlt_gym.data.demo_set import DemoRows
from rlt_gym.rl_token.probe.attention import Looks
from rlt_gym.rl_token.probe.gates import GATES

#: Most points of a map, pictures in a row of the sheet of pictures, and their largest edge in pixels: the sheet is most
#: of the page's size, which stays below 350 kB.
POINTS, SHEET, SMALL = 360, 40, 40
#: Principal components of the spectrum's picture.
COMPONENTS = 40
#: Edge in pixels of the pictures with attention, and the colors of much and of little.
EDGE, RED, BLUE = 64, (255, 40, 20), (30, 80, 255)


def write_page(
    path: Path,
    result: dict[str, Any],
    rows: DemoRows,
    maps: dict[str, np.ndarray],
    pictures: Callable[[np.ndarray], np.ndarray],
    looks: Looks | None,
) -> None:
    """
    Write the page.

    :param path: The ``.html`` file.
    :param result: The numbers of :func:`~rlt_gym.rl_token.probe.command.probe`.
    :param rows: What is known about the observations.
    :param maps: Name -> positions in [0, 1], float (R, 2).
    :param pictures: Gives the pictures of some of the observations, uint8 (n, cameras, S, S, 3).
    :param looks: The RL token's attention; ``None`` = left out.
    """
    shown = np.unique(np.linspace(0, len(rows) - 1, min(POINTS, len(rows))).round().astype(int))
    length = {demo: max(1, rows.step[rows.demo == demo].max()) for demo in np.unique(rows.demo)}
    points = [
        {
            "maps": {name: [round(float(value), 3) for value in xy[row]] for name, xy in maps.items()},
            "time": round(float(rows.step[row] / length[rows.demo[row]]), 3),
            "task": int(rows.task[row]),
            "outcome": int(rows.success[row]),
            "episode": int(rows.demo[row]),
            "step": int(rows.step[row]),
        }
        for row in shown
    ]
    sheet, size = _sheet(pictures(shown)[:, 0])
    data = {"points": points, "size": size, "columns": SHEET, "tasks": rows.instructions}
    environment = Environment(loader=PackageLoader("rlt_gym.rl_token.probe"), autoescape=True)
    shares = np.asarray(result["shares"][:COMPONENTS])
    html = environment.get_template("probe.html.j2").render(
        result=result,
        gates=[(gate, result["numbers"].get(gate.number)) for gate in GATES],
        shares=[{"at": index, "share": share} for index, share in enumerate(shares.tolist())],
        largest=float(shares.max()),
        data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        names=list(maps),
        sheet=sheet,
        looks=looks,
        overlays=[] if looks is None else _overlays(looks, rows, pictures(looks.frames)),
    )
    with atomic_write(path) as temporary:
        temporary.write_text(html, encoding="utf-8")


def _overlays(looks: Looks, rows: DemoRows, pictures: np.ndarray) -> list[dict[str, Any]]:
    """Lay the attention over the shown frames; return for each task and camera its frames, pictures as base64."""
    tables: dict[tuple[int, int], dict[str, Any]] = {}
    for place, row in enumerate(looks.frames):
        for view in looks.views:
            picture, weights = pictures[place, view.number], view.weights[place]
            images = [_at_edge(picture).astype(np.uint8), *(overlay(picture, part, view.contrast) for part in weights)]
            ranges = ["", *(f"{part.min() / part.mean():.2f} to {part.max() / part.mean():.2f}" for part in weights)]
            cells = [{"jpeg": _jpeg(image), "range": text} for image, text in zip(images, ranges, strict=True)]
            task = int(rows.task[row])
            new = {"name": rows.instructions[task], "camera": view.camera, "frames": []}
            table = tables.setdefault((task, view.number), new)
            table["frames"].append({"step": int(rows.step[row]), "cells": cells})
    return list(tables.values())


def overlay(picture: np.ndarray, weights: np.ndarray, contrast: float) -> np.ndarray:
    """
    Make a picture gray, and color it red where weights are above their mean, blue where they are below.

    :param picture: uint8 (S, S, 3).
    :param weights: float (rows, columns) of a grid over the picture.
    :param contrast: What is so many times the mean, or the mean so many times it, has the full color; above 1.
    :return: uint8 (EDGE, EDGE, 3).
    """
    places = [np.arange(EDGE) * count // EDGE for count in weights.shape]
    over = np.log(np.maximum(weights / weights.mean(), 1e-9)) / np.log(contrast)
    over = over.clip(-1, 1)[places[0]][:, places[1], None]
    gray, strength = _at_edge(picture).mean(axis=2, keepdims=True), 0.7 * np.abs(over)
    return (gray * (1 - strength) + np.where(over > 0, RED, BLUE) * strength).astype(np.uint8)


def _at_edge(picture: np.ndarray) -> np.ndarray:
    return _resized(picture, EDGE).astype(float)


def _resized(picture: np.ndarray, edge: int) -> np.ndarray:
    return np.asarray(Image.fromarray(picture).resize((edge, edge), Image.Resampling.BICUBIC))


def _jpeg(picture: np.ndarray) -> str:
    stream = io.BytesIO()
    Image.fromarray(picture).save(stream, "JPEG", quality=60, optimize=True)
    return base64.b64encode(stream.getvalue()).decode()


def _sheet(pictures: np.ndarray) -> tuple[str, int]:
    """Put pictures beside one another; return a JPEG as base64, and the edge of one of them in pixels."""
    count, size = len(pictures), min(SMALL, pictures.shape[1])
    lines = -(-count // SHEET)
    sheet = np.zeros((lines * SHEET, size, size, 3), np.uint8)
    sheet[:count] = [_resized(picture, size) for picture in pictures]
    joined = sheet.reshape(lines, SHEET, size, size, 3).transpose(0, 2, 1, 3, 4).reshape(lines * size, SHEET * size, 3)
    return _jpeg(joined), size
