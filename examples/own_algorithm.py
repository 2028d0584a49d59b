"""The command `rlt` with an algorithm of your own: sb3-contrib's TRPO, with a policy that starts at the VLA.

python examples/own_algorithm.py train --config demo --algorithm trpo --name trpo
"""

import sys

from rlt_sb3.cli.main import main
from rlt_sb3.experiment.algorithms import Algorithm, proprio_settings, register_algorithm


def defaults(n_envs: int, length: int) -> dict:
    """Return settings for this number of environments and of control steps per chunk; --trpo.NAME overrides each."""
    return {
        "gamma": 0.99**length,  # one transition is one chunk: this is RLT's discount per control step
        "n_steps": max(2, 240 // n_envs),  # chunks of each environment between two updates
        "batch_size": 60,
        "device": "cpu",
    }


register_algorithm(
    "trpo",
    Algorithm(
        "TRPO",  # its name in tables
        "sb3_contrib:TRPO",
        defaults,
        policy="rlt_sb3.ppo.policies:VLACenteredPolicy",  # a Gaussian around the VLA's chunk
        flat=False,  # this policy takes actions (C, d)
        starts_at_vla=True,
        of_env=proprio_settings,  # tells the policy how the robot's proprioception is to be normalized
    ),
)

if __name__ == "__main__":
    sys.exit(main())
