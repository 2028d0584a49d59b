"""Checks of settings that Stable-Baselines3's own algorithms lack, before there is an environment."""

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


def check_ranges(
    name: str, settings: Mapping[str, Any], ranges: Mapping[str, tuple[str, Callable[[Any], bool]]]
) -> None:
    """
    Refuse numbers out of range, and a negative learning rate.

    :param name: section of the settings, for messages
    :param settings: keyword arguments of the right types, with schedules made
    :param ranges: as :data:`RANGES`
    :raises ValueError: names the setting, what is allowed and what was given
    """
    from rlt_sb3.common.schedules import lowest_value

    for setting, (allowed, holds) in ranges.items():
        if setting in settings and not holds(settings[setting]):
            raise ValueError(f"{name}.{setting} must be {allowed}, got {settings[setting]!r}.")
    rate = settings.get("learning_rate", 0.0)
    if lowest_value(rate) < 0.0:
        raise ValueError(f"{name}.learning_rate must be >= 0, got {rate!r}.")


def check_chunk_policy(
    name: str, algorithm: Any, policy: Any, settings: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    """
    Try settings of an algorithm whose actions are chunks on spaces made up for them.

    What depends on the environment's own spaces is checked when a model is made.

    :param name: section of the settings, for messages
    :param algorithm: its class
    :param policy: its policy, as it takes it
    :param settings: keyword arguments of it of the right types, with classes looked up and schedules made
    :param defaults: of a run; the settings override them
    :raises ValueError: names the setting, what is allowed and what was given
    """
    import numpy as np
    from gymnasium import spaces

    given = {**defaults, **deepcopy(dict(settings))}
    skipped = ("features_extractor_class", "features_extractor_kwargs", "stride")  # need the environment
    for part in ("policy_kwargs", "replay_buffer_kwargs"):
        if given.get(part):
            given[part] = {key: value for key, value in given[part].items() if key not in skipped}
    parts = (given.get("policy_kwargs") or {}).get("parts", 1)
    chunks = spaces.Box(-1.0, 1.0, (max(parts, 1), 2), np.float32)
    boxes = {key: spaces.Box(-1.0, 1.0, (2,), np.float32) for key in ("z_rl", "proprio")} | {"vla_ref": chunks}

    def make() -> None:
        small = {"buffer_size": 1} if "buffer_size" in given else {}
        model: Any = algorithm(
            policy, None, _init_setup_model=False, **(given | {"device": "cpu", "verbose": 0} | small)
        )
        model.n_envs = 1
        model.action_space, model.observation_space = chunks, spaces.Dict(boxes)  # type: ignore[arg-type]
        model._setup_model()

    _try(name, settings, make)


def _try(name: str, settings: Mapping[str, Any], make: Callable[[], None]) -> None:
    """Make something of settings, with generators of random numbers as they were; say in one line why it fails."""
    import torch

    with torch.random.fork_rng(devices=[]):
        try:
            make()
        except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
            reason = " ".join(str(e).split()).rstrip(".")
            raise ValueError(f"{name} cannot be used ({reason}): {dict(settings)!r}.") from e


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
    from gymnasium import spaces

    check_ranges(name, settings, RANGES)
    if settings.get("n_steps", 1) != 1:
        raise ValueError(
            f"{name}.n_steps must be 1, got {settings['n_steps']!r}: Stable-Baselines3 has no returns over several "
            "transitions with observations in a dict."
        )
    given = {**defaults, **deepcopy(dict(settings))}  # Stable-Baselines3 adds entries to policy_kwargs

    def make() -> None:
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

    _try(name, settings, make)
