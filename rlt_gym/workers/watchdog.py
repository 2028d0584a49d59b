"""A worker must not outlive its environment's process, however that ends and whatever the worker is doing.

Three means, since each has a hole. The kernel's own parent-death signal follows the *thread* that started the
process, so it is used only below the zygote, whose main thread lives as long as it does. The *lifeline* is a socket on
which nothing is ever sent: when its other end closes, the kernel kills this process, even one that is stopped or
stuck in C code; but a process forked from the parent may hold that other end open. A watchdog thread looks at the
parent itself twice a second; but it needs the interpreter lock.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import threading
from typing import Callable

_F_SETSIG = 10  # fcntl(2); Python has no name for it
_O_ASYNC = 0o20000
_PR_SET_PDEATHSIG = 1
_PERIOD_MS = 500


def start_time(pid: int) -> str | None:
    """
    When a process was started.

    :param pid: Its id.
    :return: Kernel's ticks, or ``None`` if there is no such process or it is a zombie. Together with the id this tells
        processes apart although ids are used again.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def kill_me_when_closed(descriptor: int) -> bool:
    """
    Have the kernel send SIGKILL to this process when the other end of a silent socket closes.

    :param descriptor: This end of the socket.
    :return: Whether this kernel can.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(descriptor, _F_SETSIG, int(signal.SIGKILL))
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | _O_ASYNC)
    except OSError:
        return False
    return True


def kill_me_with_parent(parent: int) -> None:
    """
    Die with the thread that forked this process.

    :param parent: Id of the parent, to notice that it has died before this call.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def alive_checker(pid: int) -> Callable[[], bool]:
    """
    Remember a process, not only its id, which may be used again.

    :param pid: Its id.
    :return: A function that tells whether that process is still there.
    """
    born = start_time(pid)
    return lambda: born is not None and start_time(pid) == born


def watch(descriptor: int, owner: int) -> None:
    """
    Tie this process to another one.

    :param descriptor: This end of the lifeline.
    :param owner: Id of the process that owns the environment.
    """
    kill_me_when_closed(descriptor)
    owner_lives = alive_checker(owner)

    def patrol() -> None:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        while not poller.poll(_PERIOD_MS) and owner_lives():
            pass
        os._exit(1)  # from any thread, whatever the main one is doing

    threading.Thread(target=patrol, name="rlt-lifeline", daemon=True).start()
