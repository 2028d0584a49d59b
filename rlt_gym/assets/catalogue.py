"""What is in the embedded asset pack: paints, objects, fixtures and scenes of LIBERO, drawn with primitive shapes.

LIBERO's code asks each file for a few names (bodies, joints, sites), and its initial states and predicates fix a few
dimensions (heights at which things rest, regions that count as "on" or "in", ranges of joints). Those are kept.
Everything else is original: no mesh, texture or text of LIBERO's asset files is used.

To add an object: one :class:`Asset` (or :class:`Scene`) in :data:`CATALOGUE`. Metres, kilograms, half sizes; z is up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlt_gym.assets.shapes import ORIGIN, UPRIGHT, Box, Cylinder, Prism, Quat, Ring, Shape, Vec3, slab, turn


@dataclass(frozen=True)
class Paint:
    """
    Colour and surface.

    :param rgb: Red, green, blue in [0, 1]; multiplies the texture if there is one.
    :param texture: Name of a texture in :data:`TEXTURES`.
    :param gloss: Specular highlight in [0, 1]. Reflection is never used: it doubles the time of rendering.
    """

    rgb: Vec3
    texture: str | None = None
    gloss: float = 0.2


@dataclass(frozen=True)
class Texture:
    """
    A tiny picture that is computed, see :mod:`rlt_gym.assets.textures`.

    :param pattern: ``"tiles"``, ``"grain"`` (wood) or ``"speckle"``.
    :param rgb: Base colour in [0, 1].
    :param contrast: How far the pattern leaves the base colour, in [0, 1].
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
    :param pos: Centre in the frame of its part.
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
    :param pos: Centre in the frame of its part.
    :param rgb: Colour when shown.
    """

    name: str
    radius: float
    pos: Vec3
    rgb: Vec3


@dataclass(frozen=True)
class Joint:
    """
    :param name: Name of the joint.
    :param kind: ``"slide"`` or ``"hinge"``.
    :param axis: Axis in the frame of the part.
    :param range: Limits in metres or radians.
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
    """

    path: str
    shapes: tuple[Shape, ...] = ()
    mass: float | None = None
    sites: tuple[Region | Lamp, ...] = ()
    parts: tuple[Part, ...] = ()
    bottom: float = -0.06
    top: float = 0.04
    radius: float = 0.025


@dataclass(frozen=True)
class Camera:
    """
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
    A room, with or without a table.

    :param path: File below the asset folder.
    :param floor: Paint of the floor (LIBERO's style code swaps its texture's file).
    :param wall: Paint of the walls (ditto).
    :param walls: Boxes that are drawn but don't collide.
    :param table: Paint of the table, None for a bare floor.
    :param legs: Paint of the table's legs.
    :param cameras: LIBERO moves ``frontview`` and ``agentview`` itself but wants them to exist.
    """

    path: str
    floor: str
    wall: str
    walls: tuple[Shape, ...]
    table: str | None
    legs: str | None
    cameras: tuple[Camera, ...]


# Names of files that LIBERO's style code puts in place of a scene's floor and wall textures, and our own.
TEXTURES: dict[str, Texture] = {
    # floors
    "dark_floor_texture": Texture("tiles", (0.25, 0.24, 0.24), 0.25),
    "rustic_floor": Texture("grain", (0.48, 0.34, 0.22), 0.35),
    "light-gray-floor-tile": Texture("tiles", (0.74, 0.74, 0.73), 0.15),
    "white_marble_floor": Texture("tiles", (0.90, 0.90, 0.91), 0.10),
    "seamless_wood_planks_floor": Texture("grain", (0.63, 0.47, 0.31), 0.30),
    "brown_ceramic_tile": Texture("tiles", (0.55, 0.39, 0.28), 0.25),
    "gray_ceramic_tile": Texture("tiles", (0.55, 0.56, 0.57), 0.20),
    "tile_grigia_caldera_porcelain_floor": Texture("tiles", (0.60, 0.58, 0.55), 0.20),
    # walls
    "light_blue_wall": Texture("speckle", (0.67, 0.79, 0.87), 0.06),
    "dark_blue_wall": Texture("speckle", (0.18, 0.26, 0.41), 0.10),
    "dark_gray_plaster": Texture("speckle", (0.36, 0.36, 0.37), 0.12),
    "gray_plaster": Texture("speckle", (0.58, 0.58, 0.58), 0.10),
    "dark_green_plaster_wall": Texture("speckle", (0.17, 0.32, 0.24), 0.12),
    "light-gray-plaster": Texture("speckle", (0.82, 0.82, 0.81), 0.06),
    "ceramic": Texture("tiles", (0.86, 0.87, 0.86), 0.12),
    "white_wall": Texture("speckle", (0.93, 0.93, 0.92), 0.04),
    "yellow_linen_wall_texture": Texture("speckle", (0.88, 0.79, 0.55), 0.10),
    # ours
    "rlt_pale_wood": Texture("grain", (0.82, 0.70, 0.54), 0.08),
    "rlt_dark_wood": Texture("grain", (0.32, 0.19, 0.12), 0.25),
    "rlt_drawer_wood": Texture("grain", (0.66, 0.44, 0.25), 0.15),
    "rlt_red_wood": Texture("grain", (0.52, 0.16, 0.10), 0.20),
}

PAINTS: dict[str, Paint] = {
    "floor": Paint((1.0, 1.0, 1.0), "light-gray-floor-tile", 0.0),
    "wall": Paint((1.0, 1.0, 1.0), "light-gray-plaster", 0.0),
    "table": Paint((1.0, 1.0, 1.0), "rlt_pale_wood", 0.05),
    "table_leg": Paint((0.30, 0.30, 0.32)),
    "black": Paint((0.07, 0.07, 0.08), gloss=0.4),
    "charcoal": Paint((0.18, 0.18, 0.20)),
    "porcelain": Paint((0.95, 0.95, 0.93), gloss=0.3),
    "crimson": Paint((0.75, 0.10, 0.12)),
    "bottle_green": Paint((0.06, 0.26, 0.12), gloss=0.5),
    "label_cream": Paint((0.93, 0.86, 0.66)),
    "foil_red": Paint((0.55, 0.05, 0.12), gloss=0.4),
    "cheese_blue": Paint((0.22, 0.45, 0.85)),
    "cheese_white": Paint((0.92, 0.94, 0.97)),
    "steel": Paint((0.62, 0.64, 0.67), gloss=0.5),
    "bright_steel": Paint((0.84, 0.85, 0.87), gloss=0.6),
    "pointer": Paint((0.98, 0.80, 0.15)),
    "dark_wood": Paint((1.0, 1.0, 1.0), "rlt_dark_wood", 0.1),
    "drawer_wood": Paint((1.0, 1.0, 1.0), "rlt_drawer_wood", 0.1),
    "red_wood": Paint((1.0, 1.0, 1.0), "rlt_red_wood", 0.1),
    "rack_slat": Paint((0.93, 0.70, 0.36)),
}


# --- objects ---

AKITA_BLACK_BOWL = Asset(
    "stable_scanned_objects/akita_black_bowl/akita_black_bowl.xml",
    shapes=(
        Prism("charcoal", (0.0, 0.0, 0.0016), apothem=0.0262, height=0.0050),
        Ring("black", low=(0.0240, 0.0046), high=(0.0430, 0.0152), thickness=0.004, segments=12),
        # The wall stands 4 mm thick: thin enough for the fingers, thick enough that no step of 2 ms tunnels through it.
        Ring("black", low=(0.0424, 0.0140), high=(0.0510, 0.0516), thickness=0.004, segments=16),
        Ring("bright_steel", low=(0.0511, 0.0500), high=(0.0515, 0.0522), thickness=0.005, segments=16, solid=False),
    ),
    mass=0.03,
)

PLATE = Asset(
    "stable_scanned_objects/plate/plate.xml",
    shapes=(
        Prism("porcelain", (0.0, 0.0, 0.0005), apothem=0.0320, height=0.0048),
        Ring("porcelain", low=(0.0305, 0.0), high=(0.0661, 0.0140), thickness=0.005, segments=16),
        Ring("crimson", low=(0.0590, 0.0125), high=(0.0664, 0.0154), thickness=0.004, segments=16, solid=False),
    ),
    mass=0.05,
)

CREAM_CHEESE = Asset(
    "stable_hope_objects/cream_cheese/cream_cheese.xml",
    shapes=(
        Box("cheese_white", half=(0.0406, 0.0213, 0.0089)),
        slab("cheese_blue", (-0.0409, -0.0216, -0.0092), (-0.0160, 0.0216, 0.0092), solid=False),
        slab("cheese_blue", (0.0280, -0.0216, -0.0092), (0.0409, 0.0216, 0.0092), solid=False),
    ),
    mass=0.03,
    bottom=-0.025,
    top=0.025,
    radius=0.03,
)

WINE_BOTTLE = Asset(
    "turbosquid_objects/wine_bottle/wine_bottle.xml",
    shapes=(
        Prism("bottle_green", (0.0, 0.0, 0.0011), apothem=0.0195, height=0.0639),
        Prism("bottle_green", (0.0, 0.0, 0.0640), apothem=0.0160, height=0.0100),
        Prism("bottle_green", (0.0, 0.0, 0.0740), apothem=0.0115, height=0.0130),
        Prism("bottle_green", (0.0, 0.0, 0.0870), apothem=0.0072, height=0.0710),
        Prism("label_cream", (0.0, 0.0, 0.0150), apothem=0.0201, height=0.0360, solid=False),
        Prism("foil_red", (0.0, 0.0, 0.1260), apothem=0.0080, height=0.0326, solid=False),
    ),
    mass=0.06,
)


# --- fixtures ---


def _drawer(level: str, region_z: float, centre_z: float) -> Part:
    """
    A hollow drawer that opens towards -y, with a handle whose gap takes a finger of the gripper.

    :param level: ``"top"``, ``"middle"`` or ``"bottom"``.
    :param region_z: z of the centre of its region.
    :param centre_z: z of the centre of its front.
    :return: The part.
    """
    z = centre_z
    floor = z - 0.0320
    return Part(
        f"cabinet_{level}",
        shapes=(
            slab("dark_wood", (-0.1060, -0.0780, z - 0.0338), (0.1127, -0.0648, z + 0.0338), shown=False),
            # Drawn smaller than it is: the dark joints between the fronts show that there are three drawers.
            slab("drawer_wood", (-0.1020, -0.0780, z - 0.0305), (0.1087, -0.0648, z + 0.0305), solid=False),
            slab("dark_wood", (-0.1034, 0.0872, floor + 0.0003), (0.1101, 0.0943, z + 0.0326)),
            slab("dark_wood", (-0.1046, -0.0704, floor + 0.0008), (-0.0992, 0.0925, z + 0.0321)),
            slab("dark_wood", (0.1063, -0.0704, floor + 0.0008), (0.1114, 0.0925, z + 0.0321)),
            slab("dark_wood", (-0.1035, -0.0705, floor), (0.1104, 0.0914, floor + 0.0081)),
            slab("bright_steel", (-0.0472, -0.1093, z - 0.0072), (0.0417, -0.0985, z + 0.0088)),
            slab("bright_steel", (0.0310, -0.0990, z - 0.0047), (0.0400, -0.0770, z + 0.0063)),
            slab("bright_steel", (-0.0455, -0.0990, z - 0.0047), (-0.0365, -0.0770, z + 0.0063)),
        ),
        sites=(Region(f"{level}_region", (0.02993, 0.07561, 0.10224), (0.00328, 0.01128, region_z), turn(y=90)),),
        joint=Joint(f"{level}_level", "slide", (0.0, 1.0, 0.0), (-0.16, 0.01), damping=50.0),
        inertia=(3.0, (1.0, 1.0, 1.0)),
    )


def _cabinet_shelf(top: float) -> Box:
    # Begins behind the fronts of the drawers, which reach a little below it.
    return slab("dark_wood", (-0.1078, -0.0630, top - 0.0022), (0.1157, 0.1082, top))


WOODEN_CABINET = Asset(
    "articulated_objects/wooden_cabinet.xml",
    parts=(
        Part(
            "base",
            shapes=(
                slab("dark_wood", (-0.1173, -0.0788, -0.0050), (-0.1072, 0.1117, 0.2201)),
                slab("dark_wood", (0.1140, -0.0788, -0.0050), (0.1242, 0.1117, 0.2201)),
                slab("dark_wood", (-0.1173, 0.1074, -0.0050), (0.1242, 0.1117, 0.2201)),
                slab("dark_wood", (-0.1173, -0.0735, -0.0050), (0.1242, 0.1100, 0.0104)),
                slab("dark_wood", (-0.1234, -0.0788, 0.2190), (0.1312, 0.1117, 0.2230)),
                _cabinet_shelf(0.1505),
                _cabinet_shelf(0.0804),
            ),
            sites=(Region("top_side", (0.12534, 0.09438, 0.00147), (0.00354, 0.01567, 0.22152)),),
            parts=(
                _drawer("top", 0.18563, 0.1831),
                _drawer("middle", 0.11690, 0.1134),
                _drawer("bottom", 0.04701, 0.0448),
            ),
        ),
    ),
    bottom=-0.045,
    top=0.045,
    radius=0.045,
)

FLAT_STOVE = Asset(
    "articulated_objects/flat_stove.xml",
    parts=(
        Part(
            "base",
            shapes=(slab("steel", (-0.0580, -0.0600, -0.0200), (0.0550, 0.0600, 0.0002), solid=False),),
            parts=(
                Part(
                    "burner",
                    shapes=(
                        # Pots stand on the grate at 25.5 mm; the plate that is drawn lies 3 mm lower.
                        slab("steel", (-0.0950, -0.0950, -0.0200), (0.0950, 0.0950, 0.0255), shown=False),
                        slab("steel", (-0.0950, -0.0950, -0.0200), (0.0950, 0.0950, 0.0225), solid=False),
                        Cylinder("black", (0.0, 0.0, 0.0225), radius=0.0720, half_height=0.0008, solid=False),
                        *(
                            Box("charcoal", (0.0, 0.0, 0.0245), turn(z=angle), solid=False, half=(0.080, 0.003, 0.001))
                            for angle in (0, 45, 90, 135)
                        ),
                    ),
                    sites=(
                        Region("cook_region", (0.075, 0.075, 0.0025)),
                        Lamp("burner", 0.0625, (0.0, 0.0, 0.0236), (0.95, 0.12, 0.05)),
                    ),
                    pos=(0.15, 0.0, 0.0),
                ),
                Part(
                    "button",
                    shapes=(
                        Prism("black", (0.0013, 0.0045, 0.0004), apothem=0.0470, height=0.0124),
                        slab("charcoal", (-0.0110, -0.0172, 0.0014), (0.0136, 0.0520, 0.0500)),
                        slab("charcoal", (-0.0110, -0.0405, 0.0014), (0.0136, -0.0170, 0.0400)),
                        slab("pointer", (-0.0030, 0.0100, 0.0490), (0.0056, 0.0523, 0.0506), solid=False),
                    ),
                    joint=Joint("button", "hinge", (0.0, 0.0, 1.0), (-0.005, 2.1), damping=1.0),
                    quat=turn(z=90),
                    inertia=(3.0, (1.0, 1.0, 1.0)),
                ),
            ),
        ),
    ),
    bottom=-0.045,
    top=0.045,
    radius=0.045,
)

# The shelves lean by this angle, so that a bottle laid across them rolls against the lip at their lower edge.
_LEAN = 31.3
_SHELF = turn(x=_LEAN)


def _rack_shelf(y: float, z: float) -> tuple[Shape, ...]:
    """
    A leaning shelf: five slats on two rails are drawn, one board collides, and a lip keeps bottles from rolling off.

    :param y: Centre of the board.
    :param z: Centre of the board.
    :return: The shapes.
    """

    def at(along: float, above: float = 0.0) -> Vec3:
        cos, sin = math.cos(math.radians(_LEAN)), math.sin(math.radians(_LEAN))
        return (0.0, y + along * cos - above * sin, z + along * sin + above * cos)

    rail = at(0.0, -0.003)
    return (
        Box("rack_slat", at(0.0), _SHELF, shown=False, half=(0.1344, 0.0789, 0.0045)),
        *(Box("rack_slat", at(0.0322 * i), _SHELF, solid=False, half=(0.1344, 0.0118, 0.0045)) for i in range(-2, 3)),
        *(Box("red_wood", (x, *rail[1:]), _SHELF, solid=False, half=(0.010, 0.0785, 0.003)) for x in (-0.09, 0.09)),
        Box("red_wood", at(-0.0749, 0.0095), _SHELF, half=(0.1322, 0.0015, 0.0087)),
    )


WINE_RACK = Asset(
    "turbosquid_objects/wine_rack/wine_rack.xml",
    shapes=(
        *_rack_shelf(-0.0061, 0.2512),
        *_rack_shelf(-0.0427, 0.1273),
        Box("red_wood", (0.0, 0.0089, 0.1703), turn(x=-15.8), half=(0.0120, 0.0085, 0.1617)),
        slab("red_wood", (-0.0900, -0.1240, -0.0200), (0.0900, 0.1290, 0.0111)),
    ),
    sites=(Region("top_region", (0.10087, 0.02200, 0.00251), (0.0, -0.08003, 0.21745), (0.8549119, -0.5187733, 0, 0)),),
)


# --- rooms ---

TABLETOP = Scene(
    "scenes/libero_tabletop_base_style.xml",
    floor="floor",
    wall="wall",
    walls=(
        # Thin along their own z: MuJoCo lays a flat texture on x and y.
        Box("wall", (-2.0, 0.0, 1.5), turn(y=90), solid=False, half=(1.5, 3.0, 0.02)),
        Box("wall", (0.5, -3.0, 1.5), turn(x=90), solid=False, half=(2.5, 1.5, 0.02)),
        Box("wall", (0.5, 3.0, 1.5), turn(x=90), solid=False, half=(2.5, 1.5, 0.02)),
    ),
    table="table",
    legs="table_leg",
    cameras=(
        Camera("frontview", (1.0, 0.0, 1.48), (0.56, 0.43, 0.43, 0.56)),
        Camera("agentview", (0.66, 0.0, 1.61), (0.638, 0.305, 0.305, 0.638)),
        Camera("birdview", (0.0, 0.0, 2.8), turn(z=90)),
        Camera("sideview", (0.0, 1.3, 1.5), turn(x=60, z=180)),
    ),
)

CATALOGUE: tuple[Asset | Scene, ...] = (
    AKITA_BLACK_BOWL,
    PLATE,
    CREAM_CHEESE,
    WINE_BOTTLE,
    WOODEN_CABINET,
    FLAT_STOVE,
    WINE_RACK,
    TABLETOP,
)
