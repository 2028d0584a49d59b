"""Starting and ending the processes of workers: forked from a warm zygote, or plain subprocesses."""

from __future__ import annotations

import array
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rlt_gym.workers.backend import WorkerSettings
from rlt_gym.workers.channel import Channel
from rlt_gym.workers.gl import GLChoice, choose_gl
from rlt_gym.workers.shared_memory import anonymous_file

WORKER_STARTS = ("auto", "zygote", "spawn")
_LAUNCH = str(Path(__file__).with_name("launch.py"))


class WorkerError(ChildProcessError):
    """Workers cannot be started, or broke too often. An ``OSError``: the fault is the machine's, not the caller's."""


class WorkerFailure(WorkerError):
    """One worker died, hung or raised. It can be replaced by a new one."""


@dataclass(frozen=True)
class LaunchPlan:
    """
    How workers are started. Raises ``ValueError`` for an interpreter that does not exist, before a process starts.

    :param python: Interpreter of the workers; ``None``: ``RLT_WORKER_PYTHON``, else this one.
    :param start: One of :data:`WORKER_STARTS`; ``"auto"`` is the zygote, but a subprocess for another interpreter.
    :param gl: What they draw with.
    """

    python: str
    start: str
    gl: GLChoice = field(default_factory=lambda: GLChoice("osmesa"))

    @classmethod
    def checked(cls, start: str, python: str | os.PathLike[str] | None) -> LaunchPlan:
        """
        Make a plan from what a user asked for.

        :param start: As in the constructor.
        :param python: As in the constructor.
        :return: The plan; OpenGL is not chosen yet.
        :raises ValueError: Unknown way to start, or no such interpreter.
        """
        if start not in WORKER_STARTS:
            raise ValueError(f"worker_start must be one of {WORKER_STARTS}, got {start!r}")
        wanted = python or os.environ.get("RLT_WORKER_PYTHON") or sys.executable
        found = shutil.which(os.path.expanduser(os.fspath(wanted)))
        if found is None:
            origin = "worker_python" if python else "RLT_WORKER_PYTHON"
            raise ValueError(f"{origin} is {os.fspath(wanted)!r}, which is no executable: give an interpreter's path")
        if start == "auto":
            start = "zygote" if found == shutil.which(sys.executable) else "spawn"
        return cls(found, start)

    def with_gl(self) -> LaunchPlan:
        """
        Choose the OpenGL back end, which may take a process that tries EGL.

        :return: A plan with that choice.
        """
        return LaunchPlan(self.python, self.start, choose_gl(os.environ, self.python))

    def environment(self) -> dict[str, str]:
        """
        Environment variables of the processes.

        :return: Their values by name.
        """
        result = {**os.environ, **self.gl.environment(), "PYTHONUNBUFFERED": "1"}
        # One worker per core, and a process with BLAS threads could not be forked safely.
        result.update({name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")})
        # Workers do not compute on GPUs, and robosuite asserts that EGL's device number is among CUDA's.
        result.pop("CUDA_VISIBLE_DEVICES", None)
        if self.python != shutil.which(sys.executable):
            for name in ("PYTHONPATH", "PYTHONHOME"):  # meant for our interpreter
                result.pop(name, None)
        return result

    def popen(self, module: str, argument: str, descriptors: Sequence[int], log: int) -> subprocess.Popen:
        """
        Run :mod:`rlt_gym.workers.launch`, with its output in a log from its first import on.

        :param module: Whose ``main`` it is to call.
        :param argument: For that.
        :param descriptors: What the process inherits.
        :param log: Descriptor of the log.
        :return: The process.
        """
        return subprocess.Popen(
            [self.python, _LAUNCH, module, argument],
            pass_fds=tuple(descriptors),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=self.environment(),
        )


class WorkerProcess(Protocol):
    """What :func:`start_worker` returns."""

    pid: int

    def end(self) -> None:
        """Kill it and wait until it is gone. Safe to call twice."""


def _reap(process: subprocess.Popen) -> None:
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # a starved machine may take its time
        process.wait(timeout=30)


class _Spawned:
    def __init__(self, plan: LaunchPlan, descriptors: Sequence[int], settings: WorkerSettings, slots: int):
        names = ("channel_fd", "lifeline_fd", "pictures_fd", "log_fd")
        arguments: dict[str, Any] = dict(zip(names, descriptors))
        arguments.update(owner=os.getpid(), slots=slots, settings=settings)
        self._process = plan.popen("rlt_gym.workers.worker", json.dumps(arguments), descriptors, arguments["log_fd"])
        self.pid = self._process.pid

    def end(self) -> None:
        _reap(self._process)


class _Forked:
    def __init__(self, zygote: _Zygote, descriptors: Sequence[int], settings: WorkerSettings, slots: int):
        self._zygote = zygote
        self.pid: int = zygote.request("fork", descriptors, settings=settings, slots=slots)

    def end(self) -> None:
        # A dead zygote has taken its workers with it.
        with contextlib.suppress(WorkerFailure):
            self._zygote.request("end", limit=("the time to end a worker", 15.0), child=self.pid)


def _end_zygote(process: subprocess.Popen, control: socket.socket, owner: int) -> None:
    if os.getpid() == owner:  # and not a fork of it
        control.close()
        _reap(process)


class _Zygote:
    """The owner's end of a zygote; lives as long as a worker or an environment refers to it."""

    def __init__(self, plan: LaunchPlan, timeout: float):
        self._timeout = timeout
        self._lock = threading.Lock()
        self._log = anonymous_file("rlt-zygote-log")
        self._control, theirs = socket.socketpair()
        self._channel = Channel(self._control)
        self._number = 0
        arguments = {"control_fd": theirs.fileno(), "owner": os.getpid()}
        self._process = plan.popen("rlt_gym.workers.zygote", json.dumps(arguments), (theirs.fileno(),), self._log)
        theirs.close()
        weakref.finalize(self, _end_zygote, self._process, self._control, os.getpid())
        weakref.finalize(self, os.close, self._log)

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def request(
        self, command: str, descriptors: Sequence[int] = (), limit: tuple[str, float] | None = None, **arguments: Any
    ) -> Any:
        """
        Ask the zygote and wait for its answer.

        :param command: Name of a method of :class:`rlt_gym.workers.zygote.Zygote`.
        :param descriptors: Its first arguments, which are sent along.
        :param limit: Name and seconds of the time-out, if others than usual.
        :param arguments: Its other arguments.
        :return: What it returned.
        :raises WorkerFailure: The zygote raised, died or hung; in the last case it is killed, and its workers with it.
        """
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        setting, timeout = ("worker_timeout", self._timeout) if limit is None else limit
        with self._lock:
            try:
                self._number += 1
                self._control.settimeout(timeout)
                self._control.sendmsg([b"?"], rights)
                self._channel.send((self._number, command, arguments), timeout)
                number = None
                while number != self._number:  # answers that nobody fetched, after an interrupt, are skipped
                    number, status, value = self._channel.receive(timeout)
            except (OSError, EOFError) as error:
                self._process.send_signal(signal.SIGKILL)
                late = f"did not answer within {timeout:g} s ({setting})"
                what = late if isinstance(error, TimeoutError) else f"died ({error!r})"
                raise WorkerFailure(f"The zygote of the workers {what}.\n{tail(self._log)}") from error
        if status == "error":
            raise WorkerFailure(f"The zygote of the workers failed:\n{value}\n{tail(self._log)}")
        return value


#: One per plan, shared by the environments of this process.
_zygotes: weakref.WeakValueDictionary[tuple[int, LaunchPlan], _Zygote] = weakref.WeakValueDictionary()
_zygotes_lock = threading.Lock()


def zygote_for(plan: LaunchPlan, timeout: float) -> _Zygote:
    """
    Find or start the zygote that serves a plan.

    :param plan: How workers are started.
    :param timeout: Seconds it may take to answer.
    :return: The living zygote for it.
    """
    key = (os.getpid(), plan)
    with _zygotes_lock:
        zygote = _zygotes.get(key)
        if zygote is None or not zygote.alive():
            zygote = _zygotes[key] = _Zygote(plan, timeout)
        return zygote


def start_worker(
    plan: LaunchPlan,
    descriptors: Sequence[int],
    settings: WorkerSettings,
    slots: int,
    task_ids: Sequence[int],
    timeout: float,
    build_timeout: float,
) -> WorkerProcess:
    """
    Start one worker.

    :param plan: How.
    :param descriptors: The first four arguments of :func:`rlt_gym.workers.worker.run`.
    :param settings: What it is to play, and how.
    :param slots: Observations that its shared memory holds.
    :param task_ids: Tasks whose models a zygote builds ahead.
    :param timeout: Seconds a zygote may take to answer.
    :param build_timeout: Seconds it may take to import the simulator and to build the models.
    :return: The process.
    :raises WorkerFailure: It did not.
    """
    if plan.start == "spawn":
        return _Spawned(plan, descriptors, settings, slots)
    zygote = zygote_for(plan, timeout)
    zygote.request("prepare", limit=("build_timeout", build_timeout), settings=settings, task_ids=list(task_ids))
    return _Forked(zygote, descriptors, settings, slots)


def tail(log: int, size: int = 3000) -> str:
    """
    Read the end of a log.

    :param log: Descriptor of the log file.
    :param size: Most bytes to read.
    :return: Its last words, or an empty string.
    """
    length = os.fstat(log).st_size
    words = os.pread(log, size, max(0, length - size)).decode(errors="replace").strip()
    return f"Its last output:\n{words}" if words else ""
