"""
The decoder that trains the RL token (arXiv 2604.23073, eq. 2), and its loss.

From ``[z_rl, sg(z_1) .. sg(z_{i-1})]`` a causal transformer and a linear head reconstruct ``z_i``.
"""

import torch
from torch import nn

from rlt_gym.rl_token.encoder import Layer, RLTokenConfig


class RLTokenDecoder(nn.Module):
    """
    Reconstructs each token from ``z_rl`` and the tokens before it, with teacher forcing (eq. 2).

    :param config: Architecture (shared with the encoder).
    """

    def __init__(self, config: RLTokenConfig) -> None:
        super().__init__()
        self.config = config
        width = int(config.width or config.token_dim)
        self.input_z = nn.Linear(int(config.z_dim or config.token_dim), width)
        self.input = nn.Linear(config.token_dim, width)
        self.blank = nn.Parameter(0.02 * torch.randn(width))
        self.position = nn.Parameter(0.02 * torch.randn(config.max_tokens, width))
        self.layers = nn.ModuleList(Layer(width, config.heads, config.mlp_ratio) for _ in range(config.layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, config.token_dim)

    def forward(
        self,
        z_rl: torch.Tensor,
        z: torch.Tensor,
        context_dropout: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """
        Reconstruct the tokens.

        :param z_rl: (B, D).
        :param z: Standardized tokens (B, N, H), valid ones first (what follows a valid token cannot reach it, so pads
            at the end need no mask).
        :param context_dropout: Probability that an earlier token is blanked.
        :param generator: Source of that randomness.
        :return: Reconstruction (B, N, H); row i depends on ``z_rl`` and tokens < i only.
        """
        batch, count = z.shape[:2]
        context = self.input(z[:, :-1].detach()).float()
        if context_dropout > 0:
            drop = torch.rand(batch, count - 1, 1, generator=generator, device=z.device) < context_dropout
            context = torch.where(drop, self.blank, context)
        x = torch.cat([self.input_z(z_rl).float()[:, None], context], dim=1) + self.position[:count]
        for layer in self.layers:
            x = layer(x, causal=True)
        return self.head(self.norm(x))


def reconstruction_loss(prediction: torch.Tensor, z: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """
    Compute the loss L_ro of eq. (2).

    :param prediction: (B, N, H).
    :param z: Targets (B, N, H); no gradient flows into them.
    :param mask: bool (B, N).
    :return: The squared error in three scales. ``mean``: averaged over valid tokens and channels; ``token``: summed
        over channels, averaged over valid tokens; ``sum``: the paper's form, summed over tokens and channels, averaged
        over the batch.
    """
    error = (prediction.float() - z.detach()).square() * mask[..., None]
    total = error.sum()
    return {"mean": total / (mask.sum() * z.shape[-1]), "token": total / mask.sum(), "sum": total / len(z)}
