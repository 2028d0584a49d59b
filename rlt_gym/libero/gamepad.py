"""A gamepad, read through pygame's events, with the interface of robosuite's devices."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

#: Deflections below this are a stick that does not rest in its middle.
DEAD_ZONE = 0.15
#: Numbers of SDL's axes and buttons of an Xbox pad, which other pads report as well.
LEFT_X, LEFT_Y, LEFT_TRIGGER, RIGHT_X, RIGHT_Y, RIGHT_TRIGGER = range(6)
BUTTON_GRIPPER, BUTTON_BACK, BUTTON_ROLL_LEFT, BUTTON_ROLL_RIGHT = 0, 1, 4, 5
#: Released triggers report -1; sticks 0.
_AT_REST = {LEFT_TRIGGER: -1.0, RIGHT_TRIGGER: -1.0}


class Gamepad:
    """
    The first gamepad of this machine.

    :raises RuntimeError: There is none.
    """

    def __init__(self) -> None:
        # Events without a window of pygame's own, and while another window has the focus.
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        os.environ.setdefault("SDL_JOYSTICK_ALLOW_BACKGROUND_EVENTS", "1")
        os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
        import pygame

        self._pygame: Any = pygame
        pygame.display.init()
        pygame.joystick.init()
        if pygame.joystick.get_count() == 0:
            raise RuntimeError("No gamepad can be found: is it plugged in, and may this user read /dev/input/js*?")
        self._pad = pygame.joystick.Joystick(0)  # reports as long as this object lives
        self.start_control()

    def start_control(self) -> None:
        """Forget what was reported so far."""
        self._pygame.event.clear()
        self._axes: dict[int, float] = {}
        self._pressed: set[int] = set()
        self._grasp = self._back = 0

    def _read(self) -> None:
        kinds = self._pygame
        for event in kinds.event.get((kinds.JOYAXISMOTION, kinds.JOYBUTTONDOWN, kinds.JOYBUTTONUP)):
            if event.type == kinds.JOYAXISMOTION:
                self._axes[event.axis] = float(event.value)
            elif event.type == kinds.JOYBUTTONUP:
                self._pressed.discard(event.button)
            else:
                self._pressed.add(event.button)
                self._grasp ^= event.button == BUTTON_GRIPPER
                self._back |= event.button == BUTTON_BACK

    def _axis(self, number: int) -> float:
        value = self._axes.get(number, _AT_REST.get(number, 0.0))
        return 0.0 if abs(value) < DEAD_ZONE else value

    def get_controller_state(self) -> dict[str, Any]:
        """
        Read what has happened since the last call.

        :return: ``dpos`` (3,) and ``raw_drotation`` (3,), in [-1, 1], as LIBERO's action has them; ``grasp`` 0 or 1,
            which changes whenever the gripper's button is pressed; ``reset`` 1 if control was given back
        """
        self._read()
        up = 0.5 * (self._axis(RIGHT_TRIGGER) - self._axis(LEFT_TRIGGER))
        roll = float(BUTTON_ROLL_RIGHT in self._pressed) - float(BUTTON_ROLL_LEFT in self._pressed)
        return {
            # agentview looks at the robot: away from the viewer is towards its base
            "dpos": np.array([self._axis(LEFT_Y), self._axis(LEFT_X), up]),
            "raw_drotation": np.array([roll, self._axis(RIGHT_Y), -self._axis(RIGHT_X)]),
            "grasp": self._grasp,
            "reset": self._back,
        }
