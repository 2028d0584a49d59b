"""Primitive shapes of which every embedded asset is made, and how composite shapes break into boxes.

Only boxes and cylinders reach MuJoCo: a box costs twelve triangles to draw, collides exactly, and gives several contact
points where it rests on another box. Round things are therefore crossed boxes (:class:`Prism`) or rings of boxes
(:class:`Ring`).

Lengths are meters, angles degrees, sizes are half sizes as in MJCF.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

Vec3 = tuple[float, float, float]
Quat = tuple[float, float, float, float]

ORIGIN: Vec3 = (0.0, 0.0, 0.0)
UPRIGHT: Quat = (1.0, 0.0, 0.0, 0.0)


def quat_multiply(a: Quat, b: Quat) -> Quat:
    """
    Multiply two quaternions.

    :param a: Quaternion (w, x, y, z).
    :param b: Quaternion (w, x, y, z), applied first.
    :return: The Hamilton product ``a b``.
    """
    aw, ax, ay, az = a
    bw, bx, by, bz = b
    return (
        aw * bw - ax * bx - ay * by - az * bz,
        aw * bx + ax * bw + ay * bz - az * by,
        aw * by - ax * bz + ay * bw + az * bx,
        aw * bz + ax * by - ay * bx + az * bw,
    )


def rotate(quat: Quat, vector: Vec3) -> Vec3:
    """
    Rotate a vector by a quaternion.

    :param quat: Quaternion (w, x, y, z).
    :param vector: What to rotate.
    :return: The rotated vector.
    """
    w, x, y, z = quat
    a, b, c = vector
    # v + 2 q x (q x v + w v): exact for UPRIGHT
    d, e, f = y * c - z * b + w * a, z * a - x * c + w * b, x * b - y * a + w * c
    return (a + 2 * (y * f - z * e), b + 2 * (z * d - x * f), c + 2 * (x * e - y * d))


def turn(x: float = 0.0, y: float = 0.0, z: float = 0.0) -> Quat:
    """
    Make a quaternion from angles about the axes.

    :param x: Degrees about the x axis, applied first.
    :param y: Degrees about the y axis.
    :param z: Degrees about the z axis, applied last.
    :return: Quaternion (w, x, y, z).
    """
    half_x, half_y, half_z = (math.radians(angle) / 2 for angle in (x, y, z))
    about_x = (math.cos(half_x), math.sin(half_x), 0.0, 0.0)
    about_y = (math.cos(half_y), 0.0, math.sin(half_y), 0.0)
    about_z = (math.cos(half_z), 0.0, 0.0, math.sin(half_z))
    return quat_multiply(about_z, quat_multiply(about_y, about_x))


@dataclass(frozen=True)
class Geom:
    """
    One MuJoCo primitive.

    :param kind: ``"box"`` or ``"cylinder"``.
    :param size: MJCF half sizes: three for a box, (radius, half height) for a cylinder.
    :param pos: Center in the body's frame.
    :param quat: Orientation (w, x, y, z) in the body's frame.
    :param paint: Name of a paint of the catalog.
    :param solid: Whether it collides (and carries the body's mass).
    :param shown: Whether it is drawn.
    """

    kind: str
    size: tuple[float, ...]
    pos: Vec3
    quat: Quat
    paint: str
    solid: bool
    shown: bool

    @property
    def volume(self) -> float:
        """Return cubic meters."""
        if self.kind == "box":
            return 8 * math.prod(self.size)
        radius, half_height = self.size
        return 2 * math.pi * radius**2 * half_height


@dataclass(frozen=True)
class Shape:
    """
    What all shapes share.

    :param paint: Name of a paint of the catalog.
    :param pos: Center in the body's frame.
    :param quat: Orientation (w, x, y, z) in the body's frame.
    :param solid: Whether it collides.
    :param shown: Whether it is drawn.
    """

    paint: str
    pos: Vec3 = ORIGIN
    quat: Quat = UPRIGHT
    solid: bool = True
    shown: bool = True

    def geoms(self) -> Iterator[Geom]:
        """Return the primitives that make up this shape."""
        raise NotImplementedError(f"{type(self).__name__} is abstract: use Box, Cylinder, Prism or Ring")


def _at(shape: Shape, offset: Vec3) -> Vec3:
    """Return ``offset``, given in the shape's own frame, in the body's frame."""
    (x, y, z), (dx, dy, dz) = shape.pos, rotate(shape.quat, offset)
    return (x + dx, y + dy, z + dz)


def turned(shapes: Iterable[Shape], quat: Quat, pos: Vec3 = ORIGIN) -> tuple[Shape, ...]:
    """
    Place a design, drawn upright about the origin, in the body's frame.

    :param shapes: The design.
    :param quat: Rotation about the origin.
    :param pos: Where the design's origin comes to lie.
    :return: The placed shapes.
    """
    frame = Shape("", pos, quat)
    return tuple(replace(s, pos=_at(frame, s.pos), quat=quat_multiply(quat, s.quat)) for s in shapes)


@dataclass(frozen=True)
class Box(Shape):
    """
    A box.

    :param half: Half sizes along x, y, z.
    """

    half: Vec3 = (0.01, 0.01, 0.01)

    def geoms(self) -> Iterator[Geom]:
        """Return the geoms that it is made of."""
        yield Geom("box", self.half, self.pos, self.quat, self.paint, self.solid, self.shown)


def slab(paint: str, low: Vec3, high: Vec3, *, quat: Quat = UPRIGHT, solid: bool = True, shown: bool = True) -> Box:
    """
    Make a box from two opposite corners, given before it is turned about its own center.

    :param paint: Name of a paint of the catalog.
    :param low: Corner with the smallest x, y, z.
    :param high: Corner with the largest x, y, z.
    :param quat: Orientation (w, x, y, z).
    :param solid: Whether it collides.
    :param shown: Whether it is drawn.
    :return: The box.
    :raises ValueError: If a corner of ``high`` does not lie above the one of ``low``.
    """
    if any(b <= a for a, b in zip(low, high, strict=True)):
        raise ValueError(f"slab needs low < high on every axis, got low={low}, high={high}")
    half = ((high[0] - low[0]) / 2, (high[1] - low[1]) / 2, (high[2] - low[2]) / 2)
    center = ((high[0] + low[0]) / 2, (high[1] + low[1]) / 2, (high[2] + low[2]) / 2)
    return Box(paint, center, quat, solid, shown, half=half)


@dataclass(frozen=True)
class Cylinder(Shape):
    """
    An upright cylinder.

    :param radius: Radius. Dear to draw (hundreds of triangles): keep it for flat discs that a person must see as round.
    :param half_height: Half the height.
    """

    radius: float = 0.01
    half_height: float = 0.01

    def geoms(self) -> Iterator[Geom]:
        """Return the geoms that it is made of."""
        yield Geom("cylinder", (self.radius, self.half_height), self.pos, self.quat, self.paint, self.solid, self.shown)


@dataclass(frozen=True)
class Prism(Shape):
    """
    An upright regular prism: ``sides / 2`` boxes that cross at the axis. ``pos`` is the center of its lower face.

    :param apothem: Distance from the axis to a flat side.
    :param height: Height.
    :param sides: Number of sides, even.
    :param feet: By how much all boxes but two, which cross at a right angle, are shorter at either end. Only those two
        touch what it stands on, with four contacts each; those of the others cost time and hold nothing.
    """

    apothem: float = 0.01
    height: float = 0.01
    sides: int = 8
    feet: float = 0.0

    def __post_init__(self) -> None:
        if self.sides < 4 or self.sides % 2:
            raise ValueError(f"Prism needs an even number of sides >= 4, got {self.sides}")
        if self.feet and self.sides % 4:
            raise ValueError(f"a Prism with feet needs sides that are a multiple of 4, got {self.sides}")

    def geoms(self) -> Iterator[Geom]:
        """Return the geoms that it is made of."""
        half = self.height / 2
        center = _at(self, (0.0, 0.0, half))
        if self.sides == 4:
            size = (self.apothem, self.apothem, half)
            yield Geom("box", size, center, self.quat, self.paint, self.solid, self.shown)
            return
        width = self.apothem * math.tan(math.pi / self.sides)
        for i in range(self.sides // 2):
            quat = quat_multiply(self.quat, turn(z=360.0 * i / self.sides))
            stands = i % (self.sides // 4) == 0
            size = (self.apothem, width, half if stands else half - self.feet)
            yield Geom("box", size, center, quat, self.paint, self.solid, self.shown)


@dataclass(frozen=True)
class Ring(Shape):
    """
    A wall around the z axis (cylinder or cone without lids): boxes that overlap, so that nothing slips through.

    :param low: (radius, z) of the middle of the wall at its lower edge.
    :param high: (radius, z) of the middle of the wall at its upper edge.
    :param thickness: Thickness of the wall.
    :param segments: Number of boxes.
    """

    low: tuple[float, float] = (0.01, 0.0)
    high: tuple[float, float] = (0.01, 0.01)
    thickness: float = 0.004
    segments: int = 16

    def geoms(self) -> Iterator[Geom]:
        """Return the geoms that it is made of."""
        rise, spread = self.high[1] - self.low[1], self.high[0] - self.low[0]
        length = math.hypot(rise, spread)
        radius, height = (self.low[0] + self.high[0]) / 2, (self.low[1] + self.high[1]) / 2
        lean = math.degrees(math.atan2(spread, rise))
        outer = max(self.low[0], self.high[0]) + self.thickness / 2
        half = (self.thickness / 2, outer * math.tan(math.pi / self.segments), length / 2)
        for i in range(self.segments):
            angle = 2 * math.pi * i / self.segments
            center = _at(self, (radius * math.cos(angle), radius * math.sin(angle), height))
            quat = quat_multiply(self.quat, quat_multiply(turn(z=math.degrees(angle)), turn(y=lean)))
            yield Geom("box", half, center, quat, self.paint, self.solid, self.shown)
