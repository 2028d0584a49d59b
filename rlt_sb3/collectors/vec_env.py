"""The learner's side of asynchronous collection: orders go out, vector steps of single collectors come in."""

from __future__ import annotations

import io
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.type_aliases import RolloutReturn
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from rlt_sb3.collectors.collector import Orders, Parameters, Played
from rlt_sb3.common.chunk_outcome import ChunkOutcome
from rlt_sb3.common.contenders import copied
from rlt_sb3.common.gated_policy import n_tasks_of, tasks_of
from rlt_sb3.common.vec_env import CollectingVecEnv

#: Seconds between two looks at how long an answer is overdue.
LOOK = 5.0
#: Collectors get new slow critics once in so many updates: they are larger than the actor, and change slowly.
CRITICS_EVERY = 50


class Workers(Protocol):
    """W processes with a :class:`~rlt_sb3.collectors.collector.Collector` each, e.g. ``RayWorkers``."""

    count: int
    timeout: float
    #: what ``start`` has returned, for each of them
    described: list[Any]

    def call(self, worker: int, method: str, *arguments: Any) -> Any:
        """
        Call a method of a collector without waiting.

        :param worker: its number
        :param method: name of the method
        :param arguments: of the method
        :return: a reference to the answer
        """

    def put(self, value: Any) -> Any:
        """
        Store a value once that several calls need.

        :param value: it
        :return: an argument for :meth:`call`
        """

    def answer(self, worker: int, reference: Any, timeout: float | None = None) -> Any:
        """
        Wait for an answer.

        :param worker: who is asked
        :param reference: of :meth:`call`
        :param timeout: seconds
        :return: the answer
        """

    def ready(self, references: Sequence[Any], timeout: float) -> Any | None:
        """
        Wait until one of several calls is answered.

        :param references: of :meth:`call`
        :param timeout: seconds
        :return: one of them; None after the time
        """

    def replace(self, worker: int, failure: Exception, prepare: Callable[[], Any]) -> Any:
        """
        Make a lost collector again.

        :param worker: its number
        :param failure: why it is lost
        :param prepare: called once the new one has started
        :return: what it returns
        """

    def close(self) -> None:
        """End all."""


