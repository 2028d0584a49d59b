"""The page of ``rlt probe``: one HTML file with tables, the spectrum, and maps whose points show their picture."""

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
from rlt_gym.rl_token.probe.gates import GATES

#: Most points of a map, and pictures in a row of the sheet of pictures.
POINTS, SHEET = 1200, 40
#: Principal components of the spectrum's picture.
COMPONENTS = 40


def write_page(
    path: Path,
    result: dict[str, Any],
    rows: DemoRows,
    maps: dict[str, np.ndarray],
    pictures: Callable[[np.ndarray], np.ndarray],
) -> None:
    """
    Write the page.

    :param path: The ``.html`` file.
    :param result: The numbers of :func:`~rlt_gym.rl_token.probe.command.probe`.
    :param rows: What is known about the observations.
    :param maps: Name -> positions in [0, 1], float (R, 2).
    :param pictures: Gives the pictures of some of the observations, uint8 (n, S, S, 3).
    """
    shown = np.unique(np.linspace(0, len(rows) - 1, min(POINTS, len(rows))).round().astype(int))
    length = {demo: max(1, rows.step[rows.demo == demo].max()) for demo in np.unique(rows.demo)}
    points = [
        {
            "maps": {name: [round(float(value), 4) for value in xy[row]] for name, xy in maps.items()},
            "time": round(float(rows.step[row] / length[rows.demo[row]]), 3),
            "task": int(rows.task[row]),
            "outcome": int(rows.success[row]),
            "episode": int(rows.demo[row]),
            "step": int(rows.step[row]),
        }
        for row in shown
    ]
    sheet, size = _sheet(pictures(shown))
    data = {"points": points, "size": size, "columns": SHEET, "tasks": rows.instructions}
    environment = Environment(loader=PackageLoader("rlt_gym.rl_token.probe"), autoescape=True)
    shares = np.asarray(result["shares"][:COMPONENTS])
    html = environment.get_template("probe.html.j2").render(
        result=result,
        gates=[(gate, result["numbers"].get(gate.number)) for gate in GATES],
        shares=[{"at": index, "share": share} for index, share in enumerate(shares.tolist())],
        largest=float(shares.max()),
        data=json.dumps(data).replace("<", "\\u003c"),
        names=list(maps),
        sheet=sheet,
    )
    with atomic_write(path) as temporary:
        temporary.write_text(html, encoding="utf-8")


def _sheet(pictures: np.ndarray) -> tuple[str, int]:
    """Put pictures beside one another; return a JPEG as base64, and the edge of one of them in pixels."""
    count, size = pictures.shape[:2]
    lines = -(-count // SHEET)
    sheet = np.zeros((lines * SHEET, size, size, 3), np.uint8)
    sheet[:count] = pictures
    joined = sheet.reshape(lines, SHEET, size, size, 3).transpose(0, 2, 1, 3, 4).reshape(lines * size, SHEET * size, 3)
    stream = io.BytesIO()
    Image.fromarray(joined).save(stream, "JPEG", quality=80)
    return base64.b64encode(stream.getvalue()).decode(), size
