"""One generic skill: grasp an object, carry it above a target, lower and release it, in closed loop on the state."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlt_gym.libero.experts.clearance import WIDE_OPEN, drawer_way, landing_offset, path_top, place_aside, way_out
from rlt_gym.libero.experts.geometry import Array, ramp
from rlt_gym.libero.experts.grasps import DOWN, HOME_FINGER_AXIS, Grasp
from rlt_gym.libero.experts.scene import Scene

OPEN, CLOSE = -1.0, 1.0


@dataclass
class Command:
    """
    Where a skill wants the hand to go now.

    :param position: (3,) target of the point between the finger tips, meters
    :param gripper: :data:`OPEN`, :data:`CLOSE`, or 0 to leave the fingers where they are
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
        self.grasp = Grasp(scene, self.object, rng)
        self.finger_axis = HOME_FINGER_AXIS
        self.approach: Array = DOWN
        self.stage = "approach"
        self.count = 0
        self.missing = 0
        self.anchor = scene.hand_position
        self.offset = np.zeros(2)
        self.detour = 0.0
        self.best = np.inf
        self.stalled = 0
        self.detours = 0
        if scene.holds(self.object):
            self._enter("carry")

    def _axis_error(self, axis: Array) -> float:
        current = self.scene.hand_rotation @ self.scene.local_finger_axis
        return float(np.arccos(np.clip(abs(np.dot(current, axis)), 0.0, 1.0)))

    def _satisfied(self) -> bool:
        return self.scene.satisfied(self.predicate)

    # stages

    def _enter(self, stage: str) -> None:
        self.stage, self.count, self.missing = stage, 0, 0
        self.best, self.stalled, self.detours = np.inf, 0, 0
        self.anchor = self.scene.hand_position
        if stage == "carry":
            self._choose_landing()

    def act(self) -> Command:
        """
        Act for one control step.

        :return: command for the next control step
        """
        self.count += 1
        return {
            "approach": self._approach,
            "grasp": self._grasp,
            "drag": self._drag,
            "carry": self._carry,
            "release": self._release,
            "retreat": self._retreat,
        }[self.stage]()

    @property
    def done(self) -> bool:
        """The goal holds and the hand has left."""
        return self.stage == "retreat" and self.count > 1 and self._satisfied()

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
        goal, axis = self.grasp.pose()
        self.finger_axis, self.approach = axis, self.grasp.approach
        hand = scene.hand_position
        offset = float(np.linalg.norm((goal - hand)[:2]))
        # a turned or closed hand is as far from a grasp as a displaced one
        lateral = offset + 0.04 * self._axis_error(axis) + 0.5 * max(0.0, self.grasp.opening - 0.015 - scene.opening)
        top = path_top(scene, scene.obstacles(self.object), hand[:2], goal[:2], 0.05)
        slope, over = 2.0, 0.03
        if self.approach[2] > -0.99:  # in a tight place: turn and come to be above it first
            looks = float(np.arccos(np.clip(scene.hand_rotation[:, 2] @ self.approach, -1.0, 1.0)))
            lateral, slope, over = lateral + 0.06 * max(0.0, looks - 0.1), 8.0, 0.07
        target = self._funnel(goal, lateral, max(self.hover, top + over - goal[2]), 0.012, slope, 0.08)
        near = float(np.linalg.norm(goal - hand))
        if self._blocked(near, 25):
            self._retry()
        if offset < 0.012 and abs(goal[2] - hand[2]) < 0.012 and scene.opening > self.grasp.opening - 0.03:
            self._enter("grasp")
            self.anchor = goal
        gap = scene.opening - self.grasp.opening
        # the gripper's command is a velocity: 0 keeps the fingers where they are
        gripper = OPEN if gap < -0.005 or self.grasp.opening == WIDE_OPEN else CLOSE if gap > 0.005 else 0.0
        return Command(target, gripper, axis, self.approach, 1.0 - ramp(near, 0.04, 0.12))

    def _grasp(self) -> Command:
        scene = self.scene
        held = scene.holds(self.object)
        if held and self.count >= 4:
            way = way_out(scene, self.object, self.finger_axis, self.approach)
            if not way.any():
                self._enter("carry")
                return self._carry()
            self._enter("drag")
            self.anchor = scene.hand_position + np.array([*way, 0.012])
            return self._drag()
        if self.count > 15:
            self._retry()
        return Command(self.anchor, CLOSE, self.finger_axis, self.approach, 1.0)

    def _drag(self) -> Command:
        """Out from under something, before lifting."""
        if float(np.linalg.norm((self.anchor - self.scene.hand_position)[:2])) < 0.01 or self.count > 25:
            self._enter("carry")
            return self._carry()
        return Command(self.anchor, CLOSE, self.finger_axis, self.approach, 1.0, 0.5)

    def _retry(self) -> None:
        self.grasp.choose()
        self._enter("approach")

    def _surface(self) -> tuple[float, bool]:
        """Height to put the object down at, and whether it goes into a vessel."""
        floor = self.scene.support(self.target, self.scene.position(self.target)[:2] + self.offset)
        geoms = self.scene.region_geoms(self.target)
        top = float(self.scene.boxes(geoms)[1][:, 2].max()) if geoms else floor
        # into a vessel: let go at its rim, or the fingers would hit the wall
        return (max(floor, top - 0.015), True) if top - floor > 0.025 else (floor, False)

    def _choose_landing(self) -> None:
        points, hand = self.scene.points(self.object), self.scene.hand_position
        low, high = points.min(axis=0), points.max(axis=0)
        relative = hand - np.array([*((low + high) / 2)[:2], low[2]])
        self.offset = np.zeros(2)
        bottom = self._surface()[0]
        self.offset = landing_offset(self.scene, self.target, self.object, bottom, relative, self.finger_axis)

    def _placing(self) -> tuple[Array, float, float]:
        """Hand position that puts the object down, the height above it for traveling, and the error allowed."""
        scene, hand = self.scene, self.scene.hand_position
        points = scene.points(self.object)
        low, high = points.min(axis=0), points.max(axis=0)
        floor, vessel = self._surface()
        exact = self.predicate[0] == "on" and not vessel
        reference = scene.position(self.object) if exact else (low + high) / 2
        xy = scene.position(self.target)[:2] + self.offset
        goal = np.array([*(xy + (hand - reference)[:2]), floor + hand[2] - low[2]])
        half = float((high - low)[:2].max()) / 2
        way = path_top(scene, scene.obstacles(self.object), hand[:2], goal[:2], half + 0.01)
        small = float(scene.region_half(self.target)[:2].min())
        return goal, max(self.carry_clearance, way + 0.03 - floor), float(np.clip(0.25 * small, 0.015, 0.03))

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
        if lateral < tolerance + 0.005 and (hand[2] - goal[2] < 0.008 + 0.01 * self.detours or scene.touches(*landed)):
            self._enter("release")
        traveled = float(np.linalg.norm(hand - self.anchor))
        return Command(target, CLOSE, self.finger_axis, self.approach, 1.0 - ramp(min(left, traveled), 0.03, 0.1))

    def _release(self) -> Command:
        if self.count > 6:
            self._enter("retreat")
        return Command(self.anchor, OPEN, self.finger_axis, self.approach, 1.0)

    def _retreat(self) -> Command:
        target = self.anchor + np.array([0.0, 0.0, 0.1])
        if self.count > 12 and not self._satisfied():
            self._retry()
        return Command(target, OPEN, self.finger_axis, self.approach, 0.5)


