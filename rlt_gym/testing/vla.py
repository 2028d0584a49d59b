"""A frozen VLA without a network, and the checker of VLAs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rlt_gym.vla.base import FrozenVLA, VLAObs, VLAOutput


def check_vla(
    vla: FrozenVLA,
    obs: VLAObs | None = None,
    tasks: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    tolerance: float = 1e-4,
) -> VLAOutput:
    """
    Check that a VLA keeps the contract, see :func:`rlt_gym.vla.conformance.check_vla`.

    :param vla: the VLA
    :param obs: raw observations of at least two rows that differ; None: made up
    :param tasks: one instruction per row
    :param seeds: one number per row, all different
    :param tolerance: largest difference between a row in the batch and the same row alone
    :return: the output for the whole batch
    :raises ValueError: naming the first rule that is broken
    """
    from rlt_gym.vla import conformance

    return conformance.check_vla(vla, obs, tasks, seeds, tolerance)


class FakeVLA:
    """
    A ``FrozenVLA`` without a network: tokens and chunks are simple functions of the observation.

    ``chunk[b, t]`` is (state[0] / 100 limited to [-1, 1], t / horizon, (seed % 1000) / 1000 if stochastic, 0, 0, 0,
    -1).
    Tokens are a fixed random image of the brightness of both cameras (a mean in which the lower right weighs more), the
    state and the instruction. ``calls`` keeps the batch size of every forward pass.

    :param horizon: control steps per chunk
    :param token_dim: size of a token
    :param n_tokens: number of tokens; the last one is masked out where the instruction has an odd checksum
    :param stochastic: let the chunk depend on the seed
    :param device: where it says that it is
    """

    def __init__(
        self,
        horizon: int = 8,
        token_dim: int = 12,
        n_tokens: int = 5,
        stochastic: bool = False,
        device: Any = "cpu",
    ):
        import torch

        from rlt_gym.vla.base import VLASpec

        self.spec = VLASpec(
            "fake", token_dim=token_dim, horizon=horizon, max_tokens=n_tokens, stochastic=stochastic, state_dim=8
        )
        self.device = torch.device(device)
        self.calls: list[int] = []
        self._n_tokens = n_tokens
        self._encoder = np.random.default_rng(0).normal(size=(11, n_tokens * token_dim)).astype(np.float32)

    def forward(self, obs: Mapping[str, np.ndarray], tasks: Sequence[str], *, seed: Sequence[int] | None = None) -> Any:
        """
        Run the fake on a batch.

        :param obs: ``agentview``, ``wrist`` uint8 (B, H, W, 3), ``state`` float32 (B, 8)
        :param tasks: B instructions
        :param seed: B seeds
        :return: ``VLAOutput``
        """
        import torch

        from rlt_gym.vla.base import VLAOutput

        state = np.asarray(obs["state"], dtype=np.float32)
        batch, horizon = len(state), self.spec.horizon
        if len(tasks) != batch or any(len(obs[camera]) != batch for camera in self.spec.cameras):
            raise ValueError(f"Expected {batch} rows everywhere, got {len(tasks)} tasks.")
        self.calls.append(batch)
        brightness = [_brightness(np.asarray(obs[camera])) for camera in self.spec.cameras]
        words = [int(hashlib.sha256(task.encode()).hexdigest()[:4], 16) / 65535.0 for task in tasks]
        inputs = np.column_stack([*brightness, state / 100.0, words]).astype(np.float32)
        tokens = (inputs @ self._encoder).reshape(batch, self._n_tokens, -1)
        mask = np.ones((batch, self._n_tokens), dtype=bool)
        mask[:, -1] = [round(word * 65535) % 2 == 0 for word in words]  # by content: rows do not depend on their place
        chunk = np.zeros((batch, horizon, 7), dtype=np.float32)
        chunk[:, :, 0] = np.clip(state[:, :1] / 100.0, -1.0, 1.0)
        chunk[:, :, 1] = np.arange(horizon) / horizon
        if self.spec.stochastic and seed is not None:
            chunk[:, :, 2] = np.array([value % 1000 / 1000.0 for value in seed], dtype=np.float32)[:, None]
        chunk[:, :, 6] = -1.0
        return VLAOutput(
            tokens=torch.from_numpy(tokens).to(self.device),
            mask=torch.from_numpy(mask).to(self.device),
            kind=torch.from_numpy(mask.astype(np.uint8)).to(self.device),  # image where valid, else padding
            chunk=torch.from_numpy(chunk).to(self.device),
        )

    def to(self, device: Any) -> FakeVLA:
        """
        Say that the fake is on another device; nothing moves.

        :param device: torch device
        :return: the same object
        """
        import torch

        self.device = torch.device(device)
        return self

    def fingerprint(self) -> str:
        """
        Identify the constructor's arguments.

        :return: hash of the specification
        """
        return hashlib.sha256(repr(self.spec).encode()).hexdigest()


def _brightness(pictures: np.ndarray) -> np.ndarray:
    """Average each picture to a number in 0..1, with weights that tell it from the same picture upside down."""
    height, width = pictures.shape[1:3]
    weights = np.linspace(0.5, 1.5, height)[:, None] * np.linspace(0.5, 1.5, width)
    return np.average(pictures.mean(axis=3).reshape(len(pictures), -1), axis=1, weights=weights.reshape(-1)) / 255.0