class CollectorVecEnv(CollectingVecEnv):
    """
    W collectors with k environments each, which do not wait for each other or for the learner.

    Each collector always has ``depth`` orders, so that it plays on while the learner computes updates. A rollout of the
    learner is one vector step of one collector, of k chunks; the learner computes the updates that are due for them
    before it takes the next one. If it is slower than the collectors, these wait: no rows are thrown away, the number
    of updates per row is exact, and a chunk was chosen by an actor of at most ``depth * W`` vector steps ago, unless
    its collector is much slower than others. Chunks of an actor that is more than ``max_staleness`` updates old are
    counted as trials and episodes, but not stored.

    Member j of collector w is environment ``j * W + W - 1 - w``; episodes are those of one environment with W * k
    members. The order in which they come in depends on time, so runs with more than one collector are not repeatable.

    :param workers: the collectors, started
    :param lost: what ``workers.answer`` raises where one is lost
    :param seed: of the training states and of the noise on chunks, until :meth:`seed` gives another
    :param depth: orders that each collector has at a time
    :param max_staleness: critic updates
    """

    def __init__(
        self,
        workers: Workers,
        lost: type[Exception],
        seed: int = 0,
        depth: int = 2,
        max_staleness: int = 1000,
    ):
        self._workers, self._lost, self._depth, self.max_staleness = workers, lost, depth, max_staleness
        found = workers.described[0]
        self.envs_per_worker, count = int(found["num_envs"]), workers.count
        self._attributes = {name: value for name, value in found.items() if not name.endswith("_space")}
        self._attributes["set_task_weights"] = self.set_task_weights
        self.render_mode = None
        super().__init__(count * self.envs_per_worker, found["observation_space"], found["action_space"])
        #: numbers of each collector's environments
        self.members = [np.arange(self.envs_per_worker) * count + count - 1 - w for w in range(count)]
        #: vector steps that are not stored because their actor was too old, in chunks
        self.stale = 0
        self._seed = seed
        self._weights: Sequence[int] | None = None  # of the tasks
        n_tasks = n_tasks_of(self.observation_space) or 1
        self._nobody, self._no_trials = [("",) * n_tasks] * self.envs_per_worker, (0,) * n_tasks
        self._ended = np.zeros(self.num_envs, dtype=np.int64)  # whole episodes since the seed was set
        self._resets = 0
        self._obs: list[Any] = [None] * count  # what each collector saw last
        self._asked: list[deque[Any]] = [deque() for _ in range(count)]  # open calls of each
        self._since = [time.monotonic()] * count  # when each answered last, or was asked first
        self._turn: deque[int] = deque(range(count))  # who has answered last comes last
        self._model: Any = None  # the learner that the collectors have a copy of
        self._sent: dict[str, tuple[Any, Any]] = {}  # parameters: version, reference

    # ---------------------------------------------------------------- begin

    def reset(self) -> VecEnvObs:
        """
        Begin new episodes in all collectors; what they were playing is given up.

        :return: first observations, of all environments
        """
        if self._seeds[0] is not None:
            self._seed, self._ended[:] = int(self._seeds[0]), 0
        self._resets += 1
        options = self._options[0] if self._options else {}
        self._given = dict(options or {})
        self._reset_seeds()
        self._reset_options()
        for calls in self._asked:
            calls.clear()
        begun = [self._workers.call(worker, "reset", *self._start_of(worker)) for worker in range(self._workers.count)]
        for worker, reference in enumerate(begun):
            try:
                self._obs[worker] = self._workers.answer(worker, reference)
            except self._lost as failure:
                self._workers.replace(worker, failure, partial(self._begin, worker))
        assert isinstance(self.observation_space, spaces.Dict)
        joined: dict[str, np.ndarray] = {}
        for key, box in self.observation_space.spaces.items():
            joined[key] = np.zeros((self.num_envs, *(box.shape or ())), dtype=box.dtype)
            for members, obs in zip(self.members, self._obs, strict=True):
                joined[key][members] = obs[key]
        return joined

    def _start_of(self, worker: int) -> tuple[int, dict[str, Any], int, Sequence[int] | None]:
        """Return the arguments of a collector's reset: its share of the sequence of episodes, from its place on."""
        count = self._workers.count
        share = {"shard": (worker, count), "turns": self._ended[self.members[worker]].tolist()}
        noise = np.random.SeedSequence([self._seed, self._resets, worker]).generate_state(1)[0]
        return self._seed, self._given | share, int(noise >> 1), self._weights

    def _begin(self, worker: int) -> None:
        """Give a new collector the model and its episodes."""
        if self._model is not None:
            self._workers.answer(worker, self._workers.call(worker, "take_model", self._saved))
        self._obs[worker] = self._workers.answer(worker, self._workers.call(worker, "reset", *self._start_of(worker)))

    def _take_model(self, model: Any) -> None:
        """Give all collectors a copy of the learner, whose actors follow it, and its slow critics where they choose."""
        file = io.BytesIO()
        model.save(file)
        self._saved = self._workers.put(file.getvalue())
        self._model, self._sent = model, {}  # what was sent is another model's, even if its versions are the same
        given = [self._workers.call(worker, "take_model", self._saved) for worker in range(self._workers.count)]
        for worker, reference in enumerate(given):
            try:
                self._workers.answer(worker, reference)
            except self._lost as failure:
                self._workers.replace(worker, failure, partial(self._begin, worker))

    # ---------------------------------------------------------------- collect

    def collect(self, model: Any, callback: BaseCallback, log_interval: int | None) -> RolloutReturn:
        """
        Wait for the next vector step of one of the collectors, and store it.

        :param model: the learner, a ``ChunkOffPolicyAlgorithm``
        :param callback: its callbacks
        :param log_interval: episodes between two rows of the log
        :return: chunks, episodes, and whether training goes on
        :raises ClusterError: a collector is lost, and there is no room for another
        """
        callback.on_rollout_start()  # may begin new episodes
        if model is not self._model:
            if self._model is not None:  # the episodes of another one run
                self.reset()
                model.end_trajectories()
            self._take_model(model)
        worker, played = self._next(model)
        count = len(played.dones)
        self._name_envs(model, worker, played)
        model._last_obs = played.obs
        model.num_timesteps += count
        rewards, dones, infos = played.rewards, played.dones, played.infos
        callback.update_locals({**vars(played), "self": model, "env": self})
        if not callback.on_step():
            return RolloutReturn(count, 0, continue_training=False)
        model._update_info_buffer(infos, dones)
        if model.gate is not None:
            tasks, orders = tasks_of(played.obs), played.orders
            envs = self.members[worker].tolist()
            model.gate.seat(envs, tasks, played.began, orders.players_of(tasks), orders.trials)
        model._store_transition(model.replay_buffer, played.actions, played.new_obs, rewards, dones, infos)
        model._update_current_progress_remaining(model.num_timesteps, model._total_timesteps)
        model._on_step()
        for _ in range(int(dones.sum())):
            model._episode_num += 1
            if log_interval is not None and model._episode_num % log_interval == 0:
                model.dump_logs()
        callback.on_rollout_end()
        return RolloutReturn(count, int(dones.sum()), continue_training=True)

    def _next(self, model: Any) -> tuple[int, Played]:
        """Take a vector step from the collector that has waited longest, and give that one its next orders."""
        for worker in range(self._workers.count):
            if not self._asked[worker]:
                self._since[worker] = time.monotonic()
            while len(self._asked[worker]) < self._depth:
                self._order(model, worker)
        reference = None
        while reference is None:
            first = {self._asked[worker][0]: worker for worker in self._turn}
            late = self._turn[0]
            if time.monotonic() - self._since[late] > self._workers.timeout:  # it hangs, or has just answered
                reference = self._asked[late][0]
            else:
                reference = self._workers.ready(list(first), LOOK)
        worker = first[reference]
        self._turn.remove(worker)
        self._turn.append(worker)
        try:
            played = self._workers.answer(worker, reference, LOOK)
        except self._lost as failure:
            played = self._replace(worker, failure)
        else:
            self._asked[worker].popleft()
            whole = played.dones & ~np.array([info["outcome"].broken for info in played.infos])
            self._ended[self.members[worker]] += whole  # where a simulator was lost, the episode is played again
        self._obs[worker], self._since[worker] = played.new_obs, time.monotonic()
        self._order(model, worker)
        return worker, played

    def _order(self, model: Any, worker: int) -> None:
        gate, trials, players = model.gate, self._no_trials, self._nobody
        if gate is not None:
            warm_up = model.num_timesteps < model.learning_starts
            players = gate.plan(model.policy, self.envs_per_worker, warm_up, ready=not model._warming_up)
            trials = gate.trial_numbers
        training = self._parameters("training", model._n_updates, model.policy.training_actor)
        trying = self._parameters("trying", trials, model.policy.actor_on_trial if any(trials) else None)
        choose = model.critics_choose
        turn = model._n_updates // CRITICS_EVERY if choose else None
        choosing = self._parameters("choosing", turn, model.policy.critic_target if choose else None)
        orders = Orders(players, trials, model.collecting_state(), self._weights)
        self._asked[worker].append(self._workers.call(worker, "play", training, trying, choosing, orders))

    def _parameters(self, name: str, version: Any, module: Any) -> Any:
        """Store parameters where the collectors can fetch them, unless they are there already."""
        if name not in self._sent or self._sent[name][0] != version:
            value: Parameters = (version, {} if module is None else copied(module.state_dict()))
            self._sent[name] = (version, self._workers.put(value))
        return self._sent[name][1]

    def _replace(self, worker: int, failure: Exception) -> Played:
        """Make a collector again. Return a vector step in which all of its episodes are lost."""
        before, k = self._obs[worker], self.envs_per_worker
        self._asked[worker].clear()
        self._workers.replace(worker, failure, partial(self._begin, worker))
        assert self.action_space.shape is not None
        actions = np.zeros((k, *self.action_space.shape), dtype=np.float32)
        lost = [
            ChunkOutcome.complete(action, 0.0, steps=0, broken=True, task_id=int(task))
            for action, task in zip(actions, tasks_of(before), strict=True)
        ]
        infos = [
            {"outcome": outcome, "TimeLimit.truncated": True,
             "terminal_observation": {key: value[row] for key, value in before.items()}}
            for row, outcome in enumerate(lost)
        ]  # fmt: skip
        orders = Orders(self._nobody, self._no_trials, self._model.collecting_state())
        none, everywhere = np.zeros(k, dtype=bool), np.ones(k, dtype=bool)
        rewards = np.zeros(k, dtype=np.float32)
        return Played(before, actions, self._obs[worker], rewards, everywhere, infos, none, orders)

    def _name_envs(self, model: Any, worker: int, played: Played) -> None:
        """Write into the outcomes which environments they are of, and whether they are stored."""
        age = model._n_updates - played.orders.counters["_n_updates"]
        fresh = age <= self.max_staleness
        self.stale += 0 if fresh else len(played.infos)
        model.logger.record_mean("rollout/staleness", float(age))
        model.logger.record("rollout/stale_chunks", self.stale)
        for env, info in zip(self.members[worker].tolist(), played.infos, strict=True):
            outcome = info["outcome"]
            info["outcome"] = replace(outcome, env=env, stored=outcome.stored and fresh)

    # ---------------------------------------------------------------- what else an environment of SB3 has

    def set_task_weights(self, weights: Sequence[int]) -> None:
        """
        Let collectors practice some tasks more, from the next order or reset on.

        :param weights: how many training episodes of a round each of their tasks has; environments without
            ``set_task_weights`` play their tasks in turn
        """
        self._weights = list(weights)

    def step_async(self, actions: np.ndarray) -> None:
        """Refused: the collectors choose the chunks."""
        raise RuntimeError("Collectors choose their chunks themselves: let a model learn with them, see collect().")

    def step_wait(self) -> VecEnvStepReturn:
        """Refused: the collectors choose the chunks."""
        raise RuntimeError("Collectors choose their chunks themselves: let a model learn with them, see collect().")

    def close(self) -> None:
        """End the collectors and their simulators."""
        self._workers.close()

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """
        Get an attribute that the environments of the first collector had when they were made.

        :param attr_name: its name
        :param indices: which environments
        :return: one value per environment
        :raises AttributeError: if it is not one of those that are known here
        """
        if attr_name == "render_mode":
            return [None for _ in self._get_indices(indices)]
        if attr_name not in self._attributes:
            raise AttributeError(f"Of environments in collectors only {sorted(self._attributes)} are known.")
        return [self._attributes[attr_name] for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Refused: the environments are in other processes."""
        raise AttributeError(f"{attr_name!r} cannot be set: the environments are in collectors.")

    def env_method(self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **kwargs: Any) -> Any:
        """Refused: the environments are in other processes."""
        raise AttributeError(f"{method_name!r} cannot be called: the environments are in collectors.")

    def env_is_wrapped(self, wrapper_class: Any, indices: VecEnvIndices = None) -> list[bool]:
        """Return False for all."""
        return [False for _ in self._get_indices(indices)]
