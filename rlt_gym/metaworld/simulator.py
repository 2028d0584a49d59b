"""Meta-World in a worker process: makes its simulators, resets them to numbered initial states and plays chunks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import mujoco
import numpy as np
from metaworld.env_dict import ALL_V3_ENVIRONMENTS
from metaworld.policies import ENV_POLICY_MAP

from rlt_gym.metaworld.tasks import SAWYER, SUITES
from rlt_gym.workers.backend import Choose, ChunkResult, split_seed

#: Where the camera of people's pictures stands, nearer to the table than in Meta-World's files; LeRobot has the same.
_CORNER = (0.75, 0.075, 0.7)


class MetaWorldBackend:
    """
    A :class:`rlt_gym.workers.backend.Backend`.

    :param suite: Name of the suite.
    :param image_size: Side of the pictures in pixels.
    """

    def __init__(self, suite: str, image_size: int = 128):
        self._names, self._image_size = SUITES[suite], image_size

    def make(self, task_id: int) -> MetaWorldSimulator:
        """
        Build the simulator of a task.

        :param task_id: Task of the suite.
        :return: Its simulator, without a GL context.
        """
        return MetaWorldSimulator(self._names[task_id], self._image_size)

    def warm_up(self, task_id: int) -> MetaWorldSimulator:
        """
        Build the simulator of a task and play a step without drawing.

        :param task_id: Task of the suite.
        :return: Its simulator.
        """
        simulator = self.make(task_id)
        simulator.begin("train", 0)
        simulator.control_step(np.zeros(SAWYER.action_size))
        return simulator


class MetaWorldSimulator:
    """
    A :class:`rlt_gym.workers.backend.Simulator`: one of Meta-World's environments, unchanged.

    :param name: Its name, e.g. ``"push-v3"``.
    :param image_size: Side of the pictures in pixels.
    """

    def __init__(self, name: str, image_size: int = 128):
        self.name, self._image_size = name, image_size
        self.env: Any = ALL_V3_ENVIRONMENTS[name]()
        self.env.model.camera("corner2").pos = _CORNER
        # what `set_task` does, but with positions that follow from a seed and not from a pickle
        self.env._set_task_called, self.env._freeze_rand_vec, self.env.seeded_rand_vec = True, False, True
        self.env._partially_observable = False  # for the scripted experts; a policy sees pictures and the hand only
        vars(self.env).pop("sawyer_observation_space", None)
        #: Meta-World's own observation (39 numbers), which its experts read.
        self.state = np.zeros(39)
        self._renderers: dict[int, mujoco.Renderer] = {}

    def episode_seed(self, split: str, index: int) -> int:
        """
        Compute the seed of an episode.

        :param split: Name of the set of initial states.
        :param index: Number of the initial state in it.
        :return: Its seed.
        """
        return split_seed(split, SUITES["MT50"].index(self.name), index)

    def begin(self, split: str, index: int) -> None:
        """
        Set an initial state, without drawing it: Meta-World draws the positions of object and goal from the seed.

        :param split: As in :meth:`episode_seed`.
        :param index: As in :meth:`episode_seed`.
        """
        self.env.seed(self.episode_seed(split, index))
        self.state, _ = self.env.reset()

    def reset(self, split: str, index: int) -> dict[str, np.ndarray]:
        """
        Start an episode.

        :param split: As in :meth:`episode_seed`.
        :param index: As in :meth:`episode_seed`.
        :return: The first observation.
        """
        self.begin(split, index)
        return self.observe()

    def control_step(self, action: np.ndarray) -> bool:
        """
        Play one control step (12.5 ms).

        :param action: (4,) in [-1, 1].
        :return: Whether Meta-World calls the task solved.
        """
        self.state, _, _, _, info = self.env.step(np.asarray(action, dtype=np.float32))
        return bool(info["success"])

    def step_chunk(
        self,
        actions: np.ndarray,
        *,
        observe_at: Collection[int] = (),
        choose: Choose | None = None,
        until_success: bool = True,
    ) -> ChunkResult:
        """
        Play a chunk of control steps, until the task is solved.

        :param actions: float (k, 4).
        :param observe_at: Numbers (from 1) of the control steps inside the chunk after which to observe as well.
        :param choose: Asked before each control step what to do instead of its action.
        :param until_success: False: play all of them.
        :return: What it did.
        """
        rewards, inner, success = [], [], False
        for action in actions:
            success = self.control_step(action if choose is None else choose(action))
            rewards.append(float(success))
            if success and until_success:
                break
            if len(rewards) in observe_at and len(rewards) < len(actions):
                inner.append(self.observe())
        return ChunkResult(self.observe(), np.array(rewards, dtype=np.float32), success, inner)

    def observe(self) -> dict[str, np.ndarray]:
        """
        Take an observation.

        :return: Upright pictures of :data:`~rlt_gym.metaworld.tasks.SAWYER`'s cameras, and ``proprio`` float32 (4,).
        :raises RuntimeError: The GL context is lost.
        """
        pictures = {camera: self._draw(camera, self._image_size) for camera in SAWYER.camera_keys}
        if pictures["corner2"].min() == pictures["corner2"].max():
            raise RuntimeError("the picture is empty: the GL context is lost")
        return {**pictures, "proprio": self.state[:4].astype(np.float32)}

    def _draw(self, camera: str, size: int) -> np.ndarray:
        if size not in self._renderers:  # the GL context is made in the process that draws
            # neither shadows nor multisampling: ten times quicker on a CPU
            visual = self.env.model.vis
            visual.quality.offsamples, visual.global_.offwidth, visual.global_.offheight = 0, size, size
            self._renderers[size] = mujoco.Renderer(self.env.model, size, size)
            self._renderers[size].scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = False
        renderer = self._renderers[size]
        renderer.update_scene(self.env.data, camera)
        picture = renderer.render()
        # Meta-World's corner cameras hang upside down
        return np.array(picture[::-1, ::-1] if camera == "corner2" else picture)

    def frame(self, size: int) -> np.ndarray:
        """
        Draw the scene for people.

        :param size: Side in pixels.
        :return: Upright picture, uint8 (size, size, 3).
        """
        return self._draw("corner2", size)

    def close(self) -> None:
        """Free the GL contexts. Safe to call twice."""
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()


def record_demo(simulator: MetaWorldSimulator, index: int, noise: float, max_steps: int) -> dict[str, Any]:
    """
    Play an episode of Meta-World's scripted expert, inside a worker.

    :param simulator: The worker's simulator.
    :param index: Initial state of the training split.
    :param noise: Standard deviation of disturbances of the motion; each lasts 8 control steps. The recorded actions are
        the expert's own, so that demonstrations contain recoveries (DART, arXiv 1703.09327).
    :param max_steps: Control steps before it gives up.
    :return: Row t is the observation before action t: pictures, ``proprio`` (T, 4) and ``actions`` (T, 4); ``success``.
    """
    rng = np.random.default_rng(index)
    policies: Any = ENV_POLICY_MAP
    expert, rows, success = policies[simulator.name](), [], False
    observation = simulator.reset("train", index)
    for step in range(max_steps):
        if step % 8 == 0:
            disturbance = noise * np.append(rng.standard_normal(3), 0.0)
        action = np.clip(expert.get_action(simulator.state), -1.0, 1.0)
        rows.append({**observation, "actions": action.astype(np.float32)})
        result = simulator.step_chunk(np.clip(action + disturbance, -1.0, 1.0)[None])
        observation, success = result.observation, result.success
        if success:
            break
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]} | {"success": success}
