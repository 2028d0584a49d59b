"""The registration of PPO: Stable-Baselines3's class as it is, with a policy that starts at the VLA."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlt_sb3.experiment.algorithms import Algorithm, proprio_settings, register_algorithm
from rlt_sb3.experiment.stock_settings import check_chunk_policy, check_ranges

#: setting -> (range, for the message; whether a value is in it)
RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "n_steps": (">= 2", lambda value: value >= 2),
    "batch_size": (">= 2", lambda value: value >= 2),
    "n_epochs": (">= 1", lambda value: value >= 1),
    "gamma": ("in [0, 1] (discount per chunk)", lambda value: 0.0 <= value <= 1.0),
    "gae_lambda": ("in [0, 1]", lambda value: 0.0 <= value <= 1.0),
    "clip_range": ("> 0, or a schedule", lambda value: callable(value) or value > 0.0),
    "ent_coef": (">= 0", lambda value: value >= 0.0),
    "vf_coef": (">= 0", lambda value: value >= 0.0),
    "max_grad_norm": ("> 0", lambda value: value > 0.0),
    "target_kl": ("> 0, or null for no limit", lambda value: value is None or value > 0.0),
    "stats_window_size": (">= 1", lambda value: value >= 1),
}


def defaults(n_envs: int, length: int) -> dict[str, Any]:
    """
    Compute the settings of PPO that suit a run.

    :param n_envs: number of environments
    :param length: control steps per chunk
    :return: settings that a run's override
    """
    return {
        "gamma": 0.99**length,  # Stable-Baselines3 discounts per transition: this is RLT's 0.99 per control step
        "n_steps": max(2, 240 // n_envs),
        "batch_size": 60,
        "learning_rate": 1e-3,
        "target_kl": 0.03,  # a chunk is worth many epochs, but the policy must stay near the one that drew it
        "device": "cpu",
    }


def check(settings: Mapping[str, Any]) -> None:
    """
    Check settings before a run starts simulators.

    :param settings: keyword arguments of the right types, with classes looked up and schedules made
    :raises ValueError: names the setting, what is allowed and what was given
    """
    from stable_baselines3 import PPO

    from rlt_sb3.ppo.policies import VLACenteredPolicy

    check_ranges("ppo", settings, RANGES)
    check_chunk_policy("ppo", PPO, VLACenteredPolicy, settings, defaults(1, 1))


register_algorithm(
    "ppo",
    Algorithm(
        "PPO",
        "stable_baselines3:PPO",
        defaults,
        policy="rlt_sb3.ppo.policies:VLACenteredPolicy",
        flat=False,
        starts_at_vla=True,
        check=check,
        of_env=proprio_settings,
        color="tab:purple",
        parts={"policy_kwargs": "rlt_sb3.ppo.policies:VLACenteredPolicy"},
    ),
)
