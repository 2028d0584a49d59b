"""Tiny pictures for floors, walls and wood, computed from a few numbers."""

from __future__ import annotations

import io
import zlib

import numpy as np
from PIL import Image

from rlt_gym.libero.assets.schema import Texture

SIZE = 64
"""Pixels per side. Cameras of 64 to 256 pixels see no more, and upload is quick."""


def _tiles(rng: np.random.Generator) -> np.ndarray:
    shade = np.kron(rng.uniform(-0.3, 0.3, (2, 2)), np.ones((SIZE // 2, SIZE // 2)))
    joint = np.arange(SIZE) % (SIZE // 2) < 2
    shade[joint, :] = -1.0
    shade[:, joint] = -1.0
    return shade


def _grain(rng: np.random.Generator) -> np.ndarray:
    lines = np.cumsum(rng.normal(0.0, 0.45, SIZE))
    lines -= np.linspace(lines[0], lines[-1], SIZE)  # first and last line meet when the picture repeats
    lines /= np.abs(lines).max()
    return lines[:, None] + rng.normal(0.0, 0.08, (SIZE, SIZE))


def _speckle(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(0.0, 0.5, (SIZE, SIZE))


def _weave(rng: np.random.Generator) -> np.ndarray:
    x = np.arange(SIZE)
    strand = np.abs(np.sin(np.pi * x / 8))  # strands of 8 pixels, alternately over and under
    over = (x[:, None] // 8 + x[None, :] // 8) % 2 == 0
    return np.where(over, strand[:, None], strand[None, :]) * 1.6 - 1.2 + rng.normal(0.0, 0.1, (SIZE, SIZE))


PATTERNS = {"tiles": _tiles, "grain": _grain, "speckle": _speckle, "weave": _weave}


def render_texture(name: str, texture: Texture) -> bytes:
    """
    Draw a texture.

    :param name: Name of the texture; seeds its noise, so each looks different and every build of one looks the same.
    :param texture: What to draw.
    :return: A PNG file.
    :raises ValueError: If the pattern is unknown.
    """
    if texture.pattern not in PATTERNS:
        raise ValueError(f"texture {name!r}: unknown pattern {texture.pattern!r}; choose from {sorted(PATTERNS)}")
    shade = PATTERNS[texture.pattern](np.random.default_rng(zlib.crc32(name.encode())))
    pixels = np.array(texture.rgb) * (1.0 + texture.contrast * shade[..., None])
    picture = Image.fromarray((np.clip(pixels, 0.0, 1.0) * 255).round().astype(np.uint8))
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()
