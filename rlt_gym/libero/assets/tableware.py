"""Bowls, plates, mugs, pots, and what things are carried in."""

from __future__ import annotations

from rlt_gym.libero.assets.schema import Asset, Region
from rlt_gym.libero.assets.shapes import Box, Prism, Ring, Shape, slab, turn

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

GLAZED_RIM_PORCELAIN_RAMEKIN = Asset(
    "stable_scanned_objects/glazed_rim_porcelain_ramekin/glazed_rim_porcelain_ramekin.xml",
    shapes=(
        Prism("porcelain", (0.0, 0.0, 0.0008), apothem=0.0330, height=0.0064),
        Ring("porcelain", low=(0.0352, 0.0010), high=(0.0412, 0.0428), thickness=0.005, segments=16),
        Ring("bright_steel", low=(0.0415, 0.0395), high=(0.0418, 0.0431), thickness=0.006, segments=16, solid=False),
    ),
    mass=0.03,
)

BASKET = Asset(
    "stable_scanned_objects/basket/basket.xml",
    shapes=(
        slab("wicker", (-0.0720, -0.0680, 0.0046), (0.0740, 0.0680, 0.0216)),
        Box("wicker", (0.0757, 0.0, 0.0766), turn(y=3.8), half=(0.0067, 0.0724, 0.0640)),
        Box("wicker", (-0.0727, 0.0, 0.0766), turn(y=-3.8), half=(0.0067, 0.0724, 0.0640)),
        Box("wicker", (0.0005, 0.0691, 0.0810), turn(x=-2.6), half=(0.0724, 0.0067, 0.0640)),
        Box("wicker", (0.0005, -0.0685, 0.0810), turn(x=2.6), half=(0.0724, 0.0067, 0.0640)),
        # A darker rim, so that the opening is seen from above.
        Box("dark_wicker", (0.0797, 0.0, 0.1365), turn(y=3.8), solid=False, half=(0.0074, 0.0790, 0.0050)),
        Box("dark_wicker", (-0.0767, 0.0, 0.1365), turn(y=-3.8), solid=False, half=(0.0074, 0.0790, 0.0050)),
        Box("dark_wicker", (0.0005, 0.0717, 0.1400), turn(x=-2.6), solid=False, half=(0.0790, 0.0074, 0.0050)),
        Box("dark_wicker", (0.0005, -0.0711, 0.1400), turn(x=2.6), solid=False, half=(0.0790, 0.0074, 0.0050)),
    ),
    mass=0.2,
    sites=(Region("contain_region", (0.0611, 0.0611, 0.0695), (0.0, 0.0, 0.0718), turn(z=180)),),
)

WHITE_BOWL = Asset(
    "stable_scanned_objects/white_bowl/white_bowl.xml",
    shapes=(
        Prism("porcelain", (0.0, 0.0, 0.0006), apothem=0.0200, height=0.0044),
        Ring("porcelain", low=(0.0190, 0.0030), high=(0.0315, 0.0112), thickness=0.004, segments=12),
        Ring("porcelain", low=(0.0318, 0.0100), high=(0.0390, 0.0350), thickness=0.004, segments=16),
        Ring("pale_rim", low=(0.0389, 0.0335), high=(0.0391, 0.0354), thickness=0.005, segments=16, solid=False),
    ),
    mass=0.03,
)


