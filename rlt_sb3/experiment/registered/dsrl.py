"""The registration of DSRL: Stable-Baselines3's SAC as it is, whose action is the noise of the VLA's flow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlt_sb3.experiment.algorithms import Algorithm, proprio_settings, register_algorithm
from rlt_sb3.experiment.stock_settings import check_off_policy


def defaults(n_envs: int, length: int) -> dict[str, Any]:
    """
    Compute the settings of SAC that suit a run.

    :param n_envs: number of environments
    :param length: control steps per chunk
    :return: settings that a run's override
    """
    from rlt_sb3.common.flat_actions import WholeChunkReplayBuffer

    # as for TQC: RLT's 0.99 per control step, two updates per row; a time-out is a failure, as for RLT
    return {
        "gamma": 0.99**length,
        "gradient_steps": 2 * n_envs,
        "buffer_size": 50_000,
        "replay_buffer_class": WholeChunkReplayBuffer,
        "replay_buffer_kwargs": {"handle_timeout_termination": False},
        "learning_starts": 500,
        # as the authors' code: the noise stays about as broad as the VLA's own, where -n would make it narrow
        "target_entropy": 0.0,
        # small beside a reward of 1 at success: the entropy must not outweigh it before its coefficient is learned
        "ent_coef": "auto_0.005",
    }


def of_env(venv: Any) -> dict[str, Any]:
    """
    Give the networks RLT's features, for the robot of an environment.

    :param venv: environment of Stable-Baselines3
    :return: settings of the algorithm
    """
    settings = proprio_settings(venv)
    settings["policy_kwargs"] |= _features()
    return settings


def check(settings: Mapping[str, Any]) -> None:
    """
    Check settings before a run starts simulators.

    :param settings: of SAC, as :func:`~rlt_sb3.experiment.stock_settings.check_off_policy` takes them, and of the
        wrapper
    :raises ValueError: names the setting, what is allowed and what was given
    """
    from stable_baselines3 import SAC

    from rlt_gym.rl_token.noise import NoiseAction

    of_sac, of_noise = ALGORITHM.split(settings)
    NoiseAction.check_arguments(**of_noise)
    check_off_policy(
        "dsrl", SAC, of_sac | {"policy_kwargs": _features() | dict(of_sac.get("policy_kwargs") or {})}, defaults(1, 1)
    )


def _features() -> dict[str, Any]:
    from rlt_sb3.rlt.features import RLTFeatures

    return {"features_extractor_class": RLTFeatures}


ALGORITHM = Algorithm(
    "DSRL",
    "stable_baselines3:SAC",
    defaults,
    check=check,
    of_env=of_env,
    env_kwargs=lambda settings: {"needs_noise": True},
    wrapper="rlt_gym.rl_token.noise:NoiseAction",
    color="tab:cyan",
    parts={
        "policy_kwargs": "stable_baselines3.sac.policies:MultiInputPolicy",
        "replay_buffer_kwargs": "rlt_sb3.common.flat_actions:WholeChunkReplayBuffer",
    },
)
register_algorithm("dsrl", ALGORITHM)
