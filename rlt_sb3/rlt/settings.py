"""What RLT asks of its settings."""

from typing import Any

import numpy as np
from gymnasium import spaces

ACTOR_Q = ("mean", "min", "first")
PRECISIONS = ("auto", "float32", "bfloat16")
REFERENCES = ("replace", "target")


def check_settings(model: Any) -> None:
    """
    :param model: an RLT model whose settings are its attributes
    :raises ValueError: names the setting, what is allowed and what was given
    """

    def require(name: str, ok: Any, allowed: str) -> None:
        if not ok:
            raise ValueError(f"{name} must be {allowed}, got {getattr(model, name)!r}.")

    assert isinstance(model.action_space, spaces.Box)
    require("gamma", 0.0 <= model.gamma <= 1.0, "in [0, 1] (discount per control step)")
    require("tau", 0.0 < model.tau <= 1.0, "in (0, 1]")
    require("batch_size", model.batch_size >= 1, ">= 1")
    require("buffer_size", model.buffer_size >= 1, ">= 1")
    require("learning_starts", model.learning_starts >= 0, ">= 0 (chunks)")
    require("n_steps", isinstance(model.n_steps, int) and model.n_steps >= 1, "an integer >= 1 (chunks)")
    require("policy_delay", isinstance(model.policy_delay, int) and model.policy_delay >= 1, "an integer >= 1")
    require("bc_coef", model.bc_coef >= 0.0, ">= 0")
    require("reference_dropout", 0.0 <= model.reference_dropout <= 1.0, "in [0, 1] (a probability)")
    require("target_policy_noise", model.target_policy_noise >= 0.0, ">= 0")
    require("target_noise_clip", model.target_noise_clip >= 0.0, ">= 0")
    require("critic_warmup_updates", model.critic_warmup_updates >= 0, ">= 0")
    require("offline_ratio", 0.0 <= model.offline_ratio <= 1.0, "in [0, 1] (share of each batch)")
    require("offline_data", model.offline_data or model.offline_ratio == 0.0, "a file, since offline_ratio is not 0")
    require("trial_share", 0.0 <= model.trial_share <= 1.0, "in [0, 1] (a share of the episodes)")
    require("trial_window", isinstance(model.trial_window, int) and model.trial_window >= 1, "an integer >= 1")
    require("actor_starts", model.actor_starts >= 0, ">= 0")
    require("actor_q", model.actor_q in ACTOR_Q, f"one of {ACTOR_Q}")
    require("intervention_ref", model.intervention_ref in REFERENCES, f"one of {REFERENCES}")
    require("critic_precision", model.critic_precision in PRECISIONS, f"one of {PRECISIONS}")
    require("utd", model.utd is None or model.utd > 0, "> 0, or None to use gradient_steps")
    subset, bounds = model.n_target_critics, model.q_bounds
    require("n_target_critics", subset is None or 1 <= subset <= model.n_critics, f"None or 1..{model.n_critics}")
    require(
        "q_bounds",
        bounds is None or (len(bounds) == 2 and bounds[0] < bounds[1]),
        "None or (low, high), low < high",
    )
    std, dims = np.asarray(model.exploration_std, dtype=float), model.action_space.shape[-1]
    require("exploration_std", std.shape in ((), (dims,)) and np.all(std >= 0), f">= 0, a number or {dims} numbers")
    if model.utd is not None and model.gradient_steps != -1:
        raise ValueError(
            f"gradient_steps={model.gradient_steps} and utd={model.utd} both set the number of updates: "
            "pass utd=None to use gradient_steps."
        )
