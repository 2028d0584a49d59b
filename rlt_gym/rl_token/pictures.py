"""What a VLA reads, as entries of an observation: rows of a replay buffer can be shown to a VLA again."""

from collections.abc import Mapping, Sequence

import numpy as np
from gymnasium import spaces

#: Bytes of ``instruction``; LIBERO's longest has 116.
INSTRUCTION = 256
#: Bytes of ``vla_seed``.
SEED = 4


def picture_boxes(space: spaces.Dict, cameras: Sequence[str]) -> dict[str, spaces.Box]:
    """
    Describe the entries.

    :param space: Observations of a raw environment.
    :param cameras: Keys of the cameras that the VLA reads.
    :return: ``pictures`` (cameras, S, S, 3), ``instruction`` and ``vla_seed``.
    :raises ValueError: If the pictures differ in size.
    """
    shapes = {camera: space[camera].shape for camera in cameras}
    if len(set(shapes.values())) != 1:
        raise ValueError(f"show_pictures needs cameras whose pictures have one shape, got {shapes}: leave it out.")
    # four dimensions: Stable-Baselines3 turns what it takes for one picture
    shape = (len(cameras), *(next(iter(shapes.values())) or ()))
    sizes = {"pictures": shape, "instruction": (INSTRUCTION,), "vla_seed": (SEED,)}
    return {name: spaces.Box(0, 255, size, np.uint8) for name, size in sizes.items()}


def shown_pictures(
    frames: Mapping[str, np.ndarray], cameras: Sequence[str], tasks: Sequence[str], seeds: Sequence[int]
) -> dict[str, np.ndarray]:
    """
    Make the entries.

    :param frames: For each camera uint8 (B, S, S, 3).
    :param cameras: Their order.
    :param tasks: One instruction per row.
    :param seeds: One number in [0, 2**32) per row.
    :return: ``pictures`` (B, cameras, S, S, 3), ``instruction`` (B, 256), ``vla_seed`` (B, 4).
    :raises ValueError: If an instruction is too long.
    """
    instruction = np.zeros((len(tasks), INSTRUCTION), dtype=np.uint8)
    for row, task in zip(instruction, tasks, strict=True):
        letters = task.encode()
        if len(letters) > INSTRUCTION:
            raise ValueError(
                f"show_pictures keeps {INSTRUCTION} bytes of an instruction, got {len(letters)}: shorten {task!r}."
            )
        row[: len(letters)] = np.frombuffer(letters, dtype=np.uint8)
    seed = np.asarray(seeds, dtype="<u4").view(np.uint8).reshape(len(tasks), SEED)
    return {
        "pictures": np.stack([frames[camera] for camera in cameras], 1),
        "instruction": instruction,
        "vla_seed": seed,
    }


def read_instructions(instruction: np.ndarray) -> list[str]:
    """
    Read instructions as :func:`shown_pictures` wrote them.

    :param instruction: uint8 (B, 256).
    :return: One text per row.
    """
    return [bytes(row[row != 0]).decode() for row in instruction]


def read_seeds(seed: np.ndarray) -> list[int]:
    """
    Read seeds as :func:`shown_pictures` wrote them.

    :param seed: uint8 (B, 4).
    :return: One number per row.
    """
    return np.ascontiguousarray(seed).view("<u4")[:, 0].tolist()
