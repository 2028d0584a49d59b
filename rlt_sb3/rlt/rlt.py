"""The RLT algorithm: chunked TD3 that starts at a frozen VLA and stays near it."""

import pathlib
from io import BufferedIOBase
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch as th

# Loaded here on purpose: torch imports it lazily when the first optimizer is made, which crashes the interpreter if
# that happens after software OpenGL (OSMesa) has been loaded into the same process.
import torch._dynamo
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import (
    GymEnv,
    MaybeCallback,
    RolloutReturn,
    Schedule,
    TrainFreq,
)
from stable_baselines3.common.utils import FloatSchedule
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.td3.td3 import TD3

from rlt_sb3.common.chunks import chunk_stats, executed_chunks, times_per_dimension
from rlt_sb3.common.hardware import cpu_has_bfloat16
from rlt_sb3.common.replay.buffer import ChunkReplayBuffer
from rlt_sb3.common.replay.offline import attach_offline
from rlt_sb3.common.replay.storage import ChunkBatch
from rlt_sb3.common.value_bias import QGapTracker
from rlt_sb3.rlt.batches import training_batches
from rlt_sb3.rlt.policies import RLTActor, RLTCritic, RLTPolicy
from rlt_sb3.rlt.settings import buffer_settings, check_settings, policy_settings
from rlt_sb3.rlt.spaces import check_spaces
from rlt_sb3.rlt.trials import Trials

SelfRLT = TypeVar("SelfRLT", bound="RLT")


