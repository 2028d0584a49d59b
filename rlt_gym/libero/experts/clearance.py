"""Room for the hand and for what it carries: which grasp is free, where to put down, how high to travel."""

from __future__ import annotations

import numpy as np

from rlt_gym.libero.experts.geometry import Array
from rlt_gym.libero.experts.scene import Scene

#: The gap between the fingers when fully open, metres.
WIDE_OPEN = 0.08
#: A finger seen from above: half size along and across the line between the fingers, and how far it reaches below the
#: grasp point. Metres.
FINGER_HALF, FINGER_TIP = np.array([0.012, 0.012]), 0.01
#: Height of the palm above the grasp point, metres.
PALM_HEIGHT = 0.045
#: Half length and half width of the palm.
PALM_HALF = np.array([0.105, 0.033])
#: Farther than this from the robot's base the arm is nearly stretched and slow to settle, metres.
COMFORTABLE_REACH = 0.65


def _rectangle(half: Array, count: tuple[int, int]) -> Array:
    """Grid of points (n, 2) over a rectangle around 0."""
    return np.array(
        [(u, v) for u in np.linspace(-half[0], half[0], count[0]) for v in np.linspace(-half[1], half[1], count[1])]
    )


def _hand_points(opening: float) -> tuple[Array, Array]:
    """Points of the hand's outline: (n, 2) in the hand's frame and (n,) heights above the grasp point."""
    finger, palm = _rectangle(FINGER_HALF, (3, 3)), _rectangle(PALM_HALF, (9, 3))
    away = np.array([opening / 2 + FINGER_HALF[0], 0.0])
    heights = np.concatenate([np.full(2 * len(finger), -FINGER_TIP), np.full(len(palm), PALM_HEIGHT)])
    return np.concatenate([finger + away, finger - away, palm]), heights


def blocked(scene: Scene, geoms: Array, positions: Array, axes: Array, opening: float, margin: float = 0.004) -> Array:
    """
    How much is in the way of a hand that comes down from above.

    :param scene: the simulation
    :param geoms: obstacles, geom ids
    :param positions: (k, 3) grasp points
    :param axes: (k, 3) lines between the fingers
    :param opening: gap between the fingers, metres
    :param margin: room to keep above things, metres
    :return: (k,) share of the hand's outline that would hit something
    """
    outline, low = _hand_points(opening)
    u = axes[:, None, :2] / np.linalg.norm(axes[:, None, :2], axis=2, keepdims=True)
    v = np.stack([-u[..., 1], u[..., 0]], axis=2)
    points = positions[:, None, :2] + outline[:, :1] * u + outline[:, 1:] * v
    heights = scene.heights(geoms, points.reshape(-1, 2)).reshape(points.shape[:2])
    return np.asarray((heights > positions[:, 2:] + low + margin).mean(axis=1))


def path_top(scene: Scene, geoms: Array, start: Array, end: Array, half_width: float) -> float:
    """
    Height of the highest obstacle on a straight way.

    :param scene: the simulation
    :param geoms: obstacles, geom ids
    :param start: (2,) where it starts, metres
    :param end: (2,) where it ends, metres
    :param half_width: half width of what travels, metres
    :return: height in metres, ``-inf`` when the way is free
    """
    low, high = scene.boxes(geoms)
    way = start + np.linspace(0.0, 1.0, 12)[:, None] * (end - start)
    over = np.all(
        (way[:, None] > low[None, :, :2] - half_width) & (way[:, None] < high[None, :, :2] + half_width), axis=2
    )
    tops = high[over.any(axis=0), 2]
    return float(tops.max()) if len(tops) else -np.inf


def landing_offset(scene: Scene, target: str, name: str, bottom: float, hand: Array, axis: Array) -> Array:
    """
    Where in a region to put an object down: clear of other things, in reach, otherwise in the middle.

    :param scene: the simulation
    :param target: object, fixture or site name
    :param name: the object that is carried
    :param bottom: height of the object's lowest point at release, metres
    :param hand: (3,) hand relative to the middle of the object's bottom, metres
    :param axis: (3,) line between the fingers
    :return: (2,) displacement from the region's centre, metres; zero for anything but a site
    """
    half = scene.region_half(target)[:2]
    if not half.any():
        return np.zeros(2)
    centre = scene.position(target)[:2]
    steps = np.linspace(-0.75, 0.75, 7)
    offsets = np.array([(x, y) for x in steps for y in steps]) * half
    points = scene.points(name)
    geoms = scene.obstacles(name)
    body = _rectangle(np.ptp(points[:, :2], axis=0) / 2 + 0.006, (5, 5))
    u = axis[:2] / np.linalg.norm(axis[:2])
    palm = hand[:2] + _rectangle(PALM_HALF + 0.006, (9, 3)) @ np.array([u, [-u[1], u[0]]])
    cost = np.zeros(len(offsets))
    for part, height in ((body, bottom + 0.005), (palm, bottom + hand[2] + PALM_HEIGHT)):
        spots = (centre + offsets)[:, None] + part
        found = scene.heights(geoms, spots.reshape(-1, 2)).reshape(spots.shape[:2])
        cost += (found > height).mean(axis=1)
    cost += 0.02 * ((offsets / half) ** 2).sum(axis=1)
    reach = np.linalg.norm(centre + offsets - scene.base_position[:2], axis=1)
    cost += 0.15 * np.clip(reach - COMFORTABLE_REACH, 0.0, None)
    return np.asarray(offsets[int(np.argmin(cost))])
