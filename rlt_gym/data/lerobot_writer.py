"""
Writes demonstrations as a LeRobot dataset (version 3), with LeRobot's own writer: what ``lerobot-train`` reads.

Pictures, state and action have the names and conventions of LeRobot's datasets of LIBERO: pictures stand upright
(LIBERO's turned by 180 degrees) and lie as PNG in the tables, so that nothing is lost and no video decoder is needed;
state and action are the environment's, 20 frames a second. Positions of objects have no place there.
Writing needs the extra ``lerobot``.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from tqdm import tqdm

from rlt_gym.core.files import write_json
from rlt_gym.data.demo_set import resize_frames
from rlt_gym.data.lerobot import PROVENANCE, LeRobotSettings
from rlt_gym.data.libero_hdf5 import ROBOT
from rlt_gym.data.sources import demo_sources

#: Camera of LIBERO -> column of the dataset, as in ``lerobot/libero``.
PICTURES = {"agentview": "observation.images.image", "wrist": "observation.images.image2"}
_STATE = ["x", "y", "z", "axis_angle1", "axis_angle2", "axis_angle3", "finger1", "finger2"]


def _dataset_class() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a dataset that is written here asks the model hub for nothing
    try:
        from lerobot.datasets.lerobot_dataset import LeRobotDataset
    except ImportError as error:
        raise ValueError(
            "LeRobot datasets are written by LeRobot: pip install 'rlt[lerobot]', or make an environment of its own "
            "with scripts/lerobot_env.sh."
        ) from error
    return LeRobotDataset


@contextmanager
def _quiet() -> Iterator[None]:
    """Without a progress bar per episode, which ``datasets`` shows."""
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


class LeRobotWriter:
    """
    Writes demonstrations of any number of tasks.

    The folder appears under its name only when the writer is closed without error.

    :param path: Folder of the dataset; must not exist.
    :param image_size: Edge in pixels to which pictures are pooled; ``None`` = as they are.
    :param made: Anything JSON can hold about how the demonstrations were made, for
        :data:`~rlt_gym.data.lerobot.PROVENANCE`.
    :param threads: Threads that write pictures.
    :raises ValueError: If the folder exists or LeRobot is not installed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        image_size: int | None = None,
        made: Mapping[str, Any] | None = None,
        threads: int = 2,
    ) -> None:
        self.path = Path(path)
        if self.path.exists():
            raise ValueError(f"{self.path} exists already; LeRobot datasets are written once: name another folder.")
        self._class = _dataset_class()
        self.image_size, self.num_demos = image_size, 0
        self.made, self._threads = dict(made or {}), threads
        self._dataset: Any = None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(dir=self.path.parent, prefix=f".{self.path.name}."))

    def add(
        self,
        instruction: str,
        actions: np.ndarray,
        agentview: np.ndarray,
        wrist: np.ndarray,
        proprio: np.ndarray,
    ) -> None:
        """
        Append one demonstration.

        :param instruction: The task's instruction.
        :param actions: Environment actions, float (T, 7).
        :param agentview: Frames as LIBERO gives them (upside down), uint8 (T, S, S, 3).
        :param wrist: The same for the wrist camera.
        :param proprio: Eef position (m), axis-angle (rad), gripper qpos: float (T, 8).
        :raises ValueError: If the arrays' shapes or types do not fit together.
        """
        frames = {"agentview": agentview, "wrist": wrist}
        if self.image_size is not None:
            frames = {camera: resize_frames(value, self.image_size) for camera, value in frames.items()}
        # upright, and contiguous for the PNG writer
        upright = {PICTURES[camera]: np.ascontiguousarray(value[:, ::-1, ::-1]) for camera, value in frames.items()}
        if self._dataset is None:
            self._dataset = self._create({name: value.shape[1:] for name, value in upright.items()})
        for t in range(len(actions)):
            row: dict[str, Any] = {name: value[t] for name, value in upright.items()}
            row["observation.state"] = np.asarray(proprio[t], dtype=np.float32)
            row["action"] = np.asarray(actions[t], dtype=np.float32)
            self._dataset.add_frame({**row, "task": instruction})
        with _quiet():
            self._dataset.save_episode()
        self.num_demos += 1

    def _create(self, shapes: Mapping[str, tuple[int, ...]]) -> Any:
        features: dict[str, Any] = {
            name: {"dtype": "image", "shape": shape, "names": ["height", "width", "channel"]}
            for name, shape in shapes.items()
        }
        state = {"dtype": "float32", "shape": (ROBOT.proprio_size,), "names": {"motors": _STATE}}
        features["observation.state"] = state
        names = {"motors": list(ROBOT.action_names)}
        features["action"] = {"dtype": "float32", "shape": (ROBOT.action_size,), "names": names}
        return self._class.create(
            f"rlt/{self.path.name}",
            fps=int(ROBOT.control_frequency),
            features=features,
            root=self._folder / self.path.name,  # LeRobot makes it itself
            robot_type="panda",
            use_videos=False,
            image_writer_threads=self._threads,
        )

    def close(self, error: BaseException | None = None) -> None:
        """
        Finish the dataset.

        :param error: If given, the unfinished dataset is thrown away.
        """
        try:
            if self._dataset is not None:
                self._dataset.stop_image_writer()
                self._dataset.finalize()  # without it the tables have no end, and cannot be read
                if error is None:
                    written = self._folder / self.path.name
                    shutil.rmtree(written / "images", ignore_errors=True)  # emptied folders of what is in the tables
                    write_json(written / PROVENANCE, self.made)
                    os.replace(written, self.path)
        finally:
            self._dataset = None
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> LeRobotWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)


