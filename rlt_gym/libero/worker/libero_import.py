"""Import LIBERO in a worker without its prompt, its warnings, its log file in /tmp and its asset download.

Call :func:`prepare_libero` before the first import of ``libero``, ``robosuite`` or ``mujoco``.
"""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

from rlt_gym.libero.suites.folders import cache_dir, libero_root


def _write_config(folder: Path) -> None:
    """LIBERO calls ``input()`` at import when it finds no config file, which ends a worker with ``EOFError``."""
    root = libero_root()
    entries = {
        "benchmark_root": root,
        "bddl_files": root / "bddl_files",
        "init_states": root / "init_files",
        "datasets": root.parent / "datasets",
        "assets": root / "assets",
    }
    text = "".join(f"{key}: {path}\n" for key, path in entries.items())
    path = folder / "config.yaml"
    if path.exists() and path.read_text() == text:
        return
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".config.{os.getpid()}.yaml"
    temporary.write_text(text)
    os.replace(temporary, path)  # several workers may do this at once


def prepare_libero(assets_path: str | os.PathLike[str]) -> None:
    """
    Make ``import libero`` quiet and fast, and point it at a folder of assets.

    :param assets_path: Folder laid out like LIBERO's ``assets``.
    """
    # robosuite forces EGL when nothing is set; without a GPU that is Mesa in a slower dress, with noise at exit.
    if "MUJOCO_GL" not in os.environ:
        os.environ["MUJOCO_GL"] = "egl" if Path("/dev/nvidia0").exists() else "osmesa"
    os.environ.setdefault("PYOPENGL_PLATFORM", os.environ["MUJOCO_GL"])
    # Mesa's software rasteriser: one worker per core renders in its own thread, more threads only fight.
    os.environ.setdefault("LP_NUM_THREADS", "0")
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    # site-packages may not be writable, and every worker would then compile for 4 s.
    os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_dir() / "numba"))
    config = cache_dir() / "libero-config"
    _write_config(config)
    os.environ["LIBERO_CONFIG_PATH"] = str(config)

    # Without this module robosuite warns three times and opens a log file in /tmp that only its first user may write.
    macros = types.ModuleType("robosuite.macros_private")
    sys.modules.setdefault("robosuite.macros_private", macros)

    import libero.libero

    libero.libero._assets_path_cache = str(assets_path)
