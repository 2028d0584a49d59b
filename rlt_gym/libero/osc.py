"""robosuite's operational-space controller as one compiled call per physics substep.

``OperationalSpaceController.run_controller`` spends ten times longer in Python look-ups than in arithmetic. The same
operations in the same order (robosuite 1.4 ``controllers/osc.py``, ``utils/control_utils.py``) in one numba function
give the same torques bit for bit, because numba's ``np.dot``/``inv``/``pinv`` call the BLAS that robosuite's own
jitted helpers call.
"""

from __future__ import annotations

import numba
import numpy as np
from robosuite.utils.control_utils import nullspace_torques, opspace_matrices, orientation_error


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
