"""Evaluates policies on fixed initial states, each played exactly once, so that they can be compared pair by pair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import gymnasium as gym
import numpy as np

from rlt_sb3.common.errors import RunError
from rlt_sb3.common.films import real_time
from rlt_sb3.evaluation.results import Evaluation, StateResult

PolicyFn = Callable[[dict[str, np.ndarray]], np.ndarray]

#: The best checkpoint is chosen on "selection", only "eval" is reported. The two are disjoint from the training states,
#: which cannot be evaluated on: they are drawn at random, so no two evaluations would play the same ones.
SPLITS = ("selection", "eval")


class Predictor(Protocol):
    """A model with the ``predict`` of Stable-Baselines3."""

    def predict(self, observation: Any, *, deterministic: bool = False) -> tuple[np.ndarray, Any]:
        """
        Choose actions, as a model of Stable-Baselines3 does.

        :param observation: batch of observations
        :param deterministic: without exploration noise
        :return: actions (N, C, d), and a state that is not used
        """
        ...


def as_policy(policy: str | Predictor | PolicyFn) -> PolicyFn:
    """Turn what users have into ``observations -> actions`` (both batched).

    :param policy: ``"vla"`` (plays the reference chunk unchanged), a model with ``predict``, or a function
    :raises ValueError: for anything else
    """
    if isinstance(policy, str):
        if policy == "vla":
            return lambda obs: np.array(obs["vla_ref"], copy=True)
    elif hasattr(policy, "predict"):
        return lambda obs: policy.predict(obs, deterministic=True)[0]
    elif callable(policy):
        return policy
    raise ValueError(
        "policy must be 'vla', a model with predict(observation, deterministic) or a function of the observations, "
        f"got {policy!r}."
    )


def check_split(split: str) -> None:
    """
    Check the name of a split.

    :param split: which set of initial states
    :raises ValueError: if it is none of :data:`SPLITS`
    """
    if split not in SPLITS:
        raise ValueError(
            f"Unknown split {split!r}; choose one of {', '.join(SPLITS)} (training states are drawn at random, so they "
            "cannot be evaluated on)."
        )


def check_n_states(env: gym.vector.VectorEnv, split: str, n_states: int, setting: str = "n_states") -> None:
    """
    Compare a number of initial states with those that an environment has.

    :param env: Gymnasium vector environment; one that does not say how many it has is not asked
    :param split: which set of initial states
    :param n_states: how many are wanted
    :param setting: name of the number, for the message
    :raises ValueError: if it is below 1, or above what the split has
    """
    if n_states < 1:
        raise ValueError(f"{setting} must be at least 1, got {n_states}.")
    available = getattr(env.unwrapped, "init_state_counts", {}).get(split, n_states)
    if n_states > available:
        raise ValueError(f"{setting} must be at most {available}, as the split {split!r} has no more, got {n_states}.")


def _per_env(infos: dict[str, Any], key: str, index: int, default: Any) -> Any:
    """Return one env's entry of a Gymnasium vector info, or the default if the mask says that it has none."""
    if key not in infos or not infos.get("_" + key, np.ones(index + 1, dtype=bool))[index]:
        return default
    return infos[key][index]


def evaluate(
    policy: str | Predictor | PolicyFn,
    env: gym.vector.VectorEnv,
    n_states: int,
    *,
    split: str = "eval",
    name: str | None = None,
    on_episode: Callable[[StateResult], None] | None = None,
    record_states: int | range = 0,
    shard: tuple[int, int] = (0, 1),
) -> Evaluation:
    """Play the first ``n_states`` initial states of a split, each exactly once.

    The env restarts its fixed sequence at every ``reset(options={"init_states": split})``: episode ``j`` of env ``i``
    is pair ``(N - 1 - i) + j * N``. An episode that ended with ``worker_restarted`` does not count: the env plays it
    again. An env that says how many states a split has (``env.unwrapped.init_state_counts``, by split) is not asked for
    more. An env that has played its share continues until the others are done; those episodes are not counted.
    Evaluation is deterministic and touches neither the policy nor any training state.

    :param policy: see :func:`as_policy`
    :param env: Gymnasium vector env in SAME_STEP mode
    :param n_states: how many initial states
    :param split: "eval" or "selection"
    :param name: name for tables; by default "vla" or "policy"
    :param on_episode: called after every counted episode (progress bars)
    :param record_states: film the pairs below this number, or in this range (the env needs ``render_mode``). A film has
        the first picture and one after every control step. Of an env without ``film``
        (:meth:`rlt_gym.core.chunk_vector_env.ChunkVectorEnv.film`) it has one before each chunk and one of the end
    :param shard: (k, n) plays only the pairs k, k + n, k + 2n, ... below ``n_states``
    :raises ValueError: for an unknown split or policy, ``n_states < 1`` or above what the split has, a shard without
        states, or an env in another autoreset mode
    :raises RunError: if the env repeats an initial state (fewer states than asked for)
    """
    from gymnasium.vector import AutoresetMode

    check_split(split)
    check_n_states(env, split, n_states)
    if not 0 <= shard[0] < min(shard[1], n_states):
        raise ValueError(f"shard must be (k, n) with 0 <= k < n and k < n_states={n_states}, got {shard}.")
    mode = env.metadata.get("autoreset_mode")
    if mode != AutoresetMode.SAME_STEP:
        raise ValueError(f"evaluate needs an env in AutoresetMode.SAME_STEP, got {mode}.")
    act = as_policy(policy)
    filmed = range(record_states) if isinstance(record_states, int) else record_states
    options: dict[str, Any] = {"init_states": split} | ({"shard": shard} if shard != (0, 1) else {})
    rows, frames, every_step = _play(act, env, n_states, options, shard, on_episode, filmed)
    default_name = policy if isinstance(policy, str) else "policy"
    fps = real_time(env.metadata, every_step)
    return Evaluation(name or default_name, split, [rows[pair] for pair in sorted(rows)], frames, fps)


