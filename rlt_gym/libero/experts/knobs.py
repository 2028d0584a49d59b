"""Turn a knob, such as the stove's: grasp its bar from above and turn the wrist until LIBERO calls it on or off."""

from __future__ import annotations

import numpy as np

from rlt_gym.libero.experts.geometry import Array, axis_within_quarter_turn, principal_horizontal_axes, ramp
from rlt_gym.libero.experts.grasps import HOME_FINGER_AXIS
from rlt_gym.libero.experts.scene import Scene
from rlt_gym.libero.experts.skills import CLOSE, DOWN, OPEN, Command


class TurnKnob:
    """
    Turn the knob of a fixture.

    :param scene: the simulation
    :param predicate: ``["turnon", fixture]`` or ``["turnoff", fixture]``
    """

    #: How far the point between the finger tips goes below the bar's top, meters.
    depth = 0.022
    hover = 0.08
    #: The wrist is asked to lead the bar by this angle, radians.
    lead = 0.5

    def __init__(self, scene: Scene, predicate: list[str]):
        self.scene = scene
        self.predicate = predicate
        self.joint, self.body = scene.hinge_of(predicate[1])
        low, high = scene.model.jnt_range[self.joint]
        on = 1.0 if abs(high) > abs(low) else -1.0
        axis = float(scene.data.xaxis[self.joint][2])
        #: Sense in which the wrist turns, seen from above: 1 is anticlockwise.
        self.sense = on * (1.0 if predicate[0].lower() == "turnon" else -1.0) * (1.0 if axis > 0.0 else -1.0)
        self.stage = "approach"
        self.count = 0
        self.anchor = scene.hand_position
        self.axis = HOME_FINGER_AXIS
        geoms = [int(g) for g in np.flatnonzero(scene.model.geom_bodyid == self.body) if scene.model.geom_contype[g]]
        self._bar = max(geoms, key=lambda geom: float(scene.geom_points(geom)[:, 2].max()))

    @property
    def done(self) -> bool:
        """The knob is turned and the hand has left."""
        return self.stage == "retreat" and self.count > 10

    def _enter(self, stage: str) -> None:
        self.stage, self.count, self.anchor = stage, 0, self.scene.hand_position

    def grasp_pose(self) -> tuple[Array, Array]:
        """
        Where the hand must be to grasp the bar where it is now.

        :return: hand position (3,), line between the fingers (3,)
        """
        points = self.scene.geom_points(self._bar)
        low, high = points.min(axis=0), points.max(axis=0)
        axis = axis_within_quarter_turn(principal_horizontal_axes(points)[0], self.axis)
        return np.array([*((low + high) / 2)[:2], high[2] - self.depth]), axis

    def act(self) -> Command:
        """
        Act for one control step.

        :return: command for the next control step
        """
        self.count += 1
        scene = self.scene
        goal, axis = self.grasp_pose()
        hand = scene.hand_position
        if self.stage == "retreat":
            return Command(self.anchor + np.array([0.0, 0.0, 0.1]), OPEN, self.axis, DOWN, 0.5)
        if self.stage == "turn":
            fingers = scene.hand_rotation @ scene.local_finger_axis
            slipped = float(np.arccos(np.clip(abs(fingers @ axis), 0.0, 1.0)))
            if scene.satisfied(self.predicate):
                self._enter("retreat")
            elif self.count > 60 or slipped > 0.7 or float(np.linalg.norm((goal - hand)[:2])) > 0.03:
                self._enter("approach")
            self.axis = axis
            cos, sin = np.cos(self.lead), self.sense * np.sin(self.lead)
            ahead = np.array([cos * axis[0] - sin * axis[1], sin * axis[0] + cos * axis[1], 0.0])
            return Command(goal, CLOSE, ahead, DOWN, 1.0)
        if self.stage == "grasp":
            if self.count > 7:
                self._enter("turn")
            return Command(self.anchor, CLOSE, axis, DOWN, 1.0)
        offset = float(np.linalg.norm((goal - hand)[:2]))
        fingers = scene.hand_rotation @ scene.local_finger_axis
        turned = float(np.arccos(np.clip(abs(fingers @ axis), 0.0, 1.0)))
        lateral = offset + 0.05 * max(0.0, turned - 0.1) + 0.5 * max(0.0, 0.065 - scene.opening)
        above = float(np.clip((lateral - 0.01) * 2.0, 0.0, self.hover))
        target = goal + np.array([0.0, 0.0, above])
        gate = 1.0 - ramp(target[2] - hand[2], 0.01, 0.08)
        target[:2] = hand[:2] + gate * (target - hand)[:2]
        if offset < 0.01 and turned < 0.2 and abs(goal[2] - hand[2]) < 0.012 and scene.opening > 0.05:
            self._enter("grasp")
            self.anchor = goal
        return Command(target, OPEN, axis, DOWN, 1.0 - ramp(float(np.linalg.norm(goal - hand)), 0.04, 0.12))
