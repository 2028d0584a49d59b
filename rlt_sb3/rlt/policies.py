"""
Networks of RLT: an actor that edits the VLA's action chunk and an ensemble of critics that never sees it.

Long because actor, critics and policy are one file as in Stable-Baselines3, and document 40 settings.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import BaseModel, BasePolicy, ContinuousCritic
from stable_baselines3.common.preprocessing import get_action_dim
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, create_mlp, get_actor_critic_arch
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from stable_baselines3.td3.policies import Actor, TD3Policy
from torch import nn

from rlt_sb3.common.gated_policy import TaskActors, n_tasks_of, task_rows
from rlt_sb3.common.hardware import has_bfloat16
from rlt_sb3.common.torch_utils import AntiWindupClamp, EnsembleMLP
from rlt_sb3.rlt.features import RLTFeatures, TensorDict
from rlt_sb3.rlt.gripper_critic import GripperCritic, GripperTraining
from rlt_sb3.rlt.offset import phase_of
from rlt_sb3.rlt.trained_both import TrainedBothFeatures, VLAAndTokenTraining
from rlt_sb3.rlt.trained_token import TokenTraining, TrainedTokenFeatures
from rlt_sb3.rlt.trained_vla import TrainedVLAFeatures, TrainVLA, VLATraining

ACTOR_MODES = ("residual", "direct")
ACTOR_Q = ("mean", "min", "first")
PRECISIONS = ("auto", "float32", "bfloat16")


class RLTActor(Actor):
    """
    Maps (z_rl, proprio, vla_ref) to one chunk, deterministically.

    ``mode="residual"`` computes ``clamp(vla_ref + offset + f(z_rl, proprio, vla_ref), -1, 1)``. The last layer of ``f``
    and the :attr:`offset` start at zero, so the untrained actor plays the VLA's chunk exactly. ``mode="direct"``
    computes ``clamp(f(...), -1, 1)``, the paper's form (eq. 4), whose first chunks are arbitrary.

    :param observation_space: Dict with ``z_rl``, ``proprio``, ``vla_ref``
    :param action_space: Box(-1, 1, (C, d))
    :param net_arch: hidden layer sizes
    :param features_extractor: normalization of ``z_rl`` and ``proprio``
    :param features_dim: output size of the features extractor
    :param activation_fn: activation
    :param normalize_images: unused, there are no pictures
    :param mode: "residual" or "direct"
    :param reference_input: False: ``f`` does not see ``vla_ref`` (ablation; "residual" still adds to it)
    :param gripper_critic: arguments of a :class:`~rlt_sb3.rlt.gripper_critic.GripperCritic`, which decides whether the
        gripper is reversed; None: there is none
    :param gripper: place of the gripper's command in an action, on which the offset depends; None: there is none
    """

    #: what :class:`~rlt_sb3.rlt.offset.OffsetSearch` has found, (tasks, phases, d); not a parameter: it has no gradient
    offset: th.Tensor

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
        gripper_critic: dict[str, Any] | None = None,
        gripper: int | None = None,
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
        self.gripper = gripper
        n_tasks = n_tasks_of(observation_space) or 1
        self.register_buffer("offset", th.zeros(n_tasks, 1 if gripper is None else 2, action_space.shape[-1]))
        self.gripper_kwargs = gripper_critic
        self.gripper_critic = None
        if gripper_critic is not None:
            self.gripper_critic = GripperCritic(features_dim, n_tasks, **gripper_critic)

    def _get_constructor_parameters(self) -> dict[str, Any]:
        own = {
            "mode": self.mode, "reference_input": self.reference_input, "gripper_critic": self.gripper_kwargs,
            "gripper": self.gripper,
        }  # fmt: skip
        return super()._get_constructor_parameters() | own

    def offsets(self, obs: TensorDict) -> th.Tensor:
        """
        Return the offset that is due in each row.

        :param obs: ``vla_ref`` (B, C, d), and ``task`` if there are several
        :return: offsets, the same for all control steps of a chunk, flat (B, C*d)
        """
        return self.offset.flatten(0, 1)[self._places(obs)].repeat(1, obs["vla_ref"].shape[1])

    def _places(self, obs: TensorDict) -> th.Tensor:
        """Return which of all tasks' vectors is due in each row (B,)."""
        reference = obs["vla_ref"].float()
        return task_rows(obs) * self.offset.shape[1] + phase_of(reference, self.gripper)

    def without_constants(self, gradient: th.Tensor, obs: TensorDict) -> th.Tensor:
        """
        Take from a gradient what an offset could follow: its mean over all rows in which the same vector is due.

        :param gradient: with respect to chunks, flat (B, C*d)
        :param obs: ``vla_ref`` (B, C, d), and ``task`` if there are several
        :return: the rest, flat (B, C*d); the gripper's part, which has no offset, is as it was
        """
        chunks = gradient.view(obs["vla_ref"].shape)
        numbers = th.arange(self.offset.shape[0] * self.offset.shape[1], device=gradient.device)
        is_due = (self._places(obs)[:, None] == numbers).float()  # (B, vectors)
        mean = (is_due.T @ chunks.mean(1)) / is_due.sum(0).clamp(min=1.0)[:, None]
        if self.gripper is not None:
            mean[:, self.gripper] = 0.0
        return gradient - (is_due @ mean).repeat(1, chunks.shape[1])

    def forward(self, obs: TensorDict, keep_reference: th.Tensor | None = None) -> th.Tensor:  # type: ignore[override]
        """
        Choose a chunk.

        :param obs: ``z_rl`` (B, D), ``proprio`` (B, P), ``vla_ref`` (B, C, d)
        :param keep_reference: reference dropout, (B, 1) of 0 (the network sees zeros for the whole reference chunk) and
            1; given by the actor update only. It has no effect on an actor without reference input, nor on what
            "residual" adds to.
        :return: chunks, flat, (B, C*d) in [-1, 1]
        """
        if isinstance(self.features_extractor, TrainedVLAFeatures):
            obs = self.features_extractor.see(obs)
        reference = obs["vla_ref"].float().flatten(1)
        features = seen_features = self.features_extractor(obs)
        if self.reference_input:
            # Dropout hides the reference from the network only. If it were missing from the sum below as well, the
            # network would learn to produce whole chunks for these rows, which is wrong for all others.
            seen = reference if keep_reference is None else reference * keep_reference
            features = th.cat([features, seen], dim=1)
        output = self.mu(features)
        chunks = AntiWindupClamp.apply(reference + self.offsets(obs) + output if self.mode == "residual" else output)
        if self.gripper_critic is None:
            return chunks
        return self.gripper_critic.command(chunks, obs, seen_features)

    def _predict(self, observation: PyTorchObs, deterministic: bool = False) -> th.Tensor:
        # RLT._sample_action adds the exploration noise
        return self(observation)


