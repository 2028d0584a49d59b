"""Colours, surfaces and computed textures of the embedded assets."""

from __future__ import annotations

from rlt_gym.assets.schema import Paint, Texture

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
    "rlt_wicker": Texture("weave", (0.74, 0.53, 0.31), 0.35),
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
    "carton_red": Paint((0.82, 0.13, 0.10)),
    "carton_sky": Paint((0.48, 0.70, 0.93)),
    "label_yellow": Paint((0.98, 0.82, 0.12)),
    "leaf_green": Paint((0.07, 0.42, 0.14)),
    "chocolate": Paint((0.24, 0.11, 0.06)),
    "caramel": Paint((0.85, 0.62, 0.30)),
    "soup_orange": Paint((0.93, 0.52, 0.08)),
    "soup_blue": Paint((0.20, 0.33, 0.82)),
    "tomato": Paint((0.80, 0.13, 0.06)),
    "ketchup_red": Paint((0.86, 0.20, 0.05), gloss=0.4),
    "dressing": Paint((0.80, 0.84, 0.74), gloss=0.4),
    "barbecue": Paint((0.34, 0.09, 0.03), gloss=0.4),
    "rust": Paint((0.72, 0.26, 0.05)),
    "wicker": Paint((1.0, 1.0, 1.0), "rlt_wicker", 0.05),
    "dark_wicker": Paint((0.68, 0.68, 0.68), "rlt_wicker", 0.05),
}
