"""``MetaWorld-v0`` and ``RLToken-MetaWorld-v0``: the vector environment and the entry points of gymnasium.make."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gymnasium.vector import AutoresetMode, VectorEnv

from rlt_gym.core.single_env import SingleEnv, arguments_of_one
from rlt_gym.core.worker_vector_env import WorkerVectorEnv
from rlt_gym.metaworld.tasks import HORIZON, SAWYER, SUITES, TRAIN_HORIZON, get_tasks
from rlt_gym.rl_token.env import RLTokenVectorEnv
from rlt_gym.rl_token.make import make_rl_token_vec
from rlt_gym.workers.backend import backend_settings
from rlt_gym.workers.named import checked_int

if TYPE_CHECKING:
    from rlt_gym.rl_token.base import Encoder
    from rlt_gym.vla.base import FrozenVLA


class MetaWorldVectorEnv(WorkerVectorEnv):
    """
    Steps N Meta-World simulators together, each in a process that gets one message per chunk.

    The observation of each env has ``corner2`` and ``gripperPOV``, upright uint8 (S, S, 3), and ``proprio``, float32
    (4,): position of the hand (m), opening of the gripper (0 to 1). The action is float32 (C, 4) in [-1, 1], C control
    steps of 12.5 ms: the motion of the hand (1 is 1 cm) and the force of the gripper (-1 opens, +1 closes). The reward
    is 1 at success, which is Meta-World's ``info["success"]``. Positions of object and goal follow from split, task and
    number of the initial state.

    :param num_envs: N.
    :param suite: ``"MT10"`` or ``"MT50"``.
    :param task_ids: Tasks of the suite; ``None`` for all.
    :param chunk_length: C.
    :param image_size: Side S of the pictures in pixels, at most 512.
    :param max_episode_steps: Control steps before truncation, in every split; ``None``: 500, and 200 in the training
        split. At most 500, where Meta-World itself ends.
    :param train_episode_steps: The same in the training split, at most ``max_episode_steps``; a list: of each task.
    :param settings: Further arguments of :class:`~rlt_gym.core.worker_vector_env.WorkerVectorEnv`.
    :raises ImportError: Meta-World is not installed.
    :raises ValueError: A bad argument, before any process starts.
    """

    def __init__(
        self,
        num_envs: int = 1,
        suite: str = "MT10",
        task_ids: Sequence[int] | None = None,
        chunk_length: int = 8,
        image_size: int = 128,
        max_episode_steps: int | None = None,
        train_episode_steps: int | Sequence[int] | None = None,
        **settings: Any,
    ):
        tasks = get_tasks(suite, task_ids)
        if max_episode_steps is None and train_episode_steps is None:
            train_episode_steps = TRAIN_HORIZON
        horizon = HORIZON if max_episode_steps is None else checked_int("max_episode_steps", max_episode_steps, 1, 500)
        backend = backend_settings("rlt_gym.metaworld.simulator:MetaWorldBackend", suite=suite, image_size=image_size)
        settings = {"train_episode_steps": train_episode_steps, **settings}
        super().__init__(
            "Meta-World", backend, 100 << 20, num_envs, tasks, SAWYER, chunk_length, horizon, image_size, **settings
        )
        self.metadata["n_tasks"] = len(SUITES[suite])


def make_metaworld(**kwargs: Any) -> SingleEnv:
    """
    Entry point of ``gymnasium.make("MetaWorld-v0")``.

    :param kwargs: Arguments of :class:`MetaWorldVectorEnv` without ``num_envs``.
    :return: One environment; it is reset by its user.
    :raises ValueError: A bad argument, or one that only vector environments have.
    """
    kwargs = arguments_of_one(kwargs)
    env = MetaWorldVectorEnv(num_envs=1, autoreset_mode=AutoresetMode.DISABLED, **kwargs)
    return SingleEnv(env).made_by(make_metaworld, **kwargs)


def make_rl_token_metaworld_vec(
    vla: str | os.PathLike[str] | FrozenVLA, rl_token: str | os.PathLike[str] | Encoder = "auto", **settings: Any
) -> VectorEnv:
    """
    Entry point of ``gymnasium.make_vec("RLToken-MetaWorld-v0", ...)``.

    :param vla: As :func:`~rlt_gym.rl_token.make.make_rl_token_vec` takes it; no shipped one knows Meta-World.
    :param rl_token: Likewise.
    :param settings: Further arguments of this function and of :class:`MetaWorldVectorEnv`.
    :return: The environment.
    :raises ValueError: If an argument is wrong; no process has been started then.
    """
    settings |= {"vla": vla, "rl_token": rl_token}
    env = make_rl_token_vec(lambda loaded, **raw: MetaWorldVectorEnv(**raw), SAWYER, **settings)
    return env.made_by(make_rl_token_metaworld_vec, **settings)


def make_rl_token_metaworld(**kwargs: Any) -> SingleEnv:
    """
    Entry point of ``gymnasium.make("RLToken-MetaWorld-v0")``.

    :param kwargs: Arguments of :func:`make_rl_token_metaworld_vec` without ``num_envs``.
    :return: One environment; it is reset by its user.
    :raises ValueError: A bad argument, or one that only vector environments have.
    """
    kwargs = arguments_of_one(kwargs)
    env = make_rl_token_metaworld_vec(num_envs=1, autoreset_mode=AutoresetMode.DISABLED, **kwargs)
    return SingleEnv(env).made_by(make_rl_token_metaworld, **kwargs)


# gymnasium.make reads the modes of its entry point: with them it adds HumanRendering and RenderCollection by itself.
make_metaworld.metadata = make_rl_token_metaworld.metadata = SingleEnv.metadata  # type: ignore[attr-defined]
make_rl_token_metaworld_vec.metadata = RLTokenVectorEnv.metadata  # type: ignore[attr-defined]
