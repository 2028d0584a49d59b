"""
Gradient updates per second: RLT against Stable-Baselines3's TD3 on the same shapes, in turns in one process.

    python benchmarks/learner.py
    python benchmarks/learner.py --dims 2048 --batches 1024 --updates 20 --rounds 15

"Equal work" means two critics of the same layers, no LayerNorm, float32, one actor and target update in two, the actor
follows the first critic. "operations" is how many times as many floating-point operations TD3 needs for that, by
PyTorch's own count: as fast as that RLT can be with the same matrix products. The same with bfloat16 products in the
critics stands beside it, and RLT with its defaults: five critics with LayerNorm (float32). Times are CPU times of this
process, so that other processes do not count.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch as th
from json_file import write_json
from stable_baselines3 import TD3
from torch.utils.flop_counter import FlopCounterMode

from rlt_gym.testing import FakeRLTokenVectorEnv
from rlt_sb3 import RLT, GymnasiumVecEnv

CHUNK, NET = 8, [256, 256]


def make_models(dim: int, batch: int, rows: int, device: str) -> dict[str, TD3]:
    """Return models whose buffers are filled with the same number of rows."""

    def venv() -> GymnasiumVecEnv:
        return GymnasiumVecEnv(FakeRLTokenVectorEnv(4, chunk_length=CHUNK, token_dim=dim, seed=0))

    shared: Any = dict(learning_starts=10 * rows, buffer_size=2 * rows, batch_size=batch, seed=0, device=device)
    without: dict[str, Any] = {"offset_search": False}  # the actor would not be updated while the search opens
    networks = {"net_arch": NET, "layer_norm": False, "n_critics": 2, "actor_q": "first", **without}

    def equal_rlt(critic_precision: str = "float32", **more: bool) -> RLT:
        kwargs = networks | {"critic_precision": critic_precision, **more}
        return RLT("MultiInputPolicy", venv(), n_steps=1, critic_warmup_updates=0, policy_kwargs=kwargs, **shared)

    models = {
        "TD3": TD3("MultiInputPolicy", venv(), policy_kwargs={"net_arch": NET}, **shared),
        "RLT": equal_rlt(),
        "bfloat16": equal_rlt(critic_precision="bfloat16"),
        "default": RLT("MultiInputPolicy", venv(), policy_kwargs=without, **shared),
    }
    if device != "cpu":
        models["launched one by one"] = equal_rlt(cuda_graphs=False)
    for model in models.values():
        model.learn(rows)
    return models


def measure(
    models: dict[str, TD3], batch: int, updates: int, rounds: int, clock: Callable[[], float] = time.process_time
) -> dict[str, list[float]]:
    """Return seconds per update of each round, of CPU time by default."""
    times: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(rounds + 1):
        for name, model in models.items():
            model.num_timesteps = 10**9  # long after learning_starts
            start = clock()
            model.train(gradient_steps=updates, batch_size=batch)
            if model.device.type == "cuda":
                th.cuda.synchronize()
            if turn:  # the first round warms up
                times[name].append((clock() - start) / updates)
    return times


def operations(model: TD3, batch: int, updates: int = 4) -> float:
    """Return floating-point operations of an update; ``updates`` is a multiple of the policy delay."""
    with FlopCounterMode(display=False) as counter:
        model.train(gradient_steps=updates, batch_size=batch)
    return counter.get_total_flops() / updates


def main() -> None:
    """Time the updates and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="+", default=[192, 2048], help="widths of z_rl")
    parser.add_argument("--batches", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--updates", type=int, default=20, help="critic updates per turn")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=2000, help="rows in the buffers")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", default=None, help="JSON file for the numbers")
    args = parser.parse_args()
    th.set_num_threads(args.threads)
    print("updates per second of CPU time (median of rounds), ratio = RLT / TD3 of the same round\n")
    print(
        "| z_rl | batch | TD3 | RLT, equal work | ratio (lowest to highest) | operations | bfloat16 | ratio "
        "| defaults | ratio |"
    )
    print("|" + "---|" * 10)
    results = []
    for dim in args.dims:
        for batch in args.batches:
            models = make_models(dim, batch, args.rows, args.device)
            times = measure(models, batch, args.updates, args.rounds)
            bound = operations(models["TD3"], batch) / operations(models["RLT"], batch)
            rates = {name: float(1.0 / np.median(values)) for name, values in times.items()}
            ratios = {name: np.array(times["TD3"]) / np.array(values) for name, values in times.items()}
            mid = {name: float(np.median(values)) for name, values in ratios.items()}
            spread = f"({ratios['RLT'].min():.2f} to {ratios['RLT'].max():.2f})"
            cells = [dim, batch, f"{rates['TD3']:.0f}", f"{rates['RLT']:.0f}", f"**{mid['RLT']:.2f}** {spread}"]
            cells.append(f"{bound:.2f}")
            for name in ("bfloat16", "default"):
                cells += [f"{rates[name]:.0f}", f"{mid[name]:.2f}"]
            print("|", " | ".join(map(str, cells)), "|", flush=True)
            results.append(
                {"dim": dim, "batch": batch, "updates_per_cpu_second": rates, "ratio": mid, "operations": bound}
            )
    write_json(args, results=results)


if __name__ == "__main__":
    main()
