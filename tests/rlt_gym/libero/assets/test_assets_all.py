"""Tasks of all suites on the embedded assets: things come to rest, predicates of the goal become true and false.

A slice runs here; ``rlt assets verify`` and ``pytest -m all_tasks`` do it for all 130 tasks.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("libero")

from rlt_gym.libero.assets import embedded_assets
from rlt_gym.libero.assets.catalog import CATALOG
from rlt_gym.libero.assets.command import AssetsConfig
from rlt_gym.libero.assets.fixtures import MICROWAVE
from rlt_gym.libero.assets.needed import missing_by_suite, task_entries
from rlt_gym.libero.assets.sheet import contact_sheet
from rlt_gym.libero.suites.tasks import SUITE_HORIZONS, get_task, get_tasks, load_init_states
from rlt_gym.libero.worker.libero_import import prepare_libero
from rlt_sb3.cli.main import main

# Drawer, stove and pot, microwave, caddy, shelf, tray: each fixture and each kind of predicate is in one of them.
SLICE = (
    ("libero_object", 0),
    ("libero_spatial", 4),
    ("libero_goal", 9),
    ("libero_10", 2),
    ("libero_10", 3),
    ("libero_10", 5),
    ("libero_10", 9),
    ("libero_90", 42),
    ("libero_90", 62),
)


@pytest.fixture(autouse=True)
def pack(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = embedded_assets()
    prepare_libero(folder)
    yield folder


@pytest.mark.sim
@pytest.mark.parametrize(("suite", "task_id"), SLICE)
def test_task_on_embedded_assets(suite: str, task_id: int) -> None:
    from rlt_gym.libero.assets.verify import verify_task

    report = verify_task(suite, task_id, states=(0, 49))
    assert report.problems == []
    assert len(report.rest) == 2


@pytest.mark.sim
def test_verification_sees_what_is_wrong() -> None:
    """The checks themselves: a body in the table, one that flies, a joint with other limits, a goal out of reach."""
    from rlt_gym.libero.assets import verify

    bench = verify.Bench("libero_spatial", 0)
    try:
        state = load_init_states(bench.task)[0]
        bench.start(state)
        bench.settle()
        plate = bench.pose("plate_1")
        assert bench.lowest("plate_1") > 0.9 - 0.002
        assert bench.depth("plate_1") < 0.001
        bench.put("plate_1", plate - np.array([0, 0, 0.02, 0, 0, 0, 0]))
        assert bench.lowest("plate_1") < 0.9 - 0.015
        assert bench.depth("plate_1") > 0.005
        assert bench.depth("plate_1", room=False) == 0
        bench.put("plate_1", bench.pose("cookies_1"))
        assert bench.depth("plate_1", room=False) > 0.005
        goal = bench.goal()[0]
        assert not bench.holds(goal)
        bench.start(state)
        assert bench.make_true(goal) and bench.holds(goal)
        bench.put(goal[1], bench.pose(goal[1]) + np.array([0, 0, 0.3, 0, 0, 0, 0]))
        assert not bench.holds(goal)
        assert not bench.make_true(goal, tries=0)
    finally:
        bench.close()


@pytest.mark.all_tasks
@pytest.mark.sim
@pytest.mark.parametrize("suite", SUITE_HORIZONS)
def test_all_tasks_of_a_suite(suite: str) -> None:
    from rlt_gym.libero.assets.verify import verify_task

    problems = {task.name: verify_task(suite, task.task_id, states=(0, 25, 49)).problems for task in get_tasks(suite)}
    assert {name: found for name, found in problems.items() if found} == {}


# --- which files a task needs ---


def test_catalog_is_what_the_tasks_need() -> None:
    used = {entry.path for suite in SUITE_HORIZONS for task in get_tasks(suite) for entry in task_entries(task)}
    assert used == {entry.path for entry in CATALOG}


def test_entries_of_a_task() -> None:
    names = {Path(entry.path).stem for entry in task_entries(get_task("libero_goal", 0))}
    assert names == {
        "libero_tabletop_base_style", "wooden_cabinet", "flat_stove", "wine_rack",
        "akita_black_bowl", "cream_cheese", "wine_bottle", "plate",
    }  # fmt: skip


def test_missing_files_are_found_with_their_tasks(
    tmp_path: Path, pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "assets"
    shutil.copytree(pack, folder)
    assert main(["assets", "check", "--assets", str(folder)]) == 0
    assert capsys.readouterr().out.count("tasks complete") == len(SUITE_HORIZONS)
    (folder / MICROWAVE.path).unlink()
    (folder / "textures" / "rlt_wicker.png").unlink()  # only the basket has it
    missing = missing_by_suite(folder)
    assert missing["libero_goal"] == missing["libero_spatial"] == {}
    assert missing["libero_object"] == {i: ["textures/rlt_wicker.png"] for i in range(10)}
    assert missing["libero_10"][9] == [MICROWAVE.path]
    assert main(["assets", "check", "--assets", str(folder), "--suites", "[libero_object,libero_10]"]) == 1
    out = capsys.readouterr().out
    assert "0/10 tasks complete" in out and "6/10 tasks complete" in out
    assert f"missing {MICROWAVE.path} (tasks 9)" in out
    (folder / MICROWAVE.path).write_text("<mujoco>")
    assert "no XML" in missing_by_suite(folder, ["libero_10"])["libero_10"][9][0]


def test_check_stops_at_the_folder_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLT_LIBERO_ASSETS", str(tmp_path))
    assert main(["assets", "check", "--suites", "[libero_goal]"]) == 1
    out = capsys.readouterr().out
    assert "$RLT_LIBERO_ASSETS" in out and "0/10 tasks complete" in out and "rlt assets download" in out
    assert "LIBERO's own folder" not in out


def test_wrong_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["assets", "check", "--suites", "[libero_mars]"]) == 2
    assert "libero_mars" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"1\.\.50"):
        AssetsConfig("verify", states=0)


@pytest.mark.sim
def test_download_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real function of LIBERO with a hub that cannot be reached, without the hub's client, and cut short."""
    from libero.libero.utils import download_utils

    monkeypatch.setattr(download_utils, "HUGGINGFACE_AVAILABLE", False)
    assert main(["assets", "download"]) == 2
    assert "pip install huggingface_hub" in capsys.readouterr().err

    def unreachable(**kwargs: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(download_utils, "HUGGINGFACE_AVAILABLE", True)
    monkeypatch.setattr(download_utils, "snapshot_download", unreachable, raising=False)
    assert main(["assets", "download", "--folder", str(tmp_path / "new")]) == 2
    err = capsys.readouterr().err
    assert "no route" in err and "HF_ENDPOINT" in err and "RLT_LIBERO_ASSETS" in err

    for name in ("articulated_objects", "stable_scanned_objects", "turbosquid_objects", "stable_hope_objects"):
        (tmp_path / "half" / name).mkdir(parents=True)
    assert main(["assets", "download", "--folder", str(tmp_path / "half")]) == 2
    assert "incomplete" in capsys.readouterr().err


# --- contact sheets ---


def test_sheet_has_every_picture_in_its_place(tmp_path: Path) -> None:
    pictures = [
        (f"{i} a label of many words that does not fit", np.full((64, 64, 3), 40 * i, np.uint8)) for i in range(5)
    ]
    sheet = np.asarray(contact_sheet(pictures, columns=2))
    assert sheet.shape == (3 * (64 + 30 + 4) + 4, 2 * (64 + 4) + 4, 3)
    for i in range(5):
        y, x = 4 + (i // 2) * 98, 4 + (i % 2) * 68
        np.testing.assert_array_equal(sheet[y : y + 64, x : x + 64], pictures[i][1])
        assert sheet[y + 64 : y + 94, x : x + 64].min() < 128  # the label
