"""Break a policy server or Ray actors in use by LIBERO environments, and compare every row they still give.

    python benchmarks/faults_remote.py --mode server --injections 100
    python benchmarks/faults_remote.py --mode ray --injections 30 --json rows.json

Before any fault the environment plays some chunks without disturbance (mode "server": with the VLA in this process);
afterwards every row must be the one of that play, bit for bit, wherever its episode stands. Mode "server": the VLA is
behind a proxy that cuts and corrupts; the client has to hide every fault but an exception of the VLA, which must
arrive. Mode "ray": the episodes of a lost simulator or actor must end as lost ones and begin again.
`benchmarks/faults.py` breaks local workers. Exit code 1 if a promise is broken.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from faults import HANG_SECONDS, Hang, seconds_until_dead
from json_file import write_json

CHUNKS, TASK = 4, {"suite": "libero_goal", "task_ids": [1], "assets": "embedded"}
SERVER_FAULTS = (
    "server killed", "server stopped", "connection cut in a request", "connection cut in a reply", "corrupt frame",
    "exception in the VLA", "worker killed",
)  # fmt: skip
RAY_FAULTS = ("actor killed", "actor stopped", "simulator of an actor killed", "simulator of an actor stopped")


def make(num_envs: int, vla: Any = "mini", row_by_row: bool = False) -> Any:
    """Make environments that compute the same in every process; ``row_by_row``: in batches of every size as well."""
    import torch

    from rlt_gym.libero.make import make_rl_token_libero_vec
    from rlt_gym.vla.registry import load_vla

    torch.set_num_threads(1)
    settings: dict[str, Any] = TASK
    if row_by_row:  # after the end of an episode there is one row more: a VLA rounds larger batches in another way
        vla, settings = load_vla("mini"), TASK | {"rl_token": "mean"}
        type(vla).spec = replace(vla.spec, max_batch=1)
    return make_rl_token_libero_vec(num_envs, vla=vla, seed=0, max_restarts=10**6, **settings)


def be_a_server(pipe: Any, port: int, raises: Any) -> None:
    """Serve the VLA until killed; ``raises`` makes its next pass fail."""
    import torch

    from rlt_gym.vla.registry import load_vla
    from rlt_gym.vla.remote.server import PolicyServer, VLAService

    torch.set_num_threads(1)
    vla = load_vla("mini")
    forward = vla.forward

    def broken(*given: Any, **kwargs: Any) -> Any:
        if raises.is_set():
            raises.clear()
            raise RuntimeError("injected failure of the VLA")
        return forward(*given, **kwargs)

    vla.forward = broken  # type: ignore[method-assign]
    server = PolicyServer(VLAService(vla, tokens_dtype="float32"), port=port).start()
    pipe.send(server.port)
    threading.Event().wait()


class Proxy:
    """A port that passes bytes on to the server's, and breaks what it is told to break."""

    def __init__(self) -> None:
        self.target, self.fault, self.after = 0, "", 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listening.accept()
            try:
                server = socket.create_connection(("127.0.0.1", self.target), timeout=10)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            for name, source, sink in (("request", client, server), ("reply", server, client)):
                threading.Thread(target=self._pass, args=(name, source, sink), daemon=True).start()

    def _pass(self, name: str, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self.fault == f"connection cut in a {name}":
                    sink.sendall(data[: self.after % len(data)])
                    break
                if self.fault == "corrupt frame" and name == "reply":
                    self.fault, data = "", bytes([data[0] | 0x70]) + data[1:]  # bits that no extension uses
                sink.sendall(data)
            if self.fault.startswith("connection cut"):
                self.fault = ""
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class Campaign:
    """
    What both modes have in common: a play without faults, and rows that are compared with it.

    :param env: The environment that is broken.
    :param seed: Which fault comes when.
    """

    def __init__(self, env: Any, reference: Any, seed: int) -> None:
        self.env, self.random = env, random.Random(seed)
        self.counts: dict[str, Counter[str]] = {}
        self.seconds: dict[str, list[float]] = {}
        self.rows = 0
        self.expected = [reference.reset(seed=0, options={"init_states": "eval"})[0]]
        self.rewards: list[np.ndarray] = []
        for _ in range(CHUNKS):
            obs, rewards, *_ = reference.step(self.expected[-1]["vla_ref"])
            self.expected.append(obs)
            self.rewards.append(rewards)

    def wrong(self, obs: Any, rewards: np.ndarray | None, at: list[int]) -> int:
        """How many rows are not those of the play without faults; ``at``: chunks played of each episode."""
        wrong = 0
        for env, chunk in enumerate(at):
            self.rows += 1
            same = all(np.array_equal(obs[key][env], self.expected[chunk][key][env]) for key in obs)
            wrong += not (same and (rewards is None or not chunk or rewards[env] == self.rewards[chunk - 1][env]))
        return wrong

    def play(self, name: str, break_it: Callable[[], None], may_be_lost: bool, raises: bool = False) -> None:
        """Play the episodes again and break something within one of the steps."""
        result = self.counts[name]
        obs, infos = self.env.reset(seed=0, options={"init_states": "eval"})
        at, moment = [0] * self.env.num_envs, self.random.randrange(CHUNKS - 1)
        result["wrong rows"] += self.wrong(obs, None, at)
        lost_ever = False
        for step in range(CHUNKS):
            timer = threading.Timer(self.random.uniform(0, 0.2), break_it)
            if step == moment:
                timer.start() if may_be_lost else break_it()
            try:
                obs, rewards, _, truncations, infos = self.env.step(obs["vla_ref"])
            except ValueError as error:
                result["unnoticed"] += not (raises and "injected failure of the VLA" in str(error))
                return
            if step == moment:
                timer.join() if may_be_lost else None
            for env, cut in enumerate(truncations):
                at[env] = 0 if cut else at[env] + 1
                lost_ever |= bool(cut)
                if cut and not (infos["final_info"]["worker_restarted"][env] and rewards[env] == 0):
                    result["wrong rows"] += 1
            result["wrong rows"] += self.wrong(obs, rewards, at)
        result["unnoticed"] += raises or (may_be_lost and not lost_ever)

    def run(self, faults: tuple[str, ...], inject: Callable[[str], None], injections: int, minutes: float) -> None:
        """All faults in turn, in random order within a turn, as many as the time allows."""
        deadline = time.monotonic() + 60 * minutes
        plan: list[str] = []
        while len(plan) < injections:
            plan += self.random.sample(faults, len(faults))
        for number, name in enumerate(plan[:injections], start=1):
            if time.monotonic() > deadline:
                break
            result = self.counts.setdefault(name, Counter())
            result["injected"] += 1
            start = time.monotonic()
            signal.alarm(HANG_SECONDS)
            try:
                inject(name)
            except Hang:
                result["hangs"] += 1
            finally:
                signal.alarm(0)
            self.seconds.setdefault(name, []).append(time.monotonic() - start)
            if number % 10 == 0:
                print(f"{number}/{injections}", file=sys.stderr, flush=True)


def break_server(injections: int, minutes: float, seed: int) -> Campaign:
    """Break a policy server and the way to it."""
    from rlt_gym.vla.remote.client import RemoteVLA

    context = multiprocessing.get_context("spawn")
    raises, proxy = context.Event(), Proxy()
    servers: list[Any] = []

    def start() -> None:
        pipe, there = context.Pipe()
        servers.append(context.Process(target=be_a_server, args=(there, 0, raises), daemon=True))
        servers[-1].start()
        proxy.target = pipe.recv()

    start()
    reference = make(2)
    campaign = Campaign(None, reference, seed)
    reference.close()
    vla = RemoteVLA(port=proxy.port, timeout=5.0)
    campaign.env = env = make(2, vla)

    def inject(name: str) -> None:
        proxy.after = campaign.random.randrange(1 << 16)
        pids, again = list(env.unwrapped.worker_pids), threading.Thread(target=start)

        def begin_again() -> None:
            servers[-1].kill()
            again.start()

        def break_it() -> None:
            if name == "server killed":
                delay = campaign.random.uniform(0, 0.5)
                threading.Timer(delay, begin_again).start()
            elif name == "server stopped":
                os.kill(servers[-1].pid, signal.SIGSTOP)
                vla._connection.timeout = 0.3
                threading.Timer(0.7, os.kill, (servers[-1].pid, signal.SIGCONT)).start()
            elif name == "exception in the VLA":
                raises.set()
            elif name == "worker killed":
                os.kill(pids[0], signal.SIGKILL)
            else:
                proxy.fault = name

        campaign.play(name, break_it, name == "worker killed", name == "exception in the VLA")
        vla._connection.timeout = 5.0
        if name == "server killed":
            while not again.ident:  # the timer may be later than the last step
                time.sleep(0.01)
            again.join()
            campaign.counts[name]["orphans"] += seconds_until_dead([servers[-2].pid]) is None
        if name == "worker killed":
            campaign.counts[name]["orphans"] += seconds_until_dead(pids[:1]) is None

    campaign.run(SERVER_FAULTS, inject, injections, minutes)
    pids = list(env.unwrapped.worker_pids)
    env.close()
    servers[-1].kill()
    servers[-1].join()
    campaign.counts[SERVER_FAULTS[0]]["orphans"] += seconds_until_dead(pids) is None
    return campaign


def break_ray(injections: int, minutes: float, seed: int) -> Campaign:
    """Break Ray actors and their simulators."""
    from rlt_gym.cluster.connection import RayConfig, connected
    from rlt_gym.cluster.vector_env import RayVectorEnv

    with connected(RayConfig(), 2) as ray:
        env: Any = RayVectorEnv(partial(make, 1, row_by_row=True), 2, 1, "eval", 0, max_restarts=10**6)
        campaign = Campaign(env, env, seed)

        def pids_of(worker: int) -> tuple[int, list[int]]:
            call = env._workers._actors[worker].__ray_call__.remote
            pid = ray.get(call(lambda actor: os.getpid()))
            simulators = ray.get(call(lambda actor: list(actor._env.unwrapped.worker_pids)))
            zygotes = {parent for s in simulators if (parent := psutil.Process(s).ppid()) not in (pid, 1)}
            return pid, simulators + sorted(zygotes)

        def inject(name: str) -> None:
            worker = campaign.random.randrange(2)
            actor, simulators = pids_of(worker)
            victim = simulators[0] if name.startswith("simulator") else actor
            if name == "actor stopped":
                stopped = env._workers._actors[worker]

                def answer(number: int, reference: Any, timeout: float | None = None) -> Any:
                    patience = 3.0 if env._workers._actors[number] is stopped else timeout  # its successor may be slow
                    return type(env._workers).answer(env._workers, number, reference, patience)

                env._workers.answer = answer
            if name == "simulator of an actor stopped":
                setting = env._workers._actors[worker].__ray_call__.remote(
                    lambda held: setattr(held._env.unwrapped._pool.clients[0], "_timeout", 1.0)
                )
                ray.get(setting)
            how = signal.SIGSTOP if name.endswith("stopped") else signal.SIGKILL
            # at once, not after a while: the step may be over by then
            campaign.play(name, lambda: os.kill(victim, how), True)
            env._workers.__dict__.pop("answer", None)
            gone = [victim] if name.startswith("simulator") else [actor, *simulators]
            campaign.counts[name]["orphans"] += seconds_until_dead(gone) is None

        campaign.run(RAY_FAULTS, inject, injections, minutes)
        pids = [pid for worker in range(2) for pid in [pids_of(worker)[0], *pids_of(worker)[1]]]
        env.close()
    campaign.counts[RAY_FAULTS[0]]["orphans"] += seconds_until_dead(pids) is None
    return campaign


def main() -> int:
    """Run the campaign and print its report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("server", "ray"), default="server")
    parser.add_argument("--injections", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=30.0, help="stop after this time, and report what was done")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the table as JSON as well")
    arguments = parser.parse_args()
    logging.getLogger("rlt_gym").setLevel(logging.ERROR)  # it announces every restart
    warnings.filterwarnings("ignore", message="The VLA server at")

    def on_alarm(*_: Any) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, on_alarm)
    run = break_server if arguments.mode == "server" else break_ray
    campaign = run(arguments.injections, arguments.minutes, arguments.seed)
    columns = ("injected", "hangs", "orphans", "wrong rows", "unnoticed")
    print("| fault | " + " | ".join(columns) + " | median s |\n" + "|---" * (len(columns) + 2) + "|")
    total: Counter[str] = Counter()
    for name, counts in campaign.counts.items():
        total.update(counts)
        cells = [str(counts[column]) for column in columns] + [f"{np.median(campaign.seconds[name]):.2f}"]
        print(f"| {name} | " + " | ".join(cells) + " |")
    print("| **all** | " + " | ".join(f"**{total[column]}**" for column in columns) + " | |")
    print(f"\n{campaign.rows} rows compared.")
    faults = {name: {column: counts[column] for column in columns} for name, counts in campaign.counts.items()}
    write_json(arguments, rows=campaign.rows, faults=faults)
    return 1 if any(total[column] for column in columns[1:]) else 0


if __name__ == "__main__":
    sys.exit(main())
