"""The environment of a run, the devices and threads that it uses."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rlt_sb3.experiment.algorithms import get_algorithm
from rlt_sb3.experiment.config import EnvConfig, TrainConfig
from rlt_sb3.experiment.imports import check_hooks, check_import

if TYPE_CHECKING:
    import gymnasium as gym


def registered_ids() -> dict[str, str]:
    """Return for each id of a vector environment of this package where it is defined."""
    import gymnasium as gym

    import rlt_gym  # noqa: F401  (registers them)

    found = {name: str(spec.vector_entry_point) for name, spec in sorted(gym.registry.items())}
    return {name: place for name, place in found.items() if place.startswith("rlt_gym.")}


def make_env(
    config: EnvConfig, split: str, seed: int, like: gym.vector.VectorEnv | None = None
) -> gym.vector.VectorEnv:
    """
    Make the run's vector environment.

    :param config: the environment's settings
    :param split: the initial states to begin with
    :param seed: seed of the training initial states
    :param like: an environment made before, whose frozen VLA and RL-token encoder are used again
    :return: the environment
    :raises ValueError: if there is no such environment, if it has no such setting, or if it shows no reference chunk
    """
    import gymnasium as gym

    import rlt_gym  # noqa: F401  (registers the ids)

    if ":" in config.id:  # Gymnasium imports what stands before the colon
        check_import(config.id.split(":")[0], "env.id")
    check_hooks(config.kwargs, "env.kwargs")
    kwargs = config.make_kwargs()
    for key, attribute in (("vla", "vla"), ("rl_token", "encoder")):
        if hasattr(like, attribute):
            kwargs[key] = getattr(like, attribute)
            kwargs.pop(f"{key}_kwargs", None)
    if kwargs.get("render_mode") is None:
        kwargs.pop("render_mode", None)
    try:
        env = gym.make_vec(config.id, num_envs=kwargs.pop("num_envs"), init_states=split, seed=seed, **kwargs)
    except gym.error.Error as error:
        raise ValueError(
            f"env.id {config.id!r} cannot be made: {error} (This package has {', '.join(registered_ids())}; one of "
            "your own is 'module:id'.)"
        ) from error
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise ValueError(f"env.kwargs {config.kwargs} do not fit env.id {config.id!r}: {error}.") from error
    keys = list(getattr(env.single_observation_space, "spaces", {}))
    if "vla_ref" not in keys:  # LIBERO-v0, for example, has pictures and no frozen VLA
        env.close()
        raise ValueError(
            f"env.id {config.id!r} has the observations {keys}; a run needs 'z_rl', 'vla_ref' and 'proprio', as of "
            "RLToken-LIBERO-v0."
        )
    return env


def make_training_env(config: TrainConfig, split: str) -> gym.vector.VectorEnv:
    """
    Make the environment in which a run trains and evaluates: here, or in parts by the workers of its cluster.

    :param config: the run; if it has workers, this process is connected to the cluster
    :param split: the initial states to begin with
    :return: the environment
    :raises ValueError: as of :func:`make_env`
    :raises ClusterError: if the cluster has no room for the workers
    """
    algorithm, env = get_algorithm(config.algorithm), config.env
    if algorithm.env_kwargs is not None:
        env = replace(env, kwargs=env.kwargs | algorithm.env_kwargs(config.settings))
    if config.rollout.mode == "async":  # collectors train; this one evaluates
        return make_env(replace(env, num_envs=config.evaluation_envs), split, config.seed)
    if config.rollout.workers is None:
        return make_env(env, split, config.seed)
    from rlt_gym.cluster.vector_env import RayVectorEnv

    part = replace(env, num_envs=config.envs_per_worker)
    return RayVectorEnv(
        partial(make_part, part, split, config.seed, config.torch_threads),
        config.rollout.workers,
        config.envs_per_worker,
        split,
        config.seed,
        config.ray.of_worker(config.envs_per_worker),
        config.ray.timeout,
    )


def make_part(config: EnvConfig, split: str, seed: int, threads: int | None) -> gym.vector.VectorEnv:
    """
    Make the environment of one worker, in its process.

    :param config: the environment's settings, with the worker's number of simulators
    :param split: the initial states to begin with
    :param seed: seed of the training initial states
    :param threads: threads of torch, see :func:`set_threads`
    :return: the environment
    """
    check_device(config.device or "cpu")
    set_threads(threads, config.device or "cpu")
    return make_env(config, split, seed)


def check_device(device: str) -> None:
    """
    Refuse a device that torch cannot use, before weights are loaded.

    :param device: a torch device, or "auto"
    :raises ValueError: names the device and those that can be used
    """
    import torch

    if device == "auto":
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        have = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        raise ValueError(
            f"Device {device!r} cannot be used here ({str(error).splitlines()[0]}); choose one of {', '.join(have)}."
        ) from error


def set_threads(threads: int | None, device: str) -> None:
    """
    Set the number of torch's threads in this process.

    :param threads: the number; None: one if the networks train on the CPU, where more would take cores from the
        simulators and make results depend on the number of cores; else torch's own default stays
    :param device: where the networks train
    """
    import torch
    from stable_baselines3.common.utils import get_device

    if threads is None and get_device(device).type == "cpu":
        threads = 1
    if threads is not None:
        torch.set_num_threads(threads)


def set_deterministic(deterministic: bool) -> None:
    """
    Let torch use deterministic operations only, or any. It must be said before torch uses a GPU.

    :param deterministic: whether only deterministic ones; an operation that has no such form then raises an error
    """
    import torch

    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
