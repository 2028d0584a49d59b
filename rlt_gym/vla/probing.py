"""What a check of a VLA looks at: made-up observations, pictures as the network reads them, its weights."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from rlt_gym.vla.base import ORIENTATIONS, FrozenVLA, VLASpec

#: Bytes of weights that are summed at once.
_PIECE = 1 << 24


def example_observations(spec: VLASpec, rows: int = 4, seed: int = 0) -> dict[str, np.ndarray]:
    """
    Make observations for a VLA without an environment: pictures of random blocks, no two alike and none symmetric.

    :param spec: What the VLA needs.
    :param rows: Number of observations B.
    :param seed: Of the random numbers.
    :return: Raw observations, see :data:`~rlt_gym.vla.base.VLAObs`.
    """
    rng = np.random.default_rng(seed)
    size = spec.check_frame_size()
    blocks = np.arange(size) * 6 // size
    pictures = {
        camera: rng.integers(0, 256, (rows, 6, 6, 3), dtype=np.uint8)[:, blocks][:, :, blocks]
        for camera in spec.cameras
    }
    return {**pictures, "state": rng.normal(0.0, 0.3, (rows, spec.state_dim or 8)).astype(np.float32)}


def orientation_of(given: np.ndarray, shown: np.ndarray) -> str | None:
    """
    Find out which way pictures are shown.

    :param given: Pictures (B, H, W, 3).
    :param shown: What a network reads of them, (B, h, w, 3) in any range.
    :return: A name of :data:`~rlt_gym.vla.base.ORIENTATIONS`; ``None`` if they are other pictures.
    """
    if shown.ndim != 4 or len(shown) != len(given) or shown.shape[3] != 3:
        return None
    picture = torch.tensor(shown.copy()).double().permute(0, 3, 1, 2)
    found = {}
    for name, change in ORIENTATIONS.items():
        whole = torch.tensor(change(given).copy()).double().permute(0, 3, 1, 2)
        pooled = torch.nn.functional.interpolate(whole, tuple(picture.shape[2:]), mode="area")
        found[name] = float(torch.corrcoef(torch.stack([pooled.flatten(), picture.flatten()]))[0, 1])
    best = max(found, key=lambda name: found[name])
    return best if found[best] > 0.8 else None


def networks_of(vla: FrozenVLA) -> list[torch.nn.Module]:
    """
    Find the networks of a VLA.

    :param vla: The VLA.
    :return: The VLA itself if it is a network, else those among its attributes.
    """
    if isinstance(vla, torch.nn.Module):
        return [vla]
    return [value for value in getattr(vla, "__dict__", {}).values() if isinstance(value, torch.nn.Module)]


def sums_of(vla: FrozenVLA) -> Mapping[str, int]:
    """
    Notice changes of a VLA's weights without a copy of them.

    :param vla: The VLA.
    :return: For each parameter and buffer of its networks a number that changes with it.
    """
    sums: dict[str, int] = {}
    for number, module in enumerate(networks_of(vla)):
        for name, value in module.state_dict().items():
            raw, total = value.detach().contiguous().reshape(-1).view(torch.uint8), 0
            for start in range(0, len(raw), _PIECE):
                piece = raw[start : start + _PIECE].long()
                places = torch.arange(start, start + len(piece), device=raw.device) % 251 + 1
                total += int((piece * places).sum())
            sums[f"{number}.{name}"] = total
    return sums
