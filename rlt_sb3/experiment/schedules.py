"""Schedules in configuration files, where a mapping means a linear schedule."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def resolve_schedules(settings: dict[str, Any], setting: str, scheduled: Collection[str]) -> dict[str, Any]:
    """
    Replace mappings by schedules.

    ``{start: 60, end: 5, chunks: 3000}`` is a :class:`~rlt_sb3.common.schedules.ChunkSchedule`: the value changes over
    the first 3,000 chunks (``bc_coef`` only). ``{start: 20, end: 5, end_fraction: 0.5}`` is Stable-Baselines3's
    ``LinearSchedule``: it changes over the first half (1 unless given) of the total number of chunks.

    :param settings: keyword arguments of an algorithm
    :param setting: name of its section, for messages
    :param scheduled: names of the settings that may be schedules
    :return: the keyword arguments with schedules in place of such mappings
    :raises ValueError: for a mapping with other keys or values
    """
    from stable_baselines3.common.utils import LinearSchedule

    from rlt_sb3.common.schedules import ChunkSchedule

    out = dict(settings)
    for key in scheduled:
        value = out.get(key)
        if not isinstance(value, dict):
            continue
        length = set(value) - {"start", "end"}
        known = length <= {"end_fraction"} or (key == "bc_coef" and length == {"chunks"})
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in value.values())
        if not {"start", "end"} <= value.keys() or not known or not numbers:
            raise ValueError(
                f"{setting}.{key} must be a number or {{start: NUMBER, end: NUMBER, end_fraction: NUMBER}} (the last "
                f"may be left out{', or be chunks: INTEGER' * (key == 'bc_coef')}), got {value!r}."
            )
        if "chunks" in value:
            out[key] = ChunkSchedule(**value)
            continue
        end_fraction = float(value.get("end_fraction", 1.0))
        if not 0.0 < end_fraction <= 1.0:
            raise ValueError(f"{setting}.{key}.end_fraction must be in (0, 1] (share of the run), got {end_fraction}.")
        out[key] = LinearSchedule(float(value["start"]), float(value["end"]), end_fraction)
    return out
