"""A stochastic actor-critic policy that starts at the VLA: a Gaussian around its chunk."""

import math
from typing import Any

import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import DiagGaussianDistribution
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import MlpExtractor
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import nn

from rlt_sb3.rlt.features import RLTFeatures, TensorDict


class ReferenceFeatures(RLTFeatures):
    """
    The features of RLT's networks, followed by the VLA's chunk.

    :param observation_space: Dict with ``z_rl`` (D,), ``proprio`` (P,), ``vla_ref`` (C, d)
    :param proprio_norm: see :class:`~rlt_sb3.rlt.features.RLTFeatures`
    :param token_input: False leaves ``z_rl`` out
    """

    def __init__(self, observation_space: spaces.Dict, proprio_norm: Any = "auto", token_input: bool = True):
        super().__init__(observation_space, proprio_norm, token_input)
        self._features_dim += spaces.flatdim(observation_space["vla_ref"])

    def forward(self, observations: TensorDict) -> th.Tensor:
        """
        Compute the features of observations.

        :param observations: ``z_rl`` (B, D), ``proprio`` (B, P), ``vla_ref`` (B, C, d)
        :return: features (B, features_dim), the last C * d of them are ``vla_ref``
        """
        return th.cat([super().forward(observations), observations["vla_ref"].float().flatten(1)], dim=1)


class ReferenceExtractor(MlpExtractor):
    """
    The hidden layers of actor and critic; the VLA's chunk goes past those of the actor.

    :param feature_dim: number of features
    :param reference_dim: how many of the last features are the VLA's chunk, C * d
    :param kwargs: of Stable-Baselines3's ``MlpExtractor``
    """

    def __init__(self, feature_dim: int, reference_dim: int, **kwargs: Any):
        super().__init__(feature_dim, **kwargs)
        self.reference_dim = reference_dim
        self.latent_dim_pi += reference_dim

    def forward_actor(self, features: th.Tensor) -> th.Tensor:
        """
        Compute the actor's hidden layers.

        :param features: (B, features)
        :return: their output, followed by the VLA's chunk
        """
        return th.cat([super().forward_actor(features), features[:, -self.reference_dim :]], dim=1)


