"""PPO of RLlib, on single environments (--mode sync) or on the vector environment (--mode vector_entry_point).

python examples/libraries/rllib_ppo.py --mode vector_entry_point --steps 3600
"""

import argparse

import gymnasium as gym
import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.tune.registry import register_env

from rlt_gym.core.residual import ResidualAction


def make(settings):
    """Make one environment, or the vector environment for which RLlib asks with the number of its members."""
    if "num_envs" in settings:
        # RLlib expects resets in the next step, and does not look whether they are
        return ResidualAction(gym.make_vec(autoreset_mode="NextStep", **settings))
    return ResidualAction(gym.make(**settings))


def config_of(env, mode, steps):
    """Configure PPO."""
    register_env("rlt", make)
    settings = {"id": env, "suite": "libero_goal", "task_ids": [1], "flat": True}
    return (
        PPOConfig()
        .environment("rlt", env_config=settings)
        .env_runners(num_env_runners=0, num_envs_per_env_runner=2, gym_env_vectorize_mode=mode)
        .training(gamma=0.92, train_batch_size=min(steps, 200), minibatch_size=min(steps, 64), num_epochs=4)
    )


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", default="rlt_gym:RLToken-LIBERO-v0")
    parser.add_argument("--mode", choices=["sync", "vector_entry_point"], default="vector_entry_point")
    parser.add_argument("--steps", type=int, default=3600, help="chunks")
    args = parser.parse_args()
    ray.init(address="local", num_cpus=2, include_dashboard=False)
    algorithm = config_of(args.env, args.mode, args.steps).build_algo()
    done = 0
    while done < args.steps:
        result = algorithm.train()["env_runners"]
        done = result["num_env_steps_sampled_lifetime"]
        print(f"chunks {done}, return {result['episode_return_mean']}, chunks an episode {result['episode_len_mean']}")
    algorithm.stop()


if __name__ == "__main__":
    main()
