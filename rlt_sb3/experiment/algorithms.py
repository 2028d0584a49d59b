"""The algorithms that a run can use: RLT, and as a baseline what the method is not, plain continuous control."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlt_sb3.experiment.imports import resolve_classes
from rlt_sb3.experiment.schedules import resolve_schedules

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv

    from rlt_sb3.evaluation.evaluate import Predictor

#: Settings that a run passes itself.
RESERVED = ("seed", "policy", "env", "tensorboard_log", "_init_setup_model", "self")


@dataclass(frozen=True)
class Algorithm:
    """
    One choice of ``algorithm``.

    :param label: its name in tables
    :param load_class: imports the class (of Stable-Baselines3's kind)
    :param defaults: settings for a number of environments and a chunk length, overridden by the run's
    :param flat: it needs vectors as actions: chunks (C, d) are flattened to (C * d,)
    :param starts_at_vla: the untrained policy is meant to play the VLA's chunk
    """

    label: str
    load_class: Callable[[], type]
    defaults: Callable[[int, int], dict[str, Any]]
    flat: bool
    starts_at_vla: bool


def _rlt() -> type:
    from rlt_sb3 import RLT

    return RLT


def _check_rlt(settings: dict[str, Any]) -> None:
    """Names inside the settings that are keyword arguments themselves; classes are looked up already."""
    from rlt_sb3.common.chunk_off_policy import check_names
    from rlt_sb3.common.policy_gate import PolicyGate
    from rlt_sb3.common.replay.buffer import ChunkReplayBuffer
    from rlt_sb3.rlt import RLTPolicy

    buffer = settings.get("replay_buffer_class") or ChunkReplayBuffer
    for key, owner in (("policy_kwargs", RLTPolicy), ("replay_buffer_kwargs", buffer), ("gate", PolicyGate)):
        check_names(settings.get(key), owner, "RLT", key)


def _tqc() -> type:
    from sb3_contrib import TQC

    return TQC


def _tqc_defaults(n_envs: int, length: int) -> dict[str, Any]:
    from rlt_sb3.common.flat_actions import WholeChunkReplayBuffer

    # SB3 counts discounts and updates per transition and per vector step: these are RLT's 0.99 per control step
    # and two updates per row
    return {
        "device": "cpu",
        "gamma": 0.99**length,
        "gradient_steps": 2 * n_envs,
        "buffer_size": 50_000,
        "replay_buffer_class": WholeChunkReplayBuffer,
        "learning_starts": 500,
    }


#: name -> algorithm
ALGORITHMS = {
    "rlt": Algorithm("RLT", _rlt, lambda n_envs, length: {"device": "cpu"}, flat=False, starts_at_vla=True),
    "tqc": Algorithm("TQC", _tqc, _tqc_defaults, flat=True, starts_at_vla=False),
}


def labels() -> dict[str, str]:
    """
    :return: algorithm -> its name in tables
    """
    return {name: algorithm.label for name, algorithm in ALGORITHMS.items()}


def get_algorithm(name: str) -> Algorithm:
    """
    :param name: a key of :data:`ALGORITHMS`
    :raises ValueError: for another name; lists the choices
    """
    if name not in ALGORITHMS:
        raise ValueError(f"Unknown algorithm {name!r}; choose one of {', '.join(ALGORITHMS)}.")
    return ALGORITHMS[name]


def check_settings(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """
    Refuse unknown settings of an algorithm before a simulator starts.

    :param name: the algorithm
    :param settings: its keyword arguments; classes as "module:Class", schedules as ``{start: 20, end: 5}``
    :return: the keyword arguments with classes looked up and schedules made
    :raises ValueError: names what there is
    """
    algorithm = get_algorithm(name)
    known = [key for key in signature(algorithm.load_class().__init__).parameters if key not in RESERVED]  # type: ignore[misc]
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise ValueError(f"{algorithm.label} has no setting {', '.join(unknown)}; there is {', '.join(known)}.")
    settings = resolve_classes(settings, name)
    if name == "rlt":
        _check_rlt(settings)
    if name == "tqc" and settings.get("n_steps", 1) != 1:
        raise ValueError(
            f"tqc.n_steps must be 1, got {settings['n_steps']!r}: Stable-Baselines3 has no returns over several "
            "transitions with observations in a dict."
        )
    return resolve_schedules(settings, name)


def make_vec_env(name: str, env: Any) -> VecEnv:
    """
    A run's environment in the form that an algorithm of Stable-Baselines3 takes.

    :param name: the algorithm
    :param env: Gymnasium vector environment
    """
    from rlt_sb3.common.vec_env import GymnasiumVecEnv, WholeEpisodeMonitor

    venv: VecEnv = GymnasiumVecEnv(env)
    if get_algorithm(name).flat:
        from rlt_sb3.common.flat_actions import FlatActions

        venv = FlatActions(venv)
    return WholeEpisodeMonitor(venv)


def make_model(name: str, venv: VecEnv, settings: dict[str, Any], seed: int) -> Any:
    """
    :param name: the algorithm
    :param venv: from :func:`make_vec_env`
    :param settings: keyword arguments of the algorithm
    :param seed: seed of the algorithm
    :return: an untrained model
    """
    algorithm = get_algorithm(name)
    assert venv.action_space.shape is not None
    length = venv.observation_space["vla_ref"].shape[0]  # type: ignore[index]
    kwargs = algorithm.defaults(venv.num_envs, length) | check_settings(name, settings)
    return algorithm.load_class()("MultiInputPolicy", venv, seed=seed, **kwargs)


def load_model(name: str, path: Path, **kwargs: Any) -> Any:
    """
    :param name: the algorithm that was used
    :param path: a saved model
    :param kwargs: of the class's ``load``
    :raises ValueError: if the file is no model, or one of another algorithm or architecture
    """
    algorithm = get_algorithm(name)
    try:
        return algorithm.load_class().load(path, **kwargs)  # type: ignore[attr-defined]
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be loaded as a model of {algorithm.label} ({error}). Give a file that this algorithm and "
            "version saved."
        ) from error


def check_fits(model: Predictor, env: Any, path: Path) -> None:
    """
    :param model: of :func:`as_predictor`
    :param env: Gymnasium vector environment that it is to play
    :param path: its file, for the message
    :raises ValueError: if it was trained on observations of other shapes (another VLA, RL token or chunk length)
    """
    space = (model.model if isinstance(model, _Chunks) else model).observation_space  # type: ignore[attr-defined]
    theirs, ours = ({key: box.shape for key, box in s.items()} for s in (space, env.single_observation_space))
    if theirs != ours:
        raise ValueError(
            f"{path} was trained on observations of the shapes {theirs}, the environment has {ours}: chunk length, VLA "
            "and RL token must be those of its training."
        )


class _Chunks:
    """Gives a model with flat actions the chunks of its environment."""

    def __init__(self, model: Predictor):
        self.model = model

    def predict(self, observation: Any, *, deterministic: bool = False) -> tuple[np.ndarray, Any]:
        """As the model's own, with actions of the form of ``vla_ref``."""
        actions, state = self.model.predict(observation, deterministic=deterministic)
        return actions.reshape(np.shape(observation["vla_ref"])), state


def as_predictor(name: str, model: Predictor) -> Predictor:
    """
    :param name: the algorithm
    :param model: its model
    :return: what plays chunks (N, C, d)
    """
    return _Chunks(model) if get_algorithm(name).flat else model