class VLACenteredGaussian(DiagGaussianDistribution):
    """
    A Gaussian over corrections of the VLA's chunk; what is drawn and judged are whole chunks.

    The chunk is cut into equal parts. Each part has one correction, which all its control steps share. With one part,
    noise does not average out over the chunk, and a chunk is a choice of d numbers rather than of C * d.

    :param chunk_shape: (C, d)
    :param parts: number of parts, a divisor of C
    """

    def __init__(self, chunk_shape: tuple[int, int], parts: int):
        super().__init__(parts * chunk_shape[1])
        self.chunk_shape, self.parts = chunk_shape, parts
        self.reference_dim = chunk_shape[0] * chunk_shape[1]

    def proba_distribution_net(self, latent_dim: int, log_std_init: float = 0.0) -> tuple[nn.Module, nn.Parameter]:
        """
        Make what gives the parameters.

        :param latent_dim: size of the actor's hidden output, the VLA's chunk included
        :param log_std_init: logarithm of the first standard deviation
        :return: layer that gives the mean correction, logarithm of the standard deviations
        """
        return super().proba_distribution_net(latent_dim - self.reference_dim, log_std_init)

    def around(self, reference: th.Tensor, mean: th.Tensor, log_std: th.Tensor) -> "VLACenteredGaussian":
        """
        Set the parameters.

        :param reference: the VLA's chunks, flat (B, C * d)
        :param mean: mean corrections (B, parts * d)
        :param log_std: logarithm of their standard deviations (parts * d,)
        :return: this object
        """
        self.reference = reference
        self.proba_distribution(mean, log_std)
        return self

    def _chunk(self, correction: th.Tensor) -> th.Tensor:
        steps, size = self.chunk_shape
        held = correction.reshape(-1, self.parts, size).repeat_interleave(steps // self.parts, dim=1)
        return self.reference + held.flatten(1)

    def log_prob(self, actions: th.Tensor) -> th.Tensor:
        """
        Compute the log-density of the corrections in chunks that were drawn from this family.

        :param actions: flat chunks (B, C * d), not clipped
        :return: (B,)
        """
        steps, size = self.chunk_shape
        parts = (actions - self.reference).reshape(-1, self.parts, steps // self.parts, size)
        return super().log_prob(parts.mean(2).flatten(1))

    def sample(self) -> th.Tensor:
        """Draw flat chunks (B, C * d)."""
        return self._chunk(super().sample())

    def mode(self) -> th.Tensor:
        """Return the most likely chunks, flat (B, C * d)."""
        return self._chunk(super().mode())


class VLACenteredPolicy(ActorCriticPolicy):
    """
    An actor-critic policy whose chunks are Gaussian around ``vla_ref`` plus a correction that starts at zero.

    The untrained policy plays exactly the VLA's chunk if it is deterministic. It works with Stable-Baselines3's PPO and
    A2C as they are, and with :class:`~rlt_sb3.grpo.grpo.GRPO`.

    :param observation_space: Dict with ``z_rl`` (D,), ``proprio`` (P,), ``vla_ref`` (C, d)
    :param action_space: Box(-1, 1, (C, d))
    :param lr_schedule: learning rate schedule
    :param net_arch: hidden layers, a list or ``dict(pi=[...], vf=[...])``; [256, 256] by default
    :param activation_fn: activation
    :param log_std_init: logarithm of the first standard deviation of a correction
    :param parts: number of parts of a chunk that have a correction of their own, a divisor of C
    :param pull: what ``ent_coef`` of PPO weighs is the pull towards the VLA in place of the entropy: the mean squared
        distance of the policy's mean chunk to ``vla_ref``, over its C * d numbers (``train/entropy_loss`` logs it)
    :param features_extractor_class: features, the last C * d of which are ``vla_ref``
    :param features_extractor_kwargs: e.g. ``dict(proprio_norm="none")``
    :param optimizer_class: Adam by default
    :param optimizer_kwargs: for the optimizer, without the learning rate
    :param use_sde: must be False; Stable-Baselines3's algorithms pass it
    :raises ValueError: for spaces or settings that do not fit
    """

    action_dist: VLACenteredGaussian

    def __init__(
        self,
        observation_space: spaces.Dict,
        action_space: spaces.Box,
        lr_schedule: Schedule,
        net_arch: list[int] | dict[str, list[int]] | None = None,
        activation_fn: type[nn.Module] = nn.Tanh,
        log_std_init: float = -4.0,
        parts: int = 1,
        pull: bool = False,
        features_extractor_class: type[ReferenceFeatures] = ReferenceFeatures,
        features_extractor_kwargs: dict[str, Any] | None = None,
        optimizer_class: type[th.optim.Optimizer] = th.optim.Adam,
        optimizer_kwargs: dict[str, Any] | None = None,
        use_sde: bool = False,
    ):
        shape = action_space.shape
        known = observation_space.spaces if isinstance(observation_space, spaces.Dict) else {}
        if len(shape) != 2 or "vla_ref" not in known or known["vla_ref"].shape != shape:
            raise ValueError(
                f"VLACenteredPolicy needs chunks (C, d) as actions and vla_ref of that shape in the observation, got "
                f"{action_space} and {observation_space}."
            )
        if not isinstance(parts, int) or parts < 1 or shape[0] % parts:
            raise ValueError(f"parts must be a divisor of the chunk's {shape[0]} control steps, got {parts!r}.")
        if use_sde:
            raise ValueError("use_sde must be False: the policy has its own distribution.")
        self.parts, self.pull = parts, pull
        self._chunk_shape = (int(shape[0]), int(shape[1]))
        super().__init__(
            observation_space,
            action_space,
            lr_schedule,
            net_arch=[256, 256] if net_arch is None else net_arch,
            activation_fn=activation_fn,
            log_std_init=log_std_init,
            features_extractor_class=features_extractor_class,
            features_extractor_kwargs=features_extractor_kwargs,
            optimizer_class=optimizer_class,
            optimizer_kwargs=optimizer_kwargs,
        )

    def _build_mlp_extractor(self) -> None:
        self.mlp_extractor = ReferenceExtractor(
            self.features_dim,
            self.action_dist.reference_dim,
            net_arch=self.net_arch,
            activation_fn=self.activation_fn,
            device=self.device,
        )

    def _build(self, lr_schedule: Schedule) -> None:
        self.action_dist = VLACenteredGaussian(self._chunk_shape, self.parts)
        super()._build(lr_schedule)
        nn.init.zeros_(self.action_net.weight)  # type: ignore[arg-type]
        nn.init.zeros_(self.action_net.bias)  # type: ignore[arg-type]

    def _get_constructor_parameters(self) -> dict[str, Any]:
        data = super()._get_constructor_parameters()
        for name in ("squash_output", "full_std", "use_expln", "ortho_init"):
            data.pop(name, None)
        data.pop("normalize_images", None)
        return data | {"parts": self.parts, "pull": self.pull}

    def _get_action_dist_from_latent(self, latent_pi: th.Tensor) -> VLACenteredGaussian:
        size = self.action_dist.reference_dim
        # in units of the first standard deviation, so that the size of a step does not depend on it
        mean = math.exp(self.log_std_init) * self.action_net(latent_pi[:, :-size])
        return self.action_dist.around(latent_pi[:, -size:], mean, self.log_std)

    def evaluate_actions(self, obs: PyTorchObs, actions: th.Tensor) -> tuple[th.Tensor, th.Tensor, th.Tensor | None]:
        """
        Judge chunks by the present policy.

        :param obs: observations
        :param actions: flat chunks (B, C * d), not clipped
        :return: values (B, 1), log-densities (B,), entropies (B,) or with ``pull`` the negative distances (B,)
        """
        values, log_prob, entropy = super().evaluate_actions(obs, actions)
        if self.pull:
            # action_dist has the parameters that the call above computed, with their gradients
            entropy = -(self.action_dist.mode() - self.action_dist.reference).pow(2).mean(1)
        return values, log_prob, entropy

    def start_log_prob(self, obs: TensorDict, actions: th.Tensor) -> th.Tensor:
        """
        Compute the log-densities of chunks by the untrained policy, which is known without a copy of it.

        :param obs: ``vla_ref`` (B, C, d)
        :param actions: flat chunks (B, C * d), not clipped
        :return: (B,)
        """
        start = VLACenteredGaussian(self._chunk_shape, self.parts)
        zeros = th.zeros(len(actions), len(self.log_std), device=actions.device)
        return start.around(
            obs["vla_ref"].float().flatten(1), zeros, th.full_like(self.log_std, self.log_std_init)
        ).log_prob(actions)
