"""Chunks per second of the whole training loop, serial and overlapped, with the VLA in the loop, and where time goes.

    python benchmarks/throughput.py --json benchmarks/results/throughput.json     # 1, 2, 4, 8 and 16 environments
    python benchmarks/throughput.py --envs 2 --seconds 10 --rounds 3
    python benchmarks/throughput.py --table benchmarks/results/throughput.json    # only the tables of these numbers

RLT's defaults learn on a LIBERO task: "serial" is ``train_freq=1``, "overlap" is ``train_freq=(1, "overlap")``. Both
take turns on the same simulators, so that whatever else the machine does hits them alike.

Wall time is what the main process does, part after part: the learner (updates, actor, buffer), VLA, encoder, transport
(messages, copies of pictures, infos), and waiting for the simulators, which is divided as the simulators' own time is:
physics, pictures, resets. "sum" is the sum of these parts divided by the wall time. A sum that is off by more than 5 %
ends the program with status 1, after both tables.

The first table needs a machine on which nothing else runs. CPU time, of all processes, does not depend on that, except
for caches. "packed" is the ratio overlap / serial that the CPU times of the serial loop allow: simulators and updates
side by side, on 2 cores, or on as many as there are simulators and one more; VLA, encoder and transport by themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import processes
import torch
import torch._dynamo  # before OpenGL is loaded, see rlt_sb3.rlt.rlt
from json_file import write_json
from stable_baselines3.common.callbacks import BaseCallback

from rlt_gym.libero import vector_env
from rlt_gym.libero.make import make_rl_token_libero_vec
from rlt_sb3 import RLT, GymnasiumVecEnv

MODES: dict[str, Any] = {"serial": 1, "overlap": (1, "overlap")}
MAIN = ("learner", "VLA", "encoder", "transport")
SIMULATORS = ("physics", "pictures", "reset")


class Clocks:
    """Wall and CPU seconds of the main process by part; a part that begins inside another one interrupts it."""

    def __init__(self) -> None:
        self.seconds: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
        self._open: list[str] = []
        self._last = self._now()

    @staticmethod
    def _now() -> np.ndarray:
        return np.array([time.perf_counter(), time.process_time()])

    def _turn(self) -> None:
        now = self._now()
        self.seconds[self._open[-1] if self._open else "other"] += now - self._last
        self._last = now

    def clear(self) -> None:
        """Begin again."""
        self.seconds.clear()
        self._last = self._now()

    def stop(self) -> dict[str, np.ndarray]:
        """Return the seconds of all parts since :meth:`clear`."""
        self._turn()
        return {name: value.copy() for name, value in self.seconds.items()}

    def time(self, owner: Any, method: str, part: str) -> None:
        """Count the time of a method as a part."""
        function: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._turn()
            self._open.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._turn()
                self._open.pop()

        setattr(owner, method, timed)


class Simulators:
    """Adds up what the simulators say about their own time, see ``backends/timed.py``."""

    def __init__(self, env: Any) -> None:
        self.seconds = np.zeros((2, 3))  # wall and CPU of physics, pictures, resets
        start, end = env._start_episodes, env._end_play

        def started(envs: Any) -> Any:
            found = start(envs)
            self._add(observation for observation, _ in found.values())
            return found

        def ended(chunks: Any) -> Any:
            found = end(chunks)
            self._add(played.observation for played in found.values())
            return found

        env._start_episodes, env._end_play = started, ended

    def _add(self, observations: Any) -> None:
        for observation in observations:
            self.seconds += observation.pop("clocks").reshape(2, 3)


class For(BaseCallback):
    """Ends training after some seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def _on_training_start(self) -> None:
        self.end = time.perf_counter() + self.seconds

    def _on_step(self) -> bool:
        return time.perf_counter() < self.end


def make_env(num_envs: int, arguments: argparse.Namespace) -> Any:
    """Make the environment of a run, whose simulators have clocks."""
    original = vector_env.backend_settings
    vector_env.backend_settings = lambda target, **kwargs: original("timed:TimedBackend", **kwargs)
    try:
        return make_rl_token_libero_vec(
            num_envs, arguments.suite, [arguments.task], vla=arguments.vla, assets=arguments.assets,
            device=arguments.device, seed=0,
        )  # fmt: skip
    finally:
        vector_env.backend_settings = original


