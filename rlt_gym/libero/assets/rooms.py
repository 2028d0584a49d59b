"""The rooms in which LIBERO's tasks take place."""

from __future__ import annotations

from rlt_gym.libero.assets.schema import Camera, Part, Scene
from rlt_gym.libero.assets.shapes import Box, slab, turn

_WALLS = (
    # Thin along their own z: MuJoCo lays a flat texture on x and y.
    Box("wall", (-2.0, 0.0, 1.5), turn(y=90), solid=False, half=(1.5, 3.0, 0.02)),
    Box("wall", (0.5, -3.0, 1.5), turn(x=90), solid=False, half=(2.5, 1.5, 0.02)),
    Box("wall", (0.5, 3.0, 1.5), turn(x=90), solid=False, half=(2.5, 1.5, 0.02)),
)

_CAMERAS = (
    Camera("frontview", (1.0, 0.0, 1.48), (0.56, 0.43, 0.43, 0.56)),
    Camera("agentview", (0.66, 0.0, 1.61), (0.638, 0.305, 0.305, 0.638)),
    Camera("birdview", (0.0, 0.0, 2.8), turn(z=90)),
    Camera("sideview", (0.0, 1.3, 1.5), turn(x=60, z=180)),
)

TABLETOP = Scene(
    "scenes/libero_tabletop_base_style.xml",
    floor="floor",
    wall="wall",
    walls=_WALLS,
    cameras=_CAMERAS,
    table="table",
    legs="table_leg",
)

FLOOR = Scene(
    "scenes/libero_floor_base_style.xml", floor="floor", wall="wall", walls=_WALLS, cameras=_CAMERAS, floor_body=True
)

KITCHEN = Scene(
    "scenes/libero_kitchen_tabletop_base_style.xml",
    floor="floor",
    wall="wall",
    walls=(
        *_WALLS,
        # A counter with cupboards above it and a fridge, along the wall behind the robot.
        slab("white_lacquer", (-1.98, -1.60, 0.0), (-1.45, 1.50, 0.86), solid=False),
        slab("counter", (-1.98, -1.62, 0.86), (-1.43, 1.52, 0.90), solid=False),
        slab("white_lacquer", (-1.98, -1.60, 1.45), (-1.65, 1.50, 2.05), solid=False),
        slab("steel", (-1.98, -2.60, 0.0), (-1.40, -1.75, 1.80), solid=False),
    ),
    cameras=_CAMERAS,
    table="kitchen_table",
)

LIVING_ROOM = Scene(
    "scenes/libero_living_room_tabletop_base_style.xml",
    floor="floor",
    wall="wall",
    walls=(
        *_WALLS,
        slab("rug", (-1.50, -1.20, 0.0), (1.20, 1.30, 0.004), solid=False),
        slab("sofa", (-1.98, -1.10, 0.0), (-1.40, 1.20, 0.38), solid=False),
        slab("sofa", (-1.98, -1.10, 0.38), (-1.75, 1.20, 0.80), solid=False),
    ),
    cameras=_CAMERAS,
    floor_body=True,
    furniture=(
        Part(
            "living_room_table",
            shapes=(
                # Two crossed slabs: the table's corners are cut.
                slab("coffee_table", (-0.8240, -0.6190, 0.4131), (0.3390, 0.7240, 0.4368)),
                slab("coffee_table", (-0.6670, -0.8210, 0.4131), (0.1670, 0.9000, 0.4368)),
                slab("table_leg", (-0.6600, -0.1850, 0.0), (0.1600, 0.6850, 0.4130)),
            ),
        ),
    ),
)

STUDY = Scene(
    "scenes/libero_study_base_style.xml",
    floor="floor",
    wall="wall",
    walls=(
        *_WALLS,
        # A bookcase and a picture on the wall behind the robot.
        slab("shelf_wood", (-1.98, -1.60, 0.0), (-1.62, -0.40, 1.80), solid=False),
        *(slab("dark_shelf_wood", (-1.62, -1.52, z), (-1.60, -0.48, z + 0.30), solid=False) for z in (0.3, 0.8, 1.3)),
        slab("carton_sky", (-1.96, 0.10, 1.10), (-1.94, 1.00, 1.80), solid=False),
    ),
    cameras=_CAMERAS,
    furniture=(
        Part(
            "study_table",
            shapes=(
                slab("desk", (-0.6895, -1.3927, 0.8135), (0.6895, 1.3927, 0.8851)),
                *(
                    slab("table_leg", (x - 0.02, y - 0.05, 0.0), (x + 0.02, y + 0.05, 0.8135))
                    for x in (-0.50, 0.50)
                    for y in (-0.69, 0.71)
                ),
            ),
        ),
    ),
)

#: Room of each of LIBERO's problem classes, by the name that stands in the task's BDDL file, in lower case.
ROOMS = {
    "libero_tabletop_manipulation": TABLETOP,
    "libero_floor_manipulation": FLOOR,
    "libero_kitchen_tabletop_manipulation": KITCHEN,
    "libero_living_room_tabletop_manipulation": LIVING_ROOM,
    "libero_study_tabletop_manipulation": STUDY,
}