class RLTCritic(ContinuousCritic):
    """
    Ensemble of Q-functions of (z_rl, proprio, chunk); they do not see the reference (paper eq. 3).

    It has the interface of SB3's ``ContinuousCritic``. Updates use :meth:`target_q` and :meth:`actor_q`;
    :meth:`q_values` returns the values of all members in one tensor.

    :param observation_space: Dict with ``z_rl``, ``proprio``
    :param action_space: Box(-1, 1, (C, d))
    :param net_arch: hidden layer sizes of each member
    :param features_extractor: normalization of ``z_rl`` and ``proprio``
    :param features_dim: output size of the features extractor
    :param activation_fn: activation
    :param normalize_images: unused, there are no pictures
    :param n_critics: number of members
    :param share_features_extractor: not supported (the actor's features would be trained by two losses)
    :param layer_norm: use LayerNorm in hidden layers
    :param n_target_critics: members whose minimum is the target, drawn anew each time; None: all
    :param actor_q: Q in the actor's loss: "mean", "min" or "first"
    :param precision: precision of the matrix products: "float32", "bfloat16", or "auto"
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
        n_target_critics: int | None = None,
        actor_q: str = "mean",
        precision: str = "auto",
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
        self.n_critics, self.n_target_critics = n_critics, n_target_critics
        self.follow = actor_q
        self.precision = precision
        action_dim = get_action_dim(self.action_space)
        self.ensemble = EnsembleMLP(n_critics, features_dim + action_dim, net_arch, activation_fn, layer_norm)

    def q_values(self, obs: TensorDict, actions: th.Tensor, members: th.Tensor | slice | None = None) -> th.Tensor:
        """
        Compute Q-values of several members.

        :param obs: ``z_rl`` (B, D), ``proprio`` (B, P)
        :param actions: flat chunks (B, C*d)
        :param members: indices of the members to ask; all by default
        :return: Q-values (members, B)
        """
        in_bfloat16 = self.precision == "bfloat16" or (self.precision == "auto" and has_bfloat16(actions.device))
        with th.autocast(actions.device.type, dtype=th.bfloat16, enabled=in_bfloat16):
            return self.ensemble(self.features_extractor(obs), members, actions).float()

    def target_q(self, obs: TensorDict, actions: th.Tensor) -> th.Tensor:
        """
        Compute pessimistic Q-values for targets.

        :param obs: ``z_rl`` (B, D), ``proprio`` (B, P)
        :param actions: flat chunks (B, C*d)
        :return: pessimistic Q-values for targets (B,): minimum over all members, or over ``n_target_critics`` of them
        """
        members = None
        if self.n_target_critics is not None and self.n_target_critics < self.n_critics:
            members = th.randperm(self.n_critics, device=actions.device)[: self.n_target_critics]
        return self.q_values(obs, actions, members).amin(0)

    def actor_q(self, obs: TensorDict, actions: th.Tensor) -> th.Tensor:
        """
        Compute the Q-values that the actor follows.

        :param obs: ``z_rl`` (B, D), ``proprio`` (B, P)
        :param actions: flat chunks (B, C*d)
        :return: the Q-values that the actor follows (B,)
        """
        q_values = self.q_values(obs, actions, slice(1) if self.follow == "first" else None)
        return q_values.amin(0) if self.follow == "min" else q_values.mean(0)

    def forward(self, obs: TensorDict, actions: th.Tensor) -> tuple[th.Tensor, ...]:  # type: ignore[override]
        """Return one (B, 1) tensor per member."""
        return tuple(self.q_values(obs, actions).unsqueeze(-1))

    def q1_forward(self, obs: TensorDict, actions: th.Tensor) -> th.Tensor:  # type: ignore[override]
        """Return Q-values of the first member (B, 1)."""
        return self.q_values(obs, actions, slice(1))[0].unsqueeze(-1)


class RLTPolicy(TD3Policy):
    """
    Actor and critics of RLT with their targets.

    :param observation_space: Dict with ``z_rl`` (D,), ``proprio`` (P,), ``vla_ref`` (C, d)
    :param action_space: Box(-1, 1, (C, d))
    :param lr_schedule: learning rate schedule
    :param net_arch: hidden layers, a list or ``dict(pi=[...], qf=[...])``; [256, 256] by default (paper)
    :param activation_fn: activation
    :param features_extractor_class: normalization of ``z_rl`` and ``proprio``
    :param features_extractor_kwargs: e.g. ``dict(proprio_norm="none")``
    :param normalize_images: unused, there are no pictures
    :param optimizer_class: Adam (in its fused form) by default
    :param optimizer_kwargs: for the optimizers, without the learning rate
    :param n_critics: number of Q-functions; the minimum over them is the target
    :param n_target_critics: take the minimum over this many randomly chosen ones (REDQ), which is also cheaper;
        None: all
    :param critic_precision: precision of the matrix products of the critics (parameters, losses and targets stay
        float32): "bfloat16" is about twice as fast on devices that have bfloat16 instructions and slower on others;
        "auto" asks the device on which the critics are; or "float32"
    :param layer_norm: LayerNorm in the critics
    :param actor_mode: "residual" (reference + correction that starts at zero) or "direct" (paper), see
        :class:`RLTActor`
    :param actor_q: Q in the actor's loss: "mean" of the ensemble (the least noisy gradient; pessimism is in the
        targets), "min", or "first" (TD3)
    :param actor_tau: weight of the actor in each update of its slow copy, which plays and gives the target actions;
        None: ``tau`` of RLT. A small weight (0.0015) keeps the policy from following every change of the critics
    :param actor_std: standard deviation, in units of ``action_scale``, of the chunks that the actor's loss judges: the
        paper's actor is a Gaussian of fixed width. 0: the loss judges the actor's own chunk (TD3)
    :param gripper_flip: probability, for each chunk with noise, that the gripper does the opposite of its commands; the
        pull is then towards the opposite where critics prefer it (:func:`~rlt_sb3.rlt.gripper.pull_gripper`). 0.02 is
        for a VLA that does not let go, or does not grasp. "auto": 0.02 once a trial in some of the first episodes has
        shown that it helps, in each task by itself (:class:`~rlt_sb3.rlt.gripper.GripperTrial`). 0: neither
    :param gripper_critic: a critic of the gripper's command alone decides where it is reversed, instead of the pull:
        ``n_critics``, ``net_arch`` and ``margin`` of :class:`~rlt_sb3.rlt.gripper_critic.GripperCritic` (RLT adds its
        place), ``{}`` for its defaults. It learns from chunks that ``gripper_flip`` reverses. None: no such critic
    :param train_token: train the RL token's encoder with the critics: ``encoder_lr`` and ``recon_coef`` of
        :class:`~rlt_sb3.rlt.trained_token.TrainedTokenFeatures` (RLT adds its other arguments), ``{}`` for its
        defaults; None: it stays frozen
    :param train_vla: train a copy of the VLA with critics and actor: ``part`` ("head", "lora" or "all"), ``rank``,
        ``learning_rate`` and ``imitation_coef`` of :class:`~rlt_sb3.rlt.trained_vla.TrainVLA`, ``{}`` for its defaults;
        None: the VLA stays frozen
    :param cuda_graphs: on a GPU, record updates as CUDA graphs, because launching the operations of such small networks
        one by one takes longer than computing them. It has no effect with ``train_token``, ``train_vla``,
        ``gripper_critic``, ``n_target_critics``, another features extractor, or another optimizer than fused Adam.
        False: operations are launched one by one
    :param token_input: False: networks see ``proprio`` without ``z_rl`` (ablation)
    :param reference_input: False: the actor's network does not see ``vla_ref`` (ablation)
    :param offset_search: training episodes with noise try a constant offset of the VLA's chunks; the actor adds the
        best one to each chunk. A dict has arguments of :class:`~rlt_sb3.rlt.offset.OffsetSearch`, True stands for its
        defaults. False: no offset, as with ``actor_mode="direct"``
    :param gripper: place of the gripper's command in an action; None: the robot has none. RLT sets it
    :param candidates: chunks with noise from which the slow critics choose in rollouts once the network learns, as in
        "EXPO" (Dong et al., 2025). 1: they do not choose
    :param act_with: actor that plays in rollouts and evaluation: "target", the slow copy of the actor, or "online"
        (TD3)
    :param gated: evaluation plays the last actor that was deployed (:meth:`deploy`) instead, first the untrained one;
        :meth:`start_trial` puts an actor on trial. RLT sets it: see :class:`~rlt_sb3.common.policy_gate.PolicyGate`
    :raises ValueError: for settings out of range
    """

    actor: RLTActor
    actor_target: RLTActor
    actor_on_trial: RLTActor | TaskActors
    actor_deployed: RLTActor | TaskActors
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
        n_target_critics: int | None = None,
        critic_precision: str = "auto",
        layer_norm: bool = True,
        actor_mode: str = "residual",
        actor_q: str = "mean",
        actor_tau: float | None = None,
        actor_std: float = 0.0,
        gripper_flip: float | str = 0.0,
        gripper_critic: dict[str, Any] | None = None,
        train_token: dict[str, Any] | None = None,
        train_vla: dict[str, Any] | None = None,
        cuda_graphs: bool = True,
        token_input: bool = True,
        reference_input: bool = True,
        offset_search: dict[str, Any] | bool = True,
        gripper: int | None = None,
        candidates: int = 8,
        act_with: str = "target",
        gated: bool = False,
    ):
        def require(name: str, value: Any, ok: bool, allowed: str) -> None:
            if not ok:
                raise ValueError(f"{name} must be {allowed}, got {value!r}.")

        require("n_critics", n_critics, isinstance(n_critics, int) and n_critics >= 1, "an integer >= 1")
        subset = n_target_critics is None or 1 <= n_target_critics <= n_critics
        require("n_target_critics", n_target_critics, subset, f"None or 1..{n_critics}")
        require("critic_precision", critic_precision, critic_precision in PRECISIONS, f"one of {PRECISIONS}")
        require("actor_mode", actor_mode, actor_mode in ACTOR_MODES, f"one of {ACTOR_MODES}")
        require("actor_q", actor_q, actor_q in ACTOR_Q, f"one of {ACTOR_Q}")
        require("actor_tau", actor_tau, actor_tau is None or 0.0 < actor_tau <= 1.0, "None (as tau) or in (0, 1]")
        require("actor_std", actor_std, isinstance(actor_std, int | float) and actor_std >= 0.0, ">= 0")
        known = gripper_flip == "auto" or (isinstance(gripper_flip, int | float) and 0.0 <= gripper_flip <= 1.0)
        require("gripper_flip", gripper_flip, known, "'auto' or in [0, 1] (a probability)")
        if gripper_critic is not None:
            explores = gripper_flip != 0.0
            require("gripper_flip", gripper_flip, explores, "'auto' or > 0 with gripper_critic, which learns from it")
            for name, value in (("train_token", train_token), ("train_vla", train_vla)):
                require(name, value, value is None, "None with gripper_critic")
        require("cuda_graphs", cuda_graphs, isinstance(cuda_graphs, bool), "True or False")
        require("candidates", candidates, isinstance(candidates, int) and candidates >= 1, "an integer >= 1")
        require("act_with", act_with, act_with in ("target", "online"), "'target' or 'online'")
        copy: Any = None
        if train_token is not None or train_vla is not None:
            trains = "train_token" if train_vla is None else "train_vla"
            alone = TrainedTokenFeatures if train_vla is None else TrainedVLAFeatures
            own = alone if train_token is None or train_vla is None else TrainedBothFeatures
            require("token_input", token_input, token_input, f"True with {trains}")
            name, allowed = features_extractor_class.__name__, f"left out with {trains}, which has its own"
            require("features_extractor_class", name, features_extractor_class in (RLTFeatures, own), allowed)
            features_extractor_class, further = own, dict(train_token or {})
            if train_vla is not None:
                settings = TrainVLA(**train_vla)
                copy = further["vla"] = settings.vla_class(settings.architecture)
            features_extractor_kwargs = (features_extractor_kwargs or {}) | further
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
            (features_extractor_kwargs or {}) | ({} if token_input else {"token_input": False}),
            optimizer_class=optimizer_class,
            optimizer_kwargs=optimizer_kwargs,
            squash_output=False,
            normalize_images=normalize_images,
        )
        self.net_arch = net_arch if net_arch is not None else [256, 256]
        self.activation_fn = activation_fn
        self.actor_mode, self.actor_q, self.actor_tau, self.actor_std = actor_mode, actor_q, actor_tau, actor_std
        self.vla, self.train_token, self.train_vla = copy, train_token, train_vla  # one copy for all networks
        self.gripper_flip, self.gripper_critic = gripper_flip, gripper_critic
        self.token_input, self.reference_input = token_input, reference_input
        self.offset_search, self.gripper = offset_search, gripper
        self.critic_precision, self.layer_norm, self.cuda_graphs = critic_precision, layer_norm, cuda_graphs
        self.candidates, self.act_with, self.gated = candidates, act_with, gated
        self.share_features_extractor = False
        actor_arch, critic_arch = get_actor_critic_arch(self.net_arch)
        self.net_args = {
            "observation_space": self.observation_space,
            "action_space": self.action_space,
            "net_arch": actor_arch,
            "activation_fn": self.activation_fn,
            "normalize_images": normalize_images,
        }
        self.actor_kwargs = self.net_args | {
            "mode": actor_mode, "reference_input": reference_input, "gripper_critic": gripper_critic, "gripper": gripper
        }  # fmt: skip
        self.critic_kwargs = self.net_args | {
            "n_critics": n_critics,
            "net_arch": critic_arch,
            "share_features_extractor": False,
            "layer_norm": layer_norm,
            "n_target_critics": n_target_critics,
            "actor_q": actor_q,
            "precision": critic_precision,
        }
        self._build(lr_schedule)
        if gated:
            self.actor_deployed, self.actor_on_trial = self._make_copies(), self._make_copies()
        for target in (self.actor_target, self.critic_target):
            target.requires_grad_(False)
        self.gripper_training = None if gripper_critic is None else GripperTraining(self, lr_schedule)
        self.token_training = None if train_token is None else TokenTraining(self, lr_schedule)
        of_vla = VLATraining if train_token is None else VLAAndTokenTraining
        self.vla_training = None if train_vla is None else of_vla(self, settings, lr_schedule)

    def _get_constructor_parameters(self) -> dict[str, Any]:
        data = super()._get_constructor_parameters()
        del data["share_features_extractor"]
        names = (
            "critic_precision", "layer_norm", "actor_mode", "actor_q", "actor_tau", "actor_std", "gripper_flip",
            "gripper_critic", "train_token", "train_vla", "cuda_graphs", "token_input", "reference_input",
            "offset_search", "gripper", "candidates", "act_with", "gated",
        )  # fmt: skip
        data["features_extractor_kwargs"] = {k: v for k, v in self.features_extractor_kwargs.items() if k != "vla"}
        data["n_target_critics"] = self.critic_kwargs["n_target_critics"]
        return data | {name: getattr(self, name) for name in names}

    def _predict(self, observation: PyTorchObs, deterministic: bool = False) -> th.Tensor:
        # RLT._sample_action adds the exploration noise
        return self.actor_deployed(observation) if self.gated else self.training_actor(observation)

    @property
    def training_actor(self) -> RLTActor:
        """
        The actor that plays training episodes (the practicing actor).

        The online actor changes so much from one update to the next that it can lose a whole task for a while. Its slow
        copy averages these changes out.
        """
        return self.actor_target if self.act_with == "target" else self.actor

    @property
    def optimizers(self) -> list[th.optim.Optimizer]:
        """The optimizers that follow the learning rate."""
        of_gripper = [] if self.gripper_training is None else [self.gripper_training.optimizer]
        return [self.actor.optimizer, self.critic.optimizer, *of_gripper]

    @property
    def networks(self) -> tuple[RLTActor, RLTActor, RLTCritic, RLTCritic]:
        """Actor and critics, each with its slow copy."""
        return self.actor, self.actor_target, self.critic, self.critic_target

    @property
    def shares_features(self) -> bool:
        """Whether the features have no parameters, so that all networks see the same ones."""
        return all(type(network.features_extractor) is RLTFeatures for network in self.networks)

    @property
    def can_record(self) -> bool:
        """Whether :class:`~rlt_sb3.common.cuda_graphs.UpdateGraphs` can record what an update does."""
        others = (self.gripper_training, self.token_training, self.vla_training)
        n_targets = self.critic.n_target_critics
        return (
            self.cuda_graphs
            and self.shares_features
            and all(other is None for other in others)
            and (n_targets is None or n_targets >= self.critic.n_critics)  # drawing members waits for the GPU
            and all(isinstance(one, th.optim.Adam) and one.defaults["fused"] for one in self.optimizers)
        )

    @property
    def starts_at_vla(self) -> bool:
        """Whether the untrained actor plays the VLA's chunks."""
        return self.actor_mode == "residual"

    def start_trial(self) -> None:
        """Put a copy of the practicing actor on trial."""
        self.actor_on_trial.load_state_dict(self.training_actor.state_dict())

    def set_critic_precision(self, precision: str) -> None:
        """
        Change ``critic_precision``.

        :param precision: ``critic_precision`` from now on
        :raises ValueError: if there is no such precision
        """
        if precision not in PRECISIONS:
            raise ValueError(f"critic_precision must be one of {PRECISIONS}, got {precision!r}.")
        self.critic_precision = self.critic_kwargs["precision"] = precision
        self.critic.precision = self.critic_target.precision = precision

    def deploy(self, parameters: Mapping[str, Any]) -> None:
        """
        Replace the actor that :meth:`predict` plays.

        :param parameters: of the actor that :meth:`predict` plays from now on
        """
        self.actor_deployed.load_state_dict(parameters)

    def set_offset(self, task: int, offset: np.ndarray) -> None:
        """
        Change the offset of the actor that learns and of its slow copy.

        :param task: the task
        :param offset: added to the VLA's actions from now on, (phases, d)
        """
        for actor in (self.actor, self.actor_target):
            actor.offset[task] = th.as_tensor(offset, device=self.device)

    def make_actor(self, features_extractor: BaseFeaturesExtractor | None = None) -> RLTActor:
        """Return a new actor."""
        return RLTActor(**self._update_features_extractor(self.actor_kwargs, features_extractor)).to(self.device)

    def _make_copies(self) -> RLTActor | TaskActors:
        """Return a copy of the actor, or one for each task that observations tell apart."""
        n_tasks = n_tasks_of(self.observation_space)
        copies = [self.make_actor() for _ in range(n_tasks or 1)]
        for copy in copies:
            copy.load_state_dict(self.actor.state_dict())
            copy.set_training_mode(False)
            copy.requires_grad_(False)
        return copies[0] if n_tasks is None else TaskActors(copies)

    def make_critic(self, features_extractor: BaseFeaturesExtractor | None = None) -> RLTCritic:
        """Return a new ensemble of critics."""
        return RLTCritic(**self._update_features_extractor(self.critic_kwargs, features_extractor)).to(self.device)

    def scale_action(self, action: Any) -> Any:
        """
        Return the action unchanged: the action space is [-1, 1] already (checked by RLT).

        :param action: an action
        :return: the same
        """
        return action

    def unscale_action(self, scaled_action: Any) -> Any:
        """See :meth:`scale_action`."""
        return scaled_action


MultiInputPolicy = RLTPolicy
