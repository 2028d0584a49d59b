"""The scripted expert: turns skills into OSC_POSE actions, with optional smooth disturbances for demonstrations."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlt_gym.libero.experts.drawers import OpenDrawer
from rlt_gym.libero.experts.geometry import Array, clip_norm, hand_rotation, rotation_vector
from rlt_gym.libero.experts.grasps import HOME_FINGER_AXIS
from rlt_gym.libero.experts.scene import Scene
from rlt_gym.libero.experts.skills import DOWN, OPEN, Command, PickPlace

#: Displacement and turn that an action of 1 asks the controller for (LIBERO's OSC_POSE settings).
POSITION_SCALE = 0.05
ROTATION_SCALE = 0.5


class ScriptedExpert:
    """
    Solves a LIBERO task from the simulator's state.

    The skills come from the goal predicates of the task's BDDL file, not from its name. The stage is chosen from the
    state, so :meth:`reset` may be called in the middle of an episode, to take over from a policy.

    :param env: LIBERO's robosuite environment (``ControlEnv.env``)
    :param noise: standard deviation of the disturbance of the position part of the action. It changes smoothly and
        fades out near grasps and releases.
    :param speed: greatest length of the position part of an action, in (0, 1]
    :raises ValueError: if ``noise`` or ``speed`` is out of range, or a goal predicate is not supported
    """

    position_gain = 1.4
    rotation_gain = 1.0
    #: Largest change of the position part of the action in one step: no jerks when a stage changes.
    slew = 0.5

    def __init__(self, env: Any, noise: float = 0.0, speed: float = 0.9):
        if not 0.0 <= noise <= 1.0:
            raise ValueError(f"noise is {noise}, must lie in [0, 1]: it is a share of the action range")
        if not 0.0 < speed <= 1.0:
            raise ValueError(f"speed is {speed}, must lie in (0, 1]: it is a share of the action range")
        self.env = env
        self.noise = noise
        self.speed = speed
        self.scene = Scene(env)
        self.goals: list[list[str]] = [list(map(str, goal)) for goal in env.parsed_problem["goal_state"]]
        for goal in self.goals:
            if (goal[0].lower(), len(goal)) not in (("on", 3), ("in", 3), ("open", 2)):
                raise ValueError(f"no skill for the goal {goal}; supported are (on a b), (in a b) and (open drawer)")
        self.reset(np.random.default_rng(0))

    def reset(self, rng: np.random.Generator) -> None:
        """
        Start from the simulator's present state, which may lie in the middle of an episode.

        :param rng: source of all the expert's randomness
        """
        self._rng = rng
        self._skill: PickPlace | OpenDrawer | None = None
        self._disturbance = np.zeros(3)
        self._last = np.zeros(3)
        self._left = self._next_skill()
        #: The action of the last step without its disturbance, (7,): the label to imitate when noise is on.
        self.clean_action: Array = np.zeros(7)

    def _next_skill(self) -> bool:
        """Take up the first goal that does not hold yet."""
        for goal in self.goals:
            if not self.scene.satisfied(goal):
                drawer = goal[-1]
                shut = self.scene.has_joint(drawer) and not self.scene.satisfied(["open", drawer])
                self._skill = OpenDrawer(self.scene, drawer) if shut else PickPlace(self.scene, goal, self._rng)
                return True
        self._skill = None
        return False

    @property
    def done(self) -> bool:
        """LIBERO's success predicate holds and no skill is at work."""
        return self._skill is None and self.scene.success

    @property
    def stage(self) -> str:
        """``approach``, ``grasp``, ``carry``, ``release``, ``retreat`` or ``done``."""
        return "done" if self._skill is None else self._skill.stage

    def act(self) -> Array:
        """
        Action for the next control step.

        :return: (7,) float64 in [-1, 1]: position, rotation, gripper (-1 open, +1 close)
        """
        if self._skill is None or self._skill.done:
            self._next_skill()
        if self._skill is None:
            hand = self.scene.hand_position
            command = Command(hand, OPEN, HOME_FINGER_AXIS, DOWN)
        else:
            command = self._skill.act()
        return self._to_action(command)

    def _to_action(self, command: Command) -> Array:
        scene = self.scene
        delta = (command.position - scene.hand_position) * (self.position_gain / POSITION_SCALE)
        move = clip_norm(delta, self.speed * command.speed)
        move = self._last + clip_norm(move - self._last, self.slew)
        self._last = move
        wanted = hand_rotation(command.approach, command.finger_axis, scene.local_finger_axis)
        turn = rotation_vector(wanted @ scene.hand_rotation.T) * (self.rotation_gain / ROTATION_SCALE)
        self.clean_action = np.clip(np.concatenate([move, clip_norm(turn, 0.5), [command.gripper]]), -1.0, 1.0)
        action = self.clean_action.copy()
        if self.noise > 0.0:
            # an Ornstein-Uhlenbeck walk with a memory of about ten steps
            self._disturbance = 0.9 * self._disturbance + np.sqrt(1 - 0.9**2) * self._rng.normal(size=3)
            action[:3] += self.noise * (1.0 - command.precision) * self._disturbance
        return np.clip(action, -1.0, 1.0)
