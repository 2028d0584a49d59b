"""
The results page: finished runs of several tasks and seeds as one JSON file, one table and one figure.

    rlt train --config libero_goal_6 --seed 0      # and so on, see docs/misc/results.md
    python benchmarks/tasks.py runs/libero_goal_6 runs/libero_goal_6-2 runs/libero_spatial_8

Reads `evaluations.json` of each run; writes `benchmarks/results/tasks.json` and `docs/images/results.png` and prints
the table. The figure shows, per task, the share of the selection states that `predict()` solves during training: the
mean over the runs, a band from the worst to the best of them, and the frozen VLA with Wilson's 95 % interval. Open
circles are points at which no run had deployed an actor, so that the number is the VLA's. Where all runs have
evaluated the practicing actor, its worst run is drawn as well. `--draw` only draws what the JSON file has.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from rlt_sb3.common.robot_time import robot_minutes
from rlt_sb3.evaluation.compare import compare
from rlt_sb3.evaluation.results import Evaluation
from rlt_sb3.experiment.practice import practicing, steps_to
from rlt_sb3.experiment.report import read_evaluations

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).parent.parent


def compared(data: dict[str, Any]) -> dict[str, Any]:
    """
    Compare a run with its frozen VLA on the held-out states.

    :param data: contents of evaluations.json
    :return: successes and intervals of both, and the paired test
    """
    vla, rlt = (Evaluation.from_dict(data[name]) for name in ("vla", data["config"]["algorithm"]))
    paired = compare(vla, rlt)
    return {
        "vla": {"k": vla.successes, "n": vla.n, "wilson_95": vla.interval},
        "rlt": {"k": rlt.successes, "n": rlt.n, "wilson_95": rlt.interval},
        "fixed": paired.fixed,
        "broken": paired.broken,
        "p_value": paired.p_value,
    }


def summary(run: Path) -> dict[str, Any]:
    """
    Read what the table and the figure show of a run.

    :param run: folder of a finished run
    :return: what the table and the figure show of it
    """
    data = read_evaluations(run)
    config = data["config"]
    env, (vla, rlt) = config["env"], (Evaluation.from_dict(data[key]) for key in ("vla", config["algorithm"]))
    before = {(row.task_id, row.init_index): row.steps for row in vla.rows if row.success}
    after = {(row.task_id, row.init_index): row.steps for row in rlt.rows if row.success}
    both = sorted(before.keys() & after.keys())
    selection_vla = data["vla_selection"]["successes"] / data["vla_selection"]["n"]
    return {
        "task": f"{env['suite']} {', '.join(map(str, env['task_ids']))}",
        "algorithm": config["algorithm"],
        "seed": config["seed"],
        **compared(data),
        "steps_where_both_succeed": [float(np.mean([steps[key] for key in both])) for steps in (before, after)]
        if both
        else None,
        "control_steps": data["training"]["control_steps"],
        "control_frequency": data.get("control_frequency"),
        "control_steps_to": {"+30 points": steps_to(data, selection_vla + 0.3), "90 %": steps_to(data, 0.9)},
        "minutes": data["minutes"],
        "selection": {
            "n": data["vla_selection"]["n"],
            "vla": data["vla_selection"]["successes"],
            "vla_wilson_95": data["vla_selection"]["wilson_95"],
            "chunks": [point["chunks"] for point in data["selection"]],
            "successes": [point["evaluation"]["successes"] for point in data["selection"]],
            "practicing": [practicing(point)["successes"] for point in data["selection"]],
        },
    }


def rate(result: dict[str, Any]) -> str:
    """Return k/n and Wilson's interval of one entry of a summary."""
    low, high = result["wilson_95"]
    return f"{result['k']}/{result['n']} ({100 * low:.0f} % to {100 * high:.0f} %)"


def steps(run: dict[str, Any]) -> str:
    """Return control steps to success, of the VLA and of RLT, on the states that both solve."""
    return " -> ".join(f"{mean:.0f}" for mean in run["steps_where_both_succeed"] or []) or "-"


def lowest(run: dict[str, Any]) -> str:
    """Return the practicing actor's worst selection evaluation, with the VLA's number."""
    found = [k for k in run["selection"].get("practicing", []) if k is not None]  # older runs did not play it
    n = run["selection"]["n"]
    return f"{min(found)}/{n} ({run['selection']['vla']}/{n})" if found else "not measured"


def practice(run: dict[str, Any], control_steps: int | None) -> str:
    """Return control steps of practice as robot minutes, or as they are where the frequency is not stored."""
    if control_steps is None:
        return "-"
    minutes = robot_minutes(control_steps, run.get("control_frequency"))
    return f"{control_steps:,} steps" if minutes is None else f"{minutes:.0f}"


