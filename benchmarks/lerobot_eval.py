"""The evaluation of one LeRobot policy on LIBERO: ``lerobot-eval``'s own loop and simulators beside ``rlt eval --vla``.

    python benchmarks/lerobot_eval.py lerobot:FOLDER --suite libero_goal --tasks 1 6 --states 5 [--json FILE]

Both sides play the same initial states with pictures of the same size and kind, one simulator each, in processes of
their own that take turns state by state. LeRobot's side is ``lerobot.scripts.lerobot_eval.rollout`` with its own
``LiberoEnv`` and processors, whatever version is installed. Four things are set from outside, so that the states and
the noise are the same:

- the number of the initial state (LeRobot 0.4.4 resets the simulator a second time after a success, and so skips the
  state that would come next);
- the seed of the simulator, which places the fixtures: the one that this package uses for this state;
- the list from which LIBERO draws joints before it places the fixtures: LIBERO makes it longer at every reset, so that
  the places would depend on the number of resets before;
- the noise of a SmolVLA, which LeRobot draws from torch's generator: that of ``rlt eval --vla`` at the same step.

Compared are success, control steps, actions, and the final observation of every state; and control steps per second of
CPU time (user and system, children included) less that of the policy with its processors, both without and with the
start of the simulators. States that do not end alike are played by LeRobot's side once more, with the gripper's
axis-angle calculated in double precision as robosuite and this package do it (LeRobot: float32): the one known
difference between both sides.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import time
import traceback
from typing import Any

import numpy as np
from processes import own_cpu_seconds


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


class Recorder:
    """Keeps the actions and the last observation of an episode: references, no copies."""

    def __init__(self) -> None:
        self.actions: list[np.ndarray] = []
        self.last: dict[str, Any] = {}


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

        from rlt_gym.vla.lerobot.checkpoint import find_backbone, find_checkpoint

        self._args, self.clock, self._recorder = args, Clock(), Recorder()
        folder = find_checkpoint(args.policy.removeprefix("lerobot:"))
        config = PreTrainedConfig.from_pretrained(folder)
        config.device = "cpu"
        if args.n_action_steps is not None:
            config.n_action_steps = args.n_action_steps
        overrides: dict[str, Any] = {"device_processor": {"device": "cpu"}}
        if hasattr(config, "vlm_model_name"):
            config.vlm_model_name = find_backbone(folder, config.vlm_model_name, None)
            overrides["tokenizer_processor"] = {"tokenizer_name": config.vlm_model_name}
        self._config = config
        self._policy = get_policy_class(config.type).from_pretrained(folder, config=config, strict=True).eval()
        pre, post = make_pre_post_processors(config, str(folder), preprocessor_overrides=overrides)
        self._env_processors = make_env_pre_post_processors(env_cfg=LiberoEnv(), policy_cfg=config)
        if config.type == "smolvla":
            self._policy.select_action = self._with_noise(self._policy.select_action)
        elif config.type != "act":
            raise ValueError(f"the noise of a {config.type} policy cannot be set; measured are act and smolvla")
        self._policy.select_action = self.clock.timed(self._policy.select_action)
        self._pre, self._post = self.clock.timed(pre), self.clock.timed(post)

    def _with_noise(self, method: Any) -> Any:
        """Hand in the noise that the adapter ``lerobot:`` draws for this control step."""
        import torch

        from rlt_gym.vla.base import forward_seed

        shape = (1, self._config.chunk_size, self._config.max_action_dim)

        def select(batch: Any) -> Any:
            seed = forward_seed(self._noise_seed, len(self._recorder.actions))
            return method(batch, noise=torch.randn(shape, generator=torch.Generator().manual_seed(seed)))

        return select

    @property
    def chunk_length(self) -> int:
        """How many steps of a chunk are played."""
        return int(self._config.n_action_steps)

    def start(self, task: int) -> None:
        """Make the simulator of a task."""
        import gymnasium as gym
        from lerobot.envs.libero import create_libero_envs

        self.close()
        size = self._args.image_size
        envs = create_libero_envs(
            self._args.suite,
            1,
            {"task_ids": [task], "obs_type": "pixels_agent_pos", "observation_width": size, "observation_height": size},
            env_cls=gym.vector.SyncVectorEnv,
            **({} if self._args.max_steps is None else {"episode_length": self._args.max_steps}),
        )
        self._env, self._task = envs[self._args.suite][task], task
        self._libero = self._env.envs[0].unwrapped
        initializers = self._libero._env.env.object_property_initializers
        self._initializers = initializers[: len(initializers) // 2]  # LIBERO has loaded its model twice by now
        step = self._libero.step

        def recorded(action: np.ndarray) -> Any:
            answer = step(action)
            self._recorder.actions.append(action)
            self._recorder.last = answer[0]
            return answer

        self._libero.step = recorded

    def play(self, state: int, double: bool = False) -> dict[str, Any]:
        """Play an initial state; with ``double``, angles are calculated in double precision."""
        from lerobot.processor.env_processor import LiberoProcessorStep
        from lerobot.scripts.lerobot_eval import rollout

        from rlt_gym.core.episodes import Episode, EpisodeSequence
        from rlt_gym.libero.suites.tasks import episode_seed, get_task

        seed = episode_seed(get_task(self._args.suite, self._task), "eval", state)
        self._noise_seed = EpisodeSequence(1, 1, "eval", 0).noise_seed(Episode(0, 0, state), self._task)
        self._recorder.actions, self._recorder.last = [], {}
        self._libero.init_state_id = state
        self._libero._env.env.object_property_initializers = list(self._initializers)
        own = LiberoProcessorStep._quat2axisangle
        if double:
            LiberoProcessorStep._quat2axisangle = _double_angles
        try:
            data = rollout(self._env, self._policy, *self._env_processors, self._pre, self._post, seeds=[seed])
        finally:
            LiberoProcessorStep._quat2axisangle = own
        last = self._recorder.last
        robot, pictures = last["robot_state"], last["pixels"]
        proprio = (robot["eef"]["pos"], _axis_angle(robot["eef"]["quat"]), robot["gripper"]["qpos"])
        return {
            "outcome": (bool(data["success"].any()), int(data["action"].shape[1])),
            "actions": np.array(data["action"][0], dtype=np.float32),
            "pictures": np.stack([pictures["image"], pictures["image2"]]),
            "proprio": np.concatenate(proprio).astype(np.float32),
        }

    def close(self) -> None:
        """Close the simulator, if there is one."""
        if hasattr(self, "_env"):
            self._env.close()


def _axis_angle(quaternion: np.ndarray) -> np.ndarray:
    from robosuite.utils import transform_utils

    return transform_utils.quat2axisangle(np.array(quaternion))


def _double_angles(self: Any, quaternions: Any) -> Any:
    import torch

    return torch.from_numpy(np.stack([_axis_angle(quaternion) for quaternion in quaternions.numpy()]))


class Rlt:
    """``rlt eval --vla``: its loop and its simulators, one vector environment for all tasks."""

    def __init__(self, args: argparse.Namespace):
        from rlt_gym.vla import load_vla

        self._args, self.clock, self._recorder = args, Clock(), Recorder()
        self._env: Any = None
        self._vla = load_vla(args.policy)
        self._vla.forward = self.clock.timed(self._vla.forward)  # type: ignore[method-assign]

    def start(self, task: int) -> None:
        """Make the simulator of a task."""
        import gymnasium as gym

        import rlt_gym  # noqa: F401
        from rlt_gym.libero.suites.protocols import get_protocol

        self._task = task
        if self._env is None:
            self._env = gym.make_vec(
                "LIBERO-v0", 1, suite=self._args.suite, task_ids=self._args.tasks, image_size=self._args.image_size,
                render="exact", chunk_length=self._args.chunk_length, assets=self._args.assets, init_states="eval",
                seed=0, max_episode_steps=self._args.max_steps or get_protocol("lerobot").horizons[self._args.suite],
            )  # fmt: skip
            step = self._env.step

            def recorded(actions: np.ndarray) -> Any:
                answer = step(actions)
                self._recorder.actions.append(actions[0])
                self._recorder.last = answer[4]
                return answer

            self._env.step = recorded
        self._env.reset(options={"init_states": "eval", "episodes": [(task, 0)]})

    def play(self, state: int) -> dict[str, Any]:
        """Play an initial state."""
        from rlt_gym.vla.rollouts import play_episodes

        self._recorder.actions = []
        (episode,) = play_episodes(self._vla, self._env, [(self._task, state)])
        last = self._recorder.last["final_obs"][0]
        return {
            "outcome": (episode.success, episode.steps),
            "actions": np.concatenate(self._recorder.actions)[: episode.steps],
            "pictures": np.stack([last["agentview"], last["wrist"]]),
            "proprio": last["proprio"],
        }

    def close(self) -> None:
        """Close the simulators."""
        if self._env is not None:
            self._env.close()


def serve(pipe: Any, side: type, args: argparse.Namespace) -> None:
    """Call the methods that come through the pipe, and measure them."""
    import torch

    torch.set_num_threads(1)
    try:
        player = side(args)
        pipe.send(getattr(player, "chunk_length", None))
        while (call := pipe.recv()) is not None:
            method, arguments = call
            cpu, policy = own_cpu_seconds(), player.clock.seconds
            answer = getattr(player, method)(*arguments)
            pipe.send({"answer": answer, "cpu": own_cpu_seconds() - cpu, "policy": player.clock.seconds - policy})
        player.close()
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

    def call(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Call a method of the side; return its answer and the CPU time of all and of the policy."""
        self._pipe.send((method, arguments))
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._pipe.send(None)
        self._process.join()


