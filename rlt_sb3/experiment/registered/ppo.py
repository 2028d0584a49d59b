"""The registration of PPO: Stable-Baselines3's class as it is, with a policy that starts at the VLA."""

from __future__ import annotations

from typing import Any

from rlt_sb3.experiment.algorithms import Algorithm, proprio_settings, register_algorithm


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


register_algorithm(
    "ppo",
    Algorithm(
        "PPO",
        "stable_baselines3:PPO",
        defaults,
        policy="rlt_sb3.ppo.policies:VLACenteredPolicy",
        flat=False,
        starts_at_vla=True,
        of_env=proprio_settings,
        color="tab:purple",
        parts={"policy_kwargs": "rlt_sb3.ppo.policies:VLACenteredPolicy"},
    ),
)