@dataclass
class ExportLeRobotConfig(LeRobotSettings):
    """
    Settings of :func:`export_lerobot`.

    :param demos: Demonstration files of ``rlt collect`` or of LIBERO itself, glob patterns or folders; folders of
        LeRobot datasets.
    :param out: Folder of the dataset; must not exist.
    :param image_size: Edge in pixels to which pictures are pooled, e.g. 64; ``None`` = as they are.
    :param max_demos: Most demonstrations per file; ``None`` = all.
    :param progress: Show a progress bar.
    """

    demos: list[str] = field(default_factory=list)
    out: str = "dataset"
    image_size: int | None = None
    max_demos: int | None = None
    progress: bool = True


def export_lerobot(config: ExportLeRobotConfig) -> Path:
    """
    Write demonstration files as one LeRobot dataset. Demonstrations that did not succeed are left out.

    :param config: What to write.
    :return: The dataset's folder.
    :raises ValueError: If files are missing or damaged, hold no success or show another robot than LIBERO's, the folder
        exists, or LeRobot is missing.
    """
    sources = demo_sources(config.demos, config)
    others = [source.name for source in sources if source.robot != ROBOT]
    if others:
        raise ValueError(f"{', '.join(others)}: LeRobot datasets are written of LIBERO's robot only; leave these out.")
    # only what all files agree in is true of the dataset
    made = {key: value for key, value in sources[0].made.items() if all(s.made.get(key) == value for s in sources)}
    made["tasks"] = {source.instruction: source.made["task_id"] for source in sources if "task_id" in source.made}
    with LeRobotWriter(config.out, config.image_size, made) as writer:
        for source in sources:
            chosen = (demo for demo in source.demos() if bool(demo.attrs.get("success", True)))
            demos = islice(chosen, config.max_demos)
            for demo in tqdm(demos, desc=source.instruction, unit="demo", disable=not config.progress):
                pictures = demo.frames("agentview"), demo.frames("wrist")
                writer.add(source.instruction, demo.actions, *pictures, demo.proprio)
        if not writer.num_demos:
            names = ", ".join(source.name for source in sources)
            raise ValueError(f"{names}: no usable demonstration in these files; write some with `rlt collect`.")
    return writer.path
