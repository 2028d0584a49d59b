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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    import torch

    from rlt_gym.core.robot_spec import RobotSpec

#: Kinds of tokens in :attr:`VLAOutput.kind`.
TOKEN_KINDS: dict[str, int] = {"pad": 0, "image": 1, "text": 2, "state": 3, "action": 4}

#: Which axes of pictures (B, H, W, 3) a VLA can reverse before it reads them: none, top and bottom, left and right, or
#: both, which turns them by 180 degrees. LIBERO's are upside down: ``"flipped"`` makes them upright, while most
#: published datasets and policies have them ``"turned"``.
REVERSED: dict[str, tuple[int, ...]] = {"same": (), "flipped": (1,), "mirrored": (2,), "turned": (1, 2)}
#: The same as functions of arrays.
ORIENTATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    name: partial(np.flip, axis=axes) for name, axes in REVERSED.items()
}

#: Raw observation batch: one uint8 array (B, H, W, 3) per camera of the VLA's specification, exactly as the environment
#: gives it, and ``state`` float32 (B, P), the environment's ``proprio``. With LIBERO: ``agentview`` and ``wrist``,
#: upside down, and 8 numbers: position of the end effector (m), its axis-angle (rad), gripper qpos.
#: ``RobotSpec.cameras`` says which pictures are upside down.
VLAObs = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class VLASpec:
    """
    What a caller must know about a VLA: what it gives, and what it needs.

    An environment gives what is needed, or refuses the VLA before simulators start. ``None`` means that the VLA does
    not say it; then nothing is compared.

    :param name: Short name.
    :param token_dim: Width H of the tokens.
    :param horizon: Length T of the action chunk in control steps.
    :param action_dim: Numbers d per action; must be the robot's.
    :param max_tokens: Most tokens M an output can have, ``None`` if unknown.
    :param stochastic: Whether the chunk depends on ``seed``.
    :param cameras: Keys of the pictures that it reads from the observation.
    :param image_size: Edge in pixels to which it resizes frames before it reads them, so that larger ones tell it
        nothing more.
    :param assets: Kind of simulation assets it was trained on (``"embedded"``, ``"official"``): the environment warns
        about others.
    :param frame_size: Edge in pixels of the frames that it needs, if it is not ``image_size``: an environment draws
        frames of this size. ``None`` = ``image_size`` and larger.
    :param state_dim: Numbers P of ``state`` that it needs; ``None`` = any.
    :param max_batch: Most rows of one forward pass, so that it fits into memory; ``None`` = any number.
        :func:`~rlt_gym.vla.batches.run_vla` keeps it.
    :param dtype: Type of the tokens, a name of torch's such as ``"bfloat16"``.
    :param kinds: Kinds of its tokens, names of :data:`TOKEN_KINDS` without ``"pad"``.
    :param language: Whether the output depends on the instruction.
    :param render: How the pictures were drawn that it was trained on, ``"exact"`` or ``"fast"``.
    :param upside_down: Whether it takes pictures whose first row is the bottom of the scene (``Camera.upside_down``).
    :param orientation: What it does with the pictures that it gets, a name of :data:`ORIENTATIONS`.
        :func:`~rlt_gym.vla.conformance.check_vla` compares it with what the VLA's ``frames()`` gives, and ``rlt probe``
        lays attention over the pictures with it.
    :param proprio: Names of the parts of ``state`` in their order, e.g. ``("position", "orientation", "fingers")``.
    :param control_mode: What an action means, ``"relative"`` or ``"absolute"`` (``RobotSpec.control_mode``).
    :param control_frequency: Control steps per second of its chunks.
    :param picture_grids: Camera, rows and columns of each grid of picture tokens, in the order in which a row's valid
        tokens of kind ``"image"`` stand; within a grid row by row, beginning at the upper left of the picture as the
        VLA reads it, after ``orientation``. ``rlt probe`` lays attention over the pictures with it.
    :param noise: Shape (S, n) of the noise with which its flow begins, if a caller may choose it
        (:attr:`VLAOutput.from_noise`): n numbers for each of S steps. The VLA's own noise is standard normal.
    :raises ValueError: A value that cannot be.
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
    max_batch: int | None = None
    dtype: str | None = None
    kinds: tuple[str, ...] | None = None
    language: bool = True
    render: str | None = None
    upside_down: bool | None = None
    orientation: str | None = None
    proprio: tuple[str, ...] | None = None
    control_mode: str | None = None
    control_frequency: float | None = None
    picture_grids: tuple[tuple[str, int, int], ...] | None = None
    noise: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name in ("token_dim", "horizon", "action_dim", "max_tokens", "image_size", "frame_size", "max_batch"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"VLASpec.{name} of {self.name!r} must be an integer from 1 on, got {value!r}.")
        if self.picture_grids is not None:
            object.__setattr__(self, "picture_grids", tuple(tuple(grid) for grid in self.picture_grids))
            for grid in self.picture_grids:
                sizes = grid[1:]
                if len(grid) != 3 or grid[0] not in self.cameras or not all(type(n) is int and n > 0 for n in sizes):
                    raise ValueError(
                        f"VLASpec.picture_grids of {self.name!r} must hold (camera, rows, columns) with a camera of "
                        f"{list(self.cameras)}, got {grid!r}."
                    )
        if self.noise is not None:
            object.__setattr__(self, "noise", tuple(self.noise))
            if len(self.noise) != 2 or not all(type(n) is int and n > 0 for n in self.noise):
                raise ValueError(f"VLASpec.noise of {self.name!r} must be (steps, numbers per step), got {self.noise}.")
        kinds = tuple(kind for kind in TOKEN_KINDS if kind != "pad")
        for name, value, allowed in (
            *(("kinds", kind, kinds) for kind in self.kinds or ()),
            ("orientation", self.orientation, tuple(ORIENTATIONS)),
            ("render", self.render, ("exact", "fast")),
        ):
            if value is not None and value not in allowed:
                raise ValueError(f"VLASpec.{name} of {self.name!r} may be {', '.join(allowed)}, got {value!r}.")

    def check_robot(self, robot: RobotSpec) -> None:
        """
        Refuse a robot whose observations or actions do not fit this VLA.

        :param robot: The robot.
        :raises ValueError: If a camera is missing or shows the scene the other way up, or the state, the action or
            the control frequency is another one.
        """
        cameras = {camera.key: camera for camera in robot.cameras}
        unknown = [camera for camera in self.cameras if camera not in cameras]
        if unknown:
            self._refuse(f"needs the cameras {unknown}", f"{robot.name!r} has {list(cameras)}")
        for camera in self.cameras:
            if self.upside_down not in (None, cameras[camera].upside_down):
                ways = {True: "upside down", False: "upright"}
                self._refuse(
                    f"takes pictures {ways[not cameras[camera].upside_down]}",
                    f"{robot.name!r} has {camera!r} {ways[cameras[camera].upside_down]}",
                )
        if self.state_dim not in (None, robot.proprio_size):
            self._refuse(f"reads a state of {self.state_dim} numbers", f"{robot.name!r} has {robot.proprio_size}")
        parts = tuple(part.name for part in robot.proprio)
        if self.proprio not in (None, parts):
            self._refuse(f"reads the state {', '.join(self.proprio or ())}", f"{robot.name!r} has {', '.join(parts)}")
        if self.action_dim != robot.action_size:
            self._refuse(f"gives actions of {self.action_dim} numbers", f"{robot.name!r} takes {robot.action_size}")
        if robot.control_mode is not None and self.control_mode not in (None, robot.control_mode):
            self._refuse(f"gives {self.control_mode} actions", f"{robot.name!r} takes {robot.control_mode} ones")
        if self.control_frequency not in (None, robot.control_frequency):
            steps = f"{self.control_frequency:g} control steps per second"
            self._refuse(f"plans {steps}", f"{robot.name!r} makes {robot.control_frequency:g}")

    def _refuse(self, needs: str, has: str) -> NoReturn:
        raise ValueError(f"The VLA {self.name!r} {needs}, and the robot {has}: use a VLA and an environment that fit.")

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

    def check_render(self, render: str | None = None, default: str = "exact") -> str:
        """
        Choose how pictures are drawn, or check what was chosen.

        :param render: Wanted quality; ``"stock"`` draws the pictures of ``"exact"``. ``None`` = what the VLA needs.
        :param default: Quality if the VLA does not say what it needs.
        :return: The quality.
        :raises ValueError: If the VLA was trained on pictures of another quality.
        """
        if render is None:
            return self.render or default
        if self.render not in (None, "exact" if render == "stock" else render):
            raise ValueError(
                f"render is {render!r}; the VLA {self.name!r} was trained on {self.render!r} pictures: leave render "
                "out, or use another VLA."
            )
        return render

    def check_kinds(self, kinds: Sequence[str]) -> None:
        """
        Refuse kinds of tokens that this VLA does not give.

        :param kinds: Wanted kinds, ``"all"`` among them for any.
        :raises ValueError: If one is missing.
        """
        if self.kinds is not None and "all" not in kinds and not set(kinds) <= set(self.kinds):
            raise ValueError(
                f"The tokens {', '.join(kinds)} are asked for, and the VLA {self.name!r} gives "
                f"{', '.join(self.kinds) or 'none'}: ask for others, or use another VLA."
            )

    def check_noise(self) -> tuple[int, int]:
        """
        Refuse a VLA whose noise a caller cannot choose.

        :return: :attr:`noise`.
        :raises ValueError: If it has none.
        """
        if self.noise is None:
            raise ValueError(
                f"The VLA {self.name!r} takes no noise from outside: use one whose VLASpec says noise, for example "
                "lerobot:FOLDER of a SmolVLA, PI0 or PI05."
            )
        return self.noise


@dataclass
class VLAOutput:
    """
    One batch of outputs.

    :param tokens: Final-layer embeddings, floating (B, M, H), detached, not inference tensors.
    :param mask: bool (B, M), True = valid; holes are allowed.
    :param kind: uint8 (B, M), see :data:`TOKEN_KINDS`.
    :param chunk: float32 (B, T, d) in the environment's units, every number in [-1, 1]. With LIBERO d is 7, and the
        last number is the gripper: -1 opens, 1 closes.
    :param from_noise: Gives the chunks (B, T, d) that the flow makes of other noise, float32 (B, S, n), for the same
        observations; tokens are not computed again. A VLA whose ``spec.noise`` is not ``None`` has it. It may hold much
        memory: drop the output when the next one is there.
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    kind: torch.Tensor
    chunk: torch.Tensor
    from_noise: Callable[[torch.Tensor], torch.Tensor] | None = None

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
        elif spec.dtype is not None and self.tokens.dtype != getattr(torch, spec.dtype, None):
            problems.append(f"tokens is {self.tokens.dtype}, but spec.dtype is {spec.dtype!r}")
        if spec.noise is not None and self.from_noise is None:
            problems.append(f"spec.noise is {spec.noise}, but there is no from_noise")
        if self.mask.dtype != torch.bool or tuple(self.mask.shape) != shape[:2]:
            problems.append(f"mask is {self.mask.dtype} {tuple(self.mask.shape)}, not bool {shape[:2]}")
        if tuple(self.kind.shape) != shape[:2]:
            problems.append(f"kind has shape {tuple(self.kind.shape)}, not {shape[:2]}")
        problems += _problems_of_chunk(self.chunk, spec, batch_size)
        if self.tokens.requires_grad or self.chunk.requires_grad:
            problems.append("tokens or chunk carry gradients; run the VLA under torch.no_grad()")
        if problems:
            raise ValueError(f"The VLA {spec.name!r} breaks the FrozenVLA contract: {'; '.join(problems)}.")
        return self

    def chunk_of(self, noise: torch.Tensor, spec: VLASpec) -> torch.Tensor:
        """
        Make chunks of given noise, and compare them with the contract.

        :param noise: Float32 (B, S, n), on any device.
        :param spec: The VLA's specification.
        :return: Chunks, float32 (B, T, d), on the VLA's device.
        :raises ValueError: If the VLA takes no noise, the noise has another shape, or a chunk does not fit.
        """
        wanted = (len(self.chunk), *spec.check_noise())
        if tuple(noise.shape) != wanted:
            raise ValueError(f"noise has the shape {tuple(noise.shape)}; the VLA {spec.name!r} takes {wanted}.")
        assert self.from_noise is not None
        chunk = self.from_noise(noise.to(self.chunk.device, self.chunk.dtype))
        problems = _problems_of_chunk(chunk, spec, len(self.chunk))
        if problems:
            raise ValueError(
                f"The VLA {spec.name!r} breaks the FrozenVLA contract: {'; '.join(problems)} (from_noise)."
            )
        return chunk


def _problems_of_chunk(chunk: torch.Tensor, spec: VLASpec, batch_size: int) -> list[str]:
    import torch

    wanted = (batch_size, spec.horizon, spec.action_dim)
    if chunk.dtype != torch.float32 or tuple(chunk.shape) != wanted:
        return [f"chunk is {chunk.dtype} {tuple(chunk.shape)}, not float32 {wanted}"]
    if not bool((chunk.abs() <= 1.0).all()):  # also false for NaN
        return ["chunk has values outside [-1, 1] or NaN"]
    return []


@runtime_checkable
class FrozenVLA(Protocol):
    """
    A policy that is used but never trained.

    ``forward`` takes one batch with one instruction per row and must give each row the same result whatever the other
    rows are. Each VLA flips and resizes frames, tokenizes and normalizes by itself, and undoes the normalization of
    its actions.

    A VLA may have a method ``frames(obs)`` that gives, for each camera, the pictures as its network reads them, NumPy
    (B, h, w, 3) in any range: :func:`~rlt_gym.vla.conformance.check_vla` compares their orientation with ``spec``.
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


def require_vla(vla: object) -> FrozenVLA:
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
