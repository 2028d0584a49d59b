"""Cabinets, stove, racks: what stands fixed on a table, with its joints and regions."""

from __future__ import annotations

import math

from rlt_gym.libero.assets.schema import Asset, Joint, Lamp, Part, Region
from rlt_gym.libero.assets.shapes import Box, Cylinder, Prism, Shape, Vec3, slab, turn


def _drawer(level: str, region_z: float, center_z: float, case: str, front: str, handle: str) -> Part:
    """
    Build a hollow drawer that opens towards -y; a finger of the gripper fits behind its handle.

    :param level: ``"top"``, ``"middle"`` or ``"bottom"``.
    :param region_z: z of the center of its region.
    :param center_z: z of the center of its front.
    :param case: Paint of its box.
    :param front: Paint of its front.
    :param handle: Paint of its handle.
    :return: The part.
    """
    z = center_z
    floor = z - 0.0320
    return Part(
        f"cabinet_{level}",
        shapes=(
            slab(case, (-0.1060, -0.0780, z - 0.0338), (0.1127, -0.0648, z + 0.0338), shown=False),
            # Drawn smaller than it is: the dark joints between the fronts show that there are three drawers.
            slab(front, (-0.1020, -0.0780, z - 0.0305), (0.1087, -0.0648, z + 0.0305), solid=False),
            slab(case, (-0.1034, 0.0872, floor + 0.0003), (0.1101, 0.0943, z + 0.0326)),
            slab(case, (-0.1046, -0.0704, floor + 0.0008), (-0.0992, 0.0925, z + 0.0321)),
            slab(case, (0.1063, -0.0704, floor + 0.0008), (0.1114, 0.0925, z + 0.0321)),
            slab(case, (-0.1035, -0.0705, floor), (0.1104, 0.0914, floor + 0.0081)),
            slab(handle, (-0.0472, -0.1093, z - 0.0072), (0.0417, -0.0985, z + 0.0088)),
            slab(handle, (0.0310, -0.0990, z - 0.0047), (0.0400, -0.0770, z + 0.0063)),
            slab(handle, (-0.0455, -0.0990, z - 0.0047), (-0.0365, -0.0770, z + 0.0063)),
        ),
        sites=(Region(f"{level}_region", (0.02993, 0.07561, 0.10224), (0.00328, 0.01128, region_z), turn(y=90)),),
        joint=Joint(f"{level}_level", "slide", (0.0, 1.0, 0.0), (-0.16, 0.01), damping=50.0),
        inertia=(3.0, (1.0, 1.0, 1.0)),
    )


def _cabinet_shelf(top: float, case: str) -> Box:
    # Begins behind the fronts of the drawers, which reach a little below it.
    return slab(case, (-0.1078, -0.0630, top - 0.0022), (0.1157, 0.1082, top))


def _cabinet(name: str, case: str, front: str, handle: str, parts_collide: bool) -> Asset:
    """
    Build a cabinet.

    :param name: Name of LIBERO's fixture.
    :param case: Paint of the case.
    :param front: Paint of the drawers' fronts.
    :param handle: Paint of the handles.
    :param parts_collide: As of :class:`~rlt_gym.libero.assets.schema.Asset`.
    :return: A cabinet of three drawers that open towards -y.
    """
    return Asset(
        f"articulated_objects/{name}.xml",
        parts=(
            Part(
                "base",
                shapes=(
                    slab(case, (-0.1173, -0.0788, -0.0050), (-0.1072, 0.1117, 0.2201)),
                    slab(case, (0.1140, -0.0788, -0.0050), (0.1242, 0.1117, 0.2201)),
                    slab(case, (-0.1173, 0.1074, -0.0050), (0.1242, 0.1117, 0.2201)),
                    slab(case, (-0.1173, -0.0735, -0.0050), (0.1242, 0.1100, 0.0104)),
                    slab(case, (-0.1234, -0.0788, 0.2190), (0.1312, 0.1117, 0.2230)),
                    _cabinet_shelf(0.1505, case),
                    _cabinet_shelf(0.0804, case),
                ),
                sites=(Region("top_side", (0.12534, 0.09438, 0.00147), (0.00354, 0.01567, 0.22152)),),
                parts=(
                    _drawer("top", 0.18563, 0.1831, case, front, handle),
                    _drawer("middle", 0.11690, 0.1134, case, front, handle),
                    _drawer("bottom", 0.04701, 0.0448, case, front, handle),
                ),
            ),
        ),
        bottom=-0.045,
        top=0.045,
        radius=0.045,
        parts_collide=parts_collide,
    )


# The shipped weights were trained with drawers that touch the case of this one.
WOODEN_CABINET = _cabinet("wooden_cabinet", "dark_wood", "drawer_wood", "bright_steel", parts_collide=True)
WHITE_CABINET = _cabinet("white_cabinet", "white_lacquer", "cabinet_front", "charcoal", parts_collide=False)

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
    Build a leaning shelf.

    Five slats on two rails are drawn, one board collides, and a lip keeps bottles from rolling off.

    :param y: Center of the board.
    :param z: Center of the board.
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

