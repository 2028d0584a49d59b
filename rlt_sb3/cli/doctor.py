"""``rlt doctor``: what a maintainer would ask for, and for each problem the command that mends it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rlt_gym.libero.suites.tasks import SUITE_HORIZONS

PACKAGES = (
    "rlt", "gymnasium", "stable-baselines3", "torch", "numpy", "scipy", "numba", "mujoco", "robosuite", "hf-libero",
    "PyOpenGL", "h5py", "safetensors",
)  # fmt: skip

#: What to install where a GL back end does not work.
GL_FIXES = {
    "egl": "apt-get install libegl1 libgl1-mesa-dri   (with an NVIDIA GPU: its driver's libEGL)",
    "osmesa": "apt-get install libosmesa6",
}

_RENDER = """
import time, mujoco
model = mujoco.MjModel.from_xml_string(
    "<mujoco><worldbody><light pos='0 0 3' castshadow='false'/>"
    "<geom type='plane' size='1 1 .1'/><geom size='.2' pos='0 0 .3'/>"
    "<camera name='c' pos='0 -2 1' xyaxes='1 0 0 0 .5 1'/></worldbody></mujoco>")
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
renderer = mujoco.Renderer(model, 128, 128)
renderer.update_scene(data, "c"); renderer.render()
start = time.perf_counter()
for _ in range(10):
    renderer.update_scene(data, "c"); picture = renderer.render()
took = (time.perf_counter() - start) / 10
assert picture.std() > 1, "the picture is empty"
from OpenGL import GL
print("RENDERED %.1f ms|%s" % (1e3 * took, GL.glGetString(GL.GL_RENDERER).decode()), flush=True)
import os
os._exit(0)
"""

_WORKER_IMPORTS = (
    "import sys, numpy, importlib.util; assert importlib.util.find_spec('libero'), 'no module libero'; "
    "print('Python %d.%d.%d, numpy %s' % (*sys.version_info[:3], numpy.__version__))"
)


@dataclass
class DoctorConfig:
    """
    Settings of ``rlt doctor``.

    :param assets: assets to play with: auto, official, embedded or a folder
    :param suites: suites to play 20 control steps of; none for no rollout
    """

    assets: str = "auto"
    suites: list[str] = field(default_factory=lambda: list(SUITE_HORIZONS))


@dataclass
class Finding:
    """
    What one check has found.

    :param ok: Whether training can run nevertheless.
    :param text: What was found.
    :param fix: A command or a sentence that mends it; also given for what is merely worth knowing.
    """

    ok: bool
    text: str
    fix: str = ""


def check_versions() -> Iterator[Finding]:
    """Report the versions of Python and of packages, the processor and the GPU."""
    yield Finding(True, f"Python {platform.python_version()} on {platform.platform()}, {os.cpu_count()} CPUs")
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            yield Finding(False, f"package {name} is not installed", f"{sys.executable} -m pip install {name}")
    yield Finding(True, ", ".join(found))
    try:
        import torch
    except Exception as error:
        yield Finding(False, f"torch cannot be imported: {error}", f"{sys.executable} -m pip install torch")
        return
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield Finding(True, f"torch sees {', '.join(names) if names else 'no GPU; everything runs on the CPU'}")


def check_gl() -> Iterator[Finding]:
    """Try each back end in a separate process, since MuJoCo binds one at import."""
    works = {}
    for backend in GL_FIXES:
        environment = {**os.environ, "MUJOCO_GL": backend, "PYOPENGL_PLATFORM": backend}
        try:
            done = subprocess.run(
                [sys.executable, "-c", _RENDER], capture_output=True, text=True, timeout=120, env=environment
            )
            works[backend] = "RENDERED" in done.stdout
            lines = done.stdout.strip().splitlines() if works[backend] else done.stderr.strip().splitlines()
            output = lines[-1] if lines else f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            works[backend], output = False, "no picture within 120 s"
        if works[backend]:
            took, driver = output.removeprefix("RENDERED ").split("|")
            yield Finding(True, f"GL back end {backend} draws a 128-pixel picture in {took} ({driver})")
        else:  # one back end is enough
            yield Finding(True, f"GL back end {backend} does not work: {output[:150]}", GL_FIXES[backend])
    chosen = os.environ.get("MUJOCO_GL") or ("egl" if Path("/dev/nvidia0").exists() else "osmesa")
    if works.get(chosen):
        yield Finding(True, f"workers draw with {chosen}")
    elif any(works.values()):
        other = next(name for name, fine in works.items() if fine)
        yield Finding(False, f"workers would draw with {chosen}, which does not work", f"export MUJOCO_GL={other}")
    else:
        yield Finding(False, "no GL back end works, so there are no pictures", GL_FIXES["osmesa"])


def check_assets(assets: str) -> Iterator[Finding]:
    """
    Report where the official assets were looked for, and which assets are in use.

    :param assets: auto, official, embedded or a folder
    :return: what was found
    """
    from rlt_gym.libero.assets.resolve import missing_files, official_locations, resolve_assets

    for what, folder in official_locations():
        if not folder.is_dir():
            yield Finding(True, f"official assets: {what} {folder} does not exist")
        else:
            missing = missing_files(folder)
            lacks = f"lacks {len(missing)} needed files, first {missing[0]}" if missing else "complete"
            yield Finding(True, f"official assets: {what} {folder} {lacks}")
    try:
        used = resolve_assets(assets)
    except ValueError as error:
        yield Finding(False, str(error), "rlt assets check   (lists what is missing), or unset RLT_LIBERO_ASSETS")
        return
    note = (
        "rlt assets download, or export RLT_LIBERO_ASSETS=FOLDER   (only to use the official meshes)"
        if used.kind == "embedded"
        else ""
    )
    yield Finding(True, f"assets in use: {used.kind}, {used.path}", note)


def check_places() -> Iterator[Finding]:
    """Check that folders are writable, and report the memory."""
    from rlt_gym.libero.suites.folders import cache_dir

    for folder, variable in ((cache_dir(), "RLT_CACHE"), (Path(tempfile.gettempdir()), "TMPDIR")):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
            yield Finding(True, f"{folder} is writable")
        except OSError as error:
            yield Finding(False, f"{folder} is not writable: {error}", f"export {variable}=FOLDER_OF_YOURS")
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free / 1e6
        fix = "" if free > 64 else "docker run --shm-size=1g ..."
        yield Finding(free > 16, f"/dev/shm has {free:.0f} MB free", fix)


def check_interpreter() -> Iterator[Finding]:
    """Check the interpreter that workers run under."""
    path = os.path.expanduser(os.environ.get("RLT_WORKER_PYTHON", sys.executable))
    what = "RLT_WORKER_PYTHON" if "RLT_WORKER_PYTHON" in os.environ else "this interpreter"
    try:
        done = subprocess.run([path, "-c", _WORKER_IMPORTS], capture_output=True, text=True, timeout=120)
    except OSError as error:
        yield Finding(False, f"workers run under {path} ({what}): {error}", "unset RLT_WORKER_PYTHON")
        return
    if done.returncode == 0:
        yield Finding(True, f"workers run under {path} ({what}): {done.stdout.strip()}")
    else:
        output = (done.stderr.strip().splitlines() or ["it failed"])[-1]
        yield Finding(False, f"workers run under {path} ({what}): {output}", f"{path} -m pip install hf-libero==0.1.4")


def check_rollouts(assets: str, suites: list[str]) -> Iterator[Finding]:
    """
    Play twenty control steps of each suite's first task in a worker, with pictures.

    :param assets: auto, official, embedded or a folder
    :param suites: names of suites
    :return: what was found
    """
    from rlt_gym.libero.vector_env import LiberoVectorEnv

    for suite in suites:
        start = time.perf_counter()
        try:
            env = LiberoVectorEnv(1, suite, [0], chunk_length=10, assets=assets, init_states="eval")
        except Exception as error:
            yield Finding(False, f"{suite}: {_last_line(error)}", _rollout_fix(error))
            continue
        try:
            env.reset()
            ready = time.perf_counter() - start
            for _ in range(2):
                observation = env.step(np.zeros((1, 10, 7), dtype=np.float32))[0]
            per_step = (time.perf_counter() - start - ready) / 20
            empty = [key for key in ("agentview", "wrist") if observation[key].std() < 1]
            memory = max((_pss_mb(pid) for pid in _descendants(os.getpid())), default=0.0)
            text = f"{suite}: ready in {ready:.1f} s, {1e3 * per_step:.0f} ms per control step, {memory:.0f} MB"
            if empty:
                yield Finding(False, f"{text}, but {empty[0]} is one color", GL_FIXES["osmesa"])
            else:
                free = _available_mb()
                fits = f", {int(free / memory)} such workers fit into the free memory" if memory and free else ""
                yield Finding(True, text + fits)
        except Exception as error:
            yield Finding(False, f"{suite}: {_last_line(error)}", _rollout_fix(error))
        finally:
            env.close()


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1][:300] if lines else type(error).__name__


def _rollout_fix(error: Exception) -> str:
    text = str(error)
    if "GL" in text:
        return "export MUJOCO_GL=osmesa PYOPENGL_PLATFORM=osmesa"
    if "assets" in text or "No such file" in text or "Error opening file" in text:
        return "export RLT_LIBERO_ASSETS=FOLDER_OF_THE_OFFICIAL_ASSETS"
    return "the traceback: python -c \"import gymnasium as g; g.make_vec('LIBERO-v0', suite='SUITE').reset()\""


def _descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += [int(child), *_descendants(int(child))]
    return found


def _pss_mb(pid: int) -> float:
    """Measure the memory of a process; pages that n processes share count 1/n."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1e3
    except OSError:
        pass
    return 0.0


