"""Bowls, plates, mugs and pots."""

from __future__ import annotations

from rlt_gym.assets.schema import Asset, Region
from rlt_gym.assets.shapes import Box, Prism, Ring, slab, turn

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
