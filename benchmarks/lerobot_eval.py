"""The evaluation of one LeRobot policy on LIBERO: ``lerobot-eval``'s own loop and simulators beside ``rlt eval --vla``.

    python benchmarks/lerobot_eval.py lerobot:FOLDER --suite libero_goal --tasks 1 6 --states 5 [--json FILE]

Both sides play the same initial states with pictures of the same size and kind, one simulator each, in processes of
their own that take turns task by task. LeRobot's side is ``lerobot.scripts.lerobot_eval.rollout`` with its own
``LiberoEnv`` and processors, whatever version is installed. Three things are set from outside, so that the states
are the same:

- the number of the initial state (LeRobot 0.4.4 resets the simulator a second time after a success, and so skips the
  state that would come next);
- the seed of the simulator, which places the fixtures: the one that this package uses for this state;
- the list from which LIBERO draws joints before it places the fixtures: LIBERO makes it longer at every reset, so that
  the places would depend on the number of resets before.

Compared are success and control steps of every state, and control steps per second of CPU time (user and system,
children included), less that of the policy with its processors, and without the start of the simulators.
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

import psutil

# This file bears the name of what it measures.
sys.path[:] = [
    entry for entry in sys.path if os.path.abspath(entry or ".") != os.path.dirname(os.path.abspath(__file__))
]


def cpu_seconds() -> float:
    """CPU time of this process (to the microsecond) and of its children (to 10 ms)."""
    total = time.process_time()
    for child in psutil.Process().children(recursive=True):
        times = child.cpu_times()
        total += times.user + times.system
    return total


class Clock:
    """CPU time of some calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Any) -> Any:
        """Return the function, whose calls are counted."""

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - start

        return call


