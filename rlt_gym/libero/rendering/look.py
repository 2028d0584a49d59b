"""Brightness and colors of a scene, as a renderer may change them from episode to episode."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class Look:
    """
    What a renderer changes in its own copy of the model.

    :param lights: Factors of the lights' brightness (nlight,).
    :param materials: Factors of the materials' colors (nmat, 3).
    :param geoms: Factors of the colors of geoms (ngeom, 3); 1 for those with a material.
    """

    lights: np.ndarray
    materials: np.ndarray
    geoms: np.ndarray
