"""TD3 in one file, as CleanRL writes them: plain torch on flat vectors, with corrections of the VLA's chunk.

python examples/libraries/cleanrl_td3.py --steps 3600
"""

import argparse
import copy

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from rlt_gym.core.residual import ResidualAction
from rlt_sb3 import compare, evaluate

#: Largest correction of a control step: translation, rotation (the VLA itself turns the hand much less), gripper.
SCALE = [0.3, 0.3, 0.3, 0.06, 0.06, 0.06, 0.3]
PULL = (5.0, 1.3)  # weight of the squared correction in the actor's loss: at first, and after a third of the training
DISCOUNT = 0.99**8  # per chunk of 8 control steps
N_STEPS = 3  # chunks in a return
NOISE = 0.17  # standard deviation of the exploration, in units of SCALE


class Network(nn.Module):
    """Two hidden layers on normalized observations; the last layer begins at zero, and so does the correction."""

    def __init__(self, inputs, others, outputs):
        super().__init__()
        self.register_buffer("mean", torch.zeros(inputs))
        self.register_buffer("std", torch.ones(inputs))
        first = [nn.Linear(inputs + others, 256), nn.LayerNorm(256), nn.ReLU()]
        self.body = nn.Sequential(*first, nn.Linear(256, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, outputs))
        nn.init.zeros_(self.body[-1].weight), nn.init.zeros_(self.body[-1].bias)

    def forward(self, obs, *others):
        """Evaluate on observations (B, F), for critics with actions (B, A)."""
        return self.body(torch.cat([(obs - self.mean) / self.std, *others], 1))


def policy_of(actor):
    """Corrections without noise, for vectors of observations."""

    @torch.no_grad()
    def policy(obs):
        return torch.tanh(actor(torch.as_tensor(obs))).numpy()

    return policy


def main() -> None:  # noqa: C901 (one file, one function: CleanRL's way)
    """Train, keep the actor that solves most selection states, and compare it with the frozen VLA."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", default="rlt_gym:RLToken-LIBERO-v0")
    parser.add_argument("--steps", type=int, default=3600, help="chunks, over all simulators")
    parser.add_argument("--learning-starts", type=int, default=500, help="chunks before the actor moves")
    parser.add_argument("--selection-every", type=int, default=900, help="chunks between evaluations")
    parser.add_argument("--selection-states", type=int, default=24)
    parser.add_argument("--states", type=int, default=50, help="held-out states of the last evaluation, 0 for none")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)

    n = 2
    env = gym.make_vec(args.env, num_envs=n, suite="libero_goal", task_ids=[1], flat=True, seed=args.seed)
    env = ResidualAction(env, scale=SCALE)
    size, action_size = env.single_observation_space.shape[0], env.single_action_space.shape[0]
    actor = Network(size, 0, action_size)
    critics = nn.ModuleList(Network(size, action_size, 1) for _ in range(4))
    networks, targets = nn.ModuleList([actor, critics]), copy.deepcopy(nn.ModuleList([actor, critics]))
    actor_adam, critic_adam = (torch.optim.Adam(part.parameters(), lr=3e-4) for part in networks)
    widths = {"obs": size, "action": action_size, "reward": 1, "next_obs": size, "discount": 1}
    buffer = {key: torch.zeros(args.steps + n, width) for key, width in widths.items()}
    stored, started, policy = 0, False, policy_of(targets[0])  # the slow copy of the actor plays
    returns = [[] for _ in range(n)]  # of each environment, the last chunks whose returns are not complete

    def update(move_actor, pull):
        rows = torch.as_tensor(rng.integers(stored, size=256))
        obs, action, reward, next_obs, discount = (column[rows] for column in buffer.values())
        with torch.no_grad():
            noise = (0.05 * torch.randn_like(action)).clamp(-0.1, 0.1)
            next_action = (torch.tanh(targets[0](next_obs)) + noise).clamp(-1, 1)
            value = torch.stack([critic(next_obs, next_action) for critic in targets[1]]).amin(0)
            target = (reward + discount * value).clamp(0, 1)  # a success pays 1, once
        critic_loss = sum(nn.functional.mse_loss(critic(obs, action), target) for critic in critics)
        critic_adam.zero_grad(), critic_loss.backward(), critic_adam.step()
        if move_actor:
            action = torch.tanh(actor(obs))
            value = torch.stack([critic(obs, action) for critic in critics])
            actor_loss = pull * action.square().mean() - value.mean()
            actor_adam.zero_grad(), actor_loss.backward(), actor_adam.step()
        with torch.no_grad():
            for old, new in zip(targets.parameters(), networks.parameters(), strict=True):
                old.lerp_(new, 0.005)

    vla = evaluate(lambda obs: np.zeros((n, action_size), np.float32), env, args.selection_states, split="selection")
    print("selection, frozen VLA", vla, flush=True)
    best = (vla.successes, copy.deepcopy(actor))  # which still plays the VLA's chunks
    obs, _ = env.reset(options={"init_states": "train"})
    for chunks in range(n, args.steps + n, n):
        # from none to twice the correction, and noise: critics see what it changes
        action = rng.uniform(0, 2, (n, 1)) * policy(obs) + NOISE * rng.standard_normal((n, action_size))
        action = np.clip(action, -1, 1).astype(np.float32)
        next_obs, reward, terminated, truncated, infos = env.step(action)
        for i in range(n):
            done = terminated[i] or truncated[i]  # a time-out is a failure
            if done and infos["final_info"]["worker_restarted"][i]:
                returns[i].clear()  # the simulator was lost: nothing of this chunk counts
                continue
            last = infos["final_obs"][i] if done else next_obs[i]
            returns[i].append([obs[i], action[i], 0.0, None, 1.0])
            for row in returns[i]:
                row[2:] = row[2] + row[4] * reward[i], last, row[4] * DISCOUNT
            complete = len(returns[i]) if done else len(returns[i]) // N_STEPS
            for row in returns[i][:complete]:
                row[4] *= not done
                for column, value in zip(buffer.values(), row, strict=True):
                    column[stored] = torch.as_tensor(value)
                stored += 1
            del returns[i][:complete]
        obs = next_obs
        if stored >= args.learning_starts and not started:
            started = True
            for network in (actor, *critics, targets[0], *targets[1]):
                network.mean.copy_(buffer["obs"][:stored].mean(0))
                network.std.copy_(buffer["obs"][:stored].std(0) + 1e-3)
            for _ in range(args.learning_starts):
                update(False, 0.0)
        if started:
            for count in range(2 * n):
                update(count % 2 == 1, np.interp(chunks, (0, args.steps / 3), PULL))
        if chunks % args.selection_every < n and started:
            result = evaluate(policy, env, args.selection_states, split="selection")
            print("selection, after", chunks, "chunks", result, flush=True)
            if result.successes >= best[0]:
                best = (result.successes, copy.deepcopy(targets[0]))
            returns = [[] for _ in range(n)]
            obs, _ = env.reset(options={"init_states": "train"})

    if args.states:
        vla = evaluate(lambda obs: np.zeros((n, action_size), np.float32), env, args.states)
        td3 = evaluate(policy_of(best[1]), env, args.states)
        print("held out, frozen VLA", vla)
        print("held out, TD3       ", td3)
        print(compare(vla, td3))
    env.close()


if __name__ == "__main__":
    main()
