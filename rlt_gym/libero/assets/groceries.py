"""Bottles, cans and cartons. Drawn upright, then laid down where LIBERO's object has its long axis along y."""

from __future__ import annotations

from rlt_gym.libero.assets.schema import Asset
from rlt_gym.libero.assets.shapes import Box, Prism, Shape, slab, turn, turned

_UP_IS_Y = turn(x=-90)
"""Turns a design whose up is z into a body whose up is y."""


def _hope(
    name: str,
    shapes: tuple[Shape, ...],
    mass: float,
    bottom: float = -0.06,
    top: float = 0.04,
    radius: float = 0.025,
) -> Asset:
    return Asset(f"stable_hope_objects/{name}/{name}.xml", shapes, mass, bottom=bottom, top=top, radius=radius)


def _label(paint: str, half_width: float, depth: float, low: float, high: float, x: float = 0.0) -> Shape:
    """
    Paint a band on front and back that does not collide.

    :param paint: Its paint.
    :param half_width: Half its width along x.
    :param depth: Where it ends along +y and -y: a hair outside of what it sticks on.
    :param low: z of its lower edge.
    :param high: z of its upper edge.
    :param x: Center along x.
    :return: The shape.
    """
    return slab(paint, (x - half_width, -depth, low), (x + half_width, depth, high), solid=False)


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

BUTTER = _hope(
    "butter",
    (
        Box("label_cream", half=(0.0381, 0.0198, 0.0087)),
        slab("carton_red", (-0.0384, -0.0195, -0.0090), (0.0130, 0.0195, 0.0090), solid=False),
        slab("carton_sky", (0.0130, -0.0195, -0.0090), (0.0384, 0.0195, 0.0090), solid=False),
        slab("label_yellow", (-0.0300, -0.0150, -0.0092), (-0.0215, 0.0150, 0.0092), solid=False),
        slab("label_yellow", (-0.0130, -0.0150, -0.0092), (-0.0045, 0.0150, 0.0092), solid=False),
        slab("black", (0.0190, -0.0130, -0.0092), (0.0290, -0.0020, 0.0092), solid=False),
    ),
    mass=0.03,
    bottom=-0.02,
    top=0.02,
    radius=0.02,
)

CHOCOLATE_PUDDING = _hope(
    "chocolate_pudding",
    (
        slab("chocolate", (-0.0406, -0.0232, -0.0131), (0.0396, 0.0232, 0.0143)),
        slab("carton_sky", (-0.0380, -0.0235, -0.0080), (0.0370, 0.0235, 0.0090), solid=False),
        slab("caramel", (-0.0330, -0.0237, -0.0050), (0.0320, 0.0237, 0.0010), solid=False),
        slab("caramel", (-0.0330, -0.0190, -0.0134), (0.0320, -0.0070, 0.0146), solid=False),
        slab("label_cream", (-0.0330, 0.0030, -0.0134), (0.0320, 0.0110, 0.0146), solid=False),
        slab("carton_red", (0.0200, 0.0150, -0.0134), (0.0380, 0.0220, 0.0146), solid=False),
    ),
    mass=0.03,
)


def _raisins(z: float) -> tuple[Shape, ...]:
    spots = ((-0.010, -0.022), (0.006, -0.012), (0.020, -0.025), (-0.006, 0.004), (0.014, 0.008), (0.002, 0.024))
    return tuple(Box("chocolate", (x, y, z), turn(z=30), solid=False, half=(0.0030, 0.0030, 0.0003)) for x, y in spots)


COOKIES = _hope(
    "cookies",
    (
        Box("porcelain", half=(0.0310, 0.0413, 0.0094)),
        # A checked edge; the cookies show on both faces.
        *(
            slab("carton_red", (-0.0313, y, z), (0.0313, y + 0.0118, z + 0.0063), solid=False)
            for y, z in ((-0.0413, -0.0094), (-0.0177, -0.0094), (0.0059, -0.0094), (0.0295, -0.0094))
        ),
        *(
            slab("carton_red", (-0.0313, y, -0.0031), (0.0313, y + 0.0118, 0.0032), solid=False)
            for y in (-0.0295, -0.0059, 0.0177)
        ),
        slab("caramel", (-0.0160, -0.0390, -0.0097), (0.0290, 0.0390, 0.0097), solid=False),
        slab("carton_red", (-0.0275, -0.0330, -0.0097), (-0.0195, 0.0330, 0.0097), solid=False),
        *_raisins(0.0097),
        *_raisins(-0.0097),
    ),
    mass=0.03,
)


def _can(body: str, band: str, letters: str) -> tuple[Shape, ...]:
    """
    Build a can.

    :param body: Paint of the can.
    :param band: Paint of the broad band around it.
    :param letters: Paint of two thin lines on the band.
    :return: A can, upright.
    """
    y = 0.0034  # its axis
    return (
        Prism(body, (0.0, y, -0.0382), apothem=0.0312, height=0.0754, sides=12, shown=False, feet=0.001),
        Prism(body, (0.0, y, -0.0382), apothem=0.0312, height=0.0754, sides=12, solid=False),
        Prism("bright_steel", (0.0, y, -0.0386), apothem=0.0300, height=0.0762, sides=12, solid=False),
        Prism(band, (0.0, y, -0.0080), apothem=0.0315, height=0.0340, sides=12, solid=False),
        Prism(letters, (0.0, y, -0.0010), apothem=0.0317, height=0.0050, sides=12, solid=False),
        Prism(letters, (0.0, y, 0.0110), apothem=0.0317, height=0.0080, sides=12, solid=False),
        Prism("bright_steel", (0.0, y, 0.0340), apothem=0.0318, height=0.0033, sides=12, solid=False),
        Prism("bright_steel", (0.0, y, -0.0386), apothem=0.0318, height=0.0033, sides=12, solid=False),
    )


