"""SAC of TorchRL: its collector, replay buffer and loss on the flat vector environment.

python examples/libraries/torchrl_sac.py --steps 3600
"""

import argparse

import gymnasium as gym
import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import GymWrapper
from torchrl.modules import MLP, NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate

from rlt_gym.core.residual import ResidualAction

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--env", default="rlt_gym:RLToken-LIBERO-v0")
parser.add_argument("--steps", type=int, default=3600, help="chunks")
args = parser.parse_args()

# TorchRL resets finished environments itself
env = gym.make_vec(args.env, num_envs=2, suite="libero_goal", task_ids=[1], flat=True, autoreset_mode="Disabled")
env = GymWrapper(ResidualAction(env))
size = env.action_spec.shape[-1]
body = torch.nn.Sequential(MLP(out_features=2 * size, num_cells=[256, 256]), NormalParamExtractor())
module = TensorDictModule(body, in_keys=["observation"], out_keys=["loc", "scale"])
actor = ProbabilisticActor(module, in_keys=["loc", "scale"], distribution_class=TanhNormal, return_log_prob=True)
critic = ValueOperator(MLP(out_features=1, num_cells=[256, 256]), in_keys=["observation", "action"])
collector = Collector(env, actor, frames_per_batch=8, total_frames=args.steps, auto_register_policy_transforms=True)
buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(50_000), batch_size=64)
critic(actor(env.reset()))  # sizes the networks
loss = SACLoss(actor, critic, action_spec=env.action_spec)
loss.make_value_estimator(gamma=0.92)
target = SoftUpdate(loss, tau=0.005)
adam = torch.optim.Adam(loss.parameters(), lr=3e-4)
for rows in collector:
    buffer.extend(rows.reshape(-1))
    values = loss(buffer.sample())
    total = sum(value for key, value in values.items() if key.startswith("loss_"))
    adam.zero_grad(), total.backward(), adam.step(), target.step()
    done = rows["next", "done"].sum().item()
    print(f"loss {total.item():.3f}, episodes {done}, return {rows['next', 'reward'].sum().item():.1f}")
collector.shutdown()
