"""Writes pictures as a video file, and computes the speed at which a film is shown."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlt_sb3.common.files import replacing

#: Frames a second where an environment does not say how long a chunk takes.
DEFAULT_FPS = 5.0


def real_time(metadata: Mapping[str, Any], every_step: bool) -> float:
    """
    Compute the speed at which a film lasts as long as the episode did.

    :param metadata: of the environment
    :param every_step: whether there is a frame for every control step; otherwise for every chunk
    :return: frames a second at which a film lasts as long as the episode did, as far as the environment says so
    """
    robot = metadata.get("robot")
    if every_step and robot is not None:
        return float(robot.control_frequency)
    return float(metadata.get("render_fps") or DEFAULT_FPS)


def write_video(
    path: Path, frames: list[np.ndarray], fps: float = DEFAULT_FPS, width: int = 256, hold: int | None = None
) -> None:
    """Write pictures as H.264, which every browser plays.

    :param path: the mp4
    :param frames: (H, W, 3) uint8 each
    :param fps: pictures per second
    :param width: smaller pictures are enlarged by a whole number to about this width
    :param hold: how often the last picture is repeated; by default for about a second
    """
    import imageio.v2 as imageio

    scale = max(1, width // frames[0].shape[1])
    frames = frames + [frames[-1]] * (round(fps) if hold is None else hold)
    with replacing(path) as temporary:
        with imageio.get_writer(temporary, fps=fps, codec="libx264", macro_block_size=2, quality=7) as writer:
            for frame in frames:
                writer.append_data(np.repeat(np.repeat(frame, scale, axis=0), scale, axis=1))  # type: ignore[attr-defined]
