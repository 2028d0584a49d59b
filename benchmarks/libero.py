"""CPU time of LIBERO workers against stock LIBERO, interleaved in the same run.

    python benchmarks/libero.py [--parts step,reset,physics,workers,vector,pixels] [--rounds 3] [--json FILE]

Stock is LIBERO's own ``OffScreenRenderEnv`` (hard resets, both cameras drawn at every control step). Every competitor
is a separate process; they take turns chunk by chunk, so that whatever else the machine does hits all of them alike.
Only CPU time (user and system, children included) is compared. Ratios are stock / other: above 1 is faster.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import time
import traceback
from typing import Any

import numpy as np
import psutil

# This file bears the name of the package that it measures.
sys.path[:] = [
    entry for entry in sys.path if os.path.abspath(entry or ".") != os.path.dirname(os.path.abspath(__file__))
]

CHUNK = 8
TASKS = [("libero_goal", 0), ("libero_object", 1), ("libero_10", 3)]


def cpu_seconds() -> float:
    """CPU time of this process (to the microsecond) and of its children (to 10 ms)."""
    total = time.process_time()
    for child in psutil.Process().children(recursive=True):
        times = child.cpu_times()
        total += times.user + times.system
    return total


# ---------------------------------------------------------------- competitors: each lives in a separate process


class Stock:
    """Stock LIBERO; without ``pictures`` it has no cameras at all."""

    def __init__(self, suite: str, task: int, assets: str, pictures: bool = True):
        from rlt_gym.libero.assets import resolve_assets
        from rlt_gym.libero.suites.tasks import get_task, load_init_states
        from rlt_gym.libero.worker.libero_import import prepare_libero

        prepare_libero(resolve_assets(assets).path)
        from libero.libero.envs import OffScreenRenderEnv
        from libero.libero.envs.env_wrapper import ControlEnv

        self._task = get_task(suite, task)
        self._states = load_init_states(self._task)
        settings: dict[str, Any] = {"camera_heights": 128, "camera_widths": 128}
        if pictures:
            self.env = OffScreenRenderEnv(bddl_file_name=str(self._task.bddl_file), **settings)
        else:
            settings.update(has_offscreen_renderer=False, use_camera_obs=False)
            self.env = ControlEnv(bddl_file_name=str(self._task.bddl_file), **settings)

    def reset(self) -> None:
        """Restore the first initial state."""
        np.random.seed(0)
        self.env.reset()
        self.env.set_init_state(self._states[0])

    def episode(self) -> None:
        """Begin an episode as LIBERO's evaluation does, with ten steps to settle."""
        self.reset()
        for _ in range(10):
            self.env.step([0, 0, 0, 0, 0, 0, -1])

    def chunk(self, actions: np.ndarray) -> None:
        """Play a chunk."""
        for action in actions:
            self.env.step(action)


class Ours:
    """Our simulator in this process."""

    def __init__(self, suite: str, task: int, assets: str, render: str = "exact", pictures: bool = True):
        from rlt_gym.libero.assets import resolve_assets
        from rlt_gym.libero.worker.libero_import import prepare_libero

        prepare_libero(resolve_assets(assets).path)
        from rlt_gym.libero.worker.simulator import LiberoSimulator

        self.simulator = LiberoSimulator(suite, task, 128, render)
        self._pictures = pictures
        self.simulator.reset("eval", 0, observe=pictures)

    def reset(self) -> None:
        """Restore the first initial state."""
        self.simulator.restart("eval", 0)

    def episode(self) -> None:
        """Begin an episode."""
        self.simulator.reset("eval", 0)

    def chunk(self, actions: np.ndarray) -> None:
        """Play a chunk."""
        self.simulator.step_chunk(actions, observe=self._pictures)


