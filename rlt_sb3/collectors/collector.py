"""The process that collects: environments, and a copy of the learner's model that chooses their chunks."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from stable_baselines3.common.noise import VectorizedActionNoise
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import VecEnv

from rlt_sb3.common.chunk_off_policy import ChunkOffPolicyAlgorithm
from rlt_sb3.common.gated_policy import GatedPolicy, play_seats, tasks_of

#: What the learner's side asks of a collector's environment.
ATTRIBUTES = ("metadata", "obs_stride", "tasks")

#: A number that changes with the parameters, and a state dict (empty: there is none).
Parameters = tuple[Any, Mapping[str, Any]]


@dataclass(frozen=True)
class Orders:
    """
    What the learner tells a collector with each vector step.

    :param players: for each environment, who plays an episode of each task that begins now: "vla", "actor" (the one on
        trial), or ""
    :param trials: number of the actor on trial in each task; 0: none
    :param counters: of the learner, see ``ChunkOffPolicyAlgorithm.collecting_state``
    :param weights: training episodes of each of the environments' tasks in a round; None: they play them in turn
    """

    players: Sequence[tuple[str, ...]]
    trials: tuple[int, ...]
    counters: Mapping[str, Any]
    weights: Sequence[int] | None = None

    def players_of(self, tasks: np.ndarray) -> np.ndarray:
        """
        Tell who plays the episodes that begin now.

        :param tasks: their tasks (k,)
        :return: names (k,)
        """
        return np.array([names[task] for names, task in zip(self.players, tasks, strict=True)], dtype=object)


@dataclass
class Played:
    """
    One vector step of a collector, as Stable-Baselines3's environments return it, and who played.

    :param obs: observations before the chunks
    :param actions: chunks (k, C, d)
    :param new_obs: observations after them, of the next episode where one has ended
    :param rewards: sums over the chunks (k,)
    :param dones: (k,)
    :param infos: one per environment
    :param began: where an episode has begun with this chunk (k,)
    :param orders: those that were followed
    """

    obs: Any
    actions: np.ndarray
    new_obs: Any
    rewards: np.ndarray
    dones: np.ndarray
    infos: list[dict[str, Any]]
    began: np.ndarray
    orders: Orders


class OrderedSeats:
    """
    The place of a deployment gate in a collector's model: who plays is what the learner's gate has ordered.

    :param n_envs: k
    """

    def __init__(self, n_envs: int):
        self.trials = np.zeros(1, dtype=int)  # as many as tasks once there are orders
        self.restart(n_envs)

    def restart(self, n_envs: int) -> None:
        """
        Begin new episodes everywhere.

        :param n_envs: k
        """
        self.player = np.full(n_envs, "", dtype=object)
        self.fresh = np.ones(n_envs, dtype=bool)
        self.noise_free = np.zeros(n_envs, dtype=bool)

    def weigh_tasks(self, env: Any) -> None:
        """
        Do nothing: the orders have the weights of the learner's gate.

        :param env: environments
        """

    def follow(self, orders: Orders, tasks: np.ndarray) -> np.ndarray:
        """
        Give the episodes that begin now their players. Those of an actor that is not on trial any more are practice.

        :param orders: of the learner
        :param tasks: of the running episodes and of those that begin (k,)
        :return: where an episode begins (k,)
        """
        before, self.trials = self.trials, np.array(orders.trials)
        self.player[(self.player == "actor") & (self.trials != before)[tasks]] = ""
        began = self.fresh
        self.player[began] = orders.players_of(tasks)[began]
        self.fresh = np.zeros_like(began)
        return began

    def play_vla(self, observation: Any) -> None:
        """
        All play the VLA's chunks without noise: the warm-up.

        :param observation: not used
        """
        self.noise_free = np.ones_like(self.fresh)

    def choose(
        self, policy: GatedPolicy, observation: Any, chunks: np.ndarray, reference: np.ndarray, ready: bool
    ) -> np.ndarray:
        """
        Choose chunks as :meth:`rlt_sb3.common.policy_gate.PolicyGate.choose` does.

        :param policy: the policy
        :param observation: as its actors take it
        :param chunks: of the training actor
        :param reference: the VLA's own
        :param ready: not used; the learner knows it
        :return: chunks to play
        """
        self.noise_free, chunks = play_seats(policy, self.player, observation, chunks, reference)
        return chunks

    def ended(self, dones: np.ndarray) -> None:
        """
        Take notice of the end of episodes.

        :param dones: (k,)
        """
        self.fresh = np.array(dones, dtype=bool)
        self.player[self.fresh] = ""


class Collector:
    """
    k environments and a copy of the learner's model.

    Making it does nothing yet: an error of :meth:`start` arrives as the exception that it is.

    :param make: makes the environments
    :param load: loads a saved model: (file, environments) -> model
    """

    def __init__(self, make: Callable[[], VecEnv], load: Callable[[io.BytesIO, VecEnv], ChunkOffPolicyAlgorithm]):
        self._make, self._load = make, load
        self._venv: Any = None
        self._model: Any = None
        self._obs: Any = None
        self._versions: dict[str, Any] = {}  # of the parameters that the copy has

    def start(self) -> dict[str, Any]:
        """
        Make the environments.

        :return: ``num_envs``, the spaces, and those of :data:`ATTRIBUTES` that they have
        """
        self._venv = self._make()
        found = {name: getattr(self._venv, name) for name in ("num_envs", "observation_space", "action_space")}
        for name in ATTRIBUTES:
            try:
                found[name] = self._venv.get_attr(name)[0]
            except AttributeError:
                continue
        return found

    def take_model(self, saved: bytes) -> None:
        """
        Load the learner's model.

        :param saved: a file of its ``save``
        """
        self._model, self._versions = self._load(io.BytesIO(saved), self._venv), {}
        self._model.end_trajectories()  # what it counts per environment has the learner's number of them
        self._seats = OrderedSeats(self._venv.num_envs)
        if self._model.gate is not None:
            self._model.gate = self._seats
        noise = self._model.action_noise
        if noise is not None:
            one = noise.base_noise if isinstance(noise, VectorizedActionNoise) else noise
            self._model.action_noise = VectorizedActionNoise(one, self._venv.num_envs)

    def reset(self, seed: int, options: dict[str, Any], random_seed: int, weights: Sequence[int] | None = None) -> Any:
        """
        Begin new episodes.

        :param seed: of the environments
        :param options: of their reset
        :param random_seed: of the noise on chunks
        :param weights: see :class:`Orders`
        :return: first observations
        """
        self._weigh(weights)
        self._venv.seed(seed)
        self._venv.set_options(options)
        set_random_seed(random_seed)
        self._obs = self._venv.reset()
        if self._model is not None:
            self._model.end_trajectories()  # it has its own account of them, the search for an offset for example
            self._seats.restart(self._venv.num_envs)  # also in a model without a gate
            if self._model.action_noise is not None:
                self._model.action_noise.reset()
        return self._obs

    def _weigh(self, weights: Sequence[int] | None) -> None:
        """Let the environments practice their tasks by these weights from the next episodes on, if they can."""
        if weights is not None:
            with suppress(AttributeError):
                self._venv.get_attr("set_task_weights")[0](weights)

    def play(self, training: Parameters, on_trial: Parameters, critics: Parameters, orders: Orders) -> Played:
        """
        Play one chunk in every environment.

        :param training: of the learner's training actor
        :param on_trial: of its actor on trial
        :param critics: of its slow critics, if they choose among chunks
        :param orders: who plays
        :return: what happened
        """
        model = self._model
        sent = {"training_actor": training, "actor_on_trial": on_trial, "critic_target": critics}
        for name, (version, values) in sent.items():
            if values and version != self._versions.get(name):
                getattr(model.policy, name).load_state_dict(values)
                self._versions[name] = version
        model.take_collecting_state(orders.counters)
        self._weigh(orders.weights)
        model._last_obs = obs = self._obs
        began = self._seats.follow(orders, tasks_of(obs))
        actions, _ = model._sample_action(model.learning_starts, model.action_noise, self._venv.num_envs)
        self._obs, rewards, dones, infos = self._venv.step(actions)
        infos = model.tell(infos, actions, rewards, dones)
        self._seats.ended(dones)
        if model.action_noise is not None and dones.any():
            model.action_noise.reset(indices=np.flatnonzero(dones))
        return Played(obs, actions, self._obs, rewards, dones, infos, began, orders)

    def close(self) -> None:
        """End the environments."""
        if self._venv is not None:
            self._venv.close()
