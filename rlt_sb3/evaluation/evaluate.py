"""Evaluation on fixed initial states, each played exactly once, so that two policies can be compared pair by pair."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import gymnasium as gym
import numpy as np

from rlt_sb3.common.errors import RunError

PolicyFn = Callable[[dict[str, np.ndarray]], np.ndarray]

#: The best checkpoint is chosen on "selection", only "eval" is reported. The two are disjoint from the training states,
#: which are no choice here: they are drawn at random, so no two evaluations would play the same ones.
SPLITS = ("selection", "eval")


class Predictor(Protocol):
    """What has Stable-Baselines3's ``predict``."""

    def predict(self, observation: Any, *, deterministic: bool = False) -> tuple[np.ndarray, Any]: ...


@dataclass(frozen=True)
class StateResult:
    """What became of one initial state.

    :param pair: number of the state in its split's fixed order
    :param task_id: task of the suite
    :param init_index: number of the initial state within the task
    :param success: the task's own success predicate held at some control step
    :param steps: control steps played (to success or to the horizon)
    :param chunks: action chunks played
    """

    pair: int
    task_id: int
    init_index: int
    success: bool
    steps: int
    chunks: int


@dataclass
class Evaluation:
    """The outcome of one policy on one split.

    :param policy: name of the policy, for tables
    :param split: which set of initial states
    :param rows: one entry per initial state, in the split's order
    :param frames: pictures of recorded episodes, ``pair -> [(H, W, 3) uint8]``; not written to JSON
    """

    policy: str
    split: str
    rows: list[StateResult]
    frames: dict[int, list[np.ndarray]] = field(default_factory=dict, repr=False)

    @property
    def n(self) -> int:
        """Number of initial states."""
        return len(self.rows)

    @property
    def successes(self) -> int:
        """Number of initial states solved."""
        return sum(row.success for row in self.rows)

    @property
    def rate(self) -> float:
        """Success rate."""
        return self.successes / self.n if self.n else float("nan")

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the success rate."""
        return wilson_interval(self.successes, self.n)

    @property
    def steps_to_success(self) -> float:
        """Mean control steps of the successful episodes (NaN without any)."""
        steps = [row.steps for row in self.rows if row.success]
        return float(np.mean(steps)) if steps else float("nan")

    @property
    def control_steps(self) -> int:
        """Control steps played in all."""
        return sum(row.steps for row in self.rows)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.successes}/{self.n} ({self.rate:.0%}, 95 % CI {low:.0%} to {high:.0%})"

    def per_task(self) -> dict[int, Evaluation]:
        """The same outcome split up by task."""
        tasks = sorted({row.task_id for row in self.rows})
        return {t: Evaluation(self.policy, self.split, [r for r in self.rows if r.task_id == t]) for t in tasks}

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: the summary, then the rows."""
        low, high = self.interval
        steps = self.steps_to_success
        return {
            "policy": self.policy,
            "split": self.split,
            "successes": self.successes,
            "n": self.n,
            "wilson_95": [low, high],
            "mean_steps_to_success": None if np.isnan(steps) else steps,
            "rows": [asdict(row) for row in self.rows],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Evaluation:
        """Inverse of :meth:`to_dict`."""
        return cls(data["policy"], data["split"], [StateResult(**row) for row in data["rows"]])


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a success probability.

    :param successes: number of successes
    :param n: number of trials; 0 gives the whole range
    :param confidence: level
    :return: lower and upper bound
    """
    from scipy.stats import binomtest

    if n == 0:
        return 0.0, 1.0
    bounds = binomtest(successes, n).proportion_ci(confidence_level=confidence, method="wilson")
    return float(bounds.low), float(bounds.high)


def mcnemar_p(fixed: int, broken: int) -> float:
    """McNemar's exact two-sided test on the pairs that differ.

    :param fixed: states that only the second policy solves
    :param broken: states that only the first policy solves
    :return: p value
    """
    from scipy.stats import binomtest

    return float(binomtest(fixed, fixed + broken, 0.5).pvalue) if fixed + broken else 1.0


@dataclass(frozen=True)
class Comparison:
    """Two policies on the same initial states.

    :param fixed: states that only the second policy solves
    :param broken: states that only the first policy solves
    :param both: states that both solve
    :param neither: states that neither solves
    :param p_value: McNemar's exact test
    """

    fixed: int
    broken: int
    both: int
    neither: int
    p_value: float


def compare(first: Evaluation, second: Evaluation) -> Comparison:
    """Pair two evaluations state by state.

    :param first: for instance the frozen VLA
    :param second: for instance the trained policy
    :raises ValueError: if they did not play the same initial states
    """
    a = {(row.task_id, row.init_index): row.success for row in first.rows}
    b = {(row.task_id, row.init_index): row.success for row in second.rows}
    if a.keys() != b.keys() or first.split != second.split:
        raise ValueError(
            f"Only evaluations on the same initial states can be paired; {first.policy!r} has {len(a)} states of "
            f"the split {first.split!r}, {second.policy!r} has {len(b)} of {second.split!r}, "
            f"{len(a.keys() & b.keys())} in common. "
            "Evaluate both with the same n_states and split."
        )
    fixed = sum(b[key] and not a[key] for key in a)
    broken = sum(a[key] and not b[key] for key in a)
    both = sum(a[key] and b[key] for key in a)
    return Comparison(fixed, broken, both, len(a) - fixed - broken - both, mcnemar_p(fixed, broken))


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
    :param split: which set of initial states
    :raises ValueError: if it is none of :data:`SPLITS`
    """
    if split not in SPLITS:
        raise ValueError(
            f"Unknown split {split!r}; choose one of {', '.join(SPLITS)} (training states are drawn at random, so they "
            "cannot be evaluated on)."
        )


def _per_env(infos: dict[str, Any], key: str, index: int, default: Any) -> Any:
    """One env's entry of a Gymnasium vector info, or the default where the mask says that it has none."""
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
    more. An env that has played its share goes on until the others are done; those episodes are not counted.
    Evaluation is deterministic and touches neither the policy nor any training state.

    :param policy: see :func:`as_policy`
    :param env: Gymnasium vector env in SAME_STEP mode
    :param n_states: how many initial states
    :param split: "eval" or "selection"
    :param name: name for tables; by default "vla" or "policy"
    :param on_episode: called after every counted episode (progress bars)
    :param record_states: keep one picture per chunk of the pairs below this number, or in this range (the env needs
        ``render_mode``)
    :param shard: (k, n) plays only the pairs k, k + n, k + 2n, ... below ``n_states``
    :raises ValueError: for an unknown split or policy, ``n_states < 1`` or above what the split has, a shard without
        states, or an env in another autoreset mode
    :raises RunError: if the env repeats an initial state (fewer states than asked for)
    """
    from gymnasium.vector import AutoresetMode

    check_split(split)
    if n_states < 1:
        raise ValueError(f"n_states must be at least 1, got {n_states}.")
    available = getattr(env.unwrapped, "init_state_counts", {}).get(split, n_states)
    if n_states > available:
        raise ValueError(f"n_states must be at most {available}, as the split {split!r} has no more, got {n_states}.")
    if not 0 <= shard[0] < min(shard[1], n_states):
        raise ValueError(f"shard must be (k, n) with 0 <= k < n and k < n_states={n_states}, got {shard}.")
    mode = env.metadata.get("autoreset_mode")
    if mode != AutoresetMode.SAME_STEP:
        raise ValueError(f"evaluate needs an env in AutoresetMode.SAME_STEP, got {mode}.")
    act = as_policy(policy)
    filmed = range(record_states) if isinstance(record_states, int) else record_states
    options: dict[str, Any] = {"init_states": split} | ({"shard": shard} if shard != (0, 1) else {})
    rows, frames = _play(act, env, n_states, options, shard, on_episode, filmed)
    default_name = policy if isinstance(policy, str) else "policy"
    return Evaluation(name or default_name, split, [rows[pair] for pair in sorted(rows)], frames)


def _play(
    act: PolicyFn,
    env: gym.vector.VectorEnv,
    n_states: int,
    options: dict[str, Any],
    shard: tuple[int, int],
    on_episode: Callable[[StateResult], None] | None,
    filmed: range,
) -> tuple[dict[int, StateResult], dict[int, list[np.ndarray]]]:
    """
    One pass over (a shard of) the sequence.

    :return: outcomes and films by pair
    """
    n_envs = env.num_envs
    share = [len(range(shard[0] + (n_envs - 1 - i) * shard[1], n_states, n_envs * shard[1])) for i in range(n_envs)]
    played = [0] * n_envs
    chunks = [0] * n_envs
    rows: dict[int, StateResult] = {}
    frames: dict[int, list[np.ndarray]] = {}
    obs, infos = env.reset(options=options)
    while any(played[i] < share[i] for i in range(n_envs)):
        pairs = [shard[0] + ((n_envs - 1 - i) + played[i] * n_envs) * shard[1] for i in range(n_envs)]
        _record(env, frames, [pair if pair in filmed and pair < n_states else None for pair in pairs])
        obs, _, terminations, truncations, infos = env.step(act(obs))
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
    return rows, frames


def _record(env: gym.vector.VectorEnv, frames: dict[int, list[np.ndarray]], pairs: list[int | None]) -> None:
    """Append each env's present picture to its pair's film; renders only if a pair is wanted."""
    if all(pair is None for pair in pairs):
        return
    pictures = env.render()
    if pictures is None:
        return
    for pair, picture in zip(pairs, pictures, strict=True):
        if pair is not None:
            frames.setdefault(pair, []).append(np.array(picture, copy=True))


def csv_rows(evaluations: Iterator[Evaluation] | list[Evaluation]) -> str:
    """All rows of some evaluations as one CSV text."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["policy", "split", *StateResult.__dataclass_fields__])
    for evaluation in evaluations:
        for row in evaluation.rows:
            writer.writerow([evaluation.policy, evaluation.split, *map(_plain, asdict(row).values())])
    return out.getvalue()


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value


def dumps(data: Any) -> str:
    """JSON with NaN refused, so that every other tool can read it."""
    return json.dumps(data, indent=2, allow_nan=False) + "\n"