class Pictures:
    """The same states drawn exact and fast."""

    def __init__(self, suite: str, task: int, assets: str):
        self._ours = Ours(suite, task, assets, pictures=False)

    def differences(self) -> dict[str, float]:
        """Mean absolute difference (of 255) of the two kinds of pictures, by camera."""
        from rlt_gym.libero.rendering.renderer import CAMERAS, Renderer

        simulator, rng = self._ours.simulator, np.random.default_rng(0)
        samples = []
        for _ in range(3):
            actions = rng.uniform(-1, 1, (CHUNK, 7)) - [0, 0, 0.3, 0, 0, 0, 0]
            simulator.step_chunk(np.clip(actions, -1, 1), observe=False)
            samples.append({name: value.copy() for name, value in simulator._sample.items()})
        drawn = []
        for quality in ("exact", "fast"):
            renderer = Renderer(simulator.model, 128, quality)
            drawn.append({c: [renderer.render(s, name).astype(int) for s in samples] for c, name in CAMERAS.items()})
            renderer.close()
        return {c: float(np.abs(np.array(drawn[0][c]) - np.array(drawn[1][c])).mean()) for c in CAMERAS}


class Vector:
    """A vector environment of ``number`` simulators: ours, LIBERO's own or Gymnasium's around stock LIBERO."""

    def __init__(self, kind: str, suite: str, task: int, assets: str, number: int, render: str = "exact"):
        self._kind, self._number = kind, number
        if kind == "ours":
            from rlt_gym.libero.vector_env import LiberoVectorEnv

            self.env: Any = LiberoVectorEnv(number, suite, [task], CHUNK, assets, "eval", render=render)
            self.env.reset()
            return
        makers = [lambda: StockAsGymnasium(suite, task, assets) for _ in range(number)]
        if kind == "subproc":
            from rlt_gym.libero.assets import resolve_assets
            from rlt_gym.libero.worker.libero_import import prepare_libero

            prepare_libero(resolve_assets(assets).path)
            from libero.libero.envs.venv import SubprocVectorEnv

            self.env = SubprocVectorEnv([lambda: Stock(suite, task, assets).env for _ in range(number)])
        else:
            from gymnasium.vector import AsyncVectorEnv

            self.env = AsyncVectorEnv(makers)
        self.env.reset()

    def reset(self) -> None:
        """Begin new episodes."""
        self.env.reset()

    def chunk(self, actions: np.ndarray) -> None:
        """Play a chunk in every environment."""
        if self._kind == "ours":
            self.env.step(np.repeat(actions[None], self._number, axis=0))
        else:
            for action in actions:
                self.env.step(np.repeat(action[None], self._number, axis=0))

    def memory(self) -> list[float]:
        """PSS of each child in MB: memory shared by n processes counts 1/n in each."""
        return [p.memory_full_info().pss / 1e6 for p in psutil.Process().children(recursive=True)]


def StockAsGymnasium(suite: str, task: int, assets: str) -> Any:  # a class that needs its imports late
    """Make a Gymnasium environment of stock LIBERO."""
    import gymnasium

    class Env(gymnasium.Env):
        observation_space = gymnasium.spaces.Dict(
            {key: gymnasium.spaces.Box(0, 255, (128, 128, 3), np.uint8) for key in ("agentview", "wrist")}
        )
        action_space = gymnasium.spaces.Box(-1, 1, (7,), np.float32)

        def __init__(self) -> None:
            self._stock = Stock(suite, task, assets)

        def _observation(self, raw: dict) -> dict:
            return {"agentview": raw["agentview_image"], "wrist": raw["robot0_eye_in_hand_image"]}

        def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
            return self._observation(self._stock.env.reset()), {}

        def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
            raw, reward, done, _ = self._stock.env.step(action)
            return self._observation(raw), reward, bool(done), False, {}

    return Env()


def _serve(connection: Any, kind: str, settings: dict[str, Any]) -> None:
    try:
        start = cpu_seconds()
        competitor = {"Stock": Stock, "Ours": Ours, "Vector": Vector, "Pictures": Pictures}[kind](**settings)
        connection.send(("ok", cpu_seconds() - start))
        while True:
            command, arguments = connection.recv()
            before = cpu_seconds()
            value = getattr(competitor, command)(*arguments)
            connection.send(("ok", cpu_seconds() - before if value is None else value))
    except EOFError:
        pass
    except BaseException:
        connection.send(("error", traceback.format_exc()))
    finally:
        sys.stdout.flush()
        for child in psutil.Process().children(recursive=True):
            child.kill()
        os._exit(0)  # GL libraries raise in their destructors


