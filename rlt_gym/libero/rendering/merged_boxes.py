"""Draws the boxes of an embedded asset as one, for ``render="fast"``.

A bowl is 48 boxes. For each of them MuJoCo sets a material, a pose and 96 quads (``vis.quality.numquads`` squared for
each side, so that lights shade large boxes smoothly), and a scene has two hundred such boxes: most of the time a
picture takes. Boxes of one body in one plain color become one display list of six quads a box, which one of them
shows instead of itself. The corners keep their colors; between the corners, highlights on shiny sides differ
and, where two boxes touch, which of them is seen.
"""

from __future__ import annotations

import warnings
from typing import Any

import mujoco
import numpy as np
from OpenGL import GL
from OpenGL.error import GLError

from rlt_gym.libero.rendering.display_lists import compile_list, forget_errors

#: Larger boxes (m, the longest half side), such as tables and walls, keep their many quads.
LARGEST = 0.2

_BOX, _MESH, _GEOM = int(mujoco.mjtGeom.mjGEOM_BOX), int(mujoco.mjtGeom.mjGEOM_MESH), int(mujoco.mjtObj.mjOBJ_GEOM)

#: A geom group that is not drawn (LIBERO draws 0 to 2).
_HIDDEN = 5

#: Corners of a box's six sides, counter-clockwise from outside, in units of its half sides.
_SIDES = np.array(
    [
        [[1, -1, -1], [1, 1, -1], [1, 1, 1], [1, -1, 1]],
        [[-1, -1, -1], [-1, -1, 1], [-1, 1, 1], [-1, 1, -1]],
        [[-1, 1, -1], [-1, 1, 1], [1, 1, 1], [1, 1, -1]],
        [[-1, -1, -1], [1, -1, -1], [1, -1, 1], [-1, -1, 1]],
        [[-1, -1, 1], [1, -1, 1], [1, 1, 1], [-1, 1, 1]],
        [[-1, -1, -1], [-1, 1, -1], [1, 1, -1], [1, -1, -1]],
    ],
    dtype=np.float64,
)
_NORMALS = np.repeat(_SIDES.mean(axis=1), 4, axis=0)


class MergedBoxes:
    """
    Hides boxes of the viewer's model and shows lists of them instead. The context must be current.

    :param model: The viewer's model; ``geom_group`` and ``geom_aabb`` are changed.
    :param context: MuJoCo's, whose numbers of meshes the lists are called by.
    """

    def __init__(self, model: Any, context: Any):
        self._base = int(context.baseMesh)
        #: By geom: the list it shows, 0 for none.
        self._lists = np.zeros(model.ngeom, dtype=np.int32)
        forget_errors()
        try:
            for geoms in _alike(model):
                self._merge(model, geoms)
        except GLError as error:
            warnings.warn(f"pictures are drawn box by box, in twice the time: {error}", stacklevel=2)

    def _merge(self, model: Any, geoms: list[int]) -> None:
        """Compile the boxes in the first one's frame; that one will show the list, the others hide."""
        first, corners, normals = geoms[0], [], []
        place, turn = model.geom_pos[first], _rotation(model.geom_quat[first])
        for geom in geoms:
            own = turn.T @ _rotation(model.geom_quat[geom])
            middle = turn.T @ (model.geom_pos[geom] - place)
            corners.append((_SIDES.reshape(-1, 3) * model.geom_size[geom]) @ own.T + middle)
            normals.append(_NORMALS @ own.T)
        points = np.concatenate(corners)

        def draw() -> None:
            GL.glBegin(GL.GL_QUADS)
            for normal, point in zip(np.concatenate(normals), points):
                GL.glNormal3d(*normal)
                GL.glVertex3d(*point)
            GL.glEnd()

        self._lists[first] = GL.glGenLists(1)
        compile_list(self._lists[first], draw)
        low, high = points.min(axis=0), points.max(axis=0)
        model.geom_aabb[first] = np.concatenate([(low + high) / 2, (high - low) / 2])
        model.geom_group[geoms[1:]] = _HIDDEN

    def apply(self, geoms: np.ndarray) -> None:
        """
        Show the merged boxes in the next drawing.

        :param geoms: The scene's records (:data:`rlt_gym.libero.rendering.culling.GEOM`) after ``mjv_updateScene``.
        """
        numbers = np.where(geoms["objtype"] == _GEOM, self._lists[np.maximum(geoms["objid"], 0)], 0)
        merged = numbers > 0
        geoms["type"][merged] = _MESH
        geoms["dataid"][merged] = numbers[merged] - self._base


def _alike(model: Any) -> list[list[int]]:
    """
    Which geoms can be drawn as one.

    :return: Groups of them: small boxes of one body and one plain, opaque, dull material.
    """
    found: dict[tuple, list[int]] = {}
    for geom in range(model.ngeom):
        material = int(model.geom_matid[geom])
        color = model.mat_rgba[material] if material >= 0 else model.geom_rgba[geom]
        plain = material < 0 or (model.mat_reflectance[material] == 0 and np.all(model.mat_texid[material] < 0))
        small = model.geom_size[geom].max() <= LARGEST
        opaque = color[3] == model.geom_rgba[geom][3] == 1.0
        if model.geom_type[geom] == _BOX and model.geom_group[geom] in (1, 2) and plain and small and opaque:
            key = (int(model.geom_bodyid[geom]), material, model.geom_rgba[geom].tobytes())
            found.setdefault(key, []).append(geom)
    return list(found.values())


def _rotation(quat: np.ndarray) -> np.ndarray:
    matrix = np.empty(9)
    mujoco.mju_quat2Mat(matrix, quat)
    return matrix.reshape(3, 3)
