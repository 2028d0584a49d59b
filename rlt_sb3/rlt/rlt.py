"""
The RLT algorithm: chunked TD3 that starts at a frozen VLA and stays near it.

Long because its constructor documents 33 settings. How chunks are chosen and stored is in :mod:`~rlt_sb3.rlt.rollouts`.
"""

from functools import partial
from typing import Any, ClassVar, TypeVar

import torch as th

# Loaded here on purpose: torch imports it lazily when the first optimizer is made, which crashes the interpreter if
# that happens after software OpenGL (OSMesa) has been loaded into the same process.
import torch._dynamo
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule
from stable_baselines3.common.utils import FloatSchedule
from stable_baselines3.td3.td3 import TD3

from rlt_sb3.common.cuda_graphs import UpdateGraphs
from rlt_sb3.common.gated_policy import TASK
from rlt_sb3.common.replay.buffer import ChunkReplayBuffer
from rlt_sb3.common.replay.storage import ChunkBatch
from rlt_sb3.common.schedules import ChunkSchedule
from rlt_sb3.common.torch_utils import AntiWindupClamp, polyak, times_per_dimension
from rlt_sb3.common.vec_env import metadata_of
from rlt_sb3.rlt.features import RLTFeatures, TensorDict, proprio_layout
from rlt_sb3.rlt.gripper import GripperTrial, pull_gripper
from rlt_sb3.rlt.policies import RLTActor, RLTCritic, RLTPolicy
from rlt_sb3.rlt.rollouts import RLTRollouts
from rlt_sb3.rlt.settings import check_spaces, check_values, make_search
from rlt_sb3.rlt.trained_token import check_memory, check_tokens
from rlt_sb3.rlt.trained_vla import TrainVLA, check_pictures, memory_of

#: Size up to which the observations of several batches are read together; larger arrays cost page faults each time
NUMBERS_AT_ONCE = 2**19
#: Default pull: strong while the critics know little
PULL = ChunkSchedule(60.0, 15.0, chunks=1200)

SelfRLT = TypeVar("SelfRLT", bound="RLT")


