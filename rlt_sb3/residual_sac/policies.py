"""Networks of residual SAC: an actor whose chunks are the VLA's plus a bounded random correction, and RLT's critics."""

from typing import Any

import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import SquashedDiagGaussianDistribution
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.type_aliases import Schedule
from stable_baselines3.sac.policies import LOG_STD_MAX, LOG_STD_MIN, Actor, SACPolicy
from torch import nn

from rlt_sb3.common.torch_utils import AntiWindupClamp
from rlt_sb3.rlt.features import RLTFeatures, TensorDict
from rlt_sb3.rlt.policies import RLTCritic


class ResidualActor(Actor):
    """
    SAC's actor of ``clamp(vla_ref + scale * tanh(u), -1, 1)``, u Gaussian; the mean of u starts at zero.

    Densities are those of ``tanh(u)``: the reference and the scale are constants of the observation.

    :param observation_space: Dict with ``z_rl``, ``proprio``, ``vla_ref``
    :param action_space: Box(-1, 1, (C, d))
    :param net_arch: hidden layer sizes
    :param features_extractor: normalization of ``z_rl`` and ``proprio``
    :param features_dim: output size of the features extractor
    :param scale: the largest correction
    :param parts: number of parts of a chunk that have a correction of their own
    :param log_std_init: logarithm of the first standard deviation of u
    :param kwargs: of Stable-Baselines3's actor
    """

    def __init__(
        self,
        observation_space: spaces.Dict,
        action_space: spaces.Box,
        net_arch: list[int],
        features_extractor: nn.Module,
        features_dim: int,
        scale: float,
        parts: int,
        log_std_init: float,
        **kwargs: Any,
    ):
        steps, size = action_space.shape
        super().__init__(
            observation_space, action_space, net_arch, features_extractor, features_dim + steps * size, **kwargs
        )
        self.chunk_shape, self.scale, self.parts = (steps, size), scale, parts
        self.action_dist = SquashedDiagGaussianDistribution(parts * size)  # type: ignore[assignment]
        last = net_arch[-1] if net_arch else features_dim + steps * size
        mean, log_std = nn.Linear(last, parts * size), nn.Linear(last, parts * size)
        for layer, bias in ((mean, 0.0), (log_std, log_std_init)):
            nn.init.zeros_(layer.weight)
            nn.init.constant_(layer.bias, bias)
        self.mu, self.log_std = mean, log_std  # type: ignore[assignment]

    def get_action_dist_params(self, obs: TensorDict) -> tuple[th.Tensor, th.Tensor, dict[str, th.Tensor]]:  # type: ignore[override]
        """
        Compute the Gaussian.

        :param obs: ``z_rl`` (B, D), ``proprio`` (B, P), ``vla_ref`` (B, C, d)
        :return: mean and logarithm of the standard deviation of u (B, parts * d), nothing else
        """
        hidden = self.latent_pi(th.cat([self.features_extractor(obs), obs["vla_ref"].float().flatten(1)], dim=1))
        return self.mu(hidden), self.log_std(hidden).clamp(LOG_STD_MIN, LOG_STD_MAX), {}  # type: ignore[operator]

    def _chunk(self, obs: TensorDict, correction: th.Tensor) -> th.Tensor:
        steps, size = self.chunk_shape
        held = correction.reshape(-1, self.parts, size).repeat_interleave(steps // self.parts, dim=1)
        return AntiWindupClamp.apply(obs["vla_ref"].float().flatten(1) + self.scale * held.flatten(1))

    def forward(self, obs: TensorDict, deterministic: bool = False) -> th.Tensor:  # type: ignore[override]
        """
        Choose chunks.

        :param obs: observations
        :param deterministic: whether the correction is the mean's
        :return: flat chunks (B, C * d)
        """
        return self._chunk(obs, super().forward(obs, deterministic))

    def action_log_prob(self, obs: TensorDict) -> tuple[th.Tensor, th.Tensor]:  # type: ignore[override]
        """
        Draw chunks.

        :param obs: observations
        :return: flat chunks (B, C * d), log-densities of their corrections (B,)
        """
        correction, log_prob = super().action_log_prob(obs)
        return self._chunk(obs, correction), log_prob


class ResidualSACPolicy(SACPolicy):
    """
    Actor and critics of residual SAC.

    The untrained policy plays exactly the VLA's chunk if it is deterministic. The critics judge the chunk that is
    played, and do not see ``vla_ref``.

    :param observation_space: Dict with ``z_rl`` (D,), ``proprio`` (P,), ``vla_ref`` (C, d)
    :param action_space: Box(-1, 1, (C, d))
    :param lr_schedule: learning rate schedule
    :param net_arch: hidden layers, a list or ``dict(pi=[...], qf=[...])``; [256, 256] by default
    :param activation_fn: activation
    :param scale: the largest correction of an action's number
    :param parts: number of parts of a chunk that have a correction of their own, a divisor of C
    :param log_std_init: logarithm of the first standard deviation, before the tanh and the scale
    :param n_critics: number of Q-functions, whose minimum counts
    :param layer_norm: LayerNorm in the critics
    :param features_extractor_class: normalization of ``z_rl`` and ``proprio``
    :param features_extractor_kwargs: e.g. ``dict(proprio_norm="none")``
    :param optimizer_class: Adam by default
    :param optimizer_kwargs: for the optimizers, without the learning rate
    :param use_sde: must be False; SAC passes it
    :raises ValueError: for spaces or settings that do not fit
    """

    def __init__(
        self,
        observation_space: spaces.Dict,
        action_space: spaces.Box,
        lr_schedule: Schedule,
        net_arch: list[int] | dict[str, list[int]] | None = None,
        activation_fn: type[nn.Module] = nn.ReLU,
        scale: float = 0.05,
        parts: int = 1,
        log_std_init: float = -2.4,
        n_critics: int = 2,
        layer_norm: bool = True,
        features_extractor_class: type[BaseFeaturesExtractor] = RLTFeatures,
        features_extractor_kwargs: dict[str, Any] | None = None,
        optimizer_class: type[th.optim.Optimizer] = th.optim.Adam,
        optimizer_kwargs: dict[str, Any] | None = None,
        use_sde: bool = False,
    ):
        if not isinstance(parts, int) or parts < 1 or action_space.shape[0] % parts:
            raise ValueError(f"parts must be a divisor of the chunk's {action_space.shape[0]} steps, got {parts!r}.")
        if not scale > 0.0:
            raise ValueError(f"scale must be > 0, got {scale!r}.")
        if not isinstance(n_critics, int) or n_critics < 1:
            raise ValueError(f"n_critics must be an integer >= 1, got {n_critics!r}.")
        if use_sde:
            raise ValueError("use_sde must be False: the policy has its own distribution.")
        self.residual = {"scale": scale, "parts": parts, "log_std_init": log_std_init}
        self.layer_norm = layer_norm
        super().__init__(
            observation_space,
            action_space,
            lr_schedule,
            net_arch=net_arch,
            activation_fn=activation_fn,
            features_extractor_class=features_extractor_class,
            features_extractor_kwargs=features_extractor_kwargs,
            optimizer_class=optimizer_class,
            optimizer_kwargs=optimizer_kwargs,
            n_critics=n_critics,
        )

    def _get_constructor_parameters(self) -> dict[str, Any]:
        data = super()._get_constructor_parameters()
        for name in ("use_expln", "clip_mean", "normalize_images", "share_features_extractor"):
            data.pop(name, None)
        return data | self.residual | {"layer_norm": self.layer_norm}

    def make_actor(self, features_extractor: BaseFeaturesExtractor | None = None) -> ResidualActor:
        """Return a new actor."""
        return ResidualActor(**self._update_features_extractor(self.net_args | self.residual, features_extractor)).to(
            self.device
        )

    def make_critic(self, features_extractor: BaseFeaturesExtractor | None = None) -> RLTCritic:
        """Return a new ensemble of critics."""
        kwargs = self.critic_kwargs | {"layer_norm": self.layer_norm}
        return RLTCritic(**self._update_features_extractor(kwargs, features_extractor)).to(self.device)

    def scale_action(self, action: Any) -> Any:
        """
        Return the action unchanged: the action space is [-1, 1] already.

        :param action: an action
        :return: the same
        """
        return action

    def unscale_action(self, scaled_action: Any) -> Any:
        """See :meth:`scale_action`."""
        return scaled_action