def measure(num_envs: int, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Train in both modes, in turns; seconds of all parts, by mode."""
    env = make_env(num_envs, arguments)
    raw, venv = env.unwrapped, GymnasiumVecEnv(env)
    clocks, simulators = Clocks(), Simulators(env.unwrapped)
    clocks.time(raw, "step_async", "transport")
    clocks.time(venv, "step_wait", "transport")
    clocks.time(raw._pool, "_ready", "waiting")
    clocks.time(env.vla, "forward", "VLA")
    clocks.time(env.encoder, "forward", "encoder")
    models = {}
    for mode, frequency in MODES.items():
        settings = {"learning_starts": 2 * num_envs, "critic_warmup_updates": 0, "seed": 0, "train_freq": frequency}
        at_once = {"offset_search": {"opening": 0}}  # else the actor is not updated while the search opens
        models[mode] = RLT("MultiInputPolicy", venv, device=arguments.device, policy_kwargs=at_once, **settings)
        for method in ("train", "_sample_action", "_store_transition"):
            clocks.time(models[mode], method, "learner")
    found: dict[str, Any] = {}
    for turn in range(arguments.rounds + 1):
        for mode, model in models.items():
            model._last_obs = None  # new episodes: the other mode has played
            model.learn(4 * num_envs, reset_num_timesteps=False)  # not measured: the first pictures are slow
            before, simulators.seconds[:] = model.num_timesteps, 0.0
            workers = [processes.cpu_seconds(pid) for pid in raw.worker_pids]
            clocks.clear()
            start = Clocks._now()
            model.learn(10**9, callback=For(0.5 if turn == 0 else arguments.seconds), reset_num_timesteps=False)
            wall, cpu = Clocks._now() - start
            if turn == 0:  # warms up
                continue
            total = found.setdefault(mode, defaultdict(float))
            total["chunks"] += model.num_timesteps - before
            total["wall"] += wall
            total["main_cpu"] += cpu
            total["workers_cpu"] += sum(processes.cpu_seconds(pid) for pid in raw.worker_pids) - sum(workers)
            for part, seconds in clocks.stop().items():
                total[part] += seconds[0]
                total[f"{part}_cpu"] += seconds[1]
            for part, seconds in zip(SIMULATORS, simulators.seconds.T, strict=True):
                total[part] += seconds[0]
                total[f"{part}_cpu"] += seconds[1]
            total.setdefault("rates", []).append((model.num_timesteps - before) / wall)
    env.close()
    for mode, model in models.items():
        found[mode] = dict(found[mode]) | {"updates": model._n_updates, "episodes": model._episode_num}
    return found


def packed(row: dict[str, Any], num_envs: int, cores: int) -> float:
    """Ratio overlap / serial that the CPU times of the serial loop allow on this many free cores."""
    steps = row["chunks"] / num_envs
    learner, main = row["learner_cpu"] / steps, row["main_cpu"] / steps
    one = row["workers_cpu"] / row["chunks"]
    playing = max(one, num_envs * one / cores)
    both = max(one, learner, (num_envs * one + learner) / cores)
    return (playing + main) / (both + main - learner)


def report(num_envs: int, found: dict[str, dict[str, Any]]) -> None:
    """
    Print the rows of the first table; add what they show to the numbers.

    :param num_envs: number of environments
    :param found: mode -> seconds, of :func:`measure`
    """
    for mode, row in found.items():
        chunks, own = row["chunks"], sum(row[part] for part in SIMULATORS)
        parts = [row[part] for part in MAIN] + [row["waiting"] * row[part] / own for part in SIMULATORS]
        cells = [f"{1000 * seconds / chunks:.1f}" for seconds in parts]
        cpu = row["main_cpu"] + row["workers_cpu"]
        row |= {"chunks_per_second": chunks / row["wall"], "chunks_per_core_second": chunks / cpu}
        row["sum"] = sum(parts) / row["wall"]
        rate = f"{row['chunks_per_second']:.2f} | {row['chunks_per_core_second']:.2f} | {cpu / row['wall']:.2f}"
        print(f"| {num_envs} | {mode} | {rate} | {' | '.join(cells)} | {row['sum']:.1%} |", flush=True)


def report_head() -> None:
    """Print the head of the first table."""
    print("wall milliseconds of the main process per chunk; waiting is divided as the simulators' own time\n")
    print("| envs | mode | chunks/s | chunks per core-second | cores busy | " + " | ".join(MAIN), end="")
    print(" | waiting: physics | waiting: pictures | waiting: resets | sum |\n|" + "---|" * 13)


def report_cpu(results: dict[int, dict[str, dict[str, Any]]]) -> None:
    """
    Print the second table.

    :param results: environments -> mode -> seconds, of :func:`measure`
    """
    print("\nCPU milliseconds of all processes per chunk, and ratios overlap / serial\n")
    print("| envs | mode | " + " | ".join(SIMULATORS) + " | rest of workers | " + " | ".join(MAIN), end="")
    print(" | rest of main | ratio (lowest to highest) | packed, 2 cores | packed, free cores |\n|" + "---|" * 14)
    for num_envs, found in results.items():
        ratios = np.array(found["overlap"]["rates"]) / np.array(found["serial"]["rates"])
        for mode, row in found.items():
            simulators = [row[f"{part}_cpu"] for part in SIMULATORS]
            main_parts = [row[f"{part}_cpu"] for part in MAIN]
            seconds = [*simulators, row["workers_cpu"] - sum(simulators), *main_parts]
            seconds.append(row["main_cpu"] - sum(main_parts))
            cells = [f"{1000 * value / row['chunks']:.1f}" for value in seconds]
            if mode == "serial":
                cells += ["", *(f"{packed(row, num_envs, cores):.2f}" for cores in (2, num_envs + 1))]
            else:
                cells += [f"{np.median(ratios):.2f} ({ratios.min():.2f} to {ratios.max():.2f})", "", ""]
            print(f"| {num_envs} | {mode} | {' | '.join(cells)} |")


def read_results(path: Path, parser: argparse.ArgumentParser) -> dict[int, dict[str, dict[str, Any]]]:
    """
    Read the numbers of an earlier measurement, and say where they are from.

    :param path: what ``--json`` has written
    :param parser: ends the program if the file is something else
    :return: environments -> mode -> seconds, of :func:`measure`
    """
    try:
        numbers = json.loads(path.read_text())
        settings = argparse.Namespace(**numbers["arguments"])
        introduce(settings, numbers["cores"], numbers["load"])
        return {int(num_envs): found for num_envs, found in numbers["results"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        parser.error(f"--table must name a file that --json of this command has written, got {path}: {error!r}.")


def introduce(arguments: argparse.Namespace, cores: int, load: float) -> None:
    """
    Print what is measured.

    :param arguments: of the command line
    :param cores: of the machine
    :param load: of the machine at the beginning
    """
    print(f"{arguments.suite} {arguments.task}, {arguments.vla}, {cores} cores, load {load:.1f} at the beginning\n")


def measure_all(arguments: argparse.Namespace) -> dict[int, dict[str, dict[str, Any]]]:
    """
    Measure all numbers of environments, print both tables and write the numbers.

    :param arguments: of the command line
    :return: environments -> mode -> seconds, of :func:`measure`
    """
    sys.path.append(str(Path(__file__).resolve().parent / "backends"))
    torch.set_num_threads(arguments.threads)
    warnings.filterwarnings("ignore", "No actor has been on trial")
    load = os.getloadavg()[0]
    cores = len(os.sched_getaffinity(0))
    introduce(arguments, cores, load)
    report_head()
    results = {}
    for num_envs in arguments.envs:
        results[num_envs] = found = measure(num_envs, arguments)
        report(num_envs, found)
    report_cpu(results)
    write_json(arguments, cores=cores, load=load, results=results)
    return results


def main() -> None:
    """Measure and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 4, 8, 16])
    parser.add_argument("--seconds", type=float, default=6.0, help="of each mode in each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--suite", default="libero_spatial")
    parser.add_argument("--task", type=int, default=0)
    parser.add_argument("--vla", default="mini-spatial")
    parser.add_argument("--assets", default="embedded")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch in the main process")
    parser.add_argument("--json", default=None, help="file for the numbers")
    parser.add_argument("--table", default=None, help="file of numbers: measure nothing, print its tables")
    arguments = parser.parse_args()
    if arguments.table:
        results = read_results(Path(arguments.table), parser)
        report_head()
        for num_envs, found in results.items():
            report(num_envs, found)
        report_cpu(results)
    else:
        results = measure_all(arguments)
    off = [f"{n} {mode}" for n, found in results.items() for mode, row in found.items() if abs(row["sum"] - 1.0) > 0.05]
    if off:
        sys.exit(f"The parts do not add up to the wall time within 5 %: {', '.join(off)}.")


if __name__ == "__main__":
    main()
