"""Base class of off-policy algorithms on action chunks: counts, updates per row, deployment gate, files."""

from __future__ import annotations

import inspect
import io
import json
import pathlib
import warnings
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch as th
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.noise import ActionNoise, VectorizedActionNoise
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.save_util import open_path
from stable_baselines3.common.type_aliases import MaybeCallback, RolloutReturn, TrainFreq
from stable_baselines3.common.vec_env import VecEnv

from rlt_sb3.common.chunk_outcome import ChunkOutcome, mean_over_chunks, outcomes_of
from rlt_sb3.common.errors import unknown_settings
from rlt_sb3.common.gated_policy import n_tasks_of, tasks_of
from rlt_sb3.common.policy_gate import PolicyGate
from rlt_sb3.common.task_gate import TaskGate
from rlt_sb3.common.trials import PlayedStates, Sample, horizon_by_task
from rlt_sb3.common.value_bias import ValueBias
from rlt_sb3.common.vec_env import CollectingVecEnv, WorkDuringStep

if TYPE_CHECKING:
    from rlt_sb3.common.replay.buffer import ChunkReplayBuffer

#: Increased when the contents of saved models change; load() refuses other numbers.
SAVED_FORMAT = 7
#: Unit of ``train_freq`` besides Stable-Baselines3's "step" and "episode".
OVERLAP = "overlap"
#: Arguments of constructors that are no settings.
RESERVED = ("self", "observation_space", "action_space", "lr_schedule", "device", "n_envs", "gated")

SelfAlgorithm = TypeVar("SelfAlgorithm", bound="ChunkOffPolicyAlgorithm")


