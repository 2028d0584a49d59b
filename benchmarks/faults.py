"""Break LIBERO workers in every way we know and see that nothing hangs, stays behind or reaches the learner.

    python benchmarks/faults.py                     # 300 injections and more
    python benchmarks/faults.py --injections 20     # a slice

A learner's view is kept throughout: actions are a function of the episode and the step in it, so every transition of an
episode that is played again after a fault must be the one seen before, bit for bit. Exit code 1 if a promise is broken.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from json_file import write_json

from rlt_gym.libero.vector_env import LiberoVectorEnv
from rlt_gym.workers.pool import WorkerError

SETTINGS: dict[str, Any] = {
    "suite": "libero_goal",
    "task_ids": [1],
    "assets": "embedded",
    "render": "fast",
    "image_size": 32,
}
CHUNK = 2

#: Share of the injections, and the function of rlt_gym.libero.worker.fault_injection that makes the fault from inside.
FAULTS = {
    "SIGKILL": (0.25, None),
    "SIGSTOP": (0.15, None),
    "exception in the simulator": (0.14, "raise_at_step"),
    "segmentation fault": (0.08, "crash_at_step"),
    "hang in C code": (0.06, "hang_at_step"),
    "GL context lost": (0.12, "lose_gl"),
    "1 MB to stdout and stderr": (0.10, "shout"),
    "SIGKILL of the zygote": (0.02, None),
    "close during a step": (0.05, None),
    "SIGKILL of the parent": (0.03, None),
}
HARMLESS = "1 MB to stdout and stderr"

#: Longest time that workers may outlive their parent.
ORPHAN_SECONDS = 5.0
#: An injection that takes longer than this counts as a hang.
HANG_SECONDS = 600


class Hang(Exception):
    """Something did not return."""


def alive(pid: int) -> bool:
    """Whether a process runs; zombies do not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def parent_of(pid: int) -> int:
    """Parent of a process; of a forked worker, its zygote."""
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rsplit(")", 1)[1].split()[1])


def seconds_until_dead(pids: list[int], limit: float = ORPHAN_SECONDS) -> float | None:
    """Time until all have ended, or ``None`` if some have not by then (they are killed)."""
    start = time.monotonic()
    while time.monotonic() - start < limit:
        if not any(map(alive, pids)):
            return time.monotonic() - start
        time.sleep(0.01)
    for pid in filter(alive, pids):
        os.kill(pid, signal.SIGKILL)
    return None


def action(init_index: int, step: int) -> np.ndarray:
    """Choose the action of an episode's step, the same whenever it is played."""
    return np.random.default_rng([init_index, step]).uniform(-1, 1, (CHUNK, 7)).astype(np.float32)


