"""What RLT asks of an environment's spaces."""

from typing import Any

import numpy as np
from gymnasium import spaces

OBSERVATION_KEYS = ("z_rl", "proprio", "vla_ref")


def check_spaces(obs: Any, action: Any) -> None:
    """
    :param obs: observation space; Dict with ``z_rl`` (D,), ``proprio`` (P,) and ``vla_ref`` (C, d) is right
    :param action: action space; Box(-1, 1, (C, d)) is right
    :raises ValueError: if they are not, or do not fit together
    """
    if not isinstance(obs, spaces.Dict) or any(key not in obs.spaces for key in OBSERVATION_KEYS):
        raise ValueError(f"RLT needs a Dict observation with the keys {OBSERVATION_KEYS}, got {obs}.")
    shapes = {key: obs[key].shape for key in OBSERVATION_KEYS}
    if any(shapes[key] is None or len(shapes[key]) != 1 for key in ("z_rl", "proprio")):  # type: ignore[arg-type]
        raise ValueError(f"RLT needs vectors for z_rl and proprio, got the shapes {shapes}.")
    if not isinstance(action, spaces.Box) or len(action.shape) != 2:
        raise ValueError(f"RLT needs chunks as actions, Box(-1, 1, (C, d)), got {action}.")
    if shapes["vla_ref"] != action.shape:
        raise ValueError(
            f"vla_ref must have the shape of an action chunk, {action.shape}, got {shapes['vla_ref']}: "
            "build the environment with one chunk_length for both."
        )
    if not (np.all(action.low == -1.0) and np.all(action.high == 1.0)):
        raise ValueError(f"RLT needs actions in [-1, 1], got [{action.low.min()}, {action.high.max()}]: rescale them.")
