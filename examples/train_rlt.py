"""Train RLT on a LIBERO task from Python: plain Gymnasium and Stable-Baselines3.

python examples/train_rlt.py --chunks 3600
"""

import argparse

import gymnasium as gym
import torch
from stable_baselines3.common.vec_env import VecMonitor

from rlt_sb3 import RLT, GymnasiumVecEnv, compare, evaluate, fit_horizon


def main() -> None:
    """Train RLT and evaluate it beside the frozen VLA."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", default="rlt_gym:RLToken-LIBERO-v0")
    parser.add_argument("--suite", default="libero_goal")
    parser.add_argument("--task", type=int, default=1)
    parser.add_argument("--num-envs", type=int, default=2)
    parser.add_argument("--chunks", type=int, default=3600)
    parser.add_argument("--states", type=int, default=50)
    parser.add_argument("--selection-states", type=int, default=48)
    parser.add_argument("--learning-starts", type=int, help="RLT's default unless given, as for the next one")
    parser.add_argument("--critic-warmup-updates", type=int)
    parser.add_argument("--save", default="rlt.zip")
    args = parser.parse_args()

    torch.set_num_threads(1)  # as `rlt train` does: the simulators need the other cores
    # The environment holds the frozen VLA and the RL token; each simulator has a process.
    env = gym.make_vec(args.env, num_envs=args.num_envs, suite=args.suite, task_ids=[args.task])
    try:
        vla = evaluate("vla", env, args.states, name="frozen VLA")
        print("frozen VLA:", vla)
        selection = evaluate("vla", env, args.selection_states, split="selection")
        fit_horizon(env, selection)  # training episodes as long as the VLA needs

        venv = VecMonitor(GymnasiumVecEnv(env), info_keywords=("is_success",))
        given = {"learning_starts": args.learning_starts, "critic_warmup_updates": args.critic_warmup_updates}
        settings = {name: value for name, value in given.items() if value is not None}
        model = RLT("MultiInputPolicy", venv, seed=0, device="cpu", **settings)
        model.know_vla(selection)  # what the deployment gate compares actors with
        model.learn(total_timesteps=args.chunks, progress_bar=True)
        model.save(args.save)

        rlt = evaluate(model, env, args.states, name="RLT")
        print("RLT:       ", rlt)
        print(compare(vla, rlt))
    finally:
        env.close()


if __name__ == "__main__":
    main()
