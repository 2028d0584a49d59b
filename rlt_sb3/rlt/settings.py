"""Checks of RLT's settings and of the spaces that it is given, which need no environment."""

from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.type_aliases import TrainFrequencyUnit

from rlt_sb3.common.chunk_off_policy import OVERLAP, check_names
from rlt_sb3.common.gated_policy import n_tasks_of
from rlt_sb3.common.replay.buffer import ChunkReplayBuffer
from rlt_sb3.common.schedules import ChunkSchedule, lowest_value
from rlt_sb3.common.vec_env import metadata_of
from rlt_sb3.rlt.gripper_critic import GripperCritic
from rlt_sb3.rlt.offset import OffsetSearch
from rlt_sb3.rlt.trained_token import TOKENS
from rlt_sb3.rlt.trained_vla import TrainVLA

OBSERVATION_KEYS = ("z_rl", "proprio", "vla_ref")


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_spaces(obs: Any, action: Any) -> None:
    """
    Refuse spaces that RLT cannot use.

    :param obs: observation space; Dict with ``z_rl`` (D,), ``proprio`` (P,) and ``vla_ref`` (C, d) is right
    :param action: action space; Box(-1, 1, (C, d)) is right
    :raises ValueError: if they are not, or do not fit together
    """
    if not isinstance(obs, spaces.Dict) or any(key not in obs.spaces for key in OBSERVATION_KEYS):
        raise ValueError(f"RLT needs a Dict observation with the keys {OBSERVATION_KEYS}, got {obs}.")
    shapes = {key: obs[key].shape for key in OBSERVATION_KEYS}
    if any(shapes[key] is None or len(shapes[key]) != 1 for key in ("z_rl", "proprio")):  # type: ignore[arg-type]
        raise ValueError(f"RLT needs vectors for z_rl and proprio, got the shapes {shapes}.")
    if not isinstance(action, spaces.Box) or len(action.shape) != 2:
        raise ValueError(f"RLT needs chunks as actions, Box(-1, 1, (C, d)), got {action}.")
    if shapes["vla_ref"] != action.shape:
        raise ValueError(
            f"vla_ref must have the shape of an action chunk, {action.shape}, got {shapes['vla_ref']}: "
            "build the environment with one chunk_length for both."
        )
    if not (np.all(action.low == -1.0) and np.all(action.high == 1.0)):
        raise ValueError(f"RLT needs actions in [-1, 1], got [{action.low.min()}, {action.high.max()}]: rescale them.")


