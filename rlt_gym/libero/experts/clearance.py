"""Room for the hand and for what it carries: which grasp is free, where to put down, how high to travel."""

from __future__ import annotations

import numpy as np

from rlt_gym.libero.experts.geometry import Array
from rlt_gym.libero.experts.scene import Scene

#: The gap between the fingers when fully open, meters.
WIDE_OPEN = 0.08
#: A finger seen from above: half size along and across the line between the fingers, and how far it reaches below the
#: grasp point. Meters.
FINGER_HALF, FINGER_TIP = np.array([0.012, 0.012]), 0.01
#: Height of the palm above the grasp point, meters.
PALM_HEIGHT = 0.045
#: Half length and half width of the palm.
PALM_HALF = np.array([0.105, 0.033])
#: The wrist above a palm: height above the grasp point and half width. It is over the palm unless the hand leans.
WRIST = ((0.13, 0.05), (0.2, 0.07))
#: The last but one link of the arm lies this far on the robot's side of the wrist, meters.
WRIST_OFFSET = 0.07
#: Farther than this from the robot's base the arm is nearly stretched and slow to settle, meters.
COMFORTABLE_REACH = 0.65


def _rectangle(half: Array, count: tuple[int, int]) -> Array:
    """Grid of points (n, 2) over a rectangle around 0."""
    return np.array(
        [(u, v) for u in np.linspace(-half[0], half[0], count[0]) for v in np.linspace(-half[1], half[1], count[1])]
    )


def _hand_points(opening: float, leans: bool = False) -> tuple[Array, Array]:
    """Points of the hand's outline: (n, 2) in the hand's frame and (n,) heights above the grasp point."""
    finger, palm = _rectangle(FINGER_HALF, (3, 3)), _rectangle(PALM_HALF, (9, 3))
    away = np.array([opening / 2 + FINGER_HALF[0], 0.0])
    parts = [(finger + away, -FINGER_TIP), (finger - away, -FINGER_TIP), (palm, PALM_HEIGHT)]
    if leans:
        parts += [(_rectangle(np.full(2, half), (3, 3)), height) for height, half in WRIST]
    return np.concatenate([part for part, _ in parts]), np.concatenate([np.full(len(p), h) for p, h in parts])


def _outline(
    positions: Array, axes: Array, approaches: Array, opening: float, leans: bool = False
) -> tuple[Array, Array]:
    """Points (k, n, 3) of the outlines of k hands in the world, and (n,) their heights above the grasp points."""
    flat, low = _hand_points(opening, leans)
    u = axes - (axes * approaches).sum(axis=1, keepdims=True) * approaches
    u = u / np.linalg.norm(u, axis=1, keepdims=True)
    v = np.cross(approaches, u)
    points = positions[:, None] + flat[:, :1] * u[:, None] + flat[:, 1:] * v[:, None]
    return points - low[:, None] * approaches[:, None], low


def blocked(
    scene: Scene,
    geoms: Array,
    positions: Array,
    axes: Array,
    approaches: Array,
    opening: float,
    margin: float = 0.004,
) -> Array:
    """
    How much is in the way of a hand that comes down from above.

    :param scene: the simulation
    :param geoms: obstacles, geom ids
    :param positions: (k, 3) grasp points
    :param axes: (k, 3) lines between the fingers
    :param approaches: (k, 3) unit vectors along which the palm looks
    :param opening: gap between the fingers, meters
    :param margin: room to keep above things, meters
    :return: (k,) share of the hand's outline that would hit something
    """
    points, low = _outline(positions, axes, approaches, opening, leans=bool((approaches[:, 2] > -0.99).any()))
    to_base = scene.base_position[:2] - positions[:, :2]
    to_base /= np.linalg.norm(to_base, axis=1, keepdims=True)
    points[:, low == WRIST[-1][0], :2] += WRIST_OFFSET * to_base[:, None]
    heights = scene.heights(geoms, points[..., :2].reshape(-1, 2)).reshape(points.shape[:2])
    return np.asarray((heights > points[..., 2] + margin).mean(axis=1))


def path_top(scene: Scene, geoms: Array, start: Array, end: Array, half_width: float) -> float:
    """
    Height of the highest obstacle on a straight way.

    :param scene: the simulation
    :param geoms: obstacles, geom ids
    :param start: (2,) where it starts, meters
    :param end: (2,) where it ends, meters
    :param half_width: half width of what travels, meters
    :return: height in meters, ``-inf`` when the way is free
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
    :param bottom: height of the object's lowest point at release, meters
    :param hand: (3,) hand relative to the middle of the object's bottom, meters
    :param axis: (3,) line between the fingers
    :return: (2,) displacement from the region's center, meters; zero for anything but a site
    """
    half = scene.region_half(target)[:2]
    if not half.any():
        return np.zeros(2)
    center = scene.position(target)[:2]
    steps = np.linspace(-0.75, 0.75, 7)
    offsets = np.array([(x, y) for x in steps for y in steps]) * half
    points = scene.points(name)
    geoms = scene.obstacles(name)
    body = _rectangle(np.ptp(points[:, :2], axis=0) / 2 + 0.006, (5, 5))
    u = axis[:2] / np.linalg.norm(axis[:2])
    palm = hand[:2] + _rectangle(PALM_HALF + 0.006, (9, 3)) @ np.array([u, [-u[1], u[0]]])
    cost = np.zeros(len(offsets))
    for part, height in ((body, bottom + 0.005), (palm, bottom + hand[2] + PALM_HEIGHT)):
        spots = (center + offsets)[:, None] + part
        found = scene.heights(geoms, spots.reshape(-1, 2)).reshape(spots.shape[:2])
        cost += (found > height).mean(axis=1)
    cost += 0.02 * ((offsets / half) ** 2).sum(axis=1)
    reach = np.linalg.norm(center + offsets - scene.base_position[:2], axis=1)
    cost += 0.15 * np.clip(reach - COMFORTABLE_REACH, 0.0, None)
    return np.asarray(offsets[int(np.argmin(cost))])


