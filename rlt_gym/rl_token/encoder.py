"""
The RL token: a frozen VLA's tokens squeezed into one vector (arXiv 2604.23073, eq. 1).

``z_rl = g([z_1 .. z_M, e_rl])_{M+1}``: a transformer that reads a learned token appended last.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from rlt_gym.vla.base import TOKEN_KINDS, FrozenVLA, VLAOutput, fingerprint
from rlt_gym.vla.tokens import select_tokens

#: Format in the metadata of an RL token's ``.safetensors`` file.
FORMAT = "rlt_gym.rl_token/1"


@dataclass(frozen=True)
class RLTokenConfig:
    """
    Architecture of encoder and decoder.

    :param token_dim: Width H of the VLA's tokens.
    :param max_tokens: Most valid tokens per observation.
    :param z_dim: Width D of the RL token; ``None`` = the VLA's width, as in the paper.
    :param width: Width of both transformers; ``None`` = ``token_dim``, rounded up to a multiple of ``heads``. With less
        than ``z_dim`` the D numbers of the RL token lie in a space of ``width`` dimensions.
    :param layers: Layers of each.
    :param heads: Attention heads.
    :param mlp_ratio: Hidden width of their MLPs, in widths.
    :param kinds: Kinds of tokens that are read, ``("image",)`` for the paper's single-task setting, ``("all",)`` for
        every valid token.
    :param context_dropout: Probability that the decoder's view of an earlier token is blanked in training; with plain
        teacher forcing it can copy from neighboring tokens and ignore ``z_rl``. 0 = the paper.
    """

    token_dim: int
    max_tokens: int = 1024
    z_dim: int | None = None
    width: int | None = None
    layers: int = 2
    heads: int = 4
    mlp_ratio: int = 2
    kinds: tuple[str, ...] = ("all",)
    context_dropout: float = 0.9

    def __post_init__(self) -> None:
        if self.z_dim is None:
            object.__setattr__(self, "z_dim", self.token_dim)
        if self.width is None and isinstance(self.heads, int) and self.heads > 0:
            object.__setattr__(self, "width", self.heads * math.ceil(self.token_dim / self.heads))
        object.__setattr__(self, "kinds", tuple(self.kinds))
        for name in ("token_dim", "max_tokens", "z_dim", "width", "layers", "heads", "mlp_ratio"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"RLTokenConfig.{name} is {value!r}; it must be a positive integer.")
        if int(self.width or 0) % self.heads:
            raise ValueError(f"RLTokenConfig.width {self.width} must be a multiple of heads {self.heads}.")
        allowed = {"all", *TOKEN_KINDS} - {"pad"}
        if not self.kinds or not set(self.kinds) <= allowed:
            raise ValueError(f"RLTokenConfig.kinds is {self.kinds!r}; it must be chosen from {sorted(allowed)}.")
        if not 0 <= self.context_dropout <= 1:
            raise ValueError(f"RLTokenConfig.context_dropout is {self.context_dropout}; it must be in [0, 1].")


class Layer(nn.Module):
    """
    Pre-norm transformer layer with optional masks.

    :param width: Token width.
    :param heads: Attention heads.
    :param mlp_ratio: Hidden width of the MLP in token widths.
    """

    def __init__(self, width: int, heads: int, mlp_ratio: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, mlp_ratio * width), nn.Linear(mlp_ratio * width, width)

    def forward(
        self, x: torch.Tensor, keys: torch.Tensor | None = None, causal: bool = False, last_only: bool = False
    ) -> torch.Tensor:
        """
        Transform a sequence.

        :param x: (B, N, width).
        :param keys: bool (B, N), True = may be attended to; ``None`` = all.
        :param causal: Whether token i sees only tokens <= i.
        :param last_only: Compute only the last token's output (the others are not needed after the last layer).
        :return: (B, N, width), or (B, 1, width) with ``last_only``.
        """
        batch, _, width = x.shape
        y = self.norm1(x)
        x = x[:, -1:] if last_only else x
        shape = (batch, -1, self.heads, width // self.heads)
        q = self.query(y[:, -1:] if last_only else y).view(shape).transpose(1, 2)
        k, v = (part.view(shape).transpose(1, 2) for part in self.key_value(y).chunk(2, dim=-1))
        bias = None if keys is None else keys[:, None, None, :]
        # float32 here even under autocast: the bfloat16 attention kernel's backward is three times slower on a CPU
        with torch.autocast(x.device.type, enabled=False):
            a = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=bias, is_causal=causal)
        x = x + self.out(a.transpose(1, 2).reshape(batch, -1, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class RLTokenEncoder(nn.Module):
    """
    Eq. (1): VLA tokens -> ``z_rl``.

    :param config: Architecture.
    :param vla_fingerprint: Fingerprint of the VLA whose tokens it reads, ``""`` = not bound to one.
    :param vla_name: Name of that VLA, for messages.
    """

    token_mean: torch.Tensor
    token_std: torch.Tensor
    #: File from which it was read, which may have its decoder.
    source: Path | None = None

    def __init__(self, config: RLTokenConfig, vla_fingerprint: str = "", vla_name: str = "") -> None:
        super().__init__()
        self.config = config
        self.vla_fingerprint, self.vla_name = vla_fingerprint, vla_name
        width = int(config.width or config.token_dim)
        self.register_buffer("token_mean", torch.zeros(config.max_tokens, config.token_dim))
        self.register_buffer("token_std", torch.ones(config.token_dim))
        self.input = nn.Linear(config.token_dim, width)
        self.position = nn.Parameter(0.02 * torch.randn(config.max_tokens, width))
        self.e_rl = nn.Parameter(0.02 * torch.randn(width))
        self.layers = nn.ModuleList(Layer(width, config.heads, config.mlp_ratio) for _ in range(config.layers))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, self.z_dim)

    @property
    def z_dim(self) -> int:
        """Width D of ``z_rl``."""
        return int(self.config.z_dim or self.config.token_dim)

    def set_statistics(self, mean: torch.Tensor, std: torch.Tensor) -> None:
        """
        Set what :meth:`standardize` subtracts and divides by.

        :param mean: Mean of the tokens, (H,) or per place (N, H), N <= max_tokens: most of a token's size is its
            place's constant, which says nothing about the observation.
        :param std: Standard deviation from that mean per channel, (H,); a floor keeps dead channels from exploding.
        """
        mean = mean.expand(self.config.max_tokens, -1) if mean.dim() == 1 else mean
        self.token_mean.zero_()[: len(mean)].copy_(mean)
        self.token_std.copy_(std.clamp_min(1e-2 * float(std.mean()) + 1e-6))

    def standardize(self, tokens: torch.Tensor) -> torch.Tensor:
        """
        Bring tokens to zero mean and unit scale.

        :param tokens: (B, N, H) as the VLA gives them.
        :return: Standardized, no gradient: eq. (2)'s stop-gradient targets.
        :raises ValueError: If there are more tokens than ``max_tokens``.
        """
        return self.scale(tokens.detach())

    def scale(self, tokens: torch.Tensor) -> torch.Tensor:
        """
        Standardize tokens, with gradients.

        :param tokens: As for :meth:`standardize`.
        :return: Standardized tokens.
        :raises ValueError: If there are more tokens than ``max_tokens``.
        """
        count, limit = tokens.shape[1], self.config.max_tokens
        if count > limit:
            raise ValueError(f"{count} tokens, but this RL-token encoder was built for max_tokens={limit}.")
        return ((tokens.float() - self.token_mean[:count]) / self.token_std).clamp(-10, 10)

    def sequence(self, z: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Make what the first layer reads.

        :param z: Standardized tokens (B, N, H), valid ones first.
        :param mask: bool (B, N), ``None`` = all valid.
        :return: The tokens and the learned one, (B, N + 1, width), and which may be attended to, bool (B, N + 1);
            ``None`` = all.
        """
        batch, count = z.shape[:2]
        x = self.input(z).float() + self.position[:count]
        x = torch.cat([x, self.e_rl.expand(batch, 1, -1)], dim=1)
        every = mask is None or bool(mask.all())
        return x, None if mask is None or every else F.pad(mask, (0, 1), value=True)

    def encode(self, z: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """
        Make the RL token of standardized tokens.

        :param z: Standardized tokens (B, N, H), valid ones first.
        :param mask: bool (B, N), ``None`` = all valid.
        :return: ``z_rl`` (B, D), normalized to zero mean and unit variance over its D numbers.
        """
        x, keys = self.sequence(z, mask)
        for number, layer in enumerate(self.layers, 1):
            x = layer(x, keys, last_only=number == len(self.layers))
        return F.layer_norm(self.output(self.norm(x[:, 0])).float(), (self.z_dim,))

    def forward(self, output: VLAOutput) -> torch.Tensor:
        """
        Make the RL token.

        :param output: What the VLA gave for B observations; any bool mask.
        :return: ``z_rl``, float32 (B, D).
        :raises ValueError: If the tokens have another width, are too many, or a row has none of the wanted kinds.
        """
        if output.tokens.shape[-1] != self.config.token_dim:
            raise ValueError(
                f"Tokens have width {output.tokens.shape[-1]}; this encoder reads {self.config.token_dim}."
            )
        tokens, mask = select_tokens(output, self.config.kinds)
        return self.encode(self.standardize(tokens), mask)

    def fingerprint(self) -> str:
        """
        Identify the encoder.

        :return: sha256 over architecture and weights in the type in which they are stored (float16).
        """
        return fingerprint({"format": FORMAT, **asdict(self.config)}, self.state_dict(), dtype=torch.float16)

    def check_vla(self, vla: FrozenVLA) -> None:
        """
        Refuse a VLA whose tokens this encoder cannot read.

        :param vla: The VLA to use it with.
        :raises ValueError: If it was trained on another VLA's tokens.
        """
        if self.config.token_dim != vla.spec.token_dim:
            raise ValueError(
                f"The RL token reads tokens of width {self.config.token_dim}, but the VLA {vla.spec.name!r} gives "
                f"{vla.spec.token_dim}. Train one for this VLA with `rlt pretrain-token`."
            )
        if self.vla_fingerprint and self.vla_fingerprint != vla.fingerprint():
            raise ValueError(
                f"The RL token belongs to the VLA {self.vla_name!r} with fingerprint {self.vla_fingerprint[:12]}..., "
                f"not to {vla.spec.name!r} with {vla.fingerprint()[:12]}...: its features would mean nothing. Load "
                "that VLA, or train a token for this one with `rlt pretrain-token`."
            )


def count_parameters(*modules: nn.Module) -> int:
    """
    Count parameters.

    :param modules: Any modules.
    :return: Number of their parameters.
    """
    return sum(math.prod(p.shape) for module in modules for p in module.parameters())
