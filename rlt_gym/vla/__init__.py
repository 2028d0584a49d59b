"""Frozen vision-language-action policies: the protocol, and the names under which they are loaded."""

from rlt_gym.vla.base import FrozenVLA, VLAOutput, VLASpec
from rlt_gym.vla.registry import list_vlas, load_vla, register_vla, register_vla_format

__all__ = [
    "FrozenVLA",
    "VLAOutput",
    "VLASpec",
    "list_vlas",
    "load_vla",
    "register_vla",
    "register_vla_format",
]
