"""The collectors of a run whose workers do not wait for its learner."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rlt_gym.cluster.workers import LostWorkerError, RayWorkers
from rlt_sb3.experiment.algorithms import get_algorithm
from rlt_sb3.experiment.config import EnvConfig, TrainConfig
from rlt_sb3.experiment.environment import make_part
from rlt_sb3.experiment.models import make_vec_env

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv

    from rlt_sb3.collectors.vec_env import CollectorVecEnv


def make_collectors(config: TrainConfig) -> CollectorVecEnv:
    """
    Start the collectors on the cluster to which this process is connected.

    :param config: the run
    :return: the learner's side of them
    :raises ClusterError: if there is no room for them
    """
    from rlt_sb3.collectors.collector import Collector
    from rlt_sb3.collectors.vec_env import CollectorVecEnv

    assert config.rollout.workers is not None
    part = replace(config.env, num_envs=config.envs_per_worker)
    make = partial(_make, config.algorithm, part, config.seed, config.torch_threads)
    workers = RayWorkers(
        Collector,
        (make, partial(_load, config.algorithm)),
        config.rollout.workers,
        config.ray.of_worker(config.envs_per_worker),
        config.ray.timeout,
    )
    return CollectorVecEnv(workers, LostWorkerError, config.seed, max_staleness=config.rollout.max_staleness)


def _make(algorithm: str, config: EnvConfig, seed: int, threads: int | None) -> VecEnv:
    """Make the environments of one collector, in its process."""
    return make_vec_env(algorithm, make_part(config, "train", seed, threads))


def _load(algorithm: str, file: io.BytesIO, venv: VecEnv) -> Any:
    """Load the copy of the learner's model: its networks are small, and it stores no rows."""
    return get_algorithm(algorithm).load_class().load(file, env=venv, device="cpu", buffer_size=1)