def _mug(
    name: str,
    axis: tuple[float, float],
    bottom: tuple[float, float],
    rim: tuple[float, float],
    handle: tuple[float, float, float, float],
    paints: tuple[str, str, str],
) -> Asset:
    """
    Build a mug.

    :param name: Name of LIBERO's object.
    :param axis: x and y of the axis.
    :param bottom: Outer radius and z of the lower edge.
    :param rim: Outer radius and z of the upper edge.
    :param handle: Direction along x (1 or -1), how far it reaches from the axis, z of its lower and upper end.
    :param paints: Of the outside, the inside, the handle.
    :return: A mug with a handle through which a finger fits.
    """
    (x, y), (low, base), (high, top) = axis, bottom, rim
    sign, reach, start, end = handle
    wall = 0.0045
    outer, inner, grip = paints
    # Where the handle meets the wall.
    near = min(low, high) - 0.002
    middle, half = (near + reach) / 2, (reach - near) / 2
    return Asset(
        f"turbosquid_objects/{name}/{name}.xml",
        shapes=(
            Prism(outer, (x, y, base), apothem=low - 0.002, height=0.006, sides=12),
            Ring(
                outer,
                (x, y, 0.0),
                low=(low - wall / 2, base),
                high=(high - wall / 2, top),
                thickness=wall,
                segments=16,
            ),
            Prism(inner, (x, y, base + 0.0061), apothem=low - 0.005, height=0.0006, sides=12, solid=False),
            Ring(
                inner,
                (x, y, 0.0),
                low=(low - wall - 0.0003, base + 0.006),
                high=(high - wall - 0.0003, top + 0.0003),
                thickness=0.0008,
                segments=16,
                solid=False,
            ),
            Ring(
                grip,
                (x, y, 0.0),
                low=(high - wall / 2 - 0.0005, top - 0.006),
                high=(high - wall / 2, top + 0.0004),
                thickness=wall + 0.0010,
                segments=16,
                solid=False,
            ),
            Box(grip, (x + sign * middle, y, end - 0.006), half=(half, 0.0060, 0.0050)),
            Box(grip, (x + sign * middle, y, start + 0.006), half=(half, 0.0060, 0.0050)),
            slab(
                grip,
                (x + sign * reach - 0.0045, y - 0.0060, start + 0.001),
                (x + sign * reach + 0.0045, y + 0.0060, end - 0.001),
            ),
        ),
        mass=0.05,
    )


PORCELAIN_MUG = _mug(
    "porcelain_mug",
    axis=(0.0150, -0.0014),
    bottom=(0.0370, 0.0024),
    rim=(0.0475, 0.1085),
    handle=(-1, 0.0750, 0.0240, 0.0880),
    paints=("porcelain", "pale_rim", "porcelain"),
)

RED_COFFEE_MUG = _mug(
    "red_coffee_mug",
    axis=(-0.0163, -0.0008),
    bottom=(0.0360, -0.0018),
    rim=(0.0455, 0.1308),
    handle=(1, 0.0740, 0.0330, 0.1150),
    paints=("mug_red", "dark_red", "mug_red"),
)

WHITE_YELLOW_MUG = _mug(
    "white_yellow_mug",
    axis=(-0.0186, 0.0),
    bottom=(0.0360, -0.0001),
    rim=(0.0520, 0.1031),
    handle=(1, 0.0820, 0.0200, 0.0900),
    paints=("porcelain", "mug_yellow", "mug_yellow"),
)

MOKA_POT = Asset(
    "turbosquid_objects/moka_pot/moka_pot.xml",
    shapes=(
        # The waist is drawn, not felt: pots are grasped by the belly or the handle.
        Prism("bright_steel", (0.0, 0.0015, -0.0661), apothem=0.0340, height=0.1331, shown=False),
        Ring(
            "bright_steel",
            (0.0, 0.0015, 0.0),
            low=(0.0345, -0.0661),
            high=(0.0285, -0.0060),
            thickness=0.004,
            segments=8,
            solid=False,
        ),
        Prism("steel", (0.0, 0.0015, -0.0130), apothem=0.0325, height=0.0130, solid=False),
        Ring(
            "bright_steel",
            (0.0, 0.0015, 0.0),
            low=(0.0285, -0.0010),
            high=(0.0355, 0.0620),
            thickness=0.004,
            segments=8,
            solid=False,
        ),
        Prism("steel", (0.0, 0.0015, 0.0600), apothem=0.0330, height=0.0070, solid=False),
        Prism("black", (0.0, -0.0010, 0.0660), apothem=0.0062, height=0.0197),
        slab("bright_steel", (-0.0130, -0.0500, 0.0250), (0.0130, -0.0300, 0.0660)),
        slab("black", (-0.0066, 0.0340, 0.0530), (0.0066, 0.0720, 0.0672)),
        Box("black", (0.0, 0.0735, 0.0400), turn(x=12), half=(0.0066, 0.0066, 0.0270)),
        Box("black", (0.0, 0.0665, 0.0080), turn(x=-25), half=(0.0066, 0.0066, 0.0130)),
    ),
    mass=0.08,
)

