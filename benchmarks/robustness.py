"""How well runs do in changed scenes: frozen VLA and RLT on the same states, one kind of change at a time.

    python benchmarks/robustness.py runs/demo --n-states 50
    python benchmarks/robustness.py runs/demo runs/goal6 --kinds light camera --strengths 0.5 1 --json robustness.json

It calls ``rlt eval RUN --perturbations {KIND: STRENGTH}`` for each kind of ``rlt_gym.libero.worker.perturbations``, for
none, and for all together. Files that a run has already are not played again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from json_file import write_json

from rlt_gym.libero.worker.perturbations import KINDS
from rlt_sb3.evaluation.compare import compare
from rlt_sb3.evaluation.results import Evaluation
from rlt_sb3.experiment.eval_config import EvalConfig
from rlt_sb3.experiment.evaluate_run import evaluate_run, output_path


def main() -> None:
    """Play what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS, "all"], default=[*KINDS, "all"])
    parser.add_argument("--strengths", nargs="+", type=float, default=[1.0])
    parser.add_argument("--n-states", type=int, default=100)
    parser.add_argument("--split", choices=["eval", "selection"], default="eval")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    arguments = parser.parse_args()
    chosen = [(kind, strength) for kind in arguments.kinds for strength in arguments.strengths]
    lines, shown = [], []
    for run in arguments.runs:
        for kind, strength in [("none", 0.0), *chosen]:
            kinds = KINDS if kind == "all" else () if kind == "none" else (kind,)
            config = EvalConfig(
                str(run), n_states=arguments.n_states, split=arguments.split, progress=False,
                perturbations={one: strength for one in kinds} or None,
            )  # fmt: skip
            path = output_path(config)
            if not path.is_file() or json.loads(path.read_text())["n_states"] != arguments.n_states:
                evaluate_run(config)
            data = json.loads(path.read_text())
            vla, ours = Evaluation.from_dict(data["vla"]), Evaluation.from_dict(data)
            paired = compare(vla, ours)
            name = kind if kind == "none" else f"{kind} {strength:g}"
            cells = [
                run.name,
                name,
                _cell(vla),
                _cell(ours),
                f"{paired.fixed} / {paired.broken}",
                f"{paired.p_value:.1g}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
            shown.append({"run": str(run), "kind": kind, "strength": strength, "n": ours.n, "vla": vla.successes,
                          "rlt": ours.successes, "fixed": paired.fixed, "broken": paired.broken})  # fmt: skip
    print("\n| run | change | frozen VLA | RLT | fixed / broken | McNemar p |\n|" + "---|" * 6)
    print("\n".join(lines))
    write_json(arguments, rows=shown)


def _cell(result: Evaluation) -> str:
    low, high = result.interval
    return f"{result.successes}/{result.n} ({low:.0%} to {high:.0%})"


if __name__ == "__main__":
    main()
