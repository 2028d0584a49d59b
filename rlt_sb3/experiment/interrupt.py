"""Delays Ctrl-C until everything is consistent, so that it does not stop the middle of an update."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupt:
    """
    A context in which the first SIGINT or SIGTERM waits until an interruption does no harm.

    The signal sets a flag, which :meth:`check` turns into a ``KeyboardInterrupt``. A second signal interrupts at once,
    wherever the program is.

    Outside the main thread, where Python allows no signal handlers, nothing changes. A SIGINT that is ignored (a
    shell's background job) stays ignored.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def check(self) -> None:
        """
        Call this where the run may stop.

        :raises KeyboardInterrupt: if a signal has come
        """
        if self.requested:
            raise KeyboardInterrupt
