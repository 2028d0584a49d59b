"""The scripted expert: turns skills into OSC_POSE actions, with optional smooth disturbances for demonstrations."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlt_gym.libero.experts.drawers import CloseDrawer, OpenDrawer
from rlt_gym.libero.experts.geometry import Array, clip_norm, hand_rotation, rotation_vector
from rlt_gym.libero.experts.grasps import HOME_FINGER_AXIS
from rlt_gym.libero.experts.knobs import TurnKnob
from rlt_gym.libero.experts.scene import Scene
from rlt_gym.libero.experts.skills import DOWN, OPEN, Command, MoveAside, PickPlace

#: Displacement and turn that an action of 1 asks the controller for (LIBERO's OSC_POSE settings).
POSITION_SCALE = 0.05
ROTATION_SCALE = 0.5


class NoSkillError(ValueError):
    """A goal predicate that no skill is made for, or a task that the skills do not solve."""


def in_order(goals: list[list[str]]) -> list[list[str]]:
    """
    Sort goals so that none undoes another.

    An object is placed before what stands on it, and a drawer is filled before it is closed.

    :param goals: predicates such as ``["in", "butter_1", "wooden_cabinet_1_top_region"]``
    :return: the same, sorted; otherwise the order is kept
    """

    def rank(goal: list[str]) -> int:
        if goal[0].lower() == "close":
            return 10 if any(len(other) == 3 and other[2] == goal[1] for other in goals) else 0
        below = [other for other in goals if len(goal) == len(other) == 3 and other[1] == goal[2]]
        return 1 + rank(below[0]) if below else 0

    return sorted(goals, key=rank)


def check_motion(noise: float, speed: float) -> None:
    """
    Refuse settings of the expert's motion, before anything is started.

    :param noise: see :class:`ScriptedExpert`
    :param speed: see :class:`ScriptedExpert`
    :raises ValueError: if one is out of range
    """
    if not 0.0 <= noise <= 1.0:
        raise ValueError(f"noise is {noise}; it must lie in [0, 1]: it is a share of the action range")
    if not 0.0 < speed <= 1.0:
        raise ValueError(f"speed is {speed}; it must lie in (0, 1]: it is a share of the action range")


class ScriptedExpert:
    """
    Solves a LIBERO task from the simulator's state.

    The skills come from the goal predicates of the task's BDDL file, not from its name. The stage is chosen from the
    state, so :meth:`reset` may be called in the middle of an episode, to take over from a policy.

    :param env: LIBERO's robosuite environment (``ControlEnv.env``)
    :param noise: standard deviation of the disturbance of the position part of the action. It changes smoothly and
        fades out near grasps and releases.
    :param speed: greatest length of the position part of an action, in (0, 1]
    :raises ValueError: if ``noise`` or ``speed`` is out of range
    :raises NoSkillError: if a goal predicate is not supported
    """

    position_gain = 1.4
    rotation_gain = 1.0
    #: Largest change of the position part of the action in one step: no jerks when a stage changes.
    slew = 0.5

    def __init__(self, env: Any, noise: float = 0.0, speed: float = 0.9):
        check_motion(noise, speed)
        self.env = env
        self.noise = noise
        self.speed = speed
        self.scene = Scene(env)
        goals = [[str(word) for word in goal] for goal in env.parsed_problem["goal_state"]]
        for goal in goals:
            if not self._supported(goal):
                raise NoSkillError(
                    f"no skill for the goal {goal}; supported are (on a b) and (in a b) where b is open above or a "
                    "drawer, (open drawer), (close drawer), (turnon stove) and (turnoff stove)"
                )
        self.goals: list[list[str]] = in_order(goals)
        self.reset(np.random.default_rng(0))

    def reset(self, rng: np.random.Generator) -> None:
        """
        Start from the simulator's present state, which may lie in the middle of an episode.

        :param rng: source of all the expert's randomness
        """
        self._rng = rng
        self._skill: PickPlace | OpenDrawer | CloseDrawer | TurnKnob | None = None
        self._disturbance = np.zeros(3)
        self._last = np.zeros(3)
        self._left = self._next_skill()
        #: The action of the last step without its disturbance, (7,): the label to imitate when noise is on.
        self.clean_action: Array = np.zeros(7)

    def _supported(self, goal: list[str]) -> bool:
        kind, scene = (goal[0].lower(), len(goal)), self.scene
        if kind in (("open", 2), ("close", 2)):
            return scene.has_joint(goal[1])
        if kind in (("turnon", 2), ("turnoff", 2)):
            return True
        return kind in (("on", 3), ("in", 3)) and not scene.covered(goal[2])

    def _next_skill(self) -> bool:
        """Take up the first goal that does not hold yet."""
        scene = self.scene
        for goal in self.goals:
            if scene.satisfied(goal):
                continue
            kind, target = goal[0].lower(), goal[-1]
            if kind in ("turnon", "turnoff"):
                self._skill = TurnKnob(scene, goal)
            elif kind == "close":
                self._skill = CloseDrawer(scene, goal)
            elif scene.has_joint(target) and not scene.satisfied(["open", target]):
                into = [other[1] for other in self.goals if other[0].lower() == "in" and other[2] == target]
                blocking = [name for name in into if MoveAside.needed(scene, name, target)]
                if blocking:
                    self._skill = MoveAside(scene, blocking[0], target, self._rng)
                else:
                    self._skill = OpenDrawer(scene, ["open", target])
            else:
                self._skill = PickPlace(scene, goal, self._rng)
            return True
        self._skill = None
        return False

    @property
    def done(self) -> bool:
        """LIBERO's success predicate holds and no skill is at work."""
        return self._skill is None and self.scene.success

    @property
    def stage(self) -> str:
        """What the skill at work is about, such as ``approach``, ``grasp``, ``carry``, ``release`` or ``retreat``."""
        return "done" if self._skill is None else self._skill.stage

    def act(self) -> Array:
        """
        Choose the action of the next control step.

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
