"""Simulators that take turns, each in a process of its own: stock LIBERO's and ours."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from typing import Any

import numpy as np
import psutil
from processes import own_cpu_seconds

CHUNK = 8


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

    def parts(self, chunks: int) -> dict[str, float]:
        """Say where the time of some chunks goes, see :func:`simulator_parts.time_parts`."""
        from simulator_parts import time_parts

        return time_parts(self.simulator, np.random.default_rng(0).uniform(-1, 1, (chunks, CHUNK, 7)))


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
        start = own_cpu_seconds()
        competitor = {"Stock": Stock, "Ours": Ours, "Vector": Vector, "Pictures": Pictures}[kind](**settings)
        connection.send(("ok", own_cpu_seconds() - start))
        while True:
            command, arguments = connection.recv()
            before = own_cpu_seconds()
            value = getattr(competitor, command)(*arguments)
            connection.send(("ok", own_cpu_seconds() - before if value is None else value))
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


def row_of(what: str, seconds: dict[str, float]) -> dict[str, Any]:
    """Make a row of a table: milliseconds, and how many times as many stock needs."""
    row: dict[str, Any] = {"what": what}
    for name, value in seconds.items():
        row[f"{name}_ms"] = round(1e3 * value, 2)
        if name != "stock" and "stock" in seconds:
            row[f"{name}_ratio"] = round(seconds["stock"] / max(value, 1e-9), 1)
    return row
