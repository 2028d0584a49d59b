"""Checks of settings that Stable-Baselines3's own off-policy algorithms lack, before there is an environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

#: setting -> (range, for the message; whether a value is in it)
RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "buffer_size": (">= 1", lambda value: value >= 1),
    "learning_starts": (">= 0", lambda value: value >= 0),
    "batch_size": (">= 1", lambda value: value >= 1),
    "train_freq": (">= 1", lambda value: isinstance(value, tuple) or value >= 1),
    "tau": ("in (0, 1]", lambda value: 0.0 < value <= 1.0),
    "gamma": ("in [0, 1] (discount per chunk)", lambda value: 0.0 <= value <= 1.0),
    "gradient_steps": (">= 1, or -1 for one per transition", lambda value: value >= 1 or value == -1),
    "target_update_interval": (">= 1", lambda value: value >= 1),
    "top_quantiles_to_drop_per_net": (">= 0", lambda value: value >= 0),
    "stats_window_size": (">= 1", lambda value: value >= 1),
}


def check_off_policy(
    name: str,
    algorithm: Any,
    settings: Mapping[str, Any],
    defaults: Mapping[str, Any],
    also: Callable[[Any], None] | None = None,
) -> None:
    """
    Try settings on spaces made up for them.

    :param name: section of the settings, for messages
    :param algorithm: class of Stable-Baselines3 or sb3-contrib
    :param settings: keyword arguments of it of the right types, with classes looked up and schedules made
    :param defaults: of a run; the settings override them
    :param also: called with the model made of them; raises ``ValueError`` for what it does not like
    :raises ValueError: names the setting, what is allowed and what was given
    """
    import numpy as np
    import torch
    from gymnasium import spaces
    from stable_baselines3.common.utils import FloatSchedule

    for setting, (allowed, holds) in RANGES.items():
        if setting in settings and not holds(settings[setting]):
            raise ValueError(f"{name}.{setting} must be {allowed}, got {settings[setting]!r}.")
    if settings.get("n_steps", 1) != 1:
        raise ValueError(
            f"{name}.n_steps must be 1, got {settings['n_steps']!r}: Stable-Baselines3 has no returns over several "
            "transitions with observations in a dict."
        )
    rate = settings.get("learning_rate", 0.0)
    if min(FloatSchedule(rate)(remaining) for remaining in (1.0, 0.5, 0.0)) < 0.0:
        raise ValueError(f"{name}.learning_rate must be >= 0, got {rate!r}.")
    given = {**defaults, **deepcopy(dict(settings))}  # Stable-Baselines3 adds entries to policy_kwargs
    with torch.random.fork_rng(devices=[]):
        try:
            model: Any = algorithm(
                "MultiInputPolicy",
                None,
                _init_setup_model=False,
                **(given | {"device": "cpu", "buffer_size": 1, "verbose": 0}),
            )
            model.n_envs = 1
            model.env = model  # asked for its action space
            model.action_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
            boxes = {key: spaces.Box(-1.0, 1.0, (2,), np.float32) for key in ("z_rl", "proprio", "vla_ref")}
            model.observation_space = spaces.Dict(boxes)  # type: ignore[arg-type]
            model._setup_model()
            if also is not None:
                also(model)
        except (
            ArithmeticError,
            AssertionError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{name} cannot be used ({reason}): {dict(settings)!r}.") from error
