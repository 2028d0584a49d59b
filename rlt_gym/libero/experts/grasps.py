"""Which way to grasp an object from above, for the shape it has and the neighbors it stands among."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rlt_gym.libero.experts.clearance import WIDE_OPEN, blocked
from rlt_gym.libero.experts.geometry import Array, axis_within_quarter_turn, principal_horizontal_axes
from rlt_gym.libero.experts.scene import Scene

#: The line between the fingers in the robot's start pose; hands stay within a quarter turn of it.
HOME_FINGER_AXIS = np.array([0.0, 1.0, 0.0])
#: The fingers open to 8 cm; wider things are grasped by their rim.
WIDEST_GRASP = 0.072
#: Gap between the fingers for a rim in a tight place, meters.
NARROW = 0.045
#: The point between the finger tips may come this close to the surface an object stands on.
TIP_CLEARANCE = 0.012
DOWN = np.array([0.0, 0.0, -1.0])
#: How far the hand may lean over where it would hit something upright, radians.
LEANS = (0.45, 0.8)
#: Closer to the robot's base than this an upright hand meets the limits of the arm's joints, meters.
NEAR_BASE = 0.3


def leaning(directions: Array, angle: float) -> Array:
    """
    Where the palms of hands look that lean over.

    :param directions: (k, 3) horizontal unit vectors to which the hands lean
    :param angle: by how much, radians
    :return: (k, 3) unit vectors
    """
    return np.asarray(np.cos(angle) * DOWN - np.sin(angle) * directions)


@dataclass(frozen=True)
class GraspRule:
    """
    How to grasp a category of objects.

    :param depth: how far the point between the finger tips goes below the object's top, meters
    :param rim: grasp the wall of a vessel instead of the whole object
    :param spread: half range of the random turn of the grasp around the object, radians
    """

    depth: float = 0.02
    rim: bool = False
    spread: float = 0.15


#: Categories that need something else than the rule derived from their shape.
GRASP_RULES: dict[str, GraspRule] = {
    "akita_black_bowl": GraspRule(depth=0.02, rim=True, spread=0.25),
    "wine_bottle": GraspRule(depth=0.035, spread=0.2),
    "cream_cheese": GraspRule(depth=0.02, spread=0.1),
    "plate": GraspRule(depth=0.01, rim=True, spread=0.2),
}


def category(name: str) -> str:
    """
    Category of a BDDL object name.

    :param name: such as ``akita_black_bowl_1``
    :return: such as ``akita_black_bowl``
    """
    return re.sub(r"_\d+$", "", name)


class Grasp:
    """
    A grasp from above that follows the object.

    :param scene: the simulation
    :param name: the object
    :param rng: draws the turn of each grasp
    """

    def __init__(self, scene: Scene, name: str, rng: np.random.Generator):
        self.scene, self.name, self.rng = scene, name, rng
        self.tried: list[float] = []
        self.turn = 0.0
        #: Gap between the fingers on the way to the grasp, meters.
        self.opening = WIDE_OPEN
        #: (3,) where the palm looks.
        self.approach: Array = DOWN
        self.choose()

    def choose(self) -> None:
        """Choose a turn around the object: free of neighbors, not tried before, near the hand's start orientation."""
        points = self.scene.points(self.name)
        _, width, across = principal_horizontal_axes(points)
        self._round = across - width < 0.01
        height = float(np.ptp(points[:, 2]))
        shape = GraspRule(depth=min(0.035, 0.5 * height), rim=width > WIDEST_GRASP)
        self.rule = GRASP_RULES.get(category(self.name)) or shape
        jitter = float(self.rng.uniform(-self.rule.spread, self.rule.spread))
        if self.rule.rim:
            turns = jitter + np.linspace(-np.pi, np.pi, 24, endpoint=False)
        elif self._round:
            turns = jitter + np.linspace(-np.pi / 2, np.pi / 2, 12, endpoint=False)
        else:
            turns = jitter + np.array([0.0, -0.2, 0.2, -0.4, 0.4] + ([np.pi / 2] if across < WIDEST_GRASP else []))
        poses = []
        for turn in turns:
            self.turn = float(turn)
            poses.append(self.pose())
        positions, axes = (np.stack([pose[part] for pose in poses]) for part in (0, 1))
        shared = 0.05 * np.abs(turns - jitter) + 0.05 * np.arccos(np.clip(np.abs(axes @ HOME_FINGER_AXIS), 0.0, 1.0))
        for tried in self.tried:
            shared += 0.4 * (np.abs(np.angle(np.exp(1j * (tried - turns)))) < 0.4)
        geoms, best, hits = self.scene.obstacles(self.name), np.inf, 0.0
        for approaches, penalty in self._approaches(positions, axes):
            for opening in (WIDE_OPEN, NARROW) if self.rule.rim else (WIDE_OPEN,):
                share = blocked(self.scene, geoms, positions, axes, approaches, opening)
                # what was in the way once will be again: then only a free hand will do
                costs = 3.0 * share + 0.25 * (share > 0.0) * bool(self.tried) + shared + penalty
                index = int(np.argmin(costs))
                if costs[index] < best - 0.02:
                    best, hits, self.opening = float(costs[index]), float(share[index]), opening
                    self.turn, self.approach = float(turns[index]), approaches[index]
            if hits == 0.0:
                break
        self.tried.append(self.turn)

    def _approaches(self, positions: Array, axes: Array) -> Iterator[tuple[Array, float]]:
        """Upright hands first, after a failure hands that lean over as well; each with what it costs."""
        upright = np.tile(DOWN, (len(axes), 1))
        outwards = positions - self.scene.base_position
        outwards[:, 2] = 0.0
        distance = np.linalg.norm(outwards, axis=1, keepdims=True)
        if float(distance.min()) < NEAR_BASE:
            yield leaning(outwards / distance, LEANS[0]), 0.0
        yield upright, 0.0
        if not self.tried:
            return
        across = np.stack([-axes[:, 1], axes[:, 0], np.zeros(len(axes))], axis=1)
        for angle in LEANS:
            for lean in (across, -across, axes, -axes):
                yield leaning(lean, angle), 0.2 * angle

    def pose(self) -> tuple[Array, Array]:
        """
        Where the hand must be to grasp the object where it is now.

        :return: hand position (3,), line between the fingers (3,)
        """
        points = self.scene.points(self.name)
        low, high = points.min(axis=0), points.max(axis=0)
        z = max(high[2] - self.rule.depth, low[2] + TIP_CLEARANCE)
        if self.rule.rim:
            side = np.array([-np.sin(self.turn), np.cos(self.turn), 0.0])
            center = (low + high) / 2
            wall = (points[points[:, 2] > high[2] - 0.015] - center)[:, :2]
            # a handle sticks out farther than the wall, but only on its own side
            ahead = wall[np.abs(wall @ np.array([-side[1], side[0]])) < 0.03]
            radius = float(np.max((ahead if len(ahead) else wall) @ side[:2])) - 0.004
            return np.array([*(center + radius * side)[:2], z]), axis_within_quarter_turn(side, HOME_FINGER_AXIS)
        # round: any side will do, so keep the wrist near its start
        axis = HOME_FINGER_AXIS if self._round else principal_horizontal_axes(points)[0]
        axis = axis_within_quarter_turn(axis, HOME_FINGER_AXIS)
        cos, sin = np.cos(self.turn), np.sin(self.turn)
        axis = np.array([cos * axis[0] - sin * axis[1], sin * axis[0] + cos * axis[1], 0.0])
        axis = axis_within_quarter_turn(axis, HOME_FINGER_AXIS)
        slab = points[points[:, 2] > z - 0.02]
        center = (slab.min(axis=0) + slab.max(axis=0)) / 2
        return np.array([*center[:2], z]), axis
