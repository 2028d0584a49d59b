"""benchmarks/zero_noise.py on the toy of two ways, where noise zero goes to neither side in time."""

import re
import sys

import pytest
import torch
from benchmark_helpers import import_benchmark
from flow_vla import FlowVLA
from run_helpers import SMALL_SB3, quick

from rlt_sb3.experiment.config import EvalSettings
from rlt_sb3.experiment.train import train


def solved_with_zero(side):
    """The toy written out: three chunks of four steps, a tenth of each action, solved beyond 0.4 on the right side."""
    vla, position = FlowVLA(), 0.0
    for _ in range(3):
        chunk = vla.flow(torch.tensor([[position]]), torch.zeros(1, 8, 7))[0]
        for action in chunk[:4, 0].tolist():
            position += 0.1 * action
            if position * side > 0.4:
                return True
    return False


@pytest.mark.parametrize("split", ["eval", "selection"])
def test_it_counts_what_noise_zero_solves(tmp_path, capsys, monkeypatch, split):
    monkeypatch.setenv("RLT_ALLOWED_IMPORTS", "flow_vla")
    evaluation = EvalSettings(6, 5, 40, videos=False)
    known = {"algorithm": "dsrl", "dsrl": SMALL_SB3, "total_chunks": 80, "evaluation": evaluation}
    run = train(quick(tmp_path, "flow_vla:TwoWays-v0", **known)).run
    monkeypatch.setattr(sys, "argv", ["zero_noise.py", str(run), "--split", split])
    capsys.readouterr()
    import_benchmark("zero_noise").main()
    out = capsys.readouterr().out
    count = 6 if split == "eval" else 5
    solved, states = map(int, re.search(r"\| zero \| (\d+)/(\d+) ", out).groups())
    random, _ = map(int, re.search(r"\| random \| (\d+)/(\d+) ", out).groups())
    # in the middle of its two ways the VLA goes to neither side in time
    assert states == count and solved == 0 and not solved_with_zero(1.0) and not solved_with_zero(-1.0)
    assert random > 0 or split == "selection"
    only = re.search(r"only with zero: (\d+), only with random: (\d+)", out)
    assert int(only[1]) - int(only[2]) == solved - random


def test_another_run_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["zero_noise.py", str(tmp_path)])
    with pytest.raises(SystemExit):
        import_benchmark("zero_noise").main()
    assert str(tmp_path) in capsys.readouterr().err
