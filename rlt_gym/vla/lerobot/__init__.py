"""
LeRobot's policies as frozen VLAs: ``lerobot:FOLDER`` or ``lerobot:owner/name`` of the model hub.

Importing this package registers the scheme; it needs neither PyTorch nor the extra ``lerobot``.
"""

from rlt_gym.vla.registry import register_vla

register_vla(
    "lerobot:",
    "rlt_gym.vla.lerobot.adapter:LeRobotVLA",
    "lerobot:FOLDER or lerobot:owner/name, a policy of LeRobot (ACT, Diffusion, SmolVLA, PI0, PI05, ...)",
    install="rlt[lerobot]",
)
