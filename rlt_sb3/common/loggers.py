"""Where a run's numbers go: metrics.csv, TensorBoard, Weights & Biases."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from stable_baselines3.common.logger import KVWriter, TensorBoardOutputFormat, filter_excluded_keys

from rlt_sb3.common.files import replacing


class CSVWriter(KVWriter):
    """
    Writes metrics.csv, one row per logged step.

    Each row is flushed, so that a killed run keeps it. Steps increase strictly: what is logged twice for one step
    becomes one row.

    Stable-Baselines3's own writer begins an empty file, and writes two rows for a step that is logged twice.

    :param path: the file; rows up to ``last_step`` of an existing one are kept
    :param last_step: last step to keep if a run is resumed; None to begin an empty file
    """

    STEP = "time/total_timesteps"

    def __init__(self, path: Path, last_step: int | None = None):
        self.path = path
        self.columns: list[str] = [self.STEP]
        self.rows: list[dict[str, str]] = []
        if last_step is not None and path.is_file():
            # what stands after the last line break was cut off when the run was killed
            whole = path.read_text().rpartition("\n")[0]
            reader = csv.DictReader(io.StringIO(whole))
            self.columns = list(reader.fieldnames or self.columns)
            self.rows = [row for row in reader if int(row[self.STEP]) <= last_step]
        self._file: TextIO | None = None
        self._rewrite()

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        """
        Write the numbers and texts of one step.

        :param key_values: what to log; only numbers and texts
        :param key_excluded: keys that some formats leave out
        :param step: chunks so far
        """
        kept = filter_excluded_keys(key_values, key_excluded, "csv")
        row = {key: str(value) for key, value in kept.items() if isinstance(value, int | float | str | np.generic)}
        row[self.STEP] = str(step)
        new = sorted(row.keys() - set(self.columns))
        again = bool(self.rows) and self.rows[-1][self.STEP] == row[self.STEP]
        if again:
            self.rows[-1] |= row
        else:
            self.rows.append(row)
        if new or again:
            self.columns += new
            self._rewrite()
        else:
            assert self._file is not None
            self._file.write(self._text(self.rows[-1:]))
            self._file.flush()

    def _text(self, rows: list[dict[str, str]], header: bool = False) -> str:
        out = io.StringIO()
        writer = csv.DictWriter(out, self.columns, restval="", lineterminator="\n")
        if header:
            writer.writeheader()
        writer.writerows(rows)
        return out.getvalue()

    def _rewrite(self) -> None:
        self.close()
        with replacing(self.path) as temporary:
            temporary.write_text(self._text(self.rows, header=True))
        self._file = self.path.open("a")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class TensorBoardWriter(TensorBoardOutputFormat):
    """
    Writes TensorBoard logs that a resumed run can continue.

    :param folder: folder of the event files
    :param last_step: last step to keep if a run is resumed: later steps of older event files are hidden
    """

    def __init__(self, folder: Path, last_step: int | None = None):
        from torch.utils.tensorboard import SummaryWriter

        purge = None if last_step is None else last_step + 1
        self.writer = SummaryWriter(log_dir=str(folder), purge_step=purge)
        self._is_closed = False

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        """
        Write the values of one step.

        :param key_values: what to log
        :param key_excluded: ignored: keys that Stable-Baselines3 keeps from TensorBoard are in metrics.csv, too
        :param step: chunks so far
        """
        super().write(key_values, dict.fromkeys(key_excluded, ()), step)


class WandbWriter(KVWriter):
    """
    Logs to Weights & Biases (``pip install rlt[wandb]``). A resumed run continues the same W&B run.

    :param folder: folder of the run, where W&B keeps its files and the id
    :param settings: keyword arguments of ``wandb.init`` (project, entity, mode, tags, ...)
    :param name: name of the run
    :param config: shown with the run
    :raises ValueError: if wandb is not installed
    """

    def __init__(self, folder: Path, settings: dict[str, Any], name: str, config: dict[str, Any]):
        wandb = import_wandb()
        remembered = folder / "wandb.json"
        run_id = json.loads(remembered.read_text())["id"] if remembered.is_file() else None
        known = {"project": "rlt", "name": name, "dir": str(folder), "config": config, "id": run_id, "resume": "allow"}
        self.run = wandb.init(**(known | settings))
        remembered.write_text(json.dumps({"id": self.run.id}))

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        """
        Send the numbers of one step to W&B.

        :param key_values: what to log; only numbers
        :param key_excluded: keys that some formats leave out
        :param step: chunks so far
        """
        kept = filter_excluded_keys(key_values, key_excluded, "wandb")
        numbers = {key: float(value) for key, value in kept.items() if isinstance(value, int | float | np.generic)}
        self.run.log(numbers, step=step)

    def close(self) -> None:
        """End the W&B run."""
        self.run.finish()


def import_wandb() -> Any:
    """
    Import the package wandb.

    :return: the module
    :raises ValueError: if it is not installed; says how to get it
    """
    try:
        import wandb
    except ImportError as error:
        raise ValueError("The setting wandb needs the package of that name: pip install rlt[wandb]") from error
    return wandb
