"""Bridge from a Gymnasium ``VectorEnv`` to the ``VecEnv`` of Stable-Baselines3."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.type_aliases import RolloutReturn
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, VecMonitor
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from rlt_sb3.common.chunk_outcome import ChunkOutcome

#: Keys that describe the chunk just played for every sub-environment, also if its episode has just ended
_CHUNK_KEYS = ("inner_obs", "inner_count")

#: Keys that a SAME_STEP vector env adds to ``infos`` for the sub-environments that just finished
_FINAL_KEYS = frozenset({"final_obs", "final_info", "_final_obs", "_final_info"})


class GymnasiumVecEnv(VecEnv):
    """
    Makes a Gymnasium ``VectorEnv`` in ``SAME_STEP`` mode usable by Stable-Baselines3.

    Stable-Baselines3 expects a ``VecEnv`` to reset a finished sub-environment inside the same step, to return the
    observation after that reset, and to put the last observation of the finished episode in
    ``info["terminal_observation"]``. Of Gymnasium's modes only ``AutoresetMode.SAME_STEP`` does this. ``NEXT_STEP``
    would store an invalid transition (ignored action, reward 0) after every episode.

    Each info has ``outcome``, the :class:`~rlt_sb3.common.chunk_outcome.ChunkOutcome` of the chunk just played.

    It keeps no episode statistics: wrap it in ``stable_baselines3.common.vec_env.VecMonitor(venv,
    info_keywords=("is_success",))``.

    :param env: vector environment whose ``metadata["autoreset_mode"]`` is ``AutoresetMode.SAME_STEP``, with a flat
        observation space (``Box``, ... or a ``Dict`` of them)
    :raises TypeError: if ``env`` is no ``VectorEnv``
    :raises ValueError: if the autoreset mode is not SAME_STEP or the observation space is nested
    """

    def __init__(self, env: VectorEnv):
        if not isinstance(env, VectorEnv):
            raise TypeError(
                f"GymnasiumVecEnv needs a gymnasium.vector.VectorEnv but got {type(env).__name__}: "
                "make one with gymnasium.make_vec(id, num_envs=n)."
            )
        mode = (env.metadata or {}).get("autoreset_mode")
        if mode not in (AutoresetMode.SAME_STEP, AutoresetMode.SAME_STEP.value):
            raise ValueError(
                f"GymnasiumVecEnv needs a vector env with autoreset mode {AutoresetMode.SAME_STEP} but got {mode!r}: "
                "build it with autoreset_mode=AutoresetMode.SAME_STEP."
            )
        space = env.single_observation_space
        subspaces = space.spaces.values() if isinstance(space, spaces.Dict) else ()
        if isinstance(space, spaces.Tuple) or any(isinstance(sub, spaces.Dict | spaces.Tuple) for sub in subspaces):
            raise ValueError(
                f"Nested observation spaces are not supported by Stable-Baselines3, got {space}: flatten it."
            )
        # before super().__init__(), which asks for the attribute `render_mode`
        self.env = env
        self._actions: np.ndarray | None = None
        self._closed = False
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)

    @property
    def spec(self) -> Any:
        """Gymnasium's ``EnvSpec``, or None (``VecMonitor`` writes its id in the header of the CSV file)."""
        return getattr(self.env.unwrapped, "spec", None)

    def reset(self) -> VecEnvObs:
        """
        Reset all sub-environments. Seeds and options given by ``seed()`` and ``set_options()`` are passed once.

        :return: first observations, batched; the infos are in ``self.reset_infos``
        """
        seeds = (
            None if all(seed is None for seed in self._seeds) else [None if s is None else int(s) for s in self._seeds]
        )
        options = self._options[0] if self._options else {}
        if any(other != options for other in self._options):
            raise ValueError(
                "A Gymnasium vector env takes one options dict for all sub-environments, got different ones."
            )
        obs, infos = self.env.reset(seed=seeds, options=options or None)  # type: ignore[arg-type]
        self._actions = None  # a step that was interrupted is given up
        self.reset_infos = [self._info_of(infos, index) for index in range(self.num_envs)]
        self._reset_seeds()
        self._reset_options()
        return self._copy_obs(obs)

    def step_async(self, actions: np.ndarray) -> None:
        """
        Begin one vector step.

        If the vector env's own step has two parts (``step_async`` and ``step_wait``, as those of this package and
        Gymnasium's ``AsyncVectorEnv``), its simulators play from now on. Else the actions are kept until
        :meth:`step_wait`.

        :param actions: one action per sub-environment, (num_envs, C, d)
        """
        if splits_step(self.env):
            self.env.step_async(actions)  # type: ignore[attr-defined]
        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        """
        End the vector step.

        :return: observations (after the reset for finished sub-environments), rewards float32 (num_envs,),
            dones bool (num_envs,), list of info dicts
        :raises RuntimeError: if the vector env does not return ``final_obs`` / ``final_info`` for a finished episode
        """
        actions, self._actions = self._actions, None
        if actions is None:
            raise RuntimeError("step_wait() was called before step_async(actions).")
        result = self.env.step_wait() if splits_step(self.env) else self.env.step(actions)  # type: ignore[attr-defined]
        obs, rewards, terminations, truncations, infos = result
        rewards, dones = np.array(rewards, dtype=np.float32), np.logical_or(terminations, truncations)
        info_list: list[dict[str, Any]] = []
        for index in range(self.num_envs):
            info = self._info_of(infos, index)
            if dones[index]:
                # In SAME_STEP mode the top-level keys already belong to the next episode
                self.reset_infos[index] = info
                of_the_chunk = {key: info.pop(key) for key in _CHUNK_KEYS if key in info}
                info = self._final_info(infos, index) | of_the_chunk
                info["terminal_observation"] = self._final_obs(infos, index)
            # Gymnasium allows both flags at once; for bootstrapping the termination decides
            info["TimeLimit.truncated"] = bool(truncations[index] and not terminations[index])
            info["outcome"] = ChunkOutcome.from_info(info, actions[index], rewards[index])
            info_list.append(info)
        return self._copy_obs(obs), rewards, np.array(dones, dtype=bool), info_list

    def close(self) -> None:
        """Close the vector env (once)."""
        if not self._closed:
            self._closed = True
            self.env.close()

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """
        Get an attribute of the vector env or its wrappers, otherwise of the sub-environments.

        An attribute of the vector env is the same object for every index. Sub-environments are asked if the vector env
        gives access to them (``get_attr``).

        :param attr_name: name of the attribute
        :param indices: which sub-environments; all by default
        :return: one value per index
        :raises AttributeError: if neither has it
        """
        chosen = list(self._get_indices(indices))
        for level in (self.env, self.env.unwrapped):
            if hasattr(level, attr_name):
                return [getattr(level, attr_name)] * len(chosen)
        getter = getattr(self.env.unwrapped, "get_attr", None)
        if getter is None:
            raise AttributeError(f"{type(self.env.unwrapped).__name__} has no attribute {attr_name!r}.")
        values = getter(attr_name)
        return [values[index] for index in chosen]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """
        Set an attribute of the vector env, otherwise of the sub-environments.

        It is looked for as in :meth:`get_attr`.

        :param attr_name: name of the attribute
        :param value: new value
        :param indices: which sub-environments; must be all of them for an attribute of the vector env
        :raises ValueError: if ``indices`` is a part only, which a vector env cannot do
        :raises AttributeError: if the vector env has no such attribute and gives no access to sub-environments
        """
        if sorted(self._get_indices(indices)) != list(range(self.num_envs)):
            raise ValueError(f"set_attr({attr_name!r}) works on all {self.num_envs} sub-environments, got {indices}.")
        for level in (self.env, self.env.unwrapped):
            if hasattr(level, attr_name):
                setattr(level, attr_name, value)
                return
        setter = getattr(self.env.unwrapped, "set_attr", None)
        if setter is None:
            raise AttributeError(f"{type(self.env.unwrapped).__name__} has no attribute {attr_name!r}.")
        setter(attr_name, value)

    def env_method(self, method_name: str, *method_args, indices: VecEnvIndices = None, **method_kwargs) -> list[Any]:
        """
        Call a method of the vector env or its wrappers, otherwise of the sub-environments.

        A method of the vector env is called once, and every index gets the same result. Sub-environments are asked if
        the vector env can (``call``).

        :param method_name: name of the method
        :param method_args: its arguments
        :param indices: whose results to return; the call is made for all sub-environments
        :param method_kwargs: its keyword arguments
        :return: one result per index
        :raises AttributeError: if neither has it
        """
        chosen = list(self._get_indices(indices))
        method = getattr(self.env, method_name, None) or getattr(self.env.unwrapped, method_name, None)
        if callable(method):
            return [method(*method_args, **method_kwargs)] * len(chosen)
        call = getattr(self.env.unwrapped, "call", None)
        if call is None:
            raise AttributeError(f"{type(self.env.unwrapped).__name__} has no method {method_name!r}.")
        results = call(method_name, *method_args, **method_kwargs)
        return [results[index] for index in chosen]

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: VecEnvIndices = None) -> list[bool]:
        """
        Return False for all: wrappers of single environments cannot be seen through a vector env.

        :param wrapper_class: not used
        :param indices: which sub-environments
        :return: one False per index
        """
        return [False for _ in self._get_indices(indices)]

    def get_images(self) -> Sequence[np.ndarray | None]:
        """
        Draw all sub-environments.

        :return: one RGB picture (H, W, 3) per sub-environment; None where there is none
        """
        frames: Any = self.env.render()
        if frames is None:
            return [None] * self.num_envs
        return list(frames)

    def _copy_obs(self, obs: Any) -> VecEnvObs:
        # fresh arrays: SB3 keeps `_last_obs` while the env may go on writing to a shared buffer
        if isinstance(self.observation_space, spaces.Dict):
            return {key: np.array(obs[key]) for key in self.observation_space.spaces}
        return np.array(obs)

    def _info_of(self, infos: Mapping[str, Any], index: int) -> dict[str, Any]:
        return _unbatch(infos, index, self.num_envs, skip=_FINAL_KEYS)

    def _final_info(self, infos: Mapping[str, Any], index: int) -> dict[str, Any]:
        final = _present(infos, "final_info", index)
        if isinstance(final, Mapping):
            return _unbatch(final, index, self.num_envs)
        if final is not None and final[index] is not None:  # older layout: one dict per sub-environment
            return dict(final[index])
        raise RuntimeError(_missing("final_info", index))

    def _final_obs(self, infos: Mapping[str, Any], index: int) -> Any:
        final = _present(infos, "final_obs", index)
        if isinstance(final, Mapping):  # batched dict, as `VectorEnv._add_info` builds it
            value: Any = {key: final[key][index] for key in final if not key.startswith("_")}
        else:
            value = None if final is None else final[index]
        if value is None:
            raise RuntimeError(_missing("final_obs", index))
        if isinstance(self.observation_space, spaces.Dict):
            return {key: np.array(value[key], dtype=sub.dtype) for key, sub in self.observation_space.spaces.items()}
        return np.array(value, dtype=self.observation_space.dtype)


