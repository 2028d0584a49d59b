"""Samples of episodes, and the tests that compare them, against enumerations by hand."""

import itertools
import json
import math

import numpy as np
import pytest
from scipy.stats import fisher_exact

from rlt_sb3.common.stats import fisher_p, mann_whitney_p, mcnemar_p
from rlt_sb3.common.trials import (
    Sample,
    Trial,
    as_successful,
    is_better,
    more_successes_p,
    quicker_p,
    tables,
    worse_on_a_task,
)
from rlt_sb3.evaluation.results import StateResult


def drawn(k: int, n: int, other_k: int, other_n: int) -> list[int]:
    """Successes of the first n in every order of all successes and failures."""
    both = k + other_k
    return [sum(i < n for i in places) for places in itertools.combinations(range(n + other_n), both)]


@pytest.mark.parametrize("table", [(3, 4, 1, 5), (0, 3, 2, 4), (4, 4, 0, 6), (2, 5, 5, 5), (0, 0, 2, 3), (1, 3, 0, 0)])
def test_fisher_against_all_orders(table):
    assert fisher_p(table) == pytest.approx(np.mean([x >= table[0] for x in drawn(*table)]), abs=1e-12)


@pytest.mark.parametrize("table", [(30, 32, 40, 64), (16, 16, 52, 64), (32, 32, 60, 64), (20, 32, 40, 64)])
def test_fisher_against_scipy(table):
    k, n, other_k, other_n = table
    there = fisher_exact([[k, n - k], [other_k, other_n - other_k]], alternative="greater").pvalue
    assert fisher_p(table) == pytest.approx(there, rel=1e-9)


def test_fisher_of_two_tasks_against_all_orders():
    first, second = (3, 4, 1, 4), (1, 3, 2, 5)
    sums = [a + b for a in drawn(*first) for b in drawn(*second)]
    assert fisher_p(first, second) == pytest.approx(np.mean([x >= 4 for x in sums]), abs=1e-12)
    # without the tasks the players look alike; the second one has only played more of the easy task
    assert fisher_p((9, 10, 18, 20), (1, 10, 0, 2)) > 0.5
    assert fisher_p() == 1.0


@pytest.mark.parametrize(("fixed", "broken"), [(27, 0), (10, 3), (3, 10), (0, 0)])
def test_one_sided_mcnemar_against_binomial_sums(fixed, broken):
    n = fixed + broken
    tail = sum(math.comb(n, i) for i in range(fixed, n + 1)) / 2**n
    assert mcnemar_p(fixed, broken, "greater") == pytest.approx(tail)


def test_mann_whitney_against_all_orders():
    mine, others = [1.0, 2.5, 3.0], [2.0, 4.0, 5.0, 6.0]

    def smaller(first, second):
        return sum(a < b for a in first for b in second)

    numbers = mine + others
    every = [
        smaller([numbers[i] for i in places], [numbers[i] for i in range(7) if i not in places])
        for places in itertools.combinations(range(7), 3)
    ]
    assert mann_whitney_p(mine, others) == pytest.approx(np.mean([x >= smaller(mine, others) for x in every]))
    assert mann_whitney_p([], [1.0]) == mann_whitney_p([1.0], []) == mann_whitney_p([2.0] * 20, [2.0] * 30) == 1.0


def sample(*episodes, size: int | None = None) -> Sample:
    """Of ``(success, steps, task)``, or of outcomes alone; None runs."""
    trials = []
    for entry in episodes:
        success, steps, task = entry if isinstance(entry, tuple) else (entry, 5, 0)
        trials.append(Trial(0, steps, task, success))
    return Sample(len(trials) if size is None else size, trials)


def of(successes: int, n: int, steps: int = 5, task: int = 0) -> list[tuple]:
    return [(i < successes, steps, task) for i in range(n)]


def test_a_sample_is_complete_when_all_that_it_wants_have_ended():
    trials = Sample(3)
    first, second = trials.start(0), trials.start(0)
    second.success = True
    assert trials.wanted and not trials.complete and trials.ended() == [second] and trials.ended(1) == []
    third = trials.start(4)
    third.success = False
    assert not trials.wanted and not trials.complete  # the first one runs
    trials.drop(first)
    assert trials.wanted
    last = trials.start(5)
    last.success = False
    assert trials.complete and trials.trials == [second, third, last] and trials.count() == (1, 3)
    assert Sample().complete and not Sample().wanted


def test_what_is_cut_off_takes_its_contemporaries_along():
    """Episodes of 2 (success) or 9 vector steps, cut off in step 9: the short ones must not stay alone."""
    trials = Sample(
        9, [Trial(0, 5, 0, False), Trial(0, 5, 0, True), Trial(3, 5, 0, True), Trial(3), Trial(5, 5, 0, True)]
    )
    assert trials.until(0).trials == trials.trials[:2] and trials.until(0).size == 9
    full = Sample(2, trials.trials[1:3])
    assert full.until(0) is full


def test_an_evaluation_as_a_sample():
    rows = [
        StateResult(0, 4, 1, True, 100, 13),
        StateResult(1, 2, 7, False, 300, 38),
        StateResult(2, 4, 0, True, 101, 13),
        StateResult(3, 2, 3, True, 250, 32),
    ]
    whole, cut = Sample.of_states(rows), Sample.of_states(rows, 100)
    assert [(t.task, t.steps, t.success) for t in whole.trials] == [
        (2, 250, True), (2, 300, False), (4, 101, True), (4, 100, True),
    ]  # fmt: skip
    assert [(t.task, t.steps, t.success) for t in cut.trials] == [
        (2, 100, False), (2, 100, False), (4, 100, False), (4, 100, True),
    ]  # fmt: skip
    of_each = Sample.of_states(rows, {2: 260, 4: 100})
    assert [(t.steps, t.success) for t in of_each.trials] == [(250, True), (260, False), (100, False), (100, True)]
    for sample in (whole, cut):
        assert sample.complete and sample.size == 4
        assert Sample(9, sample.trials).until(-1).trials == sample.trials  # no restart in training forgets them
    assert not Sample.of_states([]).trials


