"""The features of RLT's networks: the normalized RL token and the normalized proprio."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch as th
from gymnasium import spaces
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import nn

from rlt_sb3.common.gated_policy import TASK, n_tasks_of

TensorDict = dict[str, th.Tensor]
#: One entry per part of ``proprio``, plain data: ``kind`` ("linear" or "axis_angle"), ``size``, ``center``, ``scale``.
ProprioLayout = Sequence[Mapping[str, Any]]

KINDS = ("linear", "axis_angle")


def proprio_layout(robot: Any) -> list[dict[str, Any]]:
    """
    Convert what RLTFeatures needs of a robot into plain data that a saved model can keep.

    :param robot: the environment's ``metadata["robot"]``; ``proprio`` is read, parts with ``kind``, ``size``,
        ``center`` and ``scale``
    :return: the layout
    """
    return [
        {
            "kind": str(part.kind),
            "size": int(part.size),
            "center": [float(number) for number in part.center],
            "scale": [float(number) for number in part.scale],
        }
        for part in robot.proprio
    ]


class RLTFeatures(BaseFeaturesExtractor):
    """
    Normalizes ``z_rl`` and ``proprio`` and concatenates them; ``vla_ref`` is left to the actor.

    ``z_rl`` goes through a LayerNorm without weights: the first layer of each network does the same work. Since the
    features have no parameters, they are the same for all networks and are computed once per batch.

    ``proprio`` is scaled by constants, so there are no running statistics to save. Linear parts become ``(p - center) /
    scale``. An axis-angle vector becomes the first two columns of its rotation matrix: a gripper that points down is
    turned by about pi, where axis-angle flips its sign from one step to the next and the matrix does not. The linear
    parts come first. ``task``, where observations have it, stays as it is and comes last.

    :param observation_space: Dict with ``z_rl`` (D,), ``proprio`` (P,) and, with several tasks, ``task`` (T,)
    :param token_input: False leaves ``z_rl`` out (ablation: proprio only)
    :param proprio_norm: "auto" (RLT inserts the layout that the environment's robot describes), "none", a layout (one
        dict with ``kind``, ``size``, ``center`` and ``scale`` per part, see :func:`proprio_layout`), or (center,
        scale), P numbers each in any shape: (P,) or (P, 1, 1)
    :raises ValueError: for any other ``proprio_norm``, or one that does not fit P
    """

    center: th.Tensor
    inverse_scale: th.Tensor

    def __init__(
        self,
        observation_space: spaces.Dict,
        proprio_norm: str | tuple[Sequence[float], Sequence[float]] | ProprioLayout = "auto",
        token_input: bool = True,
    ):
        token_dim = int(observation_space["z_rl"].shape[0])  # type: ignore[index]
        size = int(observation_space["proprio"].shape[0])  # type: ignore[index]
        layout = _layout(proprio_norm, size)
        ends = [sum(part["size"] for part in layout[: number + 1]) for number in range(len(layout))]
        slices = [(part["kind"], slice(end - part["size"], end)) for part, end in zip(layout, ends, strict=True)]
        linear = [where for kind, where in slices if kind == "linear"]
        rotations = [where for kind, where in slices if kind == "axis_angle"]
        numbers = sum(where.stop - where.start for where in linear) + 6 * len(rotations)
        n_tasks = n_tasks_of(observation_space)
        super().__init__(observation_space, token_dim * token_input + numbers + (n_tasks or 0))
        self.task_input = n_tasks is not None
        self.linear, self.rotations, self.token_input = linear, rotations, token_input
        self.token_norm = nn.LayerNorm(token_dim, elementwise_affine=False)
        of_linear = [part for part in layout if part["kind"] == "linear"]
        center, scale = (
            th.as_tensor([number for part in of_linear for number in part[name]], dtype=th.float32)
            for name in ("center", "scale")
        )
        # constants, rebuilt by the constructor: not part of the state dict
        self.register_buffer("center", center, persistent=False)
        self.register_buffer("inverse_scale", 1.0 / scale, persistent=False)

    def forward(self, observations: TensorDict) -> th.Tensor:
        """
        Compute the features of observations.

        :param observations: ``z_rl`` (B, D), ``proprio`` (B, P); or ``features``, what was returned for them before
        :return: features (B, features_dim)
        """
        if "features" in observations:
            return observations["features"]
        parts = [self.token_norm(observations["z_rl"].float())] if self.token_input else []
        proprio = observations["proprio"].float()
        if self.linear:
            linear = th.cat([proprio[:, where] for where in self.linear], dim=1)
            parts.append((linear - self.center) * self.inverse_scale)
        parts += [rotation_columns(proprio[:, where]) for where in self.rotations]
        if self.task_input:
            parts.append(observations[TASK].float())
        return th.cat(parts, dim=1)


def _layout(proprio_norm: Any, size: int) -> ProprioLayout:
    """Check ``proprio_norm`` and return its layout of ``size`` numbers."""
    # RLT replaces "auto" by the layout of the environment's robot; without a robot the numbers stay as they are
    if isinstance(proprio_norm, str) and proprio_norm in ("auto", "none"):
        return [{"kind": "linear", "size": size, "center": [0.0] * size, "scale": [1.0] * size}]
    if isinstance(proprio_norm, str):
        raise ValueError(f"proprio_norm must be 'auto', 'none', (center, scale) or a layout, got {proprio_norm!r}.")
    layout = proprio_norm
    if not all(isinstance(part, Mapping) for part in layout):
        # flattened: (P, 1) would be broadcast over the batch
        center, scale = (th.as_tensor(numbers, dtype=th.float32).flatten().tolist() for numbers in proprio_norm)
        if not len(center) == len(scale) == size or not _usable(center, scale):
            raise ValueError(f"proprio_norm needs {size} finite centers and {size} scales > 0, got {proprio_norm!r}.")
        return [{"kind": "linear", "size": size, "center": center, "scale": scale}]
    for part in layout:
        axis_angle = part["kind"] == "axis_angle" and part["size"] == 3
        linear = part["kind"] == "linear" and len(part["center"]) == len(part["scale"]) == part["size"]
        if not axis_angle and not (linear and _usable(part["center"], part["scale"])):
            raise ValueError(
                f"A part of proprio must be axis_angle of 3 numbers, or linear with as many finite centers and scales "
                f"> 0 as numbers, got {part!r}."
            )
    total = sum(part["size"] for part in layout)
    if total != size:
        raise ValueError(
            f"The parts of proprio have {total} numbers, the observation has {size}: they must be equal, got "
            f"{layout!r}."
        )
    return layout


def _usable(center: Sequence[float], scale: Sequence[float]) -> bool:
    return bool(th.tensor(center).isfinite().all() and (th.tensor(scale) > 0).all())


def rotation_columns(axis_angle: th.Tensor) -> th.Tensor:
    """
    First two columns of the rotation matrix (Rodrigues' formula).

    :param axis_angle: (B, 3) rad
    :return: (B, 6)
    """
    angle = axis_angle.norm(dim=1, keepdim=True)
    axis = axis_angle / angle.clamp_min(1e-8)
    x, y, z = axis.unbind(1)
    cos, sin = angle.squeeze(1).cos(), angle.squeeze(1).sin()
    rest = 1.0 - cos
    return th.stack(
        [
            cos + x * x * rest,
            x * y * rest + z * sin,
            x * z * rest - y * sin,
            x * y * rest - z * sin,
            cos + y * y * rest,
            y * z * rest + x * sin,
        ],
        dim=1,
    )
