"""The environment of a run, and whether its device can be used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlt_sb3.config import EnvConfig
from rlt_sb3.imports import check_hooks, check_import

if TYPE_CHECKING:
    import gymnasium as gym


def make_env(
    config: EnvConfig, split: str, seed: int, like: gym.vector.VectorEnv | None = None
) -> gym.vector.VectorEnv:
    """The run's vector environment.

    :param config: the environment's settings
    :param split: the initial states to begin with
    :param seed: seed of the training initial states
    :param like: one made before; its frozen VLA and RL token are used, not loaded a second time
    :raises ValueError: if there is no such environment
    """
    import gymnasium as gym

    if ":" in config.id:  # Gymnasium imports what stands before the colon
        check_import(config.id.split(":")[0], "env.id")
    check_hooks(config.kwargs, "env.kwargs")
    kwargs = config.make_kwargs()
    for key, attribute in (("vla", "vla"), ("rl_token", "encoder")):
        if hasattr(like, attribute):
            kwargs[key] = getattr(like, attribute)
    if kwargs.get("render_mode") is None:
        kwargs.pop("render_mode", None)
    try:
        return gym.make_vec(config.id, num_envs=kwargs.pop("num_envs"), init_states=split, seed=seed, **kwargs)
    except gym.error.Error as error:
        raise ValueError(f"env.id {config.id!r} cannot be made: {error}") from error


def check_device(device: str) -> None:
    """Refuse a device that torch cannot use, before anything is loaded.

    :raises ValueError: names the device and what there is
    """
    import torch

    if device == "auto":
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        have = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        raise ValueError(
            f"Device {device!r} cannot be used here ({str(error).splitlines()[0]}); there is {have}."
        ) from error
