"""How often the gate errs in whole runs: a small version of ``benchmarks/gate.py``."""

import numpy as np
import pytest
from benchmark_helpers import import_benchmark


@pytest.fixture(scope="module")
def benchmark():
    return import_benchmark("gate")


def deployed(benchmark, vla, actor, n_envs, runs, auditions=0, **settings) -> float:
    np.random.seed(0)
    results = [
        benchmark.run(benchmark.Player(vla), benchmark.constant(benchmark.Player(actor)), n_envs, auditions, **settings)
        for _ in range(runs)
    ]
    return float(np.mean([chunks is not None for chunks, _ in results]))


@pytest.mark.parametrize(("n_envs", "runs"), [(2, 25), (8, 60), (32, 60)])
def test_a_much_better_actor_is_deployed(benchmark, n_envs, runs):
    assert deployed(benchmark, 0.63, 0.95, n_envs, runs) >= 0.9


@pytest.mark.parametrize(("n_envs", "runs"), [(2, 25), (8, 60), (32, 60)])
def test_an_actor_ten_points_worse_is_not_deployed(benchmark, n_envs, runs):
    assert deployed(benchmark, 0.63, 0.53, n_envs, runs, auditions=6) <= 0.1


def test_an_actor_ten_points_better_is_deployed_by_auditions(benchmark):
    assert deployed(benchmark, 0.82, 0.92, 8, 40, auditions=6) >= 0.8


def test_the_level_bounds_the_errors(benchmark):
    """An equal actor passes more often at a level of one half, and never at a tiny one."""
    assert deployed(benchmark, 0.5, 0.5, 32, 60, auditions=6, level=0.5) >= 0.6
    assert deployed(benchmark, 0.5, 0.5, 32, 60, auditions=6) <= 0.5
    assert deployed(benchmark, 0.5, 0.5, 32, 60, auditions=6, level=1e-6) == 0.0


def test_a_quicker_actor_replaces_a_vla_that_solves_nearly_all(benchmark):
    np.random.seed(0)
    vla, actor = benchmark.Player(0.95, benchmark.SLOW), benchmark.Player(0.95, benchmark.QUICK)
    quicker = [benchmark.run(vla, benchmark.constant(actor), 8)[0] is not None for _ in range(20)]
    equal = [benchmark.run(vla, benchmark.constant(vla), 8)[0] is not None for _ in range(20)]
    assert np.mean(quicker) >= 0.8 and np.mean(equal) <= 0.3
