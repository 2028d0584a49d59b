"""MuJoCo's steps and robosuite's operational-space controller as one compiled call for many physics substeps.

``OperationalSpaceController.run_controller`` spends ten times longer in Python look-ups than in arithmetic. The same
operations in the same order (robosuite 1.4 ``controllers/osc.py``, ``utils/control_utils.py``) in one numba function
give the same torques bit for bit, because numba's ``np.dot``/``inv``/``pinv`` call the BLAS that robosuite's own
jitted helpers call; what robosuite leaves to numpy calls numpy's BLAS.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable

import mujoco
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from robosuite.controllers.osc import OperationalSpaceController
from robosuite.utils.control_utils import (
    nullspace_torques,
    opspace_matrices,
    orientation_error,
    set_goal_orientation,
    set_goal_position,
)

#: Names under which builds of numpy carry the matrix-vector product of BLAS, and whether its integers have 64 bits.
_GEMV_NAMES = (
    ("scipy_cblas_dgemv64_", True),  # wheels of numpy 2
    ("cblas_dgemv64_", True),  # wheels of numpy 1.22 to 1.26
    ("cblas_dgemv$NEWLAPACK$ILP64", True),  # Apple's Accelerate
    ("scipy_cblas_dgemv", False),
    ("cblas_dgemv", False),  # conda, Linux distributions
)


def find_functions() -> tuple[int, ...] | None:
    """
    Find the addresses of the C functions that :func:`substeps` calls.

    :return: What :func:`substeps` calls: addresses of ``mj_step1``, ``mj_step2``, ``mj_jacSite``, ``mj_fullM`` and of
        numpy's ``dgemv``, and 1 if that one's integers have 64 bits; ``None`` where they cannot be found.
    """
    functions = []
    # A library's handle also finds what it is linked with.
    library = ctypes.CDLL(importlib.import_module("mujoco._functions").__file__)
    for name in ("mj_step1", "mj_step2", "mj_jacSite", "mj_fullM"):
        if not hasattr(library, name):
            return None
        functions.append(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0)
    core = "numpy.core" if np.lib.NumpyVersion(np.__version__) < "2.0.0" else "numpy._core"
    library = ctypes.CDLL(importlib.import_module(f"{core}._multiarray_umath").__file__)
    for name, wide in _GEMV_NAMES:
        if hasattr(library, name):
            address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
            return (*functions, address, int(wide)) if hasattr(mujoco.MjData, "_address") else None
    return None


@contextmanager
def without_viewer_flags(model: mujoco.MjModel) -> Iterator[None]:
    """
    Spare MuJoCo the clearing of flags that only a viewer reads.

    ``mj_collision`` begins each substep by clearing a flag for every bounding volume (``bvh_active``): 360 kB, a tenth
    of MuJoCo's time, because the robot's meshes have volumes too. Collisions set the flags of bodies, which come first.
    While this context is open, the model says that there are no others.

    :param model: Must not be copied or saved inside.
    """
    sizes = [getattr(model, name) for name in ("nq", "nv", "nu", "na", "nbody", "nbvh", "nbvhstatic")]
    for kind in (ctypes.c_int64, ctypes.c_int32):  # MuJoCo 3.8 and newer, older ones
        head = (kind * len(sizes)).from_address(model._address)
        if list(head) == sizes:
            break
    else:  # sizes are kept in another order
        yield
        return
    head[5] = int((model.body_bvhadr + model.body_bvhnum).max())
    try:
        yield
    finally:
        head[5] = sizes[5]


@intrinsic
def _call(typing_context, address, arguments):
    """Call the C function at an address with a tuple of numbers and addresses; it returns nothing."""

    def generate(context, builder, signature, values):
        kinds = [context.get_value_type(kind) for kind in arguments.types]
        function = builder.inttoptr(values[0], ir.FunctionType(ir.VoidType(), kinds).as_pointer())
        builder.call(function, cgutils.unpack_tuple(builder, values[1]))
        return context.get_dummy_value()

    return types.void(address, arguments), generate


@numba.njit(cache=True)
def osc_torques(
    ee_pos,
    ee_ori,
    jac_pos,
    jac_ori,
    jac_full,
    ee_pos_vel,
    ee_ori_vel,
    mass_matrix,
    bias,
    joint_pos,
    joint_vel,
    goal_pos,
    goal_ori,
    initial_joint,
    kp,
    kd,
    low,
    high,
):
    """
    Compute the torques of robosuite's operational space controller.

    :param ee_pos: Gripper site position (3,) in m.
    :param ee_ori: Its rotation matrix (3, 3).
    :param jac_pos: Jacobian of the site's position for the arm joints (3, 7), column-major.
    :param jac_ori: Jacobian of its rotation (3, 7), column-major.
    :param jac_full: Both (6, 7), column-major.
    :param ee_pos_vel: Linear velocity of the site (3,) in m/s.
    :param ee_ori_vel: Angular velocity of the site (3,) in rad/s.
    :param mass_matrix: Arm block of the joint-space inertia (7, 7), column-major.
    :param bias: Gravity and Coriolis torques of the arm (7,).
    :param joint_pos: Joint angles of the arm (7,) in rad.
    :param joint_vel: Joint velocities of the arm (7,) in rad/s.
    :param goal_pos: Goal position set by the action (3,).
    :param goal_ori: Goal rotation set by the action (3, 3).
    :param initial_joint: Rest posture for the null-space torques (7,).
    :param kp: Gains (6,).
    :param kd: Damping (6,).
    :param low: Lower torque limits (7,).
    :param high: Upper torque limits (7,).
    :return: Joint torques (7,) in Nm.
    """
    ori_error = orientation_error(goal_ori, ee_ori)
    desired_force = (goal_pos - ee_pos) * kp[0:3] + (-ee_pos_vel) * kd[0:3]
    desired_torque = ori_error * kp[3:6] + (-ee_ori_vel) * kd[3:6]

    _, lambda_pos, lambda_ori, nullspace = opspace_matrices(mass_matrix, jac_full, jac_pos, jac_ori)
    wrench = np.concatenate((np.dot(lambda_pos, desired_force), np.dot(lambda_ori, desired_torque)))

    torques = np.dot(jac_full.T, wrench) + bias
    torques = torques + nullspace_torques(mass_matrix, nullspace, initial_joint, joint_pos, joint_vel)
    return np.minimum(np.maximum(torques, low), high)


@numba.njit(cache=True)
def drive(
    ctrl,
    site_pos,
    site_mat,
    jacp,
    jacr,
    ee_pos_vel,
    ee_ori_vel,
    mass,
    bias,
    qpos,
    qvel,
    joint_qpos,
    joint_qvel,
    goal_pos,
    goal_ori,
    initial_joint,
    kp,
    kd,
    low,
    high,
    torque_actuators,
    finger,
    finger_step,
    finger_actuators,
    finger_bias,
    finger_weight,
):
    """
    One substep of arm and gripper: gather the arm's part of MuJoCo's arrays, write the torques and finger targets.

    :param ctrl: Written: MuJoCo's controls.
    :param site_pos: Gripper site position (3,).
    :param site_mat: Its rotation (9,).
    :param jacp: Jacobian of the site's position for all joints (3, nv).
    :param jacr: Jacobian of its rotation (3, nv).
    :param ee_pos_vel: Linear velocity of the site (3,) in m/s.
    :param ee_ori_vel: Angular velocity of the site (3,) in rad/s.
    :param mass: Inertia of all joints (nv, nv).
    :param bias: Gravity and Coriolis torques of all joints (nv,).
    :param qpos: MuJoCo's positions.
    :param qvel: MuJoCo's velocities (nv,).
    :param joint_qpos: Where the arm's seven joints stand in ``qpos``.
    :param joint_qvel: Where they stand in ``qvel`` and ``bias``.
    :param goal_pos: Goal position (3,) in m.
    :param goal_ori: Goal rotation (3, 3).
    :param initial_joint: Rest posture (7,) in rad.
    :param kp: Gains (6,).
    :param kd: Damping (6,).
    :param low: Lower torque limits (7,).
    :param high: Upper torque limits (7,).
    :param torque_actuators: Where the arm's torques stand in ``ctrl``.
    :param finger: Written: the gripper's integrated command (2,) in [-1, 1].
    :param finger_step: What is added to it (2,).
    :param finger_actuators: Where the fingers' targets stand in ``ctrl``.
    :param finger_bias: Middle of the fingers' targets (2,) in m.
    :param finger_weight: Half of their range (2,) in m.
    """
    count = joint_qvel.size
    # Column-major, because robosuite's fancy indexing makes them so and BLAS rounds differently otherwise.
    jac_pos, jac_ori = np.empty((count, 3)).T, np.empty((count, 3)).T
    jac_full = np.empty((count, 6)).T
    mass_matrix = np.empty((count, count)).T
    arm_bias, joint_pos, joint_vel = np.empty(count), np.empty(count), np.empty(count)
    for column in range(count):
        joint = joint_qvel[column]
        for row in range(3):
            jac_pos[row, column] = jac_full[row, column] = jacp[row, joint]
            jac_ori[row, column] = jac_full[row + 3, column] = jacr[row, joint]
        for row in range(count):
            mass_matrix[row, column] = mass[joint_qvel[row], joint]
        arm_bias[column], joint_vel[column] = bias[joint], qvel[joint]
        joint_pos[column] = qpos[joint_qpos[column]]
    torques = osc_torques(
        site_pos, site_mat.reshape((3, 3)), jac_pos, jac_ori, jac_full, ee_pos_vel, ee_ori_vel, mass_matrix,
        arm_bias, joint_pos, joint_vel, goal_pos, goal_ori, initial_joint, kp, kd, low, high,
    )  # fmt: skip
    for index in range(count):
        ctrl[torque_actuators[index]] = torques[index]
    for index in range(finger.size):
        finger[index] = min(max(finger[index] + finger_step[index], -1.0), 1.0)
        ctrl[finger_actuators[index]] = finger_bias[index] + finger_weight[index] * finger[index]


@numba.njit(cache=True)
def _times(gemv, wide, matrix, vector, result):
    """``np.dot(matrix, vector)`` as numpy does it: by its own BLAS, which may round differently from numba's."""
    row_major, as_it_is, one, none = np.int32(101), np.int32(111), np.float64(1.0), np.float64(0.0)
    rows, columns, step = np.int64(matrix.shape[0]), np.int64(matrix.shape[1]), np.int64(1)
    a, x, y = matrix.ctypes.data, vector.ctypes.data, result.ctypes.data
    if wide:
        _call(gemv, (row_major, as_it_is, rows, columns, one, a, columns, x, step, none, y, step))
    else:
        m, n, i = np.int32(rows), np.int32(columns), np.int32(1)
        _call(gemv, (row_major, as_it_is, m, n, one, a, n, x, i, none, y, i))