class Competitor:
    """The parent's end of one competitor."""

    def __init__(self, what: str, /, **settings: Any):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, what, settings))
        self._process.start()
        theirs.close()
        self.start = self._receive()

    def _receive(self) -> Any:
        status, value = self._connection.recv()
        if status == "error":
            raise RuntimeError(value)
        return value

    def call(self, command: str, *arguments: Any) -> Any:
        """Call a method of the competitor and wait for its answer."""
        self._connection.send((command, arguments))
        return self._receive()

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()


def race(competitors: dict[str, Competitor], command: str, rounds: int, per_round: int = 1) -> dict[str, float]:
    """
    Time the competitors in turns.

    :return: CPU seconds per call of each, after one call to warm up.
    """
    rng = np.random.default_rng(0)
    totals = dict.fromkeys(competitors, 0.0)
    for number in range(rounds + 1):
        actions = rng.uniform(-1, 1, (per_round, CHUNK, 7))
        for name, competitor in competitors.items():
            for chunk in actions:
                used = competitor.call(command, *([chunk] if command == "chunk" else []))
                totals[name] += used if number else 0.0
    return {name: total / (rounds * per_round) for name, total in totals.items()}


# ---------------------------------------------------------------- parts


def started(**settings: tuple[str, dict[str, Any]]) -> dict[str, Competitor]:
    """Start competitors; one whose task the embedded assets do not carry is left out."""
    found = {}
    for name, (kind, arguments) in settings.items():
        try:
            found[name] = Competitor(kind, **arguments)
        except RuntimeError as error:
            if arguments["assets"] != "embedded":
                raise
            print(f"  {name} left out: {str(error).strip().splitlines()[-1][:150]}", file=sys.stderr)
    return found


def bench_step(rounds: int) -> list[dict[str, Any]]:
    """One control step of a chunk of 8, two cameras of 128 pixels."""
    rows = []
    for suite, task in TASKS:
        where = {"suite": suite, "task": task}
        competitors = started(
            stock=("Stock", {**where, "assets": "official"}),
            exact=("Ours", {**where, "assets": "official"}),
            fast=("Ours", {**where, "assets": "official", "render": "fast"}),
            embedded_exact=("Ours", {**where, "assets": "embedded"}),
            embedded_fast=("Ours", {**where, "assets": "embedded", "render": "fast"}),
        )
        for competitor in competitors.values():
            competitor.call("reset")
        seconds = race(competitors, "chunk", rounds)
        rows.append(_row(f"{suite} {task}", {name: value / CHUNK for name, value in seconds.items()}))
        for competitor in competitors.values():
            competitor.close()
    return rows


def bench_physics(rounds: int) -> list[dict[str, Any]]:
    """One control step without pictures."""
    where = {"suite": "libero_goal", "task": 0, "assets": "official", "pictures": False}
    competitors = started(stock=("Stock", where), exact=("Ours", where))
    for competitor in competitors.values():
        competitor.call("reset")
    seconds = race(competitors, "chunk", rounds, per_round=3)
    for competitor in competitors.values():
        competitor.close()
    return [_row("libero_goal 0", {name: value / CHUNK for name, value in seconds.items()})]


def bench_reset(rounds: int) -> list[dict[str, Any]]:
    """``reset()`` and ``set_init_state()``; the same with ten settling steps and the first two pictures."""
    where = {"suite": "libero_goal", "task": 0, "assets": "official"}
    competitors = started(stock=("Stock", where), exact=("Ours", where))
    rows = [
        _row(f"libero_goal 0, {what}", race(competitors, command, max(2, rounds - 1)))
        for command, what in (("reset", "reset"), ("episode", "with 10 steps and pictures"))
    ]
    for competitor in competitors.values():
        competitor.close()
    return rows


