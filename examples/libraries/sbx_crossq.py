"""CrossQ of SBX (Stable-Baselines3 in JAX) on the flat vector environment.

python examples/libraries/sbx_crossq.py --steps 3600
"""

import argparse

import gymnasium as gym
from sbx import CrossQ
from stable_baselines3.common.vec_env import VecMonitor

from rlt_gym.core.residual import ResidualAction
from rlt_sb3 import GymnasiumVecEnv

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--env", default="rlt_gym:RLToken-LIBERO-v0")
parser.add_argument("--steps", type=int, default=3600, help="chunks")
args = parser.parse_args()

env = ResidualAction(gym.make_vec(args.env, num_envs=2, suite="libero_goal", task_ids=[1], flat=True))
model = CrossQ("MlpPolicy", VecMonitor(GymnasiumVecEnv(env)), gamma=0.92, learning_starts=args.steps // 8, seed=0)
model.learn(args.steps)
print("episodes", len(model.ep_info_buffer), "last returns", [info["r"] for info in model.ep_info_buffer][-5:])
env.close()