@numba.njit(cache=True)
def substeps(
    functions,
    model,
    data,
    begun,
    count,
    site,
    inertia,
    ctrl,
    site_pos,
    site_mat,
    jacp,
    jacr,
    mass,
    bias,
    qpos,
    qvel,
    joint_qpos,
    joint_qvel,
    goal_pos,
    goal_ori,
    initial_joint,
    kp,
    kd,
    low,
    high,
    torque_actuators,
    finger,
    finger_step,
    finger_actuators,
    finger_bias,
    finger_weight,
):
    """
    Play physics substeps with constant goals. The arguments from ``ctrl`` on are those of :func:`drive`.

    :param functions: Found by :func:`find_functions`.
    :param model: Address of the ``mjModel``.
    :param data: Address of the ``mjData`` whose memory the arrays share.
    :param begun: Whether ``mj_step1`` of the first substep is done.
    :param count: How many substeps.
    :param site: Number of the gripper site.
    :param inertia: MuJoCo's sparse inertia.
    """
    step1, step2, jac_site, full_mass, gemv, wide = functions
    linear, angular = np.empty(3), np.empty(3)
    for substep in range(count):
        if substep > 0 or not begun:
            _call(step1, (model, data))
        _call(jac_site, (model, data, jacp.ctypes.data, jacr.ctypes.data, np.int32(site)))
        _call(full_mass, (model, mass.ctypes.data, inertia.ctypes.data))
        _times(gemv, wide, jacp, qvel, linear)
        _times(gemv, wide, jacr, qvel, angular)
        drive(
            ctrl, site_pos, site_mat, jacp, jacr, linear, angular, mass, bias, qpos, qvel, joint_qpos, joint_qvel,
            goal_pos, goal_ori, initial_joint, kp, kd, low, high, torque_actuators, finger, finger_step,
            finger_actuators, finger_bias, finger_weight,
        )  # fmt: skip
        _call(step2, (model, data))