class Campaign:
    """
    Breaks workers and compares what training sees with an undisturbed environment.

    :param num_envs: Workers of the environment under test.
    :param seed: Which worker is broken when.
    """

    def __init__(self, num_envs: int, seed: int):
        self.random = random.Random(seed)
        self.counts: dict[str, Counter[str]] = {name: Counter() for name in FAULTS}
        self.seconds: dict[str, list[float]] = {name: [] for name in FAULTS}
        self.pids: set[int] = set()
        #: What followed (init_index, step) when it was seen first.
        self.seen: dict[tuple[int, int], tuple[Any, ...]] = {}
        self.repeated = self.transitions = 0
        limits: dict[str, Any] = {"max_episode_steps": 10**5, "max_restarts": 10**6}
        self.env = LiberoVectorEnv(num_envs, chunk_length=CHUNK, **limits, **SETTINGS)
        self.obs, self.infos = self.env.reset(seed=seed)

    def step(self) -> tuple[np.ndarray, int]:
        """Act, and keep what a learner would keep; returns truncations and how many transitions were wrong."""
        keys = list(zip(self.infos["init_index"].tolist(), self.infos["episode_steps"].tolist(), strict=True))
        before = self.obs
        self.obs, rewards, _, truncations, infos = self.env.step(np.stack([action(*key) for key in keys]))
        wrong = 0
        for index, key in enumerate(keys):
            if truncations[index]:
                final, last = infos["final_info"], infos["final_obs"][index]
                clean = final["worker_restarted"][index] and final["chunk_steps"][index] == 0 and rewards[index] == 0
                wrong += not (clean and all(np.array_equal(last[name], before[name][index]) for name in last))
                continue
            value = (rewards[index], *(self.obs[name][index].tobytes() for name in sorted(self.obs)))
            self.transitions += 1
            self.repeated += key in self.seen
            wrong += self.seen.setdefault(key, value) != value
        self.infos = infos
        return truncations, wrong

    def inject(self, name: str, function: str | None) -> None:
        """One fault in one worker (all, for the zygote), and the steps that meet it and follow."""
        result, env = self.counts[name], self.env
        victim = self.random.randrange(env.num_envs)
        pid = env.worker_pids[victim]
        self.pids |= {*env.worker_pids, parent_of(pid)}
        expected = np.zeros(env.num_envs, dtype=bool)
        expected[victim] = name != HARMLESS
        if name == "SIGKILL of the zygote":
            os.kill(parent_of(pid), signal.SIGKILL)
            expected[:] = True
            result["orphans"] += seconds_until_dead(env.worker_pids) is None  # before they can answer once more
        elif function is None:
            os.kill(pid, signal.SIGKILL if name == "SIGKILL" else signal.SIGSTOP)
        else:
            task_id = SETTINGS["task_ids"][0]
            question = {
                "function": f"rlt_gym.libero.worker.fault_injection:{function}",
                "task_id": task_id,
                "arguments": {},
            }
            _, failures = env._pool.ask({victim: ("call", question)})
            assert not failures, failures
        if name in ("SIGSTOP", "hang in C code"):
            env._pool.clients[victim]._timeout = 0.5  # it never answers: no need to wait long
        truncations, wrong = self.step()
        result["wrong transitions"] += wrong
        result["unnoticed"] += int((expected & ~truncations).sum())
        result["neighbors disturbed"] += int((truncations & ~expected).sum())
        result["orphans"] += name != HARMLESS and seconds_until_dead([pid]) is None
        for _ in range(2):  # and on
            truncations, wrong = self.step()
            result["wrong transitions"] += wrong
            result["neighbors disturbed"] += int(truncations.sum())

    def close_during_step(self, name: str) -> None:
        """Another environment of one worker, closed by the main thread while a second one steps."""
        env = LiberoVectorEnv(1, chunk_length=50, **SETTINGS)
        env.reset(seed=0)
        pids, errors = env.worker_pids, []

        def work() -> None:
            try:
                while True:
                    env.step(np.zeros((1, 50, 7)))
            except WorkerError as error:
                errors.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        time.sleep(self.random.uniform(0, 0.3))
        env.close()
        env.close()
        thread.join(timeout=60)
        self.counts[name]["hangs"] += thread.is_alive()
        self.counts[name]["unnoticed"] += not errors
        self.counts[name]["orphans"] += seconds_until_dead(pids) is None

    def kill_parent(self, name: str, start: str) -> float:
        """Kill a training process whose workers were started by a thread that has ended; one of them is stopped."""
        command = [sys.executable, __file__, "--be-a-parent", start]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        pids = json.loads(child.stdout.readline())
        os.kill(pids[0], signal.SIGSTOP)
        time.sleep(self.random.uniform(0, 0.3))
        child.kill()
        seconds = seconds_until_dead(pids)
        child.wait()
        child.stdout.close()
        self.counts[name]["orphans"] += seconds is None
        return ORPHAN_SECONDS if seconds is None else seconds

    def run(self, injections: int, minutes: float) -> None:
        """All faults, in random order, as many as the time allows."""
        deadline = time.monotonic() + 60 * minutes
        plan = [name for name, (share, _) in FAULTS.items() for _ in range(max(1, round(share * injections)))]
        self.random.shuffle(plan)
        for number, name in enumerate(plan, start=1):
            if time.monotonic() > deadline:
                break
            self.counts[name]["injected"] += 1
            start, seconds = time.monotonic(), None
            signal.alarm(HANG_SECONDS)
            try:
                if name == "close during a step":
                    self.close_during_step(name)
                elif name == "SIGKILL of the parent":
                    seconds = self.kill_parent(name, "spawn" if self.counts[name]["injected"] % 2 else "zygote")
                else:
                    self.inject(name, FAULTS[name][1])
            except Hang:
                self.counts[name]["hangs"] += 1
            finally:
                signal.alarm(0)
            self.seconds[name].append(time.monotonic() - start if seconds is None else seconds)
            if number % 20 == 0:
                print(f"{number}/{len(plan)}", file=sys.stderr, flush=True)
        self.env.close()
        self.counts["SIGKILL"]["orphans"] += seconds_until_dead(sorted(self.pids)) is None


def be_a_parent(start: str) -> None:
    """Step two workers until killed."""
    made: list[LiberoVectorEnv] = []
    thread = threading.Thread(
        target=lambda: made.append(LiberoVectorEnv(2, chunk_length=CHUNK, worker_start=start, **SETTINGS))
    )
    thread.start()
    thread.join()
    env = made[0]
    env.reset(seed=0)
    zygote = [parent_of(env.worker_pids[0])] if start == "zygote" else []
    print(json.dumps(env.worker_pids + zygote), flush=True)
    while True:
        env.step(np.zeros((2, CHUNK, 7)))


def main() -> int:
    """Run the campaign and print its report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--injections", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after this time, and report what was done")
    parser.add_argument("--num-envs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the table as JSON as well")
    parser.add_argument("--be-a-parent", metavar="START", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.be_a_parent:
        be_a_parent(arguments.be_a_parent)

    logging.getLogger("rlt_gym").setLevel(logging.ERROR)  # it announces every restart

    def on_alarm(*_: Any) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, on_alarm)
    campaign = Campaign(arguments.num_envs, arguments.seed)
    campaign.run(arguments.injections, arguments.minutes)
    columns = ("injected", "hangs", "orphans", "wrong transitions", "unnoticed", "neighbors disturbed")
    print("| fault | " + " | ".join(columns) + " | median s |")
    print("|---" * (len(columns) + 2) + "|")
    total: Counter[str] = Counter()
    for name, counts in campaign.counts.items():
        total.update(counts)
        median = f"{np.median(campaign.seconds[name]):.2f}" if campaign.seconds[name] else "-"
        cells = [str(counts[column]) for column in columns] + [median]
        print(f"| {name} | " + " | ".join(cells) + " |")
    print("| **all** | " + " | ".join(f"**{total[column]}**" for column in columns) + " | |")
    print(
        f"\n{campaign.transitions} transitions kept, {campaign.repeated} of them seen before and compared; "
        f"{campaign.env.worker_restarts} restarts. Seconds: fault and three steps; for the parent, until its workers "
        "had ended."
    )
    write_json(arguments, faults=campaign.counts)
    return 1 if any(total[column] for column in columns[1:]) else 0


if __name__ == "__main__":
    sys.exit(main())
