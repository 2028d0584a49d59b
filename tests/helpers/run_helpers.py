"""Small runs without a simulator."""

import math
import os
from pathlib import Path

import torch

from rlt_sb3.experiment.algorithms import algorithm_names
from rlt_sb3.experiment.config import EnvConfig, EvalSettings, TrainConfig

ROOT = Path(__file__).parent.parent.parent
# without a gate: what the present actor does must show in the evaluations of a short run
SMALL_RLT = {"gate": False, "learning_starts": 20, "batch_size": 16, "critic_warmup_updates": 5, "utd": 1.0}
# the network learns after two episodes of the search for an offset; by default after 48, where these runs have ended
NETWORKS = {"net_arch": [16], "n_critics": 2, "offset_search": {"opening": 2}}
#: of the off-policy algorithms of Stable-Baselines3 and sb3-contrib
SMALL_SB3 = {"learning_starts": 10, "batch_size": 16, "gradient_steps": 1, "policy_kwargs": {"net_arch": [16]}}
#: columns that tell the time
CLOCKS = {"time/minutes", "time/fps", "time/time_elapsed"}


def small(out, env_id="ToyRLToken-v0", **changes):
    """A run on the toy; ``rlt={...}`` and the like are an algorithm's section."""
    import toy_env  # noqa: F401

    config = TrainConfig(
        name="toy",
        out=str(out),
        env=EnvConfig(id=env_id, num_envs=2),
        algorithms={
            "rlt": SMALL_RLT | {"policy_kwargs": NETWORKS},
            "tqc": dict(SMALL_SB3),
        },
        evaluation=EvalSettings(n_states=6, selection_states=4, selection_every=40, record_states=3),
        total_chunks=100,
        log_interval=2,
        progress=False,
    )
    for key, value in changes.items():
        if key in algorithm_names():
            config.algorithms[key] = value
        else:
            setattr(config, key, value)
    return config


def quick(out, env_id="FakeRLToken-v0", **changes):
    """Without films."""
    settings = {"evaluation": EvalSettings(4, 4, 40, videos=False)} | changes
    config = small(out, env_id, **settings)
    config.env.render_mode = None
    return config


def environment(**more):
    """Of a subprocess that may use the toy environment."""
    known = {"PYTHONPATH": str(ROOT / "tests" / "helpers"), "OMP_NUM_THREADS": "1", "RLT_ALLOWED_IMPORTS": "toy_env"}
    return os.environ | known | more


def same(a, b):
    """Whether two nested structures of tensors are equal, bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def without_clocks(path):
    import csv

    with path.open() as file:
        return [
            {key: value for key, value in row.items() if key not in CLOCKS and value} for row in csv.DictReader(file)
        ]


def textbook_wilson(k, n):
    """Both ends of Wilson's 95 % interval."""
    z = 1.959963984540054
    p = k / n
    center = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return center - half, center + half