def test_samples_as_data():
    trials = Sample(5, [Trial(7, 40, 3, True), Trial(8, 160, 1, False)])
    again = Sample.from_list(json.loads(json.dumps(trials.to_list())))
    assert again.to_list() == trials.to_list() and again.size == 5
    assert [vars(t) for t in again.trials] == [vars(t) for t in trials.trials]


def test_players_are_compared_task_by_task():
    one, other = sample(*of(9, 10), *of(1, 2, task=1)), sample(*of(18, 20), *of(1, 20, task=1), (True, 5, 7))
    assert tables(one, other) == [(9, 10, 18, 20), (1, 2, 1, 20)]  # nobody has compared task 7
    assert more_successes_p(one, other) == fisher_p((9, 10, 18, 20), (1, 2, 1, 20))
    assert as_successful(one, other)  # 10 of 12; 9 and 0.1 expected
    assert not as_successful(sample(*of(8, 10), *of(1, 2, task=1)), other)
    assert as_successful(sample(*of(10, 16)), sample(*of(40, 64)))
    assert not as_successful(sample(*of(9, 16)), sample(*of(40, 64)))


def test_a_gain_in_one_task_does_not_hide_a_loss_in_another():
    vla = sample(*of(0, 20), *of(20, 20, task=1))
    actor = sample(*of(16, 16), *of(11, 16, task=1))
    assert more_successes_p(actor, vla) < 0.01 and worse_on_a_task(actor, vla, 0.05)
    assert fisher_exact([[20, 0], [11, 5]], alternative="greater").pvalue < 0.025
    assert not worse_on_a_task(sample(*of(16, 16), *of(15, 16, task=1)), vla, 0.05)


def test_steps_are_compared_within_a_task():
    rng = np.random.default_rng(0)
    short, long = rng.integers(40, 60, 20), rng.integers(400, 600, 20)
    vla = sample(*[(True, int(s), 0) for s in short], *[(True, int(s), 1) for s in long])
    as_quick = sample(*[(True, int(s), 0) for s in short], (True, int(long[0]), 1))
    assert quicker_p(as_quick, vla) > 0.2  # it has only played more of the short task
    quicker = sample(*[(True, int(0.6 * s), 0) for s in short], *[(True, int(0.6 * s), 1) for s in long])
    assert quicker_p(quicker, vla) < 1e-4
    assert quicker_p(sample(*[(False, 1, 0)] * 20), vla) == 1.0  # quick failures
    assert quicker_p(sample(*[(True, 1, 5)] * 20), vla) == 1.0  # a task that the VLA has not solved


VLA = sample(*of(16, 32))


@pytest.mark.parametrize("successes", range(9))
def test_verdict_by_successes(successes):
    """Of 8 against 16 of 32, at 10 %."""
    better = bool(fisher_exact([[successes, 8 - successes], [16, 16]], alternative="greater").pvalue <= 0.1)
    assert is_better(sample(*of(successes, 8)), 8, VLA, 0.1, by_speed=False) is better
    assert {0: False, 8: True}.get(successes, better) is better
    # only the first eight count
    assert is_better(sample(*of(successes, 8), *[not better] * 5), 8, VLA, 0.1, by_speed=False) is better


def test_a_negative_verdict_comes_early_and_a_positive_one_late():
    needed = min(k for k in range(9) if fisher_exact([[k, 8 - k], [16, 16]], alternative="greater").pvalue <= 0.1)
    open_yet = sample(*[False] * (8 - needed), *[True] * 3, None, size=8)
    assert is_better(open_yet, 8, VLA, 0.1, by_speed=False) is None
    lost = sample(None, *[False] * (9 - needed), *[True] * 3, size=8)
    assert is_better(lost, 8, VLA, 0.1, by_speed=False) is False
    won = sample(*[True] * 7, None, size=8)
    assert is_better(won, 8, VLA, 0.1, by_speed=False) is None
    # in other tasks successes may still come cheaply: the verdict waits
    assert is_better(sample((False, 5, 1), *[False] * 5, None), 8, VLA, 0.1, by_speed=False) is None


def test_verdict_where_successes_cannot_tell():
    rng = np.random.default_rng(1)
    vla = sample(*[(True, int(s), 0) for s in rng.integers(40, 60, 30)], False, False)
    quick = [(True, int(s), 0) for s in rng.integers(20, 40, 15)]
    assert is_better(sample(*quick, False), 16, vla, 0.01, by_speed=True) is True
    assert is_better(sample(*quick[1:], False, False), 16, vla, 0.01, by_speed=True) is False  # 14 of 16 < 30 of 32
    as_quick = [(True, int(s), 0) for s in rng.integers(40, 60, 16)]
    assert is_better(sample(*as_quick), 16, vla, 0.01, by_speed=True) is False
    # not even 16 of 16 reach 1 %: as many successes are enough
    assert is_better(sample(*as_quick), 16, vla, 0.01, by_speed=False) is True
    assert is_better(sample(False, False, None, size=16), 16, vla, 0.01, by_speed=False) is False
