"""Small demonstration files and models shared by the tests of VLA and RL token."""

from pathlib import Path

import numpy as np

from rlt_gym.data.libero_hdf5 import DemoWriter
from rlt_gym.vla.mini.model import MiniVLA, MiniVLAConfig, MiniVLANet

#: names of the VLAs whose weights are in the package
SHIPPED_VLAS = ["mini", "mini-10", "mini-goal", "mini-object", "mini-slow", "mini-spatial", "mini-spatial-ten"]
TINY = MiniVLAConfig(horizon=4, width=32, layers=1, heads=2, mlp_ratio=2, stem=(8, 8, 16), image_size=32)


def tiny_vla(seed: int = 0) -> MiniVLA:
    import torch

    torch.manual_seed(seed)
    net = MiniVLANet(TINY)
    torch.nn.init.normal_(net.film.weight, std=0.1)  # as after training: the instruction matters
    return MiniVLA(net)


def observations(batch: int, size: int = 32, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "agentview": rng.integers(0, 256, (batch, size, size, 3), dtype=np.uint8),
        "wrist": rng.integers(0, 256, (batch, size, size, 3), dtype=np.uint8),
        "state": rng.normal(size=(batch, 8)).astype(np.float32),
    }


def write_demos(
    path: Path,
    instruction: str,
    demos: int = 4,
    length: int = 12,
    size: int = 32,
    seed: int = 0,
    success: bool = True,
    **env_args: str,
) -> Path:
    """A dot at the object and a dot at the hand; the expert moves the hand towards the object."""
    rng = np.random.default_rng(seed)
    with DemoWriter(path, instruction, {"seed": seed, **env_args}) as writer:
        for number in range(demos):
            target, hand = rng.uniform(-0.2, 0.2, (2, 3))
            rows: dict[str, list[np.ndarray]] = {"a": [], "p": [], "f": []}
            for _ in range(length):
                action = np.zeros(7, dtype=np.float32)
                action[:3] = np.clip((target - hand) * 10, -1, 1)
                action[6] = 1.0 if np.linalg.norm(target - hand) < 0.05 else -1.0
                frame = np.zeros((size, size, 3), dtype=np.uint8)
                for channel, point in enumerate((target, hand)):
                    y, x = ((point[:2] + 0.25) / 0.5 * size).astype(int)
                    frame[max(0, y - 2) : y + 3, max(0, x - 2) : x + 3, channel] = 255
                rows["a"].append(action)
                rows["p"].append(np.concatenate([hand, np.zeros(5)]))
                rows["f"].append(frame)
                hand = hand + 0.03 * action[:3]
            frames = np.stack(rows["f"])
            positions = np.repeat(target[None, None], length, axis=0)
            views = {"agentview": frames, "wrist": frames}
            writer.add(np.stack(rows["a"]), np.stack(rows["p"]), positions, success, init_index=number, **views)
    return path


def write_fake_token(path: Path) -> Path:
    """An RL token of ``FakeVLA`` with random weights, and its decoder, as stage 1 writes it."""
    import torch

    from rlt_gym.rl_token.decoder import RLTokenDecoder
    from rlt_gym.rl_token.encoder import RLTokenConfig, RLTokenEncoder
    from rlt_gym.rl_token.io import save_rl_token

    config = RLTokenConfig(12, max_tokens=5, z_dim=8, width=16, layers=1, heads=2, context_dropout=0.5)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        encoder, decoder = RLTokenEncoder(config), RLTokenDecoder(config)
    encoder.set_statistics(torch.zeros(12), 5 * torch.ones(12))
    save_rl_token(path, encoder, decoder)
    return path
