"""Named sets of settings for RLT, other than its defaults."""

from typing import Any

#: The complete recipe of the RL Token paper (arXiv 2604.23073, equations 3 to 5 and appendix): every setting in which
#: RLT's defaults differ from the paper. The paper begins a row every second control step: make the environment with
#: ``obs_stride=2``. It gives no value for the pull, for the width of the Gaussian actor, or for gamma, tau, learning
#: rate and batch size. The pull here is a beta of 0.36 for 8 actions of 7 numbers; the others are RLT's own values.
PAPER: dict[str, Any] = {
    "utd": 5.0,
    "n_steps": 1,
    "policy_delay": 2,
    "critic_warmup_updates": 0,  # learning starts right after the warm-up
    "q_bounds": None,
    "gate": False,
    "bc_coef": 20.0,
    "reference_dropout": 0.5,
    "exploration_std": 0.05,
    "correction_range": (1.0, 1.0),
    "action_scale": 1.0,
    "target_policy_noise": 0.05,  # targets use sampled actions, with the actor's standard deviation
    "target_noise_clip": 1.0,  # 20 standard deviations: never reached
    # the paper: a person labels failures, which end the episode; here a time-out does
    "replay_buffer_kwargs": {"timeout_is_failure": True, "intervention_ref": "replace"},
    "policy_kwargs": {
        "net_arch": [256, 256],
        "actor_mode": "direct",
        "actor_std": 0.05,
        "offset_search": False,
        "act_with": "online",
        "candidates": 1,
        "n_critics": 2,
        "actor_q": "first",
        "layer_norm": False,
        "critic_precision": "float32",
    },
}
