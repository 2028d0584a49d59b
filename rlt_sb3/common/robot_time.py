"""How long a robot would move: control steps, at the control frequency of an environment's robot."""

from __future__ import annotations

from stable_baselines3.common.vec_env import VecEnv

from rlt_sb3.common.vec_env import metadata_of


def control_frequency(env: VecEnv | None) -> float | None:
    """
    Read how many control steps make a simulated second.

    :param env: an environment
    :return: control steps per second; ``None`` where its metadata have no robot
    """
    robot = metadata_of(env).get("robot")
    return None if robot is None else float(robot.control_frequency)


def robot_minutes(control_steps: float, frequency: float | None) -> float | None:
    """
    Convert control steps to the time that a robot would move.

    :param control_steps: number of control steps
    :param frequency: control steps per second; None where it is not known
    :return: minutes, resets not counted; None where the frequency is not known
    """
    return None if frequency is None else control_steps / frequency / 60.0
