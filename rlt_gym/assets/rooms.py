"""The rooms in which LIBERO's tasks take place."""

from __future__ import annotations

from rlt_gym.assets.schema import Camera, Scene
from rlt_gym.assets.shapes import Box, turn

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
