"""Pure geometry used by the scripted experts: rotations, corner points of shapes, heights of supports."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: MuJoCo's ``mjtGeom`` numbers of the round shapes whose bounding-box corners would overstate their width.
ROUND_GEOMS = (3, 5)


def shape_points(geom_type: int, center: Array, half: Array) -> Array:
    """
    Points that span a geom, in the geom's own frame.

    :param geom_type: MuJoCo ``mjtGeom`` number (capsules and cylinders get a ring of points,
        everything else box corners)
    :param center: (3,) center of the geom's bounding box, meters
    :param half: (3,) half sizes of the geom's bounding box, meters
    :return: (n, 3) points, meters
    """
    if geom_type in ROUND_GEOMS:
        angles = np.arange(12) * np.pi / 6
        ring = np.stack([np.cos(angles), np.sin(angles)], axis=1)
        unit = np.concatenate([np.c_[ring, np.full(12, s)] for s in (-1.0, 1.0)])
    else:
        unit = np.array([[x, y, z] for x in (-1.0, 1.0) for y in (-1.0, 1.0) for z in (-1.0, 1.0)])
    return center + unit * half


def rotation_vector(rotation: Array) -> Array:
    """
    Axis-angle vector of a rotation matrix (angle in [0, pi]).

    :param rotation: (3, 3) rotation matrix
    :return: (3,) rotation vector, radians
    """
    cosine = float(np.clip((np.trace(rotation) - 1.0) / 2.0, -1.0, 1.0))
    angle = float(np.arccos(cosine))
    skew = np.array([rotation[2, 1] - rotation[1, 2], rotation[0, 2] - rotation[2, 0], rotation[1, 0] - rotation[0, 1]])
    if angle < 1e-6:
        return skew / 2.0
    if np.pi - angle < 1e-3:  # the skew part vanishes at half a turn: take the axis from the symmetric part
        column = int(np.argmax(np.diag(rotation)))
        axis = rotation[:, column] + np.eye(3)[column]
        return angle * axis / np.linalg.norm(axis)
    return skew * (angle / (2.0 * np.sin(angle)))


def hand_rotation(approach: Array, finger_axis: Array, local_finger_axis: Array) -> Array:
    """
    Orientation of a hand that points along ``approach`` and opens its fingers along ``finger_axis``.

    :param approach: (3,) wanted direction of the hand's local z axis
    :param finger_axis: (3,) direction of the line between the fingers (made perpendicular to ``approach``)
    :param local_finger_axis: (3,) that line in the hand's frame, perpendicular to its z axis
    :return: (3, 3) rotation matrix, hand to world
    """
    z = approach / np.linalg.norm(approach)
    f = finger_axis - np.dot(finger_axis, z) * z
    f = f / np.linalg.norm(f)
    world = np.stack([f, np.cross(z, f), z], axis=1)
    local_f = local_finger_axis / np.linalg.norm(local_finger_axis)
    local_z = np.array([0.0, 0.0, 1.0])
    local = np.stack([local_f, np.cross(local_z, local_f), local_z], axis=1)
    return world @ local.T


def axis_within_quarter_turn(axis: Array, reference: Array) -> Array:
    """
    Sign a line's direction so that it lies within 90 degrees of ``reference``.

    :param axis: (3,) direction
    :param reference: (3,) direction
    :return: ``axis`` or ``-axis``
    """
    return axis if float(np.dot(axis, reference)) >= 0.0 else -axis


def principal_horizontal_axes(points: Array) -> tuple[Array, float, float]:
    """
    Narrowest horizontal direction of a point set, by rotating callipers over 36 directions.

    :param points: (n, 3) points in the world, meters
    :return: (unit vector (3,) of the narrowest direction, width along it, width across it), meters
    """
    angles = np.arange(36) * np.pi / 36
    directions = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    widths = np.ptp(points[:, :2] @ directions.T, axis=0)
    best = int(np.argmin(widths))
    across = float(widths[(best + 18) % 36])
    return np.array([*directions[best], 0.0]), float(widths[best]), across


def surface_heights(centers: Array, rotations: Array, halves: Array, points: Array) -> Array:
    """
    Height of the highest surface of a set of turned boxes above (or below) each of some points.

    :param centers: (n, 3) centers of the boxes, meters
    :param rotations: (n, 3, 3) box to world
    :param halves: (n, 3) half sizes, meters
    :param points: (m, 2) the points, meters
    :return: (m,) heights in meters, ``-inf`` where there is no box
    """
    direction = rotations[:, 2, :]  # the world's z axis in each box's frame
    direction = np.where(np.abs(direction) < 1e-9, 1e-9, direction)
    offset = np.einsum("nij,ni->nj", rotations, centers)
    start = np.einsum("nij,mi->mnj", rotations[:, :2], points) - offset
    one, other = (-halves - start) / direction, (halves - start) / direction
    enter, leave = np.minimum(one, other).max(axis=2), np.maximum(one, other).min(axis=2)
    heights = np.where(enter <= leave, leave, -np.inf)
    return np.asarray(heights.max(axis=1, initial=-np.inf))


def clip_norm(vector: Array, limit: float) -> Array:
    """
    Shorten a vector to a length, keeping its direction.

    :param vector: any vector
    :param limit: greatest length
    :return: the vector, or one of length ``limit``
    """
    length = float(np.linalg.norm(vector))
    return vector if length <= limit else vector * (limit / length)


def ramp(value: float, low: float, high: float) -> float:
    """
    0 below ``low``, 1 above ``high``, linear between.

    :param value: where to read the ramp
    :param low: start of the slope
    :param high: end of the slope
    :return: a number from 0 to 1
    """
    return float(np.clip((value - low) / (high - low), 0.0, 1.0))
