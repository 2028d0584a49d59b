"""Which OpenGL the workers draw with: the GPU through EGL where that works, OSMesa on the CPU otherwise.

Decided once, before a worker starts: MuJoCo and PyOpenGL bind to one of them when they are imported. The trial runs in
a separate process, so that no GL library is loaded into the training process.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import json
import logging
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

logger = logging.getLogger(__name__)

_EGL_CUDA_DEVICE_NV = 0x323A
_MAX_DEVICES = 64


@dataclass(frozen=True)
class GLChoice:
    """
    How to draw: the library and the device.

    :param backend: Value of ``MUJOCO_GL``.
    :param egl_device: Index of the EGL device (``MUJOCO_EGL_DEVICE_ID``), or ``None`` for the first that works.
    """

    backend: str
    egl_device: int | None = None

    def environment(self) -> dict[str, str]:
        """
        Environment variables that make a worker draw this way.

        :return: Their values by name.
        """
        result = {"MUJOCO_GL": self.backend}
        if self.backend in ("egl", "osmesa"):
            result["PYOPENGL_PLATFORM"] = self.backend
        if self.egl_device is not None:
            result["MUJOCO_EGL_DEVICE_ID"] = str(self.egl_device)
        return result


def cuda_index(environment: Mapping[str, str]) -> int:
    """
    Which GPU this process computes on.

    :param environment: Environment variables.
    :return: Number of the GPU that this process computes on, as the driver counts: the first of
        ``CUDA_VISIBLE_DEVICES``, else 0.
    """
    first = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    return int(first) if first.isdigit() else 0


def egl_index(cuda: int, cuda_of_egl: Sequence[int | None]) -> int | None:
    """
    EGL counts devices in another order than CUDA, and includes software devices.

    :param cuda: Number of the GPU in CUDA's order.
    :param cuda_of_egl: For each EGL device its CUDA number, or ``None`` if it has none.
    :return: Index of the EGL device, or ``None`` if there is none for this GPU.
    """
    return list(cuda_of_egl).index(cuda) if cuda in cuda_of_egl else None


def query_cuda_indices(egl: Any) -> list[int | None]:
    """
    Ask EGL for the CUDA number of each device (EGL_NV_device_cuda).

    :param egl: ``libEGL`` as ctypes loads it.
    :return: One entry per EGL device.
    """
    egl.eglGetProcAddress.restype = ctypes.c_void_p
    address = [egl.eglGetProcAddress(name) for name in (b"eglQueryDevicesEXT", b"eglQueryDeviceAttribEXT")]
    if not all(address):
        return []
    integer = ctypes.POINTER(ctypes.c_int)
    handles = ctypes.POINTER(ctypes.c_void_p)
    query_devices = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_int, handles, integer)(address[0])
    attribute = ctypes.POINTER(ctypes.c_ssize_t)
    query_attribute = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_void_p, ctypes.c_int, attribute)(address[1])
    devices, count = (ctypes.c_void_p * _MAX_DEVICES)(), ctypes.c_int()
    if not query_devices(_MAX_DEVICES, devices, ctypes.byref(count)):
        return []
    result: list[int | None] = []
    for device in devices[: count.value]:
        value = ctypes.c_ssize_t(-1)
        found = query_attribute(device, _EGL_CUDA_DEVICE_NV, ctypes.byref(value))
        result.append(value.value if found and value.value >= 0 else None)
    return result


def main(argument: str) -> None:
    """
    Run the trial: ``launch.py rlt_gym.workers.gl CUDA_INDEX`` prints what it found as JSON.

    :param argument: Number of the GPU in CUDA's order.
    """
    report: dict[str, Any] = {"ok": False, "device": None}
    try:
        report["cuda"] = query_cuda_indices(ctypes.CDLL("libEGL.so.1"))
        report["device"] = egl_index(int(argument), report["cuda"])
        os.environ.update(GLChoice("egl", report["device"]).environment())
        from mujoco.egl import GLContext

        context = GLContext(64, 64)
        context.make_current()
        from OpenGL import GL

        report["renderer"] = GL.glGetString(GL.GL_RENDERER).decode()
        report["ok"] = True
    except BaseException as error:
        report["error"] = f"{type(error).__name__}: {error}"
    print("\n" + json.dumps(report), flush=True)
    os._exit(0)  # EGL libraries raise in their destructors


@functools.lru_cache(maxsize=None)
def try_egl(python: str, cuda: int) -> dict[str, Any]:
    """
    Try to draw on a GPU, in a process that may crash.

    :param python: Interpreter of the workers.
    :param cuda: GPU to draw on, in CUDA's order.
    :return: ``ok``; the EGL ``device`` index; ``cuda`` numbers of all EGL devices; ``renderer`` or ``error``.
    """
    environment = {**os.environ, "MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "egl"}
    environment.pop("MUJOCO_EGL_DEVICE_ID", None)
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "launch.py")
    try:
        done = subprocess.run(
            [python, script, __name__, str(cuda)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, IndexError, ValueError) as error:
        return {"ok": False, "device": None, "error": f"the trial itself failed: {error}"}


@functools.lru_cache(maxsize=None)
def say_no_egl(reason: str) -> None:
    """
    Warn, once per process and reason.

    :param reason: Why EGL does not work.
    """
    logger.warning(
        "EGL does not work here (%s): drawing with OSMesa on the CPU. Set MUJOCO_GL=osmesa to skip the trial.", reason
    )


def choose_gl(environment: Mapping[str, str], python: str = sys.executable) -> GLChoice:
    """
    Choose what workers draw with.

    :param environment: Environment variables. ``MUJOCO_GL`` decides if it is there; EGL is tried if it is asked for or
        if nothing is and a GPU is there. ``MUJOCO_EGL_DEVICE_ID`` goes before the GPU of ``CUDA_VISIBLE_DEVICES``.
    :param python: Interpreter of the workers.
    :return: The choice.
    """
    wanted = environment.get("MUJOCO_GL", "").strip().lower()
    if not wanted:
        wanted = "egl" if glob.glob("/dev/nvidia[0-9]*") else "osmesa"
    if wanted != "egl":
        return GLChoice(wanted)
    found = try_egl(python, cuda_index(environment))
    if not found["ok"]:
        say_no_egl(found.get("error", "no reason given"))
        return GLChoice("osmesa")
    chosen = environment.get("MUJOCO_EGL_DEVICE_ID", "")
    return GLChoice("egl", int(chosen) if chosen.isdigit() else found["device"])
