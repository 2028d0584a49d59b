"""Makes and loads the models of a run, and asks them for chunks, whatever their registered algorithm."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlt_sb3.common.errors import unknown_settings
from rlt_sb3.experiment.algorithms import get_algorithm
from rlt_sb3.experiment.imports import resolve_classes
from rlt_sb3.experiment.schedules import resolve_schedules
from rlt_sb3.experiment.signatures import Setting, check_types, is_schedule

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv

    from rlt_sb3.evaluation.evaluate import Predictor


def resolve_settings(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """
    Convert the settings of a configuration into arguments of the algorithm.

    Settings that cannot work are refused before a simulator starts.

    :param name: the algorithm
    :param settings: its keyword arguments; classes as "module:Class", schedules as ``{start: 20, end: 5}``
    :return: the keyword arguments with classes looked up and schedules made
    :raises ValueError: for an unknown setting, a value of a wrong type or out of range
    """
    algorithm = get_algorithm(name)
    known = algorithm.settings()
    _check_names(algorithm.label, settings, known)
    scheduled = [setting.name for setting in known if is_schedule(setting.hint)]
    settings = resolve_schedules(resolve_classes(settings, name), name, scheduled)
    check_types(known, settings, name)
    for part, inner in algorithm.settings_of_parts().items():
        # a class of the user's own in its place may have other settings
        if isinstance(settings.get(part), dict) and f"{part.removesuffix('_kwargs')}_class" not in settings:
            _check_names(algorithm.label, settings[part], inner, f"{part}.")
            check_types(inner, settings[part], f"{name}.{part}")
    for setting in known:  # a file has lists only, Stable-Baselines3 wants (1, "episode")
        if setting.takes_tuple and isinstance(settings.get(setting.name), list):
            settings[setting.name] = tuple(settings[setting.name])
    if algorithm.check is not None:
        algorithm.check(settings)
    return settings


def check_names(name: str, settings: Mapping[str, Any]) -> None:
    """
    Refuse misspelled settings of an algorithm that a configuration gives but does not use.

    Values are not looked at: another run may have the environment or the machine that they need.

    :param name: the algorithm
    :param settings: its keyword arguments, as a configuration has them
    :raises ValueError: names the unknown ones and lists those that there are
    """
    algorithm = get_algorithm(name)
    _check_names(algorithm.label, settings, algorithm.settings())
    for part, inner in algorithm.settings_of_parts().items():
        if isinstance(settings.get(part), dict) and f"{part.removesuffix('_kwargs')}_class" not in settings:
            _check_names(algorithm.label, settings[part], inner, f"{part}.")


def _check_names(label: str, given: Collection[str], known: list[Setting], prefix: str = "") -> None:
    names = [setting.name for setting in known]
    unknown = [prefix + name for name in given if name not in names]
    if unknown:
        raise ValueError(unknown_settings(label, unknown, names))


def make_vec_env(name: str, env: Any, settings: Mapping[str, Any] | None = None) -> VecEnv:
    """
    Wrap a run's environment for an algorithm of Stable-Baselines3.

    :param name: the algorithm
    :param env: Gymnasium vector environment
    :param settings: of the algorithm; only those of its wrapper are read
    """
    from rlt_sb3.common.vec_env import GymnasiumVecEnv, WholeEpisodeMonitor

    algorithm = get_algorithm(name)
    venv: VecEnv = GymnasiumVecEnv(algorithm.wrap(env, settings or {}))
    if algorithm.flat:
        from rlt_sb3.common.flat_actions import FlatActions

        venv = FlatActions(venv)
    return WholeEpisodeMonitor(venv)


def make_model(name: str, venv: VecEnv, settings: dict[str, Any], seed: int) -> Any:
    """
    Make a new model.

    :param name: the algorithm
    :param venv: from :func:`make_vec_env`
    :param settings: keyword arguments of the algorithm
    :param seed: seed of the algorithm
    :return: an untrained model
    """
    algorithm = get_algorithm(name)
    assert venv.action_space.shape is not None
    length = venv.observation_space["vla_ref"].shape[0]  # type: ignore[index]
    kwargs = algorithm.defaults(venv.num_envs, length) | algorithm.split(resolve_settings(name, settings))[0]
    if algorithm.of_env is not None:
        kwargs = _merged(algorithm.of_env(venv), kwargs)
    return algorithm.load_class()(algorithm.load_policy(), venv, seed=seed, **kwargs)


def _merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Merge two nested dicts; entries of ``over`` win."""
    both = {
        key: _merged(under[key], over[key])
        for key in under.keys() & over.keys()
        if isinstance(under[key], dict) and isinstance(over[key], dict)
    }
    return under | over | both


def load_model(name: str, path: Path, **kwargs: Any) -> Any:
    """
    Load a saved model.

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
    Refuse a model that was trained on observations of other shapes.

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
        """Predict as the model does, and give the actions the shape of ``vla_ref``."""
        actions, state = self.model.predict(observation, deterministic=deterministic)
        return actions.reshape(np.shape(observation["vla_ref"])), state


class _Wrapped:
    """Gives a model that acts in a wrapper the chunks that the wrapper makes of its actions."""

    def __init__(self, model: Predictor, wrapper: Any):
        self.model, self.wrapper = model, wrapper

    def predict(self, observation: Any, *, deterministic: bool = False) -> tuple[np.ndarray, Any]:
        """Predict as the model does; the observation must be the one that the environment returned last."""
        actions, state = self.model.predict(observation, deterministic=deterministic)
        return self.wrapper.chunks(actions.reshape(self.wrapper.action_space.shape)), state


def as_predictor(name: str, model: Predictor) -> Predictor:
    """
    Adapt a model so that an evaluation can play it.

    :param name: the algorithm
    :param model: its model
    :return: a model whose ``predict`` gives chunks (N, C, d), or, if the algorithm has a wrapper, what :func:`in_env`
        takes
    """
    algorithm = get_algorithm(name)
    return _Chunks(model) if algorithm.flat and algorithm.wrapper is None else model


def in_env(name: str, model: Predictor, env: Any, settings: Mapping[str, Any]) -> Predictor:
    """
    Let a model play an environment as a run's evaluation does.

    :param name: the algorithm
    :param model: of :func:`as_predictor`
    :param env: Gymnasium vector environment whose actions are chunks; the model can play no other one
    :param settings: of the algorithm
    :return: a model whose ``predict`` gives chunks (N, C, d)
    """
    algorithm = get_algorithm(name)
    return model if algorithm.wrapper is None else _Wrapped(model, algorithm.wrap(env, settings))
