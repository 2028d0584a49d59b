"""Entry points of ``gymnasium.make`` for LIBERO's ids."""

from __future__ import annotations

from typing import Any

from gymnasium.vector import AutoresetMode

from rlt_gym.core.single_env import SingleEnv


def make_libero(**kwargs: Any) -> SingleEnv:
    """Entry point of ``gymnasium.make("LIBERO-v0")``; arguments of :class:`LiberoVectorEnv` without ``num_envs``."""
    from rlt_gym.libero.vector_env import LiberoVectorEnv

    return SingleEnv(LiberoVectorEnv(num_envs=1, autoreset_mode=AutoresetMode.DISABLED, **kwargs))
