"""``python -m rlt_gym.libero.experts``: how often the scripted expert solves the tasks of a suite."""

from __future__ import annotations

from jsonargparse import auto_cli

from rlt_gym.libero.experts.evaluate import evaluate

if __name__ == "__main__":
    auto_cli(evaluate)
