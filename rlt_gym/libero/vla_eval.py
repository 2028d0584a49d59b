"""
LIBERO as a benchmark of vla-eval, the evaluation harness with servers for many VLAs: ``pip install 'rlt[vla-eval]'``.

A configuration of vla-eval names it instead of the harness's own class::

    benchmarks:
      - benchmark: rlt_gym.libero.vla_eval:LiberoBenchmark
        episodes_per_task: 50
        params: {suite: libero_goal}

Observations, horizons and the rule of the gripper are those of ``vla_eval.benchmarks.libero``; the simulator is
``LIBERO-v0``, so the harness needs neither Docker nor LIBERO's own packages in its process.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium.vector import AutoresetMode

from rlt_gym.libero.suites.tasks import SUITE_HORIZONS, get_tasks

try:
    from vla_eval.benchmarks.base import StepBenchmark, StepResult
    from vla_eval.specs import (
        GRIPPER_CLOSE_POS,
        IMAGE_RGB,
        LANGUAGE,
        POSITION_DELTA,
        ROTATION_AA,
        STATE_EEF_POS_AA_GRIP,
        DimSpec,
    )
except ImportError as error:
    raise ImportError(f"{__name__} needs vla-eval ({error}): pip install 'rlt[vla-eval]'.") from error

#: Edge of the pictures in pixels.
IMAGE_SIZE = 256


class LiberoBenchmark(StepBenchmark):
    """
    A suite of LIBERO for vla-eval's harness, one control step per observation.

    :param suite: ``libero_spatial``, ``libero_object``, ``libero_goal``, ``libero_10`` or ``libero_90``.
    :param seed: Not used: an initial state of LIBERO has no randomness left.
    :param num_steps_wait: Settling steps before an episode; ``LIBERO-v0`` always makes 10.
    :param send_wrist_image: Whether observations have the wrist camera's picture.
    :param send_state: Whether observations have ``states``: position, axis-angle, fingers.
    :param absolute_action: Must be false.
    :param max_steps: Control steps per episode; ``None`` = those of
        :data:`~rlt_gym.libero.suites.tasks.SUITE_HORIZONS`, which are the harness's own.
    :param env_seed: Not used, as ``seed``.
    :param quat_no_antipodal: Whether the axis-angle is robosuite's, which may turn by more than pi.
    :param env_kwargs: Further arguments of :class:`~rlt_gym.libero.vector_env.LiberoVectorEnv`, e.g. ``assets``.
    :raises ValueError: A suite that does not exist, or an argument that this benchmark cannot fulfill.
    """

    render_backends: ClassVar[frozenset[str]] = frozenset({"gpu", "cpu"})

    @classmethod
    def configure_render(cls, mode: str) -> dict[str, str]:
        """
        Say how workers render.

        :param mode: ``"gpu"`` or ``"cpu"``.
        :return: Variables of the environment, for the harness to record.
        """
        from vla_eval.render import configure_mujoco_render

        return configure_mujoco_render(mode)

    def __init__(
        self,
        suite: str = "libero_spatial",
        seed: int = 7,
        num_steps_wait: int = 10,
        send_wrist_image: bool = False,
        send_state: bool = False,
        absolute_action: bool = False,
        max_steps: int | None = None,
        env_seed: int | None = None,
        quat_no_antipodal: bool = False,
        env_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._tasks = get_tasks(suite)
        if absolute_action:
            raise ValueError("absolute_action is true; LIBERO-v0 takes relative actions only: use a server of those.")
        if num_steps_wait != 10:
            raise ValueError(
                f"num_steps_wait is {num_steps_wait}; LIBERO-v0 lets objects settle for 10 steps: leave it out."
            )
        self.suite, self.max_steps = suite, max_steps or SUITE_HORIZONS[suite]
        self.send_wrist_image, self.send_state, self.quat_no_antipodal = send_wrist_image, send_state, quat_no_antipodal
        self._env_kwargs = env_kwargs or {}
        self._env: Any = None

    def get_tasks(self) -> list[dict[str, Any]]:
        """
        List the tasks.

        :return: For each its ``name`` (the instruction), ``suite`` and ``task_id``.
        """
        return [{"name": task.instruction, "suite": self.suite, "task_id": task.task_id} for task in self._tasks]

    def reset(self, task: dict[str, Any]) -> dict[str, Any]:
        """
        Begin an episode.

        :param task: One of :meth:`get_tasks`, with ``episode_idx``: which of LIBERO's initial states.
        :return: The observation of ``LIBERO-v0``.
        """
        if self._env is None:
            from rlt_gym.libero.vector_env import LiberoVectorEnv

            self._env = LiberoVectorEnv(
                1,
                self.suite,
                chunk_length=1,
                init_states="eval",
                image_size=IMAGE_SIZE,
                max_episode_steps=self.max_steps,
                autoreset_mode=AutoresetMode.DISABLED,
                **self._env_kwargs,
            )
        episode = (task["task_id"], task.get("episode_idx", 0))
        obs, _ = self._env.reset(options={"init_states": "eval", "episodes": [episode]})
        self._recorder.record_video(_turned(obs["agentview"][0]))
        return obs

    def step(self, action: dict[str, Any]) -> StepResult:
        """
        Play one control step.

        :param action: ``actions`` (7,); the sign of the last number closes (+) or opens (-) the gripper.
        :return: Observation, reward and success.
        :raises ValueError: An action of another size.
        """
        values = np.asarray(action.get("actions", action.get("action")), dtype=np.float64).reshape(-1)
        if values.shape != (7,):
            raise ValueError(f"An action has 7 numbers, got {values.shape[0]}: serve a policy for LIBERO.")
        played = np.append(values[:6], -1.0 if values[6] < 0 else 1.0)
        obs, rewards, terminations, *_ = self._env.step(played[None, None])
        success = bool(terminations[0])
        self._recorder.record_video(_turned(obs["agentview"][0]))
        self._recorder.record_step(
            reward=float(rewards[0]),
            done=success,
            success=success,
            action=played.astype(np.float32),
            state=obs["proprio"][0],
        )
        return StepResult(obs=obs, reward=float(rewards[0]), done=success, info={})

    def make_obs(self, raw_obs: dict[str, Any], task: dict[str, Any]) -> dict[str, Any]:
        """
        Make the observation that a model server gets.

        :param raw_obs: The observation of ``LIBERO-v0``.
        :param task: One of :meth:`get_tasks`.
        :return: ``images``, ``task_description`` and perhaps ``states``.
        """
        cameras = ("agentview", "wrist") if self.send_wrist_image else ("agentview",)
        obs: dict[str, Any] = {
            "images": {camera: _turned(raw_obs[camera][0]) for camera in cameras},
            "task_description": task["name"],
        }
        if self.send_state:
            obs["states"] = self._state(raw_obs["proprio"][0])
        return obs

    def _state(self, proprio: np.ndarray) -> np.ndarray:
        """(8,); without ``quat_no_antipodal`` the rotation is the shorter of the two that give this orientation."""
        state = proprio.astype(np.float64)
        angle = float(np.linalg.norm(state[3:6]))
        if not self.quat_no_antipodal and angle > np.pi:
            state[3:6] *= 1.0 - 2.0 * np.pi / angle
        return state

    def get_step_result(self, step_result: StepResult) -> dict[str, Any]:
        """
        Give the result of an episode.

        :param step_result: Of its last step.
        :return: ``success``.
        """
        return {"success": step_result.done}

    def get_metadata(self) -> dict[str, Any]:
        """
        Tell the harness its defaults.

        :return: ``max_steps``, ``max_episodes_per_task``, ``suite``.
        """
        return {"max_steps": self.max_steps, "max_episodes_per_task": 50, "suite": self.suite}

    def get_action_spec(self) -> dict[str, DimSpec]:
        """
        Describe actions.

        :return: Specifications of position, rotation and gripper.
        """
        return {"position": POSITION_DELTA, "rotation": ROTATION_AA, "gripper": GRIPPER_CLOSE_POS}

    def get_observation_spec(self) -> dict[str, DimSpec]:
        """
        Describe observations.

        :return: Specifications of pictures, instruction and state.
        """
        spec: dict[str, DimSpec] = {"agentview": IMAGE_RGB, "language": LANGUAGE}
        if self.send_wrist_image:
            spec["wrist"] = IMAGE_RGB
        if self.send_state:
            spec["state"] = STATE_EEF_POS_AA_GRIP
        return spec

    def cleanup(self) -> None:
        """End the simulator."""
        if self._env is not None:
            self._env.close()
            self._env = None


def _turned(picture: np.ndarray) -> np.ndarray:
    """LIBERO's pictures are upside down and mirrored against those that VLAs know."""
    return np.ascontiguousarray(picture[::-1, ::-1])
