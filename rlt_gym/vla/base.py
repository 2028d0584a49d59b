"""
The contract between a frozen vision-language-action policy (VLA) and the rest of the package.

The contract requires: an action chunk has at least as many control steps as the environment plays, every action has
as many numbers as the robot takes, and every number is a float32 in [-1, 1]. The observation has the pictures and the
proprioception of the robot (:class:`~rlt_gym.core.robot_spec.RobotSpec`), unchanged; LIBERO's robot has two cameras, 8
numbers of proprioception and 7 numbers per action. :meth:`VLASpec.check_robot` refuses a VLA that does not fit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    import torch

#: Kinds of tokens in :attr:`VLAOutput.kind`.
TOKEN_KINDS: dict[str, int] = {"pad": 0, "image": 1, "text": 2, "state": 3, "action": 4}

#: Raw observation batch: one uint8 array (B, H, W, 3) per camera of the VLA's specification, exactly as the environment
#: gives it, and ``state`` float32 (B, P), the environment's ``proprio``. With LIBERO: ``agentview`` and ``wrist``,
#: upside down, and 8 numbers: position of the end effector (m), its axis-angle (rad), gripper qpos.
#: ``RobotSpec.cameras`` says which pictures are upside down.
VLAObs = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class VLASpec:
    """
    What a caller must know about a VLA.

    :param name: Short name.
    :param token_dim: Width H of the tokens.
    :param horizon: Length T of the action chunk in control steps.
    :param action_dim: Numbers d per action; must be the robot's.
    :param max_tokens: Most tokens M an output can have, ``None`` if unknown.
    :param stochastic: Whether the chunk depends on ``seed``.
    :param cameras: Keys of the pictures that it reads from the observation.
    :param image_size: Edge in pixels to which it resizes frames before it reads them, so that larger ones tell it
        nothing more; ``None`` = unknown.
    :param assets: Kind of simulation assets it was trained on (``"embedded"``, ``"official"``), so that a benchmark can
        warn about others; ``None`` = unknown.
    :param frame_size: Edge in pixels of the frames that it needs, if it is not ``image_size``: an environment draws
        frames of this size. ``None`` = ``image_size`` and larger.
    :param state_dim: Numbers P of ``state`` that it needs; ``None`` = any.
    """

    name: str
    token_dim: int
    horizon: int
    action_dim: int = 7
    max_tokens: int | None = None
    stochastic: bool = False
    cameras: tuple[str, ...] = ("agentview", "wrist")
    image_size: int | None = None
    assets: str | None = None
    frame_size: int | None = None
    state_dim: int | None = None

    def check_robot(self, robot: str, cameras: Sequence[str], state_dim: int, action_dim: int) -> None:
        """
        Refuse a robot whose observations or actions do not fit this VLA.

        :param robot: Name of the robot, for the message, e.g. ``"the robot 'panda'"``.
        :param cameras: Keys of its pictures.
        :param state_dim: Numbers of its proprioception.
        :param action_dim: Numbers per action.
        :raises ValueError: If a camera is missing, or the state or the action has another size.
        """
        unknown = [camera for camera in self.cameras if camera not in cameras]
        problem = None
        if unknown:
            problem = f"needs the cameras {unknown}, and {robot} has {list(cameras)}"
        elif self.state_dim not in (None, state_dim):
            problem = f"reads a state of {self.state_dim} numbers, and {robot} has {state_dim}"
        elif self.action_dim != action_dim:
            problem = f"gives actions of {self.action_dim} numbers, and {robot} takes {action_dim}"
        if problem is not None:
            raise ValueError(f"The VLA {self.name!r} {problem}: use a VLA and an environment that fit.")

    def check_frame_size(self, size: int | None = None, default: int = 128) -> int:
        """
        Choose the size of the frames, or check one that was chosen.

        :param size: Wanted edge in pixels; ``None`` = what the VLA needs.
        :param default: Edge in pixels if the VLA does not say what it needs.
        :return: Edge in pixels.
        :raises ValueError: If the VLA needs frames of another size.
        """
        needed = self.frame_size or self.image_size
        if size is None:
            return needed or default
        if (self.frame_size and size != self.frame_size) or (needed and size < needed):
            exactly = "" if self.frame_size else " at least"
            raise ValueError(
                f"image_size is {size}; the VLA {self.name!r} needs frames of{exactly} {needed} pixels: leave "
                "image_size out, or use another VLA."
            )
        return size


@dataclass
class VLAOutput:
    """
    One batch of outputs.

    :param tokens: Final-layer embeddings, floating (B, M, H), detached, not inference tensors.
    :param mask: bool (B, M), True = valid; holes are allowed.
    :param kind: uint8 (B, M), see :data:`TOKEN_KINDS`.
    :param chunk: float32 (B, T, d) in the environment's units, every number in [-1, 1]. With LIBERO d is 7, and the
        last number is the gripper: -1 opens, 1 closes.
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    kind: torch.Tensor
    chunk: torch.Tensor

    def check(self, spec: VLASpec, batch_size: int) -> VLAOutput:
        """
        Compare shapes, types and ranges with the contract.

        :param spec: The VLA's specification.
        :param batch_size: Number of observations that went in.
        :return: The output itself.
        :raises ValueError: If something does not fit.
        """
        import torch

        shape = tuple(self.tokens.shape)
        problems = []
        if (
            len(shape) != 3
            or shape[0] != batch_size
            or shape[2] != spec.token_dim
            or not self.tokens.is_floating_point()
        ):
            problems.append(f"tokens is {self.tokens.dtype} {shape}, not floating ({batch_size}, M, {spec.token_dim})")
        if self.mask.dtype != torch.bool or tuple(self.mask.shape) != shape[:2]:
            problems.append(f"mask is {self.mask.dtype} {tuple(self.mask.shape)}, not bool {shape[:2]}")
        if tuple(self.kind.shape) != shape[:2]:
            problems.append(f"kind has shape {tuple(self.kind.shape)}, not {shape[:2]}")
        wanted = (batch_size, spec.horizon, spec.action_dim)
        if self.chunk.dtype != torch.float32 or tuple(self.chunk.shape) != wanted:
            problems.append(f"chunk is {self.chunk.dtype} {tuple(self.chunk.shape)}, not float32 {wanted}")
        elif not bool((self.chunk.abs() <= 1.0).all()):  # also false for NaN
            problems.append("chunk has values outside [-1, 1] or NaN")
        if self.tokens.requires_grad or self.chunk.requires_grad:
            problems.append("tokens or chunk carry gradients; run the VLA under torch.no_grad()")
        if problems:
            raise ValueError(f"The VLA {spec.name!r} breaks the FrozenVLA contract: {'; '.join(problems)}.")
        return self


