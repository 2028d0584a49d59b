"""
Stage 1 on tokens that do not fit into memory: how much memory, time and disk it takes.

    python benchmarks/tokens.py                             # 20,000 observations of 690 x 2560 tokens: 71 GB of disk
    python benchmarks/tokens.py --rows 2000 --folder /data  # fewer, elsewhere

A made-up VLA, whose tokens cost nothing, writes shards as ``rlt encode-tokens`` does. Then rows are read in random
batches, as ``rlt pretrain-token --tokens`` reads them. Beside the size on disk stands the formula (rows x tokens x
width x bytes), beside the memory what the tokens would need in memory. The disk decides how fast random rows are read;
if the tokens fit into memory, the operating system's cache does.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import torch
from json_file import write_json

from rlt_gym.data.demo_set import DemoRows
from rlt_gym.rl_token.token_shards import DTYPES, TokenShards, TokenWriter
from rlt_gym.rl_token.tokens import TokenOrigin

PICTURE = 64


def rows_of(count: int) -> DemoRows:
    """
    Make up what is known about observations.

    :param count: How many.
    :return: Episodes of 50 observations of one task.
    """
    step = np.arange(count) % 50
    return DemoRows(
        proprio=np.zeros((count, 8), np.float32), actions=np.zeros((count, 7), np.float32),
        action_row=np.arange(count), action_end=np.minimum(np.arange(count) - step + 50, count),
        task=np.zeros(count, np.int64), demo=np.arange(count) // 50, step=step, success=np.ones(count, bool),
        intervention=np.zeros(count, bool), object_positions=np.zeros((count, 0, 3), np.float32),
        instructions=["made up"], files={"made up": count // 50},
    )  # fmt: skip


def resident(process: psutil.Process) -> float:
    """
    Measure memory that is not a cache of files.

    :param process: This process.
    :return: MiB.
    """
    memory = process.memory_info()
    return (memory.rss - memory.shared) / 2**20


def main() -> None:
    """Write, read, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000, help="observations")
    parser.add_argument("--tokens", type=int, default=690, help="tokens of each")
    parser.add_argument("--width", type=int, default=2560, help="width of a token")
    parser.add_argument("--dtype", choices=DTYPES, default="float16", help="type on disk")
    parser.add_argument("--rows-per-shard", type=int, default=64, help="observations per file")
    parser.add_argument("--batch-size", type=int, default=32, help="rows of a batch that is read")
    parser.add_argument("--batches", type=int, default=50, help="batches to read")
    parser.add_argument("--folder", help="where to write; a temporary folder by default")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    dtype = DTYPES[args.dtype]
    formula = args.rows * args.tokens * args.width * dtype.itemsize
    if args.folder:
        Path(args.folder).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=args.folder, prefix="tokens-"))
    free = shutil.disk_usage(folder).free
    if free < 1.05 * formula:
        folder.rmdir()
        parser.error(
            f"{formula / 1e9:.0f} GB are needed and {free / 1e9:.0f} GB are free: give --folder, or fewer --rows"
        )
    process = psutil.Process()
    before = resident(process)
    peak = before
    try:
        origin = TokenOrigin("made up", "0" * 64, args.width, ("all",), args.tokens)
        writer = TokenWriter(folder, origin, rows_of(args.rows), args.rows_per_shard, {"dtype": args.dtype})
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randn(args.rows_per_shard, args.tokens, args.width, generator=generator).to(dtype)
        pictures = np.zeros((args.rows_per_shard, 1, PICTURE, PICTURE, 3), np.uint8)  # one camera
        began = time.monotonic()
        for number, rows in enumerate(writer.shards):
            count = rows.stop - rows.start
            tokens[:, 0, 0] = number  # every shard its own
            mask = torch.ones(count, args.tokens, dtype=torch.bool)
            writer.write(number, tokens[:count], mask, mask.to(torch.uint8), pictures[:count])
            peak = max(peak, resident(process))
        writer.close()
        written = time.monotonic() - began
        size = sum(path.stat().st_size for path in folder.iterdir())
        reader = TokenShards(folder)
        rng = np.random.default_rng(0)
        began = time.monotonic()
        for _ in range(args.batches):
            rows_read = rng.choice(len(reader), args.batch_size, replace=False)
            found, mask = reader.batch(rows_read, "cpu")
            assert mask.all() and torch.equal(found[:, 0, 0], torch.as_tensor(rows_read // args.rows_per_shard).float())
            peak = max(peak, resident(process))
        read = time.monotonic() - began
    finally:
        shutil.rmtree(folder)
    result = {
        "formula_gb": formula / 1e9,
        "disk_gb": size / 1e9,
        "memory_mib": peak - before,
        "in_memory_mib": formula / 2**20,
        "written_rows_per_second": args.rows / written,
        "read_rows_per_second": args.batches * args.batch_size / read,
    }
    write_json(args, **result)
    memory, all_of_it = result["memory_mib"], result["in_memory_mib"]
    print(f"{args.rows} observations of {args.tokens} x {args.width} tokens, {args.dtype}")
    print(f"disk:   {size / 1e9:.2f} GB (formula {formula / 1e9:.2f} GB)")
    print(f"memory: {memory:.0f} MiB at most (all tokens in memory: {all_of_it:.0f} MiB, {all_of_it / memory:.1f}x)")
    print(f"write:  {result['written_rows_per_second']:.0f} rows/s")
    print(f"read:   {result['read_rows_per_second']:.0f} rows/s in random batches of {args.batch_size}")


if __name__ == "__main__":
    main()