def table(runs: list[dict[str, Any]]) -> str:
    """Return Markdown, one row per run."""
    lines = [
        "| task | seed | frozen VLA | RLT | fixed / broken | McNemar p | steps where both succeed | "
        "lowest practicing actor (VLA) | robot minutes | to +30 points | to 90 % | minutes |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        known = run.get("control_steps_to", {})  # older entries of the file lack it
        reached = {goal: practice(run, known.get(goal)) for goal in ("+30 points", "90 %")}
        lines.append(
            f"| {run['task']} | {run['seed']} | {rate(run['vla'])} | {rate(run['rlt'])} | "
            f"{run['fixed']} / {run['broken']} | {run['p_value']:.0e} | {steps(run)} | "
            f"{lowest(run)} | {practice(run, run['control_steps'])} | {reached['+30 points']} | {reached['90 %']} | "
            f"{run['minutes']:.0f} |"
        )
    return "\n".join(lines)


def figure(runs: list[dict[str, Any]], path: Path) -> None:
    """
    Draw the learning curves of all tasks.

    :param runs: summaries
    :param path: where the picture goes
    """
    tasks = defaultdict(list)
    for run in runs:
        tasks[run["task"]].append(run["selection"])
    lines = -(-len(tasks) // 2)
    fig, axes = plt.subplots(lines, 2, figsize=(8, 3.2 * lines), sharey=True, squeeze=False)
    for ax in axes.flat[len(tasks) :]:
        ax.set_visible(False)
    for ax, (task, curves) in zip(axes.flat, tasks.items(), strict=False):
        solved = [{0: c["vla"]} | dict(zip(c["chunks"], c["successes"], strict=True)) for c in curves]
        chunks = sorted(set.intersection(*map(set, solved)))  # a resumed run has one more, where it ended at first
        rates = np.array([[curve[at] for at in chunks] for curve in solved]) / curves[0]["n"]
        ax.axhspan(*curves[0]["vla_wilson_95"], color="0.9", label="frozen VLA, 95 % interval")
        ax.axhline(curves[0]["vla"] / curves[0]["n"], color="0.5", linestyle="--")
        ax.fill_between(chunks, rates.min(0), rates.max(0), color="tab:blue", alpha=0.2)
        ax.plot(chunks, rates.mean(0), color="tab:blue", marker="o", label=f"predict(), {len(curves)} run(s)")
        by_vla = [at for at in chunks if all(curve[at] == curves[0]["vla"] for curve in solved)]
        ax.plot(
            by_vla, [curves[0]["vla"] / curves[0]["n"]] * len(by_vla), color="tab:blue", marker="o", linestyle="none",
            markerfacecolor="white", zorder=3, label="the VLA's own chunks",
        )  # fmt: skip
        learners = [dict(zip(c["chunks"], c.get("practicing") or [None], strict=False)) for c in curves]
        lowest = {at: [curve.get(at) for curve in learners] for at in chunks[1:]}
        if all(None not in found for found in lowest.values()):
            worst = [min(found) / curves[0]["n"] for found in lowest.values()]
            ax.plot(chunks[1:], worst, color="tab:red", marker="x", linestyle=":", label="practicing actor, worst run")
        ax.set(title=task, xlabel="action chunks of practice", ylim=(0, 1.02))
        ax.legend(loc="lower right", fontsize=7)
    for ax in axes[:, 0]:
        ax.set_ylabel("selection states solved")
    fig.tight_layout()
    fig.savefig(path, dpi=120)


def main() -> None:
    """Write the table and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="folders of finished runs")
    parser.add_argument("--draw", action="store_true", help="only table and figure of the JSON file")
    parser.add_argument("--add", action="store_true", help="keep the other tasks and seeds that the JSON file has")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "tasks.json")
    parser.add_argument("--figure", type=Path, default=ROOT / "docs" / "images" / "results.png")
    args = parser.parse_args()
    if not args.runs and not args.draw:
        parser.error("name the folders of finished runs, or pass --draw")
    rows = (json.loads(args.json.read_text()) if args.add or args.draw else []) + [summary(run) for run in args.runs]
    by_run = {(row["task"], row["seed"]): row for row in rows}
    runs = [by_run[key] for key in sorted(by_run)]
    args.json.write_text(json.dumps(runs, indent=1) + "\n")
    figure(runs, args.figure)
    print(table(runs))


if __name__ == "__main__":
    main()
