"""SAC of skrl on one environment.

python examples/libraries/skrl_sac.py --steps 3600
"""

import argparse

import gymnasium as gym
from skrl.agents.torch.sac import SAC, SAC_CFG
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.trainers.torch import SequentialTrainer
from skrl.utils.model_instantiators.torch import deterministic_model, gaussian_model

from rlt_gym.core.residual import ResidualAction

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--env", default="rlt_gym:RLToken-LIBERO-v0")
parser.add_argument("--steps", type=int, default=3600, help="chunks")
args = parser.parse_args()

# skrl resets a single environment itself. Of a vector environment it would take the next episode's first observation
# for the last one of a truncated episode.
env = wrap_env(ResidualAction(gym.make(args.env, suite="libero_goal", task_ids=[1], flat=True)))
spaces = {"observation_space": env.observation_space, "action_space": env.action_space, "device": env.device}
hidden = {"layers": [256, 256], "activations": "relu"}
actor = [{"name": "net", "input": "OBSERVATIONS", **hidden}]
critic = [{"name": "net", "input": "concatenate([OBSERVATIONS, ACTIONS])", **hidden}]
names = ("critic_1", "critic_2", "target_critic_1", "target_critic_2")
models = {name: deterministic_model(network=critic, output="ONE", **spaces) for name in names}
models["policy"] = gaussian_model(network=actor, output="tanh(ACTIONS)", clip_actions=True, **spaces)
cfg = SAC_CFG(batch_size=64, discount_factor=0.92, learning_starts=args.steps // 8, random_timesteps=0)
memory = RandomMemory(memory_size=50_000, num_envs=env.num_envs, device=env.device)
agent = SAC(models=models, memory=memory, cfg=cfg, **spaces)
SequentialTrainer(env=env, agents=agent, cfg={"timesteps": args.steps, "headless": True}).train()
print("rows", len(memory), "rewards", memory.get_tensor_by_name("rewards")[: args.steps].sum().item())
env.close()
