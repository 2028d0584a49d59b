"""Which chunks RLT plays while it collects, and what it notes of them; :mod:`~rlt_sb3.rlt.rlt` learns from them."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.noise import ActionNoise

from rlt_sb3.common.chunk_off_policy import ChunkOffPolicyAlgorithm
from rlt_sb3.common.chunk_outcome import ChunkOutcome, outcomes_of
from rlt_sb3.common.gated_policy import TaskActors, tasks_of
from rlt_sb3.common.noise import unit_from_spread
from rlt_sb3.common.replay.buffer import ChunkReplayBuffer
from rlt_sb3.common.task_gate import TaskGate
from rlt_sb3.common.vec_env import CollectingVecEnv
from rlt_sb3.rlt.features import RLTFeatures, TensorDict
from rlt_sb3.rlt.gripper import GripperTrial
from rlt_sb3.rlt.offset import OffsetSearch
from rlt_sb3.rlt.policies import RLTPolicy


class RLTRollouts(ChunkOffPolicyAlgorithm):
    """
    The part of :class:`~rlt_sb3.rlt.rlt.RLT` that chooses chunks and stores them.

    Its settings are RLT's, whose constructor makes what is declared here. In the warm-up it plays the VLA's own chunks,
    and afterwards the actor's. Episodes that the gate counts have no noise. All others have noise, and they try other
    offsets and other commands of the gripper.
    """

    policy: RLTPolicy
    action_scale: float | list[float] | str
    correction_range: tuple[float, float]
    exploration_std: float | list[float]
    #: place of the gripper's command in an action, if the environment's robot has one
    gripper: int | None
    gripper_trial: GripperTrial | None
    search: OffsetSearch | None
    #: whether all episodes with noise belong to the search, and only the offset learns
    search_opens: bool
    #: what "auto" has found
    _measured_unit: list[float] | None
    #: chunks until the network began to learn, of all tasks or (tasks,): the pull's schedule begins there
    _opening_chunks: Any

    @property
    def action_unit(self) -> np.ndarray:
        """One unit of action, a number () or one per action dimension (d,): ``action_scale``, or what "auto" found."""
        if not isinstance(self.action_scale, str):
            return np.asarray(self.action_scale, dtype=float)
        if self._measured_unit is not None:
            return np.asarray(self._measured_unit)
        assert isinstance(self.replay_buffer, ChunkReplayBuffer)
        references = self.replay_buffer.references()
        if len(references) == 0:  # before the first row only the VLA's present chunks are known
            assert self._last_obs is None or isinstance(self._last_obs, dict)
            references = np.zeros((1, 1, 1)) if self._last_obs is None else self._last_obs["vla_ref"]
        return unit_from_spread(references)

    @property
    def critics_choose(self) -> bool:
        """Whether the slow critics choose among several chunks: not before the actor's network learns from them."""
        return self.policy.candidates > 1 and not (self._warming_up or self.search_opens)

    def _measure_unit(self) -> None:
        """Fix the unit that "auto" finds now: it must not change once the critics learn under this noise."""
        assert isinstance(self.replay_buffer, ChunkReplayBuffer)
        if isinstance(self.action_scale, str) and self._measured_unit is None and self.replay_buffer.size() > 0:
            self._measured_unit = self.action_unit.tolist()

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
        # the warm-up of a later learn() also plays the VLA's chunks, whatever the actor has learned before
        if self.num_timesteps < learning_starts:
            if self.gate is not None:
                self.gate.play_vla(self._last_obs)
            if self.search is not None:
                known = np.full((n_envs, *self.search.shape), np.nan)
                known[self._vla_has_offset] = 0.0
                self.search.draw(np.zeros(n_envs, dtype=bool), known, known)
            return reference, reference.copy()
        self._measure_unit()
        chunk = reference
        observation, _ = self.policy.obs_to_tensor(self._last_obs)
        assert isinstance(observation, dict)
        if self.policy.starts_at_vla or not self._warming_up:  # another actor has not yet been fitted to the VLA
            with th.no_grad():
                chunk = self.policy.training_actor(observation).cpu().numpy().reshape(reference.shape)
        if self.gate is not None:
            chunk = self.gate.choose(self.policy, observation, chunk, reference, ready=not self._warming_up)
        noisy = np.ones(n_envs, dtype=bool) if self.gate is None else ~self.gate.noise_free
        correction = chunk - reference
        if self.search is not None:
            offsets = self._offset_table()[self._tasks()]
            correction = chunk - self._moved(reference, offsets)
            tries = self.search.draw(noisy, offsets, self._offsets_without_noise(), self.search_opens)
            offsets[tries] = self.search.tried[tries]
            reference = self._moved(reference, offsets)
        chunk[noisy] = self._with_noise(observation, reference, correction, action_noise)[noisy]
        if self.gripper is not None:
            assert self.gripper_trial is not None
            self.gripper_trial.reverse(chunk, self.gripper, noisy, self._tasks())
            if self.search is not None and self.gripper_trial.trying.any():
                self.search.give_up(self.gripper_trial.reversed)  # they say nothing about the offset
        return chunk, chunk.copy()

    def _with_noise(
        self, observation: TensorDict, reference: np.ndarray, correction: np.ndarray, action_noise: ActionNoise | None
    ) -> np.ndarray:
        """
        Vary the actor's chunks; of several variants, play the one that the slow critics prefer.

        :param observation: what the critics see
        :param reference: the VLA's chunks, with their offset (n_envs, C, d)
        :param correction: what the actor's network adds
        :param action_noise: further noise, the same for all variants
        :return: chunks (n_envs, C, d) in [-1, 1]
        """
        count, n_envs = self.policy.candidates if self.critics_choose else 1, len(reference)
        share = np.random.uniform(*self.correction_range, size=(count, n_envs, 1, 1))
        noise = np.random.normal(size=(count, *reference.shape)) * np.asarray(self.exploration_std) * self.action_unit
        if action_noise is not None:
            noise = noise + action_noise()
        variants = np.clip(reference + correction * share + noise, -1.0, 1.0)
        if count == 1:
            return variants[0]
        with th.no_grad():
            critics = self.policy.critic_target
            if isinstance(critics.features_extractor, RLTFeatures):  # once for all variants
                observation = {"features": critics.features_extractor(observation)}
            # all variants in one pass, which reads the critics' weights once
            observation = {name: th.cat([value] * count) for name, value in observation.items()}
            chunks = th.as_tensor(variants, dtype=th.float32, device=self.device).flatten(2)
            values = critics.q_values(observation, chunks.flatten(0, 1)).mean(0).view(count, n_envs)
        return variants[values.argmax(0).cpu().numpy(), np.arange(n_envs)]

    def _tasks(self) -> np.ndarray:
        """Return the task of each environment (n_envs,); 0 where observations do not say which task is played."""
        assert isinstance(self._last_obs, dict)
        return tasks_of(self._last_obs)

    def _offset_table(self) -> np.ndarray:
        """Return the training actor's offset in each task, in units of action (tasks, phases, d)."""
        return self.policy.training_actor.offset.cpu().numpy() / self.action_unit

    def _moved(self, chunks: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Add the vectors that are due to chunks of the VLA (n_envs, C, d); offsets are in units of action."""
        assert self.search is not None
        return np.clip(chunks + self.search.of_chunks(offsets, chunks) * self.action_unit, -1.0, 1.0)

    @property
    def _vla_has_offset(self) -> np.ndarray:
        """In which environments the VLA plays what the actor would play with the offset zero (n_envs,)."""
        differs = self._corrects[self._tasks()] & (self.policy.gripper_training is not None)
        return ~differs & self.search_opens

    def _offsets_without_noise(self) -> np.ndarray:
        """
        Return the offsets of the episodes without noise that begin now (n_envs, phases, d).

        That of the VLA is zero while the offset is all that tells it from the actor. All others are NaN.
        """
        assert self.search is not None
        tasks = self._tasks()
        found = np.full((len(tasks), *self.search.shape), np.nan)
        if self.gate is None:
            return found
        found[(self.gate.player == "vla") & self._vla_has_offset] = 0.0
        on_trial = self.policy.actor_on_trial
        for env in np.flatnonzero(self.search.fresh & (self.gate.player == "actor")):
            actor = on_trial.actors[tasks[env]] if isinstance(on_trial, TaskActors) else on_trial
            found[env] = actor.offset[tasks[env]].cpu().numpy() / self.action_unit
        return found

    def tell(
        self, infos: list[dict[str, Any]], actions: np.ndarray, rewards: np.ndarray, dones: np.ndarray
    ) -> list[dict[str, Any]]:
        """
        Write into the outcomes with which offset each episode is played.

        :param infos: one per environment
        :param actions: chunks (n_envs, C, d)
        :param rewards: sums over the chunks (n_envs,)
        :param dones: (n_envs,)
        :return: infos
        """
        if self.search is None:
            return infos
        tried = [None if np.isnan(offset).any() else offset.copy() for offset in self.search.tried]
        searching = self.search.searching.tolist()
        self.search.end(dones)
        outcomes = outcomes_of(infos, actions, rewards)
        return [
            {**info, "outcome": replace(outcome, offset=offset, searching=its)}
            for info, outcome, offset, its in zip(infos, outcomes, tried, searching, strict=True)
        ]

    def _move_offsets(self, outcomes: list[ChunkOutcome], dones: np.ndarray) -> None:
        """Count the episodes that have tried an offset, and move the actor's one if it is time."""
        assert self.search is not None
        if isinstance(self.gate, TaskGate) and self.gate.weights_told is not None:
            self.search.shares = np.array(self.gate.weights_told) / max(self.gate.weights_told)
        for task in self.search.count(outcomes, dones, self._tasks()):
            moved = self.search.move(task, self._offset_table()[task])
            self.policy.set_offset(task, moved * self.action_unit)
        self._follow_search()
        self.logger.record("rollout/offset", float(np.linalg.norm(self._offset_table(), axis=(1, 2)).mean()))

    def _follow_search(self) -> None:
        """Leave the search more of the episodes while it has only begun."""
        assert self.search is not None
        self.search_opens = self.search.opens
        if self.search_opens:
            self._opening_chunks = self.num_timesteps if self.task_chunks is None else self.task_chunks.copy()
        if self.gate is not None:
            self.gate.gives_way = self.search_opens

    def collecting_state(self) -> dict[str, Any]:
        """Return what a copy of this model needs to choose chunks, see the base class."""
        if self.num_timesteps >= self.learning_starts:
            self._measure_unit()
        own = {"_measured_unit": self._measured_unit, "search_opens": self.search_opens}
        return {**super().collecting_state(), **own}

    @property
    def corrects_gripper(self) -> bool:
        """Whether the pull reverses the gripper where critics prefer it, in any task."""
        return bool(self._corrects.any()) and self.policy.gripper_training is None

    @property
    def _corrects(self) -> np.ndarray:
        """In which tasks the gripper is reversed where that is better, by the pull or by a critic of its own (T,)."""
        if self.gripper is None or self.gripper_trial is None:
            return np.zeros(len(self.policy.actor.offset), dtype=bool)
        return self.gripper_trial.corrects

    def end_trajectories(self) -> None:
        """End all trajectories, because the environments are about to be reset from outside."""
        super().end_trajectories()
        if self.gripper_trial is not None:
            self.gripper_trial.restart(self.n_envs)
        if self.search is not None:
            self.search.restart(self.n_envs)

    def _store_transition(
        self,
        replay_buffer: ReplayBuffer,
        buffer_action: np.ndarray,
        new_obs: np.ndarray | dict[str, np.ndarray],
        reward: np.ndarray,
        dones: np.ndarray,
        infos: list[dict[str, Any]],
    ) -> None:
        if not isinstance(self.env, CollectingVecEnv):
            infos = self.tell(infos, buffer_action, reward, dones)
        outcomes = outcomes_of(infos, buffer_action, reward)
        if self.search is not None:
            self._move_offsets(outcomes, dones)
        if self.gripper_trial is not None:
            if self.gripper_trial.trying.any():
                self.gripper_trial.step(outcomes, dones, self._tasks())
            self.logger.record("rollout/gripper_flip", float(self.gripper_trial.flip.mean()))
        super()._store_transition(replay_buffer, buffer_action, new_obs, reward, dones, infos)
