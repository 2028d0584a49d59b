"""
Demonstrations on disk: LIBERO's (robomimic's) own HDF5 layout, so that official LIBERO files load with the same reader.

One file per task. ``data.attrs["problem_info"]`` is JSON with ``language_instruction``, ``data.attrs["env_args"]`` is
JSON. Each ``data/demo_i`` has ``actions (T, 7)`` and ``obs/`` with ``agentview_rgb``, ``eye_in_hand_rgb``,
``ee_states`` and ``gripper_states``; row ``t`` is the observation *before* action ``t``.
Demonstrations of another robot have its :class:`~rlt_gym.core.robot_spec.RobotSpec` as JSON in ``data.attrs["robot"]``,
its pictures in ``obs/<camera>_rgb`` and all its numbers in ``obs/proprio``.
Ours, and not in official files, are ``object_positions (T, n_obj, 3)`` (targets of auxiliary losses and probes), the
attribute ``success`` and, in rollouts, ``intervention (T,)``: true where someone else than the policy chose the action.
Not ours, but read where it is there: robomimic's ``rewards (T,)``, 1 at each action after which the task is solved.
"""

import glob
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np

from rlt_gym.core.files import atomic_write
from rlt_gym.core.robot_spec import Camera, ProprioPart, RobotSpec

#: The robot that LIBERO's demonstrations show. Whoever reads LeRobot's turns their pictures, so that all are upside
#: down.
ROBOT = RobotSpec(
    name="panda of the demonstrations",
    cameras=(Camera("agentview", upside_down=True), Camera("wrist", upside_down=True)),
    proprio=(ProprioPart("position", 3), ProprioPart("orientation", 3, "axis_angle"), ProprioPart("fingers", 2)),
    action_names=("x", "y", "z", "roll", "pitch", "yaw", "gripper"),
    control_frequency=20.0,
    gripper_index=6,
    control_mode="relative",
)


def _dataset(camera: str) -> str:
    """Name of the dataset of a camera's pictures."""
    return {"wrist": "eye_in_hand_rgb"}.get(camera, f"{camera}_rgb")


