"""Brightness, colors and textures of a scene, as a renderer may change them from episode to episode."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Look:
    """
    What a renderer changes in its own copy of the model.

    :param lights: Factors of the lights' brightness (nlight,).
    :param materials: Factors of the materials' colors (nmat, 3).
    :param geoms: Factors of the colors of geoms (ngeom, 3); 1 for those with a material.
    :param textures: By number of the texture, all that ``tex_data`` has of it, uint8.
    """

    lights: np.ndarray
    materials: np.ndarray
    geoms: np.ndarray
    textures: dict[int, np.ndarray] = field(default_factory=dict)