class LeRobot:
    """``lerobot-eval``: its rollout, its simulator, its processors."""

    def __init__(self, args: argparse.Namespace):
        from rlt_gym.libero.assets.resolve import resolve_assets
        from rlt_gym.libero.worker.libero_import import prepare_libero

        prepare_libero(resolve_assets(args.assets).path)
        from lerobot.configs.policies import PreTrainedConfig
        from lerobot.envs.configs import LiberoEnv
        from lerobot.envs.factory import make_env_pre_post_processors
        from lerobot.policies.factory import get_policy_class, make_pre_post_processors

        self._args, self.clock = args, Clock()
        folder = args.policy.removeprefix("lerobot:")
        config = PreTrainedConfig.from_pretrained(folder)
        config.device = "cpu"
        if args.n_action_steps is not None:
            config.n_action_steps = args.n_action_steps
        self._config = config
        self._policy = get_policy_class(config.type).from_pretrained(folder, config=config, strict=True).eval()
        pre, post = make_pre_post_processors(
            config, folder, preprocessor_overrides={"device_processor": {"device": "cpu"}}
        )
        self._env_processors = make_env_pre_post_processors(env_cfg=LiberoEnv(), policy_cfg=config)
        self._policy.select_action = self.clock.timed(self._policy.select_action)
        self._pre, self._post = self.clock.timed(pre), self.clock.timed(post)

    @property
    def chunk_length(self) -> int:
        """How many steps of a chunk are played."""
        return int(self._config.n_action_steps)

    def play(self, task: int) -> list[tuple[bool, int]]:
        """Play the initial states of a task; return success and control steps of each."""
        import gymnasium as gym
        from lerobot.envs.libero import create_libero_envs
        from lerobot.scripts.lerobot_eval import rollout

        from rlt_gym.libero.suites.tasks import episode_seed, get_task

        size = self._args.image_size
        envs = create_libero_envs(
            self._args.suite,
            1,
            {"task_ids": [task], "obs_type": "pixels_agent_pos", "observation_width": size, "observation_height": size},
            env_cls=gym.vector.SyncVectorEnv,
            **({} if self._args.max_steps is None else {"episode_length": self._args.max_steps}),
        )
        env = envs[self._args.suite][task]
        seeds = [episode_seed(get_task(self._args.suite, task), "eval", state) for state in range(self._args.states)]
        outcomes = []
        self.started = cpu_seconds(), self.clock.seconds
        problem = env.envs[0].unwrapped._env.env
        initializers = problem.object_property_initializers
        initializers = initializers[: len(initializers) // 2]  # LIBERO has loaded its model twice by now
        for state, seed in enumerate(seeds):
            env.envs[0].unwrapped.init_state_id = state
            problem.object_property_initializers = list(initializers)
            data = rollout(env, self._policy, *self._env_processors, self._pre, self._post, seeds=[seed])
            outcomes.append((bool(data["success"].any()), int(data["action"].shape[1])))
        self.ended = cpu_seconds(), self.clock.seconds
        env.close()
        return outcomes


class Rlt:
    """``rlt eval --vla``: its loop and its simulators."""

    def __init__(self, args: argparse.Namespace):
        from rlt_gym.vla import load_vla

        self._args, self.clock = args, Clock()
        self._vla = load_vla(args.policy)
        self._vla.forward = self.clock.timed(self._vla.forward)  # type: ignore[method-assign]

    def play(self, task: int) -> list[tuple[bool, int]]:
        """Play the initial states of a task; return success and control steps of each."""
        import gymnasium as gym

        import rlt_gym  # noqa: F401
        from rlt_gym.libero.suites.protocols import get_protocol
        from rlt_gym.vla.rollouts import play_episodes

        horizon = self._args.max_steps or get_protocol("lerobot").horizons[self._args.suite]
        env = gym.make_vec(
            "LIBERO-v0", 1, suite=self._args.suite, task_ids=[task], image_size=self._args.image_size, render="exact",
            chunk_length=self._args.chunk_length, assets=self._args.assets, init_states="eval", seed=0,
            max_episode_steps=horizon,
        )  # fmt: skip
        episodes = play_episodes(self._vla, env, [(task, state) for state in range(self._args.states)])
        self.started = cpu_seconds(), self.clock.seconds
        outcomes = {episode.init_index: (episode.success, episode.steps) for episode in episodes}
        self.ended = cpu_seconds(), self.clock.seconds
        env.close()
        return [outcomes[state] for state in range(self._args.states)]


def serve(pipe: Any, side: type, args: argparse.Namespace) -> None:
    """Play the tasks that come through the pipe."""
    import torch

    torch.set_num_threads(1)
    try:
        player = side(args)
        pipe.send(getattr(player, "chunk_length", None))
        while (task := pipe.recv()) is not None:
            begun = cpu_seconds()
            outcomes = player.play(task)
            whole, policy = (player.ended[i] - player.started[i] for i in (0, 1))
            pipe.send({"outcomes": outcomes, "cpu": whole, "policy": policy, "start": player.started[0] - begun})
    except BaseException:
        pipe.send(traceback.format_exc())


class Side:
    """A process that plays one side."""

    def __init__(self, side: type, args: argparse.Namespace):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, side, args))
        self._process.start()
        self.ready = self._answer()

    def _answer(self) -> Any:
        answer = self._pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def play(self, task: int) -> dict[str, Any]:
        """Play a task."""
        self._pipe.send(task)
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._pipe.send(None)
        self._process.join()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", help="lerobot:FOLDER")
    parser.add_argument("--suite", default="libero_goal")
    parser.add_argument("--tasks", type=int, nargs="+", default=[0])
    parser.add_argument("--states", type=int, default=3, help="initial states per task")
    parser.add_argument("--image-size", type=int, default=256)
    parser.add_argument("--n-action-steps", type=int, help="control steps of a chunk that are played")
    parser.add_argument("--max-steps", type=int, help="horizon; by default LeRobot's")
    parser.add_argument("--assets", default="auto")
    parser.add_argument("--json", help="file to write")
    args = parser.parse_args()
    theirs = Side(LeRobot, args)
    args.chunk_length = theirs.ready
    ours = Side(Rlt, args)
    sums = {"lerobot-eval": [0, 0.0, 0.0, 0.0], "rlt eval": [0, 0.0, 0.0, 0.0]}
    rows = []
    for task in args.tasks:
        played = {"lerobot-eval": theirs.play(task), "rlt eval": ours.play(task)}
        for state in range(args.states):
            row = {"task": task, "state": state} | {name: side["outcomes"][state] for name, side in played.items()}
            rows.append(row)
            print(row, "" if row["lerobot-eval"] == row["rlt eval"] else "DIFFERENT", flush=True)
        for name, side in played.items():
            steps = sum(outcome[1] for outcome in side["outcomes"])
            for i, value in enumerate((steps, side["cpu"], side["policy"], side["start"])):
                sums[name][i] += value
    theirs.close()
    ours.close()
    result: dict[str, Any] = {
        "policy": os.path.basename(os.path.normpath(args.policy)),
        "settings": {key: value for key, value in vars(args).items() if key not in ("policy", "json")},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "equal_success": sum(row["lerobot-eval"][0] == row["rlt eval"][0] for row in rows),
        "equal_steps": sum(row["lerobot-eval"] == row["rlt eval"] for row in rows),
        "states": len(rows),
        "rows": rows,
    }
    for name, (steps, cpu, policy, start) in sums.items():
        speed = steps / (cpu - policy)
        result[name] = {"control_steps": steps, "cpu": cpu, "policy_cpu": policy, "start_cpu": start, "speed": speed}
        print(
            f"{name:<14} {steps} control steps, {cpu:.1f} s of CPU, of which {policy:.1f} s policy: {speed:.1f} steps "
            f"per core-second without it (start of the simulators: {start:.1f} s more)"
        )
    result["ratio"] = result["rlt eval"]["speed"] / result["lerobot-eval"]["speed"]
    print(f"equal success: {result['equal_success']}/{len(rows)}, equal in control steps: {result['equal_steps']}")
    print(f"ratio: {result['ratio']:.1f}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    main()
