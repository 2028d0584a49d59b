"""The registration of residual SAC."""

from __future__ import annotations

from typing import Any

from rlt_sb3.experiment.algorithms import Algorithm, proprio_settings, register_algorithm
from rlt_sb3.experiment.stock_settings import check_chunk_policy


def _check(settings: dict[str, Any]) -> None:
    from rlt_sb3.residual_sac.residual_sac import ResidualSAC, check

    check(settings)
    check_chunk_policy("residual_sac", ResidualSAC, "MultiInputPolicy", settings, {})


register_algorithm(
    "residual_sac",
    Algorithm(
        "residual SAC",
        "rlt_sb3.residual_sac:ResidualSAC",
        flat=False,
        starts_at_vla=True,
        learns_from_hooks=True,
        check=_check,
        of_env=proprio_settings,
        color="tab:blue",
        parts={
            "policy_kwargs": "rlt_sb3.residual_sac.policies:ResidualSACPolicy",
            "replay_buffer_kwargs": "rlt_sb3.common.replay.buffer:ChunkReplayBuffer",
        },
    ),
)
