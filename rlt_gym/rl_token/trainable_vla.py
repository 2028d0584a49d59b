"""A copy of a VLA that goes on learning, below the frozen encoder: what an algorithm trains that reads ``pictures``."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import torch
from torch import nn
from torch.func import functional_call

from rlt_gym.core.imports import resolve_class
from rlt_gym.rl_token.encoder import RLTokenConfig, RLTokenEncoder
from rlt_gym.rl_token.shown import read_instructions, read_seeds
from rlt_gym.vla.base import FrozenVLA, VLAOutput
from rlt_gym.vla.tokens import select_tokens

PARTS = ("head", "lora", "all")
TensorDict = Mapping[str, torch.Tensor]


class GradientVLA(Protocol):
    """
    A copy of a VLA through which gradients flow, an ``nn.Module``. It runs in evaluation mode.

    A VLA that can learn by RL has an attribute ``gradients``: such a class, or its name ``"package.module:Class"``. Its
    only argument is its ``architecture``.
    """

    #: Names of the action head's parameters begin with one of these; the tokens do not depend on them.
    head: tuple[str, ...]
    #: Linear layers that get LoRA matrices, a regular expression of their names.
    lora: str

    @classmethod
    def of(cls, vla: Any) -> "GradientVLA":
        """
        Copy a frozen policy.

        :param vla: The policy.
        :return: The copy, on its device.
        """

    @property
    def architecture(self) -> dict[str, Any]:
        """What the constructor takes, plain data."""

    def forward(
        self, pictures: Mapping[str, torch.Tensor], state: torch.Tensor, tasks: Sequence[str], seeds: Sequence[int]
    ) -> VLAOutput:
        """
        Run the policy as the frozen one does.

        :param pictures: For each camera uint8 (B, S, S, 3).
        :param state: ``proprio`` (B, P).
        :param tasks: One instruction per row.
        :param seeds: One number per row.
        :return: Tokens and chunk, with gradients.
        """


class TrainableVLA(nn.Module):
    """
    VLA and encoder of an environment, with gradients for a part of the VLA.

    The numbers that learn are arguments of :meth:`run`, not weights of this network: several networks that each have
    their own share all others.

    :param architecture: ``gradients`` (module:Class), ``vla`` (its argument), ``cameras``, ``encoder`` (keyword
        arguments of :class:`~rlt_gym.rl_token.encoder.RLTokenConfig`), ``part`` and ``rank``.
    :param vla: The copy of the VLA; ``None`` = a new one.
    """

    def __init__(self, architecture: Mapping[str, Any], vla: Any = None) -> None:
        super().__init__()
        self.architecture = dict(architecture)
        name, self.part, rank = (architecture[key] for key in ("gradients", "part", "rank"))
        # weights that are drawn here are replaced, but for LoRA's; nobody else's random numbers are used up
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.vla = resolve_class(name, "gradients of the VLA")(architecture["vla"]) if vla is None else vla
            self.encoder = RLTokenEncoder(RLTokenConfig(**architecture["encoder"]))
            self.requires_grad_(False)
            if self.part == "lora":
                add_lora(self.vla, self.vla.lora, rank)
        prefixes = {"head": tuple(f"vla.{head}" for head in self.vla.head), "all": ("vla.",)}.get(self.part)
        #: What learns: name and its first value.
        self.moving = {
            key: value
            for key, value in self.named_parameters()
            if (".lora_" in key if prefixes is None else key.startswith(prefixes))
        }
        self.eval()

    @classmethod
    def of(cls, vla: FrozenVLA, encoder: Any, part: str, rank: int) -> "TrainableVLA":
        """
        Copy an environment's VLA and encoder.

        :param vla: The VLA.
        :param encoder: The encoder.
        :param part: What learns: ``"head"``, ``"lora"`` or ``"all"``.
        :param rank: Of the LoRA matrices.
        :return: The copy, on the VLA's device.
        :raises ValueError: If the VLA gives no gradients, or the encoder has no weights.
        """
        source = gradients_of(vla)
        if not isinstance(encoder, RLTokenEncoder):
            raise ValueError(
                f"A VLA that learns needs an RL token with weights, got {type(encoder).__name__}: set rl_token to "
                "'auto', 'random:auto' or a file."
            )
        copy = source.of(vla)  # type: ignore[attr-defined]
        made = cls(
            {
                "gradients": f"{source.__module__}:{source.__qualname__}",
                "vla": copy.architecture,
                "cameras": list(vla.spec.cameras),
                "encoder": asdict(encoder.config),
                "part": part,
                "rank": rank,
            },
            copy,
        )
        made.encoder.load_state_dict(encoder.state_dict())
        return made.to(vla.device)

    def train(self, mode: bool = True) -> "TrainableVLA":
        """
        Stay in evaluation mode: without dropout the copy gives what the frozen VLA gives.

        :param mode: Not used.
        :return: The copy itself.
        """
        return super().train(False)

    @property
    def moves_tokens(self) -> bool:
        """Whether the tokens change with what learns; the action head comes after them."""
        return self.part != "head"

    def run(self, observations: TensorDict, weights: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Run VLA and encoder.

        :param observations: ``pictures``, ``proprio``, ``instruction``, ``vla_seed`` of an environment with
            ``show_pictures``, and its ``z_rl`` and ``vla_ref`` (B, C, d).
        :param weights: Of what learns.
        :return: RL token (B, D) and chunk (B, C, d), with gradients.
        """
        tokens, mask, chunk = self.look(observations, weights)
        if not self.moves_tokens:
            return observations["z_rl"], chunk
        return self.encoder.encode(self.encoder.scale(tokens), mask), chunk

    def look(self, observations: TensorDict, weights: TensorDict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Run the VLA, for an encoder that is not the frozen one.

        :param observations: As for :meth:`run`.
        :param weights: Of what learns.
        :return: The tokens that the encoder reads (B, N, H), zeros where there is none, which of them are valid (B, N),
            and the chunk, with gradients.
        """
        return functional_call(self, dict(weights), (observations,))

    def forward(self, observations: TensorDict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Run the VLA as it began.

        :param observations: As for :meth:`run`.
        :return: As of :meth:`look`.
        """
        # rows come as float32 where a policy has converted them
        frames = observations["pictures"].to(torch.uint8).unbind(1)
        output = self.vla(
            dict(zip(self.architecture["cameras"], frames, strict=True)),
            observations["proprio"].float(),
            read_instructions(observations["instruction"].to("cpu", torch.uint8).numpy()),
            read_seeds(observations["vla_seed"].to("cpu", torch.uint8).numpy()),
        )
        tokens, mask = select_tokens(output, self.encoder.config.kinds)
        return tokens, mask, output.chunk[:, : observations["vla_ref"].shape[1]]


def gradients_of(vla: FrozenVLA) -> type:
    """
    Find the class of a VLA's copy with gradients.

    :param vla: The VLA.
    :return: A class that obeys :class:`GradientVLA`.
    :raises ValueError: If it has none.
    """
    found = getattr(vla, "gradients", None)
    if found is None:
        raise ValueError(
            f"show_pictures is for a VLA that learns, and {vla.spec.name!r} gives no gradients: use a MiniVLA or an "
            "ACT of LeRobot, or give the VLA's class an attribute gradients "
            "(rlt_gym.rl_token.trainable_vla.GradientVLA)."
        )
    return resolve_class(found, "gradients of the VLA") if isinstance(found, str) else found


def add_lora(network: nn.Module, layers: str, rank: int) -> None:
    """
    Give linear layers LoRA matrices. Their product begins at zero, so the network gives what it gave before.

    :param network: It is changed in place.
    :param layers: A regular expression of the layers' names.
    :param rank: Of the matrices.
    :raises ValueError: If peft is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError(f"train_vla with part 'lora' needs peft: pip install 'rlt[lora]' ({error}).") from error
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, target_modules=layers), network)
