"""
LIBERO's simulators of this package for LeRobot: an ``env.py`` as LeRobot's EnvHub wants it.

Put this file into a repository of the model hub, then::

    from lerobot.envs.factory import make_env

    envs = make_env("user/repo", n_envs=4, trust_remote_code=True)

or, without a hub, import it and call :func:`make_env`. What comes out is what ``lerobot-eval`` evaluates:
``{suite: {task_id: vector environment}}``, single control steps, actions (n_envs, 7). Observations are those of
LeRobot's datasets of LIBERO: pictures turned by 180 degrees, a state of 8 numbers. So no ``LiberoProcessorStep`` is
needed.

Differences from LeRobot's own ``LiberoEnv``, each on purpose:

- Initial states are played in their order, none is skipped after a success, and each has its own fixed placement of
  fixtures, whatever the seeds. A batch that is reset after the last state begins again with state 0.
- An environment whose episode has ended rests until the next reset, instead of playing on.
- The simulators of a suite are shared by its tasks, so ``max_parallel_tasks`` must be 1 (LeRobot's default). They start
  when the first of these environments is reset.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

import rlt_gym  # registers LIBERO-v0  # noqa: F401
from rlt_gym.libero.suites.protocols import LIBERO_STATES, get_protocol
from rlt_gym.libero.suites.tasks import get_tasks


class Simulators:
    """
    The simulators of a suite, shared by the environments of its tasks.

    :param n_envs: How many.
    :param settings: Arguments of ``LIBERO-v0``.
    """

    def __init__(self, n_envs: int, **settings: Any):
        self.n_envs, self.settings = n_envs, settings
        #: Who has reset them last, and who may still do so.
        self.user: object = None
        self.users: set[int] = set()
        self._env: gym.vector.VectorEnv | None = None

    @property
    def env(self) -> gym.vector.VectorEnv:
        """The vector environment; its processes start with the first question."""
        if self._env is None:
            self._env = gym.make_vec("LIBERO-v0", self.n_envs, chunk_length=1, init_states="eval", **self.settings)
        return self._env

    def close(self, user: int) -> None:
        """
        End the processes after the last user has gone.

        :param user: ``id`` of who needs them no more.
        """
        self.users.discard(user)
        if not self.users and self._env is not None:
            self._env.close()
            self._env = None


class Member:
    """
    What ``lerobot-eval`` asks of ``env.envs[i]``.

    :param env: The vector environment.
    :param index: Which of its environments.
    """

    def __init__(self, env: LeRobotLibero, index: int):
        self._env, self._index = env, index
        self.task, self.task_description = env.task_name, env.instruction
        self._max_episode_steps = env.horizon

    def render(self) -> np.ndarray:
        """
        Show the last picture.

        :return: Upright uint8 (H, W, 3).
        """
        return self._env.pictures[self._index][::-1]


class LeRobotLibero(gym.vector.SyncVectorEnv):
    """
    A task of LIBERO in single control steps.

    LeRobot films a ``SyncVectorEnv`` only, so this is one; nothing else of that class is used.

    :param simulators: The suite's.
    :param task: The task.
    :param horizon: Control steps of an episode.
    """

    def __init__(self, simulators: Simulators, task: Any, horizon: int):
        self.simulators, self.horizon, self.num_envs = simulators, horizon, simulators.n_envs
        self.task_id, self.task_name, self.instruction = task.task_id, task.name, task.instruction
        self.envs = [Member(self, index) for index in range(self.num_envs)]
        size = simulators.settings["image_size"]
        picture = spaces.Box(0, 255, (size, size, 3), np.uint8)
        state = spaces.Box(-np.inf, np.inf, (8,), np.float32)
        pixels = spaces.Dict({"image": picture, "image2": picture})
        self.single_observation_space = spaces.Dict({"pixels": pixels, "agent_pos": state})
        self.single_action_space = spaces.Box(-1.0, 1.0, (7,), np.float32)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, self.num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, self.num_envs)
        self.metadata = {
            "render_modes": ["rgb_array"],
            "render_fps": 20,
            "autoreset_mode": gym.vector.AutoresetMode.DISABLED,
        }
        self.render_mode = "rgb_array"
        #: Number of the initial state that the next reset begins with.
        self.init_state_id = 0
        self.pictures = np.zeros((self.num_envs, size, size, 3), np.uint8)
        simulators.users.add(id(self))

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """
        Begin the next initial states.

        :param seed: Without effect: nothing is drawn.
        :param options: ``init_state_id`` = the first of these states.
        :return: Observations and infos.
        """
        first = (options or {}).get("init_state_id", self.init_state_id)
        states = [(first + index) % LIBERO_STATES for index in range(self.num_envs)]
        self.init_state_id = (first + self.num_envs) % LIBERO_STATES
        self.simulators.user = self
        obs, _ = self.simulators.env.reset(options={"episodes": [(self.task_id, state) for state in states]})
        return self._observation(obs), {"is_success": np.zeros(self.num_envs, dtype=bool)}

    def step(self, actions: np.ndarray) -> tuple[dict[str, Any], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """
        Play one control step.

        :param actions: float (n_envs, 7).
        :return: Observations, rewards, terminations, truncations, infos; ``final_info`` where episodes have ended.
        :raises RuntimeError: Another task has taken the simulators.
        """
        if self.simulators.user is not self:
            raise RuntimeError(
                "Another task uses these simulators now: evaluate one task at a time (max_parallel_tasks=1)."
            )
        obs, rewards, terminations, truncations, infos = self.simulators.env.step(np.asarray(actions)[:, None])
        # an episode whose simulator was lost begins again: for LeRobot it has not ended
        truncations = truncations & ~infos["worker_restarted"]
        done = terminations | truncations
        found: dict[str, Any] = {"is_success": terminations.copy()}
        if done.any():
            found["final_info"] = {"is_success": terminations.copy(), "_is_success": done}
        return self._observation(obs), rewards, terminations, truncations, found

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """
        Ask every member.

        :param name: Attribute or method.
        :param args: Of the method.
        :param kwargs: Of the method.
        :return: The answers.
        """
        found = [getattr(member, name) for member in self.envs]
        return tuple(value(*args, **kwargs) if callable(value) else value for value in found)

    def close(self, **kwargs: Any) -> None:
        """
        Free the simulators if no other task needs them.

        :param kwargs: Ignored; Gymnasium passes the arguments of ``close``.
        """
        self.closed = True
        self.simulators.close(id(self))

    def __del__(self) -> None:
        """Leave the simulators to their other users."""
        self.close()

    def _observation(self, obs: dict[str, np.ndarray]) -> dict[str, Any]:
        self.pictures = obs["agentview"]
        turned = {"image": obs["agentview"], "image2": obs["wrist"]}
        pixels = {key: np.ascontiguousarray(pictures[:, ::-1, ::-1]) for key, pictures in turned.items()}
        return {"pixels": pixels, "agent_pos": obs["proprio"]}


def make_env(
    n_envs: int = 1,
    use_async_envs: bool = False,
    cfg: Any = None,
    suites: Sequence[str] | None = None,
    task_ids: Sequence[int] | None = None,
    image_size: int = 256,
    render: str = "exact",
    assets: str = "auto",
) -> dict[str, dict[int, LeRobotLibero]]:
    """
    Make the environments of one or more suites.

    :param n_envs: Simulators, each a process.
    :param use_async_envs: Ignored: the simulators are processes anyway.
    :param cfg: LeRobot's configuration of the environment; its ``task`` (suites, separated by commas), ``task_ids`` and
        ``observation_height`` count, where it has them.
    :param suites: Suites; ``None``: of ``cfg``, or of the variable ``RLT_SUITES``, or ``libero_10`` as in LeRobot.
    :param task_ids: Tasks of every suite; ``None``: of ``cfg``, or all.
    :param image_size: Side of the pictures in pixels, unless ``cfg`` says it.
    :param render: ``"exact"``, LIBERO's own pictures, or ``"fast"``.
    :param assets: ``"auto"``, ``"official"``, ``"embedded"`` or a folder.
    :return: Suite -> task -> vector environment.
    :raises ValueError: An unknown suite or task; no process has been started then.
    """
    if suites is None:
        suites = (getattr(cfg, "task", None) or os.environ.get("RLT_SUITES") or "libero_10").split(",")
    ids = getattr(cfg, "task_ids", None) if task_ids is None else task_ids
    size = getattr(cfg, "observation_height", None) or image_size
    made: dict[str, dict[int, LeRobotLibero]] = {}
    for suite in (name.strip() for name in suites):
        tasks = get_tasks(suite, ids)
        horizon = getattr(cfg, "episode_length", None) or get_protocol("lerobot").horizons[suite]
        simulators = Simulators(
            n_envs, suite=suite, task_ids=[task.task_id for task in tasks], image_size=size, render=render,
            assets=assets, max_episode_steps=horizon, seed=0,
        )  # fmt: skip
        made[suite] = {task.task_id: LeRobotLibero(simulators, task, horizon) for task in tasks}
    return made