class ChunkOffPolicyAlgorithm(OffPolicyAlgorithm):
    """
    An off-policy algorithm whose environment step is one action chunk and whose discounts are per control step.

    List it before one of Stable-Baselines3's algorithms as a base class: ``class RLT(ChunkOffPolicyAlgorithm, TD3)``.
    The algorithm calls :meth:`_begin_counting` in its constructor, makes a ``ChunkReplayBuffer``, asks :attr:`gate` in
    :meth:`_sample_action` which actor collects, and has a critic with ``q_values``.
    """

    replay_buffer: ChunkReplayBuffer | None
    critic: Any
    policy: Any
    utd: float
    critic_warmup_updates: int
    q_bounds: tuple[float, float] | None
    #: whether updates are computed while the environments play: the unit of ``train_freq`` is "overlap"
    overlap = False

    def _begin_counting(self, gate: dict[str, Any] | bool) -> None:
        """
        Make the gate and the counters.

        :param gate: arguments of :class:`~rlt_sb3.common.policy_gate.PolicyGate`, True for its defaults, or False
        """
        arguments = {} if isinstance(gate, bool) else gate
        check_names(arguments, PolicyGate, type(self).__name__, "gate")
        n_tasks = n_tasks_of(getattr(self, "observation_space", None))
        #: Chunks collected of each task; None where observations do not say which task is played.
        self.task_chunks = None if n_tasks is None else np.zeros(n_tasks, dtype=int)
        self.gate: PolicyGate | TaskGate | None = None
        if gate is not False:
            self.gate = PolicyGate(**arguments) if n_tasks is None else TaskGate(n_tasks, **arguments)
        self.policy_kwargs["gated"] = self.gate is not None
        self.saved_format = SAVED_FORMAT
        self._warned_of_returns = False
        self._update_credit = 0.0  # critic updates owed to rows already stored
        self._value_bias = ValueBias(getattr(self, "n_envs", 1), self.gamma, self._span, self._stats_window_size)

    @property
    def _span(self) -> float:
        """Width of the range that returns can take."""
        try:
            return 1.0 if self.q_bounds is None else float(self.q_bounds[1]) - float(self.q_bounds[0])
        except (IndexError, TypeError, ValueError):  # check_values refuses these bounds later
            return 1.0

    def _buffer_settings(self) -> dict[str, Any]:
        """Return arguments of the replay buffer; its stride is the one at which the environment observes in chunks."""
        try:
            stride = None if self.env is None else self.env.get_attr("obs_stride")[0]
        except AttributeError:
            stride = None
        return {"n_steps": self.n_steps, "gamma": self.gamma, "stride": stride}

    @property
    def num_control_steps(self) -> int:
        """Control steps executed so far (``num_timesteps`` counts chunks)."""
        return self._value_bias.control_steps

    @property
    def _warming_up(self) -> bool:
        """Whether only the critics follow their targets yet."""
        return self._n_updates <= self.critic_warmup_updates

    @property
    def critics_choose(self) -> bool:
        """Whether the slow critics choose among several chunks now, so that collectors need them, too."""
        return False

    def _convert_train_freq(self) -> None:
        """Read ``train_freq``: the unit "overlap" counts steps as Stable-Baselines3's "step" does."""
        given: Any = self.train_freq
        if not isinstance(given, TrainFreq):  # it is one in a model that was loaded
            self.overlap = isinstance(given, tuple) and given[1] == OVERLAP
            if self.overlap:
                self.train_freq = (given[0], "step")
        super()._convert_train_freq()

    def _setup_learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        reset_num_timesteps: bool = True,
        tb_log_name: str = "run",
        progress_bar: bool = False,
    ) -> tuple[int, BaseCallback]:
        if reset_num_timesteps:
            self._value_bias.control_steps = 0
            if self.task_chunks is not None:
                self.task_chunks[:] = 0
            if self.gate is not None:
                self.gate.begin()
        if reset_num_timesteps or self._last_obs is None:  # else the episodes go on where the last call left them
            self.end_trajectories()
        if self.replay_buffer is not None:
            self.replay_buffer.read_offline(self.env)
        return super()._setup_learn(total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar)

    def learn(self: SelfAlgorithm, *args: Any, **kwargs: Any) -> SelfAlgorithm:
        """
        Learn, see Stable-Baselines3.

        :param args: of Stable-Baselines3's ``learn``
        :param kwargs: of Stable-Baselines3's ``learn``
        :return: the model
        """
        super().learn(*args, **kwargs)
        if self.gate is not None:
            self.gate.warn_of_open_baseline()
        return self

    def know_vla(self, vla: PlayedStates, horizon: int | Mapping[int, int] | None = None) -> None:
        """
        Tell the gate what the frozen VLA did before training, so that training episodes go to actors at once.

        Without this, the gate first plays the VLA's baseline in training episodes. Call it before :meth:`learn`; the
        run that begins there counts the episodes. Without a gate it does nothing.

        :param vla: its episodes on states that are drawn like those of training, for instance
            ``evaluate("vla", env, 48, split="selection")``
        :param horizon: control steps of a training episode, in all tasks or in each by its number; later successes
            count as failures. None: the environment's ``train_episode_steps``, if it has any
        :raises ValueError: for held-out states, which must not decide what is deployed
        """
        if vla.split == "eval":
            raise ValueError(
                "know_vla needs what the VLA did on states of the split 'selection', got held-out states ('eval'): "
                "they must not decide what is deployed."
            )
        if self.gate is None:
            return
        if horizon is None and self.env is not None:
            with suppress(AttributeError):
                present = self.env.get_attr("train_episode_steps")[0]
                horizon = horizon_by_task(present, self.env.get_attr("tasks")[0])
        self.gate.know_vla(Sample.of_states(vla.rows, horizon))

    def end_trajectories(self) -> None:
        """
        End all trajectories, because the environments are about to be reset from outside.

        No return crosses such a reset. Call this method before you reset the environments in the middle of training;
        :meth:`learn` calls it itself where it resets them.
        """
        if self.replay_buffer is not None:
            self.replay_buffer.end_trajectories()
        self._value_bias.restart(self.n_envs)
        if self.gate is not None:
            self.gate.restart(self.n_envs)
            self.gate.weigh_tasks(self.env)

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
        Collect rows, then compute how many updates are due for them (see ``utd``).

        With :attr:`overlap`, the updates that are due for the rows of the rollouts before are done in this one, while
        the environments play its first step; those for its own rows stay owed, also in a saved model.

        A :class:`~rlt_sb3.common.vec_env.CollectingVecEnv` chooses the chunks itself: one rollout is one of its steps.
        It plays all the time, so nothing has to overlap.

        A rollout that does not come to its end gives up the running episodes: the next :meth:`learn` resets the
        environments.

        :return: SB3's result; its ``episode_timesteps`` is the number of updates due, which ``learn`` reads there if
            ``gradient_steps`` is -1
        """
        whole, overlap = False, self.overlap and not isinstance(env, CollectingVecEnv)
        try:
            if isinstance(env, CollectingVecEnv):
                self.policy.set_training_mode(False)
                rollout = env.collect(self, callback, log_interval)
            else:
                if overlap:
                    env = WorkDuringStep(env, self._train_meanwhile)
                rollout = super().collect_rollouts(
                    env, callback, train_freq, replay_buffer, action_noise, learning_starts, log_interval
                )
            whole = rollout.continue_training
        finally:
            if not whole:  # Ctrl-C, or a callback has ended training: the last step was played, but is not stored
                self._last_obs = None
        due = 0 if overlap or not rollout.continue_training else self._take_updates()
        return rollout._replace(episode_timesteps=due)

    def collecting_state(self) -> dict[str, Any]:
        """
        Return what a copy of this model in another process needs, beside its parameters, to choose chunks as this one.

        :return: counters, for :meth:`take_collecting_state`
        """
        return {"num_timesteps": self.num_timesteps, "_n_updates": self._n_updates}

    def take_collecting_state(self, state: Mapping[str, Any]) -> None:
        """
        Choose chunks as the model does from which a state is.

        :param state: of :meth:`collecting_state`
        """
        for name, value in state.items():
            setattr(self, name, value)

    def tell(
        self, infos: list[dict[str, Any]], actions: np.ndarray, rewards: np.ndarray, dones: np.ndarray
    ) -> list[dict[str, Any]]:
        """
        Write into the outcomes of a vector step what is known where its chunks were chosen: in a collector, if any.

        :param infos: one per environment
        :param actions: chunks (n_envs, C, d)
        :param rewards: sums over the chunks (n_envs,)
        :param dones: (n_envs,)
        :return: infos
        """
        return infos

    def _train_meanwhile(self) -> None:
        """Do the updates that are owed, in the midst of a rollout."""
        due = self._take_updates()
        if due == 0:
            return
        self.train(gradient_steps=due, batch_size=self.batch_size)
        self.policy.set_training_mode(False)  # as in every rollout

    def _take_updates(self) -> int:
        """Return how many updates are owed to the rows stored so far; they are not owed any more."""
        if self.num_timesteps <= self.learning_starts:
            return 0
        due = int(self._update_credit + 1e-9)
        self._update_credit -= due
        return due + max(self.critic_warmup_updates - self._n_updates, 0)

    def _store_transition(
        self,
        replay_buffer: ReplayBuffer,
        buffer_action: np.ndarray,
        new_obs: np.ndarray | dict[str, np.ndarray],
        reward: np.ndarray,
        dones: np.ndarray,
        infos: list[dict[str, Any]],
    ) -> None:
        outcomes = outcomes_of(infos, buffer_action, reward)
        if self.task_chunks is not None:
            self.task_chunks += np.bincount(tasks_of(self._last_obs), minlength=len(self.task_chunks))  # type: ignore[arg-type]
        trained = 0 < self._n_updates >= self.critic_warmup_updates
        self._value_bias.step(outcomes, dones, (lambda: self._promised_q(outcomes)) if trained else None)
        self._check_returns()
        if self.gate is not None:
            self.gate.step(self.policy, outcomes, dones)
            self.gate.weigh_tasks(self.env)
        for name, value in mean_over_chunks(outcomes).items():
            self.logger.record_mean(f"rollout/{name}", value)
        stored = replay_buffer.rows_stored  # type: ignore[attr-defined]
        super()._store_transition(replay_buffer, buffer_action, new_obs, reward, dones, infos)
        if self.num_timesteps > self.learning_starts:
            self._update_credit += self.utd * (replay_buffer.rows_stored - stored)  # type: ignore[attr-defined]

    def _check_returns(self) -> None:
        """Warn, once, of returns outside the range to which the critics' targets are clipped."""
        (low, high), bounds = self._value_bias.range, self.q_bounds
        if bounds is None or self._warned_of_returns or (low >= bounds[0] - 1e-6 and high <= bounds[1] + 1e-6):
            return
        self._warned_of_returns = True
        warnings.warn(
            f"An episode has ended with the discounted return {low if low < bounds[0] else high:.3g}, but the critics' "
            f"targets are clipped to q_bounds={tuple(bounds)}: set q_bounds to the range that returns can take, or to "
            "None.",
            stacklevel=2,
        )

    def _promised_q(self, outcomes: list[ChunkOutcome]) -> np.ndarray:
        with th.no_grad():
            obs, _ = self.policy.obs_to_tensor(self._last_obs)
            actions = th.as_tensor(np.stack([outcome.executed for outcome in outcomes]), device=self.device).flatten(1)
            return self.critic.q_values(obs, actions).mean(0).cpu().numpy()

    def dump_logs(self) -> None:
        """Write log data."""
        self.logger.record("time/control_steps", self.num_control_steps)
        if self._value_bias.gap is not None:
            self.logger.record("train/q_gap", self._value_bias.gap)
        for name, value in ({} if self.gate is None else self.gate.metrics()).items():
            self.logger.record(f"rollout/{name}", value)
        super().dump_logs()

    # ---------------------------------------------------------------- files

    @classmethod
    def load(
        cls: type[SelfAlgorithm], path: str | pathlib.Path | io.BufferedIOBase, *args: Any, **kwargs: Any
    ) -> SelfAlgorithm:
        """
        Load a model, see Stable-Baselines3.

        :param path: file
        :param args: of Stable-Baselines3's ``load``
        :param kwargs: of Stable-Baselines3's ``load``, and settings of the algorithm to change
        :return: the model
        :raises ValueError: if another version of rlt has saved it, or for settings that do not exist or cannot change
        """
        if "gate" in kwargs:
            raise ValueError(
                "gate cannot be changed by load(): the networks were made with or without one. Leave it out."
            )
        of_load = inspect.signature(OffPolicyAlgorithm.load).parameters
        check_names({name: value for name, value in kwargs.items() if name not in of_load}, cls, cls.__name__)
        check_saved_format(path)
        model = super().load(path, *args, **kwargs)
        model._value_bias.gamma, model._value_bias.span = model.gamma, model._span  # kwargs may have changed them
        noise = model.action_noise
        if isinstance(noise, VectorizedActionNoise) and noise.n_envs != model.n_envs:
            model.action_noise = VectorizedActionNoise(noise.base_noise, model.n_envs)
        return model

    def save_replay_buffer(self, path: str | pathlib.Path | io.BufferedIOBase) -> None:
        """
        Save the replay buffer; other threads cannot add or sample until it is written.

        :param path: file
        """
        with self.replay_buffer._lock:  # type: ignore[union-attr]
            super().save_replay_buffer(path)

    def load_replay_buffer(self, path: str | pathlib.Path | io.BufferedIOBase, truncate_last_traj: bool = True) -> None:
        """
        Load a saved replay buffer, which takes the model's ``gamma``, ``n_steps`` and offline rows.

        :param path: file
        :param truncate_last_traj: not used
        :raises ValueError: if it was filled with another number of environments; the model keeps its own buffer then
        """
        made = self.replay_buffer
        try:
            super().load_replay_buffer(path, truncate_last_traj)
            buffer = self.replay_buffer
            assert made is not None and buffer is not None
            if buffer.n_envs != self.n_envs:
                raise ValueError(
                    f"The replay buffer was filled with {buffer.n_envs} environments, the model has {self.n_envs}: "
                    "load it into a model with as many."
                )
            buffer.take_settings_from(made)
        except BaseException:
            self.replay_buffer = made
            raise
        buffer.end_trajectories()


