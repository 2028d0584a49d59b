"""A checker for chunked vector environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rlt_gym.core.split_step import splits_step


def check_vector_env(env: VectorEnv, n_steps: int = 60, seed: int = 0) -> None:
    """
    Check what RLT and Gymnasium 1.x expect of a chunked vector env in SAME_STEP mode.

    Gymnasium's own checker takes single environments only.

    Two equal rollouts with random chunks are made. Checked are: the spaces, types and shapes; that every observation
    (final ones too) lies in its space; that returned objects are new ones; ``final_obs``/``final_info`` and their
    masks; that equal seeds give equal rollouts, also where ``step_async`` and ``step_wait`` take the place of ``step``;
    ``step_rewards`` and ``chunk_steps``; that NaN and wrong shapes are refused with ``ValueError`` and the env goes on
    afterwards.

    :param env: vector env; it is reset, stepped and left open
    :param n_steps: chunks per rollout; at least one episode must end within them, so give the env a short horizon
    :param seed: seed of the rollouts
    :raises AssertionError: names the first rule that is broken
    """
    _require(isinstance(env, VectorEnv), f"expected a gymnasium.vector.VectorEnv, got {type(env).__name__}")
    mode = env.metadata.get("autoreset_mode")
    _require(
        mode is AutoresetMode.SAME_STEP, f"metadata['autoreset_mode'] must be AutoresetMode.SAME_STEP, got {mode!r}"
    )
    for kind in ("observation", "action"):
        single, batched = getattr(env, f"single_{kind}_space"), getattr(env, f"{kind}_space")
        _require(batch_space(single, env.num_envs) == batched, f"{kind}_space is not the batch of single_{kind}_space")
    action_space = env.single_action_space
    _require(
        isinstance(action_space, spaces.Box) and len(action_space.shape) == 2,
        f"the action must be a chunk, Box of shape (C, d), got {action_space}",
    )
    env.action_space.seed(seed)
    actions = [np.asarray(env.action_space.sample()) for _ in range(n_steps)]
    first = _check_rollout(env, actions, seed)
    second = _check_rollout(env, actions, seed, in_parts=splits_step(env))
    for index, (left, right) in enumerate(zip(first, second, strict=True)):
        _require(_equal(left, right), f"two rollouts with the same seed and actions differ, first at step {index}")
    _check_bad_actions(env)


def _check_rollout(env: Any, actions: Sequence[np.ndarray], seed: int, in_parts: bool = False) -> list[Any]:
    """One rollout; returns (obs, rewards, terminations, truncations) of each step, the reset first."""
    obs, infos = env.reset(seed=seed)
    _require(obs in env.observation_space, "the observation of reset() is not in observation_space")
    _require(isinstance(infos, dict), f"infos must be a dict, got {type(infos).__name__}")
    rollout: list[Any] = [(_copy(obs),)]
    kept, kept_copy, ended = (obs, infos), _copy((obs, infos)), 0
    for action in actions:
        if in_parts:
            env.step_async(action.copy())
        result = env.step_wait() if in_parts else env.step(action.copy())
        _require(len(result) == 5, f"step() must return five values, got {len(result)}")
        obs, rewards, terminations, truncations, infos = result
        _require(_equal(kept, kept_copy), "step() changed arrays returned by the call before: return new objects")
        _require(obs in env.observation_space, "an observation of step() is not in observation_space")
        for name, value in (("terminations", terminations), ("truncations", truncations)):
            ok = isinstance(value, np.ndarray) and value.dtype == bool and value.shape == (env.num_envs,)
            _require(ok, f"{name} must be a bool array of shape ({env.num_envs},)")
        ok = isinstance(rewards, np.ndarray) and rewards.dtype.kind == "f" and rewards.shape == (env.num_envs,)
        _require(ok, f"rewards must be a float array of shape ({env.num_envs},)")
        for index in range(env.num_envs):
            done = bool(terminations[index] or truncations[index])
            _check_sub_env(env, index, done, float(rewards[index]), bool(terminations[index]), infos)
            ended += done
        rollout.append(_copy((obs, rewards, terminations, truncations)))
        kept, kept_copy = (obs, infos), _copy((obs, infos))
    _require(ended > 0, f"no episode ended within {len(actions)} chunks: give more steps or a shorter horizon")
    return rollout


def _check_sub_env(
    env: VectorEnv, index: int, done: bool, reward: float, terminated: bool, infos: Mapping[str, Any]
) -> None:
    for key in ("final_obs", "final_info"):
        there = key in infos and bool(np.asarray(infos.get(f"_{key}", np.zeros(env.num_envs)))[index])
        _require(there or not done, f"sub-environment {index} finished but infos has no {key!r} (or no mask) for it")
        _require(done or not there, f"infos has {key!r} for sub-environment {index}, which did not finish")
    executed = infos["final_info"] if done else infos
    if done:
        final = infos["final_obs"][index]
        _require(final in env.single_observation_space, "a final observation is not in single_observation_space")
        steps = _value(infos, "episode_steps", index)
        _require(steps in (None, 0), f"after the automatic reset episode_steps must be 0, got {steps}")
    step_rewards, steps = _value(executed, "step_rewards", index), _value(executed, "chunk_steps", index)
    _require(step_rewards is not None and steps is not None, "infos must have 'step_rewards' and 'chunk_steps'")
    shape = env.single_action_space.shape
    assert shape is not None
    length = shape[0]
    _require(
        np.shape(step_rewards) == (length,), f"step_rewards must have shape ({length},), got {np.shape(step_rewards)}"
    )
    _require(1 <= steps <= length, f"chunk_steps must be in 1..{length}, got {steps}")
    _require(done or steps == length, f"a chunk of {steps} of {length} steps, although the episode did not end")
    _require(not np.any(step_rewards[steps:]), "step_rewards must be zero after the last executed step")
    _require(np.isclose(step_rewards.sum(), reward, atol=1e-5), "the sum of step_rewards is not the reward")
    success = _value(executed, "is_success", index)
    _require(success is None or bool(success) == terminated, "is_success must say whether the episode terminated")


def _check_bad_actions(env: VectorEnv) -> None:
    good = np.asarray(env.action_space.sample())
    broken = good.copy()
    broken.flat[0] = np.nan
    for name, action in (("NaN", broken), ("a wrong shape", good[:, :, :-1])):
        try:
            env.step(action)
        except ValueError:
            pass
        except Exception as error:
            raise AssertionError(f"an action with {name} must raise ValueError, got {error!r}") from error
        else:
            raise AssertionError(f"an action with {name} must raise ValueError, but was accepted")
        obs = env.step(good)[0]
        _require(obs in env.observation_space, f"the env does not go on after an action with {name}")


def _require(condition: Any, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _value(infos: Mapping[str, Any], key: str, index: int) -> Any:
    """One sub-environment's value in vector infos, or None."""
    if key not in infos or not infos.get(f"_{key}", np.ones(index + 1, dtype=bool))[index]:
        return None
    return infos[key][index]


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_copy(item) for item in value]
    if isinstance(value, np.ndarray):
        return (
            np.array([_copy(item) for item in value] + [None], dtype=object)[:-1]
            if value.dtype == object
            else value.copy()
        )
    return value


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Mapping):
        return (
            isinstance(right, Mapping) and left.keys() == right.keys() and all(_equal(left[k], right[k]) for k in left)
        )
    if isinstance(left, tuple | list) or (isinstance(left, np.ndarray) and left.dtype == object):
        return len(left) == len(right) and all(_equal(a, b) for a, b in zip(left, right, strict=True))
    return bool(np.array_equal(left, right))
