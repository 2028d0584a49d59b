"""What RLT asks of its settings."""

from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.utils import FloatSchedule

from rlt_sb3.common.replay.buffer import ChunkReplayBuffer

ACTOR_Q = ("mean", "min", "first")
PRECISIONS = ("auto", "float32", "bfloat16")
REFERENCES = ("replace", "target")
#: Settings that belong to the networks: what ``load`` is given must not differ from what was saved.
ARCHITECTURE = ("n_critics", "actor_mode", "reference_input")


def check_settings(model: Any) -> None:
    """
    :param model: an RLT model whose settings are its attributes
    :raises ValueError: names the setting, what is allowed and what was given
    """

    def require(name: str, ok: Any, allowed: str) -> None:
        if not ok:
            raise ValueError(f"{name} must be {allowed}, got {getattr(model, name)!r}.")

    for name in ARCHITECTURE:
        made = model.policy_kwargs.get(name, getattr(model, name))
        require(name, getattr(model, name) == made, f"{made!r}, as the networks have it (make a new model for another)")
    assert isinstance(model.action_space, spaces.Box)
    require("gamma", 0.0 <= model.gamma <= 1.0, "in [0, 1] (discount per control step)")
    require("tau", 0.0 < model.tau <= 1.0, "in (0, 1]")
    require("actor_tau", model.actor_tau is None or 0.0 < model.actor_tau <= 1.0, "None (as tau) or in (0, 1]")
    require("batch_size", model.batch_size >= 1, ">= 1")
    require("buffer_size", model.buffer_size >= 1, ">= 1")
    require("learning_starts", model.learning_starts >= 0, ">= 0 (chunks)")
    require("n_steps", isinstance(model.n_steps, int) and model.n_steps >= 1, "an integer >= 1 (chunks)")
    require("policy_delay", isinstance(model.policy_delay, int) and model.policy_delay >= 1, "an integer >= 1")
    coefs = [_bc_coef(model, progress) for progress in (1.0, 0.5, 0.0)]
    require("bc_coef", min(coefs) >= 0.0, ">= 0, or a schedule (progress remaining, from 1 to 0, to a number >= 0)")
    require("bc_failure_weight", 0.0 <= model.bc_failure_weight <= 1.0, "in [0, 1]")
    require("reference_dropout", 0.0 <= model.reference_dropout <= 1.0, "in [0, 1] (a probability)")
    require("target_policy_noise", model.target_policy_noise >= 0.0, ">= 0")
    require("target_noise_clip", model.target_noise_clip >= 0.0, ">= 0")
    require("critic_warmup_updates", model.critic_warmup_updates >= 0, ">= 0")
    require("offline_ratio", 0.0 <= model.offline_ratio <= 1.0, "in [0, 1] (share of each batch)")
    rows, share = model.intervention_rows, model.offline_ratio
    require("intervention_rows", rows == 0 or (isinstance(rows, int) and rows >= 2), "0, or an integer >= 2")
    require("offline_ratio", share > 0.0 or rows == 0, "> 0, since intervention_rows is not 0")
    require("offline_data", model.offline_data or rows or share == 0.0, "a file, since offline_ratio is not 0")
    require("trial_share", 0.0 <= model.trial_share <= 1.0, "in [0, 1] (a share of the episodes)")
    starts = model.trial_share == 0.0 or model.learning_starts > 0
    require("learning_starts", starts, "> 0 with trial_share: the VLA's own chunks show what an actor has to beat")
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
    dims = model.action_space.shape[-1]
    for name, sign, holds in (("exploration_std", ">=", np.greater_equal), ("action_scale", ">", np.greater)):
        value = np.asarray(getattr(model, name), dtype=float)
        fits = value.shape in ((), (dims,)) and np.all(holds(value, 0))
        require(name, fits, f"{sign} 0, a number or {dims} numbers")
    if model.utd is not None and model.gradient_steps != -1:
        raise ValueError(
            f"gradient_steps={model.gradient_steps} and utd={model.utd} both set the number of updates: "
            "pass utd=None to use gradient_steps."
        )
    if model.replay_buffer_class is not None and not issubclass(model.replay_buffer_class, ChunkReplayBuffer):
        raise ValueError(
            f"replay_buffer_class must be a subclass of ChunkReplayBuffer (discounts per control step), "
            f"got {model.replay_buffer_class.__name__}."
        )


def policy_settings(given: dict[str, Any], token_input: bool, **settings: Any) -> dict[str, Any]:
    """
    :param given: the user's ``policy_kwargs``, which win
    :param token_input: see RLT
    :param settings: settings of RLT that belong to the policy
    :return: ``policy_kwargs``
    """
    merged = settings | given
    if not token_input:
        merged["features_extractor_kwargs"] = {"token_input": False} | (merged.get("features_extractor_kwargs") or {})
    return merged


def buffer_settings(model: Any) -> dict[str, Any]:
    """
    :param model: an RLT model
    :return: arguments of its replay buffer; the stride is the one at which the environment observes inside the chunks
    """
    try:
        stride = None if model.env is None else model.env.get_attr("obs_stride")[0]
    except AttributeError:
        stride = None
    return {
        "n_steps": model.n_steps,
        "gamma": model.gamma,
        "stride": stride,
        "overwrite_reference": model.intervention_ref == "replace",
        "keep_interventions": model.intervention_rows > 0,
    }


def _bc_coef(model: Any, progress: float) -> float:
    try:
        return FloatSchedule(model.bc_coef)(progress)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(
            f"bc_coef must be a number or a schedule (progress remaining, from 1 to 0, to a number), got "
            f"{model.bc_coef!r} ({error})."
        ) from error
