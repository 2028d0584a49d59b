"""SAC of Tianshou: its collector over single environments, each with a simulator of its own.

python examples/libraries/tianshou_sac.py --steps 3600
"""

import argparse

import gymnasium as gym
from tianshou.algorithm import SAC
from tianshou.algorithm.algorithm_base import policy_within_training_step
from tianshou.algorithm.modelfree.sac import SACPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.utils.net.common import Net
from tianshou.utils.net.continuous import ContinuousActorProbabilistic, ContinuousCritic

from rlt_gym.core.residual import ResidualAction

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--env", default="rlt_gym:RLToken-LIBERO-v0")
parser.add_argument("--steps", type=int, default=3600, help="chunks")
args = parser.parse_args()


def make():
    """One environment."""
    return ResidualAction(gym.make(args.env, suite="libero_goal", task_ids=[1], flat=True))


envs = DummyVectorEnv([make, make])
observation, action = envs.observation_space[0], envs.action_space[0]
net = Net(state_shape=observation.shape, hidden_sizes=[256, 256])
actor = ContinuousActorProbabilistic(
    preprocess_net=net, action_shape=action.shape, unbounded=True, conditioned_sigma=True
)
both = Net(state_shape=observation.shape, action_shape=action.shape, hidden_sizes=[256, 256], concat=True)
algorithm = SAC(
    policy=SACPolicy(actor=actor, action_space=action),
    policy_optim=AdamOptimizerFactory(lr=3e-4),
    critic=ContinuousCritic(preprocess_net=both),
    critic_optim=AdamOptimizerFactory(lr=3e-4),
    gamma=0.92,
)
collector = Collector(algorithm, envs, VectorReplayBuffer(50_000, len(envs)))
collector.reset()
for _ in range(0, args.steps, 8):
    with policy_within_training_step(algorithm.policy):
        collected = collector.collect(n_step=8)
        stats = algorithm.update(collector.buffer, sample_size=64)
    print(
        f"episodes {collected.n_collected_episodes}, returns {collected.returns}, critic loss {stats.critic1_loss:.3f}"
    )
envs.close()
