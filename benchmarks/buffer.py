"""
The chunk buffer: memory against the formula, time per row added and per sample, against SB3's DictReplayBuffer.

    python benchmarks/buffer.py
    python benchmarks/buffer.py --rows 1000000 --dim 2048

Times are CPU times of this process. SB3's buffer gets ``--other-rows`` rows (it keeps both observations in float32:
twice or four times the memory); its times do not depend on the number.
"""

import argparse
import time
from typing import Any

import numpy as np
import psutil
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer

from rlt_sb3 import ChunkReplayBuffer

CHUNK, DIMS, PROPRIO, ENVS, POOL = 8, 7, 8, 8, 257


class Feeder:
    """Endless episodes of 20 chunks; observations come from a pool, so that making them costs nothing."""

    def __init__(self, space: spaces.Dict):
        rng = np.random.default_rng(0)
        self.pool = {
            key: rng.normal(size=(POOL, ENVS, *(sub.shape or ()))).clip(-1, 1).astype(np.float32)
            for key, sub in space.items()
        }
        self.chunks = rng.uniform(-1, 1, size=(POOL, ENVS, CHUNK, DIMS)).astype(np.float32)
        self.step = 0

    def row(self) -> tuple[Any, ...]:
        """Make the arguments of one call of ``add``."""
        at, following = self.step % POOL, (self.step + 1) % POOL
        self.step += 1
        done = np.full(ENVS, self.step % 20 == 0)
        infos: list[dict[str, Any]] = [
            {"step_rewards": np.zeros(CHUNK, np.float32), "chunk_steps": CHUNK, "task_id": env % 2}
            for env in range(ENVS)
        ]
        obs, next_obs = ({key: value[k] for key, value in self.pool.items()} for k in (at, following))
        return obs, next_obs, self.chunks[at], np.zeros(ENVS), done, infos


def add_rows(buffer: Any, feeder: Feeder, rows: int) -> np.ndarray:
    """Return CPU microseconds per row of every call."""
    times = np.empty(max(1, rows // ENVS))
    for call in range(len(times)):
        arguments = feeder.row()
        start = time.thread_time_ns()
        buffer.add(*arguments)
        times[call] = time.thread_time_ns() - start
    return times / 1000 / ENVS


def sample_times(buffer: Any, batch: int, count: int = 60) -> np.ndarray:
    """Return CPU milliseconds per call."""
    times = np.empty(count)
    for call in range(count):
        start = time.thread_time_ns()
        buffer.sample(batch)
        times[call] = time.thread_time_ns() - start
    return times[5:] / 1e6


def line(name: str, values: np.ndarray, unit: str) -> str:
    """Format a line of the report."""
    return f"{name:<34} median {np.median(values):8.2f}   p99 {np.percentile(values, 99):8.2f} {unit}"


def main() -> None:
    """Measure both buffers and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--dim", type=int, default=512, help="width of z_rl")
    parser.add_argument("--dtype", default="float16", choices=("float16", "float32"))
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--n-steps", type=int, default=3)
    parser.add_argument("--other-rows", type=int, default=20_000)
    args = parser.parse_args()

    unbounded: dict[str, Any] = {"low": -np.inf, "high": np.inf, "dtype": np.float32}
    space = spaces.Dict(
        {
            "z_rl": spaces.Box(shape=(args.dim,), **unbounded),
            "proprio": spaces.Box(shape=(PROPRIO,), **unbounded),
            "vla_ref": spaces.Box(-1.0, 1.0, (CHUNK, DIMS), np.float32),
        }
    )
    action = spaces.Box(-1.0, 1.0, (CHUNK, DIMS), np.float32)
    per_row = args.dim * int(args.dtype[5:]) // 8 + 4 * (PROPRIO + 2 * CHUNK * DIMS + CHUNK)
    feeder = Feeder(space)
    process = psutil.Process()
    other = DictReplayBuffer(args.other_rows, space, action, device="cpu", n_envs=ENVS)
    their_push = add_rows(other, feeder, args.other_rows)

    before = process.memory_info().rss
    feeder = Feeder(space)
    buffer = ChunkReplayBuffer(
        args.rows, space, action, device="cpu", n_envs=ENVS, n_steps=args.n_steps, z_rl_dtype=args.dtype
    )
    push = add_rows(buffer, feeder, args.rows * 9 // 10)
    sample_full = sample_times(buffer, args.batch)
    rest = add_rows(buffer, feeder, args.rows // 4)  # wraps around
    memory = process.memory_info().rss - before
    ours, theirs = [], []
    for _ in range(5):  # in turns
        ours.append(sample_times(buffer, args.batch, 25))
        theirs.append(sample_times(other, args.batch, 25))
    ours_all, theirs_all = np.concatenate(ours), np.concatenate(theirs)

    formula = args.rows * per_row
    print(f"{args.rows} rows, z_rl {args.dim} {args.dtype}, chunks of {CHUNK}, {ENVS} environments\n")
    print(f"formula {formula / 1e9:.3f} GB ({per_row} bytes per row), resident {memory / 1e9:.3f} GB: ", end="")
    print(f"{memory / formula:.3f} of it; SB3's layout {args.rows * 4 * 2 * (args.dim + PROPRIO + 84) / 1e9:.3f} GB")
    print(line("add, per row, filling", push, "us"))
    print(line("add, per row, after the wrap", rest[len(rest) // 2 :], "us"))
    print(line("add, per row, SB3", their_push, "us"))
    print(line(f"sample({args.batch}), nearly full", sample_full, "ms"))
    print(line(f"sample({args.batch}), after the wrap", ours_all, "ms"))
    print(line(f"sample({args.batch}), SB3, {args.other_rows} rows", theirs_all, "ms"))
    print(f"\nsample: SB3 / ours = {np.median(theirs_all) / np.median(ours_all):.2f}")


if __name__ == "__main__":
    main()
