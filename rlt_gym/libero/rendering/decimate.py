"""Coarser visual meshes for ``render="fast"``, in the viewer's copy of a model: states are not touched.

Vertex clustering (Rossignac and Borrel, 1993): all vertices inside one cell of a grid move to their mean, and triangles
that became a line, or equal to another, are left out. Texture coordinates and normals stay those of the original
corners.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

#: A cell's side is this share of the mesh's longest side, within limits (m): fingers keep their shape, a pedestal needs
#: none.
CELL_SHARE = 1 / 20
CELL_LIMITS = (0.0015, 0.006)


def cluster_vertices(vertices: np.ndarray, cell: float) -> tuple[np.ndarray, np.ndarray]:
    """
    Merge the vertices in each cell of a grid.

    :param vertices: float (n, 3), meters.
    :param cell: Side of a cell of the grid (m).
    :return: Each vertex's cell number (n,) and each vertex's new position (n, 3).
    """
    grid = np.floor((vertices - vertices.min(axis=0)) / cell).astype(np.int64)
    _, number = np.unique(grid @ np.array([1, 1 << 20, 1 << 40]), return_inverse=True)
    number = number.reshape(-1)
    count = np.bincount(number)
    mean = np.stack([np.bincount(number, weights=vertices[:, axis]) / count for axis in range(3)], axis=1)
    return number, mean[number]


def kept_faces(corners: np.ndarray) -> np.ndarray:
    """
    Choose the triangles that remain after vertices were merged.

    :param corners: int (n, 3): cells of each triangle's corners.
    :return: Numbers of the triangles to keep, ascending: those with three different corners, one of each kind.
    """
    proper = np.flatnonzero(
        (corners[:, 0] != corners[:, 1]) & (corners[:, 1] != corners[:, 2]) & (corners[:, 2] != corners[:, 0])
    )
    # turn each triangle so that its smallest corner comes first: its orientation stays
    shift = np.argmin(corners[proper], axis=1)
    turned = np.take_along_axis(corners[proper], (shift[:, None] + np.arange(3)) % 3, axis=1)
    _, first = np.unique(turned, axis=0, return_index=True)
    return np.sort(proper[first])


def decimate(model: Any, meshes: Iterable[int]) -> None:
    """
    Coarsen meshes in place.

    :param model: A copy of the simulator's model, used for nothing but drawing.
    :param meshes: Ids of the meshes.
    """
    for mesh in meshes:
        start, count = int(model.mesh_faceadr[mesh]), int(model.mesh_facenum[mesh])
        first = int(model.mesh_vertadr[mesh])
        rows = slice(first, first + int(model.mesh_vertnum[mesh]))
        vertices = model.mesh_vert[rows].astype(np.float64)
        cell = float(np.clip(np.ptp(vertices, axis=0).max() * CELL_SHARE, *CELL_LIMITS))
        number, moved = cluster_vertices(vertices, cell)
        keep = kept_faces(number[model.mesh_face[start : start + count]])
        if len(keep) < 12:  # a plate thinner than a cell
            continue
        model.mesh_vert[rows] = moved
        for array in (model.mesh_face, model.mesh_facenormal, model.mesh_facetexcoord):
            array[start : start + len(keep)] = array[start + keep]
        model.mesh_facenum[mesh] = len(keep)
