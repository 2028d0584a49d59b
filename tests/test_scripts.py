"""The scripts that make README's picture and table from runs; the help of a part of a benchmark."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from run_helpers import small

from rlt_sb3.experiment.report import read_evaluations
from rlt_sb3.experiment.train import train

ROOT = Path(__file__).parent.parent


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = small(tmp_path_factory.mktemp("runs"))
    config.env = replace(config.env, suite="toys", task_ids=[0])
    config.evaluation.videos = True
    return train(config).run


def test_picture(run, tmp_path):
    script("readme_picture").draw(run, tmp_path / "demo.png")
    with Image.open(tmp_path / "demo.png") as picture:
        assert picture.width > 2 * picture.height
        colors = picture.convert("RGB").getcolors(2**24)
        assert max(count for count, _ in colors) < 0.9 * picture.width * picture.height, "there is something on it"


def test_picture_shows_practice_in_robot_minutes_and_minutes(run, tmp_path, monkeypatch):
    """At 20 Hz, 28,320 control steps are 23.6 minutes; without a frequency only wall minutes are known."""
    picture, drawn = script("readme_picture"), []
    data = read_evaluations(run)
    data["training"] |= {"control_steps": 28_320, "minutes": 5.9}
    monkeypatch.setattr(picture, "read_evaluations", lambda _: data)
    monkeypatch.setattr(picture.plt, "close", drawn.append)
    for frequency, title, label in (
        (20.0, "23.6 robot minutes (6 minutes)", "action chunks, 23.6 robot minutes in all"),
        (None, "6 minutes of practice", "action chunks"),
    ):
        data["control_frequency"] = frequency
        picture.draw(run, tmp_path / "demo.png")
        _, rlt, curve = drawn[-1].axes
        assert rlt.get_title(loc="left").startswith(f"RLT, same initial state, {title}: ")
        assert curve.get_xlabel() == label


def test_strip_leaves_out_the_still_at_the_end(tmp_path):
    """Pictures 0, 10, ..., 190 in gray, the last one for a second more: the strip is 0, ..., 190 evenly."""
    import numpy as np

    from rlt_sb3.common.films import write_video

    picture = script("readme_picture")
    frames = [np.full((64, 64, 3), 10 * shade, dtype=np.uint8) for shade in range(20)]
    write_video(tmp_path / "film.mp4", frames, width=64)
    strip = picture.film_strip(tmp_path / "film.mp4").astype(float)
    step = picture.PIXELS + picture.GAP
    shades = [strip[:, place * step : place * step + picture.PIXELS].mean() for place in range(picture.FRAMES)]
    expected = [round(19 * place / (picture.FRAMES - 1)) * 10 for place in range(picture.FRAMES)]
    assert shades == pytest.approx(expected, abs=6)


def test_row_of_the_table(run):
    data, line = read_evaluations(run), script("readme_results").row(run)
    vla, rlt = data["vla"]["successes"], data["rlt"]["successes"]
    cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
    assert cells[:2] == ["toys 0", "0"] and cells[2].startswith(f"{vla}/6 (") and cells[3].startswith(f"{rlt}/6 (")
    assert [int(part) for part in cells[4].split(" / ")] == [data["comparison"][key] for key in ("fixed", "broken")]
    practicing = [(point.get("candidate") or point["evaluation"])["successes"] for point in data["selection"]]
    assert cells[5] == f"{min(practicing)}/4 (VLA: {data['vla_selection']['successes']}/4)"
    assert cells[6] == f"{data['training']['control_steps'] / 20 / 60:.1f}" and cells[7] == f"{data['minutes']:.0f}"
    assert data["training"]["robot_minutes"] == pytest.approx(data["training"]["control_steps"] / 1200)
    assert data["selection"][0]["robot_minutes"] == pytest.approx(data["selection"][0]["control_steps"] / 1200)
    assert len(cells) == script("readme_results").HEAD.splitlines()[0].count("|") - 1


def test_lowest_evaluation_is_that_of_the_practicing_actor(run, tmp_path):
    """Not that of what ``predict`` plays, which is the VLA until an actor is deployed."""
    data = read_evaluations(run)
    for point, (deployed, practicing) in zip(data["selection"], ((1, 3), (3, 2)), strict=False):
        point["evaluation"] |= {"successes": deployed, "n": 4}
        point["candidate"] = point["evaluation"] | {"successes": practicing}
    (tmp_path / "evaluations.json").write_text(json.dumps(data | {"selection": data["selection"][:2]}))
    assert "| 2/4 (VLA:" in script("readme_results").row(tmp_path)


def test_table_goes_between_the_marks_and_nowhere_else():
    results = script("readme_results")
    readme = (ROOT / "README.md").read_text()
    before, after = readme.split(results.MARKS[0])[0], readme.split(results.MARKS[1])[1]
    assert results.put("new\n", readme) == before + results.MARKS[0] + "new\n" + results.MARKS[1] + after
    with pytest.raises(ValueError, match="one pair of"):
        results.put("new\n", "no marks")


def test_help_of_a_part_of_a_benchmark_asks_nothing(tmp_path):
    """LIBERO asks for its folders when it is imported before it has any."""
    script = ROOT / "benchmarks" / "simulator_parts.py"
    done = subprocess.run(
        [sys.executable, str(script), "--help"], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        env=os.environ | {"LIBERO_CONFIG_PATH": str(tmp_path)}, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.startswith("usage: simulator_parts.py"), done.stderr
    assert "stock_libero.py --parts where" in " ".join(done.stdout.split()) and list(tmp_path.iterdir()) == []
