"""One generic skill: grasp an object, carry it above a target, lower and release it, in closed loop on the state."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from rlt_gym.libero.experts.geometry import (
    Array,
    axis_within_quarter_turn,
    principal_horizontal_axes,
    ramp,
)
from rlt_gym.libero.experts.scene import Scene

OPEN, CLOSE = -1.0, 1.0
DOWN = np.array([0.0, 0.0, -1.0])
#: The line between the fingers in the robot's start pose; hands stay within a quarter turn of it.
HOME_FINGER_AXIS = np.array([0.0, 1.0, 0.0])
#: Farther than this from the robot's base the arm is nearly stretched and slow to settle, metres.
COMFORTABLE_REACH = 0.65
#: The fingers open to 8 cm; wider things are grasped by their rim.
WIDEST_GRASP = 0.065
#: The point between the finger tips may come this close to the surface an object stands on.
TIP_CLEARANCE = 0.012


@dataclass(frozen=True)
class GraspRule:
    """
    How to grasp a category of objects.

    :param depth: how far the point between the finger tips goes below the object's top, metres
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


@dataclass
class Command:
    """
    Where a skill wants the hand to go now.

    :param position: (3,) target of the point between the finger tips, metres
    :param gripper: :data:`OPEN` or :data:`CLOSE`
    :param finger_axis: (3,) wanted line between the fingers
    :param approach: (3,) wanted direction of the palm
    :param precision: 0 where noise does no harm, 1 where it would spoil a grasp or a release
    :param speed: greatest length of the position part of the action
    """

    position: Array
    gripper: float
    finger_axis: Array
    approach: Array
    precision: float = 0.0
    speed: float = 1.0


