"""Assets for LIBERO: an embedded pack made of primitive shapes, and the choice between it and the official one."""

from rlt_gym.libero.assets.builder import embedded_assets
from rlt_gym.libero.assets.resolve import AssetsInfo, resolve_assets

__all__ = ["AssetsInfo", "embedded_assets", "resolve_assets"]
