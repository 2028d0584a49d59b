"""Evaluation: each initial state once, the statistics against independent formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, VectorWrapper
from run_helpers import textbook_wilson
from toy_env import ROBOT, ToyVectorEnv

from rlt_sb3.common.errors import RunError
from rlt_sb3.common.stats import mcnemar_p, wilson_interval
from rlt_sb3.evaluation.compare import compare, describe_tasks_below, tasks_below
from rlt_sb3.evaluation.evaluate import as_policy, evaluate
from rlt_sb3.evaluation.results import Evaluation, StateResult, csv_rows


@pytest.mark.parametrize("num_envs", [1, 2, 3, 7])
@pytest.mark.parametrize("n_states", [1, 5, 12])
def test_each_state_once(num_envs, n_states):
    env = ToyVectorEnv(num_envs)
    seen = []
    result = evaluate("vla", env, n_states, split="selection", on_episode=seen.append)
    assert env.splits == ["selection"]
    assert [row.init_index for row in result.rows] == list(range(n_states))
    assert [row.pair for row in result.rows] == list(range(n_states))
    assert [row.success for row in result.rows] == [p % 2 == 0 for p in range(n_states)]
    assert [row.chunks for row in result.rows] == [2 + p % 3 for p in range(n_states)]
    assert [row.steps for row in result.rows] == [2 * (2 + p % 3) for p in range(n_states)]
    assert sorted(row.pair for row in seen) == list(range(n_states))


class Fragile(ToyVectorEnv):
    """Loses the simulators of these environments in the chunks with these numbers."""

    losses = ((2, {0}), (3, {0, 1}), (6, {1}))
    chunk = 0

    def _play(self, chunks):
        self.chunk += 1
        lost = dict(self.losses).get(self.chunk, set())
        for env in lost:
            self._restarts[env] += 1
        return super()._play({env: chunk for env, chunk in chunks.items() if env not in lost})


def test_an_episode_whose_simulator_broke_is_played_again():
    env, seen = Fragile(2), []
    result = evaluate("vla", env, 6, on_episode=seen.append)
    assert env.worker_restarts == 4
    assert result.rows == evaluate("vla", ToyVectorEnv(2), 6).rows
    assert sorted(row.pair for row in seen) == list(range(6))


def test_same_outcome_for_any_number_of_envs_and_pairing():
    vla = [evaluate("vla", ToyVectorEnv(n), 12) for n in (1, 4)]
    assert vla[0].rows == vla[1].rows
    ones = evaluate(lambda obs: np.ones_like(obs["vla_ref"]), ToyVectorEnv(3), 12, name="ones")
    comparison = compare(vla[0], ones)
    assert (comparison.fixed, comparison.broken, comparison.both, comparison.neither) == (6, 0, 6, 0)
    assert comparison.p_value == pytest.approx(2 * 0.5**6)
    assert ones.steps_to_success == pytest.approx(np.mean([2 * (2 + p % 3) for p in range(12)]))


def test_pairs_are_found_by_state_and_task():
    """In whatever order the rows stand."""
    solved = {(3, 0): (True, True), (3, 1): (True, False), (5, 0): (False, True), (5, 1): (False, True)}
    first, second = (
        Evaluation("x", "eval", [StateResult(n, *key, solved[key][which], 5, 1) for n, key in enumerate(order)])
        for which, order in ((0, list(solved)), (1, list(solved)[::-1]))
    )
    comparison = compare(first, second)
    assert (comparison.fixed, comparison.broken, comparison.both, comparison.neither) == (2, 1, 1, 0)
    assert compare(second, first).fixed == 1


def test_tasks_below_the_interval():
    """Half of 20 states solved: Wilson's lower bound is 29.9 %, so that six solved states are not below it."""

    def outcome(name, **solved):
        tasks = {int(task[1:]): count for task, count in solved.items()}
        states = [(task, i, i < count) for task, count in tasks.items() for i in range(20)]
        return Evaluation(name, "eval", [StateResult(n, *state, 5, 1) for n, state in enumerate(states)])

    vla = outcome("frozen VLA", t3=10, t5=10, t8=0, t9=20)
    assert tasks_below(vla, outcome("RLT", t3=5, t5=6, t8=0, t9=16)) == [3, 9]
    said = "RLT is below the frozen VLA's 95 % interval in"
    assert describe_tasks_below(vla, outcome("RLT", t3=5, t5=6, t8=0, t9=16)) == f"{said} 2 of 4 tasks (task 3, task 9)"
    assert describe_tasks_below(vla, outcome("RLT", t3=6, t5=20, t8=1, t9=20)) == f"{said} 0 of 4 tasks"
    assert describe_tasks_below(outcome("frozen VLA", t3=10), outcome("RLT", t3=0)) is None


