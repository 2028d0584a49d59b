"""Entry points of ``gymnasium.make`` for LIBERO's ids."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gymnasium.vector import AutoresetMode, VectorEnv

from rlt_gym.core.flat import FlatVectorEnv
from rlt_gym.core.single_env import SingleEnv, arguments_of_one
from rlt_gym.libero.robot import PANDA
from rlt_gym.rl_token.env import RLTokenVectorEnv
from rlt_gym.rl_token.make import make_rl_token_vec

if TYPE_CHECKING:
    from rlt_gym.rl_token.base import Encoder
    from rlt_gym.vla.base import FrozenVLA


def make_libero(**kwargs: Any) -> SingleEnv:
    """
    Entry point of ``gymnasium.make("LIBERO-v0")``.

    :param kwargs: Arguments of :class:`~rlt_gym.libero.vector_env.LiberoVectorEnv` without ``num_envs``.
    :return: One environment; it is reset by its user.
    :raises ValueError: A bad argument, or one that only vector environments have.
    """
    from rlt_gym.libero.vector_env import LiberoVectorEnv

    kwargs = arguments_of_one(kwargs)
    vector_env = LiberoVectorEnv(num_envs=1, autoreset_mode=AutoresetMode.DISABLED, **kwargs)
    return SingleEnv(vector_env).made_by(make_libero, **kwargs)


def make_rl_token_libero_vec(
    num_envs: int = 1,
    suite: str = "libero_goal",
    task_ids: Sequence[int] | None = None,
    vla: str | os.PathLike[str] | FrozenVLA = "mini",
    rl_token: str | os.PathLike[str] | Encoder = "auto",
    render: str | None = None,
    **settings: Any,
) -> RLTokenVectorEnv | FlatVectorEnv:
    """
    Entry point of ``gymnasium.make_vec("RLToken-LIBERO-v0", ...)``.

    :param num_envs: Number of simulators.
    :param suite: LIBERO suite.
    :param task_ids: Tasks of the suite, ``None`` = all.
    :param vla: As :func:`~rlt_gym.rl_token.make.make_rl_token_vec` takes it.
    :param rl_token: Likewise.
    :param render: ``"exact"``, LIBERO's own pictures, ``"stock"``, the same without any shortcut, or ``"fast"``, cheap
        ones; ``None`` = those that the VLA was trained on, if its specification says it (MiniVLA: ``"fast"``), else
        ``"exact"``. Others than it was trained on are refused.
    :param settings: Further arguments of :func:`~rlt_gym.rl_token.make.make_rl_token_vec` and of
        :class:`~rlt_gym.libero.vector_env.LiberoVectorEnv`.
    :return: The environment.
    :raises ValueError: If an argument is wrong; no process has been started then.
    """
    from rlt_gym.libero.vector_env import LiberoVectorEnv

    def raw_env(loaded: FrozenVLA, **raw: Any) -> VectorEnv:
        quality = loaded.spec.check_render(render)
        env = LiberoVectorEnv(num_envs=num_envs, suite=suite, task_ids=task_ids, render=quality, **raw)
        trained_on = loaded.spec.assets
        if trained_on is not None and env.assets.kind != trained_on:
            warnings.warn(
                f"The VLA {loaded.spec.name!r} was trained on {trained_on} assets and plays on {env.assets.kind} ones "
                f"here ({env.assets.path}): expect few successes. Pass assets={trained_on!r}.",
                stacklevel=3,
            )
        return env

    env = make_rl_token_vec(raw_env, PANDA, vla=vla, rl_token=rl_token, **settings)
    # Copies load VLA and encoder again, from these arguments: by name if a name was given.
    given = {"num_envs": num_envs, "suite": suite, "task_ids": task_ids, "render": render}
    return env.made_by(make_rl_token_libero_vec, vla=vla, rl_token=rl_token, **given, **settings)


def make_rl_token_libero(**kwargs: Any) -> SingleEnv:
    """
    Entry point of ``gymnasium.make("RLToken-LIBERO-v0")``.

    :param kwargs: Arguments of :func:`make_rl_token_libero_vec` without ``num_envs``.
    :return: One environment; it is reset by its user.
    :raises ValueError: A bad argument, or one that only vector environments have.
    """
    kwargs = arguments_of_one(kwargs)
    vector_env = make_rl_token_libero_vec(num_envs=1, autoreset_mode=AutoresetMode.DISABLED, **kwargs)
    return SingleEnv(vector_env).made_by(make_rl_token_libero, **kwargs)


# gymnasium.make reads the modes of its entry point: with them it adds HumanRendering and RenderCollection by itself.
make_libero.metadata = make_rl_token_libero.metadata = SingleEnv.metadata  # type: ignore[attr-defined]
make_rl_token_libero_vec.metadata = RLTokenVectorEnv.metadata  # type: ignore[attr-defined]
