"""The registration of the baseline, sb3-contrib's TQC, with checks of its settings that Stable-Baselines3 lacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlt_sb3.experiment.algorithms import Algorithm, register_algorithm
from rlt_sb3.experiment.stock_settings import check_off_policy


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
    Check settings before a run starts simulators.

    :param settings: as :func:`~rlt_sb3.experiment.stock_settings.check_off_policy` takes them
    :raises ValueError: names the setting, what is allowed and what was given
    """
    from sb3_contrib import TQC

    def leaves_quantiles(model: Any) -> None:
        drop, n_quantiles = model.top_quantiles_to_drop_per_net, model.critic.n_quantiles
        if drop >= n_quantiles:
            raise ValueError(f"top_quantiles_to_drop_per_net={drop} leaves none of {n_quantiles} quantiles")

    check_off_policy("tqc", TQC, settings, defaults(1, 1), leaves_quantiles)


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
