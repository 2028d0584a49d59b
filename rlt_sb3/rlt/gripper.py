"""
The gripper's command: how RLT explores and corrects a number of which only the sign counts.

Small noise on a command near 1 never shows what -1 does, and a pull by the squared distance forbids it. So the command
is reversed for whole chunks, in a few chunks with noise, and the actor is pulled towards the reversed command where the
critics prefer it. HIL-SERL (arXiv 2410.21845) treats the gripper as a discrete action for the same reason.
"""

import numpy as np
import torch as th

from rlt_sb3.rlt.features import TensorDict
from rlt_sb3.rlt.policies import RLTCritic

#: By how much the lowest critic has to prefer the reversed command to what the mean of the critics says of the VLA's
MARGIN = 0.02


def reverse_gripper(chunks: np.ndarray, gripper: int, chosen: np.ndarray) -> None:
    """
    Reverse the gripper in some chunks: during all control steps it opens where most of them close it, or closes.

    :param chunks: (N, C, d), changed in place
    :param gripper: place of the command in an action
    :param chosen: which chunks, bool (N,)
    """
    closes = chunks[chosen, :, gripper].mean(1, keepdims=True) > 0.0
    chunks[chosen, :, gripper] = np.where(closes, -1.0, 1.0)


def pull_gripper(
    critic: RLTCritic, observations: TensorDict, actions: th.Tensor, target: th.Tensor, gripper: int
) -> th.Tensor:
    """
    Reverse the gripper in the chunks to which the actor is pulled, where the critics prefer it.

    Compared are the actor's chunk with the VLA's commands and with the reversed ones.

    :param critic: the critics
    :param observations: ``z_rl``, ``proprio`` and ``vla_ref`` (B, C, d)
    :param actions: of the actor, flat (B, C*d)
    :param target: chunks to which it is pulled so far, flat (B, C*d)
    :param gripper: place of the command in an action
    :return: the new target, flat (B, C*d). It is the old one where someone else than the VLA chose the chunk
    """
    reference = observations["vla_ref"].float()
    chunks = actions.detach().view_as(reference)
    own, opposite, wanted = chunks.clone(), chunks.clone(), target.view_as(reference).clone()
    own[..., gripper] = reference[..., gripper]
    command = th.where(reference[..., gripper].mean(1, keepdim=True) > 0.0, -1.0, 1.0)
    opposite[..., gripper] = command
    with th.no_grad():
        better = critic.q_values(observations, opposite.flatten(1)).min(0).values
        better = better > critic.q_values(observations, own.flatten(1)).mean(0) + MARGIN
    better &= (target == reference.flatten(1)).all(1)
    wanted[..., gripper] = th.where(better[:, None], command, wanted[..., gripper])
    return wanted.flatten(1)
