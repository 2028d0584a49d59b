"""RobotSpec: plain data that says what is wrong with it, and that wrappers keep."""

import pickle

import numpy as np
import pytest

from rlt_gym.core.robot_spec import Camera, ProprioPart, RobotSpec
from rlt_gym.core.wrappers import GripperPenalty
from rlt_gym.libero.robot import PANDA
from rlt_gym.testing import FakeLiberoVectorEnv


def robot(**changes):
    """A robot whose gripper opens with +1 and is the first number of the action."""
    arguments = {
        "name": "toy",
        "cameras": (Camera("front"),),
        "proprio": (ProprioPart("joints", 2),),
        "action_names": ("gripper", "a", "b"),
        "control_frequency": 10.0,
    }
    return RobotSpec(**{**arguments, **changes})


def test_liberos_robot():
    """The numbers that LIBERO's policies, metrics and gripper penalty were made with."""
    assert [part.name for part in PANDA.proprio] == ["position", "orientation", "fingers"]
    assert [(part.size, part.kind) for part in PANDA.proprio] == [(3, "linear"), (3, "axis_angle"), (2, "linear")]
    position, orientation, fingers = PANDA.proprio
    assert position.center == (0.0, 0.0, 0.7) and position.scale == (0.15, 0.15, 0.25)
    assert orientation.center == (0.0,) * 3 and orientation.scale == (1.0,) * 3
    assert fingers.center == (0.02, -0.02) and fingers.scale == (0.02, 0.02)
    assert PANDA.action_names == ("x", "y", "z", "roll", "pitch", "yaw", "gripper") and PANDA.gripper_index == 6
    assert PANDA.control_frequency == 20.0 and (PANDA.action_size, PANDA.proprio_size) == (7, 8)
    assert [(camera.key, camera.upside_down) for camera in PANDA.cameras] == [("agentview", True), ("wrist", True)]
    assert pickle.loads(pickle.dumps(PANDA)) == PANDA


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: ProprioPart("hand", 3, "quaternion"), "kind of 'hand' must be one of"),
        (lambda: ProprioPart("hand", 4, "axis_angle"), "axis_angle, which has 3 numbers, got size=4"),
        (lambda: ProprioPart("hand", 2, center=(1.0,)), "2 centers and 2 scales"),
        (lambda: ProprioPart("hand", 1, scale=(0.0,)), "scales > 0"),
        (lambda: robot(control_frequency=0), "control_frequency must be > 0"),
        (lambda: robot(gripper_index=3), r"gripper_index must be in 0\.\.2, got 3"),
        (lambda: robot(gripper_opens=0.0), "gripper_opens must be -1 or 1"),
        (lambda: robot(gripper_speed=3.0), r"gripper_speed must be in \(0, 2\]"),
    ],
)
def test_bad_values_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("opens, starts_open", [(1.0, True), (1.0, False), (-1.0, True), (-1.0, False)])
@pytest.mark.parametrize("speed", [0.5, 2.0])
def test_gripper_penalty_reads_the_robot(opens, starts_open, speed):
    """The fingers go one whole way and back: one transition each, as soon as they are past the threshold."""
    raw = FakeLiberoVectorEnv(1, chunk_length=12, max_episode_steps=12, success_step=99)
    raw.metadata["robot"] = robot(
        gripper_index=0, gripper_opens=opens, gripper_speed=speed, gripper_starts_open=starts_open
    )
    env = GripperPenalty(raw, 1.0)
    env.reset()
    chunk = np.zeros((1, 12, 7), dtype=np.float32)
    away = -opens if starts_open else opens
    chunk[0, :, 0] = np.where(np.arange(12) < 6, away, -away)
    *_, infos = env.step(chunk)
    late = 0 if speed == 2.0 else 3  # from -1 by 0.5: past 0.5 after the fourth step
    assert np.flatnonzero(infos["final_info"]["step_rewards"][0]).tolist() == [late, 6 + late]


def test_gripper_penalty_says_what_is_missing():
    raw = FakeLiberoVectorEnv(1)
    raw.metadata["robot"] = robot()
    with pytest.raises(ValueError, match="robot 'toy' has no gripper"):
        GripperPenalty(raw)
    del raw.metadata["robot"]
    with pytest.raises(ValueError, match=r"env\.metadata\['robot'\].*missing"):
        GripperPenalty(raw)
    assert GripperPenalty(raw, signal="command", index=2).index == 2
