"""What an entry of the asset catalog says: dataclasses for paints, regions, joints, objects, fixtures and rooms.

Meters, kilograms, half sizes; z is up.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlt_gym.libero.assets.shapes import ORIGIN, UPRIGHT, Quat, Shape, Vec3


@dataclass(frozen=True)
class Paint:
    """
    Color and surface.

    :param rgb: Red, green, blue in [0, 1]; multiplies the texture if there is one.
    :param texture: Name of a texture in :data:`rlt_gym.libero.assets.paints.TEXTURES`.
    :param gloss: Specular highlight in [0, 1]. Reflection is never used: it doubles the time of rendering.
    """

    rgb: Vec3
    texture: str | None = None
    gloss: float = 0.2


@dataclass(frozen=True)
class Texture:
    """
    A tiny picture that is computed, see :mod:`rlt_gym.libero.assets.textures`.

    :param pattern: ``"tiles"``, ``"grain"`` (wood), ``"speckle"`` or ``"weave"``.
    :param rgb: Base color in [0, 1].
    :param contrast: How far the pattern leaves the base color, in [0, 1].
    """

    pattern: str
    rgb: Vec3
    contrast: float


@dataclass(frozen=True)
class Region:
    """
    An invisible box-shaped site that LIBERO's predicates read.

    :param name: Name of the site.
    :param half: Half sizes.
    :param pos: Center in the frame of its part.
    :param quat: Orientation; LIBERO's predicates take sizes and rotations literally, so this matters.
    """

    name: str
    half: Vec3
    pos: Vec3 = ORIGIN
    quat: Quat = UPRIGHT


@dataclass(frozen=True)
class Lamp:
    """
    A flat disc that LIBERO shows or hides by its alpha, such as a hot burner.

    :param name: Name of the site.
    :param radius: Radius.
    :param pos: Center in the frame of its part.
    :param rgb: Color when shown.
    """

    name: str
    radius: float
    pos: Vec3
    rgb: Vec3


@dataclass(frozen=True)
class Joint:
    """
    A joint of a part.

    :param name: Name of the joint.
    :param kind: ``"slide"`` or ``"hinge"``.
    :param axis: Axis in the frame of the part.
    :param range: Limits in meters or radians.
    :param damping: Viscous damping.
    """

    name: str
    kind: str
    axis: Vec3
    range: tuple[float, float]
    damping: float


@dataclass(frozen=True)
class Part:
    """
    A body below an asset's main body.

    :param name: Name of the body.
    :param shapes: What it is made of.
    :param sites: Regions and lamps.
    :param joint: Joint to the parent; fixed to it without one.
    :param parts: Bodies below this one.
    :param pos: Position in the parent's frame.
    :param quat: Orientation in the parent's frame.
    :param inertia: Mass and diagonal inertia. LIBERO's drawers and knobs are heavy, so that they stay as they are put.
    """

    name: str
    shapes: tuple[Shape, ...] = ()
    sites: tuple[Region | Lamp, ...] = ()
    joint: Joint | None = None
    parts: tuple[Part, ...] = ()
    pos: Vec3 = ORIGIN
    quat: Quat = UPRIGHT
    inertia: tuple[float, Vec3] | None = None


@dataclass(frozen=True)
class Asset:
    """
    An object or fixture.

    :param path: File below the asset folder, as LIBERO's loader asks for it.
    :param shapes: What the main body (``object``) is made of.
    :param mass: Mass of the main body, spread over its solid shapes by volume. Fixtures don't move and need none.
    :param sites: Regions of the main body.
    :param parts: Bodies below the main one.
    :param bottom: z of the site at which robosuite puts the object on a surface.
    :param top: z of the site at which robosuite stacks another one.
    :param radius: Offset along x and y of the site that keeps randomly placed objects apart.
    :param parts_collide: Whether its parts collide with each other: needless where joints keep them apart.
    """

    path: str
    shapes: tuple[Shape, ...] = ()
    mass: float | None = None
    sites: tuple[Region | Lamp, ...] = ()
    parts: tuple[Part, ...] = ()
    bottom: float = -0.06
    top: float = 0.04
    radius: float = 0.025
    parts_collide: bool = True


@dataclass(frozen=True)
class Camera:
    """
    A camera of a room.

    :param name: Name of the camera.
    :param pos: Position.
    :param quat: Orientation.
    """

    name: str
    pos: Vec3
    quat: Quat


@dataclass(frozen=True)
class Scene:
    """
    A room: a bare floor, a floor with a table that LIBERO sizes and places, or a furnished floor.

    :param path: File below the asset folder.
    :param floor: Paint of the floor (LIBERO's style code swaps its texture's file).
    :param wall: Paint of the walls (ditto).
    :param walls: Boxes that are drawn but don't collide.
    :param cameras: LIBERO moves ``frontview`` and ``agentview`` itself but wants them to exist.
    :param table: Paint of the table, None without one.
    :param legs: Paint of the table's legs, None where the table hides them from the cameras.
    :param floor_body: Whether the floor is a separate body, as LIBERO's floor and living room require.
    :param furniture: Bodies by name that stand where they are put, such as ``study_table``.
    """

    path: str
    floor: str
    wall: str
    walls: tuple[Shape, ...]
    cameras: tuple[Camera, ...]
    table: str | None = None
    legs: str | None = None
    floor_body: bool = False
    furniture: tuple[Part, ...] = ()
