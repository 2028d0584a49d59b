"""
RL that reaches the VLA: networks of RLT whose RL token and reference chunk come from a copy of the VLA that learns.

The environment's own VLA stays frozen: it gives ``vla_ref``, towards which everything is pulled. The copy reads the
pictures of the rows again at every use, so nothing that is stored goes stale. Each network of RLT has numbers of its
own for what learns, and shares the rest of the copy; so an actor that is deployed or saved keeps the VLA that it was
trained with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch as th
from gymnasium import spaces
from stable_baselines3.common.type_aliases import Schedule
from torch import nn

from rlt_sb3.common.replay.storage import ChunkBatch
from rlt_sb3.common.torch_utils import times_per_dimension
from rlt_sb3.rlt.features import ProprioLayout, RLTFeatures, TensorDict

PICTURES = "pictures"
PARTS = ("head", "lora", "all")


@dataclass(frozen=True)
class TrainVLA:
    r"""
    Settings of ``train_vla``.

    With :math:`\theta` for what learns, :math:`z_\theta(s)` for the RL token and :math:`v_\theta(s)` for the reference
    chunk of the copy, :math:`v_0` for that of the frozen VLA, each update of the actor takes one step of Adam on

    .. math:: \sum_i \big(Q_i(z_\theta(s), p, a) - y\big)^2 - Q\big(\bar z, p, \pi(\bar z, p, v_\theta(s))\big)
              + \mathrm{bc\_coef}\, d(\pi, v_0) + \mathrm{imitation\_coef}\, d(v_\theta(s), v_0),

    where :math:`\bar z` is :math:`z_\theta(s)` without gradient, ``d`` the mean squared distance in units of
    ``action_scale``, and :math:`\pi` the actor, whose own first term in "residual" mode is :math:`v_\theta(s)`. So the
    critics' loss reaches the VLA through the RL token, the actor's loss through the chunk. An action head comes after
    the tokens: only the actor's loss and the imitation reach it.

    :param part: "head", the action head; "lora", LoRA matrices in the transformer's linear layers (needs peft); "all"
    :param rank: of the LoRA matrices
    :param learning_rate: of the VLA's own Adam
    :param imitation_coef: weight of the distance to the frozen VLA's chunk
    :param vla_class: of the copy, e.g. ``rlt_gym.rl_token.trainable_vla.TrainableVLA``; RLT adds it
    :param architecture: its argument; RLT adds it
    :raises ValueError: for settings out of range
    """

    part: str = "head"
    rank: int = 8
    learning_rate: float = 1e-5
    imitation_coef: float = 15.0
    vla_class: Any = None
    architecture: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.part not in PARTS:
            raise ValueError(f"train_vla.part must be one of {PARTS}, got {self.part!r}.")
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"train_vla.rank must be an integer >= 1, got {self.rank!r}.")
        for name in ("learning_rate", "imitation_coef"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0.0 <= value < float("inf")):
                raise ValueError(f"train_vla.{name} must be a number >= 0, got {value!r}.")


class TrainedVLAFeatures(RLTFeatures):
    """
    Features of the RL token that a learning copy of the VLA gives.

    Until the copy has taken its first step, the row's own ``z_rl`` and ``vla_ref`` are read: they are exactly those of
    the frozen VLA.

    :param observation_space: Dict with ``pictures``, ``z_rl`` (D,), ``vla_ref`` (C, d) and ``proprio`` (P,)
    :param vla: the copy, shared by all networks
    :param proprio_norm: as in :class:`~rlt_sb3.rlt.features.RLTFeatures`
    :raises ValueError: for an observation without ``pictures``
    """

    moved: th.Tensor

    def __init__(
        self,
        observation_space: spaces.Dict,
        vla: Any,
        proprio_norm: str | tuple[Any, Any] | ProprioLayout = "auto",
    ):
        check_pictures(observation_space)
        super().__init__(observation_space, proprio_norm)
        self._vla = (vla,)  # in a tuple: no part of this network
        self.weights = nn.ParameterList(value.detach().clone() for value in vla.moving.values())
        self.register_buffer("moved", th.zeros((), dtype=th.bool))

    def run(self, observations: TensorDict) -> tuple[th.Tensor, th.Tensor]:
        """
        Run the copy of the VLA.

        :param observations: with ``pictures``
        :return: RL token (B, D) and chunk (B, C, d), with gradients
        """
        vla = self._vla[0]
        with th.autocast(observations[PICTURES].device.type, enabled=False):
            return vla.run(observations, dict(zip(vla.moving, self.weights, strict=True)))

    def see(self, observations: TensorDict) -> TensorDict:
        """
        Replace what the frozen VLA gave by what the copy gives.

        :param observations: with ``pictures``; or with ``features``, which come back as they are
        :return: the same with ``features`` and ``vla_ref``
        """
        if "features" in observations:
            return observations
        if not self.moved:
            return {**observations, "features": super().forward(observations)}
        z_rl, vla_ref = self.run(observations)
        return {**observations, "features": super().forward({**observations, "z_rl": z_rl}), "vla_ref": vla_ref}

    def forward(self, observations: TensorDict) -> th.Tensor:
        """
        Compute the features of observations.

        :param observations: as for :meth:`see`
        :return: features (B, features_dim)
        """
        with th.autocast(self.moved.device.type, enabled=False):
            return self.see(observations)["features"]

    def of_token(self, observations: TensorDict, z_rl: th.Tensor) -> th.Tensor:
        """
        Compute the features for a given RL token.

        :param observations: with ``proprio``
        :param z_rl: (B, D)
        :return: features (B, features_dim), with gradients
        """
        return super().forward({"proprio": observations["proprio"], "z_rl": z_rl})


class VLATraining:
    """
    The copy of the VLA among the networks of a policy.

    The critics' network has the numbers that learn; the actor that learns gets them after each step.

    :param policy: of RLT, whose networks have :class:`TrainedVLAFeatures`
    :param settings: the settings
    :param lr_schedule: of the critics, which get an optimizer without the VLA
    """

    def __init__(self, policy: Any, settings: TrainVLA, lr_schedule: Schedule):
        self.settings = settings
        self.vla = policy.vla
        self.features: TrainedVLAFeatures = policy.critic.features_extractor
        policy.actor.features_extractor.requires_grad_(False)
        mine = {id(parameter) for parameter in self.features.parameters()}
        others = [parameter for parameter in policy.critic.parameters() if id(parameter) not in mine]
        policy.critic.optimizer = policy.optimizer_class(others, lr=lr_schedule(1), **policy.optimizer_kwargs)
        self.optimizer = th.optim.Adam(self.features.weights.parameters(), lr=settings.learning_rate)
        names = ("actor", "actor_target", "critic", "critic_target", "actor_deployed", "actor_on_trial")
        self._networks = {name: getattr(policy, name).features_extractor for name in names if hasattr(policy, name)}
        self._graph: tuple[th.Tensor, ...] | None = None

    def start(self, vla: nn.Module) -> None:
        """
        Give the copy the weights of the environment's VLA.

        :param vla: VLA and encoder
        """
        self.vla.load_state_dict(vla.state_dict())
        with th.no_grad():
            for network in self._networks.values():
                for mine, first in zip(network.weights, self.vla.moving.values(), strict=True):
                    mine.copy_(first)

    def look(self, batch: ChunkBatch, learn: bool) -> None:
        """
        Run the VLA as it is now on the rows, once for all networks.

        :param batch: rows; they get ``features`` and the copy's ``vla_ref``
        :param learn: whether :meth:`step` follows; else there are no gradients
        """
        with th.no_grad():
            batch.next_observations.update(self.features.see(batch.next_observations))
            if not learn:
                batch.observations.update(self.features.see(batch.observations))
        if learn:
            z_rl, vla_ref = self.features.run(batch.observations)
            token, chunk = z_rl.detach().requires_grad_(), vla_ref.detach().requires_grad_()
            self._graph = (z_rl, vla_ref, token, chunk)
            batch.observations.update(features=self.features.of_token(batch.observations, token), vla_ref=chunk)

    def step(self, target: th.Tensor, unit: Any) -> th.Tensor:
        """
        Take a step with the gradients that the losses of critics and actor have left.

        :param target: what the copy imitates, flat (B, C*d): the frozen VLA's chunks; where someone else chose the
            chunk, that one
        :param unit: one unit of action, a number () or one per action dimension (d,)
        :return: the mean squared distance to it
        """
        assert self._graph is not None
        z_rl, vla_ref, token, chunk = self._graph
        self._graph = None
        distance = times_per_dimension(vla_ref.flatten(1) - target, 1.0 / unit).pow(2).mean()
        outputs = [self.settings.imitation_coef * distance, vla_ref]
        gradients: list[th.Tensor | None] = [None, chunk.grad]
        if self.vla.moves_tokens:
            outputs.append(z_rl)
            gradients.append(token.grad)
        self.optimizer.zero_grad()
        th.autograd.backward(outputs, gradients)
        self.optimizer.step()
        self.leave_frozen()
        self._networks["actor"].load_state_dict(self.features.state_dict())
        return distance.detach()

    def leave_frozen(self) -> None:
        """From now on the networks that learn read what the copy gives."""
        for name in ("actor", "actor_target", "critic", "critic_target"):
            self._networks[name].moved.fill_(True)


def memory_of(vla: Any) -> int:
    """
    Compute what a copy of the VLA takes.

    :param vla: VLA and encoder
    :return: bytes of the copy, and of what learns in six networks, as gradients and in Adam
    """
    moving = sum(value.nbytes for value in vla.moving.values())
    return sum(value.nbytes for value in vla.state_dict().values()) + 9 * moving


def check_pictures(observation_space: spaces.Dict) -> None:
    """
    Refuse an environment that does not show what the VLA reads.

    :param observation_space: its observations
    :raises ValueError: if ``pictures`` are missing
    """
    if PICTURES not in observation_space.spaces:
        raise ValueError(
            f"train_vla needs {PICTURES} in the observations, got {', '.join(observation_space.spaces)}: make the "
            "environment with show_pictures=True (--env.show_pictures true)."
        )
