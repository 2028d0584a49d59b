"""Someone takes over: a policy that does nothing, rescued by the scripted expert or by a class of your own.

python examples/interventions.py
python examples/interventions.py --intervention interventions:LiftWhenLow
"""

import argparse

import gymnasium as gym
import numpy as np


class LiftWhenLow:
    """Lifts the hand when it comes too close to the table. Workers find it as ``interventions:LiftWhenLow``."""

    def __init__(self, height: float = 0.95):
        self.height = height

    def act(self, simulator, proposed, step):
        """(7,) to take over, None to let the policy act."""
        if simulator.proprio()[2] > self.height:
            return None
        return np.array([0, 0, 1, 0, 0, 0, proposed[6]])


def main() -> None:
    """Train with a person or a script that takes over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", default="rlt_gym:LIBERO-v0")
    parser.add_argument("--intervention", default="rlt_gym.libero.interventions:ScriptedTakeover")
    parser.add_argument("--num-envs", type=int, default=2)
    parser.add_argument("--episodes", type=int, default=4)
    args = parser.parse_args()

    env = gym.make_vec(args.env, num_envs=args.num_envs, task_ids=[1], render="fast", intervention=args.intervention)
    try:
        _, infos = env.reset(seed=0)
        taken = np.zeros(args.num_envs, dtype=int)
        finished = 0
        while finished < args.episodes:
            _, _, terminations, truncations, infos = env.step(np.zeros(env.action_space.shape, dtype=np.float32))
            for i in range(args.num_envs):
                done = terminations[i] or truncations[i]
                info = infos["final_info"] if done else infos
                taken[i] += info["intervention"][i][: info["chunk_steps"][i]].sum()
                if done:
                    outcome = "success" if info["is_success"][i] else "no success"
                    steps = info["episode_steps"][i]
                    print(f"{info['instruction'][i]}: {outcome} after {steps} control steps, {taken[i]} taken over")
                    taken[i], finished = 0, finished + 1
    finally:
        env.close()


if __name__ == "__main__":
    main()
