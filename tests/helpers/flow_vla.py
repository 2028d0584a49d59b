"""A small VLA with flow matching that goes left or right as its noise says, and a task in which one side is right."""

import functools

import gymnasium as gym
import numpy as np
import torch

from rlt_gym.rl_token.make import make_rl_token_vec
from rlt_gym.testing import FakeLiberoVectorEnv
from rlt_gym.testing.envs import FAKE_ROBOT
from rlt_gym.vla.base import VLAOutput, VLASpec, fingerprint

#: Steps of the VLA's chunk, of which the environment plays LENGTH; numbers per action; steps of the integration.
STEPS, LENGTH, SIZE, INTEGRATION = 8, 4, 7, 10


@functools.cache
def velocity() -> torch.nn.Module:
    """
    Velocity of (noise or chunk (56), time, position), trained by conditional flow matching on demonstrations.

    The demonstrator goes away from the middle, from the middle to either side.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(STEPS * SIZE + 2, 64), torch.nn.SiLU(),
            torch.nn.Linear(64, 64), torch.nn.SiLU(),
            torch.nn.Linear(64, STEPS * SIZE),
        )  # fmt: skip
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)
        for _ in range(150):
            position = 1.2 * torch.rand(256, 1) - 0.6
            side = torch.where(position.abs() > 0.1, position.sign(), torch.randn(256, 1).sign())
            chunk = torch.zeros(256, STEPS, SIZE)
            chunk[:, :, 0], chunk[:, :, 6] = 0.9 * side, -1.0
            noise, time = torch.randn(256, STEPS * SIZE), torch.rand(256, 1)
            wanted = chunk.flatten(1) - noise
            loss = (net(torch.cat([noise + time * wanted, time, position], dim=1)) - wanted).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return net.requires_grad_(False).eval()


class FlowVLA:
    """
    Obeys ``FrozenVLA``; the first number of the state is the position.

    ``calls`` keeps the batch size of every pass that computed tokens, ``flows`` of every integration.
    """

    def __init__(self, device="cpu", max_batch=None) -> None:
        self.spec = VLASpec(
            "flow", token_dim=8, horizon=STEPS, max_tokens=2, cameras=("agentview",), language=False, state_dim=8,
            stochastic=True, max_batch=max_batch, noise=(STEPS, SIZE),
        )  # fmt: skip
        self.device, self.net = torch.device(device), velocity()
        self.calls, self.flows = [], []

    def flow(self, position, noise):
        self.flows.append(len(noise))
        x = noise.flatten(1)
        for step in range(INTEGRATION):
            time = torch.full((len(x), 1), step / INTEGRATION)
            x = x + self.net(torch.cat([x, time, position], dim=1)) / INTEGRATION
        return x.unflatten(1, (STEPS, SIZE)).clamp(-1, 1)

    def forward(self, obs, tasks, *, seed=None) -> VLAOutput:
        self.calls.append(len(tasks))
        state = torch.as_tensor(np.asarray(obs["state"], np.float32))
        edges = obs["agentview"][:, 0].mean((1, 2)) + 2 * obs["agentview"][:, :, 0].mean((1, 2))
        light = torch.as_tensor(edges / 765, dtype=torch.float32)
        tokens = torch.stack([state, light[:, None].expand(-1, 8)], dim=1)
        mask = torch.ones(len(tasks), 2, dtype=torch.bool)
        kind = torch.tensor([3, 1], dtype=torch.uint8).expand(len(tasks), 2)
        generators = [torch.Generator().manual_seed(int(number)) for number in seed or [0] * len(tasks)]
        noise = torch.stack([torch.randn(STEPS, SIZE, generator=generator) for generator in generators])
        flow = functools.partial(self.flow, state[:, :1].clone())
        return VLAOutput(tokens, mask, kind, flow(noise), flow)

    def to(self, device):
        return self

    def fingerprint(self) -> str:
        return fingerprint({"name": "flow"}, self.net.state_dict())


class TwoWays(FakeLiberoVectorEnv):
    """A point moves by a tenth of each action's first number; ``proprio`` is (position, right side, 0, ...)."""

    def __init__(self, num_envs=1, **settings):
        self.position = np.zeros(num_envs)
        super().__init__(num_envs, **{"max_episode_steps": 12, **settings})

    def side(self, env: int) -> float:
        return 1.0 if self._episode(env).init_index % 2 else -1.0

    def _begin(self, env: int) -> None:
        self.position[env] = 0.0

    def _control_step(self, env, action):
        self.position[env] += 0.1 * action[0]
        solved = bool(self.position[env] * self.side(env) > 0.4)
        return float(solved), solved

    def _observe(self, env):
        proprio = np.zeros(8, dtype=np.float32)
        proprio[:2] = self.position[env], self.side(env)
        return {**super()._observe(env), "proprio": proprio}


def make_two_ways(num_envs=1, chunk_length=LENGTH, vla=None, rl_token="none", **settings):
    def raw_env(loaded, **raw):
        return TwoWays(num_envs, **raw)

    vla = FlowVLA() if vla is None else vla
    return make_rl_token_vec(raw_env, FAKE_ROBOT, chunk_length, vla, rl_token=rl_token, **settings)


if "TwoWays-v0" not in gym.registry:
    gym.register("TwoWays-v0", vector_entry_point=make_two_ways)
