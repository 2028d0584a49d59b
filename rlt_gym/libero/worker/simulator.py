"""One LIBERO simulator: resets to a numbered initial state and plays whole action chunks.

Lives in a worker process. The physics is LIBERO's own, bit for bit, with the work that cannot be seen left out:
two of three forward passes a substep, Python controller code, observables and pictures nobody asked for.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import mujoco
import numpy as np
import robosuite.utils.transform_utils as T
from libero.libero.envs.env_wrapper import ControlEnv

from rlt_gym.libero.rendering.renderer import CAMERAS, KINEMATICS, Renderer
from rlt_gym.libero.suites.tasks import episode_seed, get_task, load_init_states
from rlt_gym.libero.worker.perturbations import Perturbations
from rlt_gym.workers.backend import Choose, ChunkResult

if TYPE_CHECKING:
    from rlt_gym.libero.rendering.look import Look
    from rlt_gym.libero.worker.controller import CompiledLoop

#: No motion, gripper open: LIBERO's evaluation protocol plays it until the objects have come to rest.
SETTLE_ACTION = np.array([0, 0, 0, 0, 0, 0, -1], dtype=np.float64)
SETTLE_STEPS = 10

#: Standard deviation (rad) of the arm's joint angles at the start of sampled episodes. LIBERO's fixed initial states
#: have such a spread, ``env.reset()`` has none.
START_NOISE = 0.02

#: ``reset()`` and ``set_init_state()`` each force one observation, which advances robosuite's 25-substep sampling
#: clock by one: pictures and proprioception of a control step are those of its 24th substep, the last but one.
_AFTER_SAMPLE = 1


def _pose_as_loaded(body: Any) -> tuple[np.ndarray, np.ndarray]:
    """Read position (m) and quaternion (w, x, y, z) of a body from its XML element."""
    position, quaternion = body.get("pos", "0 0 0"), body.get("quat", "1 0 0 0")
    return np.array(position.split(), dtype=float), np.array(quaternion.split(), dtype=float)


class LiberoSimulator:
    """
    A :class:`rlt_gym.workers.backend.Simulator`.

    :param suite: Name of the suite.
    :param task_id: The task in it.
    :param image_size: Side of the pictures in pixels.
    :param render: Quality of the pictures, see :class:`~rlt_gym.libero.rendering.renderer.Renderer`.
    :param compiled: Whether control steps run through the compiled loop
        (:class:`~rlt_gym.libero.worker.controller.CompiledLoop`) or through robosuite's own, with the same states.
    :param perturbations: Strengths of what changes from episode to episode, see
        :mod:`rlt_gym.libero.worker.perturbations`; ``None``: nothing does.
    """

    def __init__(
        self,
        suite: str,
        task_id: int,
        image_size: int = 128,
        render: str = "exact",
        compiled: bool = True,
        perturbations: Mapping[str, float] | None = None,
    ):
        self.task = get_task(suite, task_id)
        # Cameras and observables are ours, so robosuite itself needs no GL context; hard resets would rebuild the
        # model only to overwrite its state. The horizon is the vector environment's.
        self.env = ControlEnv(
            bddl_file_name=str(self.task.bddl_file),
            has_offscreen_renderer=False,
            use_camera_obs=False,
            hard_reset=False,
            ignore_done=True,
            camera_heights=image_size,
            camera_widths=image_size,
        )
        self.problem = self.env.env
        # Each model that LIBERO loads appends the scene's joint initializers (open drawers, lit stoves) once more, and
        # a new environment's first hard reset loads its second. Their random draws come before those that place the
        # fixtures, so with half of them the cabinet would stand a centimeter elsewhere than LIBERO puts it.
        self.problem.object_property_initializers *= 2
        self.model = self.problem.sim.model._model
        self.data = self.problem.sim.data._data
        self._fixtures_as_loaded = [
            (self.model.body(fixture.root_body).id, *_pose_as_loaded(fixture.get_obj()))
            for fixture in self.problem.fixtures_dict.values()
        ]
        # Nobody reads the gripper's force sensors, and no state depends on them.
        self.model.opt.disableflags |= int(mujoco.mjtDisableBit.mjDSBL_SENSOR)
        self._loop: CompiledLoop | None = None
        if compiled:
            from rlt_gym.libero.worker import contacts, controller  # switched off, nothing of them is even imported

            try:
                self._loop = controller.CompiledLoop(self.problem)
                self.problem.check_contact = contacts.ContactCheck(self.problem)
            except NotImplementedError as error:
                warnings.warn(
                    f"{error}: control steps run through robosuite's own loop, the same states some four times slower.",
                    stacklevel=2,
                )
        self._bind()
        self._perturbations = Perturbations(self.model, perturbations) if perturbations else None
        self._look: Look | None = None  # of this episode
        self._shown: Look | None = None  # by the renderer
        self._renderer: Renderer | None = None
        self._image_size, self.render_quality = image_size, render
        self._fresh = False

    @property
    def rests_open(self) -> bool:
        """
        Whether the GL context is kept while another task plays.

        Where a CPU draws, making one takes as long as 40 control steps. On a GPU the contexts of all tasks would share
        its memory; what they cost there was not measured.
        """
        return os.environ.get("MUJOCO_GL") == "osmesa"

    @property
    def compiled(self) -> bool:
        """Whether control steps run through the compiled loop."""
        return self._loop is not None

    def _bind(self) -> None:
        """Look names up once instead of at each control step."""
        robot, sim = self.problem.robots[0], self.problem.sim
        self._joint_qpos = np.array(robot._ref_joint_pos_indexes)
        self._finger_count = len(robot.gripper.actuators)
        self._finger_qpos = np.array(robot._ref_gripper_joint_pos_indexes)
        self._eef_site = sim.model.site_name2id(robot.gripper.important_sites["grip_site"])
        self._eef_body = sim.model.body_name2id(robot.robot_model.eef_name)
        self._substeps = int(self.problem.control_timestep / self.problem.model_timestep)
        self._sampled = [(name, getattr(self.data, name)) for name in KINEMATICS]
        self._sample = {name: np.array(source) for name, source in self._sampled}

    # ------------------------------------------------------------------ episodes

    def reset(self, split: str, index: int, observe: bool = True) -> dict[str, np.ndarray]:
        """
        Start the episode number ``index`` of a split; the same arguments give the same episode on any worker.

        :param split: ``"eval"`` (LIBERO's fixed initial states first, then sampled ones), ``"train"`` or
            ``"selection"`` (sampled ones).
        :param index: Number of the initial state.
        :param observe: Draw pictures; without, only proprioception is returned.
        :return: The first observation, after the objects have settled.
        """
        self.restart(split, index)
        for _ in range(SETTLE_STEPS):
            self._control_step(SETTLE_ACTION)
        return self.observe() if observe else {"proprio": self.proprio()}

    def episode_seed(self, split: str, index: int) -> int:
        """
        Compute the seed of an episode.

        :param split: As in :meth:`reset`.
        :param index: As in :meth:`reset`.
        :return: Seed of that episode.
        """
        return episode_seed(self.task, split, index)

    def restart(self, split: str, index: int) -> None:
        """
        Set the state an episode starts from, before its objects have settled and before anything is drawn.

        :param split: As in :meth:`reset`.
        :param index: As in :meth:`reset`.
        """
        seed = episode_seed(self.task, split, index)
        np.random.seed(seed)  # robosuite and LIBERO draw from numpy's global generator
        # LIBERO puts an object on a stove or cabinet where its region is in the loaded model, plus where the fixture
        # is to stand. A soft reset leaves the fixtures where the last episode had them: the object would fall beside
        # them, and its place would depend on that episode.
        for body, position, quaternion in self._fixtures_as_loaded:
            self.model.body_pos[body], self.model.body_quat[body] = position, quaternion
        self.env.reset()
        # A soft reset keeps the gripper's integrated command, which moves qpos by 6 mm at the first step.
        self.problem.robots[0].gripper.current_action = np.zeros(self._finger_count)
        fixed = load_init_states(self.task) if split == "eval" else ()
        if index < len(fixed):
            state = fixed[index]
        else:
            rng = np.random.default_rng(seed)
            self.data.qpos[self._joint_qpos] += rng.normal(0.0, START_NOISE, self._joint_qpos.size)
            state = self.env.get_sim_state()
        self.env.set_init_state(state)
        if self._perturbations is not None:
            self._perturb(self._perturbations, seed)
        self._fresh = True

    def _perturb(self, perturbations: Perturbations, seed: int) -> None:
        """Change the scene for an episode; the objects settle after it."""
        self._look = perturbations.apply(seed)
        objects = [model.joints[-1] for model in self.problem.objects_dict.values()]
        for joint, moved in zip(objects, perturbations.displacement(seed, len(objects))):
            first = self.model.joint(joint).qposadr[0]
            self.data.qpos[first : first + 2] += moved
        self.problem.sim.forward()

    def step_chunk(
        self,
        actions: np.ndarray,
        observe: bool = True,
        observe_at: Collection[int] = (),
        choose: Choose | None = None,
        until_success: bool = True,
    ) -> ChunkResult:
        """
        Play a chunk of control steps.

        :param actions: float (k, 7) in [-1, 1]; played until LIBERO's goal predicate holds.
        :param observe: Draw pictures after the last executed step.
        :param observe_at: Numbers (from 1) of the control steps inside the chunk after which to observe as well.
        :param choose: Asked before each control step what to do instead of its action.
        :param until_success: False: play all of them.
        :return: What it did.
        """
        rewards = []
        inner = []
        success = False
        for action in np.asarray(actions, dtype=np.float64):
            success = self._control_step(action if choose is None else choose(action))
            rewards.append(float(success))
            if success and until_success:
                break
            if len(rewards) in observe_at and len(rewards) < len(actions):
                inner.append(self.observe())
        observation = self.observe() if observe else {"proprio": self.proprio()}
        return ChunkResult(observation, np.array(rewards, dtype=np.float32), success, inner)

    # ------------------------------------------------------------------ physics

    def _control_step(self, action: np.ndarray) -> bool:
        """Play one control step (50 ms); return whether the goal is reached."""
        if self._loop is None:
            self._stock_substeps(action, 0, self._substeps)
        elif self._fresh:
            # After a reset the controller still holds the pose from before `set_init_state` (its `new_update` flag is
            # down) and uses it for the goal and for one substep. Stock code reproduces that exactly.
            self._stock_substeps(action, 0, 1)
            left = self._substeps - 1 - _AFTER_SAMPLE
            self._loop.step(action, left, self._take_sample, _AFTER_SAMPLE, begin=False)
        else:
            self._loop.step(action, self._substeps - _AFTER_SAMPLE, self._take_sample, _AFTER_SAMPLE)
        self._fresh = False
        success = bool(self.problem._check_success())
        self.problem._post_process()
        return success

    def _stock_substeps(self, action: np.ndarray, start: int, stop: int) -> None:
        """Run the loop of robosuite's ``MujocoEnv.step`` without observables."""
        for substep in range(start, stop):
            self.problem.sim.forward()
            self.problem._pre_action(action, substep == 0)
            self.problem.sim.step()
            if substep == self._substeps - 1 - _AFTER_SAMPLE:
                self._take_sample()

    def _take_sample(self) -> None:
        for name, source in self._sampled:
            self._sample[name][...] = source

    # ------------------------------------------------------------------ observations

    def proprio(self) -> np.ndarray:
        """
        Read the robot's state.

        :return: float32 (8,): gripper position (m), its axis-angle orientation (rad), two finger positions (m), as
            robosuite's observables sampled them.
        """
        # xpos and xquat are those before the substep's integration, qpos those after it: so are robosuite's.
        quat = T.convert_quat(self._sample["xquat"][self._eef_body], to="xyzw")
        return np.concatenate(
            (self._sample["site_xpos"][self._eef_site], T.quat2axisangle(quat), self._sample["qpos"][self._finger_qpos])
        ).astype(np.float32)

    def object_positions(self) -> np.ndarray:
        """
        Where the objects and fixtures are.

        :return: float32 (n, 3), meters, in the order of ``obj_body_id``.
        """
        return self._sample["xpos"][list(self.problem.obj_body_id.values())].astype(np.float32)

    def observe(self) -> dict[str, np.ndarray]:
        """
        Take the observation at the substep where robosuite samples it.

        :return: Pictures and proprioception at the substep where robosuite samples them.
        :raises RuntimeError: The GL context is lost.
        """
        pictures = self.pictures(CAMERAS)
        # A lost GL context raises nothing, it draws nothing; a scene seen from above is never of one color.
        if pictures["agentview"].min() == pictures["agentview"].max():
            raise RuntimeError("the picture is empty: the GL context is lost")
        return {**pictures, "proprio": self.proprio()}

    def pictures(self, cameras: dict[str, str], size: int | None = None) -> dict[str, np.ndarray]:
        """
        Draw pictures of several cameras.

        :param cameras: Key to camera name.
        :param size: Side in pixels, at most 512.
        :return: For each key a uint8 (size, size, 3), upside down.
        """
        if self._renderer is None:  # the GL context is made in the process and thread that draw
            self._renderer = Renderer(self.model, self._image_size, self.render_quality)
            self._shown = None
        if self._look is not None and self._look is not self._shown:
            self._renderer.show(self._look)
            self._shown = self._look
        return {key: self._renderer.render(self._sample, name, size) for key, name in cameras.items()}

    def frame(self, size: int) -> np.ndarray:
        """
        Draw the scene for people.

        :param size: Side in pixels, at most 512.
        :return: Upright picture of the scene, uint8 (size, size, 3).
        """
        return self.pictures({"frame": "agentview"}, size)["frame"][::-1]

    def close(self) -> None:
        """Free the GL context. Safe to call twice."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
