"""Run by test_libero.py in a process of its own: our simulator against LIBERO's OffScreenRenderEnv, bit for bit."""

import os
import sys

import numpy as np

from rlt_gym.assets import resolve_assets
from rlt_gym.libero.bootstrap import prepare_libero
from rlt_gym.libero.tasks import episode_seed, get_task, load_init_states

SUITE, TASK, INIT, STEPS, CHUNK = "libero_goal", 1, 3, 48, 8


def actions(task) -> np.ndarray:
    """A random walk that sinks, so that the hand touches things; some steps without rotation."""
    walk = np.random.default_rng(0).uniform(-1, 1, (STEPS, 7))
    walk[:, 2] -= 0.3
    walk[::7, 3:6] = 0.0
    return np.clip(walk, -1, 1)


def main() -> int:
    prepare_libero(resolve_assets(os.environ.get("RLT_COMPARE_ASSETS", "embedded")).path)
    import robosuite.utils.transform_utils as T
    from libero.libero.envs import OffScreenRenderEnv

    from rlt_gym.libero.simulator import SETTLE_ACTION, SETTLE_STEPS, LiberoSimulator

    task = get_task(SUITE, TASK)
    ours = LiberoSimulator(SUITE, TASK, image_size=128, render="exact")
    states, observations, rewards = [], [], []
    for _ in range(2):  # the second, soft reset must not remember the first episode
        states, observations, rewards = [], [], []
        ours.reset("eval", INIT)
        for chunk in actions(task).reshape(-1, CHUNK, 7):
            for action in chunk:
                result = ours.step_chunk(action[None], observe=False)
                states.append(np.concatenate([ours.data.qpos, ours.data.qvel]))
                rewards.append(result.step_rewards[0])
            observations.append(ours.observe())
    ours.close()

    stock = OffScreenRenderEnv(bddl_file_name=str(task.bddl_file), camera_heights=128, camera_widths=128)
    np.random.seed(episode_seed(task, "eval", INIT))
    stock.reset()
    stock.set_init_state(load_init_states(task)[INIT])
    for _ in range(SETTLE_STEPS):
        stock.step(SETTLE_ACTION.tolist())
    for step, action in enumerate(actions(task)):
        raw, reward, _, _ = stock.step(action)
        state = np.concatenate([stock.sim.data.qpos, stock.sim.data.qvel])
        if not np.array_equal(state, states[step]) or reward != rewards[step]:
            print(f"step {step}: states differ by {np.abs(state - states[step]).max()}")
            return 1
        if step % CHUNK == CHUNK - 1:
            observation = observations[step // CHUNK]
            orientation = T.quat2axisangle(raw["robot0_eef_quat"])
            proprio = np.concatenate([raw["robot0_eef_pos"], orientation, raw["robot0_gripper_qpos"]])
            for name, value, expected in (
                ("agentview", observation["agentview"], raw["agentview_image"]),
                ("wrist", observation["wrist"], raw["robot0_eye_in_hand_image"]),
                ("proprio", observation["proprio"], proprio.astype(np.float32)),
            ):
                if not np.array_equal(value, expected):
                    print(f"step {step}: {name} differs")
                    return 1
    print("identical")
    sys.stdout.flush()
    os._exit(0)  # robosuite's GL contexts raise in their destructors


if __name__ == "__main__":
    sys.exit(main())
