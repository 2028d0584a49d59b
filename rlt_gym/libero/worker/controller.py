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

import mujoco
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from robosuite.utils.control_utils import nullspace_torques, opspace_matrices, orientation_error

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
    ``mj_collision`` begins each substep by clearing a flag for every bounding volume (``bvh_active``), which only a
    viewer reads: 360 kB, a tenth of MuJoCo's time, because the robot's meshes have volumes too. Collisions set those of
    bodies, which come first. Meanwhile the model says that there are no others.

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
    :param ee_pos: Gripper site position (3,) in m; ``ee_ori`` its rotation matrix (3, 3).
    :param jac_pos: Jacobians of the site for the arm joints (3, 7), ``jac_ori`` likewise, ``jac_full`` both (6, 7);
        column-major.
    :param ee_pos_vel: Linear (m/s) and angular (``ee_ori_vel``, rad/s) velocity of the site (3,).
    :param mass_matrix: Arm block of the joint-space inertia (7, 7), column-major.
    :param bias: Gravity and Coriolis torques of the arm (7,).
    :param goal_pos: Goals set by the action, (3,) and ``goal_ori`` (3, 3).
    :param initial_joint: Rest posture for the null-space torques (7,).
    :param kp: Gains (6,), damping ``kd`` (6,).
    :param low: Torque limits (7,), ``high`` likewise.
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

    :param ctrl: Written, as is ``finger`` (2,), the gripper's integrated command in [-1, 1].
    :param site_pos: Gripper site position (3,), ``site_mat`` its rotation (9,).
    :param jacp: Jacobians of the site for all joints (3, nv), ``jacr`` likewise; ``mass`` the inertia (nv, nv).
    :param joint_qpos: Where the arm's seven joints stand in ``qpos``, ``joint_qvel`` in ``qvel`` and ``bias`` (nv,).
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
    Physics substeps with constant goals. The arrays that are not described here are those of :func:`drive`.

    :param functions: Found by :func:`find_functions`.
    :param model: Address of the ``mjModel``, ``data`` of the ``mjData`` whose memory the arrays share.
    :param begun: Whether ``mj_step1`` of the first substep is done.
    :param count: How many substeps.
    :param site: Number of the gripper site, ``inertia`` MuJoCo's sparse inertia.
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