class RLT(TD3):
    r"""
    Online RL on RL tokens (Xu et al., "RL Token: Bootstrapping Online RL with Vision-Language-Action Models",
    https://arxiv.org/abs/2604.23073), as a plug-in for Stable-Baselines3.

    One environment step is one action chunk of up to C control steps. The observation is a flat Dict of
    ``z_rl`` (D,), ``proprio`` (P,) and ``vla_ref`` (C, d), the chunk that the frozen VLA proposes; the action is the
    chunk to execute, Box(-1, 1, (C, d)). All discounts are per control step.

    Critics learn, with :math:`k \le C` executed steps (paper eq. 3; ``n_steps`` chains several chunks)

    .. math:: y = \sum_{j<k} \gamma^j r_j + \gamma^k (1 - \text{terminated}) \min_i Q'_i(s', a'),

    with ``a'`` from the target actor plus clipped noise. The actor minimises (paper eq. 5)

    .. math:: -Q(s, a) + \text{bc\_coef} \cdot \tfrac{1}{C d} \lVert (a - \text{vla\_ref}) / \sigma \rVert^2 ,

    with :math:`\sigma` = ``action_scale``. The paper writes the distance as a sum, without sigma: its beta is
    ``bc_coef / (C * d)`` (20 is 0.36 for C=8, d=7). Both are meant for rewards that add up to at most 1: with a success
    that pays r, ``r * bc_coef`` weighs as much.

    To get the paper's own recipe: ``actor_mode="direct", n_critics=2, n_steps=1, utd=5, critic_warmup_updates=0,
    q_bounds=None``. The defaults differ because that recipe first falls below the VLA: here the untrained actor plays
    the VLA's chunk exactly, critics learn before the actor moves, targets stay in the reachable range.

    :param policy: "MultiInputPolicy" or :class:`~rlt_sb3.rlt.policies.RLTPolicy`
    :param env: environment with the spaces above, e.g. ``VecMonitor(GymnasiumVecEnv(make_vec(...)))``
    :param learning_rate: of Adam, for actor and critics; a number or a schedule
    :param buffer_size: rows (chunks) kept
    :param learning_starts: rows collected first with the VLA's own chunks, exactly and without noise
    :param batch_size: rows per update
    :param tau: weight of the online networks in each target update
    :param actor_tau: the same for the actor's slow copy, which plays and gives the target actions; None: ``tau``. A
        small one (0.0015) keeps the policy from swinging after every change of the critics
    :param gamma: discount per control step
    :param train_freq: vector steps (or ``(n, "episode")``) between two calls of :meth:`train`
    :param gradient_steps: -1 (updates follow ``utd``), or, with ``utd=None``, critic updates per call of :meth:`train`
    :param utd: critic updates per stored row, exact for any number of environments (fractions are carried over);
        None to use ``gradient_steps``
    :param n_steps: consecutive chunks in a return
    :param policy_delay: critic updates per actor and target update, counted over the whole life of the model
    :param target_policy_noise: standard deviation of the noise on target actions
    :param target_noise_clip: its limit
    :param bc_coef: weight of the *mean* squared distance, over the C*d numbers, to the VLA's chunk (in units of
        ``action_scale``); a number or a schedule (of the progress remaining, which falls from 1 to 0)
    :param bc_failure_weight: the pull is multiplied by this in rows whose episode has not ended in success: 1 for all
        rows alike, 0 for successful episodes only. Episodes still running, and those cut off, are no successes yet.
    :param reference_dropout: probability, per sample of an actor update, that the actor sees zeros for the whole
        reference chunk; never in :meth:`predict`, rollouts or targets
    :param exploration_std: standard deviation of the Gaussian noise in rollouts after ``learning_starts``; a number or
        one per action dimension (d,)
    :param action_scale: what counts as one unit of action, a number or one per action dimension (d,): noise (in
        rollouts and on targets) is multiplied by it, the distance of the pull divided by it. VLAs learn actions that
        are normalised in each dimension, robots take others: where the VLA turns the hand by 0.02, noise of 0.05 is
        large, and the pull leaves more room than the VLA itself ever uses
    :param noise_hold: draw one noise vector per chunk and hold it for its C steps (smooth motion) instead of
        independent noise at every step
    :param trial_share: share of the training episodes that copies of the actor play without noise, as trials. With
        trials, :meth:`predict` plays the VLA's chunk until an actor has beaten the VLA in them, and then the last actor
        that has (see :class:`~rlt_sb3.rlt.trials.Trials`); 0: always the present actor
    :param trial_window: trials of a copy
    :param critic_warmup_updates: extra critic updates, done at once when ``learning_starts`` is over, before the actor
        may move. With ``actor_mode="direct"`` the actor is meanwhile fitted to the VLA's chunks.
    :param actor_starts: rows collected before the actor may move. Between ``learning_starts`` and this, rollouts play
        the VLA's chunks plus exploration noise and only the critics learn: without actions around the reference in
        their data they cannot tell which way is better, and the actor follows their errors.
    :param q_bounds: targets are clipped to this range, the reachable one; (0, 1) fits a sparse reward of 1. None: off
    :param actor_q: Q in the actor's loss: "mean" of the ensemble (the least noisy gradient; pessimism is in the
        targets), "min", or "first" (TD3)
    :param n_critics: number of Q-functions; the minimum over them is the target
    :param n_target_critics: take the minimum over this many randomly chosen ones (REDQ), which is also cheaper;
        None: all
    :param actor_mode: "residual" (reference + correction that starts at zero) or "direct" (paper)
    :param token_input: False: networks see ``proprio`` without ``z_rl`` (ablation)
    :param reference_input: False: the actor's network does not see ``vla_ref`` (ablation)
    :param critic_precision: "float32", or "bfloat16" for the matrix products of the critics (parameters, losses and
        targets stay float32): about twice as fast on processors that have bfloat16 instructions, slower on others;
        "auto" asks the processor
    :param intervention_ref: where someone took over, the executed action is the target of the actor's pull; "replace":
        and stands in for ``vla_ref`` in that row (paper, Alg. 1), "target": only that
    :param action_noise: further noise in rollouts, shape (C, d)
    :param replay_buffer_class: a subclass of ``ChunkReplayBuffer``
    :param replay_buffer_kwargs: further arguments of the buffer; its ``stride`` is the environment's ``obs_stride``
    :param offline_data: file of transitions (``rlt encode-demos``), read when :meth:`learn` starts
    :param offline_ratio: share of each batch that comes from ``offline_data`` and the rows of interventions
    :param intervention_rows: keep rows in which someone took over beside ``offline_data`` as well, in so many slots
    :param stats_window_size: episodes over which rollout statistics and ``train/q_gap`` are averaged
    :param tensorboard_log: folder of TensorBoard logs
    :param policy_kwargs: further arguments of :class:`~rlt_sb3.rlt.policies.RLTPolicy`
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

    def __init__(
        self,
        policy: str | type[RLTPolicy],
        env: GymEnv | str,
        learning_rate: float | Schedule = 3e-4,
        buffer_size: int = 50_000,
        learning_starts: int = 500,
        batch_size: int = 256,
        tau: float = 0.005,
        actor_tau: float | None = None,
        gamma: float = 0.99,
        train_freq: int | tuple[int, str] = 1,
        gradient_steps: int = -1,
        utd: float | None = 2.0,
        n_steps: int = 3,
        policy_delay: int = 2,
        target_policy_noise: float = 0.1,
        target_noise_clip: float = 0.2,
        bc_coef: float | Schedule = 20.0,
        bc_failure_weight: float = 1.0,
        reference_dropout: float = 0.5,
        exploration_std: float | list[float] = 0.05,
        action_scale: float | list[float] = 1.0,
        noise_hold: bool = False,
        trial_share: float = 0.0,
        trial_window: int = 20,
        critic_warmup_updates: int = 500,
        actor_starts: int = 0,
        q_bounds: tuple[float, float] | None = (0.0, 1.0),
        actor_q: str = "mean",
        n_critics: int = 5,
        n_target_critics: int | None = None,
        actor_mode: str = "residual",
        token_input: bool = True,
        reference_input: bool = True,
        critic_precision: str = "float32",
        intervention_ref: str = "replace",
        action_noise: ActionNoise | None = None,
        replay_buffer_class: type[ReplayBuffer] | None = None,
        replay_buffer_kwargs: dict[str, Any] | None = None,
        offline_data: str | None = None,
        offline_ratio: float = 0.0,
        intervention_rows: int = 0,
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
            gradient_steps=gradient_steps,
            action_noise=action_noise,
            replay_buffer_class=replay_buffer_class,
            replay_buffer_kwargs=replay_buffer_kwargs,
            policy_delay=policy_delay,
            target_policy_noise=target_policy_noise,
            target_noise_clip=target_noise_clip,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            policy_kwargs=policy_settings(
                policy_kwargs or {}, token_input,
                n_critics=n_critics, actor_mode=actor_mode, reference_input=reference_input, trials=trial_share > 0.0,
            ),
            verbose=verbose,
            seed=seed,
            device=device,
            _init_setup_model=False,
        )  # fmt: skip
        self.actor_tau = actor_tau
        self.utd = utd
        self.n_steps = n_steps
        self.bc_coef, self.bc_failure_weight = bc_coef, bc_failure_weight
        self.reference_dropout = reference_dropout
        self.exploration_std, self.action_scale = exploration_std, action_scale
        self.noise_hold = noise_hold
        self.trial_share = trial_share
        self.trial_window = trial_window
        self.critic_warmup_updates = critic_warmup_updates
        self.actor_starts = actor_starts
        self.q_bounds = q_bounds
        self.actor_q = actor_q
        self.n_critics = self.policy_kwargs["n_critics"]
        self.n_target_critics = n_target_critics
        self.actor_mode = self.policy_kwargs["actor_mode"]
        self.token_input, self.reference_input = token_input, self.policy_kwargs["reference_input"]
        self.critic_precision, self.intervention_ref = critic_precision, intervention_ref
        self.offline_data, self.offline_ratio = offline_data, offline_ratio
        self.intervention_rows = intervention_rows
        # critic updates owed to rows already stored
        self._update_credit = 0.0
        span = 1.0 if q_bounds is None else q_bounds[1] - q_bounds[0]
        self._q_gap = QGapTracker(getattr(self, "n_envs", 1), gamma, span, stats_window_size)
        self.trials = Trials(getattr(self, "n_envs", 1), trial_share, trial_window)

        if _init_setup_model:
            self._setup_model()

    @property
    def num_control_steps(self) -> int:
        """Control steps executed so far (``num_timesteps`` counts chunks)."""
        return self._q_gap.control_steps

    # ---------------------------------------------------------------- construction

    def _setup_model(self) -> None:
        check_spaces(self.observation_space, self.action_space)
        assert isinstance(self.observation_space, spaces.Dict) and isinstance(self.action_space, spaces.Box)
        if self._vec_normalize_env is not None:
            raise ValueError(
                "VecNormalize does not go with RLT: vla_ref must stay as it is; RLT normalises its own inputs."
            )
        check_settings(self)
        if self.q_bounds is not None:
            self.q_bounds = (float(self.q_bounds[0]), float(self.q_bounds[1]))  # load() brings a list
        if self.replay_buffer_class is None:
            self.replay_buffer_class = ChunkReplayBuffer
        if self.replay_buffer is None:
            self.replay_buffer = self.replay_buffer_class(
                self.buffer_size,
                self.observation_space,
                self.action_space,
                device=self.device,
                n_envs=self.n_envs,
                **(buffer_settings(self) | self.replay_buffer_kwargs),
            )
        # The buffer has its n_steps; SB3 would warn that it ignores the argument
        n_steps, self.n_steps = self.n_steps, 1
        super()._setup_model()
        self.n_steps = n_steps

    # ---------------------------------------------------------------- rollouts

    def _sample_action(
        self, learning_starts: int, action_noise: ActionNoise | None = None, n_envs: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        """
        Choose the chunks to execute: the VLA's own ones during warm-up, else the actor's plus noise.

        :param learning_starts: length of the warm-up in rows
        :param action_noise: further noise
        :param n_envs: number of environments
        :return: chunks (n_envs, C, d), and the same for the buffer
        """
        assert isinstance(self._last_obs, dict), "self._last_obs was not set"
        reference = np.clip(np.asarray(self._last_obs["vla_ref"], dtype=np.float32), -1.0, 1.0)
        if self.num_timesteps < learning_starts:
            self.trials.no_noise()
            return reference, reference.copy()
        if self.actor_mode == "direct" and self._warming_up:
            chunk = reference  # this actor has not yet been fitted to the VLA
        else:
            with th.no_grad():
                observation, _ = self.policy.obs_to_tensor(self._last_obs)
                chunk = self.policy.candidate(observation).cpu().numpy().reshape(reference.shape)
                if self.trial_share > 0.0:
                    if not self.trials.open and not self._warming_up:
                        self.policy.nominate()
                        self.trials.begin()
                    on_trial = self.policy.actor_on_trial(observation).cpu().numpy().reshape(reference.shape)
                    chunk = np.where(self.trials.noisy[:, None, None], chunk, on_trial)
        _, length, dims = chunk.shape
        noise = np.random.normal(size=(n_envs, 1 if self.noise_hold else length, dims))
        noise = noise * np.asarray(self.exploration_std) * np.asarray(self.action_scale)
        if action_noise is not None:
            noise = noise + action_noise()
        noise = noise * self.trials.noisy[:, None, None]
        chunk = np.clip(chunk + noise, -1.0, 1.0).astype(np.float32)
        return chunk, chunk.copy()

    def _setup_learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        reset_num_timesteps: bool = True,
        tb_log_name: str = "run",
        progress_bar: bool = False,
    ) -> tuple[int, BaseCallback]:
        if reset_num_timesteps:
            self._q_gap.control_steps = 0
        self.end_trajectories()
        if self.offline_ratio > 0.0 and isinstance(self.replay_buffer, ChunkReplayBuffer):
            attach_offline(self.replay_buffer, self.offline_data, self.offline_ratio, self.intervention_rows, self.env)
        return super()._setup_learn(total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar)

    def end_trajectories(self) -> None:
        """
        Say that the environments are about to be reset from outside: no return may run across.

        Call it before such a reset in the middle of training; :meth:`learn` does it by itself when it starts.
        """
        if isinstance(self.replay_buffer, ChunkReplayBuffer):
            self.replay_buffer.end_trajectories()
        self._q_gap.restart(self.n_envs)
        self.trials.restart(self.n_envs)

    def collect_rollouts(
        self,
        env: VecEnv,
        callback: BaseCallback,
        train_freq: TrainFreq,
        replay_buffer: ReplayBuffer,
        action_noise: ActionNoise | None = None,
        learning_starts: int = 0,
        log_interval: int | None = None,
    ) -> RolloutReturn:
        """
        Collect rows, then say how many updates are due for them (see ``utd``).

        :return: SB3's result; with ``utd`` set its ``episode_timesteps`` is the number of updates due, which is what
            ``learn`` uses it for when ``gradient_steps`` is -1
        """
        rollout = super().collect_rollouts(
            env, callback, train_freq, replay_buffer, action_noise, learning_starts, log_interval
        )
        if self.utd is None or not rollout.continue_training or self.num_timesteps <= self.learning_starts:
            return rollout
        due = int(self._update_credit + 1e-9)
        self._update_credit -= due
        due += max(self.critic_warmup_updates - self._n_updates, 0)
        return rollout._replace(episode_timesteps=due)

    def _store_transition(
        self,
        replay_buffer: ReplayBuffer,
        buffer_action: np.ndarray,
        new_obs: np.ndarray | dict[str, np.ndarray],
        reward: np.ndarray,
        dones: np.ndarray,
        infos: list[dict[str, Any]],
    ) -> None:
        trained = 0 < self._n_updates >= self.critic_warmup_updates
        q_function = (lambda: self._promised_q(executed_chunks(buffer_action, infos))) if trained else None
        self._q_gap.step(buffer_action.shape[1], reward, dones, infos, q_function)
        if self.trials.step(not self._warming_up, dones, infos, reward):
            self.policy.approve()
        assert isinstance(replay_buffer, ChunkReplayBuffer)
        for name, value in chunk_stats(infos).items():
            self.logger.record_mean(f"rollout/{name}", value)
        stored = replay_buffer.rows_stored
        super()._store_transition(replay_buffer, buffer_action, new_obs, reward, dones, infos)
        if self.utd is not None and self.num_timesteps > self.learning_starts:
            self._update_credit += self.utd * (replay_buffer.rows_stored - stored)

    def _promised_q(self, chunks: np.ndarray) -> np.ndarray:
        with th.no_grad():
            obs, _ = self.policy.obs_to_tensor(self._last_obs)  # type: ignore[arg-type]
            actions = th.as_tensor(chunks, device=self.device).flatten(1)
            return self._q_values(self.critic, obs, actions).mean(0).cpu().numpy()  # type: ignore[arg-type]

    def dump_logs(self) -> None:
        """Write log data."""
        self.logger.record("time/control_steps", self.num_control_steps)
        if self._q_gap.gap is not None:
            self.logger.record("train/q_gap", self._q_gap.gap)
        if self.trials.recent:
            self.logger.record("rollout/trial_success_rate", float(np.mean(self.trials.recent)))
            self.logger.record("rollout/candidates", self.trials.candidates)
            self.logger.record("rollout/approvals", self.trials.approvals)
        super().dump_logs()

    # ---------------------------------------------------------------- updates

    @property
    def _warming_up(self) -> bool:
        """Whether only the critics follow their targets yet."""
        return self._n_updates <= self.critic_warmup_updates or self.num_timesteps < self.actor_starts

    def train(self, gradient_steps: int, batch_size: int = 256) -> None:
        """
        :param gradient_steps: number of critic updates
        :param batch_size: rows per update
        """
        assert isinstance(self.replay_buffer, ChunkReplayBuffer)
        if self.replay_buffer.size() == 0:  # no episode has come to its critical phase yet
            return
        self.policy.set_training_mode(True)
        self._update_learning_rate([self.actor.optimizer, self.critic.optimizer])
        critic_stats: list[th.Tensor] = []
        actor_stats: list[th.Tensor] = []
        networks = (self.actor, self.actor_target, self.critic, self.critic_target)
        for batch in training_batches(self.replay_buffer, networks, gradient_steps, batch_size):
            self._n_updates += 1
            critic_stats.append(self._update_critic(batch))
            # counted over the life of the model: a delay per call would never let single updates reach the actor
            if self._n_updates % self.policy_delay == 0:
                warming_up = self._warming_up
                if not warming_up or self.actor_mode == "direct":
                    actor_stats.append(self._update_actor(batch, follow_q=not warming_up))
                    self._polyak(self.actor, self.actor_target, self.tau if self.actor_tau is None else self.actor_tau)
                self._polyak(self.critic, self.critic_target, self.tau)

        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        if critic_stats:
            names = ("critic_loss", "q_mean", "q_std", "target_mean", "target_min", "target_max")
            for name, value in zip(names, th.stack(critic_stats).mean(0).tolist(), strict=True):
                self.logger.record_mean(f"train/{name}", value)
            loss = th.stack(critic_stats)[:, 0].mean().item()
            self.logger.record_mean("train/td_error", (loss / self.n_critics) ** 0.5)
        if actor_stats:
            actor_names = ("actor_loss", "actor_q", "bc_loss", "bc_distance", "bc_coef", "successful_rows")
            for name, value in zip(actor_names, th.stack(actor_stats).mean(0).tolist(), strict=True):
                self.logger.record_mean(f"train/{name}", value)

    def _targets(self, batch: ChunkBatch) -> th.Tensor:
        """
        :param batch: rows
        :return: targets of the critics (B,)
        """
        with th.no_grad():
            next_actions = self.actor_target(batch.next_observations)
            noise = th.randn_like(next_actions) * self.target_policy_noise
            noise = noise.clamp_(-self.target_noise_clip, self.target_noise_clip)
            next_actions = (next_actions + times_per_dimension(noise, self.action_scale)).clamp_(-1.0, 1.0)
            members = None
            if self.n_target_critics is not None and self.n_target_critics < self.n_critics:
                members = th.randperm(self.n_critics, device=self.device)[: self.n_target_critics]
            next_q = self._q_values(self.critic_target, batch.next_observations, next_actions, members).amin(0)
            targets = (batch.rewards + (1.0 - batch.dones) * batch.discounts * next_q.unsqueeze(1)).squeeze(1)
            return targets if self.q_bounds is None else targets.clamp_(*self.q_bounds)

    def _update_critic(self, batch: ChunkBatch) -> th.Tensor:
        """
        :param batch: rows
        :return: loss (summed over the ensemble), mean Q, its spread over the ensemble, mean / min / max target
        """
        targets = self._targets(batch)
        q_values = self._q_values(self.critic, batch.observations, batch.actions)
        loss = (q_values - targets).pow(2).mean(1).sum()
        self.critic.optimizer.zero_grad()
        loss.backward()
        self.critic.optimizer.step()
        with th.no_grad():
            spread = q_values.std(0, unbiased=False).mean()
            return th.stack([loss, q_values.mean(), spread, targets.mean(), targets.min(), targets.max()])

    def _update_actor(self, batch: ChunkBatch, follow_q: bool = True) -> th.Tensor:
        """
        :param batch: rows
        :param follow_q: False leaves only the pull towards the VLA's chunks
        :return: loss, mean Q, mean squared distance to the VLA's chunks in units of ``action_scale``, mean distance per
            sample (norm over C*d, no units), the pull's weight, share of the rows that belong to successful episodes
        """
        observations = batch.observations
        bc_target = batch.bc_target  # vla_ref, but the executed action where someone else chose it
        keep = None
        if self.reference_dropout > 0.0:
            keep = (th.rand(len(bc_target), 1, device=self.device) >= self.reference_dropout).float()
        actions = self.actor(observations, keep)
        difference = actions - bc_target
        squared = times_per_dimension(difference, 1.0 / np.asarray(self.action_scale)).pow(2)
        # reference dropout does not touch the target of the pull
        bc_loss = pull = squared.mean()
        if follow_q and self.bc_failure_weight < 1.0:
            # not divided by the sum of the weights: in each row the pull has to hold its own against Q
            pull = (squared * (batch.successful + self.bc_failure_weight * (1.0 - batch.successful))).mean()
        bc_coef = FloatSchedule(self.bc_coef)(self._current_progress_remaining)
        loss = bc_coef * pull
        actor_q = th.zeros((), device=self.device)
        if follow_q:
            # only the gradient with respect to the action is needed: a third of the work less
            self.critic.requires_grad_(False)
            actor_q = self._actor_q(observations, actions).mean()
            self.critic.requires_grad_(True)
            loss = loss - actor_q
        self.actor.optimizer.zero_grad()
        loss.backward()
        self.actor.optimizer.step()
        with th.no_grad():
            distance, weight = difference.norm(dim=1).mean(), th.tensor(bc_coef, device=self.device)
            return th.stack([loss, actor_q, bc_loss, distance, weight, batch.successful.mean()])

    def _actor_q(self, observations: dict[str, th.Tensor], actions: th.Tensor) -> th.Tensor:
        members = slice(1) if self.actor_q == "first" else None
        q_values = self._q_values(self.critic, observations, actions, members)
        return q_values.amin(0) if self.actor_q == "min" else q_values.mean(0)

    def _q_values(
        self,
        critic: RLTCritic,
        observations: dict[str, th.Tensor],
        actions: th.Tensor,
        members: th.Tensor | slice | None = None,
    ) -> th.Tensor:
        bfloat16 = self.critic_precision == "bfloat16" or (self.critic_precision == "auto" and cpu_has_bfloat16())
        with th.autocast(self.device.type, dtype=th.bfloat16, enabled=bfloat16):
            return critic.q_values(observations, actions, members).float()

    def _polyak(self, online: th.nn.Module, target: th.nn.Module, tau: float) -> None:
        with th.no_grad():  # all parameters in one call
            th._foreach_lerp_(list(target.parameters()), list(online.parameters()), tau)

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
        """
        :param total_timesteps: number of rows (chunks) to collect
        :param callback: called at every vector step
        :param log_interval: episodes between two log entries
        :param tb_log_name: name of the TensorBoard run
        :param reset_num_timesteps: count from zero
        :param progress_bar: show a progress bar
        :return: the model
        """
        return super().learn(
            total_timesteps=total_timesteps,
            callback=callback,
            log_interval=log_interval,
            tb_log_name=tb_log_name,
            reset_num_timesteps=reset_num_timesteps,
            progress_bar=progress_bar,
        )

    def save_replay_buffer(self, path: str | pathlib.Path | BufferedIOBase) -> None:
        """:param path: file; no thread adds or samples before all is written"""
        with self.replay_buffer._lock:  # type: ignore[union-attr]
            super().save_replay_buffer(path)

    def load_replay_buffer(self, path: str | pathlib.Path | BufferedIOBase, truncate_last_traj: bool = True) -> None:
        """
        Load a saved replay buffer. Its ``gamma`` and ``n_steps`` become those of the model.

        :param path: file
        :param truncate_last_traj: not used
        :raises ValueError: if it was filled with another number of environments
        """
        super().load_replay_buffer(path, truncate_last_traj)
        buffer = self.replay_buffer
        assert isinstance(buffer, ChunkReplayBuffer)
        if buffer.n_envs != self.n_envs:
            raise ValueError(
                f"The replay buffer was filled with {buffer.n_envs} environments, the model has {self.n_envs}."
            )
        buffer.gamma, buffer.n_steps = float(self.gamma), int(self.n_steps)
        buffer.end_trajectories()