@runtime_checkable
class FrozenVLA(Protocol):
    """
    A policy that is used but never trained.

    ``forward`` takes one batch with one instruction per row and must give each row the same result whatever the other
    rows are. Each VLA flips and resizes frames, tokenizes and normalizes by itself, and undoes the normalization of
    its actions.
    """

    @property
    def spec(self) -> VLASpec:
        """Shapes and names."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        ...

    def forward(self, obs: VLAObs, tasks: Sequence[str], *, seed: Sequence[int] | None = None) -> VLAOutput:
        """
        Run the policy on a batch.

        :param obs: Raw observations, see :data:`VLAObs`.
        :param tasks: One instruction per row.
        :param seed: One number per row, see :func:`forward_seed`; a stochastic VLA derives its noise from it.
        :return: Tokens and chunk.
        """
        ...

    def to(self, device: torch.device | str) -> FrozenVLA:
        """
        Move the policy to a device. It is not called with the device that the policy is on.

        :param device: Where to move it.
        :return: The moved VLA (may be the same object).
        """
        ...

    def fingerprint(self) -> str:
        """
        Identify the policy; RL tokens, runs and files of transitions store this.

        :return: Hash of weights and configuration.
        """
        ...


class VLAUnavailableError(ConnectionError):
    """
    A VLA that runs elsewhere cannot be reached.

    What was played and learned before is good: a run saves it and can be resumed.
    """


def forward_seed(noise_seed: int, step: int) -> int:
    """
    Compute the seed that :meth:`FrozenVLA.forward` gets for a row.

    :param noise_seed: What the infos of the environment say about the episode.
    :param step: Control steps of the episode before the observation.
    :return: A number in [0, 2**32).
    """
    return int(np.random.SeedSequence([step, noise_seed]).generate_state(1)[0])


def fingerprint(config: Mapping[str, Any], state: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> str:
    """
    Hash a model.

    :param config: JSON-able configuration.
    :param state: Named tensors.
    :param dtype: Floating tensors are hashed in this type, so that a model hashes alike before and after it was stored
        in it; ``None`` = as they are.
    :return: sha256, 64 hexadecimal digits.
    """
    import torch

    digest = hashlib.sha256(json.dumps(dict(config), sort_keys=True, default=str).encode())
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_vla(vla: object) -> FrozenVLA:
    """
    Check that an object obeys :class:`FrozenVLA`, as far as this can be seen without running it.

    :param vla: The object.
    :return: The object.
    :raises ValueError: Naming what is missing.
    """
    missing = [name for name in ("spec", "device", "forward", "to", "fingerprint") if not hasattr(vla, name)]
    if missing:
        raise ValueError(
            f"{type(vla).__name__} is no FrozenVLA: it lacks {', '.join(missing)} (see rlt_gym.vla.FrozenVLA)."
        )
    if not isinstance(vla.spec, VLASpec):  # type: ignore[attr-defined]
        raise ValueError(f"{type(vla).__name__}.spec is {type(vla.spec).__name__}; it must be a VLASpec.")  # type: ignore[attr-defined]
    return vla  # type: ignore[return-value]
