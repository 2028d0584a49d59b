"""A progress bar with one time estimate over all phases of a run."""

from __future__ import annotations

import sys
import time
from typing import Any


def quiet_bar(**kwargs: Any) -> Any:
    """
    Make a tqdm bar without tqdm's monitor thread, which nothing would ever stop.

    :param kwargs: of tqdm
    """
    from tqdm import tqdm

    class Bar(tqdm):
        monitor_interval = 0

    return Bar(**kwargs)


class Progress:
    """A tqdm bar whose unit is the cost of a chunk. Phases get their share from a plan that may be corrected later.

    The bar is drawn on stderr if that is a terminal. Where stdout or stderr is none (a log file, a pipe), stdout gets a
    line now and then: share, time, time left, phase.

    :param enabled: show the bar or print the lines; messages are printed in any case
    :param line_every: least seconds between two lines
    """

    def __init__(self, enabled: bool = True, line_every: float = 30.0):
        interactive = sys.stderr.isatty()
        self._costs: dict[str, tuple[float, int]] = {}
        self._done: dict[str, float] = {}
        self._before: dict[str, float] = {}  # what of it was done before this run began
        self._phase = ""
        self._line_every = line_every if enabled and not (interactive and sys.stdout.isatty()) else float("inf")
        self._last_line = time.monotonic()
        self._bar = quiet_bar(
            total=1.0,
            disable=not enabled,
            file=sys.stderr if interactive else _Nowhere(),
            mininterval=0.5,
            miniters=0,  # else a slow phase after a quick one is not shown for minutes
            smoothing=0.05,
            bar_format="{percentage:3.0f}%|{bar:24}| {elapsed}, about {remaining} left  {desc}",
            dynamic_ncols=interactive,
        )

    def plan(self, costs: dict[str, tuple[float, int]]) -> None:
        """Set the phases.

        :param costs: name -> (cost of the phase, number of steps that :meth:`advance` will count)
        """
        self._costs = dict(costs)
        self._bar.total = sum(cost for cost, _ in costs.values())
        self._move()

    def skip(self, name: str, fraction: float = 1.0) -> None:
        """
        Say that a phase was done before this run began: it counts for the share and not for the speed.

        :param name: the phase
        :param fraction: how much of it
        """
        self._done[name] = self._before[name] = min(1.0, fraction)
        self._move()

    def phase(self, name: str) -> None:
        """
        Enter a phase, or return to it.

        :param name: name of the phase
        :raises ValueError: if the plan has no such phase
        """
        if name not in self._costs:
            raise ValueError(f"Unknown phase {name!r}; the plan has {sorted(self._costs)}.")
        self._phase = name
        self._bar.set_description_str(name, refresh=False)
        self._refresh()

    def advance(self, steps: float) -> None:
        """
        Count steps of the present phase.

        :param steps: how many more
        """
        self.set_fraction(self._done.get(self._phase, 0.0) + steps / max(1, self._costs[self._phase][1]))

    def set_fraction(self, fraction: float) -> None:
        """
        Set how much of the present phase is done.

        :param fraction: from 0 to 1
        """
        self._done[self._phase] = min(1.0, fraction)
        self._refresh()

    def say(self, message: str) -> None:
        """
        Print a line above the bar.

        :param message: the line
        """
        self._bar.write(message, file=sys.stdout)
        sys.stdout.flush()

    def close(self) -> None:
        """Take the bar away."""
        self._bar.close()

    def _cost(self, fractions: dict[str, float]) -> float:
        return sum(cost * fractions.get(name, 0.0) for name, (cost, _) in self._costs.items())

    def _move(self) -> None:
        """Put the bar where it belongs without taking that for work done: tqdm tells the speed from its own steps."""
        self._bar.initial = self._cost(self._before)
        self._bar.n = self._bar.last_print_n = self._cost(self._done)
        self._refresh()

    def _refresh(self) -> None:
        self._bar.update(self._cost(self._done) - self._bar.n)
        now = time.monotonic()
        if now - self._last_line >= self._line_every:
            self._last_line = now
            self.say(self.line())

    def line(self) -> str:
        """Return what the bar shows, as a line of a log."""
        form = "{percentage:3.0f} % after {elapsed}, about {remaining} left: {desc}"
        return self._bar.format_meter(**(self._bar.format_dict | {"bar_format": form, "ncols": None}))


class _Nowhere:
    """The bar's output where there is no terminal."""

    def write(self, text: str) -> None:
        """:param text: not written"""

    def flush(self) -> None:
        """Do nothing."""
