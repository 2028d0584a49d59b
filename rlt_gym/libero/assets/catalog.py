"""The embedded asset pack: every object, fixture and room of LIBERO's five suites, drawn with primitive shapes.

LIBERO's code asks each file for a few names (bodies, joints, sites), and its initial states and predicates fix a few
dimensions (heights at which things rest, regions that count as "on" or "in", ranges of joints). Those are kept.
Everything else is original: no mesh, texture or text of LIBERO's asset files is used.

To add an object: one :class:`~rlt_gym.libero.assets.schema.Asset` (or ``Scene``) in the module where it belongs, and
its name in :data:`CATALOG`. Meters, kilograms, half sizes; z is up.
"""

from __future__ import annotations

from rlt_gym.libero.assets import fixtures, groceries, rooms, tableware
from rlt_gym.libero.assets.schema import Asset, Scene

CATALOG: tuple[Asset | Scene, ...] = (
    tableware.AKITA_BLACK_BOWL,
    tableware.PLATE,
    tableware.GLAZED_RIM_PORCELAIN_RAMEKIN,
    tableware.WHITE_BOWL,
    tableware.PORCELAIN_MUG,
    tableware.RED_COFFEE_MUG,
    tableware.WHITE_YELLOW_MUG,
    tableware.MOKA_POT,
    tableware.CHEFMATE_8_FRYPAN,
    tableware.BASKET,
    tableware.WOODEN_TRAY,
    tableware.BLACK_BOOK,
    tableware.YELLOW_BOOK,
    groceries.CREAM_CHEESE,
    groceries.WINE_BOTTLE,
    groceries.BUTTER,
    groceries.CHOCOLATE_PUDDING,
    groceries.COOKIES,
    groceries.ALPHABET_SOUP,
    groceries.TOMATO_SAUCE,
    groceries.MILK,
    groceries.ORANGE_JUICE,
    groceries.KETCHUP,
    groceries.SALAD_DRESSING,
    groceries.NEW_SALAD_DRESSING,
    groceries.BBQ_SAUCE,
    fixtures.WOODEN_CABINET,
    fixtures.FLAT_STOVE,
    fixtures.WINE_RACK,
    fixtures.WHITE_CABINET,
    fixtures.MICROWAVE,
    fixtures.DESK_CADDY,
    fixtures.WOODEN_TWO_LAYER_SHELF,
    *rooms.ROOMS.values(),
)
