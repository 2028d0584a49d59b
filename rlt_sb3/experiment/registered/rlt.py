"""The registration of RLT, with the check of its settings and what a resumed run may change."""

from __future__ import annotations

from inspect import signature
from typing import Any

from rlt_sb3.experiment.algorithms import Algorithm, register_algorithm


def _check(settings: dict[str, Any]) -> None:
    from rlt_sb3.rlt import RLT
    from rlt_sb3.rlt.settings import check_before_env

    check_before_env(RLT, settings)


def _on_resume(model: Any, settings: dict[str, Any]) -> None:
    default = signature(type(model.policy)).parameters["critic_precision"].default
    precision = (settings.get("policy_kwargs") or {}).get("critic_precision", default)
    model.policy.set_critic_precision(precision)
    model.policy_kwargs["critic_precision"] = precision


register_algorithm(
    "rlt",
    Algorithm(
        "RLT",
        "rlt_sb3.rlt:RLT",
        flat=False,
        starts_at_vla=True,
        learns_from_hooks=True,
        modes=("overlap", "sync", "async"),
        check=_check,
        may_change=("device", "policy_kwargs.critic_precision"),
        on_resume=_on_resume,
        color="tab:green",
        parts={
            "policy_kwargs": "rlt_sb3.rlt.policies:RLTPolicy",
            "replay_buffer_kwargs": "rlt_sb3.common.replay.buffer:ChunkReplayBuffer",
            "gate": "rlt_sb3.common.policy_gate:PolicyGate",
        },
    ),
)
