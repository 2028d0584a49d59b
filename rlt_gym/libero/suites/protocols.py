"""How others evaluate policies on LIBERO: horizons, initial states, replanning, pictures.

What was read: openpi's ``examples/libero/main.py``, LeRobot 0.4.4's ``envs/libero.py`` and ``envs/configs.py``, and
``src/vla_eval/benchmarks/libero/benchmark.py`` of vla-evaluation-harness. Of these, only LeRobot's was also run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlt_gym.libero.suites.tasks import SUITE_HORIZONS

#: The suites whose mean is LIBERO's score.
FOUR_SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10")
#: LIBERO's own initial states of a task; those after them are sampled from its placement regions.
LIBERO_STATES = 50


@dataclass(frozen=True)
class Protocol:
    """
    What an evaluation of LIBERO must say besides its policy.

    :param name: Short name.
    :param about: Whose it is, one line.
    :param horizons: Control steps before an episode counts as a failure, by suite.
    :param episodes: Initial states per task, LIBERO's own from number 0 on, each played once.
    :param settle_steps: Control steps without motion, gripper open, before the policy begins; they do not count.
    :param chunk_length: Control steps of a chunk that are played before the policy is asked again; ``None``: all that
        it gives.
    :param image_size: Side of the pictures in pixels; ``None``: what the policy needs, 128 if it does not say it.
    :param render: How pictures are drawn; ``None``: as those that the policy was trained on, else ``"exact"``.
    :param seed: Seed of the noise of stochastic policies.
    """

    name: str
    about: str
    horizons: dict[str, int] = field(default_factory=lambda: dict(SUITE_HORIZONS))
    episodes: int = LIBERO_STATES
    settle_steps: int = 10
    chunk_length: int | None = None
    image_size: int | None = 256
    render: str | None = "exact"
    seed: int = 7


PROTOCOLS = {
    "rlt": Protocol(
        "rlt", "this package's: chunks of up to 8 steps, pictures as the policy needs them", chunk_length=8,
        image_size=None, render=None, seed=0,
    ),
    "openpi": Protocol("openpi", "openpi's LIBERO client: a new chunk every 5 steps, 256 pixels", chunk_length=5),
    "lerobot": Protocol(
        "lerobot", "lerobot-eval: 280 steps in libero_spatial, whole chunks, 360 pixels",
        {**SUITE_HORIZONS, "libero_spatial": 280}, episodes=10, image_size=360, seed=1000,
    ),
    "vla-eval": Protocol("vla-eval", "vla-evaluation-harness: whole chunks of the server, 256 pixels"),
}  # fmt: skip


def get_protocol(name: str) -> Protocol:
    """
    Look a protocol up.

    :param name: One of :data:`PROTOCOLS`.
    :return: The protocol.
    :raises ValueError: There is no such protocol.
    """
    if name not in PROTOCOLS:
        raise ValueError(f"Unknown protocol {name!r}; choose one of {', '.join(PROTOCOLS)}.")
    return PROTOCOLS[name]
