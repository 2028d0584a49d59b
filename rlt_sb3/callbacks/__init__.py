"""Callbacks for Stable-Baselines3: budget, metrics, films, selection of the best model, checkpoints."""

from rlt_sb3.callbacks.base import StatefulCallback
from rlt_sb3.callbacks.budget import BudgetCallback
from rlt_sb3.callbacks.checkpoint import RunCheckpointCallback
from rlt_sb3.callbacks.metrics import MetricsCallback
from rlt_sb3.callbacks.selection import SelectionCallback, SelectionPoint
from rlt_sb3.callbacks.video import VideoCallback

__all__ = [
    "BudgetCallback",
    "MetricsCallback",
    "RunCheckpointCallback",
    "SelectionCallback",
    "SelectionPoint",
    "StatefulCallback",
    "VideoCallback",
]