def _is_default_controller(problem: Any) -> bool:
    """Tell whether the controller is LIBERO's default, the only one that the compiled loop computes."""
    controller = problem.robots[0].controller
    return (
        len(problem.robots) == 1
        and isinstance(controller, OperationalSpaceController)
        and controller.impedance_mode == "fixed"
        and controller.use_delta
        and controller.use_ori
        and controller.uncoupling
        and controller.interpolator_pos is None
        and controller.interpolator_ori is None
        and problem.control_freq == 20
    )


class CompiledLoop:
    """
    The control steps of one simulator through :func:`substeps`.

    :param problem: LIBERO's environment. Its model and data must stay where they are in memory.
    :raises NotImplementedError: They cannot run that way; says why.
    """

    def __init__(self, problem: Any):
        functions = find_functions()
        if functions is None:
            raise NotImplementedError(
                "The functions that rlt's compiled loop calls were not found in this MuJoCo and this numpy (try their "
                "wheels from PyPI)"
            )
        if not _is_default_controller(problem):
            raise NotImplementedError(
                "LIBERO's controller is not the OSC_POSE delta controller at 20 Hz that rlt compiles (the defaults are "
                "in robosuite's controllers/config/osc_pose.json)"
            )
        self._problem, sim, robot = problem, problem.sim, problem.robots[0]
        self._model, self._data = model, data = sim.model._model, sim.data._data
        # Names are looked up once instead of at each of 25 substeps.
        self._torque_actuators = np.array(robot._ref_joint_actuator_indexes)
        self._finger_actuators = np.array([sim.model.actuator_name2id(a) for a in robot.gripper.actuators])
        ctrl_range = model.actuator_ctrlrange[self._finger_actuators]
        self._finger_bias = 0.5 * (ctrl_range[:, 1] + ctrl_range[:, 0])
        self._finger_weight = 0.5 * (ctrl_range[:, 1] - ctrl_range[:, 0])
        self._site = sim.model.site_name2id(robot.gripper.important_sites["grip_site"])
        self._torque_low, self._torque_high = (np.asarray(limit, dtype=np.float64) for limit in robot.torque_limits)
        self._speed = np.array([-1.0, 1.0]) * robot.gripper.speed
        # What :func:`substeps` always gets: addresses, and arrays that share MjData's memory, which never moves.
        joints = model.nv
        self._bound = (functions, model._address, data._address)
        self._state = (
            self._site, data.qM, data.ctrl, data.site_xpos[self._site], data.site_xmat[self._site],
            np.zeros((3, joints)), np.zeros((3, joints)), np.zeros((joints, joints)), data.qfrc_bias, data.qpos,
            data.qvel, np.array(robot._ref_joint_pos_indexes), np.array(robot._ref_joint_vel_indexes),
        )  # fmt: skip

    def step(self, action: np.ndarray, before: int, sample: Callable[[], None], after: int, begin: bool = True) -> None:
        """
        Play a control step.

        :param action: float (7,).
        :param before: Substeps before ``sample``.
        :param sample: Called between the two; must not copy the model.
        :param after: Substeps after it.
        :param begin: Otherwise robosuite's own loop has set the controller's goal and played a substep before.
        """
        robot = self._problem.robots[0]
        controller, gripper = robot.controller, robot.gripper
        if begin:
            mujoco.mj_step1(self._model, self._data)
            self._set_goal(controller, action[:6])
        finger = np.array(gripper.current_action, dtype=np.float64)
        settings = (
            controller.goal_pos, controller.goal_ori, controller.initial_joint, controller.kp, controller.kd,
            self._torque_low, self._torque_high, self._torque_actuators, finger, self._speed * np.sign(action[6:]),
            self._finger_actuators, self._finger_bias, self._finger_weight,
        )  # fmt: skip
        with without_viewer_flags(self._model):
            substeps(*self._bound, begin, before, *self._state, *settings)
            sample()
            substeps(*self._bound, False, after, *self._state, *settings)
        gripper.current_action = finger

    def _set_goal(self, controller: Any, action: np.ndarray) -> None:
        delta = controller.scale_action(action)
        position = np.array(self._data.site_xpos[self._site])
        rotation = np.array(self._data.site_xmat[self._site].reshape(3, 3))
        # robosuite keeps the old goal orientation when no rotation is asked for (math.isclose against 0 is exact).
        if np.any(delta[3:] != 0.0):
            controller.goal_ori = set_goal_orientation(delta[3:], rotation, controller.orientation_limits)
        controller.goal_pos = set_goal_position(delta[:3], position, controller.position_limits)
