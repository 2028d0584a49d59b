"""
Demonstrations of LIBERO in LeRobot's dataset format, versions 2 and 3 (a folder of Parquet files and videos).

:data:`COLUMNS` has the column names of published conversions of LIBERO. Row ``t`` is the observation *before* action
``t``. State and actions have LIBERO's units; some conversions code the gripper otherwise, see
:class:`~rlt_gym.core.gripper.Gripper`. Pictures stand upright: they are LIBERO's pictures turned by 180 degrees.
Reading needs the extra ``datasets``, which installs pyarrow; the package ``lerobot`` is not needed.
"""

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import imageio
import numpy as np
from PIL import Image

from rlt_gym.core.gripper import Gripper

#: Quantity -> its column names in published datasets; the first one that exists is read.
COLUMNS = {
    "agentview": ("observation.images.image", "image", "observation.images.agentview"),
    "wrist": ("observation.images.wrist_image", "observation.images.image2", "wrist_image", "observation.images.wrist"),
    "state": ("observation.state", "state"),
    "action": ("action", "actions"),
}
SIZES = {"state": 8, "action": 7}
#: Columns that say whether the task is solved after an action; the first one that exists and says it is read.
STEP_SUCCESS = ("next.success", "next.reward")
#: Where a dataset of ``rlt collect`` says how its demonstrations were made; LeRobot does not read this file.
PROVENANCE = Path("meta") / "rlt.json"


@dataclass(kw_only=True)
class LeRobotSettings:
    """
    How LeRobot datasets are read: settings of every command that reads demonstrations.

    :param lerobot_columns: Names of a LeRobot dataset's columns where they are unusual: ``agentview``, ``wrist``,
        ``state``, ``action``.
    :param lerobot_gripper: What a LeRobot dataset's gripper actions mean: "env", LIBERO's -1 (opens) to 1 (closes),
        "open", 1 (open) to 0 (closed), "closed", 0 (open) to 1 (closed), or "open-signed", 1 (opens) to -1 (closes).
    :param lerobot_rotated: Whether a LeRobot dataset's pictures stand upright (turned by 180 degrees against LIBERO's).
    """

    lerobot_columns: dict[str, str] | None = None
    lerobot_gripper: str = "env"
    lerobot_rotated: bool = True

    @property
    def lerobot(self) -> dict[str, Any]:
        """These settings alone, by name."""
        return {field.name: getattr(self, field.name) for field in fields(LeRobotSettings)}


def is_lerobot(path: Path) -> bool:
    """
    Recognize a dataset.

    :param path: A folder or file.
    :return: Whether it is a LeRobot dataset.
    """
    return (path / "meta" / "info.json").is_file()


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError("LeRobot datasets need pyarrow: pip install 'rlt[datasets]'.") from error
    return pyarrow.parquet


