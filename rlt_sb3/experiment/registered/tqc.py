"""The registration of the baseline, sb3-contrib's TQC, with checks of its settings that Stable-Baselines3 lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from rlt_sb3.experiment.algorithms import Algorithm, register_algorithm

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


def defaults(n_envs: int, length: int) -> dict[str, Any]:
    """
    Compute the settings of TQC that suit a run.

    :param n_envs: number of environments
    :param length: control steps per chunk
    :return: settings that a run's override
    """
    from rlt_sb3.common.flat_actions import WholeChunkReplayBuffer

    # SB3 counts discounts and updates per transition and per vector step: these are RLT's 0.99 per control step
    # and two updates per row
    return {
        "gamma": 0.99**length,
        "gradient_steps": 2 * n_envs,
        "buffer_size": 50_000,
        "replay_buffer_class": WholeChunkReplayBuffer,
        "learning_starts": 500,
    }


def check(settings: Mapping[str, Any]) -> None:
    """
    Try settings on spaces made up for them.

    :param settings: keyword arguments of TQC of the right types, with classes looked up and schedules made
    :raises ValueError: names the setting, what is allowed and what was given
    """
    import numpy as np
    import torch
    from gymnasium import spaces
    from sb3_contrib import TQC
    from stable_baselines3.common.utils import FloatSchedule

    for name, (allowed, holds) in RANGES.items():
        if name in settings and not holds(settings[name]):
            raise ValueError(f"tqc.{name} must be {allowed}, got {settings[name]!r}.")
    if settings.get("n_steps", 1) != 1:
        raise ValueError(
            f"tqc.n_steps must be 1, got {settings['n_steps']!r}: Stable-Baselines3 has no returns over several "
            "transitions with observations in a dict."
        )
    rate = settings.get("learning_rate", 0.0)
    if min(FloatSchedule(rate)(remaining) for remaining in (1.0, 0.5, 0.0)) < 0.0:
        raise ValueError(f"tqc.learning_rate must be >= 0, got {rate!r}.")
    given = defaults(1, 1) | deepcopy(dict(settings))  # Stable-Baselines3 adds entries to policy_kwargs
    with torch.random.fork_rng(devices=[]):
        try:
            model: Any = TQC(
                "MultiInputPolicy",
                None,  # type: ignore[arg-type]
                _init_setup_model=False,
                **(given | {"device": "cpu", "buffer_size": 1, "verbose": 0}),
            )
            model.n_envs = 1
            model.env = model  # asked for its action space
            model.action_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
            boxes = {key: spaces.Box(-1.0, 1.0, (2,), np.float32) for key in ("z_rl", "proprio", "vla_ref")}
            model.observation_space = spaces.Dict(boxes)  # type: ignore[arg-type]
            model._setup_model()
            drop, n_quantiles = model.top_quantiles_to_drop_per_net, model.critic.n_quantiles
            if drop >= n_quantiles:
                raise ValueError(f"top_quantiles_to_drop_per_net={drop} leaves none of {n_quantiles} quantiles")
        except (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"tqc cannot be used ({' '.join(str(error).split())}): {dict(settings)!r}.") from error


# what the method is not, plain continuous control
register_algorithm(
    "tqc",
    Algorithm(
        "TQC",
        "sb3_contrib:TQC",
        defaults,
        check=check,
        color="tab:red",
        parts={
            "policy_kwargs": "sb3_contrib.tqc.policies:MultiInputPolicy",
            "replay_buffer_kwargs": "rlt_sb3.common.flat_actions:WholeChunkReplayBuffer",
        },
    ),
)
