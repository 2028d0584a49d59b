"""The registration of GRPO; a run's environment plays every training initial state ``group_size`` times."""

from __future__ import annotations

from inspect import signature
from typing import Any

from rlt_sb3.experiment.algorithms import Algorithm, proprio_settings, register_algorithm
from rlt_sb3.experiment.stock_settings import check_chunk_policy


def _check(settings: dict[str, Any]) -> None:
    from rlt_sb3.grpo.grpo import GRPO, check

    check(settings)
    check_chunk_policy("grpo", GRPO, "MultiInputPolicy", settings, {})


def _env_kwargs(settings: dict[str, Any]) -> dict[str, Any]:
    from rlt_sb3.grpo import GRPO

    return {"group_size": settings.get("group_size", signature(GRPO).parameters["group_size"].default)}


register_algorithm(
    "grpo",
    Algorithm(
        "GRPO",
        "rlt_sb3.grpo:GRPO",
        lambda n_envs, length: {"device": "cpu"},
        flat=False,
        starts_at_vla=True,
        check=_check,
        of_env=proprio_settings,
        env_kwargs=_env_kwargs,
        color="tab:orange",
        parts={"policy_kwargs": "rlt_sb3.ppo.policies:VLACenteredPolicy"},
    ),
)