class PickPlace:
    """
    Put an object on or in a target.

    The path is a funnel: how high the hand flies above the next grasp or release depends on how far it is from being
    above it, so waypoints blend into each other, and any state is a valid start.

    :param scene: the simulation
    :param predicate: goal, ``[name, object, target]``
    :param rng: draws the turn of each grasp
    """

    hover = 0.09
    carry_clearance = 0.06

    def __init__(self, scene: Scene, predicate: list[str], rng: np.random.Generator):
        self.scene = scene
        self.predicate = predicate
        self.object, self.target = predicate[1], predicate[2]
        self.rng = rng
        self.rule = GRASP_RULES.get(category(self.object)) or self._rule_from_shape()
        self.turn = 0.0
        self.retries = 0
        self.finger_axis = HOME_FINGER_AXIS
        self.stage = "approach"
        self.count = 0
        self.missing = 0
        self.anchor = scene.hand_position
        self.start_height = float(scene.points(self.object)[:, 2].min())
        self.detour = 0.0
        self.best = np.inf
        self.stalled = 0
        self.detours = 0
        _, width, across = principal_horizontal_axes(scene.points(self.object))
        self._round = across - width < 0.01
        self._draw_turn()
        if scene.holds(self.object):
            self._enter("carry")

    # grasp

    def _rule_from_shape(self) -> GraspRule:
        points = self.scene.points(self.object)
        _, width, _ = principal_horizontal_axes(points)
        height = float(np.ptp(points[:, 2]))
        return GraspRule(depth=min(0.035, 0.5 * height), rim=width > WIDEST_GRASP)

    def _draw_turn(self) -> None:
        # a grasp that failed may be blocked by a neighbour: look further and further around the object
        spread = self.rule.spread + (0.5 * self.retries if self._round or self.rule.rim else 0.0)
        self.turn = float(self.rng.uniform(-spread, spread))

    def grasp_pose(self) -> tuple[Array, Array]:
        """
        :return: (hand position (3,), line between the fingers (3,)) of the grasp, for the object where it is now
        """
        points = self.scene.points(self.object)
        low, high = points.min(axis=0), points.max(axis=0)
        z = max(high[2] - self.rule.depth, low[2] + TIP_CLEARANCE)
        if self.rule.rim:
            side = np.array([-np.sin(self.turn), np.cos(self.turn), 0.0])
            centre = (low + high) / 2
            wall = points[points[:, 2] > high[2] - 0.015]
            radius = float(np.max((wall - centre)[:, :2] @ side[:2])) - 0.004
            return np.array([*(centre + radius * side)[:2], z]), axis_within_quarter_turn(side, HOME_FINGER_AXIS)
        # round: any side will do, so keep the wrist near its start
        axis = HOME_FINGER_AXIS if self._round else principal_horizontal_axes(points)[0]
        axis = axis_within_quarter_turn(axis, HOME_FINGER_AXIS)
        cos, sin = np.cos(self.turn), np.sin(self.turn)
        axis = np.array([cos * axis[0] - sin * axis[1], sin * axis[0] + cos * axis[1], 0.0])
        axis = axis_within_quarter_turn(axis, HOME_FINGER_AXIS)
        slab = points[points[:, 2] > z - 0.02]
        centre = (slab.min(axis=0) + slab.max(axis=0)) / 2
        return np.array([*centre[:2], z]), axis

    def _axis_error(self, axis: Array) -> float:
        current = self.scene.hand_rotation @ self.scene.local_finger_axis
        return float(np.arccos(np.clip(abs(np.dot(current, axis)), 0.0, 1.0)))

    # stages

    def _enter(self, stage: str) -> None:
        self.stage, self.count, self.missing = stage, 0, 0
        self.best, self.stalled, self.detours = np.inf, 0, 0
        self.anchor = self.scene.hand_position

    def act(self) -> Command:
        """
        :return: command for the next control step
        """
        self.count += 1
        return {
            "approach": self._approach,
            "grasp": self._grasp,
            "carry": self._carry,
            "release": self._release,
            "retreat": self._retreat,
        }[self.stage]()

    @property
    def done(self) -> bool:
        """The goal holds and the hand has left."""
        return self.stage == "retreat" and self.count > 1 and self.scene.satisfied(self.predicate)

    def _blocked(self, distance: float, patience: int) -> bool:
        """Whether the way to go has not shrunk for ``patience`` steps; then the hand makes a detour upwards."""
        self.detour = max(0.0, self.detour - 0.004)
        self.stalled += 1
        if distance < self.best - 0.004:
            self.best, self.stalled = distance, 0
        if self.stalled < patience:
            return False
        self.best, self.stalled, self.detour = np.inf, 0, 0.1
        self.detours += 1
        return True

    def _funnel(self, goal: Array, lateral: float, height: float, tolerance: float, slope: float, low: float) -> Array:
        """Above ``goal`` by an amount that shrinks with the lateral error; no sideways travel while too low."""
        hand = self.scene.hand_position
        above = float(np.clip((lateral - tolerance) * slope, 0.0, height))
        above += self.detour * ramp(lateral, tolerance, tolerance + 0.01)
        target = goal + np.array([0.0, 0.0, above])
        gate = 1.0 - ramp(target[2] - hand[2], 0.01, low)
        target[:2] = hand[:2] + gate * (target - hand)[:2]
        return target

    def _approach(self) -> Command:
        scene = self.scene
        goal, axis = self.grasp_pose()
        self.finger_axis = axis
        hand = scene.hand_position
        offset = float(np.linalg.norm((goal - hand)[:2]))
        # a turned or closed hand is as far from a grasp as a displaced one
        lateral = offset + 0.04 * self._axis_error(axis) + 0.5 * max(0.0, 0.065 - scene.opening)
        target = self._funnel(goal, lateral, self.hover, 0.012, 2.0, 0.08)
        near = float(np.linalg.norm(goal - hand))
        if self._blocked(near, 25):
            self._retry()
        if offset < 0.012 and abs(goal[2] - hand[2]) < 0.012 and scene.opening > 0.05:
            self._enter("grasp")
            self.anchor = goal
        return Command(target, OPEN, axis, DOWN, 1.0 - ramp(near, 0.04, 0.12))

    def _grasp(self) -> Command:
        scene = self.scene
        held = scene.holds(self.object)
        if held and self.count >= 4:
            self._enter("carry")
            return self._carry()
        if self.count > 15:
            self._retry()
        return Command(self.anchor, CLOSE, self.finger_axis, DOWN, 1.0)

    def _retry(self) -> None:
        self.retries += 1
        self._draw_turn()
        self._enter("approach")

    def _landing(self) -> tuple[Array, float]:
        """Where the object shall land, and how far off it may: a large region is used on the side that is in reach."""
        scene = self.scene
        xy = scene.position(self.target)[:2]
        if self.target not in scene.env.object_sites_dict:
            return xy, 0.015
        half = float(min(scene.env.object_sites_dict[self.target].size[:2]))
        to_base = scene.base_position[:2] - xy
        distance = float(np.linalg.norm(to_base))
        shift = float(np.clip(distance - COMFORTABLE_REACH, 0.0, 0.4 * half))
        return xy + to_base * (shift / distance), float(np.clip(0.25 * half, 0.015, 0.03))

    def _placing(self) -> tuple[Array, float, float]:
        """Hand position that puts the object down, the height above it for travelling, and the error allowed."""
        scene = self.scene
        hand = scene.hand_position
        points = scene.points(self.object)
        centre = (points.min(axis=0) + points.max(axis=0)) / 2
        xy, tolerance = self._landing()
        floor = scene.support(self.target, xy)
        top = (
            float(scene.points(scene.owner(self.target))[:, 2].max())
            if self.target in scene.env.objects_dict
            else floor
        )
        # into a vessel: let go at its rim, or the fingers would hit the wall
        floor = max(floor, top - 0.015) if top - floor > 0.025 else floor
        below = hand[2] - float(points[:, 2].min())
        reference = scene.position(self.object) if self.predicate[0] == "on" and top == floor else centre
        goal = np.array([*(xy + (hand - reference)[:2]), floor + below])
        travel = max(self.carry_clearance, self.start_height + 0.06 - floor)
        return goal, travel, tolerance

    def _carry(self) -> Command:
        scene = self.scene
        self.missing = 0 if scene.holds(self.object) else self.missing + 1
        if self.missing > 3:
            self._retry()
            return self._approach()
        goal, travel, tolerance = self._placing()
        hand = scene.hand_position
        lateral = float(np.linalg.norm((goal - hand)[:2]))
        if lateral < 0.04:
            self.detour = 0.0
        # what cannot be reached exactly is let go a little off, rather than never
        tolerance += 0.01 * self.detours
        target = self._funnel(goal, lateral, travel, tolerance, 1.5, 0.045)
        landed = frozenset(scene.geoms(self.object)), frozenset(scene.geoms(scene.owner(self.target)))
        left = float(np.linalg.norm(goal - hand))
        self._blocked(left, 20)
        if lateral < tolerance + 0.005 and (hand[2] - goal[2] < 0.006 or scene.touches(*landed)):
            self._enter("release")
        travelled = float(np.linalg.norm(hand - self.anchor))
        return Command(target, CLOSE, self.finger_axis, DOWN, 1.0 - ramp(min(left, travelled), 0.03, 0.1))

    def _release(self) -> Command:
        if self.count > 6:
            self._enter("retreat")
        return Command(self.anchor, OPEN, self.finger_axis, DOWN, 1.0)

    def _retreat(self) -> Command:
        target = self.anchor + np.array([0.0, 0.0, 0.1])
        if self.count > 12 and not self.scene.satisfied(self.predicate):
            self._retry()
        return Command(target, OPEN, self.finger_axis, DOWN, 0.5)
