"""A VLA and an encoder whose outputs tell which frame they have seen, for tests of stored transitions."""

import torch

from rlt_gym.rl_token.encoder import RLTokenConfig, RLTokenEncoder
from rlt_gym.testing import FakeRLTokenVectorEnv
from rlt_gym.vla.base import VLAOutput, VLASpec

C, WIDTH = 4, 16


class CountingVLA:
    """Tokens repeat the state, the chunk is the first number of the state."""

    spec = VLASpec("counting", token_dim=WIDTH, horizon=6)
    device = torch.device("cpu")

    def forward(self, obs, tasks, *, seed=None) -> VLAOutput:
        state = torch.as_tensor(obs["state"])
        tokens = torch.zeros(len(tasks), 2, WIDTH)
        tokens[:, :, :8] = state[:, None]
        tokens[:, :, 8] = torch.as_tensor(obs["agentview"][:, 0, 0, 0]).float()[:, None]
        chunk = (state[:, :1, None] / 100).expand(-1, 6, 7)
        mask = torch.ones(len(tasks), 2, dtype=torch.bool)
        return VLAOutput(tokens, mask, mask.to(torch.uint8), chunk)

    def to(self, device):
        return self

    def fingerprint(self) -> str:
        return "f" * 64


class ReadingEncoder(RLTokenEncoder):
    def __init__(self) -> None:
        super().__init__(RLTokenConfig(WIDTH, max_tokens=2, width=4, heads=1), "f" * 64, "counting")

    def forward(self, output: VLAOutput) -> torch.Tensor:
        return output.tokens[:, 0]


def action(demo: int, step: int) -> float:
    return (10 * demo + step) / 100


def space():
    return FakeRLTokenVectorEnv(chunk_length=C, token_dim=WIDTH).single_observation_space
