"""Models of a run: made, loaded, and asked for chunks, whichever registered algorithm they are of."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlt_sb3.experiment.algorithms import RESERVED, get_algorithm
from rlt_sb3.experiment.imports import resolve_classes
from rlt_sb3.experiment.schedules import resolve_schedules

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv

    from rlt_sb3.evaluation.evaluate import Predictor


def resolve_settings(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """
    The settings of a configuration as an algorithm takes them; those that cannot work are refused before a simulator
    starts.

    :param name: the algorithm
    :param settings: its keyword arguments; classes as "module:Class", schedules as ``{start: 20, end: 5}``
    :return: the keyword arguments with classes looked up and schedules made
    :raises ValueError: names what there is
    """
    algorithm = get_algorithm(name)
    known = [key for key in signature(algorithm.load_class().__init__).parameters if key not in ("self", *RESERVED)]
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise ValueError(f"{algorithm.label} has no setting {', '.join(unknown)}; there is {', '.join(known)}.")
    settings = resolve_schedules(resolve_classes(settings, name), name)
    if algorithm.check is not None:
        algorithm.check(settings)
    return settings


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
    kwargs = algorithm.defaults(venv.num_envs, length) | resolve_settings(name, settings)
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
        return algorithm.load_class().load(path, **kwargs)
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
