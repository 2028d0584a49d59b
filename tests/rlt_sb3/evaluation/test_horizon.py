"""The horizon of training episodes, against numbers worked out by hand."""

import pytest

from rlt_sb3.evaluation.horizon import fitting_horizon
from rlt_sb3.evaluation.results import Evaluation, StateResult


def vla(**steps: list[int]) -> Evaluation:
    """Successes after so many steps, by task; and two failures of each at 300."""
    rows = []
    for name, successes in steps.items():
        task = int(name[1:])
        rows += [StateResult(len(rows) + i, task, i, True, n, -(-n // 8)) for i, n in enumerate(successes)]
        rows += [StateResult(len(rows) + i, task, 90 + i, False, 300, 38) for i in range(2)]
    return Evaluation("frozen VLA", "selection", rows)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ({"t1": [60] * 9 + [70]}, 80),  # the 90 % quantile is 61; 76.25 in whole chunks
        ({"t1": [100] * 10}, 128),  # 125
        ({"t1": [256] * 6}, 300),  # 320, and evaluations end at 300
        ({"t1": [60] * 4}, 160),  # too few to make it shorter
        ({"t1": [200]}, 256),  # but enough to make it longer
        ({"t1": []}, 160),
        ({"t1": [64] * 10, "t2": [100] * 10}, 128),  # one horizon for all tasks
        ({"t1": [64] * 10, "t2": []}, 160),
    ],
)
def test_horizon(steps, expected):
    assert fitting_horizon(vla(**steps), present=160, longest=300, chunk_length=8) == expected


def test_whole_chunks_unless_it_is_the_longest():
    assert fitting_horizon(vla(t1=[100] * 5), 160, 300, 10) == 130
    assert fitting_horizon(vla(t1=[100] * 5), 160, 127, 8) == 127