def compare(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """How far two episodes from the same initial state are the same."""
    both = min(len(theirs["actions"]), len(ours["actions"]))
    apart = np.abs(theirs["actions"][:both].clip(-1, 1) - ours["actions"][:both]).max(axis=1)
    row: dict[str, Any] = {name: list(side["outcome"]) for name, side in (("lerobot-eval", theirs), ("rlt eval", ours))}
    row["largest_difference_of_actions"] = float(apart.max())
    row["final_observation"] = None  # after different numbers of steps there is nothing to compare
    if theirs["outcome"] == ours["outcome"]:
        pictures = np.abs(theirs["pictures"].astype(int) - ours["pictures"].astype(int))
        row["final_observation"] = {
            "share_of_other_pixels": float((pictures.max(axis=-1) > 0).mean()),
            "largest_difference_of_state": float(np.abs(theirs["proprio"] - ours["proprio"]).max()),
        }
    return row


def speeds(measured: dict[str, dict[str, float]]) -> dict[str, Any]:
    """
    Add control steps per core-second, and the ratios.

    :param measured: Of each side ``control_steps``, ``cpu`` (policy included), ``policy_cpu`` and ``start_cpu``.
    """
    result: dict[str, Any] = {}
    for name, side in measured.items():
        simulation = side["cpu"] - side["policy_cpu"]
        result[name] = side | {
            "speed": side["control_steps"] / simulation,
            "speed_with_start": side["control_steps"] / (simulation + side["start_cpu"]),
        }
    theirs, ours = result["lerobot-eval"], result["rlt eval"]
    result["ratio"] = ours["speed"] / theirs["speed"]
    result["ratio_with_start"] = ours["speed_with_start"] / theirs["speed_with_start"]
    return result


def summary(args: argparse.Namespace, rows: list[dict[str, Any]], measured: dict[str, Any]) -> dict[str, Any]:
    """Sum up what is known after some states."""
    sides = ("lerobot-eval", "rlt eval")
    return {
        "policy": os.path.basename(os.path.normpath(args.policy)),
        "settings": {key: value for key, value in vars(args).items() if key not in ("policy", "json", "name")},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "states": len(rows),
        "successes": {name: sum(row[name][0] for row in rows) for name in sides},
        "equal_success": sum(row[sides[0]][0] == row[sides[1]][0] for row in rows),
        "equal_steps": sum(row[sides[0]] == row[sides[1]] for row in rows),
        "rows": rows,
        **speeds(measured),
    }


def write(path: str, name: str, result: dict[str, Any]) -> None:
    """Write an entry of a file, and keep the others."""
    entries = {}
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            entries = json.load(file)
    entries[name] = result
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(entries, file, indent=1)
        file.write("\n")
    os.replace(path + ".new", path)


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
    parser.add_argument("--json", help="file to write; it keeps the entries of other names")
    parser.add_argument("--name", help="name of this entry; by default the policy's folder")
    args = parser.parse_args()
    theirs = Side(LeRobot, args)
    args.chunk_length = theirs.ready
    sides = {"lerobot-eval": theirs, "rlt eval": Side(Rlt, args)}
    names = ("control_steps", "cpu", "policy_cpu", "start_cpu")
    measured = {name: dict.fromkeys(names, 0.0) for name in sides}
    rows = []
    for task in args.tasks:
        for name, side in sides.items():
            measured[name]["start_cpu"] += side.call("start", task)["cpu"]
        for state in range(args.states):
            played = {name: side.call("play", state) for name, side in sides.items()}
            for name, call in played.items():
                values = (call["answer"]["outcome"][1], call["cpu"], call["policy"])
                for key, value in zip(names, values, strict=False):
                    measured[name][key] += value
            answers = [played[name]["answer"] for name in sides]
            row = {"task": task, "state": state} | compare(*answers)
            if answers[0]["outcome"] != answers[1]["outcome"]:
                row["with_double_angles"] = compare(theirs.call("play", state, True)["answer"], answers[1])
            rows.append(row)
            print(row, flush=True)
            result = summary(args, rows, measured)
            if args.json:
                write(args.json, args.name or result["policy"], result)
    for side in sides.values():
        side.close()
    for name in sides:
        side = result[name]
        print(
            f"{name:<14} {side['control_steps']:.0f} control steps, {side['cpu']:.1f} s of CPU, of which "
            f"{side['policy_cpu']:.1f} s policy: {side['speed']:.1f} steps per core-second without it; "
            f"{side['speed_with_start']:.1f} with the start of the simulators ({side['start_cpu']:.1f} s)"
        )
    print(f"equal success: {result['equal_success']}/{len(rows)}, equal in control steps: {result['equal_steps']}")
    print(f"ratio: {result['ratio']:.1f}, with the start of the simulators {result['ratio_with_start']:.1f}")


if __name__ == "__main__":
    main()
