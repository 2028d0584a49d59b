"""A vector environment whose parts are played by Ray actors, on one machine or on many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.error import NoAsyncCallError
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, create_empty_array

from rlt_gym.cluster.remote_env import RemoteEnv
from rlt_gym.cluster.workers import LostWorkerError, RayWorkers, logger
from rlt_gym.core.episodes import EpisodeSequence
from rlt_gym.core.members import MemberAccess
from rlt_gym.core.split_step import StepGuard, real_chunks

#: Infos of an episode that a lost worker leaves as they were; of its last chunk nothing counts.
_OF_THE_EPISODE = ("episode_steps", "noise_seed", "instruction", "task_id", "init_index")
#: Infos that are not repeated for a lost worker.
_OF_ONE_STEP = ("final_obs", "final_info", "final_frame", "inner_obs", "inner_count", "inner_frames")


class RayVectorEnv(MemberAccess, StepGuard, VectorEnv):
    """
    W workers with k environments each, played together as one vector environment of N = W * k.

    Each worker is a Ray actor with its own simulators, frozen VLA and encoder. A step sends it k action chunks and
    brings back k observations and infos, so pictures do not travel (films do). The episodes are those that one
    environment with N members would play: member j of worker w is environment ``j * W + W - 1 - w``. So rows are equal
    to that environment's, apart from the rounding of the VLA's smaller batches.

    A worker that dies, hangs or loses its machine is made again wherever there is room. Its k episodes end as those of
    a lost simulator (``worker_restarted``) and are played again from their start.

    An error that a worker's environment raises is raised here.

    :param make: Makes the environment of one worker, with k members and autoreset ``SAME_STEP``; picklable.
    :param workers: W.
    :param envs_per_worker: k.
    :param init_states: The first split.
    :param seed: Seed of the training split's initial states; ``None``: drawn.
    :param needs: What a worker reserves, ``num_cpus`` and ``num_gpus``.
    :param timeout: Seconds without an answer, or without a place, after which a worker counts as lost.
    :param max_restarts: Restarts of each worker before an error is raised.
    :raises ValueError: The workers' environment has another autoreset mode.
    :raises ClusterError: There is no room for the workers.
    """

    def __init__(
        self,
        make: Callable[[], VectorEnv],
        workers: int,
        envs_per_worker: int,
        init_states: str = "train",
        seed: int | None = None,
        needs: Mapping[str, float] | None = None,
        timeout: float = 600.0,
        max_restarts: int = 10,
    ):
        self.workers, self.num_envs = workers, workers * envs_per_worker
        #: Indices of each worker's environments.
        self.members = [np.arange(envs_per_worker) * workers + workers - 1 - w for w in range(workers)]
        #: How many simulators each environment had lost before its present worker, and in all.
        self._restarts_before = np.zeros(self.num_envs, dtype=np.int64)
        self._restarts = np.zeros(self.num_envs, dtype=np.int64)
        self._filmed: frozenset[int] = frozenset()
        self._workers = RayWorkers(RemoteEnv, (make,), workers, needs, timeout, max_restarts)
        for name, value in self._workers.described[0].items():
            setattr(self, name, value)
        if self.metadata.get("autoreset_mode") != AutoresetMode.SAME_STEP:
            self.close()
            raise ValueError(f"Workers need autoreset_mode SAME_STEP, got {self.metadata.get('autoreset_mode')!r}.")
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
        #: Which episodes the workers play; they are told at every reset (the horizon, too), and remember nothing.
        self.sequence = EpisodeSequence(self.num_envs, len(getattr(self, "tasks", (0,))), init_states, seed)
        self._obs: list[Any] = [None] * workers
        self._infos: list[dict[str, Any]] = [{}] * workers

    @property
    def worker_restarts(self) -> int:
        """How many simulators were lost so far, alone or with their worker."""
        return int(self._restarts.sum())

    # ------------------------------------------------------------------ resets and steps

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """
        Begin new episodes in all environments.

        :param seed: As :class:`~rlt_gym.core.chunk_vector_env.ChunkVectorEnv` takes it.
        :param options: ``init_states``, ``train_episode_steps`` and ``shard``, as it takes them.
        :return: Observations and infos.
        :raises ValueError: A bad seed or option, or one that works on one machine only.
        """
        self._check_open()
        longest = getattr(self, "max_episode_steps", None)
        mask, split, shard, turns, episodes, horizon = self.sequence.checked_options(options, longest)
        if not mask.all() or turns is not None or episodes is not None:
            raise ValueError(
                "Workers on a cluster take the reset options init_states, train_episode_steps and shard only."
            )
        seed = self.sequence.base_seed(seed)
        if horizon is not None:
            self.train_episode_steps = horizon
        self._begun = None
        self.sequence.restart(split, seed, shard)
        asked = [self._workers.call(worker, "reset", *self._start_of(worker)) for worker in range(self.workers)]
        for worker, reference in enumerate(asked):
            try:
                self._obs[worker], self._infos[worker] = self._workers.answer(worker, reference)
            except LostWorkerError as failure:
                self._replace(worker, failure)
        for env in range(self.num_envs):
            self.sequence.next(env)
        self._count_restarts()
        return self._joined(self._obs), merge_infos(self._parts(self._infos), self.num_envs)

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """
        Play one chunk in every environment.

        :param actions: Chunks (N, C, d).
        :return: As of :meth:`step_wait`.
        """
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """
        Begin a step: the workers play from now on.

        :param actions: Chunks (N, C, d).
        :raises ValueError: Wrong shape or non-finite values; nothing has been executed.
        """
        self._check_open()
        self._check_no_step("step_async")
        actions = real_chunks(actions, self.action_space.shape or ()).astype(np.float32)
        self._begun = [self._workers.call(worker, "step", actions[at]) for worker, at in enumerate(self.members)]

    def step_wait(self) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """
        Wait for all workers.

        :return: Observations, rewards (N,), terminations (N,), truncations (N,), infos, as one environment with N
            members returns them.
        :raises NoAsyncCallError: No step has begun.
        :raises ClusterError: A worker is lost, and none can take its place.
        """
        self._check_open()
        if self._begun is None:
            raise NoAsyncCallError("call step_async() before step_wait()", "step_wait")
        asked, self._begun = self._begun, None
        rewards = np.zeros(self.num_envs, dtype=np.float64)
        flags = np.zeros((2, self.num_envs), dtype=bool)
        infos: list[dict[str, Any]] = []
        for worker, reference in enumerate(asked):
            members = self.members[worker]
            try:
                answer = self._workers.answer(worker, reference)
                self._obs[worker], rewards[members], flags[0, members], flags[1, members], self._infos[worker] = answer
                self._take_turns(members, self._infos[worker])
                infos.append(self._infos[worker])
            except LostWorkerError as failure:
                flags[1, members] = True
                infos.append(self._replace_in_step(worker, failure))
        self._count_restarts()
        return self._joined(self._obs), rewards, flags[0], flags[1], merge_infos(self._parts(infos), self.num_envs)

    def _take_turns(self, members: np.ndarray, infos: Mapping[str, Any]) -> None:
        """Note which environments have begun an episode: the next one, or, where a simulator was lost, the same."""
        ended = infos.get("_final_obs", np.zeros(len(members), dtype=bool))
        lost = infos.get("final_info", {}).get("worker_restarted", np.zeros(len(members), dtype=bool))
        for env, again in zip(members[ended], lost[ended], strict=True):
            if again:
                self.sequence.repeat(env)
            self.sequence.next(env)

    def _count_restarts(self) -> None:
        """Add what was lost with whole workers to what their environments count."""
        for members, infos in zip(self.members, self._infos, strict=True):
            for part in (infos, infos.get("final_info", {})):
                if "worker_restarts" in part:
                    part["worker_restarts"] = part["worker_restarts"] + self._restarts_before[members]
            reported = infos.get("worker_restarts")
            self._restarts[members] = self._restarts_before[members] if reported is None else reported

    def _joined(self, parts: Sequence[Any]) -> Any:
        """Put the workers' observations into one batch of new arrays."""
        batch: Any = create_empty_array(self.single_observation_space, self.num_envs)
        for members, part in zip(self.members, parts, strict=True):
            if isinstance(self.single_observation_space, spaces.Dict):
                for key, values in part.items():
                    batch[key][members] = values
            else:
                batch[members] = part
        return batch

    def _parts(self, infos: Sequence[dict[str, Any]]) -> list[tuple[np.ndarray, dict[str, Any]]]:
        return list(zip(self.members, infos, strict=True))

    # ------------------------------------------------------------------ workers

    def _start_of(self, worker: int) -> tuple[int, dict[str, Any]]:
        """Make the arguments of a worker's reset: its share of the whole sequence, from the present place on."""
        (index, count), members = self.sequence.shard, self.members[worker]
        held_out = self.sequence.split != "train"
        options: dict[str, Any] = {
            "init_states": self.sequence.split,
            "shard": (worker * count + index, self.workers * count),
            "turns": [self.sequence.turns[env] for env in members],
        }
        if getattr(self, "train_episode_steps", None) is not None:
            options["train_episode_steps"] = self.train_episode_steps
        return self.sequence.held_out_seed if held_out else self.sequence.seed, options

    def _replace(self, worker: int, failure: Exception) -> None:
        """Make a worker again; its environments begin the episodes whose turn it is in the sequence."""
        members = self.members[worker]

        def begin() -> None:
            if self._filmed:
                self._film(worker)
            if len(set(self.sequence.task_weights)) > 1:
                self._weigh_tasks(worker)
            reference = self._workers.call(worker, "reset", *self._start_of(worker))
            self._obs[worker], self._infos[worker] = self._workers.answer(worker, reference)

        self._restarts_before[members] = self._restarts[members] = self._restarts[members] + 1
        self._workers.replace(worker, failure, begin)

    def _replace_in_step(self, worker: int, failure: Exception) -> dict[str, Any]:
        """Make a worker again whose episodes were being played. Return the infos of the step in which it was lost."""
        members, last, before = self.members[worker], self._obs[worker], self._infos[worker]
        for env in members.tolist():
            self.sequence.repeat(env)
        self._replace(worker, failure)
        for env in members.tolist():
            self.sequence.next(env)
        everywhere = np.ones(len(members), dtype=bool)
        restarted = {"worker_restarted": everywhere, "_worker_restarted": everywhere}
        final_info = _blank(before) | restarted
        if "worker_restarts" in before:
            final_info["worker_restarts"] = np.zeros(len(members), dtype=np.int64)
        final_obs = np.full(len(members), None, dtype=object)
        for row in range(len(members)):
            final_obs[row] = {key: values[row] for key, values in last.items()} if isinstance(last, dict) else last[row]
        self._infos[worker] = self._infos[worker] | restarted | {
            "final_obs": final_obs, "_final_obs": everywhere, "final_info": final_info, "_final_info": everywhere,
        }  # fmt: skip
        stride = getattr(self, "obs_stride", None)
        if stride is not None:
            count = len(range(stride, self.single_action_space.shape[0], stride))  # type: ignore[index]
            inner = {key: np.zeros((len(members), count, *value.shape[1:]), value.dtype) for key, value in last.items()}
            self._infos[worker] |= {"inner_obs": inner, "inner_count": np.zeros(len(members), dtype=np.int64)}
        return self._infos[worker]

    # ------------------------------------------------------------------ others

    def set_task_weights(self, weights: Sequence[int]) -> None:
        """
        Let some tasks have more training episodes than others, as on one machine.

        :param weights: See :meth:`rlt_gym.core.chunk_vector_env.ChunkVectorEnv.set_task_weights`.
        :raises ValueError: See there.
        """
        self.sequence.set_task_weights(weights)
        for worker in range(self.workers):
            self._weigh_tasks(worker)

    def _weigh_tasks(self, worker: int) -> None:
        """Send it without waiting, as a new worker and :meth:`_film` do."""
        self._workers.call(worker, "set_task_weights", self.sequence.task_weights)

    def film(self, envs: Iterable[int] = ()) -> None:
        """
        Draw environments also inside the next chunks, see :meth:`rlt_gym.core.drawing.Drawing.film`.

        :param envs: Indices of the environments.
        :raises ValueError: There is no ``render_mode``.
        """
        self._filmed = frozenset(int(env) for env in envs)
        if self._filmed and self.render_mode is None:
            raise ValueError("film needs an environment with render_mode='rgb_array', got None")
        for worker in range(self.workers):
            self._film(worker)

    def _film(self, worker: int) -> None:
        """Send it without waiting: calls arrive in their order, and the next one notices a lost worker."""
        filmed = [row for row, env in enumerate(self.members[worker]) if env in self._filmed]
        self._workers.call(worker, "film", filmed)

    def render(self) -> tuple[np.ndarray, ...] | None:
        """
        Draw every environment.

        :return: One frame per environment, black where a worker is lost; ``None`` without ``render_mode``.
        """
        self._check_open()
        if self.render_mode is None:
            return None
        self._check_no_step("render")
        asked = [self._workers.call(worker, "render") for worker in range(self.workers)]
        frames: dict[int, np.ndarray] = {}
        for worker, reference in enumerate(asked):
            try:
                drawn = self._workers.answer(worker, reference)
                frames |= dict(zip(self.members[worker].tolist(), drawn, strict=True))
            except LostWorkerError as failure:  # its episodes end in the next step, which replaces it
                logger.warning("a worker of the cluster draws no pictures: %s", failure)
        black = np.zeros_like(next(iter(frames.values()))) if frames else np.zeros((256, 256, 3), dtype=np.uint8)
        return tuple(frames.get(env, black) for env in range(self.num_envs))

    def close_extras(self, **kwargs: Any) -> None:
        """
        End the workers and their simulators.

        :param kwargs: Ignored; Gymnasium passes the arguments of ``close``.
        """
        if hasattr(self, "_workers"):  # else they could not be made
            self._workers.close()


