"""One progress bar with a time estimate over the unlike phases of a run."""

from __future__ import annotations

import sys
from typing import Any


def quiet_bar(**kwargs: Any) -> Any:
    """
    A tqdm bar without tqdm's monitor thread, which nothing would ever stop.

    :param kwargs: of tqdm
    """
    from tqdm import tqdm

    class Bar(tqdm):
        monitor_interval = 0

    return Bar(**kwargs)


class Progress:
    """A tqdm bar whose unit is the cost of a chunk. Phases get their share from a plan that may be corrected later.

    :param enabled: show the bar; messages are printed in any case
    """

    def __init__(self, enabled: bool = True):
        interactive = sys.stderr.isatty()
        self._costs: dict[str, tuple[float, int]] = {}
        self._done: dict[str, float] = {}
        self._phase = ""
        # A log file gets a line now and then instead of a redrawn one.
        self._bar = quiet_bar(
            total=1.0,
            disable=not enabled,
            mininterval=0.5 if interactive else 30.0,
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
        self._refresh()

    def phase(self, name: str) -> None:
        """Enter (or come back to) a phase."""
        if name not in self._costs:
            raise ValueError(f"Unknown phase {name!r}; the plan has {sorted(self._costs)}.")
        self._phase = name
        self._bar.set_description_str(name, refresh=False)
        self._refresh()

    def advance(self, steps: float) -> None:
        """Count steps of the present phase."""
        self.set_fraction(self._done.get(self._phase, 0.0) + steps / max(1, self._costs[self._phase][1]))

    def set_fraction(self, fraction: float) -> None:
        """Set how much of the present phase is done."""
        self._done[self._phase] = min(1.0, fraction)
        self._refresh()

    def say(self, message: str) -> None:
        """Print a line above the bar."""
        self._bar.write(message, file=sys.stdout)
        sys.stdout.flush()

    def close(self) -> None:
        """Take the bar away."""
        self._bar.close()

    def _refresh(self) -> None:
        done = sum(cost * self._done.get(name, 0.0) for name, (cost, _) in self._costs.items())
        # A corrected plan may put the bar back a little; tqdm only moves by differences.
        self._bar.update(done - self._bar.n)