class WholeEpisodeMonitor(VecMonitor):
    """
    A ``VecMonitor`` that ignores episodes whose worker had to be restarted.

    Those episodes are no failures of the policy. Stable-Baselines3's ``VecMonitor`` would count them in
    ``rollout/success_rate``, ``ep_rew_mean`` and ``ep_len_mean``.

    :param venv: a :class:`GymnasiumVecEnv` (or wrapper of one) whose infos have ``is_success`` where an episode ends
    """

    def __init__(self, venv: VecEnv):
        super().__init__(venv, info_keywords=("is_success",))

    def step_wait(self) -> VecEnvStepReturn:
        """Step as ``VecMonitor`` does, without ``episode`` and ``is_success`` in the infos of broken episodes."""
        obs, rewards, dones, infos = super().step_wait()
        for info in infos:
            if info["outcome"].broken:
                info.pop("episode", None)
                info.pop("is_success", None)
        return obs, rewards, dones, infos


class CollectingVecEnv(VecEnv):
    """Environments in other processes, where copies of the learner's model choose the chunks (asynchronously)."""

    @abstractmethod
    def collect(self, model: Any, callback: BaseCallback, log_interval: int | None) -> RolloutReturn:
        """
        Wait for the next vector step of one of the processes, and store it.

        :param model: the learner
        :param callback: see Stable-Baselines3's ``collect_rollouts``
        :param log_interval: likewise
        :return: likewise
        """


