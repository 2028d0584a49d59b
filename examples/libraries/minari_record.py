"""A Minari dataset of the frozen VLA's own episodes.

python examples/libraries/minari_record.py --steps 200
"""

import argparse

import gymnasium as gym
import minari

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--env", default="rlt_gym:RLToken-LIBERO-v0")
parser.add_argument("--steps", type=int, default=200, help="chunks at least; the last episode is played to its end")
parser.add_argument("--name", default="rlt/vla-v0")
args = parser.parse_args()

env = minari.DataCollector(gym.make(args.env, suite="libero_goal", task_ids=[1]))
steps = 0
while steps < args.steps:
    obs, _ = env.reset()
    done = False
    while not done:
        obs, _, terminated, truncated, _ = env.step(obs["vla_ref"])
        done, steps = terminated or truncated, steps + 1
dataset = env.create_dataset(dataset_id=args.name, algorithm_name="frozen VLA")
env.close()
print("episodes", dataset.total_episodes, "chunks", dataset.total_steps)
print("returns", [float(episode.rewards.sum()) for episode in minari.load_dataset(args.name)])
