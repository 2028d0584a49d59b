"""LIBERO's robot: a Panda arm under robosuite's OSC_POSE controller."""

from rlt_gym.core.robot_spec import Camera, ProprioPart, RobotSpec

PANDA = RobotSpec(
    name="panda",
    cameras=(Camera("agentview", upside_down=True), Camera("wrist", upside_down=True)),
    proprio=(
        # meters in the world frame: the hand is over a table (z 0.9-1.4) or over the floor (z 0-0.5)
        ProprioPart("position", 3, center=(0.0, 0.0, 0.7), scale=(0.15, 0.15, 0.25)),
        ProprioPart("orientation", 3, "axis_angle"),
        # finger joints, 0..0.04 and -0.04..0 meters
        ProprioPart("fingers", 2, center=(0.02, -0.02), scale=(0.02, 0.02)),
    ),
    action_names=("x", "y", "z", "roll", "pitch", "yaw", "gripper"),
    control_frequency=20.0,
    gripper_index=6,
    gripper_opens=-1.0,
    # robosuite's gripper integrates the sign of its command: 25 substeps of 0.01 per control step, within [-1, 1]
    gripper_speed=0.25,
    gripper_starts_open=True,
    # pose changes: at most 0.05 m and 0.5 rad per control step
    control_mode="relative",
)
