"""Parts that do not depend on the algorithm: the environment bridge and the replay buffer."""

from rlt_sb3.common.replay.buffer import ChunkReplayBuffer
from rlt_sb3.common.vec_env import GymnasiumVecEnv

__all__ = ["ChunkReplayBuffer", "GymnasiumVecEnv"]