MICROWAVE = Asset(
    "articulated_objects/microwave.xml",
    shapes=(
        slab("charcoal", (-0.1725, -0.0881, 0.0), (-0.1435, 0.1110, 0.1870)),
        slab("charcoal", (0.0635, -0.0881, 0.0), (0.1725, 0.1110, 0.1870)),
        slab("charcoal", (-0.1440, 0.0805, 0.0), (0.0640, 0.1105, 0.1870)),
        slab("charcoal", (-0.1440, -0.0880, 0.1680), (0.0640, 0.0810, 0.1870)),
        slab("charcoal", (-0.1440, -0.0880, 0.0), (0.0640, 0.0810, 0.0240)),
        slab("steel", (-0.1430, -0.0870, 0.0235), (0.0630, 0.0805, 0.0243), solid=False),
        # Control panel: display, two rows of buttons, the knob.
        slab("black", (0.0885, -0.1105, 0.0), (0.1725, -0.0865, 0.1870)),
        slab("display", (0.1000, -0.1108, 0.1450), (0.1600, -0.1100, 0.1680), solid=False),
        *(
            slab("steel", (x, -0.1108, z), (x + 0.016, -0.1100, z + 0.014), solid=False)
            for x in (0.1000, 0.1220, 0.1440)
            for z in (0.1160, 0.0940)
        ),
        Prism("bright_steel", (0.1300, -0.1105, 0.0500), turn(x=90), solid=False, apothem=0.0200, height=0.0040),
    ),
    sites=(
        Region("top_side", (0.12, 0.0835, 0.005), (0.0, 0.01, 0.2)),
        Region("heating_region", (0.12, 0.0835, 0.08), (0.0, 0.01, 0.096)),
    ),
    parts=(
        Part(
            "microdoorroot",
            shapes=(
                slab("black", (0.0020, -0.0250, -0.0925), (0.2590, -0.0020, 0.0925)),
                slab("smoked_glass", (0.0350, -0.0254, -0.0640), (0.2130, -0.0015, 0.0640), solid=False),
                Prism("bright_steel", (0.2375, -0.0540, -0.0750), apothem=0.0095, height=0.1500),
                slab("bright_steel", (0.2300, -0.0540, 0.0570), (0.2450, -0.0240, 0.0730)),
                slab("bright_steel", (0.2300, -0.0540, -0.0730), (0.2450, -0.0240, -0.0570)),
            ),
            joint=Joint("microjoint", "hinge", (0.0, 0.0, 1.0), (-2.094, 0.0), damping=0.5),
            pos=(-0.1725, -0.0880, 0.0960),
            inertia=(0.26, (0.0064, 0.0017, 0.0060)),
        ),
    ),
)

# Compartments: two deep ones left and right, between them a back and a front one.
DESK_CADDY = Asset(
    "turbosquid_objects/desk_caddy/desk_caddy.xml",
    shapes=(
        slab("caddy_wood", (-0.0755, -0.2169, 0.0014), (0.0755, 0.2169, 0.0138)),
        slab("caddy_wood", (0.0628, -0.2098, 0.0100), (0.0708, 0.2098, 0.1683)),
        slab("caddy_wood", (-0.0706, -0.2156, 0.0100), (0.0706, -0.2032, 0.1674)),
        slab("caddy_wood", (-0.0706, -0.0742, 0.0100), (0.0706, -0.0618, 0.1674)),
        slab("caddy_wood", (-0.0709, -0.2098, 0.0100), (-0.0629, 0.2098, 0.0741)),
        slab("caddy_wood", (-0.0709, -0.2150, 0.0700), (-0.0629, -0.0625, 0.1673)),
        slab("dark_caddy_wood", (-0.0056, -0.0668, 0.0100), (0.0025, 0.0668, 0.0987)),
        # The other two walls fall from back to front.
        *(
            shape
            for y in (0.0707, 0.2085)
            for shape in (
                slab("caddy_wood", (-0.0706, y - 0.0036, 0.0100), (0.0706, y + 0.0036, 0.0785)),
                slab("caddy_wood", (0.0000, y - 0.0036, 0.0700), (0.0690, y + 0.0036, 0.1090)),
                slab("caddy_wood", (0.0400, y - 0.0036, 0.1000), (0.0690, y + 0.0036, 0.1400)),
                Box("caddy_wood", (-0.0010, y, 0.0970), turn(y=-35), half=(0.0800, 0.0036, 0.0230)),
            )
        ),
    ),
    sites=(
        Region("right_contain_region", (0.0620, 0.0622, 0.0605), (0.0063, -0.1434, 0.0656), turn(y=180)),
        Region("left_contain_region", (0.0620, 0.0622, 0.0605), (0.0063, 0.1455, 0.0656), turn(y=180)),
        Region("back_contain_region", (0.0278, 0.0622, 0.0605), (0.0336, -0.0006, 0.0856), turn(y=180)),
        Region(
            "front_contain_region", (0.0278, 0.0360, 0.0622), (-0.0310, -0.0006, 0.0405), (0, 0, 0.7071068, -0.7071068)
        ),
    ),
)

WOODEN_TWO_LAYER_SHELF = Asset(
    "turbosquid_objects/wooden_two_layer_shelf/wooden_two_layer_shelf.xml",
    shapes=(
        slab("shelf_wood", (-0.1609, -0.0792, 0.0002), (-0.1475, 0.1117, 0.2070)),
        slab("shelf_wood", (0.1568, -0.0792, 0.0002), (0.1702, 0.1117, 0.2070)),
        slab("dark_shelf_wood", (-0.1604, 0.1071, 0.0002), (0.1662, 0.1117, 0.2070)),
        slab("shelf_wood", (-0.1481, -0.0709, 0.0672), (0.1586, 0.1082, 0.0712)),
        slab("shelf_wood", (-0.1708, -0.0790, 0.2057), (0.1807, 0.1117, 0.2106)),
    ),
    sites=(
        Region("top_side", (0.1756, 0.0944, 0.0015), (0.0050, 0.0157, 0.2069)),
        Region("top_region", (0.0674, 0.0856, 0.1509), (0.0054, 0.0169, 0.1367), turn(y=-90)),
        Region("bottom_region", (0.0353, 0.0856, 0.1558), (0.0056, 0.0169, 0.0141), turn(y=90)),
    ),
)
