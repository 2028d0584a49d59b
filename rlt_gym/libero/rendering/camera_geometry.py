"""What MuJoCo's cameras and mirrors see of a scene: positions, axes and the planes around it, in numbers."""

from __future__ import annotations

import mujoco
import numpy as np


def camera_of(scene: mujoco.MjvScene) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    Read the camera of a scene.

    :param scene: A scene after ``mjv_updateScene``.
    :return: Position of the camera (3,), its axes right, up and forward as rows (3, 3), and its window: left, right,
        bottom, top at the near plane, near and far distance (6,).
    """
    left, right = scene.camera[0], scene.camera[1]  # the same, an eye's distance apart: mjr_render takes the middle
    eye = 0.5 * (left.pos.astype(np.float64) + right.pos)
    forward = left.forward.astype(np.float64) + right.forward
    forward /= np.sqrt(forward @ forward)
    up = left.up.astype(np.float64) + right.up
    up /= np.sqrt(up @ up)
    half = 0.5 * (float(left.frustum_top) - float(left.frustum_bottom))  # pictures are square
    window = [-half, half, left.frustum_bottom, left.frustum_top, left.frustum_near, left.frustum_far]
    return eye, np.array([_cross(forward, up), up, forward]), np.array(window, dtype=np.float64)


def _cross(a: np.ndarray, b: np.ndarray) -> list[float]:
    """np.cross costs thirty times as much."""
    (x, y, z), (u, v, w) = a.tolist(), b.tolist()
    return [y * w - z * v, z * u - x * w, x * v - y * u]


def planes_around(eye: np.ndarray, axes: np.ndarray, window: np.ndarray) -> np.ndarray:
    """
    Compute the planes around what a camera sees.

    :param eye: Position of the camera (3,).
    :param axes: Its axes right, up and forward as rows (3, 3).
    :param window: Its window (6,), see :func:`camera_of`.
    :return: Five planes (5, 4), normals inwards.
    """
    left, right, bottom, top, near, _ = window
    inward = np.array([[0, 0, 1], [near, 0, -left], [-near, 0, right], [0, near, -bottom], [0, -near, top]]) @ axes
    inward /= np.linalg.norm(inward, axis=1, keepdims=True)
    return np.concatenate([inward, -inward @ eye[:, None]], axis=1)


def touches(planes: np.ndarray, center: np.ndarray, radius: np.ndarray) -> np.ndarray:
    """
    Which spheres are not wholly behind one of the planes.

    :param planes: Planes (p, 4), normals inwards.
    :param center: Centers of the spheres (n, 3).
    :param radius: Their radii (n,).
    :return: bool (n,).
    """
    return (center @ planes[:, :3].T + planes[:, 3] > -radius[:, None]).all(axis=1)


def mirror_images(mirror: np.ndarray, eye: np.ndarray, poses: np.ndarray) -> np.ndarray:
    """
    Poses of mirror images.

    :param mirror: Record of the mirror's geom.
    :param eye: Position of the camera (3,).
    :param poses: Rotations and positions relative to the camera (n, 3, 4).
    :return: Those of the mirror images.
    """
    _, normal, height = _surface(mirror, eye)
    images = poses - 2.0 * normal[:, None] * (normal @ poses)[:, None, :]
    images[:, :, 3] -= 2.0 * height * normal
    return images


def _surface(mirror: np.ndarray, eye: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """
    Where a mirror is.

    :return: Middle of a mirror (3,), its unit normal (3,) and the camera's height above it (m).
    """
    normal = mirror["mat"].astype(np.float64)[:, 2]
    middle = mirror["pos"] + (mirror["size"][2] * normal if mirror["type"] == mujoco.mjtGeom.mjGEOM_BOX else 0.0)
    return middle, normal, float((eye - middle) @ normal)


def view_in_mirror(mirror: np.ndarray, eye: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """
    Compute what a camera sees through a mirror.

    :param mirror: Record of the mirror's geom.
    :param eye: Position of the camera (3,).
    :return: The camera's mirror image and the planes around what it sees through the mirror; ``None`` where the camera
        is behind the mirror.
    """
    middle, normal, height = _surface(mirror, eye)
    if height < 0:
        return None
    rotation = mirror["mat"].astype(np.float64)
    image = eye - 2.0 * height * normal
    inward = [[*normal, -normal @ middle]]
    half = mirror["size"][:2].astype(np.float64)
    if (half > 0).all():  # through the sides of the mirror's rectangle
        for along, across, size in ((0, 1, half[1]), (1, 0, half[0])):
            for sign in (1.0, -1.0):
                edge = middle + sign * size * rotation[:, across]
                plane = np.cross(rotation[:, along], edge - image)
                plane /= max(np.linalg.norm(plane), 1e-12)
                if plane @ (middle - image) < 0:
                    plane = -plane
                inward.append([*plane, -plane @ image])
    return image, np.array(inward)
