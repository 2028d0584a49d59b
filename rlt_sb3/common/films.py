"""Pictures as a video file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rlt_sb3.common.files import replacing


def write_video(path: Path, frames: list[np.ndarray], fps: int = 5, width: int = 256, hold: int | None = None) -> None:
    """Write pictures as H.264, which every browser plays.

    :param path: the mp4
    :param frames: (H, W, 3) uint8 each
    :param fps: pictures per second
    :param width: smaller pictures are enlarged by a whole number to about this width
    :param hold: how often the last picture is repeated; by default for a second
    """
    import imageio.v2 as imageio

    scale = max(1, width // frames[0].shape[1])
    frames = frames + [frames[-1]] * (fps if hold is None else hold)
    with replacing(path) as temporary:
        with imageio.get_writer(temporary, fps=fps, codec="libx264", macro_block_size=2, quality=7) as writer:
            for frame in frames:
                writer.append_data(np.repeat(np.repeat(frame, scale, axis=0), scale, axis=1))  # type: ignore[attr-defined]
