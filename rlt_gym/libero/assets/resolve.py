"""Choose the folder of assets that a simulator loads: the official one where it is found, else the embedded pack."""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from rlt_gym.libero.assets.builder import embedded_assets
from rlt_gym.libero.assets.catalog import CATALOG
from rlt_gym.libero.suites.folders import libero_root

logger = logging.getLogger(__name__)

ENVIRONMENT_VARIABLE = "RLT_LIBERO_ASSETS"
_DOWNLOAD = (
    "download LIBERO's assets (`from libero.libero.utils.download_utils import download_assets_from_huggingface`)"
)


@dataclass(frozen=True)
class AssetsInfo:
    """
    The folder of assets in use and its kind.

    :param path: Folder laid out like LIBERO's ``assets``.
    :param kind: ``"official"``, ``"embedded"`` or ``"custom"``.
    """

    path: Path
    kind: str


def official_locations() -> list[tuple[str, Path]]:
    """
    Where the official assets may lie.

    :return: Best first, (what it is, folder). Folders need not exist.
    """
    places = []
    if os.environ.get(ENVIRONMENT_VARIABLE):
        places.append((f"${ENVIRONMENT_VARIABLE}", Path(os.environ[ENVIRONMENT_VARIABLE]).expanduser()))
    places.append(("LIBERO's own folder", libero_root() / "assets"))
    # Where hf-libero's download_assets_from_huggingface puts them; it does not follow HF_HOME or XDG_CACHE_HOME.
    places.append(("LIBERO's download", Path.home() / ".cache" / "libero" / "assets"))
    return places


def missing_files(folder: Path) -> list[str]:
    """
    List the files that the supported tasks need and that a folder lacks.

    :param folder: Folder that should be laid out like LIBERO's ``assets``.
    :return: Files that the supported tasks need and that are not there.
    """
    return [entry.path for entry in CATALOG if not (folder / entry.path).is_file()]


def _official() -> tuple[AssetsInfo | None, list[str]]:
    tried: list[str] = []
    for what, folder in official_locations():
        missing = missing_files(folder) if folder.is_dir() else []
        if folder.is_dir() and not missing:
            return AssetsInfo(folder.resolve(), "official"), tried
        reason = f"lacks {missing[0]}" if missing else "does not exist"
        if what.startswith("$"):
            # Somebody asked for this folder by name: falling back silently would run other experiments than they think.
            raise ValueError(f"{what} is {folder}, which {reason}. Correct or unset it.")
        tried.append(f"{what} {folder} ({reason})")
    return None, tried


@functools.cache
def _say_embedded(tried: str) -> None:
    logger.warning("official LIBERO assets not found (%s): using the embedded ones, made of primitive shapes", tried)


def resolve_assets(assets: str | os.PathLike[str] = "auto") -> AssetsInfo:
    """
    Choose the folder of assets to load.

    :param assets: ``"auto"`` (official if found, else embedded, which it says once), ``"official"``, ``"embedded"``, or
        a folder.
    :return: Which folder to load.
    :raises ValueError: If the official assets or the given folder are missing or incomplete.
    """
    if assets == "embedded":
        return AssetsInfo(embedded_assets(), "embedded")
    if assets in ("auto", "official"):
        info, tried = _official()
        if info is not None:
            return info
        if assets == "auto":
            _say_embedded("; ".join(tried))
            return AssetsInfo(embedded_assets(), "embedded")
        raise ValueError(
            f"assets='official' but none found. Looked at: {'; '.join(tried)}. "
            f"Set ${ENVIRONMENT_VARIABLE} to their folder, {_DOWNLOAD}, or use assets='embedded'."
        )
    folder = Path(assets).expanduser()
    if not folder.is_dir():
        raise ValueError(
            f"assets={str(assets)!r} is no folder. "
            "Give 'auto', 'official', 'embedded', or a folder laid out like LIBERO's assets."
        )
    missing = missing_files(folder)
    if missing:
        raise ValueError(
            f"assets folder {folder} lacks {missing[0]} ({len(missing)} of {len(CATALOG)} needed files missing). "
            "It must be laid out like LIBERO's assets (articulated_objects/, scenes/, stable_hope_objects/, ...)."
        )
    return AssetsInfo(folder.resolve(), "custom")
