"""A frozen VLA's tokens of demonstrations, computed once."""

from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm

from rlt_gym.data.demo_set import DemoSet
from rlt_gym.rl_token.encoder import select_tokens
from rlt_gym.vla.base import FrozenVLA


@dataclass
class TokenCache:
    """
    A VLA's tokens of many observations, float16.

    :param tokens: Selected tokens (R, N, H), valid ones first.
    :param mask: bool (R, N).
    """

    tokens: torch.Tensor
    mask: torch.Tensor

    def batch(self, rows: np.ndarray | torch.Tensor, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
        """
        :param rows: Row numbers.
        :param device: Where to put them.
        :return: Tokens float32 and mask.
        """
        index = torch.as_tensor(rows)
        return self.tokens[index].to(device).float(), self.mask[index].to(device)


def cache_tokens(
    vla: FrozenVLA, data: DemoSet, kinds: tuple[str, ...], batch_size: int = 64, progress: bool = False
) -> TokenCache:
    """
    Run a frozen VLA over demonstrations once.

    :param vla: The VLA.
    :param data: Demonstrations.
    :param kinds: Kinds of tokens to keep.
    :param batch_size: Observations per forward pass.
    :param progress: Show a progress bar.
    :return: The tokens of every row of ``data``.
    """
    blocks = []
    for start in tqdm(range(0, len(data), batch_size), disable=not progress, desc="tokens", mininterval=2.0):
        part = slice(start, start + batch_size)
        obs = {"agentview": data.agentview[part], "wrist": data.wrist[part], "state": data.proprio[part]}
        tasks = [data.instructions[task] for task in data.task[part]]
        output = vla.forward(obs, tasks, seed=list(range(start, start + len(tasks)))).check(vla.spec, len(tasks))
        tokens, mask = select_tokens(output, kinds)
        blocks.append((tokens.half().cpu(), mask.cpu()))
    count = max(mask.shape[1] for _, mask in blocks)
    width = vla.spec.token_dim
    cache = TokenCache(
        torch.zeros(len(data), count, width, dtype=torch.float16), torch.zeros(len(data), count, dtype=torch.bool)
    )
    start = 0
    for tokens, mask in blocks:
        cache.tokens[start : start + len(mask), : mask.shape[1]] = tokens
        cache.mask[start : start + len(mask), : mask.shape[1]] = mask
        start += len(mask)
    return cache