CHEFMATE_8_FRYPAN = Asset(
    "stable_scanned_objects/chefmate_8_frypan/chefmate_8_frypan.xml",
    shapes=(
        Prism("charcoal", (0.0073, -0.0015, 0.0008), apothem=0.0770, height=0.0111, sides=12),
        Ring(
            "black",
            (0.0073, -0.0015, 0.0),
            low=(0.0765, 0.0030),
            high=(0.1000, 0.0420),
            thickness=0.006,
            segments=16,
        ),
        Ring(
            "steel",
            (0.0073, -0.0015, 0.0),
            low=(0.0995, 0.0410),
            high=(0.1005, 0.0430),
            thickness=0.007,
            segments=16,
            solid=False,
        ),
        Box("steel", (0.1170, 0.0, 0.0260), turn(y=-22), half=(0.0200, 0.0090, 0.0070)),
        Box("black", (0.1926, 0.0, 0.0441), turn(y=-7.4), half=(0.0665, 0.0127, 0.0062)),
    ),
    mass=0.1,
)


def _tray_board(y: float) -> Shape:
    return slab("tray_wood", (-0.1362, y - 0.0215, -0.0010), (0.1518, y + 0.0215, 0.0080))


WOODEN_TRAY = Asset(
    "turbosquid_objects/wooden_tray/wooden_tray.xml",
    shapes=(
        _tray_board(-0.0560),
        _tray_board(-0.0050),
        _tray_board(0.0460),
        slab("dark_tray_wood", (-0.1362, -0.0830, 0.0000), (0.1518, 0.0760, 0.0050)),
        slab("tray_wood", (-0.1362, -0.0876, 0.0010), (0.1518, -0.0825, 0.0560)),
        slab("tray_wood", (-0.1362, 0.0735, 0.0010), (0.1518, 0.0786, 0.0560)),
        *(
            shape
            for x in (-0.1390, 0.1530)
            for shape in (
                slab("tray_wood", (x - 0.0026, -0.0833, 0.0010), (x + 0.0026, 0.0740, 0.0545)),
                # The grips: a bar on two posts at either end.
                slab("tray_wood", (x - 0.0030, -0.0840, 0.0500), (x + 0.0030, -0.0730, 0.0800)),
                slab("tray_wood", (x - 0.0030, 0.0630, 0.0500), (x + 0.0030, 0.0740, 0.0800)),
                slab("tray_wood", (x - 0.0040, -0.0835, 0.0770), (x + 0.0040, 0.0737, 0.0809)),
            )
        ),
    ),
    mass=0.1,
    sites=(Region("contain_region", (0.0404, 0.0784, 0.1355), (0.0086, -0.0047, 0.0425), turn(y=90)),),
)


def _book(
    name: str, low: tuple[float, float, float], high: tuple[float, float, float], cover: str, stripe: str
) -> Asset:
    """
    Build a book.

    :param name: Name of LIBERO's object.
    :param low: Lower corner.
    :param high: Upper corner.
    :param cover: Paint of the cover.
    :param stripe: Paint of a title on cover and back.
    :return: A book that stands on its lower edge, its back towards -y.
    """
    (x0, y0, z0), (x1, y1, z1) = low, high
    return Asset(
        f"turbosquid_objects/{name}/{name}.xml",
        shapes=(
            slab(cover, low, high, shown=False),
            slab("paper", (x0 + 0.002, y0 + 0.003, z0 + 0.002), (x1 - 0.002, y1 - 0.003, z1 - 0.002), solid=False),
            slab(cover, low, (x0 + 0.0025, y1, z1), solid=False),
            slab(cover, (x1 - 0.0025, y0, z0), high, solid=False),
            slab(cover, low, (x1, y0 + 0.0030, z1), solid=False),
            slab(
                stripe,
                (x0 - 0.0003, y0 + 0.020, z1 - 0.045),
                (x1 + 0.0003, y1 - 0.020, z1 - 0.030),
                solid=False,
            ),
            slab(stripe, (x0 + 0.004, y0 - 0.0003, z0 + 0.020), (x1 - 0.004, y0 + 0.002, z1 - 0.030), solid=False),
        ),
        mass=0.05,
    )


BLACK_BOOK = _book("black_book", (-0.0148, -0.0673, 0.0022), (0.0139, 0.0430, 0.1366), "black", "pale_rim")
YELLOW_BOOK = _book("yellow_book", (-0.0101, -0.0488, 0.0020), (0.0134, 0.0489, 0.1242), "book_yellow", "dark_red")
