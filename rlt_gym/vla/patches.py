"""Tokens of pictures for a VLA that gives none of its own: the patches themselves, without any network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

#: Edge in pixels to which pictures are averaged, and edge of a patch.
EDGE, PATCH = 64, 8
#: Tokens per picture, and their width.
COUNT, WIDTH = (EDGE // PATCH) ** 2, 3 * PATCH**2


def patch_tokens(pictures: Sequence[np.ndarray]) -> torch.Tensor:
    """
    Cut pictures into patches.

    An RL token can be trained on them (``rlt pretrain-token``): it becomes a small encoder of pictures that
    reconstructs them, and knows nothing of what the VLA knows.

    :param pictures: One uint8 array (B, H, W, 3) per camera.
    :return: float32 (B, M, 192) in [-1, 1]: 64 tokens per camera, row by row from the pictures' first row on.
    """
    import torch
    import torch.nn.functional as F

    tokens = []
    for picture in pictures:
        pixels = torch.from_numpy(np.ascontiguousarray(picture)).permute(0, 3, 1, 2).float() / 127.5 - 1.0
        small = F.interpolate(pixels, (EDGE, EDGE), mode="area")
        tokens.append(F.unfold(small, kernel_size=PATCH, stride=PATCH).transpose(1, 2))
    return torch.cat(tokens, dim=1)
