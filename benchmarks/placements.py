"""
Where a run fails: success on its held-out states by where the objects stand at first.

    python benchmarks/placements.py runs/wine_bottle runs/wine_bottle-2

The initial states of a task differ by some centimeters in where its objects stand. For each object and horizontal axis
the Mann-Whitney test compares the places of solved and failed states (two-sided, with Bonferroni's correction for all
tests). Where it finds a difference at 5 %, for the frozen VLA or for the run's model, a table has the successes of both
in four equally large groups of states, from one end of the axis to the other. A policy that fails at one end of an axis
does not see where the object stands, or does not use it. The runs must be of one task; their successes are added up.
"""

import argparse
from pathlib import Path

import numpy as np
from json_file import write_json
from scipy.stats import mannwhitneyu

from rlt_gym.libero.assets.resolve import resolve_assets
from rlt_gym.libero.worker.libero_import import prepare_libero
from rlt_sb3.evaluation.results import Evaluation
from rlt_sb3.experiment.report import read_evaluations

#: groups of states in the table
GROUPS = 4
#: objects that move less between initial states are left out, standard deviation in m
STILL = 1e-3


def outcomes(runs: list[Path]) -> tuple[tuple[str, int, str], list[int], dict[str, np.ndarray]]:
    """
    Read the outcomes of runs on the same held-out states.

    :param runs: folders of finished runs
    :return: task (suite, index, assets), initial states, and for the VLA and the model the successes (runs, states)
    :raises ValueError: if a run has several tasks, or the runs differ in task, assets, algorithm or states
    """
    read = [_outcomes(run) for run in runs]
    task, states, algorithm, first = read[0]
    for run, other in zip(runs, read, strict=True):
        if other[:3] != (task, states, algorithm):
            raise ValueError(f"{run} differs from {runs[0]} in task, assets, algorithm or held-out states.")
    return task, states, {policy: np.array([solved[policy] for *_, solved in read]) for policy in first}


def _outcomes(run: Path) -> tuple[tuple[str, int, str], list[int], str, dict[str, list[bool]]]:
    """Read task, initial states, algorithm and successes of one run."""
    data = read_evaluations(run)
    env, algorithm = data["config"]["env"], data["config"]["algorithm"]
    played = [Evaluation.from_dict(data[name]) for name in ("vla", algorithm)]
    tasks = sorted({row.task_id for row in played[0].rows})
    if len(tasks) != 1:
        raise ValueError(f"{run} must be of one task, it has {tasks}.")
    task, states = (env["suite"], tasks[0], env["assets"] or "auto"), [row.init_index for row in played[0].rows]
    return task, states, algorithm, {one.policy: [row.success for row in one.rows] for one in played}


def places(suite: str, task: int, assets: str, states: list[int]) -> dict[str, np.ndarray]:
    """
    Find where the objects of a task stand in its held-out states.

    :param suite: its suite
    :param task: index in the suite
    :param assets: as in the environment
    :param states: numbers of the initial states
    :return: object -> (states, 2), m
    """
    prepare_libero(resolve_assets(assets).path)
    from rlt_gym.libero.worker.simulator import LiberoSimulator

    simulator = LiberoSimulator(suite, task, image_size=64, render="fast")
    found = []
    try:
        for state in states:
            simulator.reset("eval", state, observe=False)
            found.append(simulator.object_positions()[:, :2])
        names = list(simulator.problem.obj_body_id)
    finally:
        simulator.close()
    return {name: np.stack(found)[:, place] for place, name in enumerate(names)}


def differences(
    where: dict[str, np.ndarray], solved: dict[str, np.ndarray]
) -> list[tuple[str, str, np.ndarray, float]]:
    """
    Find the axes along which success depends on an object's place.

    :param where: of :func:`places`
    :param solved: of :func:`outcomes`
    :return: object, axis, its coordinate in each state, and the smaller corrected p of the policies; smallest p first
    """
    axes = [
        (name, axis, points[:, number])
        for name, points in where.items()
        for number, axis in enumerate("xy")
        if points[:, number].std() > STILL
    ]
    found = []
    for name, axis, x in axes:
        # one value for each state, the share of the runs that solve it: runs of one task are not independent states
        shares = [successes.mean(axis=0) for successes in solved.values()]
        groups = [(x[share >= 0.5], x[share < 0.5]) for share in shares]
        values = [mannwhitneyu(good, bad).pvalue if len(good) and len(bad) else 1.0 for good, bad in groups]
        found.append((name, axis, x, min(1.0, min(values) * len(axes) * len(values))))
    return sorted((row for row in found if row[3] < 0.05), key=lambda row: row[3])


def table(found: list[tuple[str, str, np.ndarray, float]], solved: dict[str, np.ndarray]) -> str:
    """
    Make the table.

    :param found: of :func:`differences`
    :param solved: of :func:`outcomes`
    :return: Markdown
    """
    lines = [f"| object | axis | place in mm | {' | '.join(solved)} | p |", "|---" * (len(solved) + 4) + "|"]
    for name, axis, x, p in found:
        for group in np.array_split(np.argsort(x, kind="stable"), GROUPS):
            ends = f"{1000 * x[group].min():.0f} to {1000 * x[group].max():.0f}"
            counts = [f"{successes[:, group].sum()}/{successes[:, group].size}" for successes in solved.values()]
            lines.append(f"| {name} | {axis} | {ends} | {' | '.join(counts)} | {p:.0e} |")
    return "\n".join(lines)


def main() -> None:
    """Read the runs, reset the simulator to their states, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs of one task")
    parser.add_argument("--json", type=Path, help="also write places and successes here")
    args = parser.parse_args()
    try:
        task, states, solved = outcomes(args.runs)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    where = places(*task, states)
    found = differences(where, solved)
    shown = {"places": where, "solved": solved}
    lists = {key: {name: array.tolist() for name, array in arrays.items()} for key, arrays in shown.items()}
    write_json(args, states=states, **lists)
    print(table(found, solved) if found else "Success does not depend on where one object stands.")


if __name__ == "__main__":
    main()
