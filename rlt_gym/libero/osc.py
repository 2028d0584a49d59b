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