def _play(
    act: PolicyFn,
    env: gym.vector.VectorEnv,
    n_states: int,
    options: dict[str, Any],
    shard: tuple[int, int],
    on_episode: Callable[[StateResult], None] | None,
    filmed: range,
) -> tuple[dict[int, StateResult], dict[int, list[np.ndarray]], bool]:
    """
    One pass over (a shard of) the sequence.

    :return: outcomes and films by pair, and whether the films have a picture for every control step
    """
    n_envs = env.num_envs
    share = [len(range(shard[0] + (n_envs - 1 - i) * shard[1], n_states, n_envs * shard[1])) for i in range(n_envs)]
    played = [0] * n_envs
    chunks = [0] * n_envs
    rows: dict[int, StateResult] = {}
    films = _Films(env)
    frames = films.frames
    obs, infos = env.reset(options=options)
    while any(played[i] < share[i] for i in range(n_envs)):
        pairs = [shard[0] + ((n_envs - 1 - i) + played[i] * n_envs) * shard[1] for i in range(n_envs)]
        films.before_step([pair if pair in filmed and pair < n_states else None for pair in pairs])
        obs, _, terminations, truncations, infos = env.step(act(obs))
        films.after_step(infos, terminations | truncations)
        for i in np.flatnonzero(terminations | truncations).tolist():
            final = infos["final_info"]
            if _per_env(final, "worker_restarted", i, False):  # a broken simulator; the env plays this pair again
                frames.pop(pairs[i], None)
                chunks[i] = -1
                continue
            row = StateResult(
                pair=pairs[i],
                task_id=int(_per_env(final, "task_id", i, 0)),
                init_index=int(_per_env(final, "init_index", i, pairs[i])),
                success=bool(_per_env(final, "is_success", i, bool(terminations[i]))),
                steps=int(_per_env(final, "episode_steps", i, chunks[i] + 1)),
                chunks=chunks[i] + 1,
            )
            if played[i] < share[i]:
                if row.pair in frames and "final_frame" in final:
                    frames[row.pair].append(np.array(final["final_frame"][i], copy=True))
                if any((r.task_id, r.init_index) == (row.task_id, row.init_index) for r in rows.values()):
                    raise RunError(
                        f"The env played initial state {row.init_index} of task {row.task_id} twice; the split "
                        f"{options['init_states']!r} has fewer than n_states={n_states} different states. "
                        f"Ask for at most {len(rows)}."
                    )
                rows[row.pair] = row
                if on_episode is not None:
                    on_episode(row)
            played[i] += 1
            chunks[i] = -1
        for i in range(n_envs):
            chunks[i] += 1
    films.before_step([])
    return rows, frames, films.every_step


class _Films:
    """
    Takes pictures of some pairs' episodes; the others cost no time.

    :param env: the environment
    """

    def __init__(self, env: gym.vector.VectorEnv):
        self.env = env
        self.frames: dict[int, list[np.ndarray]] = {}
        self.every_step = False  # whether the env also draws inside its chunks
        self._film = getattr(env.unwrapped, "film", None)
        self._pairs: dict[int, int] = {}  # env -> pair that it plays and that is filmed
        if self._film is not None:
            self._film(())  # whatever an interrupted evaluation has left

    def before_step(self, pairs: list[int | None]) -> None:
        """
        Take each filmed env's present picture.

        :param pairs: which pair each env plays; None: no film of it
        """
        wanted = {i: pair for i, pair in enumerate(pairs) if pair is not None}
        pictures: Any = self.env.render() if wanted else None
        if pictures is None:
            wanted = {}
        if self._film is not None and wanted.keys() != self._pairs.keys():
            self._film(wanted)
        self._pairs = wanted
        for i, pair in wanted.items():
            self.frames.setdefault(pair, []).append(np.array(pictures[i], copy=True))

    def after_step(self, infos: dict[str, Any], dones: np.ndarray) -> None:
        """
        Take the pictures from inside the chunk.

        :param infos: of the step
        :param dones: (n_envs,), whose episodes have ended
        """
        for i, pair in self._pairs.items():
            inside = _per_env(infos["final_info"] if dones[i] else infos, "inner_frames", i, None)
            if inside is not None:
                self.every_step = True
                self.frames[pair] += inside