ALPHABET_SOUP = _hope(
    "alphabet_soup",
    turned(_can("soup_orange", "soup_blue", "porcelain"), _UP_IS_Y),
    mass=0.05,
    bottom=-0.04,
)

TOMATO_SAUCE = _hope(
    "tomato_sauce",
    turned(_can("tomato", "leaf_green", "porcelain"), _UP_IS_Y),
    mass=0.05,
)


def _carton(body: str, base: str, gable: str, spot: str, roundel: str) -> tuple[Shape, ...]:
    """
    Build a carton.

    :param body: Paint of the sides.
    :param base: Paint of the lower edge.
    :param gable: Paint of the upper part.
    :param spot: Paint of a band below the gable.
    :param roundel: Paint of the picture on all sides.
    :return: A drinks carton with a gable, upright.
    """
    picture = tuple(
        Prism(roundel, pos, quat, solid=False, apothem=0.0165, height=0.0005)
        for pos, quat in (
            ((0.0, 0.0263, -0.0220), turn(x=-90)),
            ((0.0, -0.0263, -0.0220), turn(x=90)),
            ((0.0263, 0.0, -0.0220), turn(y=90)),
            ((-0.0263, 0.0, -0.0220), turn(y=-90)),
        )
    )
    return (
        slab(body, (-0.0263, -0.0263, -0.0698), (0.0263, 0.0263, 0.0398)),
        *(Box(gable, (0.0, 0.0127 * s, 0.0478), turn(x=-38 * s), half=(0.0262, 0.0158, 0.0022)) for s in (-1, 1)),
        slab(gable, (-0.0263, -0.0030, 0.0540), (0.0263, 0.0030, 0.0614)),
        *(
            slab(gable, (x - 0.0020, -0.0120, 0.0390), (x + 0.0020, 0.0120, 0.0480), solid=False)
            for x in (-0.0238, 0.0238)
        ),
        slab(base, (-0.0265, -0.0265, -0.0700), (0.0265, 0.0265, -0.0500), solid=False),
        slab(spot, (-0.0266, -0.0266, 0.0070), (0.0266, 0.0266, 0.0300), solid=False),
        *picture,
    )


MILK = _hope(
    "milk",
    turned(_carton("carton_sky", "leaf_green", "porcelain", "carton_red", "black"), _UP_IS_Y),
    mass=0.05,
    radius=0.03,
)

ORANGE_JUICE = _hope(
    "orange_juice",
    turned(_carton("label_yellow", "leaf_green", "label_yellow", "porcelain", "soup_orange"), _UP_IS_Y),
    mass=0.05,
)

KETCHUP = _hope(
    "ketchup",
    turned(
        (
            slab("ketchup_red", (-0.0281, -0.0170, -0.0724), (0.0281, 0.0170, -0.0010)),
            slab("ketchup_red", (-0.0240, -0.0183, -0.0600), (0.0240, 0.0183, 0.0247)),
            slab("ketchup_red", (-0.0187, -0.0183, 0.0240), (0.0187, 0.0183, 0.0368)),
            Prism("porcelain", (0.0, 0.0, 0.0365), apothem=0.0172, height=0.0367),
            _label("porcelain", 0.0200, 0.0186, -0.0520, 0.0180),
            _label("tomato", 0.0140, 0.0188, -0.0460, -0.0220),
            _label("leaf_green", 0.0150, 0.0188, -0.0080, 0.0030),
        ),
        _UP_IS_Y,
    ),
    mass=0.04,
)

_DRESSING: tuple[Shape, ...] = (
    slab("dressing", (-0.0232, -0.0173, -0.0727), (0.0212, 0.0173, -0.0510)),
    slab("dressing", (-0.0273, -0.0168, -0.0620), (0.0254, 0.0168, -0.0100)),
    slab("dressing", (-0.0239, -0.0173, -0.0110), (0.0219, 0.0173, 0.0012)),
    slab("dressing", (-0.0178, -0.0172, 0.0010), (0.0164, 0.0172, 0.0128)),
    Prism("dressing", (0.0, 0.0, 0.0120), apothem=0.0145, height=0.0240),
    Prism("leaf_green", (0.0, 0.0, 0.0355), apothem=0.0171, height=0.0373),
    _label("porcelain", 0.0200, 0.0176, -0.0540, -0.0060),
    _label("black", 0.0165, 0.0178, -0.0480, -0.0330),
    _label("leaf_green", 0.0165, 0.0178, -0.0250, -0.0130),
)

SALAD_DRESSING = _hope("salad_dressing", turned(_DRESSING, _UP_IS_Y), mass=0.04)

# The same bottle; LIBERO's second model of it has its origin near the bottom.
NEW_SALAD_DRESSING = _hope("new_salad_dressing", turned(_DRESSING, _UP_IS_Y, (0.0, 0.05, 0.0)), mass=0.04)

BBQ_SAUCE = _hope(
    "bbq_sauce",
    (
        slab("barbecue", (-0.0235, -0.0145, -0.0546), (0.0235, 0.0145, -0.0010)),
        slab("barbecue", (-0.0181, -0.0143, -0.0023), (0.0181, 0.0143, 0.0269)),
        Prism("rust", (0.0, 0.0, 0.0257), apothem=0.0136, height=0.0268),
        _label("label_yellow", 0.0150, 0.0148, 0.0030, 0.0200),
        _label("label_yellow", 0.0190, 0.0148, -0.0300, -0.0130),
        _label("crimson", 0.0120, 0.0150, 0.0070, 0.0150),
        _label("porcelain", 0.0080, 0.0148, -0.0490, -0.0360),
    ),
    mass=0.03,
    top=0.06,
    radius=0.015,
)