class LeRobotFolder:
    """
    A dataset on disk.

    :param path: Its folder, the one with ``meta/info.json``.
    :param columns: Names of its columns where they differ from :data:`COLUMNS`, e.g. ``{"wrist": "observation.hand"}``.
    :param rotated: Whether the pictures stand upright; such pictures are turned by 180 degrees when they are read.
    :param gripper: What the gripper's number in an action means, see :class:`~rlt_gym.core.gripper.Gripper`.
    :raises ValueError: If pyarrow is missing, or the folder is damaged, of another version, or not of LIBERO's form.
    """

    def __init__(
        self, path: Path, columns: Mapping[str, str] | None = None, rotated: bool = True, gripper: str = "env"
    ) -> None:
        if gripper not in list(Gripper):
            raise ValueError(f"lerobot_gripper must be one of {', '.join(Gripper)}, got {gripper!r}.")
        self.path, self.rotated, self.gripper = Path(path), rotated, Gripper(gripper)
        self._parquet = _parquet()
        try:
            self.info: dict[str, Any] = json.loads((self.path / "meta" / "info.json").read_text())
            self.version = int(str(self.info["codebase_version"]).lstrip("v").split(".")[0])
            features = self.info["features"]
            self.fps = float(self.info["fps"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.path}/meta/info.json is missing or damaged ({error!r}); give the folder of a LeRobot dataset."
            ) from error
        if self.version not in (2, 3):
            raise ValueError(
                f"{self.path} has version {self.info['codebase_version']}; versions 2.x and 3.x can be read. Convert "
                "it with LeRobot's own scripts."
            )
        self.columns = self._find(features, dict(columns or {}))
        try:
            self.tasks = self._read_tasks()
            self.episodes = self._read_episodes()
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{self.path}/meta is damaged or incomplete ({error}); copy the dataset again.") from error

    def _find(self, features: Mapping[str, Any], given: dict[str, str]) -> dict[str, str]:
        unknown = sorted(set(given) - set(COLUMNS))
        if unknown:
            raise ValueError(f"lerobot_columns names {unknown}; it may name {', '.join(COLUMNS)}.")
        found = {}
        for what, names in COLUMNS.items():
            choices = (given[what],) if what in given else names
            name = next((choice for choice in choices if choice in features), None)
            if name is None:
                raise ValueError(
                    f"{self.path} has no column {' or '.join(choices)}; it has {', '.join(features)}. Name the {what} "
                    f"with lerobot_columns={{{what}: NAME}}."
                )
            shape = tuple(features[name].get("shape", ()))
            if what in SIZES and shape != (SIZES[what],):
                raise ValueError(
                    f"{self.path}: {name} has shape {shape}, LIBERO's {what} has ({SIZES[what]},). Name another column "
                    f"with lerobot_columns={{{what}: NAME}}."
                )
            found[what] = name
        return found

    def _read_tasks(self) -> dict[int, str]:
        if self.version == 2:
            rows = _json_lines(self.path / "meta" / "tasks.jsonl")
            return {int(row["task_index"]): str(row["task"]) for row in rows}
        table = self._parquet.read_table(self.path / "meta" / "tasks.parquet")
        # written by pandas with the instruction as (perhaps nameless) index
        (text,) = [name for name in table.column_names if name != "task_index"]
        return dict(zip(table["task_index"].to_pylist(), table[text].to_pylist(), strict=True))

    def _read_episodes(self) -> list[dict[str, Any]]:
        if self.version == 2:
            rows = _json_lines(self.path / "meta" / "episodes.jsonl")
        else:
            rows = []
            for file in sorted((self.path / "meta" / "episodes").glob("*/*.parquet")):
                names = self._parquet.read_schema(file).names
                wanted = [name for name in names if not name.startswith("stats/")]
                rows += self._parquet.read_table(file, columns=wanted).to_pylist()
        if not rows:
            raise ValueError("no episodes are listed")
        return sorted(rows, key=lambda row: int(row["episode_index"]))

    def demos(self, task_index: int) -> list["LeRobotDemo"]:
        """
        List the demonstrations of a task.

        :param task_index: A key of ``tasks``.
        :return: Its demonstrations; arrays are read from disk when asked for.
        """
        instruction = self.tasks[task_index]
        return [LeRobotDemo(self, row) for row in self.episodes if instruction in row["tasks"]]


def _json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


