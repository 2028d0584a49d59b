"""Tasks of all suites on the embedded assets: things come to rest, predicates of the goal become true and false.

A slice runs here; ``rlt assets verify`` and ``pytest -m all_tasks`` do it for all 130 tasks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("libero")

from rlt_gym.assets import embedded_assets
from rlt_gym.libero.bootstrap import prepare_libero
from rlt_gym.libero.tasks import load_init_states

SLICE = (("libero_object", 0), ("libero_spatial", 4))


@pytest.fixture(autouse=True)
def pack(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = embedded_assets()
    prepare_libero(folder)
    yield folder


@pytest.mark.sim
@pytest.mark.parametrize(("suite", "task_id"), SLICE)
def test_task_on_embedded_assets(suite: str, task_id: int) -> None:
    from rlt_gym.assets.verify import verify_task

    report = verify_task(suite, task_id, states=(0, 49))
    assert report.problems == []
    assert len(report.rest) == 2


@pytest.mark.sim
def test_verification_sees_what_is_wrong() -> None:
    """The checks themselves: a body in the table, one that flies, a joint with other limits, a goal out of reach."""
    from rlt_gym.assets import verify

    bench = verify.Bench("libero_spatial", 0)
    try:
        state = load_init_states(bench.task)[0]
        bench.start(state)
        bench.settle()
        plate = bench.pose("plate_1")
        assert bench.lowest("plate_1") > 0.9 - 0.002
        assert bench.depth("plate_1") < 0.001
        bench.put("plate_1", plate - np.array([0, 0, 0.02, 0, 0, 0, 0]))
        assert bench.lowest("plate_1") < 0.9 - 0.015
        assert bench.depth("plate_1") > 0.005
        goal = bench.goal()[0]
        assert not bench.holds(goal)
        bench.start(state)
        assert bench.make_true(goal) and bench.holds(goal)
        bench.put(goal[1], bench.pose(goal[1]) + np.array([0, 0, 0.3, 0, 0, 0, 0]))
        assert not bench.holds(goal)
        assert not bench.make_true(goal, tries=0)
    finally:
        bench.close()
