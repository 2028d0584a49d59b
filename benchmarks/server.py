"""One VLA for many clients: observations per second and latency, with requests joined and with one call each.

    python benchmarks/server.py --json benchmarks/results/server.json
    python benchmarks/server.py --clients 1,8 --seconds 1 --rounds 1

The server is a process of its own, the clients are threads of this one; each asks for one observation at a time, over
the loopback interface. "joined" is max_wait_ms=0, what `rlt serve` does; "one call each" is max_wait_ms=None. Both
are measured in turns. Rates per core-second count the CPU time of the server alone, so other programs hardly count.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import processes
from json_file import write_json

WAYS = {"joined": 0.0, "one call each": None}


def be_a_server(pipe: Any, vla: str, device: str, max_wait_ms: float | None) -> None:
    """Serve until the other end of the pipe says so."""
    import torch

    from rlt_gym.vla.registry import load_vla
    from rlt_gym.vla.remote.server import PolicyServer, VLAService

    torch.set_num_threads(1)
    loaded = load_vla(vla, device)
    passes, forward = [0], loaded.forward

    def counted(*given: Any, **kwargs: Any) -> Any:
        passes[0] += 1
        return forward(*given, **kwargs)

    loaded.forward = counted  # type: ignore[method-assign]
    with PolicyServer(VLAService(loaded, max_wait_ms=max_wait_ms), port=0) as server:
        spec = loaded.spec
        pipe.send((server.port, list(spec.cameras), spec.frame_size, spec.state_dim))
        while pipe.recv() == "passes":
            pipe.send(passes[0])


class Server:
    """
    A server in a process of its own.

    :param vla: Name of the VLA.
    :param device: Where it runs.
    :param max_wait_ms: How long requests wait for each other.
    """

    def __init__(self, vla: str, device: str, max_wait_ms: float | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=be_a_server, args=(there, vla, device, max_wait_ms), daemon=True)
        self._process.start()
        self.port, self.cameras, self.size, self.state_dim = self._pipe.recv()

    def used(self) -> tuple[float, int]:
        """CPU seconds and forward passes so far."""
        self._pipe.send("passes")
        passes = self._pipe.recv()
        assert self._process.pid is not None
        return processes.cpu_seconds(self._process.pid), passes

    def close(self) -> None:
        """End it."""
        self._pipe.send("end")
        self._process.join(timeout=20)


def ask_for(server: Server, clients: int, seconds: float) -> dict[str, float]:
    """Let clients ask for some seconds; rates and latencies."""
    from websockets.sync.client import connect

    from rlt_gym.vla.remote.codec import pack

    rng = np.random.default_rng(0)
    shape = (1, server.size, server.size, 3)
    obs = {camera: rng.integers(0, 256, shape, dtype=np.uint8) for camera in server.cameras}
    obs["state"] = rng.normal(size=(1, server.state_dim)).astype(np.float32)
    request = pack({"obs": obs, "tasks": ["open the middle drawer of the cabinet"], "seed": [0]})
    latencies: list[list[float]] = [[] for _ in range(clients)]
    ready, over = threading.Barrier(clients + 1), threading.Event()

    def client(mine: list[float]) -> None:
        with connect(f"ws://127.0.0.1:{server.port}", compression=None, max_size=None, proxy=None) as socket:
            socket.recv()
            socket.send(request)  # not measured
            assert isinstance(socket.recv(), bytes)
            ready.wait()
            while not over.is_set():
                began = time.perf_counter()
                socket.send(request)
                assert isinstance(socket.recv(), bytes)
                mine.append(time.perf_counter() - began)

    threads = [threading.Thread(target=client, args=(mine,)) for mine in latencies]
    for thread in threads:
        thread.start()
    ready.wait(timeout=120)
    began, (cpu, passes) = time.perf_counter(), server.used()
    time.sleep(seconds)
    over.set()
    for thread in threads:
        thread.join()
    wall, (cpu_after, passes_after) = time.perf_counter() - began, server.used()
    every = np.concatenate(latencies)
    return {
        "per_second": len(every) / wall,
        "per_core_second": len(every) / (cpu_after - cpu),
        "median_ms": 1000 * float(np.median(every)),
        "p95_ms": 1000 * float(np.percentile(every, 95)),
        "rows_of_a_pass": len(every) / (passes_after - passes),
    }


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vla", default="mini")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--clients", type=lambda text: list(map(int, text.split(","))), default=[1, 2, 4, 8, 16, 32, 64]
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="turns, of which the median is shown")
    parser.add_argument("--json", type=Path, help="JSON file for the numbers")
    arguments = parser.parse_args()
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(f"{arguments.vla} on {arguments.device}, {cores} cores, load {load:.1f} before the start\n")
    print(
        "| clients | observations/s, joined | one call each | ratio | per core-second, joined | one call each | ratio "
        "| median / p95 ms, joined | one call each | rows of a pass |\n" + "|---" * 10 + "|"
    )
    servers = {way: Server(arguments.vla, arguments.device, wait) for way, wait in WAYS.items()}
    results = []
    for clients in arguments.clients:
        found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(arguments.rounds):
            for way, server in servers.items():
                found[way].append(ask_for(server, clients, arguments.seconds))
        middle = {
            way: {key: float(np.median([turn[key] for turn in turns])) for key in turns[0]}
            for way, turns in found.items()
        }
        a, b = middle["joined"], middle["one call each"]
        ratios = {
            key: float(
                np.median([j[key] / o[key] for j, o in zip(found["joined"], found["one call each"], strict=True)])
            )
            for key in ("per_second", "per_core_second")
        }
        print(
            f"| {clients} | {a['per_second']:.0f} | {b['per_second']:.0f} | {ratios['per_second']:.2f} "
            f"| {a['per_core_second']:.0f} | {b['per_core_second']:.0f} | {ratios['per_core_second']:.2f} "
            f"| {a['median_ms']:.0f} / {a['p95_ms']:.0f} | {b['median_ms']:.0f} / {b['p95_ms']:.0f} "
            f"| {a['rows_of_a_pass']:.1f} |",
            flush=True,
        )
        results.append({"clients": clients, **middle, "ratio": ratios})
    for server in servers.values():
        server.close()
    write_json(arguments, cores=cores, load_before=load, results=results)


if __name__ == "__main__":
    main()