def merge_infos(parts: Sequence[tuple[np.ndarray, Mapping[str, Any]]], num_envs: int) -> dict[str, Any]:
    """
    Put Gymnasium's vector infos of parts together, as the whole vector environment would have made them.

    :param parts: Indices of a part's environments, and its infos: arrays (k, ...) and dicts of such.
    :param num_envs: Of the whole.
    :return: Its infos, new arrays; where a part lacks a key: zeros, ``None`` in arrays of objects.
    """
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for _, infos in parts for key in infos):
        having = [(members, infos[key]) for members, infos in parts if key in infos]
        first = having[0][1]
        if isinstance(first, Mapping):
            merged[key] = merge_infos(having, num_envs)
            continue
        shape = (num_envs, *np.shape(first)[1:])
        objects = np.asarray(first).dtype == object
        merged[key] = np.full(shape, None, dtype=object) if objects else np.zeros(shape, np.asarray(first).dtype)
        for members, values in having:
            merged[key][members] = deepcopy(values) if objects else values
    return merged


def _blank(infos: Mapping[str, Any]) -> dict[str, Any]:
    """Infos of a chunk of which nothing is known: zeros, except for what belongs to the episode."""
    blank: dict[str, Any] = {}
    for key, value in infos.items():
        if key.removeprefix("_") in _OF_ONE_STEP:
            continue
        if key in _OF_THE_EPISODE or key.startswith("_"):
            blank[key] = value
        else:
            blank[key] = _blank(value) if isinstance(value, Mapping) else np.zeros_like(value)
    return blank
