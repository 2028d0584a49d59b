"""Cabinets, stove, racks: what stands fixed on a table, with its joints and regions."""

from __future__ import annotations

import math

from rlt_gym.assets.schema import Asset, Joint, Lamp, Part, Region
from rlt_gym.assets.shapes import Box, Cylinder, Prism, Shape, Vec3, slab, turn


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