def way_out(scene: Scene, name: str, axis: Array, approach: Array) -> Array:
    """
    How far to pull an object that is held sideways before it can be lifted: out from under an open drawer, say.

    :param scene: the simulation
    :param name: the object in the hand
    :param axis: (3,) line between the fingers
    :param approach: (3,) where the palm looks
    :return: (2,) the shortest displacement that leaves nothing above object and hand, meters; zero if there is nothing
    """
    hand, geoms = scene.hand_position, scene.obstacles(name)
    outline, _ = _outline(hand[None], axis[None], approach[None], opening=0.0)
    own = scene.points(name)
    points = np.concatenate([outline[0], own])
    bottoms, tops = scene.boxes(geoms)
    above = geoms[bottoms[:, 2] > hand[2] + 0.02]
    beside = geoms[(bottoms[:, 2] <= hand[2] + 0.02) & (tops[:, 2] > own[:, 2].min() + 0.03)]
    around = _rectangle(np.full(2, 0.008), (2, 2))
    spots = (points[:, None, :2] + around).reshape(-1, 2)
    heights = np.repeat(points[:, 2], len(around))

    def free(which: Array, offset: Array) -> bool:
        return not bool((scene.heights(which, spots + offset) > heights).any())

    if free(above, np.zeros(2)):
        return np.zeros(2)
    angles = np.arange(16) * np.pi / 8
    for length in np.arange(0.02, 0.2, 0.02):
        ways = [length * np.array([np.cos(angle), np.sin(angle)]) for angle in angles]
        for way in sorted(ways, key=lambda way: float(np.linalg.norm(hand[:2] + way - scene.base_position[:2]))):
            if free(above, way) and free(beside, way) and free(beside, way / 2):
                return way
    return np.zeros(2)


def drawer_way(scene: Scene, region: str) -> tuple[Array, Array]:
    """
    Where a drawer will be on its way out.

    :param scene: the simulation
    :param region: site name, such as ``wooden_cabinet_1_top_region``
    :return: (lowest corner (2,), highest corner (2,)) of the ground it covers from here to fully open, meters
    """
    joint, body = scene.joint_of(region)
    geoms = np.flatnonzero((scene.model.geom_bodyid == body) & (scene.model.geom_contype != 0))
    low, high = scene.boxes(geoms)
    ends = scene.model.jnt_range[joint] - scene.data.qpos[scene.model.jnt_qposadr[joint]]
    moves = scene.data.xaxis[joint] * ends[:, None]
    return (low.min(axis=0) + moves.min(axis=0))[:2], (high.max(axis=0) + moves.max(axis=0))[:2]


def place_aside(scene: Scene, name: str, low: Array, high: Array) -> Array | None:
    """
    Find the nearest free place for an object that stands in a drawer's way.

    :param scene: the simulation
    :param name: the object
    :param low: (2,) lowest corner of the ground to leave free, meters
    :param high: (2,) its highest corner
    :return: (2,) displacement, meters; zero if the object is not in the way, ``None`` if there is no room anywhere
    """
    points = scene.points(name)
    start, end = points.min(axis=0), points.max(axis=0)

    def apart(offset: Array, room: float) -> bool:
        return bool((start[:2] + offset > high + room).any() or (end[:2] + offset < low - room).any())

    if apart(np.zeros(2), 0.03):
        return np.zeros(2)
    geoms, outline = scene.obstacles(name), _rectangle((end - start)[:2] / 2 + 0.015, (7, 7)) + (start + end)[:2] / 2
    steps = np.arange(-0.28, 0.29, 0.02)
    offsets = [np.array([x, y]) for x in steps for y in steps]
    for room in (0.06, 0.04):
        for offset in sorted(offsets, key=lambda way: float(np.linalg.norm(way))):
            reach = np.linalg.norm((start + end)[:2] / 2 + offset - scene.base_position[:2])
            if apart(offset, room) and 0.3 < reach < COMFORTABLE_REACH + 0.1:
                heights = scene.heights(geoms, outline + offset)
                if float(np.ptp(heights)) < 0.005 and abs(float(heights.max()) - start[2]) < 0.005:
                    return offset
    return None
