"""What the gripper's number in an action means."""

from __future__ import annotations

from enum import StrEnum
from typing import Any


class Gripper(StrEnum):
    """
    A convention for the gripper's number.

    The environment's is :attr:`ENV`. A conversion happens once, where data or a policy come in. Applied twice, or not
    at all, the gripper opens where it should close, and no episode succeeds.
    """

    #: -1 opens, 1 closes: LIBERO's own actions, and LeRobot's datasets and policies of LIBERO.
    ENV = "env"
    #: 1 is open, 0 is closed: RLDS datasets of LIBERO, OpenVLA, OpenVLA-OFT, Qwen-OFT.
    OPEN = "open"
    #: 0 is open, 1 is closed.
    CLOSED = "closed"
    #: 1 opens, -1 closes.
    OPEN_SIGNED = "open-signed"

    def to_env(self, values: Any, binarize: bool = False) -> Any:
        """
        Translate to the environment's convention.

        :param values: Gripper actions, a NumPy array or a tensor of torch of any shape.
        :param binarize: Give -1 and 1 only; what lies exactly between open and closed closes.
        :return: The same type and shape: -1 opens, 1 closes, everything lies in [-1, 1].
        """
        if self in (Gripper.OPEN, Gripper.CLOSED):
            values = 2.0 * values - 1.0
        if self in (Gripper.OPEN, Gripper.OPEN_SIGNED):
            values = -values
        if binarize:
            values = 1.0 - 2.0 * (values < 0.0)
        return values.clip(-1.0, 1.0)

    def from_env(self, values: Any) -> Any:
        """
        Translate from the environment's convention.

        :param values: Gripper actions, a NumPy array or a tensor of torch of any shape: -1 opens, 1 closes.
        :return: The same type and shape, in this convention.
        """
        if self in (Gripper.OPEN, Gripper.OPEN_SIGNED):
            values = -values
        return (values + 1.0) / 2.0 if self in (Gripper.OPEN, Gripper.CLOSED) else values
