"""A small network that reads success from a frozen VLA's tokens, and its files."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from rlt_gym.core.files import atomic_write, write_json
from rlt_gym.vla.base import FrozenVLA, VLAOutput
from rlt_gym.vla.tokens import select_tokens

#: Format in the metadata of a reward model's ``.safetensors`` file.
FORMAT = "rlt_gym.reward/1"


@dataclass(frozen=True)
class RewardModelConfig:
    """
    Architecture and threshold.

    :param token_dim: Width H of the VLA's tokens.
    :param hidden: Width of the hidden layer.
    :param threshold: An observation is a success if its probability is greater than this.
    """

    token_dim: int
    hidden: int = 64
    threshold: float = 0.5

    def __post_init__(self) -> None:
        for name in ("token_dim", "hidden"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"RewardModelConfig.{name} is {getattr(self, name)!r}; it must be a positive integer.")
        if not 0.0 <= self.threshold <= 1.0:
            raise ValueError(f"RewardModelConfig.threshold is {self.threshold!r}; it must be in [0, 1].")


def pooled(output: VLAOutput) -> torch.Tensor:
    """
    Summarize a VLA's tokens.

    :param output: What the VLA gave for B observations.
    :return: Mean and standard deviation of the valid tokens, float32 (B, 2 H).
    """
    tokens, mask = select_tokens(output, ("all",))
    weight = mask[..., None].float()
    count = weight.sum(1)
    mean = (tokens * weight).sum(1) / count
    variance = ((tokens - mean[:, None]).pow(2) * weight).sum(1) / count
    return torch.cat([mean, variance.sqrt()], dim=1)


class RewardModel(nn.Module):
    """
    Probability that an observation shows the task solved.

    :param config: Architecture and threshold.
    :param vla_fingerprint: Fingerprint of the VLA whose tokens it reads.
    :param vla_name: Name of that VLA, for messages.
    """

    center: torch.Tensor
    scale: torch.Tensor

    def __init__(self, config: RewardModelConfig, vla_fingerprint: str, vla_name: str) -> None:
        super().__init__()
        self.config, self.vla_fingerprint, self.vla_name = config, vla_fingerprint, vla_name
        self.register_buffer("center", torch.zeros(2 * config.token_dim))
        self.register_buffer("scale", torch.ones(2 * config.token_dim))
        self.layers = nn.Sequential(
            nn.Linear(2 * config.token_dim, config.hidden), nn.GELU(), nn.Linear(config.hidden, 1)
        )

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """
        Judge summaries of tokens.

        :param features: Of :func:`pooled`, (B, 2 H).
        :return: Logits (B,).
        """
        return self.layers((features - self.center) / self.scale).squeeze(1)

    @torch.no_grad()
    def probabilities(self, output: VLAOutput) -> np.ndarray:
        """
        Judge observations.

        :param output: What the VLA gave for B observations.
        :return: Probabilities of success, float32 (B,).
        """
        features = pooled(output).to(self.center.device)
        return torch.sigmoid(self.logits(features)).cpu().numpy()

    def verdicts(self, output: VLAOutput) -> np.ndarray:
        """
        Decide about observations.

        :param output: What the VLA gave for B observations.
        :return: Whether each is a success, bool (B,).
        """
        return self.probabilities(output) > self.config.threshold

    def check_vla(self, vla: FrozenVLA) -> None:
        """
        Refuse another VLA than the one whose tokens the model reads.

        :param vla: The VLA.
        :raises ValueError: It is another one.
        """
        if self.vla_fingerprint != vla.fingerprint():
            raise ValueError(
                f"The reward model was trained on tokens of the VLA {self.vla_name!r} with fingerprint "
                f"{self.vla_fingerprint[:12]}..., not of {vla.spec.name!r} with {vla.fingerprint()[:12]}...: train one "
                "with `rlt train-reward`."
            )


def save_reward_model(path: str | os.PathLike[str], model: RewardModel, provenance: dict[str, Any]) -> None:
    """
    Write a reward model, and beside it a ``.json`` that says how it came about.

    :param path: A name that ends in ``.safetensors``.
    :param model: The model.
    :param provenance: How it was trained and what it can do.
    """
    metadata = {
        "format": FORMAT,
        "config": json.dumps(asdict(model.config)),
        "vla_fingerprint": model.vla_fingerprint,
        "vla_name": model.vla_name,
    }
    with atomic_write(path) as temporary:
        weights = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
        save_file(weights, temporary, metadata=metadata)
    write_json(Path(path).with_suffix(".json"), {**provenance, "vla_fingerprint": model.vla_fingerprint})


def load_reward_model(
    reward_model: str | os.PathLike[str] | RewardModel, vla: FrozenVLA, device: torch.device | str = "cpu"
) -> RewardModel:
    """
    Get a reward model, frozen.

    :param reward_model: The ``.safetensors`` file that ``rlt train-reward`` wrote, or a model.
    :param vla: The VLA whose tokens it will read.
    :param device: Where it runs.
    :return: The model.
    :raises ValueError: The file is missing or damaged, or the model is another VLA's.
    """
    model = reward_model if isinstance(reward_model, RewardModel) else _read(Path(reward_model))
    model.check_vla(vla)
    return model.to(device).eval().requires_grad_(False)


def _read(path: Path) -> RewardModel:
    advice = "train one with `rlt train-reward`, or name another file."
    if not path.is_file():
        raise ValueError(f"There is no reward model at {path}; {advice}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            weights = {key: file.get_tensor(key) for key in file.keys()}
        if metadata.get("format") != FORMAT:
            raise KeyError(f"format is {metadata.get('format')!r}, not {FORMAT!r}")
        config = RewardModelConfig(**json.loads(metadata["config"]))
        model = RewardModel(config, metadata["vla_fingerprint"], metadata["vla_name"])
        model.load_state_dict(weights)
    except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError, OSError) as error:
        raise ValueError(f"{path} cannot be read as a reward model ({error}); {advice}") from error
    return model
