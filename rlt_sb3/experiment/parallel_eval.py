"""Evaluates several models of a run at once, each by a separate ``rlt eval``."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlt_sb3.common.errors import RunError
from rlt_sb3.evaluation.results import Evaluation
from rlt_sb3.experiment.interrupt import Interrupt
from rlt_sb3.experiment.progress import quiet_bar

#: Lines of what a failed process printed that its error shows.
SHOWN_LINES = 12


class ParallelError(RunError):
    """Raised if one of the processes fails; the message names it and shows its last lines."""


@dataclass
class _Job:
    """A running process, the file it will write and the file with what it prints."""

    process: subprocess.Popen
    out: Path
    log: Path


def evaluate_in_parallel(
    models: Mapping[str, str], arguments: Sequence[str], max_parallel: int, progress: bool = True
) -> dict[str, Evaluation]:
    """
    Evaluate several models in independent processes, each with separate simulators.

    When one fails, or at Ctrl-C, the others are ended; their simulators end with them.

    :param models: label -> value of ``--model``
    :param arguments: of ``rlt eval``, the same for all, the run first
    :param max_parallel: processes at any time
    :param progress: show a bar that counts models
    :return: outcomes in the order of ``models``
    :raises ParallelError: if a process fails
    :raises KeyboardInterrupt: after SIGINT or SIGTERM
    """
    waiting, running, found = list(models), dict[str, _Job](), dict[str, Evaluation]()
    with tempfile.TemporaryDirectory(prefix="rlt-eval-") as folder, Interrupt() as interrupt:
        try:
            with quiet_bar(total=len(models), disable=not progress, desc=f"{max_parallel} at once") as bar:
                while waiting or running:
                    while waiting and len(running) < max_parallel:
                        label = waiting.pop(0)
                        running[label] = _start(models[label], arguments, Path(folder) / str(len(waiting)))
                    for label, job in list(running.items()):
                        status = job.process.poll()
                        if status is None:
                            continue
                        if status != 0:
                            interrupt.check()  # Ctrl-C in a terminal reaches the processes, too
                            raise ParallelError(_failure(label, status, job.log))
                        found[label] = Evaluation.from_dict(json.loads(job.out.read_text()))
                        del running[label]
                        bar.update(1)
                    interrupt.check()
                    time.sleep(0.1)
        finally:
            for job in running.values():
                job.process.kill()
            for job in running.values():
                job.process.wait()
    return {label: found[label] for label in models}


def _start(model: str, arguments: Sequence[str], stem: Path) -> _Job:
    out, log = stem.with_suffix(".json"), stem.with_suffix(".log")
    own = ["--model", model, "--out", str(out), "--beside_vla=false", "--progress=false"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "rlt_sb3", "eval", *arguments, *own],
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    return _Job(process, out, log)


def _failure(label: str, status: int, log: Path) -> str:
    how = f"exit status {status}" if status > 0 else f"signal {-status} (out of memory? lower max_parallel)"
    output = "\n".join(f"  {line}" for line in log.read_text(errors="replace").splitlines()[-SHOWN_LINES:])
    return f"The evaluation of {label} failed with {how}; the others were ended. Its last lines:\n{output}"