def check_values(model: Any) -> None:
    """
    Check the settings of a model before it is set up.

    :param model: of RLT, with its spaces; not set up yet
    :raises ValueError: names the setting, what is allowed and what was given
    """

    def require(name: str, ok: Any, allowed: str) -> None:
        if not ok:
            raise ValueError(f"{name.lstrip('_')} must be {allowed}, got {getattr(model, name)!r}.")

    def integer(name: str, lowest: int, unit: str = "") -> None:
        value = getattr(model, name)
        require(name, _is_integer(value) and value >= lowest, f"an integer >= {lowest}{unit}")

    def number(name: str, allowed: str, fits: Callable[[Any], bool]) -> None:
        value = getattr(model, name)
        require(name, isinstance(value, Real) and fits(value), allowed)

    def between_0_and_1(name: str, meaning: str = "") -> None:
        number(name, f"in [0, 1]{meaning}", lambda value: 0.0 <= value <= 1.0)

    buffer_class = model.replay_buffer_class or ChunkReplayBuffer
    if not issubclass(buffer_class, ChunkReplayBuffer):
        raise ValueError(
            f"replay_buffer_class must be a subclass of ChunkReplayBuffer (discounts per control step), "
            f"got {buffer_class.__name__}."
        )
    check_names(model.policy_kwargs, model.policy_class, "RLT", "policy_kwargs")
    check_names(model.replay_buffer_kwargs, buffer_class, "RLT", "replay_buffer_kwargs")
    _check_training(model)
    make_search(model.policy_kwargs.get("offset_search", True))
    between_0_and_1("gamma", " (discount per control step)")
    number("tau", "in (0, 1]", lambda value: 0.0 < value <= 1.0)
    number("utd", "> 0 and finite (critic updates per row)", lambda value: 0.0 < value < np.inf)
    integer("batch_size", 1)
    integer("buffer_size", 1)
    integer("learning_starts", 0, " (chunks)")
    starts = model.gate is None or model.learning_starts > 0
    require("learning_starts", starts, "> 0 with a gate: the VLA's own chunks show what an actor has to beat")
    integer("n_steps", 1, " (chunks)")
    integer("_stats_window_size", 1, " (episodes)")
    integer("policy_delay", 1)
    _check_train_freq(model)
    for name in ("learning_rate", "bc_coef"):
        given, progress = getattr(model, name), "progress remaining, from 1 to 0, to a number"
        if name == "bc_coef" and isinstance(given, ChunkSchedule):
            require(name, given.start >= 0.0 <= given.end, "a ChunkSchedule of numbers >= 0")
            continue
        try:
            lowest = lowest_value(given)
        except (AssertionError, TypeError, ValueError) as error:
            raise ValueError(f"{name} must be a number or a schedule ({progress}), got {given!r}.") from error
        require(name, lowest >= 0.0, f">= 0, or a schedule ({progress} >= 0)")
    between_0_and_1("bc_failure_weight")
    between_0_and_1("reference_dropout", " (a probability)")
    for name in ("target_policy_noise", "target_noise_clip", "critic_warmup_updates"):
        number(name, ">= 0", lambda value: value >= 0)

    def is_pair(given: Any) -> bool:
        return isinstance(given, list | tuple) and [isinstance(one, Real) for one in given] == [True, True]

    bounds, shares = model.q_bounds, model.correction_range
    fits = bounds is None or (is_pair(bounds) and bounds[0] < bounds[1])
    require("q_bounds", fits, "None or (low, high), low < high")
    pays = float(metadata_of(model.env).get("reward_coef", 1.0))
    if bounds is not None and bounds[1] < pays != 1.0:
        raise ValueError(
            f"q_bounds={tuple(bounds)} would clip what a success pays, reward_coef={pays:g}: set q_bounds to "
            f"(0, {pays:g}), and bc_coef to {pays:g} times what it would be without reward_coef."
        )
    fits = is_pair(shares) and 0.0 <= shares[0] <= shares[1] < np.inf
    require("correction_range", fits, "(low, high), 0 <= low <= high < inf")
    assert isinstance(model.action_space, spaces.Box)
    dims = model.action_space.shape[-1]
    for name, sign, holds in (("exploration_std", ">=", np.greater_equal), ("action_scale", ">", np.greater)):
        given, auto = getattr(model, name), name == "action_scale"
        try:
            value = np.asarray(given, dtype=float)
        except (TypeError, ValueError):
            value = np.array(np.nan)
        fits = value.shape in ((), (dims,)) and bool(np.all(holds(value, 0)))
        allowed = f"{sign} 0, a number or {dims} numbers"
        require(name, fits or (auto and given == "auto"), f"{allowed}, or 'auto'" if auto else allowed)


def _check_train_freq(model: Any) -> None:
    """Refuse an unknown unit of ``train_freq``, and episodes of several environments."""
    frequency = model.train_freq if isinstance(model.train_freq, tuple) else (model.train_freq, "step")
    units = ("step", "episode", OVERLAP, *TrainFrequencyUnit)  # the last ones are those of a loaded model
    if len(frequency) != 2 or not _is_integer(frequency[0]) or frequency[0] < 1 or frequency[1] not in units:
        raise ValueError(
            "train_freq must be an integer >= 1 (vector steps), or (n, 'step'), (n, 'episode') or (n, 'overlap'), got "
            f"{model.train_freq!r}."
        )
    count = 1 if model.env is None else model.n_envs
    if frequency[1] in ("episode", TrainFrequencyUnit.EPISODE) and count > 1:
        raise ValueError(f"train_freq must be counted in steps with {count} environments, got {model.train_freq!r}.")


