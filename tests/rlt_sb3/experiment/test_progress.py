"""The share of a run that is done, and the time left, on a terminal and in a log."""

import io

import pytest
from run_helpers import quick

from rlt_sb3.experiment import progress as module
from rlt_sb3.experiment.progress import Progress
from rlt_sb3.experiment.train import resume, train

PLAN = {"before": (100.0, 10), "training": (300.0, 1), "after": (100.0, 10)}


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_clock(bar: Progress, clock: Clock) -> Progress:
    """tqdm looks at the same clock."""
    bar._bar._time = lambda: clock.now
    bar._bar.start_t = bar._bar.last_print_t = clock.now
    return bar


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_a_log_gets_a_line_at_most_every_30_seconds(clock, capsys):
    bar = on_clock(Progress(), clock)
    bar.plan(PLAN)
    bar.phase("training")
    for number in range(1, 101):
        clock.now += 1.0
        bar.set_fraction(number / 200)
    out, err = capsys.readouterr()
    assert [line.split(",")[0] for line in out.splitlines()] == [
        "  9 % after 00:30", " 18 % after 01:00", " 27 % after 01:30",
    ]  # fmt: skip
    assert out.splitlines()[0].endswith("left: training") and err == ""
    clock.now += 600.0  # a slow step: the line comes with its end
    bar.advance(0.0)
    assert capsys.readouterr().out.count("\n") == 1


def test_a_terminal_gets_the_bar_alone(clock, monkeypatch):
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(module.sys, "stdout", out)
    monkeypatch.setattr(module.sys, "stderr", err)
    bar = on_clock(Progress(), clock)
    bar.plan(PLAN)
    bar.phase("training")
    clock.now += 100.0
    bar.set_fraction(0.5)
    assert out.getvalue() == "" and " 30%|" in err.getvalue()


def test_no_progress_prints_nothing(clock, capsys):
    bar = Progress(enabled=False)
    bar.plan(PLAN)
    bar.skip("before")
    bar.phase("training")
    clock.now += 100.0
    bar.set_fraction(0.5)
    assert capsys.readouterr() == ("", "")


def test_what_was_done_before_counts_for_the_share_and_not_for_the_speed(clock):
    bar = on_clock(Progress(), clock)
    bar.plan({name: (10.0 * cost, steps) for name, (cost, steps) in PLAN.items()})
    bar.skip("before")
    bar.skip("training", 0.5)
    bar.plan(PLAN)
    assert "50 %" in bar.line()
    bar.phase("training")
    for number in range(1, 61):  # a tenth of the training, 30 of 500, in a minute
        clock.now += 1.0
        bar.set_fraction(0.5 + number / 600)
    # 220 are left, at 30 a minute
    assert bar.line() == " 56 % after 01:00, about 07:20 left: training"


def test_a_resumed_run_starts_at_the_share_of_its_checkpoint(tmp_path, monkeypatch):
    run = train(quick(tmp_path, total_chunks=40)).run
    shares = []
    phase = Progress.phase
    monkeypatch.setattr(
        Progress, "phase", lambda self, name: (phase(self, name), shares.append((name, dict(self._done), self.line())))
    )
    resume(run, total_chunks=80, progress=True)
    name, done, line = shares[0]
    assert name == "training"
    assert done == {
        "frozen VLA, held-out states": 1.0, "frozen VLA, selection states": 1.0, "training": 0.5, "selection": 0.5,
    }  # fmt: skip
    assert 40 < int(line.split("%")[0]) < 70


def test_no_time_is_promised_before_anything_was_done(clock):
    """What was done before this run began tells nothing of the speed: with it, 250 in 10 s would leave 10 s."""
    bar = on_clock(Progress(), clock)
    bar.plan(PLAN)
    bar.skip("before")
    bar.skip("training", 0.5)
    clock.now += 10.0
    assert bar.line().startswith(" 50 % after 00:10, about ? left")
