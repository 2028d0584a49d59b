"""A user's own VLA, as small as it gets: two tokens, a chunk that pulls the hand to the origin."""

import hashlib

import numpy as np
import torch

from rlt_gym.vla import VLAOutput, VLASpec


class ToyVLA:
    """Obeys ``FrozenVLA`` without knowing anything of this package but its data types."""

    def __init__(self, device="cpu", gain: float = 0.5) -> None:
        self.spec = VLASpec(
            "toy", token_dim=8, horizon=6, max_tokens=2, assets="official", cameras=("agentview",), language=False
        )
        self.device, self.gain = torch.device(device), gain

    def forward(self, obs, tasks, *, seed=None) -> VLAOutput:
        state = torch.as_tensor(np.asarray(obs["state"], np.float32), device=self.device)
        edges = obs["agentview"][:, 0].mean((1, 2)) + 2 * obs["agentview"][:, :, 0].mean((1, 2))
        light = torch.as_tensor(edges / 765, dtype=torch.float32, device=self.device)
        tokens = torch.stack([state, light[:, None].expand(-1, 8)], dim=1)
        chunk = torch.zeros(len(tasks), 6, 7, device=self.device)
        chunk[:, :, :3] = (-self.gain * state[:, None, :3]).clamp(-1, 1)
        mask = torch.ones(len(tasks), 2, dtype=torch.bool, device=self.device)
        kind = torch.tensor([3, 1], dtype=torch.uint8, device=self.device).expand(len(tasks), 2)
        return VLAOutput(tokens, mask, kind, chunk)

    def to(self, device):
        return ToyVLA(device, self.gain)

    def fingerprint(self) -> str:
        return hashlib.sha256(f"toy {self.gain}".encode()).hexdigest()