def make_search(given: Any) -> OffsetSearch | None:
    """
    Make the search for an offset.

    :param given: ``offset_search`` of the policy
    :return: the search; None: there is none
    :raises ValueError: for settings that do not exist or are out of range
    """
    if given is False:
        return None
    settings = {} if given is True else given
    check_names(settings, OffsetSearch, "RLT", "policy_kwargs.offset_search")
    return OffsetSearch(**settings)


def _check_training(model: Any) -> None:
    """Refuse unknown settings of what learns beside RLT, and a token or a VLA whose rows would lack what it reads."""
    check_names(model.policy_kwargs.get("gripper_critic"), GripperCritic, "RLT", "policy_kwargs.gripper_critic")
    token, vla = (model.policy_kwargs.get(name) for name in ("train_token", "train_vla"))
    offline = model.replay_buffer_kwargs.get("offline_data") is not None
    if n_tasks_of(model.observation_space) is not None:
        if token is not None or vla is not None:
            raise ValueError("train_token and train_vla have one copy for all tasks: leave out show_task.")
        if offline:
            raise ValueError("The rows of offline_data do not say which task they are of: leave out show_task.")
    if token is not None and offline:
        raise ValueError(
            "train_token needs the VLA's tokens in every row: leave out offline_data, whose rows have none."
        )
    if vla is None:
        return
    check_names(vla, TrainVLA, "RLT", "policy_kwargs.train_vla")
    TrainVLA(**vla)
    if offline:
        raise ValueError("train_vla needs pictures in every row: leave out offline_data, whose rows have none.")


def check_before_env(algorithm: type, settings: Mapping[str, Any]) -> None:
    """
    Check settings before there is an environment, on stand-in spaces.

    What depends on the environment's own spaces is checked when a model is made.

    :param algorithm: RLT
    :param settings: its keyword arguments, without policy and environment
    :raises ValueError: as :func:`check_values`, the buffer, the gate and the policy do
    """
    given = dict(settings)
    for name in ("policy_kwargs", "replay_buffer_kwargs"):
        if given.get(name) is not None and not isinstance(given[name], Mapping):
            raise ValueError(f"{name} must be a mapping, got {given[name]!r}.")
    with th.random.fork_rng(devices=[]):
        model: Any = algorithm("MultiInputPolicy", None, _init_setup_model=False, **(given | {"device": "cpu"}))
        sizes = [len(given[key]) for key in ("action_scale", "exploration_std") if isinstance(given.get(key), list)]
        model.action_space = spaces.Box(-1.0, 1.0, (4, (sizes or [2])[0]), np.float32)
        model.observation_space = spaces.Dict(
            z_rl=spaces.Box(-np.inf, np.inf, (2,)),
            proprio=spaces.Box(-np.inf, np.inf, (2,)),
            vla_ref=model.action_space,
        )
        check_values(model)
        of_buffer = {key: value for key, value in model.replay_buffer_kwargs.items() if key != "stride"}
        skipped = ("features_extractor_class", "features_extractor_kwargs", "train_vla")  # need the environment
        of_policy = {key: value for key, value in model.policy_kwargs.items() if key not in skipped}
        if isinstance(of_policy.get("train_token"), Mapping):
            stand_in = {"token_class": lambda _: th.nn.Linear(1, 1), "architecture": {}}
            of_policy["train_token"] = {**of_policy["train_token"], **stand_in}
            model.observation_space[TOKENS] = spaces.Box(-np.inf, np.inf, (1, 4), np.float16)
        made = {
            "replay_buffer_kwargs": lambda: (model.replay_buffer_class or ChunkReplayBuffer)(
                8, model.observation_space, model.action_space, device="cpu", **of_buffer
            ),
            "policy_kwargs": lambda: model.policy_class(
                model.observation_space, model.action_space, lambda _: 1e-3, **of_policy
            ),
        }
        for name, make in made.items():
            try:
                make()
            except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError) as error:
                reason = " ".join(str(error).split())
                raise ValueError(f"{name} cannot be used ({reason}): {settings.get(name)!r}.") from error
