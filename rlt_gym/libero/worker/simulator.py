"""One LIBERO simulator: resets to a numbered initial state and plays whole action chunks.

Lives in a worker process. The physics is LIBERO's own, bit for bit, with the work that cannot be seen left out:
two of three forward passes a substep, Python controller code, observables and pictures nobody asked for.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import mujoco
import numpy as np
import robosuite.utils.transform_utils as T
from libero.libero.envs.env_wrapper import ControlEnv
from robosuite.controllers.osc import OperationalSpaceController
from robosuite.utils.control_utils import set_goal_orientation, set_goal_position

from rlt_gym.libero.rendering.renderer import CAMERAS, KINEMATICS, Renderer
from rlt_gym.libero.suites.tasks import episode_seed, get_task, load_init_states
from rlt_gym.libero.worker.controller import find_functions, substeps, without_viewer_flags

#: No motion, gripper open: LIBERO's evaluation protocol plays it until the objects have come to rest.
SETTLE_ACTION = np.array([0, 0, 0, 0, 0, 0, -1], dtype=np.float64)
SETTLE_STEPS = 10

#: Standard deviation (rad) of the arm's joint angles at the start of sampled episodes. LIBERO's fixed initial states
#: have such a spread, ``env.reset()`` has none.
START_NOISE = 0.02

#: ``reset()`` and ``set_init_state()`` each force one observation, which advances robosuite's 25-substep sampling
#: clock by one: pictures and proprioception of a control step are those of its 24th substep.
_SAMPLED_SUBSTEP = 23


@dataclass
class ChunkResult:
    """
    What one chunk did.

    :param observation: agentview and wrist uint8 (S, S, 3), proprio float32 (8,), after the last executed step.
    :param step_rewards: float32 (k,), one per executed control step.
    :param success: LIBERO's own goal predicate holds.
    :param inner: Observations at the steps asked for that came before the last executed one.
    """

    observation: dict[str, np.ndarray]
    step_rewards: np.ndarray
    success: bool
    inner: list[dict[str, np.ndarray]] = field(default_factory=list)


class LiberoSimulator:
    """
    :param suite: Name of the suite; ``task_id`` the task in it.
    :param image_size: Side of the pictures in pixels.
    :param render: ``"exact"`` (LIBERO's pictures) or ``"fast"`` (see :mod:`rlt_gym.libero.rendering.renderer`).
    """

    def __init__(self, suite: str, task_id: int, image_size: int = 128, render: str = "exact"):
        self.task = get_task(suite, task_id)
        # Cameras and observables are ours, so robosuite needs no GL context of its own; hard resets would rebuild the
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
        # Each model that LIBERO loads appends the scene's joint initialisers (open drawers, lit stoves) once more, and
        # a new environment's first hard reset loads its second. Their random draws come before those that place the
        # fixtures, so with half of them the cabinet would stand a centimetre elsewhere than LIBERO puts it.
        self.problem.object_property_initializers *= 2
        self.model = self.problem.sim.model._model
        self.data = self.problem.sim.data._data
        # Nobody reads the gripper's force sensors, and no state depends on them.
        self.model.opt.disableflags |= int(mujoco.mjtDisableBit.mjDSBL_SENSOR)
        reason = ""
        functions = find_functions()
        if functions is None:
            reason = (
                "The functions that rlt's compiled loop calls were not found in this MuJoCo and this numpy (try their "
                "wheels from PyPI)"
            )
        elif not self._is_default_controller():
            reason = (
                "LIBERO's controller is not the OSC_POSE delta controller at 20 Hz that rlt compiles (the defaults are "
                "in robosuite's controllers/config/osc_pose.json)"
            )
        #: Whether control steps run through the compiled loop or through robosuite's own.
        self.compiled = not reason
        if reason:
            warnings.warn(
                f"{reason}: control steps run through robosuite's own loop, the same states some four times slower.",
                stacklevel=2,
            )
        self._bind(functions)
        self._renderer: Renderer | None = None
        self._image_size, self._render_quality = image_size, render
        self._fresh = False

    def _is_default_controller(self) -> bool:
        """The compiled controller is right for LIBERO's default controller only."""
        controller = self.problem.robots[0].controller
        return (
            len(self.problem.robots) == 1
            and isinstance(controller, OperationalSpaceController)
            and controller.impedance_mode == "fixed"
            and controller.use_delta
            and controller.use_ori
            and controller.uncoupling
            and controller.interpolator_pos is None
            and controller.interpolator_ori is None
            and self.problem.control_freq == 20
        )

    def _bind(self, functions: tuple[int, ...] | None) -> None:
        """Look names up once instead of at each of 25 substeps."""
        robot, sim = self.problem.robots[0], self.problem.sim
        self._joint_qpos = np.array(robot._ref_joint_pos_indexes)
        self._joint_qvel = np.array(robot._ref_joint_vel_indexes)
        self._torque_actuators = np.array(robot._ref_joint_actuator_indexes)
        self._finger_actuators = np.array([sim.model.actuator_name2id(a) for a in robot.gripper.actuators])
        self._finger_qpos = np.array(robot._ref_gripper_joint_pos_indexes)
        ctrl_range = self.model.actuator_ctrlrange[self._finger_actuators]
        self._finger_bias = 0.5 * (ctrl_range[:, 1] + ctrl_range[:, 0])
        self._finger_weight = 0.5 * (ctrl_range[:, 1] - ctrl_range[:, 0])
        self._eef_site = sim.model.site_name2id(robot.gripper.important_sites["grip_site"])
        self._eef_body = sim.model.body_name2id(robot.robot_model.eef_name)
        self._torque_low, self._torque_high = (np.asarray(limit, dtype=np.float64) for limit in robot.torque_limits)
        self._speed = np.array([-1.0, 1.0]) * robot.gripper.speed
        self._substeps = int(self.problem.control_timestep / self.problem.model_timestep)
        data, joints = self.data, self.model.nv
        self._sampled = [(name, getattr(data, name)) for name in KINEMATICS]
        self._sample = {name: np.array(source) for name, source in self._sampled}
        # What :func:`substeps` always gets: addresses, and arrays that share MjData's memory, which never moves.
        self._bound = (functions, self.model._address, data._address)
        self._state = (
            self._eef_site, data.qM, data.ctrl, data.site_xpos[self._eef_site], data.site_xmat[self._eef_site],
            np.zeros((3, joints)), np.zeros((3, joints)), np.zeros((joints, joints)), data.qfrc_bias, data.qpos,
            data.qvel, self._joint_qpos, self._joint_qvel,
        )  # fmt: skip

    # ------------------------------------------------------------------ episodes

    def reset(self, split: str, index: int, observe: bool = True) -> dict[str, np.ndarray]:
        """
        Start the episode number ``index`` of a split; the same arguments give the same episode on any worker.

        :param split: ``"eval"`` (LIBERO's fixed initial states first, then sampled ones), ``"train"`` or
            ``"selection"`` (sampled ones).
        :param index: Number of the initial state.
        :param observe: Draw pictures; without, only proprioception is returned.
        """
        self.restart(split, index)
        for _ in range(SETTLE_STEPS):
            self._control_step(SETTLE_ACTION)
        return self.observe() if observe else {"proprio": self.proprio()}

    def restart(self, split: str, index: int) -> None:
        """The state an episode starts from, before its objects have settled and before anything is drawn."""
        seed = episode_seed(self.task, split, index)
        np.random.seed(seed)  # robosuite and LIBERO draw from numpy's global generator
        self.env.reset()
        # A soft reset keeps the gripper's integrated command, which moves qpos by 6 mm at the first step.
        self.problem.robots[0].gripper.current_action = np.zeros(self._finger_actuators.size)
        fixed = load_init_states(self.task) if split == "eval" else ()
        if index < len(fixed):
            state = fixed[index]
        else:
            rng = np.random.default_rng(seed)
            self.data.qpos[self._joint_qpos] += rng.normal(0.0, START_NOISE, self._joint_qpos.size)
            state = self.env.get_sim_state()
        self.env.set_init_state(state)
        self._fresh = True

    def step_chunk(
        self,
        actions: np.ndarray,
        observe: bool = True,
        observe_at: Collection[int] = (),
        choose: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> ChunkResult:
        """
        :param actions: float (k, 7) in [-1, 1]; played until LIBERO's goal predicate holds.
        :param observe: Draw pictures after the last executed step.
        :param observe_at: Numbers (from 1) of the control steps inside the chunk after which to observe as well.
        :param choose: Asked before each control step what to do instead of its action.
        """
        rewards = []
        inner = []
        success = False
        for action in np.asarray(actions, dtype=np.float64):
            success = self._control_step(action if choose is None else choose(action))
            rewards.append(float(success))
            if success:
                break
            if len(rewards) in observe_at and len(rewards) < len(actions):
                inner.append(self.observe())
        observation = self.observe() if observe else {"proprio": self.proprio()}
        return ChunkResult(observation, np.array(rewards, dtype=np.float32), success, inner)

    # ------------------------------------------------------------------ physics

    def _control_step(self, action: np.ndarray) -> bool:
        """One control step (50 ms); returns whether the goal is reached."""
        if self.compiled:
            self._compiled_step(action)
        else:
            self._stock_substeps(action, 0, self._substeps)
        self._fresh = False
        success = bool(self.problem._check_success())
        self.problem._post_process()
        return success

    def _stock_substeps(self, action: np.ndarray, start: int, stop: int) -> None:
        """The loop of robosuite's ``MujocoEnv.step``, without observables."""
        for substep in range(start, stop):
            self.problem.sim.forward()
            self.problem._pre_action(action, substep == 0)
            self.problem.sim.step()
            if substep == self._substeps - 2:
                self._take_sample()

    def _take_sample(self) -> None:
        for name, source in self._sampled:
            self._sample[name][...] = source

    def _compiled_step(self, action: np.ndarray) -> None:
        robot = self.problem.robots[0]
        controller, gripper = robot.controller, robot.gripper
        begun = not self._fresh
        if begun:
            mujoco.mj_step1(self.model, self.data)
            self._set_goal(controller, action[:6])
            left = self._substeps
        else:
            # After a reset the controller still holds the pose from before `set_init_state` (its `new_update` flag is
            # down) and uses it for the goal and for one substep. Stock code reproduces that exactly.
            self._stock_substeps(action, 0, 1)
            left = self._substeps - 1
        finger = np.array(gripper.current_action, dtype=np.float64)
        settings = (
            controller.goal_pos, controller.goal_ori, controller.initial_joint, controller.kp, controller.kd,
            self._torque_low, self._torque_high, self._torque_actuators, finger, self._speed * np.sign(action[6:]),
            self._finger_actuators, self._finger_bias, self._finger_weight,
        )  # fmt: skip
        after = self._substeps - 1 - _SAMPLED_SUBSTEP
        with without_viewer_flags(self.model):
            substeps(*self._bound, begun, left - after, *self._state, *settings)
            self._take_sample()
            substeps(*self._bound, False, after, *self._state, *settings)
        gripper.current_action = finger

    def _set_goal(self, controller, action: np.ndarray) -> None:
        delta = controller.scale_action(action)
        position = np.array(self.data.site_xpos[self._eef_site])
        rotation = np.array(self.data.site_xmat[self._eef_site].reshape(3, 3))
        # robosuite keeps the old goal orientation when no rotation is asked for (math.isclose against 0 is exact).
        if np.any(delta[3:] != 0.0):
            controller.goal_ori = set_goal_orientation(delta[3:], rotation, controller.orientation_limits)
        controller.goal_pos = set_goal_position(delta[:3], position, controller.position_limits)

    # ------------------------------------------------------------------ observations

    def proprio(self) -> np.ndarray:
        """
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
        :return: float32 (n, 3): positions (m) of the objects and fixtures, in the order of ``obj_body_id``.
        """
        return self._sample["xpos"][list(self.problem.obj_body_id.values())].astype(np.float32)

    def observe(self) -> dict[str, np.ndarray]:
        """Pictures and proprioception at the substep where robosuite samples them."""
        pictures = self.pictures(CAMERAS)
        return {**pictures, "proprio": self.proprio()}

    def pictures(self, cameras: dict[str, str], size: int | None = None) -> dict[str, np.ndarray]:
        """
        :param cameras: Key to camera name.
        :param size: Side in pixels, at most 256.
        :return: For each key a uint8 (size, size, 3), upside down.
        """
        if self._renderer is None:  # the GL context is made in the process and thread that draw
            self._renderer = Renderer(self.model, self._image_size, self._render_quality)
        return {key: self._renderer.render(self._sample, name, size) for key, name in cameras.items()}

    def close(self) -> None:
        """Free the GL context. Safe to call twice."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
