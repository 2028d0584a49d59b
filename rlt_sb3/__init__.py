"""Stable-Baselines3 plug-in: the RLT algorithm and the bridge from Gymnasium vector environments."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlt_sb3.common.replay.buffer import ChunkReplayBuffer
    from rlt_sb3.common.vec_env import GymnasiumVecEnv
    from rlt_sb3.evaluation.compare import compare
    from rlt_sb3.evaluation.evaluate import evaluate
    from rlt_sb3.evaluation.horizon import fit_horizon
    from rlt_sb3.rlt import RLT, RLTPolicy

__all__ = ["RLT", "ChunkReplayBuffer", "GymnasiumVecEnv", "RLTPolicy", "compare", "evaluate", "fit_horizon"]

_MODULES = {
    "ChunkReplayBuffer": "rlt_sb3.common.replay.buffer",
    "GymnasiumVecEnv": "rlt_sb3.common.vec_env",
    "RLT": "rlt_sb3.rlt",
    "RLTPolicy": "rlt_sb3.rlt",
    "compare": "rlt_sb3.evaluation.compare",
    "evaluate": "rlt_sb3.evaluation.evaluate",
    "fit_horizon": "rlt_sb3.evaluation.horizon",
}


def __getattr__(name: str) -> Any:
    # imported on first use: `rlt --help` needs neither torch nor Stable-Baselines3
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)
