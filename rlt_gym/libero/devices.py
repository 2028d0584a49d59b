"""A person may take over with a keyboard or a SpaceMouse, through robosuite's drivers, or with a gamepad."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from typing import Any

import numpy as np

_EXTRA = "run `pip install rlt[teleop]`"

#: Seconds of one control step (20 Hz).
_CONTROL_STEP = 0.05


class DeviceTakeover:
    """
    A person has the arm from the first touch of the device until nothing came from it for a while.

    Meanwhile the arm rests when the device does. The gripper keeps doing what the policy last asked of it until the
    device's gripper button is used. The device's reset button hands back at once. While a person acts, the simulation
    is slowed down to real time; a window shows the scene.

    :param hold: Control steps without input after which the policy has the arm again (20 is a second).
    :param sensitivity: Scale of the motion.
    :param window: Show the scene in a window of 256 x 256 pixels.
    :param realtime: Slow the simulation down to real time also while the policy acts, so that a person can follow.
    """

    #: A person cannot watch several simulators.
    one_env = True

    def __init__(self, hold: int = 20, sensitivity: float = 1.0, window: bool = True, realtime: bool = True):
        self.check_arguments(hold, sensitivity, window, realtime)
        self.hold, self.sensitivity, self.window, self.realtime = hold, sensitivity, window, realtime
        self._device: Any = None

    @classmethod
    def check_arguments(
        cls, hold: int = 20, sensitivity: float = 1.0, window: bool = True, realtime: bool = True
    ) -> None:
        """
        Check the constructor's arguments; the environment calls this before it starts a worker.

        :param hold: See the class.
        :param sensitivity: See the class.
        :param window: See the class.
        :param realtime: See the class.
        :raises ValueError: A value out of range.
        :raises ImportError: The device's library is missing.
        :raises RuntimeError: There is no display.
        """
        if not isinstance(hold, int) or isinstance(hold, bool) or hold < 1:
            raise ValueError(f"hold must be an integer >= 1 (control steps), got {hold!r}")
        if not sensitivity > 0.0:
            raise ValueError(f"sensitivity must be > 0, got {sensitivity!r}")
        cls._check_machine(window)

    @classmethod
    def _check_machine(cls, window: bool) -> None:
        if window and not _has_display():
            raise RuntimeError(
                "The window of the scene needs a display, and DISPLAY is not set: run it on a desktop, or pass "
                "intervention_kwargs={'window': False}"
            )

    def _open(self) -> Any:
        """Open the robosuite device and listen to it."""
        raise NotImplementedError

    def _motion(self, state: dict[str, Any]) -> np.ndarray:
        """(6,) action from what the device reports."""
        raise NotImplementedError

    def reset(self, simulator: Any, rng: np.random.Generator) -> None:
        """
        Begin an episode.

        :param simulator: The worker's simulator, just reset.
        :param rng: The episode's randomness.
        """
        if self._device is None:
            self._device = self._open()
        self._device.start_control()
        self._grasp = 0.0
        self._gripper = -1.0
        self._left = 0
        self._next = time.monotonic()

    def act(self, simulator: Any, proposed: np.ndarray, step: int) -> np.ndarray | None:
        """
        Decide about one control step.

        :param simulator: The worker's simulator.
        :param proposed: The policy's action (7,).
        :param step: Number of the control step in the episode, from 0.
        :return: The action (7,) to execute, or ``None``: the policy's.
        """
        if self.window:
            self._show(simulator)
        if self.realtime or self._left:
            time.sleep(max(0.0, self._next - time.monotonic()))
        self._next = time.monotonic() + _CONTROL_STEP
        state = self._device.get_controller_state()
        if state["reset"]:
            self._device.start_control()
            self._grasp, self._left = 0.0, 0
            self._note_gripper(proposed)
            return None
        motion = self._motion(state)
        pressed = float(state["grasp"]) != self._grasp
        self._grasp = float(state["grasp"])
        if pressed:
            self._gripper = self._pressed(self._grasp)
        if pressed or np.any(motion != 0.0):
            self._left = self.hold
        if self._left == 0:
            self._note_gripper(proposed)
            return None
        self._left -= 1
        return np.clip(np.append(motion, self._gripper), -1.0, 1.0)

    def _note_gripper(self, proposed: np.ndarray) -> None:
        if proposed[6] != 0.0:
            self._gripper = float(np.sign(proposed[6]))

    def _pressed(self, grasp: float) -> float:
        return -self._gripper  # a key that toggles

    def _show(self, simulator: Any) -> None:
        import cv2

        picture = simulator.pictures({"frame": "agentview"}, 256)["frame"][::-1, :, ::-1]
        cv2.imshow("rlt", np.ascontiguousarray(picture))
        cv2.waitKey(1)


class KeyboardTakeover(DeviceTakeover):
    """
    Takeover by keyboard, through robosuite's device.

    w a s d move in the plane, r f up and down; z x, t g and c v turn; the space bar toggles the gripper, q gives
    control back. It listens to the whole desktop, whichever window has the focus.
    """

    @classmethod
    def _check_machine(cls, window: bool) -> None:
        if "pynput" not in sys.modules and importlib.util.find_spec("pynput") is None:
            raise ImportError(f"The keyboard needs pynput: {_EXTRA}")
        if not _has_display():
            raise RuntimeError("The keyboard needs a display (pynput listens to X), and DISPLAY is not set")
        super()._check_machine(window)

    def _open(self) -> Any:
        from robosuite.devices.keyboard import Keyboard

        return Keyboard(pos_sensitivity=self.sensitivity, rot_sensitivity=self.sensitivity)

    def _motion(self, state: dict[str, Any]) -> np.ndarray:
        # scales of robosuite 1.4 (utils/input_utils.py, input2action, OSC_POSE)
        turn = np.asarray(state["raw_drotation"])[[1, 0, 2]] * [1.0, 1.0, -1.0]
        return np.concatenate([np.asarray(state["dpos"]) * 75.0, turn * 1.5])


class SpaceMouseTakeover(DeviceTakeover):
    """
    robosuite's SpaceMouse: the left button held closes the gripper, the right one hands back.

    Arguments are those of :class:`DeviceTakeover`; the device's ids are ``SPACEMOUSE_VENDOR_ID`` and
    ``SPACEMOUSE_PRODUCT_ID`` of robosuite's macros.
    """

    @classmethod
    def _check_machine(cls, window: bool) -> None:
        if "hid" not in sys.modules and importlib.util.find_spec("hid") is None:
            raise ImportError(f"The SpaceMouse needs hidapi: {_EXTRA}")
        super()._check_machine(window)

    def _open(self) -> Any:
        from robosuite.devices.spacemouse import SpaceMouse

        try:
            return SpaceMouse(pos_sensitivity=self.sensitivity, rot_sensitivity=self.sensitivity)
        except OSError as error:
            raise RuntimeError(
                f"No SpaceMouse can be opened ({error}): is it plugged in, and may this user read /dev/hidraw*?"
            ) from error

    def _motion(self, state: dict[str, Any]) -> np.ndarray:
        turn = np.asarray(state["raw_drotation"])[[1, 0, 2]] * [1.0, 1.0, -1.0]
        return np.concatenate([np.asarray(state["dpos"]) * 125.0, turn * 50.0])

    def _pressed(self, grasp: float) -> float:
        return 1.0 if grasp else -1.0  # held, not toggled


class GamepadTakeover(DeviceTakeover):
    """
    Takeover by gamepad, through pygame (robosuite 1.4 has no driver for gamepads).

    The left stick moves in the plane as the picture shows it, the triggers move up (right) and down (left). The right
    stick and the shoulder buttons turn the hand. A toggles the gripper, B gives control back.

    Arguments are those of :class:`DeviceTakeover`.
    """

    @classmethod
    def _check_machine(cls, window: bool) -> None:
        if "pygame" not in sys.modules and importlib.util.find_spec("pygame") is None:
            raise ImportError(f"The gamepad needs pygame: {_EXTRA}")
        super()._check_machine(window)

    def _open(self) -> Any:
        from rlt_gym.libero.gamepad import Gamepad

        return Gamepad()

    def _motion(self, state: dict[str, Any]) -> np.ndarray:
        return np.concatenate([state["dpos"], state["raw_drotation"]]) * self.sensitivity


def _has_display() -> bool:
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY"))
