"""What the environment gives and takes: the frozen VLA's own chunks played back, one line per episode.

python examples/vector_env.py --episodes 4
"""

import argparse

import gymnasium as gym
import numpy as np


def main() -> None:
    """Play random chunks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", default="rlt_gym:RLToken-LIBERO-v0")
    parser.add_argument("--suite", default="libero_goal")
    parser.add_argument("--num-envs", type=int, default=2)
    parser.add_argument("--episodes", type=int, default=4)
    args = parser.parse_args()

    env = gym.make_vec(args.env, num_envs=args.num_envs, suite=args.suite)
    try:
        print("observation:", env.single_observation_space)
        print("action:     ", env.single_action_space)
        obs, infos = env.reset(seed=0)
        finished = 0
        while finished < args.episodes:
            obs, _, terminations, truncations, infos = env.step(obs["vla_ref"])
            for i in np.flatnonzero(terminations | truncations):
                final = infos["final_info"]
                outcome = "success" if final["is_success"][i] else "no success"
                print(f"{final['instruction'][i]}: {outcome} after {final['episode_steps'][i]} control steps")
                finished += 1
    finally:
        env.close()


if __name__ == "__main__":
    main()