class RLT(RLTRollouts, TD3):
    r"""
    Online RL on RL tokens: chunked TD3 that starts at a frozen VLA and stays near it.

    The method is that of Xu et al., "RL Token: Bootstrapping Online RL with Vision-Language-Action Models",
    https://arxiv.org/abs/2604.23073. RLT is an algorithm of Stable-Baselines3.

    One environment step is one action chunk of up to C control steps. The observation is a flat Dict of ``z_rl`` (D,),
    ``proprio`` (P,) and ``vla_ref`` (C, d), the chunk that the frozen VLA proposes. The action is the chunk to execute,
    Box(-1, 1, (C, d)). All discounts are per control step.

    The critics learn the return of :math:`k \le C` executed steps (paper eq. 3; ``n_steps`` chains several chunks)

    .. math:: y = \sum_{j<k} \gamma^j r_j + \gamma^k (1 - \mathrm{terminated}) \min_i Q'_i(s', a'),

    where ``a'`` is the target actor's chunk plus clipped noise. The actor minimizes (paper eq. 5)

    .. math:: -Q(s, a) + \mathrm{bc\_coef} \cdot \tfrac{1}{C d} \lVert (a - \mathrm{vla\_ref} - o) / \sigma \rVert^2 ,

    where :math:`\sigma` is ``action_scale`` and :math:`o` the offset that :class:`~rlt_sb3.rlt.offset.OffsetSearch`
    has found. The paper's loss has the sum of squares instead of the mean, no sigma and no offset: its beta is
    ``bc_coef / (C * d)`` (20 is 0.36 for C=8, d=7). Both are meant for rewards that add up to at most 1. If a success
    pays r, use ``r * bc_coef``.

    The defaults are the settings behind the demo's results. :data:`~rlt_sb3.rlt.presets.PAPER` has the paper's own
    settings: ``RLT(policy, env, **PAPER)``. With the paper's settings the success rate first falls below the VLA's. The
    defaults avoid this in four ways: the untrained actor plays the VLA's chunk exactly, the critics learn before the
    actor moves, targets stay in the reachable range, and :meth:`predict` plays the VLA's chunk until an actor has
    beaten the VLA.

    :param policy: "MultiInputPolicy" or :class:`~rlt_sb3.rlt.policies.RLTPolicy`
    :param env: environment with the spaces above, e.g. ``VecMonitor(GymnasiumVecEnv(make_vec(...)))``
    :param learning_rate: of Adam, for actor and critics; a number or a schedule
    :param buffer_size: rows (chunks) kept
    :param learning_starts: rows collected first with the VLA's own chunks, exactly and without noise
    :param batch_size: rows per update
    :param tau: weight of the online networks in each target update
    :param gamma: discount per control step
    :param train_freq: ``(n, "overlap")``: the updates for the rows of n vector steps are computed while the simulators
        play the next step, with an actor that has not seen these rows. ``n`` or ``(n, "episode")``: the simulators wait
        for the updates after n vector steps or episodes
    :param utd: critic updates per stored row, exact for any number of environments (fractions are carried over)
    :param n_steps: consecutive chunks in a return
    :param policy_delay: critic updates per actor and target update, counted over the whole life of the model
    :param target_policy_noise: standard deviation of the noise on target actions. TD3 has 0.1. The default is 0: noise
        can free a policy that stands still, and the critics would not notice
    :param target_noise_clip: limit of the noise on target actions
    :param bc_coef: weight of the *mean* squared distance, over the C*d numbers, to the VLA's chunk (in units of
        ``action_scale``): a number, a :class:`~rlt_sb3.common.schedules.ChunkSchedule` of the chunks collected since
        the search for an offset has had its opening (of each task, where observations have ``task``), or one of SB3's
        schedules (of the progress remaining, which falls from 1 to 0)
    :param bc_failure_weight: factor of the pull in rows whose episode has not ended in success: 1 pulls all rows alike,
        0 only those of successful episodes. Episodes that still run or were cut off are not successes
    :param reference_dropout: probability, per sample of an actor update, that the actor sees zeros for the whole
        reference chunk; never in :meth:`predict`, rollouts or targets
    :param exploration_std: standard deviation of the Gaussian noise in rollouts after ``learning_starts``; a number or
        one per action dimension (d,)
    :param correction_range: low and high. Chunks with noise have u times what the actor's network adds, u uniform in
        this range for each chunk: critics see less and more of this correction. (1, 1): the correction as it is
    :param action_scale: one unit of action, a number or one per action dimension (d,). Noise (in rollouts and on
        targets) is multiplied by it, and the distance of the pull is divided by it. "auto": 8 standard deviations of
        the VLA's own actions in the warm-up, per dimension, at least 0.2 and at most 1; :attr:`action_unit` has the
        result
    :param critic_warmup_updates: extra critic updates, done at once after ``learning_starts``, before the actor may
        move. With ``actor_mode="direct"`` the actor is meanwhile fitted to the VLA's chunks
    :param q_bounds: range to which targets are clipped, the reachable one; (0, 1) fits a sparse reward of 1. Returns
        outside it cause a warning. None: no clipping
    :param gate: a share of the training episodes are trials, which copies of the actor play without noise.
        :meth:`predict` plays the VLA's chunk until an actor has beaten the VLA in its trials or in an evaluation on
        selection states, and from then on the best of those that have (with ``actor_mode="direct"`` it first plays the
        untrained actor, which is not the VLA). A dict has arguments of
        :class:`~rlt_sb3.common.policy_gate.PolicyGate`, True stands for its defaults. False: no gate, :meth:`predict`
        plays the present actor
    :param action_noise: further noise in rollouts, shape (C, d), e.g. :class:`~rlt_sb3.common.noise.HeldNoise`
    :param replay_buffer_class: a subclass of ``ChunkReplayBuffer``
    :param replay_buffer_kwargs: further arguments of :class:`~rlt_sb3.common.replay.buffer.ChunkReplayBuffer`: rows of
        demonstrations and of interventions, ``timeout_is_failure`` (True), ...; its ``stride`` is the environment's
        ``obs_stride``
    :param stats_window_size: episodes over which rollout statistics and ``train/q_gap`` are averaged
    :param tensorboard_log: folder of TensorBoard logs
    :param policy_kwargs: further arguments of :class:`~rlt_sb3.rlt.policies.RLTPolicy`: networks, ablations, precision
    :param verbose: 0 nothing, 1 information, 2 debug
    :param seed: seed of NumPy, torch and the environment
    :param device: torch device
    :param _init_setup_model: build the networks now
    :raises ValueError: for spaces or settings that do not fit; the message says what is allowed
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {"MultiInputPolicy": RLTPolicy}
    policy: RLTPolicy
    actor: RLTActor
    actor_target: RLTActor
    critic: RLTCritic
    critic_target: RLTCritic
    _graphs: UpdateGraphs | None = None

    def __init__(
        self,
        policy: str | type[RLTPolicy],
        env: GymEnv | str,
        learning_rate: float | Schedule = 3e-4,
        buffer_size: int = 50_000,
        learning_starts: int = 200,
        batch_size: int = 256,
        tau: float = 0.005,
        gamma: float = 0.99,
        train_freq: int | tuple[int, str] = (1, "overlap"),
        utd: float = 2.0,
        n_steps: int = 3,
        policy_delay: int = 2,
        target_policy_noise: float = 0.0,
        target_noise_clip: float = 0.2,
        bc_coef: float | Schedule | ChunkSchedule = PULL,
        bc_failure_weight: float = 1.0,
        reference_dropout: float = 0.5,
        exploration_std: float | list[float] = 0.05,
        correction_range: tuple[float, float] = (0.0, 2.0),
        action_scale: float | list[float] | str = "auto",
        critic_warmup_updates: int = 500,
        q_bounds: tuple[float, float] | None = (0.0, 1.0),
        gate: dict[str, Any] | bool = True,
        action_noise: ActionNoise | None = None,
        replay_buffer_class: type[ReplayBuffer] | None = None,
        replay_buffer_kwargs: dict[str, Any] | None = None,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: th.device | str = "auto",
        _init_setup_model: bool = True,
    ):
        super().__init__(
            policy,
            env,
            learning_rate=learning_rate,
            buffer_size=buffer_size,
            learning_starts=learning_starts,
            batch_size=batch_size,
            tau=tau,
            gamma=gamma,
            train_freq=train_freq,
            gradient_steps=-1,  # the number of updates that collect_rollouts returns
            action_noise=action_noise,
            replay_buffer_class=replay_buffer_class,
            replay_buffer_kwargs=replay_buffer_kwargs,
            policy_delay=policy_delay,
            target_policy_noise=target_policy_noise,
            target_noise_clip=target_noise_clip,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            policy_kwargs=dict(policy_kwargs or {}),
            verbose=verbose,
            seed=seed,
            device=device,
            _init_setup_model=False,
        )
        self.utd = utd
        self.n_steps = n_steps
        self.bc_coef = bc_coef
        self.bc_failure_weight = bc_failure_weight
        self.reference_dropout = reference_dropout
        self.exploration_std = exploration_std
        self.correction_range = correction_range
        self.gripper = None
        self.gripper_trial = None
        self.action_scale = action_scale
        self._measured_unit = None
        self._vla_bytes = 0  # of a copy of the VLA that learns
        #: what rows and a second VLA take, one line; None without ``train_token`` and ``train_vla``
        self.memory_report: str | None = None
        self.critic_warmup_updates = critic_warmup_updates
        self.q_bounds = q_bounds
        self.search = None
        self.search_opens = False
        self._opening_chunks = 0
        self._begin_counting(gate)

        if _init_setup_model:
            self._setup_model()

    # ---------------------------------------------------------------- construction

    def _setup_model(self) -> None:
        check_spaces(self.observation_space, self.action_space)
        assert isinstance(self.observation_space, spaces.Dict) and isinstance(self.action_space, spaces.Box)
        if self._vec_normalize_env is not None:
            raise ValueError(
                "RLT cannot use VecNormalize, which would change vla_ref: leave it out (RLT normalizes its own inputs)."
            )
        check_values(self)
        if self.q_bounds is not None:
            self.q_bounds = (float(self.q_bounds[0]), float(self.q_bounds[1]))  # load() and YAML give lists
        self._describe_robot()
        if any(self.policy_kwargs.get(name) is not None for name in ("train_token", "train_vla")):
            spaces_of_rows = self.observation_space, self.action_space
            self.memory_report = check_memory(*spaces_of_rows, self.buffer_size, self._vla_bytes)
            if self.verbose >= 1:
                print(self.memory_report)
        if self.replay_buffer_class is None:
            self.replay_buffer_class = ChunkReplayBuffer
        if self.replay_buffer is None:
            self.replay_buffer = self.replay_buffer_class(  # type: ignore[assignment]
                self.buffer_size,
                self.observation_space,
                self.action_space,
                device=self.device,
                n_envs=self.n_envs,
                **(self._buffer_settings() | self.replay_buffer_kwargs),
            )
        # The buffer already has n_steps; SB3 would warn that it ignores the argument
        n_steps, self.n_steps = self.n_steps, 1
        super()._setup_model()
        self.n_steps = n_steps
        if self.policy.token_training is not None and self.env is not None:  # load() replaces the weights
            self.policy.token_training.start(self.env.get_attr("trainable_token")[0])
        if self.policy.vla_training is not None and self.env is not None:
            of_vla = self.policy.vla_training.settings
            self.policy.vla_training.start(self.env.get_attr("trainable_vla")[0](of_vla.part, of_vla.rank))
        if self.search is None and self.policy.starts_at_vla:
            self.search = make_search(self.policy.offset_search)
            if self.search is not None:
                self.search.begin(len(self.actor.offset), self.action_space.shape[-1], self.gripper)
                self.search.restart(self.n_envs)
                self._follow_search()
        if self.gripper_trial is None:  # load() brings its own
            self.gripper_trial = GripperTrial(self.policy.gripper_flip, len(self.actor.offset))
            self.gripper_trial.restart(self.n_envs)

    def _describe_robot(self) -> None:
        """Store what the environment's robot says: the place of the gripper, and the layout of ``proprio``."""
        robot = metadata_of(self.env).get("robot")
        if robot is not None:
            self.gripper = getattr(robot, "gripper_index", None)
            self.policy_kwargs["gripper"] = self.gripper
        of_gripper = self.policy_kwargs.get("gripper_critic")
        if of_gripper is not None and "place" not in of_gripper:
            if self.gripper is None:
                raise ValueError("gripper_critic needs a robot with a gripper: leave it out for this environment.")
            self.policy_kwargs["gripper_critic"] = {**of_gripper, "place": self.gripper}
        token = self.policy_kwargs.get("train_token")
        if token is not None and "architecture" not in token:
            assert isinstance(self.observation_space, spaces.Dict) and self.env is not None
            if self.policy_kwargs.get("train_vla") is None:  # else a copy of the VLA makes the tokens from pictures
                check_tokens(self.observation_space)
            found = self.env.get_attr("trainable_token")[0]
            self.policy_kwargs["train_token"] = {
                **token, "token_class": type(found), "architecture": found.architecture
            }  # fmt: skip
        learns = self.policy_kwargs.get("train_vla")
        if learns is not None and "architecture" not in learns:
            assert isinstance(self.observation_space, spaces.Dict) and self.env is not None
            check_pictures(self.observation_space)
            settings = TrainVLA(**learns)
            copy = self.env.get_attr("trainable_vla")[0](settings.part, settings.rank)
            self._vla_bytes = memory_of(copy)
            self.policy_kwargs["train_vla"] = {**learns, "vla_class": type(copy), "architecture": copy.architecture}
        given = self.policy_kwargs.get("features_extractor_kwargs") or {}
        takes = issubclass(self.policy_kwargs.get("features_extractor_class", RLTFeatures), RLTFeatures)
        if robot is not None and takes and given.get("proprio_norm", "auto") == "auto":
            self.policy_kwargs["features_extractor_kwargs"] = given | {"proprio_norm": proprio_layout(robot)}

    # ---------------------------------------------------------------- updates

    def train(self, gradient_steps: int, batch_size: int = 256) -> None:
        """
        Update critics and actor on batches from the replay buffer.

        :param gradient_steps: number of critic updates
        :param batch_size: rows per update
        """
        assert isinstance(self.replay_buffer, ChunkReplayBuffer)
        if self.replay_buffer.size() == 0:  # no episode has come to its critical phase yet
            return
        self._measure_unit()
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizers)
        critic_stats: list[th.Tensor] = []
        actor_stats: list[th.Tensor] = []
        vla_stats: list[th.Tensor] = []
        graphs = self._make_graphs()
        width = int(getattr(self.critic.features_extractor, "features_dim", 1))
        if self.policy.token_training is not None or self.policy.vla_training is not None:
            width += spaces.flatdim(self.observation_space)
        at_once = max(1, NUMBERS_AT_ONCE // (batch_size * width))
        for done in range(0, gradient_steps, at_once):
            count = min(at_once, gradient_steps - done)
            for batch in self.replay_buffer.sample_batches(count, batch_size, self._add_features):
                self._n_updates += 1
                # counted over the life of the model: per call, calls with one update would never update the actor
                due = self._n_updates % self.policy_delay == 0
                warming_up = self._warming_up
                acts = due and (not (warming_up or self.search_opens) or self.policy.actor_mode == "direct")
                pull = self._pull(batch.observations) if acts else 0.0
                update = partial(self._update, copies=due, acts=acts, follow_q=not warming_up)
                if graphs is None:
                    found = update(batch, pull)
                else:
                    of_pull = th.full((), pull, device=self.device) if isinstance(pull, float) else pull
                    found = graphs.run((due, acts, warming_up, *self._constants()), update, batch, of_pull)
                for stats, of_update in zip((critic_stats, actor_stats, vla_stats), found, strict=False):
                    stats.append(of_update)

        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        if critic_stats:
            names = ["critic_loss", "q_mean", "q_std", "target_mean", "target_min", "target_max"]
            names += [] if self.policy.token_training is None else ["recon_loss"]
            names += [] if self.policy.gripper_training is None else ["gripper_loss"]
            for name, value in zip(names, th.stack(critic_stats).mean(0).tolist(), strict=True):
                self.logger.record_mean(f"train/{name}", value)
            loss = th.stack(critic_stats)[:, 0].mean().item()
            self.logger.record_mean("train/td_error", (loss / self.critic.n_critics) ** 0.5)
        if vla_stats:
            self.logger.record_mean("train/imitation_loss", th.stack(vla_stats).mean().item())
        if actor_stats:
            actor_names = (
                "actor_loss", "actor_q", "bc_loss", "bc_distance", "bc_coef", "successful_rows", "gripper_reversed"
            )  # fmt: skip
            for name, value in zip(actor_names, th.stack(actor_stats).mean(0).tolist(), strict=True):
                self.logger.record_mean(f"train/{name}", value)

    def _make_graphs(self) -> UpdateGraphs | None:
        """Return what records updates as CUDA graphs, ready for the next ones; None where updates run one by one."""
        if self.device.type != "cuda" or not self.policy.can_record:
            return None
        if self._graphs is None or self._graphs.optimizers != self.policy.optimizers:
            self._graphs = UpdateGraphs(self.device, self.policy.optimizers, self.policy.networks)
        self._graphs.begin()
        return self._graphs

    def _constants(self) -> tuple[Any, ...]:
        """Return the numbers and switches that a recorded update contains."""
        owns = self.search is not None and self.search.owns_constants
        return (
            self.tau, self.policy.actor_tau, self.policy.actor_std, self.target_policy_noise, self.target_noise_clip,
            self.q_bounds, self.reference_dropout, self.bc_failure_weight, tuple(self._corrects), self.gripper,
            self.search is None, owns, tuple(self.action_unit.flatten().tolist()),
        )  # fmt: skip

    def _update(
        self, batch: ChunkBatch, pull: float | th.Tensor, copies: bool, acts: bool, follow_q: bool
    ) -> tuple[th.Tensor, ...]:
        """
        Carry out all that is due in one update.

        :param batch: rows
        :param pull: weight of the pull, a number or tensor () for all rows, or one per row (B, 1)
        :param copies: the slow copies follow their networks
        :param acts: also update the actor
        :param follow_q: False leaves the actor only the pull towards the VLA's chunks
        :return: what :meth:`_update_critic` returns, and after it, with ``acts``, what :meth:`_update_actor` and the
            update of the VLA return
        """
        found = [self._update_critic(batch)]
        if acts:
            found.append(self._update_actor(batch, follow_q=follow_q, bc_coef=pull))
            if self.policy.token_training is not None:
                self.policy.token_training.copy_to_actor()
            if self.policy.vla_training is not None and follow_q:
                found.append(self.policy.vla_training.step(batch.bc_target, self.action_unit))
            actor_tau = self.tau if self.policy.actor_tau is None else self.policy.actor_tau
            polyak(self.actor, self.actor_target, actor_tau)
        elif copies and self.policy.gripper_training is not None:
            self.policy.gripper_training.follow(self.tau)  # while the network waits for the search's opening, too
        if copies:
            polyak(self.critic, self.critic_target, self.tau)
        return tuple(found)

    def _add_features(self, batch: ChunkBatch) -> None:
        """Compute the features of a batch once for all networks, where they have no parameters."""
        if self.policy.shares_features:
            with th.no_grad():
                for observations in (batch.observations, batch.next_observations):
                    observations["features"] = self.actor.features_extractor(observations)

    def _targets(self, batch: ChunkBatch) -> th.Tensor:
        """
        Compute the targets of the critics.

        :param batch: rows
        :return: targets of the critics (B,)
        """
        with th.no_grad():
            next_actions = self.actor_target(batch.next_observations)
            noise = th.randn_like(next_actions) * self.target_policy_noise
            noise = noise.clamp_(-self.target_noise_clip, self.target_noise_clip)
            next_actions = (next_actions + times_per_dimension(noise, self.action_unit)).clamp_(-1.0, 1.0)
            next_q = self.critic_target.target_q(batch.next_observations, next_actions)
            targets = (batch.rewards + (1.0 - batch.dones) * batch.discounts * next_q.unsqueeze(1)).squeeze(1)
            return targets if self.q_bounds is None else targets.clamp_(*self.q_bounds)

    def _update_critic(self, batch: ChunkBatch) -> th.Tensor:
        """
        Update the critics on one batch.

        :param batch: rows
        :return: loss (summed over the ensemble), mean Q, its spread over the ensemble, mean / min / max target, and the
            losses of reconstruction and of the gripper's critic if they are trained
        """
        training, of_vla = self.policy.token_training, self.policy.vla_training
        if of_vla is not None:
            of_vla.look(batch, learn=not self._warming_up and self._n_updates % self.policy_delay == 0)
        if training is not None:
            # one pass of the encoder as it is now, for all networks; in the warm-up the critics are still arbitrary
            features, recon_loss = training.features.losses(batch.observations, train_encoder=not self._warming_up)
            batch.observations["features"] = features
            with th.no_grad():
                batch.next_observations["features"] = training.features(batch.next_observations)
        targets = self._targets(batch)
        q_values = self.critic.q_values(batch.observations, batch.actions)
        loss = (q_values - targets).pow(2).mean(1).sum()
        self.critic.optimizer.zero_grad()
        if training is None:
            loss.backward()
        else:
            training.optimizer.zero_grad()
            (loss + training.features.recon_coef * recon_loss).backward()
            training.optimizer.step()
            if of_vla is not None and not self._warming_up:
                of_vla.leave_frozen()
            batch.observations["features"] = features.detach()  # the actor's loss does not reach the encoder
        if of_vla is not None:
            batch.observations["features"] = batch.observations["features"].detach()  # nor the tokens of the VLA
        self.critic.optimizer.step()
        with th.no_grad():
            spread = q_values.std(0, unbiased=False).mean()
            stats = [loss, q_values.mean(), spread, targets.mean(), targets.min(), targets.max()]
            stats += [] if training is None else [recon_loss]
        if self.policy.gripper_training is not None:
            assert self.gripper_trial is not None
            learns = self.gripper_trial.reverses.any()  # not after trials in vain
            stats.append(self._update_gripper(batch) if learns else th.zeros((), device=self.device))
        return th.stack([stat.detach() for stat in stats])

    def _update_gripper(self, batch: ChunkBatch) -> th.Tensor:
        """Update the critic of the gripper on one batch, and return its loss."""
        training = self.policy.gripper_training
        assert training is not None
        with th.no_grad():
            features, of_next = (
                self.actor.features_extractor(observations)
                for observations in (batch.observations, batch.next_observations)
            )
        loss = training.step(batch, features, of_next, self.q_bounds)
        if not self._warming_up:
            training.activate(self._corrects)
        return loss

    def _update_actor(
        self, batch: ChunkBatch, follow_q: bool = True, bc_coef: float | th.Tensor | None = None
    ) -> th.Tensor:
        """
        Update the actor on one batch.

        :param batch: rows
        :param follow_q: False leaves only the pull towards the VLA's chunks
        :param bc_coef: weight of the pull, see :meth:`_update`; what it is now by default
        :return: loss, mean Q, mean squared distance to what pulls in units of ``action_scale``, mean distance per
            sample (norm over C*d, no units), the pull's weight, share of the rows that belong to successful episodes,
            share of the rows in which the pull reverses the gripper
        """
        observations = batch.observations
        bc_target = batch.bc_target  # vla_ref; where someone else chose the action, the executed action
        keep = None
        if self.reference_dropout > 0.0:
            keep = (th.rand(len(bc_target), 1, device=self.device) >= self.reference_dropout).float()
        actions = self.actor(observations, keep)
        if follow_q and self.corrects_gripper:
            assert self.gripper is not None
            bc_target = pull_gripper(self.critic, observations, actions, bc_target, self.gripper, self._corrects)
        elif self.actor.gripper_critic is not None:  # no distance to commands that the actor does not choose
            bc_target = self.actor.gripper_critic.command(
                bc_target, observations, self.actor.features_extractor(observations)
            )
        reversed_rows = (bc_target != batch.bc_target).any(1).float().mean()
        if self.search is not None:  # the pull is towards the VLA's chunk with the offset
            own = (batch.bc_target == observations["vla_ref"].float().flatten(1)).all(1, keepdim=True)
            bc_target = th.where(own, (bc_target + self.actor.offsets(observations)).clamp(-1.0, 1.0), bc_target)
        difference = actions - bc_target
        squared = times_per_dimension(difference, 1.0 / self.action_unit).pow(2)
        # reference dropout does not change the target of the pull
        bc_loss = squared.mean()
        if follow_q and self.bc_failure_weight < 1.0:
            # not divided by the sum of the weights: in each row the pull must keep its size relative to Q
            squared = squared * (batch.successful + self.bc_failure_weight * (1.0 - batch.successful))
        bc_coef = self._pull(observations) if bc_coef is None else bc_coef
        of_all = isinstance(bc_coef, float) or bc_coef.ndim == 0
        loss = bc_coef * squared.mean() if of_all else (bc_coef * squared).mean()
        actor_q = th.zeros((), device=self.device)
        if follow_q:
            sampled = actions
            if self.search is not None and self.search.owns_constants:
                sampled = actions.clone()  # its gradient is that of the critics alone
                sampled.register_hook(lambda gradient: self.actor.without_constants(gradient, observations))
            if self.policy.actor_std > 0.0:
                noise = times_per_dimension(th.randn_like(actions), self.policy.actor_std * self.action_unit)
                sampled = AntiWindupClamp.apply(sampled + noise)
            try:
                # only the gradient with respect to the action is needed, which saves a third of the work
                self.critic.requires_grad_(False)
                actor_q = self.critic.actor_q(observations, sampled).mean()
            finally:  # also after Ctrl-C: learn() can be called again
                self.critic.requires_grad_(True)
            loss = loss - actor_q
        self.actor.optimizer.zero_grad()
        loss.backward()
        self.actor.optimizer.step()
        with th.no_grad():
            distance, weight = difference.norm(dim=1).mean(), th.as_tensor(bc_coef, device=self.device).mean()
            return th.stack([loss, actor_q, bc_loss, distance, weight, batch.successful.mean(), reversed_rows])

    def _pull(self, observations: TensorDict) -> float | th.Tensor:
        """Return the pull's weight now: a number, or one per row (B, 1) where each task counts its own chunks."""
        if not isinstance(self.bc_coef, ChunkSchedule):
            return FloatSchedule(self.bc_coef)(self._current_progress_remaining)
        if self.task_chunks is None:
            return self.bc_coef(self.num_timesteps - self._opening_chunks)
        counts = self.task_chunks - self._opening_chunks
        of_tasks = th.tensor([self.bc_coef(int(count)) for count in counts], device=self.device)
        return observations[TASK].float() @ of_tasks[:, None]

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_graphs"]

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        networks, variables = super()._get_torch_save_params()
        for name in ("gripper_training", "token_training", "vla_training"):
            networks += [f"policy.{name}.optimizer"] if getattr(self.policy, name) else []
        return networks, variables

    # ---------------------------------------------------------------- entry points

    def learn(
        self: SelfRLT,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 4,
        tb_log_name: str = "RLT",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> SelfRLT:
        """Collect ``total_timesteps`` chunks and learn from them, see Stable-Baselines3."""
        if reset_num_timesteps:
            self._opening_chunks = 0
        return super().learn(
            total_timesteps=total_timesteps,
            callback=callback,
            log_interval=log_interval,
            tb_log_name=tb_log_name,
            reset_num_timesteps=reset_num_timesteps,
            progress_bar=progress_bar,
        )