class WorkDuringStep(VecEnvWrapper):
    """
    Calls a function while the environments play the first step, between ``step_async`` and ``step_wait``.

    :param venv: environment
    :param work: called once
    """

    def __init__(self, venv: VecEnv, work: Callable[[], None]):
        super().__init__(venv)
        self._work: Callable[[], None] | None = work

    def reset(self) -> VecEnvObs:
        """Reset the environment and return the first observations."""
        return self.venv.reset()

    def step_wait(self) -> VecEnvStepReturn:
        """Call the function, then wait for the environments."""
        work, self._work = self._work, None
        if work is not None:
            work()
        return self.venv.step_wait()


def splits_step(env: VectorEnv) -> bool:
    """
    Tell whether the step of a vector env has two parts.

    A class (or object) whose ``step`` alone is overridden does something there that the two parts would leave out.

    :param env: vector env
    :return: whether its ``step`` is ``step_async`` and then ``step_wait``
    """
    for level in (env, *type(env).__mro__):
        if "step_async" in vars(level):
            return hasattr(level, "step_wait")
        if "step" in vars(level):
            return False
    return False


def metadata_of(venv: VecEnv | None) -> Mapping[str, Any]:
    """
    Read the metadata of an environment.

    :param venv: an environment, or None
    :return: its ``metadata``, e.g. "robot" and "fingerprint"; empty if the environment gives no access to it
    """
    try:
        return ({} if venv is None else venv.get_attr("metadata")[0]) or {}
    except (AttributeError, NotImplementedError):
        return {}


