"""Frozen vision-language-action policies: the protocol, and the small one that is shipped."""

from rlt_gym.vla.base import FrozenVLA, VLAOutput, VLASpec, load_vla

__all__ = ["FrozenVLA", "VLAOutput", "VLASpec", "load_vla"]