class DemoWriter:
    """
    Writes the demonstrations of one task; the file appears under its name only when the writer is closed without error.

    :param path: Target ``.hdf5`` file.
    :param instruction: The task's instruction.
    :param env_args: Anything JSON can hold about how the demonstrations were made (suite, task id, assets, seed ...).
        ``env_id`` is the environment with the pictures, for the success rates of ``rlt train-vla``.
    :param robot: The robot that they show.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        instruction: str,
        env_args: Mapping[str, Any] | None = None,
        robot: RobotSpec = ROBOT,
    ) -> None:
        self.path = Path(path)
        self.robot = robot
        self.num_demos = 0
        self._num_rows = 0
        self._pending = atomic_write(self.path)
        self._temporary = self._pending.__enter__()
        self._file = h5py.File(self._temporary, "w")
        self._data = self._file.create_group("data")
        self._data.attrs["problem_info"] = json.dumps({"language_instruction": instruction})
        self._data.attrs["env_args"] = json.dumps(dict(env_args or {}), default=str)
        if robot != ROBOT:
            self._data.attrs["robot"] = json.dumps(robot.to_dict())

    def add(
        self,
        actions: np.ndarray,
        proprio: np.ndarray,
        object_positions: np.ndarray | None = None,
        success: bool = True,
        intervention: np.ndarray | None = None,
        init_index: int = -1,
        **others: Any,
    ) -> str:
        """
        Append one demonstration.

        :param actions: Environment actions, float (T, d).
        :param proprio: The environment's ``proprio``, float (T, P).
        :param object_positions: World positions (m), float (T, n_obj, 3).
        :param success: Whether the episode ended in success.
        :param intervention: Whether someone else than the policy chose the action, bool (T,); ``None`` = not said.
        :param init_index: Index of the initial placement.
        :param others: For each camera its frames as the environment gives them, uint8 (T, H, W, 3); and further
            attributes of the demonstration's group.
        :return: The group's name (``demo_i``).
        :raises ValueError: If pictures are missing, or the arrays' shapes or types do not fit together.
        """
        length = len(actions)
        _check_rows(actions, (length, self.robot.action_size), "actions")
        _check_rows(proprio, (length, self.robot.proprio_size), "proprio")
        missing = [camera for camera in self.robot.camera_keys if camera not in others]
        if missing:
            raise ValueError(f"The demonstration has no pictures of {', '.join(missing)}; {self.robot.name!r} has.")
        pictures = {camera: others.pop(camera) for camera in self.robot.camera_keys}
        if intervention is not None:
            _check_rows(intervention, (length,), "intervention")
        if object_positions is not None:
            if object_positions.ndim != 3 or object_positions.shape[::2] != (length, 3):
                raise ValueError(f"object_positions is {object_positions.shape}; it must be ({length}, n_obj, 3).")
        for name, frames in pictures.items():
            if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[0] != length or frames.shape[3] != 3:
                raise ValueError(f"{name} is {frames.dtype} {frames.shape}; it must be uint8 ({length}, H, W, 3).")
        group = self._data.create_group(f"demo_{self.num_demos}")
        group.create_dataset("actions", data=np.asarray(actions, dtype=np.float32))
        obs = group.create_group("obs")
        for name, frames in pictures.items():
            chunks = (1, *frames.shape[1:])
            obs.create_dataset(_dataset(name), data=frames, chunks=chunks, compression="lzf", shuffle=False)
        proprio = np.asarray(proprio, dtype=np.float32)
        if self.robot == ROBOT:
            obs.create_dataset("ee_states", data=proprio[:, :6])
            obs.create_dataset("gripper_states", data=proprio[:, 6:])
        else:
            obs.create_dataset("proprio", data=proprio)
        if object_positions is not None:
            group.create_dataset("object_positions", data=np.asarray(object_positions, dtype=np.float32))
        if intervention is not None:
            group.create_dataset("intervention", data=np.asarray(intervention, dtype=bool))
        for key, value in {
            "num_samples": length,
            "success": bool(success),
            "init_index": int(init_index),
            **others,
        }.items():
            group.attrs[key] = value
        self.num_demos += 1
        self._num_rows += length
        return f"demo_{self.num_demos - 1}"

    def close(self, error: BaseException | None = None) -> None:
        """
        Finish the file.

        :param error: If given, the unfinished file is thrown away.
        """
        if not self._file:
            return
        self._data.attrs["num_demos"] = self.num_demos
        self._data.attrs["total"] = self._num_rows
        self._file.close()
        if error is None:
            self._pending.__exit__(None, None, None)
        else:
            try:
                self._pending.__exit__(type(error), error, error.__traceback__)
            except BaseException as raised:
                if raised is not error:
                    raise

    def __enter__(self) -> "DemoWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(shape) == len(wanted) and all(b is None or a == b for a, b in zip(shape, wanted, strict=True))


def _check_rows(array: np.ndarray, shape: tuple[int, ...], name: str) -> None:
    if np.shape(array) != shape or not np.all(np.isfinite(array)):
        raise ValueError(f"{name} has shape {np.shape(array)}; it must be finite with shape {shape}.")


@dataclass
class Demo:
    """
    One demonstration of an open :class:`DemoFile`; arrays are read from disk when asked for.

    Each array must have a row for each action and the widths of the robot, and actions and ``proprio`` must be finite;
    else reading it raises a ``ValueError`` that names the file and the demonstration.

    :param group: Its HDF5 group.
    :param robot: The robot that it shows.
    """

    group: h5py.Group
    robot: RobotSpec

    @property
    def name(self) -> str:
        """Group name, ``demo_i``."""
        return str(self.group.name).rsplit("/", 1)[-1]

    @property
    def attrs(self) -> dict[str, Any]:
        """Attributes (``num_samples``, ``success``, ``init_index`` ...)."""
        return {key: getattr(value, "item", lambda v=value: v)() for key, value in self.group.attrs.items()}

    def __len__(self) -> int:
        return len(self._dataset("actions"))

    def _dataset(self, name: str) -> h5py.Dataset:
        """Find an array, which has a row for each action."""
        found = self.group.get(name)
        if not isinstance(found, h5py.Dataset) or not found.shape:
            raise self._error(f"has no array {name}")
        if name != "actions" and len(found) != len(self):
            raise self._error(f"has {len(found)} rows of {name} for {len(self)} actions")
        row = self._row_shapes.get(name, (None, None, 3) if name in self._pictures else None)
        if row is not None and not _fits(found.shape[1:], row):
            wanted = ", ".join("any" if size is None else str(size) for size in row)
            raise self._error(f"has rows of {name} of shape {found.shape[1:]}, not ({wanted})")
        return found

    @property
    def _row_shapes(self) -> dict[str, tuple[int | None, ...]]:
        """Shape of a row of each array of numbers; None: any size."""
        return {
            "actions": (self.robot.action_size,),
            "obs/proprio": (self.robot.proprio_size,),
            "obs/ee_states": (6,),
            "obs/gripper_states": (2,),
            "object_positions": (None, 3),
            "intervention": (),
            "rewards": (),
        }

    def _read(self, name: str, stride: int = 1) -> np.ndarray:
        """Read every stride-th row of an array."""
        dataset = self._dataset(name)
        try:
            return np.asarray(dataset[::stride])
        except OSError as error:
            raise self._error(f"has an array {name} that cannot be read ({error})") from error

    def _numbers(self, name: str) -> np.ndarray:
        """Read an array of finite numbers, float32."""
        rows = self._read(name).astype(np.float32)
        if not np.isfinite(rows).all():
            raise self._error(f"has NaN or infinite values in {name}")
        return rows

    def _error(self, problem: str) -> ValueError:
        return ValueError(f"{self.name} of {self.group.file.filename} {problem}: collect or copy the file again.")

    @property
    def actions(self) -> np.ndarray:
        """
        Actions, float32 (T, d).

        Whoever reads a demonstration reads them at first, so all of its arrays are counted here: not after the pictures
        of the demonstrations before it have been used for hours.
        """
        optional = [name for name in ("object_positions", "intervention") if name in self.group]
        for name in (*self._proprio_names, *self._pictures, *optional):
            self._dataset(name)
        return self._numbers("actions")

    @property
    def _proprio_names(self) -> list[str]:
        return ["obs/proprio"] if "obs/proprio" in self.group else ["obs/ee_states", "obs/gripper_states"]

    @property
    def _pictures(self) -> list[str]:
        return [f"obs/{key}" for key in self.group.get("obs", ()) if key.endswith("_rgb")]

    @property
    def proprio(self) -> np.ndarray:
        """The environment's ``proprio``, float32 (T, P)."""
        return np.concatenate([self._numbers(name) for name in self._proprio_names], axis=1)

    @property
    def object_positions(self) -> np.ndarray | None:
        """World positions, float32 (T, n_obj, 3), or ``None`` in official files."""
        return self._read("object_positions") if "object_positions" in self.group else None

    @property
    def intervention(self) -> np.ndarray | None:
        """Whether someone else than the policy chose the action, bool (T,), or ``None`` where nobody said it."""
        return self._read("intervention") if "intervention" in self.group else None

    @property
    def success(self) -> bool | None:
        """Whether the episode solved its task, by its attribute ``success``; ``None`` where nobody said it."""
        said = self.attrs.get("success")
        if said not in (None, False, True):  # a text "False" would be true
            raise self._error(f"has the attribute success={said!r}, which is neither true nor false")
        return None if said is None else bool(said)

    @property
    def step_success(self) -> np.ndarray | None:
        """
        Whether the task was solved after each action, bool (T,), by the array ``rewards``.

        ``None`` without this array, and if it has other numbers than 0 and 1: shaped rewards do not say what is solved.
        """
        rewards = self._read("rewards") if "rewards" in self.group else None
        return None if rewards is None or not np.isin(rewards, (0, 1)).all() else rewards == 1

    @property
    def frame_shape(self) -> tuple[int, int]:
        """Height and width of the frames in pixels."""
        if not self._pictures:
            raise self._error("has no pictures, arrays obs/CAMERA_rgb")
        height, width = self._dataset(self._pictures[0]).shape[1:3]
        return int(height), int(width)

    def frames(self, camera: str, stride: int = 1) -> np.ndarray:
        """
        Read frames.

        :param camera: Key of a camera of the robot.
        :param stride: Take one row in this many.
        :return: Frames as stored, uint8 (ceil(T / stride), H, W, 3).
        """
        return self._read(f"obs/{_dataset(camera)}", stride)


