"""Which folder of assets is chosen, and what is reported where there is none."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

pytest.importorskip("libero")
from rlt_gym.libero.assets import resolve, resolve_assets
from rlt_gym.libero.assets.catalog import CATALOG
from rlt_gym.libero.assets.groceries import CREAM_CHEESE
from rlt_gym.libero.assets.schema import Scene


@pytest.fixture
def no_official(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("RLT_LIBERO_ASSETS", raising=False)
    monkeypatch.setattr(resolve, "libero_root", lambda: tmp_path / "package")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    resolve._say_embedded.cache_clear()
    return tmp_path


def _fake_official(folder: Path) -> Path:
    for entry in CATALOG:
        (folder / entry.path).parent.mkdir(parents=True, exist_ok=True)
        (folder / entry.path).touch()
    return folder


def test_auto_falls_back_and_says_so_once(no_official: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="rlt_gym.libero.assets.resolve"):
        info = resolve_assets()
        resolve_assets("auto")
    assert info.kind == "embedded"
    assert (info.path / CATALOG[0].path).is_file()
    assert len([r for r in caplog.records if "embedded" in r.getMessage()]) == 1


@pytest.mark.parametrize("where", ["package/assets", "home/.cache/libero/assets"])
def test_auto_takes_official_ones(no_official: Path, where: str) -> None:
    folder = _fake_official(no_official / where)
    for assets in ("auto", "official"):
        info = resolve_assets(assets)
        assert (info.path, info.kind) == (folder.resolve(), "official")
    assert resolve_assets("embedded").kind == "embedded"


def test_environment_variable_comes_first(no_official: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_official(no_official / "package/assets")
    monkeypatch.setenv("RLT_LIBERO_ASSETS", str(_fake_official(no_official / "mine")))
    assert resolve_assets().path == (no_official / "mine").resolve()
    monkeypatch.setenv("RLT_LIBERO_ASSETS", str(no_official / "typo"))
    with pytest.raises(ValueError, match=r"RLT_LIBERO_ASSETS.*typo.*does not exist"):
        resolve_assets()
    assert resolve_assets("embedded").kind == "embedded"


def test_missing_official_says_where_it_looked(no_official: Path) -> None:
    with pytest.raises(ValueError, match=r"Looked at.*package.*RLT_LIBERO_ASSETS"):
        resolve_assets("official")


def test_own_folder(no_official: Path) -> None:
    with pytest.raises(ValueError, match="is no folder"):
        resolve_assets(no_official / "nothing")
    folder = _fake_official(no_official / "own")
    assert resolve_assets(folder).kind == "custom"
    assert resolve_assets(str(folder)).path == folder.resolve()
    (folder / CREAM_CHEESE.path).unlink()
    with pytest.raises(ValueError, match=r"cream_cheese\.xml"):
        resolve_assets(folder)
    shutil.rmtree(folder / "scenes")
    scenes = sum(isinstance(entry, Scene) for entry in CATALOG)
    with pytest.raises(ValueError, match=f"{scenes + 1} of"):
        resolve_assets(folder)