def _available_mb() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 1e3
    return 0.0


def doctor(config: DoctorConfig) -> None:
    """
    Print what was found, then what to do.

    :param config: settings of the command
    :raises ValueError: An unknown suite.
    :raises SystemExit: With status 1 if training cannot run.
    """
    unknown = sorted(set(config.suites) - set(SUITE_HORIZONS))
    if unknown:
        raise ValueError(f"suites has {unknown[0]!r}; known are {', '.join(SUITE_HORIZONS)}")
    parts: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("Versions", check_versions),
        ("Pictures", check_gl),
        ("Assets", lambda: check_assets(config.assets)),
        ("Folders", check_places),
        ("Workers", check_interpreter),
        ("Rollouts", lambda: check_rollouts(config.assets, config.suites)),
    ]
    findings = []
    for title, check in parts:
        print(f"{title}", flush=True)
        for finding in check():
            findings.append(finding)
            print(f"  {'ok' if finding.ok else 'PROBLEM'}  {finding.text}", flush=True)
            if finding.fix:
                print(f"      {'fix' if not finding.ok else 'note'}: {finding.fix}", flush=True)
    problems = [finding for finding in findings if not finding.ok]
    if problems:
        print(f"\n{len(problems)} problem{'s' if len(problems) > 1 else ''}; training cannot run. To do:")
        for finding in problems:
            print(f"  {finding.fix}")
        raise SystemExit(1)
    print("\nTraining can run.")
