"""Strict loading of a network's weights, straight onto its device."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
from safetensors import safe_open
from torch import nn


def load_weights(module: nn.Module, path: str | os.PathLike[str], names: Mapping[str, str] | None = None) -> None:
    """
    Copy the tensors of a ``.safetensors`` file into a network.

    The network says where its weights are and of which type: build it there (``with torch.device(device):``) and in
    this type. Each tensor is read onto the network's device, and none is kept in the CPU's memory.

    :param module: The network.
    :param path: The file. It must have exactly the parameters and persistent buffers of the network.
    :param names: Where the file calls them otherwise: name in the network -> name in the file, all of them. Tensors
        that the network uses in several places may have one name in the file. ``None`` = the same names.
    :raises ValueError: If a tensor is missing, surplus, or of another shape; the network is left as it was then.
    :raises safetensors.SafetensorError: If the file is damaged.
    :raises OSError: If there is no such file.
    """
    own = module.state_dict()
    device = next((value.device for value in own.values()), torch.device("cpu"))
    with safe_open(path, framework="pt", device=str(device)) as file:
        names = {key: key for key in file.keys()} if names is None else names
        surplus = set(file.keys()) - set(names.values())
        found = {**names, **{key: key for key in surplus}}
        shapes = {key: tuple(file.get_slice(name).get_shape()) for key, name in found.items()}
        problems = _differences({key: tuple(value.shape) for key, value in own.items()}, shapes)
        if problems:
            raise ValueError(f"its tensors are not those of {type(module).__name__}: {'; '.join(problems)}")
        with torch.no_grad():
            for key, value in own.items():
                value.copy_(file.get_tensor(names[key]))


def _differences(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Say what is missing, surplus, or of another shape."""
    other = [key for key in wanted if key in found and wanted[key] != found[key]]
    shapes = [f"{key} ({found[key]} in the file, {wanted[key]} in the network)" for key in other]
    problems = {
        "missing": [key for key in wanted if key not in found],
        "surplus": [key for key in found if key not in wanted],
        "of another shape": shapes,
    }
    return [f"{what}: {_some(names)}" for what, names in problems.items() if names]


def _some(names: Sequence[str], most: int = 3) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