class DemoFile:
    """
    Reader of one demonstration file, ours or LIBERO's; use as a context manager.

    :param path: The ``.hdf5`` file.
    :raises ValueError: If the file is missing, damaged, or not in LIBERO's layout.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(f"There is no demonstration file {self.path}; write one with `rlt collect`.")
        try:
            self._file = h5py.File(self.path, "r")
        except OSError as error:
            raise ValueError(f"{self.path} is not a readable HDF5 file ({error}); collect it again.") from error
        try:
            data = self._file["data"]
            self.instruction = str(json.loads(data.attrs["problem_info"])["language_instruction"]).strip().strip('"')
            self.env_args: dict[str, Any] = json.loads(data.attrs.get("env_args", "{}"))
            #: The robot that the demonstrations show.
            self.robot = RobotSpec.from_dict(json.loads(data.attrs["robot"])) if "robot" in data.attrs else ROBOT
            names = sorted((name for name in data if name.startswith("demo_")), key=lambda name: int(name[5:]))
            self.demos = [Demo(data[name], self.robot) for name in names]
        except (KeyError, ValueError, TypeError) as error:
            self._file.close()
            raise ValueError(
                f"{self.path} is not in LIBERO's demonstration layout ({type(error).__name__}: {error}); it needs "
                "data.attrs['problem_info'] with language_instruction and groups data/demo_i."
            ) from error

    def __len__(self) -> int:
        return len(self.demos)

    def __getitem__(self, index: int) -> Demo:
        return self.demos[index]

    def __iter__(self) -> Iterator[Demo]:
        return iter(self.demos)

    def close(self) -> None:
        """Close the file. Arrays of its demonstrations cannot be read afterwards."""
        self._file.close()

    def __enter__(self) -> "DemoFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def expand_paths(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    """
    Demonstration files named by paths, glob patterns and folders.

    :param paths: One or several of them.
    :return: Sorted files without repeats.
    :raises ValueError: If one matches nothing.
    """
    names = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    found: set[Path] = set()
    for name in names:
        matches = [os.fspath(name)]  # what exists is taken by its name, also if it reads like a pattern
        if os.path.isdir(name):
            matches = glob.glob(os.path.join(glob.escape(matches[0]), "*.hdf5"))
        elif not os.path.exists(name):
            matches = glob.glob(matches[0])
        if not matches:
            raise ValueError(f"No demonstration file matches {os.fspath(name)!r}; write some with `rlt collect`.")
        found.update(Path(match) for match in matches)
    if not found:
        raise ValueError("No demonstration files were given.")
    return sorted(found)
