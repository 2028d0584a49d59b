"""Our simulator against LIBERO's OffScreenRenderEnv, bit for bit; run by test_exact.py in a separate process.

python tests/helpers/compare_with_stock.py SUITE TASK [--assets official] [--episodes 2] [--steps 300] [--expert]
"""

import argparse
import json
import os
import sys

import numpy as np

from rlt_gym.libero.assets import resolve_assets
from rlt_gym.libero.suites.tasks import SUITE_HORIZONS, episode_seed, get_task, load_init_states
from rlt_gym.libero.worker.libero_import import prepare_libero

CHUNK = 8


def walk(steps: int, episode: int) -> np.ndarray:
    """A smooth random walk that sinks, so that the hand meets things and pushes them; some steps without rotation."""
    rng = np.random.default_rng(episode)
    slow = np.repeat(rng.uniform(-1, 1, (steps // 12 + 1, 7)), 12, axis=0)[:steps]
    actions = 0.6 * slow + 0.4 * rng.uniform(-1, 1, (steps, 7))
    actions[:, 2] -= 0.35
    actions[40::60, 2] = 1.0
    actions[::7, 3:6] = 0.0
    return np.clip(actions, -1, 1)


def proprio_of(raw) -> np.ndarray:
    import robosuite.utils.transform_utils as T

    orientation = T.quat2axisangle(raw["robot0_eef_quat"])
    return np.concatenate([raw["robot0_eef_pos"], orientation, raw["robot0_gripper_qpos"]]).astype(np.float32)


def rng_state() -> tuple:
    return tuple(np.array(part).tobytes() for part in np.random.get_state())


def play_ours(ours, init: int, steps: int, episode: int, expert: bool) -> dict:
    """One episode through LiberoSimulator, all of it recorded. An expert chooses its actions as it goes."""
    record: dict = {"actions": [], "states": [], "rewards": [], "observations": [], "rng": []}
    ours.reset("eval", init)
    if expert:
        from rlt_gym.libero.experts.scripted import ScriptedExpert

        player = ScriptedExpert(ours.problem)
        player.reset(np.random.default_rng(episode))
    plan = None if expert else walk(steps, episode)
    for step in range(steps):
        action = player.act() if plan is None else plan[step]
        result = ours.step_chunk(action[None], observe=False)
        record["actions"].append(action)
        record["states"].append(np.concatenate([ours.data.qpos, ours.data.qvel]))
        record["rewards"].append(result.step_rewards[0])
        last = expert and result.success
        if step % CHUNK == CHUNK - 1 or last:
            record["observations"].append((step, ours.observe()))
            record["rng"].append(rng_state())
        if last:
            break
    record["success"] = bool(record["rewards"][-1])
    return record


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("suite")
    parser.add_argument("task", type=int)
    parser.add_argument("--assets", default="embedded")
    parser.add_argument("--episodes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--expert", action="store_true", help="the last episode is the scripted expert's")
    args = parser.parse_args()
    prepare_libero(resolve_assets(args.assets).path)
    from libero.libero.envs import OffScreenRenderEnv

    from rlt_gym.libero.worker.simulator import SETTLE_ACTION, SETTLE_STEPS, LiberoSimulator

    task = get_task(args.suite, args.task)
    ours = LiberoSimulator(args.suite, args.task, image_size=128, render="exact")
    assert ours.compiled
    records = []
    for episode in range(args.episodes):  # all on one simulator: a soft reset must not remember the episode before
        expert = args.expert and episode == args.episodes - 1
        steps = SUITE_HORIZONS[args.suite] if expert else args.steps
        records.append(play_ours(ours, 3 + episode, steps, episode, expert))
    ours.close()

    largest, moved, steps = 0.0, 0.0, 0
    for episode, record in enumerate(records):
        # A new environment per episode: each hard reset of one and the same draws more random numbers than the last.
        stock = OffScreenRenderEnv(bddl_file_name=str(task.bddl_file), camera_heights=128, camera_widths=128)
        np.random.seed(episode_seed(task, "eval", 3 + episode))
        stock.reset()
        stock.set_init_state(load_init_states(task)[3 + episode])
        for _ in range(SETTLE_STEPS):
            stock.step(SETTLE_ACTION.tolist())
        start = np.concatenate([stock.sim.data.qpos, stock.sim.data.qvel])
        observations = dict(record["observations"])
        rng_states = iter(record["rng"])
        for step, action in enumerate(record["actions"]):
            raw, reward, done, _ = stock.step(action)
            state = np.concatenate([stock.sim.data.qpos, stock.sim.data.qvel])
            largest = max(largest, float(np.abs(state - record["states"][step]).max()))
            if not np.array_equal(state, record["states"][step]):
                print(f"episode {episode} step {step}: states differ by {np.abs(state - record['states'][step]).max()}")
                return 1
            if reward != record["rewards"][step] or bool(done) != bool(reward):
                print(f"episode {episode} step {step}: reward {reward}, done {done}; ours {record['rewards'][step]}")
                return 1
            if step in observations:
                ours_saw = observations[step]
                for name, expected in (
                    ("agentview", raw["agentview_image"]),
                    ("wrist", raw["robot0_eye_in_hand_image"]),
                    ("proprio", proprio_of(raw)),
                ):
                    if not np.array_equal(ours_saw[name], expected):
                        count = int((ours_saw[name] != expected).sum())
                        print(f"episode {episode} step {step}: {name} differs in {count} numbers")
                        return 1
                if rng_state() != next(rng_states):
                    print(f"episode {episode} step {step}: the random generators' states differ")
                    return 1
            steps += 1
        objects = start.size // 2
        moved = max(moved, float(np.abs(state - start)[9:objects].max()))
        stock.close()
    summary = {
        "suite": args.suite,
        "task": args.task,
        "assets": args.assets,
        "steps": steps,
        "largest_difference": largest,
        "objects_moved": round(moved, 3),
        "success": any(record["success"] for record in records),
    }
    print("identical " + json.dumps(summary))
    sys.stdout.flush()
    os._exit(0)  # robosuite's GL contexts raise in their destructors


if __name__ == "__main__":
    sys.exit(main())
