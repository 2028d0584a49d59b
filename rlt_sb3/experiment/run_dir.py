"""The folder of a run: files that are written completely or not at all, videos, and a line about the machine."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from rlt_sb3.common.files import replacing
from rlt_sb3.common.films import write_video
from rlt_sb3.evaluation.results import Evaluation, csv_rows, dumps
from rlt_sb3.experiment.algorithms import algorithm_names


class RunDir:
    """Writes the files of a run.

    :param path: an existing folder
    """

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def create(cls, path: Path) -> RunDir:
        """
        Make a new folder, so that no run overwrites another.

        :param path: the folder; if it exists, ``path-2`` is made, and so on
        :return: the new folder
        """
        candidate, number = path, 1
        while True:
            try:
                candidate.mkdir(parents=True)
                return cls(candidate)
            except FileExistsError:
                number += 1
                candidate = path.with_name(f"{path.name}-{number}")

    def write_json(self, name: str, data: dict[str, Any]) -> None:
        """
        Write JSON, and beside evaluations.json the same rows as CSV.

        :param name: name of the file
        :param data: plain data
        """
        with replacing(self.path / name) as temporary:
            temporary.write_text(dumps(data))
        if name == "evaluations.json":
            parts = [data[key] for key in ("vla", "vla_selection", *algorithm_names()) if key in data]
            with replacing(self.path / "evaluations.csv") as temporary:
                temporary.write_text(csv_rows([Evaluation.from_dict(part) for part in parts]))

    def write_films(self, name: str, evaluation: Evaluation) -> None:
        """
        Write every film of an evaluation: ``videos/<name>-state-<pair>-<success|failure>.mp4``.

        :param name: begins the names of the files
        :param evaluation: with or without frames
        """
        outcome = {row.pair: "success" if row.success else "failure" for row in evaluation.rows}
        for pair, frames in evaluation.frames.items():
            (self.path / "videos").mkdir(exist_ok=True)
            write_video(
                self.path / "videos" / f"{name}-state-{pair:03d}-{outcome[pair]}.mp4", frames, evaluation.fps, hold=0
            )

    def write_videos(self, before: Evaluation, after: Evaluation) -> dict[str, Any] | None:
        """Write before.mp4 and after.mp4 of one initial state.

        The state is the first filmed one that ``after`` solves and ``before`` does not; failing that, the first one.

        :param before: evaluation with frames
        :param after: evaluation with frames of the same states
        :return: which state it is, or None without frames
        """
        filmed = sorted(before.frames.keys() & after.frames.keys())
        if not filmed:
            return None
        won = {name: {r.pair for r in e.rows if r.success} for name, e in (("before", before), ("after", after))}
        pair = next((p for p in filmed if p in won["after"] - won["before"]), filmed[0])
        row = next(r for r in after.rows if r.pair == pair)
        for name, evaluation in (("before", before), ("after", after)):
            write_video(self.path / f"{name}.mp4", evaluation.frames[pair], evaluation.fps)
        return {
            "task_id": row.task_id,
            "init_index": row.init_index,
            "before_success": pair in won["before"],
            "after_success": pair in won["after"],
            "fps": after.fps,
            "every_step": len(after.frames[pair]) > row.chunks + 1,
            "chosen": f"the first filmed held-out state that {after.policy} solves and the frozen VLA does not"
            if pair in won["after"] - won["before"]
            else "the first held-out state",
        }


def machine() -> dict[str, Any]:
    """Describe the machine and the software of the run."""
    import gymnasium
    import stable_baselines3
    import torch

    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "gymnasium": gymnasium.__version__,
        "stable_baselines3": stable_baselines3.__version__,
    }