@dataclass
class LeRobotDemo:
    """
    One episode, with the interface of :class:`~rlt_gym.data.libero_hdf5.Demo`.

    :param folder: Its dataset.
    :param row: What the dataset's list of episodes says about it.
    """

    folder: LeRobotFolder
    row: Mapping[str, Any]

    @property
    def name(self) -> str:
        """``episode_i``."""
        return f"episode_{self.row['episode_index']}"

    def __len__(self) -> int:
        return int(self.row["length"])

    @property
    def object_positions(self) -> None:
        """Not in such datasets."""
        return None

    @property
    def intervention(self) -> None:
        """Not in such datasets."""
        return None

    @property
    def frame_shape(self) -> tuple[int, int]:
        """Height and width of the frames in pixels."""
        feature = self.folder.info["features"][self.folder.columns["agentview"]]
        channels_first = int(feature["shape"][0]) == 3
        height, width = feature["shape"][1:] if channels_first else feature["shape"][:2]
        return int(height), int(width)

    @property
    def attrs(self) -> dict[str, Any]:
        """``success``: LIBERO's published episodes are successes, unless a column ``next.success`` denies it."""
        table = self._table
        told = "next.success" in table.column_names
        return {"success": bool(np.any(table["next.success"].to_pylist())) if told else True}

    @property
    def success(self) -> None:
        """Such datasets say it of control steps, not of episodes."""
        return None

    @property
    def step_success(self) -> np.ndarray | None:
        """
        Whether the task was solved after each action, bool (T,), by a column of :data:`STEP_SUCCESS`.

        ``None`` without such a column, and if it has other numbers than 0 and 1: shaped rewards do not say what is
        solved.
        """
        for name in STEP_SUCCESS:
            if name in self._table.column_names:
                values = np.asarray(self._table[name].to_pylist(), dtype=np.float32).reshape(len(self))
                if np.isin(values, (0, 1)).all():
                    return values == 1
        return None

    @property
    def actions(self) -> np.ndarray:
        """
        Actions in LIBERO's units, float32 (T, 7).

        :raises ValueError: If no gripper action is negative although -1 should open it (episodes begin with it open).
        """
        actions = self._vectors("action")
        if self.folder.gripper is not Gripper.ENV:
            actions[:, 6] = self.folder.gripper.to_env(actions[:, 6])
        elif actions[:, 6].min() >= 0.0:
            raise ValueError(
                f"{self.name} of {self.folder.path} has gripper actions from {actions[:, 6].min():g} to "
                f"{actions[:, 6].max():g}, LIBERO's are from -1 (open) to 1 (close). If 1 means open there, set "
                "lerobot_gripper to open."
            )
        return actions

    @property
    def proprio(self) -> np.ndarray:
        """Eef position, axis-angle and gripper qpos, float32 (T, 8)."""
        return self._vectors("state")

    def frames(self, camera: str, stride: int = 1) -> np.ndarray:
        """
        Read frames.

        :param camera: ``"agentview"`` or ``"wrist"``.
        :param stride: Take one row in this many.
        :return: Frames as LIBERO gives them (upside down), uint8 (ceil(T / stride), H, W, 3).
        :raises ValueError: If a video has fewer frames than the episode has rows.
        """
        column = self.folder.columns[camera]
        if self.folder.info["features"][column]["dtype"] == "video":
            pictures = list(islice(self._video(column), 0, None, stride))
        else:
            cells = self._read(column)[column].to_pylist()[::stride]  # not kept: pictures fill the memory
            pictures = [np.asarray(Image.open(self._picture(cell)).convert("RGB")) for cell in cells]
        frames = np.stack(pictures)
        return np.ascontiguousarray(frames[:, ::-1, ::-1]) if self.folder.rotated else frames

    # ----------------------------------------------------------------------------------------------- reading

    @cached_property
    def _table(self) -> Any:
        return self._read(*(self.folder.columns[name] for name in SIZES), *STEP_SUCCESS)

    @property
    def _chunk(self) -> int:
        """Number of the folder (of version 2) that the episode is in."""
        return int(self.row["episode_index"]) // int(self.folder.info.get("chunks_size", 1000))

    def _read(self, *columns: str) -> Any:
        """Read those of the columns that the episode's file has."""
        folder, index = self.folder, int(self.row["episode_index"])
        if folder.version == 2:
            where = {"episode_chunk": self._chunk, "episode_index": index}
        else:
            where = {"chunk_index": self.row["data/chunk_index"], "file_index": self.row["data/file_index"]}
        path = folder.path / str(folder.info["data_path"]).format(**where)
        names = folder._parquet.read_schema(path).names
        table = folder._parquet.read_table(
            path,
            columns=[name for name in names if name in (*columns, "frame_index")],
            filters=[("episode_index", "==", index)],
        )
        if table.num_rows != int(self.row["length"]):
            raise ValueError(
                f"{path} has {table.num_rows} rows of episode {index}, not {self.row['length']}: copy the dataset "
                "again."
            )
        return table.sort_by("frame_index")

    def _vectors(self, what: str) -> np.ndarray:
        rows = np.asarray(self._table[self.folder.columns[what]].to_pylist(), dtype=np.float32)
        if not np.isfinite(rows).all():
            raise ValueError(
                f"{self.name} of {self.folder.path} has NaN or infinite values in {self.folder.columns[what]}: record "
                "or copy it again."
            )
        return rows

    def _picture(self, cell: Mapping[str, Any]) -> io.BytesIO | Path:
        """Decode a picture, which is stored as the bytes of a PNG or as a path."""
        return io.BytesIO(cell["bytes"]) if cell["bytes"] is not None else self.folder.path / cell["path"]

    def _video(self, column: str) -> Iterator[np.ndarray]:
        folder, index, length = self.folder, int(self.row["episode_index"]), int(self.row["length"])
        start = 0.0
        if folder.version == 2:
            where = {"episode_chunk": self._chunk, "episode_index": index, "video_key": column}
        else:
            cells = {key: self.row[f"videos/{column}/{key}"] for key in ("chunk_index", "file_index")}
            where = {"video_key": column, **cells}
            # between two frames, so that rounding cannot choose the wrong one
            start = max(0.0, float(self.row[f"videos/{column}/from_timestamp"]) - 0.5 / folder.fps)
        path = folder.path / str(folder.info["video_path"]).format(**where)
        count = 0
        reader: Any = imageio.get_reader(path, format="FFMPEG", input_params=["-ss", f"{start:.6f}"])
        with reader:
            for frame in islice(reader, length):
                count += 1
                yield np.asarray(frame)
        if count < length:
            raise ValueError(
                f"{path} has {count} frames of episode {index}, its table has {length} rows: copy the dataset again."
            )