class MoveAside(PickPlace):
    """
    Move an object out of the way of a drawer that is about to be opened; see :class:`PickPlace`.

    :param scene: the simulation
    :param name: the object
    :param region: the drawer's region
    :param rng: draws the turn of each grasp
    """

    carry_clearance = 0.03

    def __init__(self, scene: Scene, name: str, region: str, rng: np.random.Generator):
        self.region = region
        super().__init__(scene, ["on", name, str(scene.env.workspace_name)], rng)

    @staticmethod
    def needed(scene: Scene, name: str, region: str) -> bool:
        """
        Whether the object stands in the drawer's way and there is another place for it.

        :param scene: the simulation
        :param name: the object
        :param region: the drawer's region
        :return: whether both are true
        """
        way = place_aside(scene, name, *drawer_way(scene, region))
        return way is not None and bool(way.any())

    @property
    def done(self) -> bool:
        """The way is free and the hand is above the object, so that it can turn."""
        return self.stage == "retreat" and self.count > 4 and self._satisfied()

    def _satisfied(self) -> bool:
        return not self.needed(self.scene, self.object, self.region)

    def _choose_landing(self) -> None:
        way = place_aside(self.scene, self.object, *drawer_way(self.scene, self.region))
        middle = self.scene.position(self.object)[:2]
        self.offset = middle + (np.zeros(2) if way is None else way) - self.scene.position(self.target)[:2]