def check_names(given: Mapping[str, Any] | None, owner: type, algorithm: str, setting: str = "") -> None:
    """
    Refuse keyword arguments that a class does not have.

    :param given: keyword arguments
    :param owner: the class that takes them
    :param algorithm: name for the message
    :param setting: the algorithm's setting that they belong to, for the message; "" for its own
    :raises ValueError: for names that the class does not have; lists those that it has
    """
    parameters = inspect.signature(owner.__init__).parameters  # type: ignore[misc]
    known = [name for name in parameters if name not in RESERVED]
    switch = setting.endswith(("gate", "offset_search"))
    if not isinstance(given, Mapping) and (switch or given is not None):
        others = "True, False or " if switch else ""
        raise ValueError(f"{setting} must be {others}a dict with some of {', '.join(known)}, got {given!r}.")
    unknown = sorted(set(given or {}) - set(parameters))
    if unknown and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        names = [f"{setting}.{name}" if setting else name for name in unknown]
        raise ValueError(unknown_settings(algorithm, names, known))


def check_saved_format(path: str | pathlib.Path | io.BufferedIOBase) -> None:
    """
    Refuse a model that another version of rlt has saved.

    :param path: a saved model
    :raises ValueError: if it was saved by another version of rlt (or by another algorithm)
    """
    file = open_path(path, "r", verbose=0, suffix="zip")
    try:
        with zipfile.ZipFile(file) as archive:
            found = json.loads(archive.read("data")).get("saved_format")
    except (zipfile.BadZipFile, KeyError):
        return  # not a model: Stable-Baselines3 raises the error
    finally:
        if file is path:
            file.seek(0)
        else:
            file.close()
    if found != SAVED_FORMAT:
        raise ValueError(
            f"{path} was saved by another version of rlt, or by another algorithm (format {found}, this version reads "
            f"{SAVED_FORMAT}): train it again, or use the version that saved it."
        )