def _missing(key: str, index: int) -> str:
    return (
        f"Sub-environment {index} finished an episode but infos[{key!r}] has nothing for it. "
        "A SAME_STEP vector env must return it; without it the value of the last state cannot be learned."
    )


def _present(infos: Mapping[str, Any], key: str, index: int) -> Any:
    """Return the value of ``infos[key]``, or None if the key is absent or masked out for this sub-environment."""
    mask = infos.get("_" + key)
    if key not in infos or (mask is not None and not mask[index]):
        return None
    return infos[key]


def _unbatch(infos: Mapping[str, Any], index: int, num_envs: int, skip: Iterable[str] = ()) -> dict[str, Any]:
    """
    Take one sub-environment's dict out of Gymnasium's vector info (dict of arrays, ``_key`` masks, nested dicts).

    :param infos: vector info
    :param index: which sub-environment
    :param num_envs: how many there are
    :param skip: keys to leave out
    :return: the info dict of that sub-environment; NumPy scalars as Python scalars, arrays copied
    """
    info: dict[str, Any] = {}
    for key, value in infos.items():
        if key in skip or (key.startswith("_") and key[1:] in infos):
            continue
        mask = infos.get("_" + key)
        if mask is not None and not mask[index]:
            continue
        if isinstance(value, Mapping):
            info[key] = _unbatch(value, index, num_envs)
            continue
        if isinstance(value, np.ndarray | list | tuple) and len(value) == num_envs:
            value = value[index]
        if isinstance(value, np.generic):
            value = value.item()
        info[key] = value.copy() if isinstance(value, np.ndarray) else value
    return info
