"""
The algorithms that a run can use: one file each in ``registered``, or an entry point of another package.

Imports neither torch nor Stable-Baselines3: an algorithm's class is imported when a model is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from pkgutil import iter_modules, resolve_name
from typing import Any

from rlt_sb3.experiment.signatures import Setting, settings_of

#: Entry points of other packages: ``name = "module:attribute"`` of an :class:`Algorithm`.
GROUP = "rlt.algorithms"
#: Settings of an algorithm's class that a run passes itself.
RESERVED = ("seed", "policy", "env", "tensorboard_log", "_init_setup_model")
#: Arguments of policies and buffers that an algorithm passes itself, besides those that it has itself.
PASSED = ("observation_space", "action_space", "lr_schedule", "n_envs", "gated")


def _class_defaults(n_envs: int, length: int) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Algorithm:
    """
    One choice of ``algorithm``, described for a run, its report and the command line.

    Whether there is a replay buffer is not asked here: a checkpoint holds ``model.replay_buffer`` where the model has
    one.

    :param label: its name in tables
    :param class_path: "module:Class"; the class has the interface of Stable-Baselines3's algorithms
    :param defaults: (number of environments, control steps per chunk) -> settings that the run's override
    :param policy: what the class takes as policy: one of its own names, or "module:Class"
    :param flat: it needs vectors as actions: chunks (C, d) are flattened to (C * d,)
    :param starts_at_vla: the untrained policy is meant to play the VLA's chunk
    :param learns_from_hooks: it stores what was executed where ``intervention`` or ``critical_phase`` replaced the
        policy's chunk; otherwise a run with these hooks is refused
    :param modes: choices of ``rollout.mode``, first the one that the class has by itself; "overlap" and "async" need a
        :class:`~rlt_sb3.common.chunk_off_policy.ChunkOffPolicyAlgorithm`
    :param check: raises ``ValueError`` for settings (of the right names and types, classes looked up, schedules made)
        that cannot work, so that a run refuses them before it starts simulators
    :param of_env: (environment that the class gets) -> settings that follow from it; the run's override them, and dicts
        are merged
    :param env_kwargs: (its settings) -> keyword arguments that the run's environment must be made with
    :param may_change: settings that a resumed run may change, "policy_kwargs.critic_precision" for one inside another
    :param on_resume: (model as it was saved, settings) -> applies those of them that its ``load`` does not take
    :param wrapper: "module:Class" of a wrapper of the vector environment in which the algorithm acts, with a method
        ``chunks(actions)``; its keyword arguments are settings as well. Whoever plays the model in an environment
        without the wrapper asks this method (:func:`~rlt_sb3.experiment.models.in_env`)
    :param color: of its result in the report, a name of Matplotlib's
    :param parts: setting that is a dict -> "module:Class" whose keyword arguments the dict holds; help, JSON schema and
        the check of types know them by this
    """

    label: str
    class_path: str
    defaults: Callable[[int, int], dict[str, Any]] = _class_defaults
    policy: str = "MultiInputPolicy"
    flat: bool = True
    starts_at_vla: bool = False
    learns_from_hooks: bool = False
    modes: tuple[str, ...] = ("sync",)
    check: Callable[[dict[str, Any]], None] | None = None
    of_env: Callable[[Any], dict[str, Any]] | None = None
    env_kwargs: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    may_change: tuple[str, ...] = ("device",)
    on_resume: Callable[[Any, dict[str, Any]], None] | None = None
    wrapper: str | None = None
    color: str = "tab:brown"
    parts: Mapping[str, str] = field(default_factory=dict)

    def fixed(self, settings: dict[str, Any]) -> dict[str, Any]:
        """
        Select the settings that a resumed run must keep.

        :param settings: keyword arguments
        :return: those that a resumed run must keep
        """
        kept: dict[str, Any] = {}
        for name, value in settings.items():
            free = [path.partition(".")[2] for path in self.may_change if path.partition(".")[0] == name]
            inner = (
                {key: entry for key, entry in value.items() if key not in free} if isinstance(value, dict) else value
            )
            if "" not in free and not (free and inner == {}):
                kept[name] = inner if free else value
        return kept

    def load_class(self) -> Any:
        """Return the class."""
        return resolve_name(self.class_path)

    def load_policy(self) -> Any:
        """Return what the class takes as policy."""
        return resolve_name(self.policy) if ":" in self.policy else self.policy

    def settings(self) -> list[Setting]:
        """Return the settings that its section of a configuration may hold."""
        return [*settings_of(self.load_class(), skip=RESERVED), *self._settings_of_wrapper()]

    def _settings_of_wrapper(self) -> list[Setting]:
        return [] if self.wrapper is None else settings_of(resolve_name(self.wrapper), skip=("env",))

    def split(self, settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """
        Tell the settings of the class from those of the wrapper.

        :param settings: keyword arguments of both
        :return: those of the class, those of the wrapper
        """
        theirs = {setting.name for setting in self._settings_of_wrapper()}
        of_wrapper = {name: value for name, value in settings.items() if name in theirs}
        return {name: value for name, value in settings.items() if name not in theirs}, of_wrapper

    def wrap(self, env: Any, settings: Mapping[str, Any]) -> Any:
        """
        Wrap an environment for the algorithm.

        :param env: Gymnasium vector environment whose actions are chunks
        :param settings: of the algorithm and its wrapper
        :return: the environment in which the algorithm acts
        """
        return env if self.wrapper is None else resolve_name(self.wrapper)(env, **self.split(settings)[1])

    def settings_of_parts(self) -> dict[str, list[Setting]]:
        """Return the settings inside each setting that is a dict, but not what the run or the algorithm passes."""
        passed = {*PASSED, *(setting.name for setting in settings_of(self.load_class()))}
        return {name: settings_of(resolve_name(path), skip=passed) for name, path in self.parts.items()}

    def device(self, settings: Mapping[str, Any]) -> Any:
        """
        Find the device that an algorithm uses.

        :param settings: keyword arguments
        :return: the device of its networks, "auto" for a GPU where there is one
        """
        return settings.get("device", self.defaults(1, 1).get("device", "auto"))


_registered: dict[str, Algorithm] = {}


def register_algorithm(name: str, algorithm: Algorithm) -> None:
    """
    Make an algorithm known to runs: as a choice of ``algorithm``, and as a section of configurations.

    :param name: name of the choice and of the section
    :param algorithm: what it is
    :raises ValueError: if the name is taken, or cannot be a section
    """
    if not name.isidentifier():
        raise ValueError(f"The name of an algorithm must be an identifier such as 'td3', got {name!r}.")
    if name in _registered:
        raise ValueError(f"There is an algorithm {name!r} already, {_registered[name].class_path}; take another name.")
    _registered[name] = algorithm


def algorithm_names() -> list[str]:
    """Return the choices of ``algorithm``: the registered ones, then those of entry points, without loading them."""
    own = sorted(_registered, key=lambda name: name != "rlt")  # this package's own one first
    return list(dict.fromkeys([*own, *sorted(point.name for point in entry_points(group=GROUP))]))


def get_algorithm(name: str) -> Algorithm:
    """
    Find a registered algorithm.

    :param name: one of :func:`algorithm_names`
    :raises ValueError: for another name; lists the choices
    """
    if name not in _registered:
        points = list(entry_points(group=GROUP, name=name))
        if not points:
            raise ValueError(f"Unknown algorithm {name!r}; choose one of {', '.join(algorithm_names())}.")
        found = points[0].load()
        if not isinstance(found, Algorithm):
            raise ValueError(
                f"The entry point {name} = {points[0].value!r} of the group {GROUP!r} must be an Algorithm, it is a "
                f"{type(found).__name__}."
            )
        register_algorithm(name, found)
    return _registered[name]


def labels() -> dict[str, str]:
    """Return for each algorithm its name in tables."""
    return {name: get_algorithm(name).label for name in algorithm_names()}


def proprio_settings(venv: Any) -> dict[str, Any]:
    """
    Describe the robot's proprioception to a policy with RLT's features, for ``of_env`` of an algorithm.

    :param venv: environment of Stable-Baselines3
    :return: settings of the algorithm
    """
    from rlt_sb3.common.vec_env import metadata_of
    from rlt_sb3.rlt.features import proprio_layout

    robot = metadata_of(venv).get("robot")
    layout = {} if robot is None else {"proprio_norm": proprio_layout(robot)}
    return {"policy_kwargs": {"features_extractor_kwargs": layout}}


# at the end: these modules call register_algorithm
for _module in iter_modules([str(Path(__file__).parent / "registered")]):
    import_module(f"rlt_sb3.experiment.registered.{_module.name}")
