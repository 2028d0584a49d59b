"""Further entries of an observation: the VLA's tokens and what it reads, so that a row can be shown to it again."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from gymnasium import spaces

if TYPE_CHECKING:
    from rlt_gym.rl_token.base import Encoder
    from rlt_gym.vla.base import FrozenVLA, VLAOutput

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


def tokens_shape(vla: "FrozenVLA") -> tuple[int, int]:
    """
    Tell the shape of ``vla_tokens``.

    :param vla: The VLA.
    :return: Most valid tokens per observation, width of a token.
    :raises ValueError: If it does not say how many there are.
    """
    if vla.spec.max_tokens is None:
        raise ValueError(f"show_tokens needs a VLA that says how many tokens it gives, {vla.spec.name!r} does not.")
    return vla.spec.max_tokens, vla.spec.token_dim


def shown_tokens(output: "VLAOutput", encoder: "Encoder", vla: "FrozenVLA") -> np.ndarray:
    """
    Make ``vla_tokens``.

    :param output: What the VLA gave for B observations.
    :param encoder: The encoder, which says what kinds of tokens it reads; all kinds if it does not.
    :param vla: The VLA.
    :return: Float16 (B, M, H), valid ones first, zeros where there is none.
    :raises ValueError: If a number is too large for float16.
    """
    from rlt_gym.vla.tokens import select_tokens

    tokens, _ = select_tokens(output, getattr(getattr(encoder, "config", None), "kinds", ("all",)))
    shown = np.zeros((len(tokens), *tokens_shape(vla)), dtype=np.float16)
    shown[:, : tokens.shape[1]] = tokens.cpu().numpy()
    if not np.isfinite(shown).all():
        raise ValueError(f"The tokens of the VLA {vla.spec.name!r} are too large for float16: leave out show_tokens.")
    return shown
