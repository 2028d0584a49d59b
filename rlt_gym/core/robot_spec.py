"""
What generic code must know about a robot: its cameras, proprioception and action.

Every raw environment has a :class:`RobotSpec` as ``metadata["robot"]``, and wrappers keep it. It is plain data: it
pickles, and code that cannot import this package (``rlt_sb3``) reads its attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

PROPRIO_KINDS = ("linear", "axis_angle")


@dataclass(frozen=True)
class Camera:
    """
    A picture in the observation.

    :param key: Its key in the observation.
    :param upside_down: Whether the first row of the picture is the bottom of the scene, as OpenGL draws it.
    """

    key: str
    upside_down: bool = False


@dataclass(frozen=True)
class ProprioPart:
    """
    Consecutive numbers of ``proprio`` that mean one thing.

    :param name: What they are, e.g. ``"position"``.
    :param size: How many.
    :param kind: ``"linear"`` or ``"axis_angle"`` (3 numbers, rad).
    :param center: Constants (size,) that make numbers of order one: ``(value - center) / scale``; zeros by default.
    :param scale: See ``center``; above 0, ones by default.
    :raises ValueError: An unknown kind, or lengths that do not fit.
    """

    name: str
    size: int
    kind: str = "linear"
    center: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in PROPRIO_KINDS:
            raise ValueError(f"kind of {self.name!r} must be one of {PROPRIO_KINDS}, got {self.kind!r}")
        if self.kind == "axis_angle" and self.size != 3:
            raise ValueError(f"{self.name!r} is axis_angle, which has 3 numbers, got size={self.size}")
        object.__setattr__(self, "center", tuple(map(float, self.center)) or (0.0,) * self.size)
        object.__setattr__(self, "scale", tuple(map(float, self.scale)) or (1.0,) * self.size)
        if not len(self.center) == len(self.scale) == self.size or not all(value > 0 for value in self.scale):
            raise ValueError(
                f"{self.name!r} needs {self.size} centers and {self.size} scales > 0, got {self.center}, {self.scale}"
            )


@dataclass(frozen=True)
class RobotSpec:
    """
    A robot as its environment shows it. Actions lie in [-1, 1].

    :param name: Short name.
    :param cameras: Pictures of the observation.
    :param proprio: Parts of the observation's ``proprio``, in order.
    :param action_names: A name for each number of an action.
    :param control_frequency: Control steps per second.
    :param gripper_index: Place of the gripper in the action; ``None`` without one.
    :param gripper_opens: The command that opens it, -1 or 1; the other one closes it.
    :param gripper_speed: By how much its fingers move per control step, where 2 leads from open to closed; 2 if they
        follow a command at once.
    :param gripper_starts_open: Whether it is open when an episode begins.
    :param control_mode: ``"relative"`` if actions change the pose that the hand has, ``"absolute"`` if they are poses;
        ``None`` if it is not said.
    :raises ValueError: A value out of range.
    """

    name: str
    cameras: tuple[Camera, ...]
    proprio: tuple[ProprioPart, ...]
    action_names: tuple[str, ...]
    control_frequency: float
    gripper_index: int | None = None
    gripper_opens: float = -1.0
    gripper_speed: float = 2.0
    gripper_starts_open: bool = True
    control_mode: str | None = None

    action_low = -1.0
    action_high = 1.0

    def __post_init__(self) -> None:
        if not self.control_frequency > 0:
            raise ValueError(f"control_frequency must be > 0 Hz, got {self.control_frequency!r}")
        if self.control_mode not in (None, "relative", "absolute"):
            raise ValueError(f"control_mode must be 'relative' or 'absolute', got {self.control_mode!r}")
        if self.gripper_index is not None and not 0 <= self.gripper_index < len(self.action_names):
            raise ValueError(f"gripper_index must be in 0..{len(self.action_names) - 1}, got {self.gripper_index!r}")
        if self.gripper_opens not in (-1.0, 1.0):
            raise ValueError(f"gripper_opens must be -1 or 1, got {self.gripper_opens!r}")
        if not 0.0 < self.gripper_speed <= 2.0:
            raise ValueError(f"gripper_speed must be in (0, 2], got {self.gripper_speed!r}")

    def to_dict(self) -> dict[str, Any]:
        """Return all fields in types that JSON has, for :meth:`from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RobotSpec:
        """
        Read what :meth:`to_dict` gave, also after JSON made lists of tuples.

        :param data: The fields.
        :return: The robot.
        :raises TypeError: An unknown field.
        :raises ValueError: A value out of range.
        """
        lists = {"cameras": Camera, "proprio": ProprioPart}
        parts = {key: tuple(kind(**entry) for entry in data[key]) for key, kind in lists.items()}
        return cls(**{**data, **parts, "action_names": tuple(data["action_names"])})

    @property
    def action_size(self) -> int:
        """Numbers per action."""
        return len(self.action_names)

    @property
    def proprio_size(self) -> int:
        """Numbers in ``proprio``."""
        return sum(part.size for part in self.proprio)

    @property
    def camera_keys(self) -> tuple[str, ...]:
        """Keys of the pictures in the observation."""
        return tuple(camera.key for camera in self.cameras)
