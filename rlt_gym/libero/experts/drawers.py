"""Open a drawer by its handle, or push it shut, until LIBERO calls it open or closed."""

from __future__ import annotations

import numpy as np

from rlt_gym.libero.experts.geometry import Array, axis_within_quarter_turn, hand_rotation, ramp, rotation_vector
from rlt_gym.libero.experts.grasps import HOME_FINGER_AXIS
from rlt_gym.libero.experts.scene import Scene
from rlt_gym.libero.experts.skills import CLOSE, OPEN, Command


class _Drawer:
    """
    What opening and closing share: the drawer's joint, its handle and the hand's orientation.

    :param scene: the simulation
    :param predicate: ``["open" or "close", region]``, region such as ``wooden_cabinet_1_top_region``
    """

    #: How far the palm looks down, radians.
    tilt = 0.25

    def __init__(self, scene: Scene, predicate: list[str]):
        self.scene = scene
        self.predicate = predicate
        self.joint, self.body = scene.joint_of(predicate[1])
        # LIBERO's drawers open towards the end of the joint's range that is farther from 0
        low, high = scene.model.jnt_range[self.joint]
        self._sign = -1.0 if abs(low) > abs(high) else 1.0
        self.stage = "approach"
        self.count = 0
        self.anchor = scene.hand_position

    @property
    def pull(self) -> Array:
        """(3,) unit vector along which the drawer opens."""
        return np.array(self.scene.data.xaxis[self.joint]) * self._sign

    @property
    def palm(self) -> Array:
        """(3,) where the palm looks: a level hand, wide between the fingers, would sweep the table."""
        return -np.cos(self.tilt) * self.pull - np.array([0.0, 0.0, np.sin(self.tilt)])

    @property
    def fingers(self) -> Array:
        """(3,) line between the fingers: upright, as a handle is a level bar; its sign turns the wrist less."""
        return np.array([0.0, 0.0, 1.0 if self.palm[1] > 0.0 else -1.0])

    def handle(self) -> Array:
        """
        Where the drawer can be held.

        :return: (3,) center of the part that sticks out most
        """
        scene = self.scene
        geoms = [int(g) for g in np.flatnonzero(scene.model.geom_bodyid == self.body) if scene.model.geom_contype[g]]
        return np.array(max((scene.data.geom_xpos[g] for g in geoms), key=lambda center: float(center @ self.pull)))

    @property
    def done(self) -> bool:
        """The drawer is as wanted and the hand has left."""
        return self.stage == "retreat" and self.count > 10

    def _enter(self, stage: str) -> None:
        self.stage, self.count, self.anchor = stage, 0, self.scene.hand_position

    def _retreat(self) -> Command:
        up = np.array([0.0, 0.0, 0.02 * max(0, self.count - 5)])
        return Command(self.anchor + self.pull * 0.06 + up, OPEN, self.fingers, self.palm)


class OpenDrawer(_Drawer):
    """Open a sliding drawer by its handle; see :class:`_Drawer`."""

    standoff = 0.09
    #: The tips go this far past the middle of the handle, for the pads to hold more of it.
    depth = 0.01
    #: Distance of the target that pulls: more would tear the fingers off the handle.
    pull_length = 0.014

    def act(self) -> Command:
        """
        Act for one control step.

        :return: command for the next control step
        """
        self.count += 1
        scene, pull = self.scene, self.pull
        hand, handle = scene.hand_position, self.handle() - self.depth * pull
        palm, fingers = self.palm, self.fingers
        near = 1.0 - ramp(float(np.linalg.norm(handle - hand)), 0.04, 0.12)
        if self.stage == "retreat":
            return self._retreat()
        if self.stage == "pull":
            if scene.satisfied(self.predicate) and self.count > 1:
                self._enter("retreat")
            elif self.count > 5 and float(np.linalg.norm(handle - hand)) > 0.04:
                self._enter("approach")  # slipped off
            return Command(hand + self.pull_length * pull, CLOSE, fingers, palm, 1.0)
        if self.stage == "grasp":
            if self.count > 9:
                self._enter("pull")
            return Command(handle, CLOSE, fingers, palm, 1.0)
        wanted = hand_rotation(palm, fingers, scene.local_finger_axis)
        turned = float(np.linalg.norm(rotation_vector(wanted @ scene.hand_rotation.T)))
        across = handle - hand
        across = across - (across @ pull) * pull
        error = float(np.linalg.norm(across)) + 0.1 * max(0.0, turned - 0.1)
        away = float(np.clip((error - 0.01) * 2.0, 0.0, self.standoff))
        if error < 0.014 and abs(float((handle - hand) @ pull)) < 0.012 and scene.opening > 0.05:
            self._enter("grasp")
        return Command(handle + away * pull, OPEN, fingers, palm, near)


class CloseDrawer(_Drawer):
    """
    Push a sliding drawer shut with closed fingers; see :class:`_Drawer`.

    :param scene: the simulation
    :param predicate: the goal, such as ``["close", "wooden_cabinet_1_top_region"]``
    """

    #: Distance in front of the handle from which the hand pushes, meters.
    standoff = 0.08
    #: A handle lower than this above the ground is pushed by a steep hand whose fingers lie along it, meters.
    low_handle = 0.12

    def __init__(self, scene: Scene, predicate: list[str]):
        super().__init__(scene, predicate)
        ground = float(scene.points(scene.owner(predicate[1]))[:, 2].min())
        self.low = float(self.handle()[2]) < ground + self.low_handle
        if self.low:
            self.tilt = 1.1

    @property
    def fingers(self) -> Array:
        """(3,) line between the fingers: along a low handle, else upright."""
        if not self.low:
            return super().fingers
        return axis_within_quarter_turn(np.cross(self.pull, [0.0, 0.0, 1.0]), HOME_FINGER_AXIS)

    def act(self) -> Command:
        """
        Act for one control step.

        :return: command for the next control step
        """
        self.count += 1
        scene, pull = self.scene, self.pull
        hand, handle = scene.hand_position, self.handle()
        if self.stage == "retreat":
            return self._retreat()
        across = handle - hand
        ahead = -float(across @ pull)
        across = across + ahead * pull
        if self.stage == "push":
            if scene.satisfied(self.predicate) and self.count > 1:
                self._enter("retreat")
            elif float(np.linalg.norm(across)) > 0.05:
                self._enter("approach")
            return Command(hand - 0.04 * pull + across, CLOSE, self.fingers, self.palm, 1.0)
        front = handle + self.standoff * pull
        if float(np.linalg.norm(front - hand)) < 0.025 and scene.opening < 0.02:
            self._enter("push")
            # steep on the way, to pass above things; flatter now, as the handles above stick out as far as this one
            self.tilt = min(self.tilt, 0.7)
        target = front.copy()
        # over the drawer or beside it: first rise, then pass over its front
        if ahead < 0.6 * self.standoff:
            target[2] = max(handle[2] + 0.16, hand[2] - 0.02)
            gate = 1.0 - ramp(target[2] - hand[2], 0.01, 0.06)
            target[:2] = hand[:2] + gate * (target - hand)[:2]
        return Command(target, CLOSE, self.fingers, self.palm)
