"""
What each part of the method is worth on LIBERO: one task, one switch at a time.

    python benchmarks/ablations.py
    python benchmarks/ablations.py --only "no pull" "2 critics" --seeds 0

Each run is ``rlt train --config libero_goal_1`` with its first 3,600 chunks (28,800 control steps): the pull gets as
weak as it does there, by the same chunk. All variants get the same number of control steps. Runs are kept in ``--out``
and not repeated; ``benchmarks/results/ablations.json`` has what the table of docs/misc/results.md shows. About ten
minutes of a core a run; two commands with different ``--seeds`` run side by side.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tasks import ROOT, rate, steps, summary

from rlt_sb3.experiment.report import read_metrics

CHUNKS, CHUNK_LENGTH = 3_600, 8
COMMON = (
    f"--config libero_goal_1 --total_chunks {CHUNKS} "
    '--rlt.bc_coef {"start":60,"end":5,"end_fraction":0.8333} '
    "--evaluation.n_states 50 --evaluation.videos false --max_minutes null"
)

#: name -> further arguments of ``rlt train``
VARIANTS = {
    "RLT": "",
    "no pull": "--rlt.bc_coef 0",
    "no RL token": "--rlt.policy_kwargs.token_input false",
    "no reference input": "--rlt.policy_kwargs.reference_input false",
    "no reference dropout": "--rlt.reference_dropout 0",
    # a row at every second control step; as many updates
    "stride 2": "--env.kwargs.obs_stride 2 --rlt.utd 0.5",
    "one scale for all actions": "--rlt.action_scale 1",
    "direct actor": "--rlt.policy_kwargs.actor_mode direct",
    "1-chunk returns": "--rlt.n_steps 1",
    "2 critics": "--rlt.policy_kwargs.n_critics 2",
    "TQC": "--algorithm tqc",
    # As many control steps and updates; rows are control steps here. The demo's VLA solves nothing in single steps, the
    # slow one solves some: hence the row of RLT on that one.
    "RLT, slow VLA": "--env.vla mini-slow",
    "chunk length 1, slow VLA": f"--env.vla mini-slow --env.chunk_length 1 --rlt.utd {2 / CHUNK_LENGTH} "
    f"--rlt.learning_starts {500 * CHUNK_LENGTH} --total_chunks {CHUNKS * CHUNK_LENGTH} "
    f"--evaluation.selection_every {1200 * CHUNK_LENGTH}",
}


def arguments(out: Path, variant: str, seed: int) -> list[str]:
    """
    Make the arguments of ``rlt train`` for a variant.

    :param out: where runs are kept
    :param variant: a key of :data:`VARIANTS`
    :param seed: seed of the run
    :return: arguments of ``rlt train``
    """
    return f"{COMMON} --out {out} --name {folder(variant, seed)} --seed {seed} {VARIANTS[variant]}".split()


def folder(variant: str, seed: int) -> str:
    """Return name of the run's folder."""
    return f"{variant.replace(',', '').replace(' ', '_')}-seed{seed}"


def train(out: Path, variant: str, seed: int) -> Path:
    """
    Train a variant, unless its run is finished already.

    :param out: where runs are kept
    :param variant: a key of :data:`VARIANTS`
    :param seed: seed of the run
    :return: the finished run's folder
    """
    run = out / folder(variant, seed)
    if not (run / "report.html").exists():
        shutil.rmtree(run, ignore_errors=True)  # begun and not finished
        subprocess.run([sys.executable, "-m", "rlt_sb3", "train", *arguments(out, variant, seed)], check=True)
    return run


def trials(run: Path) -> list[float] | None:
    """
    Read how often the practicing actor succeeded.

    :param run: folder of a run
    :return: share of the last 16 noise-free training episodes that succeeded, from the first 16 on: the lowest, and
        the one at the end; None without a gate
    """
    rates = read_metrics(run).get("rollout/trial_success_rate", np.array([]))
    rates = rates[~np.isnan(rates)]
    return [float(rates.min()), float(rates[-1])] if len(rates) else None


def table(rows: list[dict[str, Any]]) -> str:
    """Return Markdown, one line per run."""
    lines = [
        "| variant | seed | selection states solved | trials, lowest -> last | held-out | fixed / broken | steps |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        rates = row["trials"]
        cells = [
            row["variant"],
            str(row["seed"]),
            ", ".join(map(str, row["selection"]["successes"])),
            "-" if rates is None else f"{rates[0]:.2f} -> {rates[1]:.2f}",
            rate(row["rlt"]),
            f"{row['fixed']} / {row['broken']}",
            steps(row),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the variants and write their results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="variants")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "ablations.json")
    parser.add_argument("--out", type=Path, default=Path("runs/ablations"), help="where runs are kept")
    args = parser.parse_args()
    for seed in args.seeds:
        for variant in args.only:
            run = train(args.out, variant, seed)
            row = {"variant": variant, "trials": trials(run)} | summary(run)
            # read and written at once: another of these commands may have added rows meanwhile
            rows = json.loads(args.json.read_text()) if args.json.exists() else []
            rows = [old for old in rows if (old["variant"], old["seed"]) != (variant, seed)] + [row]
            rows.sort(key=lambda row: (list(VARIANTS).index(row["variant"]), row["seed"]))
            args.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