def bench_workers(rounds: int) -> list[dict[str, Any]]:
    """Start and memory of four workers on embedded assets; one control step with one and with two workers."""
    where = {"kind": "ours", "suite": "libero_goal", "task": 1, "assets": "embedded", "render": "fast"}
    four = Competitor("Vector", **where, number=4)
    four.call("chunk", np.zeros((CHUNK, 7)))
    memory = four.call("memory")
    workers = sorted(memory)[-4:]
    row: dict[str, Any] = {
        "what": "4 workers, embedded, fast",
        "cpu_s_to_ready_each": round(four.start / 4, 2),
        "pss_mb_each": round(float(np.mean(workers)), 0),
    }
    four.close()
    competitors = started(one=("Vector", {**where, "number": 1}), two=("Vector", {**where, "number": 2}))
    seconds = race(competitors, "chunk", rounds, per_round=6)
    for competitor in competitors.values():
        competitor.close()
    row["ms_per_step_one_worker"] = round(1e3 * seconds["one"] / CHUNK, 2)
    row["ms_per_step_two_workers"] = round(1e3 * seconds["two"] / CHUNK / 2, 2)
    return [row]


def bench_vector(rounds: int) -> list[dict[str, Any]]:
    """Measure two simulators in separate processes, per control step and simulator."""
    where = {"suite": "libero_goal", "task": 0, "assets": "official", "number": 2}
    competitors = started(
        stock=("Vector", {**where, "kind": "subproc"}),
        gymnasium_async=("Vector", {**where, "kind": "async"}),
        exact=("Vector", {**where, "kind": "ours"}),
        fast=("Vector", {**where, "kind": "ours", "render": "fast"}),
    )
    seconds = race(competitors, "chunk", max(2, rounds - 1))
    for competitor in competitors.values():
        competitor.close()
    return [_row("2 x libero_goal 0", {name: value / CHUNK / 2 for name, value in seconds.items()})]


def bench_pixels(rounds: int) -> list[dict[str, Any]]:
    """Mean absolute difference of fast from exact pictures, of 255."""
    rows = []
    for suite, task in TASKS:
        for assets in ("official", "embedded"):
            found = started(pictures=("Pictures", {"suite": suite, "task": task, "assets": assets}))
            for competitor in found.values():
                differences = {c: round(value, 2) for c, value in competitor.call("differences").items()}
                rows.append({"what": f"{suite} {task}", "assets": assets, **differences})
                competitor.close()
    return rows


def _row(what: str, seconds: dict[str, float]) -> dict[str, Any]:
    row: dict[str, Any] = {"what": what}
    for name, value in seconds.items():
        row[f"{name}_ms"] = round(1e3 * value, 2)
        if name != "stock" and "stock" in seconds:
            row[f"{name}_ratio"] = round(seconds["stock"] / max(value, 1e-9), 1)
    return row


PARTS = {
    "step": bench_step,
    "physics": bench_physics,
    "reset": bench_reset,
    "workers": bench_workers,
    "vector": bench_vector,
    "pixels": bench_pixels,
}


def main() -> None:
    """Run the parts and print their reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write (or update) results here")
    args = parser.parse_args()
    unknown = set(args.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts {sorted(unknown)}; known: {', '.join(PARTS)}")
    import mujoco

    for part in args.parts.split(","):
        function = PARTS[part]
        rows = function(args.rounds)
        print(f"\n## {part}: {(function.__doc__ or '').strip()}\n")
        columns = list(dict.fromkeys(key for row in rows for key in row))
        print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
        for row in rows:
            print("| " + " | ".join(str(row.get(column, "")) for column in columns) + " |", flush=True)
        if args.json:
            from pathlib import Path

            from rlt_gym.core.files import write_json

            path = Path(args.json)
            content = json.loads(path.read_text()) if path.exists() else {}
            content["machine"] = {
                "cpus": os.cpu_count(),
                "processor": platform.processor() or platform.machine(),
                "python": platform.python_version(),
                "mujoco": mujoco.__version__,
                "gl": os.environ.get("MUJOCO_GL", ""),
            }
            content[part] = {"rounds": args.rounds, "load": os.getloadavg()[0], "rows": rows}
            write_json(path, content)


if __name__ == "__main__":
    main()
