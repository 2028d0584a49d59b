"""Networks of RLT: an actor that edits the VLA's action chunk and an ensemble of critics that never sees it."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import BaseModel, BasePolicy, ContinuousCritic
from stable_baselines3.common.preprocessing import get_action_dim
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, create_mlp, get_actor_critic_arch
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from stable_baselines3.td3.policies import Actor, TD3Policy
from torch import nn
from torch.nn import functional as F

TensorDict = dict[str, th.Tensor]

#: LIBERO's proprio: metres in the world frame, end effector over a table (z 0.9-1.4) or over the floor (z 0-0.5)
LIBERO_POSITION_CENTER = (0.0, 0.0, 0.7)
LIBERO_POSITION_SCALE = (0.15, 0.15, 0.25)
#: finger joints, 0..0.04 and -0.04..0 metres
LIBERO_GRIPPER_CENTER = (0.02, -0.02)
LIBERO_GRIPPER_SCALE = (0.02, 0.02)


class AntiWindupClamp(th.autograd.Function):
    """
    ``clamp(x, -1, 1)`` whose gradient survives at and beyond the border.

    VLA chunks sit exactly on the border all the time (the gripper command is -1 or 1). The gradient of
    ``torch.clamp`` is zero beyond it, so a unit pushed outside could never return. A plain straight-through
    gradient would be wrong the other way: a critic that likes larger values pushes the unit ever further out while
    the output stays 1, and the pull towards the reference, computed on the output, does not notice. So gradients
    pass everywhere except for those whose descent step would move a saturated unit further outside.
    """

    @staticmethod
    def forward(ctx: Any, x: th.Tensor) -> th.Tensor:
        """
        :param x: any shape
        :return: x limited to [-1, 1]; inside exactly x
        """
        ctx.save_for_backward(x)
        return x.clamp(-1.0, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: th.Tensor) -> th.Tensor:
        """
        :param grad: gradient of the output
        :return: gradient of the input
        """
        (x,) = ctx.saved_tensors
        outward = ((x >= 1.0) & (grad < 0.0)) | ((x <= -1.0) & (grad > 0.0))
        return grad.masked_fill(outward, 0.0)


class EnsembleMLP(nn.Module):
    """
    ``n`` independent MLPs with one output each, evaluated together with batched matrix products.

    Hidden layers are ``activation(LayerNorm(W x + b))``. LayerNorm has no affine part: the bias before it and the
    weights after it do the same work, and two passes over the activations are saved.

    :param n: number of members
    :param input_dim: size of the input
    :param net_arch: hidden layer sizes
    :param activation_fn: activation
    :param layer_norm: normalise hidden layers; keeps Q-values of unseen actions from growing (Ball et al., RLPD, 2023)
    """

    def __init__(
        self, n: int, input_dim: int, net_arch: Sequence[int], activation_fn: type[nn.Module], layer_norm: bool = True
    ):
        super().__init__()
        self.n = n
        self.layer_norm = layer_norm
        self.activation = activation_fn()
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        sizes = [input_dim, *net_arch, 1]
        for fan_in, fan_out in pairwise(sizes):
            bound = 1.0 / math.sqrt(fan_in)  # as nn.Linear
            self.weights.append(nn.Parameter(th.empty(n, fan_in, fan_out).uniform_(-bound, bound)))
            self.biases.append(nn.Parameter(th.empty(n, 1, fan_out).uniform_(-bound, bound)))

    def forward(
        self, x: th.Tensor, members: th.Tensor | slice | None = None, actions: th.Tensor | None = None
    ) -> th.Tensor:
        """
        :param x: inputs (B, input_dim), or their first part if ``actions`` are given
        :param members: indices of the members to evaluate; all by default
        :param actions: the last part of the inputs. Where the weights get no gradient it has a product of its own: no
            copy to join the parts, and no gradient of the wide part on the way back.
        :return: outputs (members, B)
        """
        weights_learn = th.is_grad_enabled() and self.weights[0].requires_grad
        apart = actions is not None and not x.requires_grad and not weights_learn
        if actions is not None and not apart:
            x = th.cat([x, actions], dim=1)
        last = len(self.weights) - 1
        hidden = x
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            if members is not None:
                weight, bias = weight[members], bias[members]
            if layer == 0:
                hidden = x.expand(len(weight), *x.shape)
                if apart:
                    assert actions is not None
                    width = x.shape[1]
                    bias = th.baddbmm(bias, actions.expand(len(weight), *actions.shape), weight[:, width:])
                    weight = weight[:, :width]
            hidden = th.baddbmm(bias, hidden, weight)
            if layer < last:
                if self.layer_norm:
                    hidden = F.layer_norm(hidden, hidden.shape[-1:])
                hidden = self.activation(hidden)
        return hidden.squeeze(-1)


class RLTFeatures(BaseFeaturesExtractor):
    """
    Normalised ``z_rl`` and ``proprio``, concatenated; ``vla_ref`` is left to the actor.

    ``z_rl`` goes through a LayerNorm, without weights of its own: the first layer of every network after it can do
    their work, and without parameters here a batch's features are the same for all networks. ``proprio`` is scaled by
    constants, so that there are no running statistics to save or to get wrong. For LIBERO's eight numbers
    (``proprio_norm="libero"``) the position is ``(p - (0, 0, 0.7)) / (0.15, 0.15, 0.25)``, the axis-angle vector
    becomes the first two columns of its rotation matrix (the gripper points down, a turn of about pi, where axis-angle
    flips its sign from one step to the next and the matrix does not), and the finger joints are ``(q -+ 0.02) / 0.02``.

    :param observation_space: Dict with ``z_rl`` (D,) and ``proprio`` (P,)
    :param token_input: False leaves ``z_rl`` out (ablation: proprio only)
    :param proprio_norm: "auto" ("libero" if P is 8, else "none"), "libero", "none", or (centre, scale), P
        numbers each in any shape: (P,) or (P, 1, 1)
    :raises ValueError: for any other ``proprio_norm``
    """

    center: th.Tensor
    inverse_scale: th.Tensor

    def __init__(
        self,
        observation_space: spaces.Dict,
        proprio_norm: str | tuple[Sequence[float], Sequence[float]] = "auto",
        token_input: bool = True,
    ):
        token_dim = int(observation_space["z_rl"].shape[0])  # type: ignore[index]
        size = int(observation_space["proprio"].shape[0])  # type: ignore[index]
        if proprio_norm == "auto":
            proprio_norm = "libero" if size == 8 else "none"
        if isinstance(proprio_norm, str) and proprio_norm not in ("libero", "none"):
            raise ValueError(f"proprio_norm must be 'auto', 'libero', 'none' or (centre, scale), got {proprio_norm!r}.")
        rotation = proprio_norm == "libero"
        if rotation and size != 8:
            raise ValueError(f"proprio_norm='libero' needs 8 numbers (position, axis-angle, fingers), got {size}.")
        super().__init__(observation_space, token_dim * token_input + (11 if rotation else size))
        self.rotation, self.token_input = rotation, token_input
        self.token_norm = nn.LayerNorm(token_dim, elementwise_affine=False)
        given: tuple[Sequence[float], Sequence[float]] = ((0.0,) * size, (1.0,) * size)
        if self.rotation:
            given = LIBERO_POSITION_CENTER + LIBERO_GRIPPER_CENTER, LIBERO_POSITION_SCALE + LIBERO_GRIPPER_SCALE
        elif not isinstance(proprio_norm, str):
            given = proprio_norm
        # flat: (P, 1) would spread over the batch
        center, scale = (th.as_tensor(numbers, dtype=th.float32).flatten() for numbers in given)
        fits = self.rotation or len(center) == len(scale) == size
        if not fits or not (center.isfinite() & (scale > 0)).all():
            raise ValueError(f"proprio_norm needs {size} finite centres and {size} scales > 0, got {proprio_norm!r}.")
        # constants, rebuilt by the constructor: not part of the state dict
        self.register_buffer("center", center.clone(), persistent=False)
        self.register_buffer("inverse_scale", 1.0 / scale, persistent=False)

    def forward(self, observations: TensorDict) -> th.Tensor:
        """
        :param observations: ``z_rl`` (B, D), ``proprio`` (B, P); or ``features``, what was returned for them before
        :return: features (B, features_dim)
        """
        if "features" in observations:
            return observations["features"]
        token = [self.token_norm(observations["z_rl"].float())] if self.token_input else []
        proprio = observations["proprio"].float()
        if not self.rotation:
            return th.cat([*token, (proprio - self.center) * self.inverse_scale], dim=1)
        linear = th.cat([proprio[:, :3], proprio[:, 6:]], dim=1)
        linear = (linear - self.center) * self.inverse_scale
        return th.cat([*token, linear, rotation_columns(proprio[:, 3:6])], dim=1)


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


class RLTActor(Actor):
    """
    Deterministic actor on (z_rl, proprio, vla_ref).

    ``mode="residual"``: ``clamp(vla_ref + f(z_rl, proprio, vla_ref), -1, 1)`` with a zero last layer in ``f``, so that
    the untrained actor plays the VLA's chunk exactly. ``mode="direct"``: ``clamp(f(...), -1, 1)``, the paper's form
    (eq. 4), which starts anywhere.

    :param observation_space: Dict with ``z_rl``, ``proprio``, ``vla_ref``
    :param action_space: Box(-1, 1, (C, d))
    :param net_arch: hidden layer sizes
    :param features_extractor: normalisation of ``z_rl`` and ``proprio``
    :param features_dim: its output size
    :param activation_fn: activation
    :param normalize_images: unused, there are no pictures
    :param mode: "residual" or "direct"
    :param reference_input: False: ``f`` does not see ``vla_ref`` (ablation; "residual" still adds to it)
    """

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Box,
        net_arch: list[int],
        features_extractor: nn.Module,
        features_dim: int,
        activation_fn: type[nn.Module] = nn.ReLU,
        normalize_images: bool = True,
        mode: str = "residual",
        reference_input: bool = True,
    ):
        super(Actor, self).__init__(
            observation_space,
            action_space,
            features_extractor=features_extractor,
            normalize_images=normalize_images,
            squash_output=False,
        )
        self.net_arch = net_arch
        self.features_dim = features_dim
        self.activation_fn = activation_fn
        self.mode = mode
        self.reference_input = reference_input
        action_dim = get_action_dim(self.action_space)
        input_dim = features_dim + action_dim * reference_input
        self.mu = nn.Sequential(*create_mlp(input_dim, action_dim, net_arch, activation_fn))
        if mode == "residual":
            last = self.mu[-1]
            assert isinstance(last, nn.Linear)
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return super()._get_constructor_parameters() | {"mode": self.mode, "reference_input": self.reference_input}

    def forward(self, obs: TensorDict, keep_reference: th.Tensor | None = None) -> th.Tensor:  # type: ignore[override]
        """
        :param obs: ``z_rl`` (B, D), ``proprio`` (B, P), ``vla_ref`` (B, C, d)
        :param keep_reference: reference dropout, (B, 1) of 0 (the network sees zeros for the whole reference chunk) and
            1; given by the actor update only. It has no effect on an actor without reference input, nor on what
            "residual" adds to.
        :return: chunks, flat, (B, C*d) in [-1, 1]
        """
        reference = obs["vla_ref"].float().flatten(1)
        features = self.features_extractor(obs)
        if self.reference_input:
            # only the network loses sight of it: were it missing from the sum as well, the network's first lesson would
            # be to make up for a whole chunk, and what it learns for these rows leads it astray in all others
            seen = reference if keep_reference is None else reference * keep_reference
            features = th.cat([features, seen], dim=1)
        output = self.mu(features)
        return AntiWindupClamp.apply(reference + output if self.mode == "residual" else output)

    def _predict(self, observation: PyTorchObs, deterministic: bool = False) -> th.Tensor:
        # Exploration noise belongs to the collection of rollouts (RLT._sample_action)
        return self(observation)


class RLTCritic(ContinuousCritic):
    """
    Ensemble of Q-functions on (z_rl, proprio, chunk), without the reference (paper eq. 3).

    Has the interface of SB3's ``ContinuousCritic``; :meth:`q_values` is the quick way in.

    :param observation_space: Dict with ``z_rl``, ``proprio``
    :param action_space: Box(-1, 1, (C, d))
    :param net_arch: hidden layer sizes of each member
    :param features_extractor: normalisation of ``z_rl`` and ``proprio``
    :param features_dim: its output size
    :param activation_fn: activation
    :param normalize_images: unused, there are no pictures
    :param n_critics: number of members
    :param share_features_extractor: not supported (the actor's features would be trained by two losses)
    :param layer_norm: LayerNorm in hidden layers
    """

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Box,
        net_arch: list[int],
        features_extractor: BaseFeaturesExtractor,
        features_dim: int,
        activation_fn: type[nn.Module] = nn.ReLU,
        normalize_images: bool = True,
        n_critics: int = 5,
        share_features_extractor: bool = False,
        layer_norm: bool = True,
    ):
        # not ContinuousCritic's own __init__, which builds separate networks
        BaseModel.__init__(
            self,
            observation_space,
            action_space,
            features_extractor=features_extractor,
            normalize_images=normalize_images,
        )
        self.share_features_extractor = share_features_extractor
        self.n_critics = n_critics
        action_dim = get_action_dim(self.action_space)
        self.ensemble = EnsembleMLP(n_critics, features_dim + action_dim, net_arch, activation_fn, layer_norm)

    def q_values(self, obs: TensorDict, actions: th.Tensor, members: th.Tensor | slice | None = None) -> th.Tensor:
        """
        :param obs: ``z_rl`` (B, D), ``proprio`` (B, P)
        :param actions: flat chunks (B, C*d)
        :param members: indices of the members to ask; all by default
        :return: Q-values (members, B)
        """
        features = self.features_extractor(obs)
        return self.ensemble(features, members, actions)

    def forward(self, obs: TensorDict, actions: th.Tensor) -> tuple[th.Tensor, ...]:  # type: ignore[override]
        """:return: one (B, 1) tensor per member"""
        return tuple(self.q_values(obs, actions).unsqueeze(-1))

    def q1_forward(self, obs: TensorDict, actions: th.Tensor) -> th.Tensor:  # type: ignore[override]
        """:return: Q-values of the first member (B, 1)"""
        return self.q_values(obs, actions, slice(1))[0].unsqueeze(-1)


class RLTPolicy(TD3Policy):
    """
    Actor and critics of RLT with their targets.

    :param observation_space: Dict with ``z_rl`` (D,), ``proprio`` (P,), ``vla_ref`` (C, d)
    :param action_space: Box(-1, 1, (C, d))
    :param lr_schedule: learning rate schedule
    :param net_arch: hidden layers, a list or ``dict(pi=[...], qf=[...])``; [256, 256] by default (paper)
    :param activation_fn: activation
    :param features_extractor_class: normalisation of ``z_rl`` and ``proprio``
    :param features_extractor_kwargs: e.g. ``dict(proprio_norm="none")``
    :param normalize_images: unused, there are no pictures
    :param optimizer_class: Adam (in its fused form) by default
    :param optimizer_kwargs: for the optimizers, without the learning rate
    :param n_critics: number of Q-functions
    :param actor_mode: "residual" or "direct", see :class:`RLTActor`
    :param reference_input: whether the actor's network sees ``vla_ref``
    :param layer_norm: LayerNorm in the critics
    :param act_with: what plays, in rollouts and evaluation: "target", the slow copy of the actor, or "online" (TD3)
    :param trials: evaluation plays the last actor that was approved (:meth:`approve`) instead, first the untrained one;
        :meth:`nominate` puts an actor on trial
    """

    actor: RLTActor
    actor_target: RLTActor
    critic: RLTCritic
    critic_target: RLTCritic

    def __init__(
        self,
        observation_space: spaces.Dict,
        action_space: spaces.Box,
        lr_schedule: Schedule,
        net_arch: list[int] | dict[str, list[int]] | None = None,
        activation_fn: type[nn.Module] = nn.ReLU,
        features_extractor_class: type[BaseFeaturesExtractor] = RLTFeatures,
        features_extractor_kwargs: dict[str, Any] | None = None,
        normalize_images: bool = True,
        optimizer_class: type[th.optim.Optimizer] = th.optim.Adam,
        optimizer_kwargs: dict[str, Any] | None = None,
        n_critics: int = 5,
        actor_mode: str = "residual",
        reference_input: bool = True,
        layer_norm: bool = True,
        act_with: str = "target",
        trials: bool = False,
    ):
        if act_with not in ("target", "online"):
            raise ValueError(f"act_with must be 'target' or 'online', got {act_with!r}.")
        if actor_mode not in ("residual", "direct"):
            raise ValueError(f"actor_mode must be 'residual' or 'direct', got {actor_mode!r}.")
        if not isinstance(n_critics, int) or n_critics < 1:
            raise ValueError(f"n_critics must be an integer >= 1, got {n_critics!r}.")
        optimizer_kwargs = dict(optimizer_kwargs or {})
        if optimizer_class is th.optim.Adam and not {"fused", "foreach"} & set(optimizer_kwargs):
            optimizer_kwargs["fused"] = True  # one pass over all parameters instead of one small loop each
        # Not TD3Policy's own __init__: it would declare the output squashed, and predict() would then rescale actions
        # from [-1, 1] to [-1, 1] with rounding errors; the untrained actor must play the reference bit for bit.
        BasePolicy.__init__(
            self,
            observation_space,
            action_space,
            features_extractor_class,
            features_extractor_kwargs,
            optimizer_class=optimizer_class,
            optimizer_kwargs=optimizer_kwargs,
            squash_output=False,
            normalize_images=normalize_images,
        )
        self.net_arch = net_arch if net_arch is not None else [256, 256]
        self.activation_fn = activation_fn
        self.actor_mode, self.reference_input = actor_mode, reference_input
        self.layer_norm = layer_norm
        self.act_with = act_with
        self.trials = trials
        self.share_features_extractor = False
        actor_arch, critic_arch = get_actor_critic_arch(self.net_arch)
        self.net_args = {
            "observation_space": self.observation_space,
            "action_space": self.action_space,
            "net_arch": actor_arch,
            "activation_fn": self.activation_fn,
            "normalize_images": normalize_images,
        }
        self.actor_kwargs = self.net_args | {"mode": actor_mode, "reference_input": reference_input}
        self.critic_kwargs = self.net_args | {
            "n_critics": n_critics,
            "net_arch": critic_arch,
            "share_features_extractor": False,
            "layer_norm": layer_norm,
        }
        self._build(lr_schedule)
        if trials:
            self.actor_approved, self.actor_on_trial = self.make_actor(), self.make_actor()
            for copy in (self.actor_approved, self.actor_on_trial):
                copy.load_state_dict(self.actor.state_dict())
                copy.set_training_mode(False)
                copy.requires_grad_(False)
        for target in (self.actor_target, self.critic_target):
            target.requires_grad_(False)

    def _get_constructor_parameters(self) -> dict[str, Any]:
        data = super()._get_constructor_parameters()
        del data["share_features_extractor"]
        names = ("actor_mode", "reference_input", "layer_norm", "act_with", "trials")
        return data | {name: getattr(self, name) for name in names}

    def _predict(self, observation: PyTorchObs, deterministic: bool = False) -> th.Tensor:
        # Exploration noise belongs to the collection of rollouts (RLT._sample_action).
        return self.actor_approved(observation) if self.trials else self.candidate(observation)

    @property
    def candidate(self) -> RLTActor:
        """
        The actor that practises. The online one swings from one update to the next, far enough to lose whole tasks for
        a while; its slow copy averages that out.
        """
        return self.actor_target if self.act_with == "target" else self.actor

    def nominate(self) -> None:
        """The actor that practises goes on trial, as it is now."""
        self.actor_on_trial.load_state_dict(self.candidate.state_dict())

    def approve(self) -> None:
        """The actor on trial is what :meth:`predict` plays from now on."""
        self.hand_out(self.actor_on_trial.state_dict())

    def hand_out(self, parameters: dict[str, th.Tensor]) -> None:
        """
        :param parameters: of the actor that :meth:`predict` plays from now on
        """
        self.actor_approved.load_state_dict(parameters)

    def make_actor(self, features_extractor: BaseFeaturesExtractor | None = None) -> RLTActor:
        """:return: a new actor"""
        return RLTActor(**self._update_features_extractor(self.actor_kwargs, features_extractor)).to(self.device)

    def make_critic(self, features_extractor: BaseFeaturesExtractor | None = None) -> RLTCritic:
        """:return: a new ensemble of critics"""
        return RLTCritic(**self._update_features_extractor(self.critic_kwargs, features_extractor)).to(self.device)

    def scale_action(self, action: Any) -> Any:
        """The action space is [-1, 1] already (checked by RLT): nothing to scale, nothing to round."""
        return action

    def unscale_action(self, scaled_action: Any) -> Any:
        """See :meth:`scale_action`."""
        return scaled_action


MultiInputPolicy = RLTPolicy