def test_a_model_is_asked_deterministically():
    class Model:
        def predict(self, observation, deterministic=False):
            assert deterministic
            return observation["vla_ref"], None

    assert evaluate(Model(), ToyVectorEnv(2), 6).rows == evaluate("vla", ToyVectorEnv(2), 6).rows


def test_frames_of_the_first_states_only():
    result = evaluate("vla", ToyVectorEnv(2, render_mode="rgb_array"), 6, record_states=3)
    assert sorted(result.frames) == [0, 1, 2]
    # one picture before every control step, two a chunk: the pictures show how many chunks the episode has had
    for pair, chunks in enumerate((2, 3, 4)):
        assert [int(f[0, 0, 0]) // 40 for f in result.frames[pair]] == [step // 2 for step in range(2 * chunks)]
    assert result.fps == ROBOT.control_frequency == 20.0


def test_no_environment_stays_filmed():
    env = ToyVectorEnv(2, render_mode="rgb_array")

    def interrupted(obs):
        if env._filmed:
            raise KeyboardInterrupt
        return obs["vla_ref"]

    with pytest.raises(KeyboardInterrupt):
        evaluate(interrupted, env, 6, record_states=range(3, 6))
    assert env._filmed == {0}  # pair 3 is the second episode of environment 0
    evaluate("vla", env, 4)
    assert env._filmed == frozenset()
    env.film([1])
    evaluate("vla", env, 4, record_states=2)
    assert env._filmed == frozenset()


def test_clear_errors():
    env = ToyVectorEnv(2)
    for split in ("test", "train"):
        with pytest.raises(ValueError, match=f"Unknown split '{split}'; choose one of selection, eval"):
            evaluate("vla", env, 3, split=split)
    with pytest.raises(ValueError, match="n_states"):
        evaluate("vla", env, 0)
    with pytest.raises(ValueError, match="policy must be 'vla'"):
        as_policy("frozen")
    env.init_state_counts = {"eval": 4}
    with pytest.raises(ValueError, match="n_states must be at most 4, as the split 'eval' has no more, got 5"):
        evaluate("vla", VectorWrapper(env), 5)
    assert env.splits == []
    assert evaluate("vla", env, 4).n == 4 and evaluate("vla", env, 5, split="selection").n == 5
    with pytest.raises(RunError, match="twice"):
        evaluate("vla", ToyVectorEnv(2, n_states=4), 6)
    env.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    with pytest.raises(ValueError, match="SAME_STEP"):
        evaluate("vla", env, 3)
    with pytest.raises(ValueError, match="same initial states"):
        compare(evaluate("vla", ToyVectorEnv(2), 4), evaluate("vla", ToyVectorEnv(2), 5))


@pytest.mark.parametrize(("k", "n"), [(0, 50), (1, 50), (8, 40), (35, 40), (50, 50), (3, 7)])
def test_wilson_against_the_textbook(k, n):
    assert wilson_interval(k, n) == pytest.approx(textbook_wilson(k, n), abs=1e-12)
    assert wilson_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(("fixed", "broken"), [(27, 0), (10, 3), (3, 10), (4, 4), (1, 0), (0, 0)])
def test_mcnemar_against_binomial_sums(fixed, broken):
    n = fixed + broken
    tail = sum(math.comb(n, i) for i in range(min(fixed, broken) + 1)) / 2**n
    assert mcnemar_p(fixed, broken) == pytest.approx(min(1.0, 2 * tail))


def test_round_trip_and_csv():
    rows = [StateResult(0, 1, 0, True, 20, 3), StateResult(1, 2, 0, False, 40, 5)]
    evaluation = Evaluation("RLT", "eval", rows)
    assert Evaluation.from_dict(evaluation.to_dict()) == evaluation
    assert csv_rows([evaluation]).splitlines() == [
        "policy,split,pair,task_id,init_index,success,steps,chunks",
        "RLT,eval,0,1,0,1,20,3",
        "RLT,eval,1,2,0,0,40,5",
    ]
    assert {task: part.successes for task, part in evaluation.per_task().items()} == {1: 1, 2: 0}
    assert Evaluation("x", "eval", rows[1:]).to_dict()["mean_steps_to_success"] is None
