"""
What benchmarks/recipe.py says of its runs: one row for each run, tables, the statistics of the field, learning curves.

The field compares algorithms by the interquartile mean over tasks and seeds and by the probability of improvement, with
stratified bootstrap intervals (Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice",
2021).
"""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib
import numpy as np
from markdown_table import markdown_table

from rlt_sb3.common.robot_time import robot_minutes
from rlt_sb3.common.stats import mcnemar_p
from rlt_sb3.evaluation.compare import compare
from rlt_sb3.evaluation.results import Evaluation
from rlt_sb3.experiment.practice import practicing, steps_to
from rlt_sb3.experiment.report import read_evaluations

matplotlib.use("Agg")
from matplotlib import pyplot as plt

#: bootstrap samples of an interval
RESAMPLES = 2000
#: what settings are compared by: name -> how a table calls it
SCORES = {"area": "area under the curve", "last": "last selection evaluation", "held_out": "held-out states"}
#: robot minutes and control steps until the practicing actor solves 30 points more than the VLA, until it solves 90 %,
#: and in all
GOALS = {
    "minutes_to_30_points": "steps_to_30_points",
    "minutes_to_90": "steps_to_90",
    "robot_minutes": "control_steps",
}
#: control steps per second of LIBERO, as in all rows of the version that wrote robot minutes only
CONTROL_FREQUENCY = 20.0
#: a row's key: setting, task, seed
Key = tuple[str, str, int]


def key(row: dict[str, Any]) -> Key:
    """Return setting, task and seed of a row."""
    return row["setting"], row["task"], row["seed"]


def load_file(folder: Path) -> Path:
    """
    Name the file in which ``recipe.py`` notes the load of the machine.

    :param folder: of a run
    :return: the file beside the folder
    """
    return folder.with_name(f"{folder.name}.load.json")


def measure(run: Key, folder: Path) -> dict[str, Any]:
    """
    Measure a finished run.

    :param run: setting, task and seed
    :param folder: of the run
    :return: its row of the table; a rate of the selection states is ``successes / n``
    """
    data = read_evaluations(folder)
    vla, rlt = (Evaluation.from_dict(data[name]) for name in ("vla", data["config"]["algorithm"]))
    paired, first, points = compare(vla, rlt), data["vla_selection"], data["selection"]
    n = first["n"]
    actor = [practicing(point)["successes"] for point in points]
    # the practicing actor begins as the frozen VLA
    chunks, solved = [0, *(point["chunks"] for point in points)], [first["successes"], *actor]
    counts = [steps_to(data, rate, practicing) for rate in (first["successes"] / n + 0.3, 0.9)]
    practice: dict[str, float | None] = {}
    for (in_minutes, in_steps), count in zip(GOALS.items(), [*counts, points[-1]["control_steps"]], strict=True):
        practice[in_minutes] = None if count is None else robot_minutes(count, data["control_frequency"])
        practice[in_steps] = count
    return {
        **dict(zip(("setting", "task", "seed"), run, strict=True)),
        "vla": {"successes": vla.successes, "n": vla.n, "wilson_95": vla.interval},
        "rlt": {"successes": rlt.successes, "n": rlt.n, "wilson_95": rlt.interval},
        "solved": " ".join(f"{row.task_id}/{row.init_index}" for row in rlt.rows if row.success),
        "fixed": paired.fixed,
        "broken": paired.broken,
        "p_value": paired.p_value,
        "steps_where_both_succeed": _steps(vla, rlt),
        "selection": {
            "n": n,
            "vla": first["successes"],
            "vla_wilson_95": list(Evaluation.from_dict(first).interval),
            "chunks": chunks[1:],
            "practicing": actor,
            "deployed": [point["evaluation"]["successes"] for point in points],
        },
        "area": float(np.trapezoid(solved, chunks) / chunks[-1] / n),
        "last": actor[-1] / n,
        "held_out": rlt.successes / rlt.n,
        **practice,
        "wall_minutes": data["minutes"],
        "load": json.loads(load_file(folder).read_text()) if load_file(folder).exists() else None,
    }


def _steps(vla: Evaluation, rlt: Evaluation) -> list[float] | None:
    """Mean control steps to success of both on the states that both solve."""
    before, after = ({(row.task_id, row.init_index): row.steps for row in e.rows if row.success} for e in (vla, rlt))
    both = before.keys() & after.keys()
    return [float(np.mean([steps[state] for state in both])) for steps in (before, after)] if both else None


def rate(found: dict[str, Any]) -> str:
    """Return k/n and Wilson's interval of one entry of a row."""
    low, high = found["wilson_95"]
    return f"{found['successes']}/{found['n']} ({100 * low:.0f} % to {100 * high:.0f} %)"


def beside(row: dict[str, Any], other: dict[str, Any] | None) -> str:
    """
    Compare the held-out states that two runs solve.

    :param row: of :func:`measure`
    :param other: of the same task and seed with the first setting; ``None`` if that run is missing
    :return: how many only ``row`` solves, how many only ``other``, and McNemar's p
    """
    if other is None or other is row or any("solved" not in one for one in (row, other)):  # rows of an older version
        return "-"
    mine, theirs = (set(one["solved"].split()) for one in (row, other))
    better, worse = len(mine - theirs), len(theirs - mine)
    return f"{better} / {worse}, {mcnemar_p(better, worse):.1g}"


def goals(row: dict[str, Any]) -> list[tuple[str, str]]:
    """
    Say how much practice the goals of a run took.

    :param row: of :func:`measure`
    :return: control steps and robot minutes for each of :data:`GOALS`, a dash for what was not reached or is not known
    """
    found = []
    for in_minutes, in_steps in GOALS.items():
        minutes = row[in_minutes]
        steps = row.get(in_steps, None if minutes is None else 60.0 * CONTROL_FREQUENCY * minutes)
        found.append(("-" if steps is None else f"{steps:.0f}", "-" if minutes is None else f"{minutes:.1f}"))
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """
    Make the table of the runs.

    :param rows: of :func:`measure`; their first setting is the one that the others are compared with
    :return: Markdown, one line per run
    """
    first = {(row["task"], row["seed"]): row for row in rows if row["setting"] == rows[0]["setting"]}
    head = (
        "task", "setting", "seed", "frozen VLA", "RLT", "fixed / broken, McNemar p",
        f"better / worse than {rows[0]['setting']}, McNemar p", "steps where both succeed",
        "practicing actor on the selection states (VLA)", "area",
        "practicing actor: robot minutes to +30 points, to 90 %, in all", "minutes",
        "lowest evaluation of the practicing actor", "practicing actor: control steps to +30 points, to 90 %, in all",
    )  # fmt: skip
    lines = [head]
    for row in rows:
        selection, (steps, minutes) = row["selection"], zip(*goals(row), strict=True)
        n = selection["n"]
        lines.append((
            row["task"], row["setting"], str(row["seed"]), rate(row["vla"]), rate(row["rlt"]),
            f"{row['fixed']} / {row['broken']}, {row['p_value']:.1g}",
            beside(row, first.get((row["task"], row["seed"]))),
            " -> ".join(f"{mean:.0f}" for mean in row["steps_where_both_succeed"] or []) or "-",
            f"{', '.join(map(str, selection['practicing']))} of {n} ({selection['vla']})",
            f"{row['area']:.2f}", ", ".join(minutes), f"{row['wall_minutes']:.0f}",
            f"{min(selection['practicing'])}/{n} (VLA: {selection['vla']}/{n})", ", ".join(steps),
        ))  # fmt: skip
    return markdown_table(lines)


def by_setting(rows: list[dict[str, Any]]) -> str:
    """
    Make the table with the seeds of a setting in one line.

    :param rows: of :func:`measure`; their first setting is the one that the others are compared with
    :return: Markdown, a line for each task's frozen VLA, as in the first of its rows, and for each of its settings; a
        semicolon separates seeds
    """
    found = {key(row): row for row in rows}
    settings, tasks = (list(dict.fromkeys(row[name] for row in rows)) for name in ("setting", "task"))
    seeds = sorted({row["seed"] for row in rows})
    lines: list[tuple[str, ...]] = [(
        "task", "setting", f"held-out states solved, seed {'; '.join(map(str, seeds))}",
        f"better / worse than {settings[0]}, McNemar p", "practicing actor on the selection states", "area",
        "lowest evaluation of the practicing actor",
        "practicing actor: control steps (robot minutes) to +30 points, to 90 %, in all", "minutes",
    )]  # fmt: skip

    def cells(setting: str, task: str, seed: int) -> tuple[str, ...]:
        if (row := found.get((setting, task, seed))) is None:
            return ("-",) * 7
        actor = row["selection"]["practicing"]
        practice = ", ".join("-" if steps == "-" else f"{steps} ({minutes})" for steps, minutes in goals(row))
        return (
            rate(row["rlt"]), beside(row, found.get((settings[0], task, seed))), ", ".join(map(str, actor)),
            f"{row['area']:.2f}", str(min(actor)), practice, f"{row['wall_minutes']:.0f}",
        )  # fmt: skip

    for task in tasks:
        of_task = [row for row in rows if row["task"] == task]
        selection = of_task[0]["selection"]
        solved = f"{selection['vla']} of {selection['n']}"
        lines.append((task, "frozen VLA", rate(of_task[0]["vla"]), "-", solved, "-", solved, "-", "-"))
        for setting in settings:
            if any(row["setting"] == setting for row in of_task):
                columns = zip(*(cells(setting, task, seed) for seed in seeds), strict=True)
                lines.append((task, setting, *map("; ".join, columns)))
    return markdown_table(lines)


def load_rliable() -> tuple[ModuleType, ModuleType]:
    """
    Import the package of the statistics.

    :return: rliable's modules ``library`` and ``metrics``
    :raises ImportError: if it is missing
    """
    try:
        from rliable import library, metrics
    except ImportError as error:
        raise ImportError("The comparison of settings needs rliable: pip install 'rlt[benchmarks]'.") from error
    return library, metrics


def matrices(rows: list[dict[str, Any]], score: str) -> dict[str, np.ndarray]:
    """
    Arrange a score as rliable takes it.

    :param rows: of :func:`measure`
    :param score: a key of :data:`SCORES`
    :return: setting -> (seeds, tasks), of the tasks and seeds that every setting has finished
    """
    found = {key(row): row[score] for row in rows}
    settings = list(dict.fromkeys(setting for setting, _, _ in found))
    seeds = list(dict.fromkeys(seed for _, _, seed in found))
    tasks = list(dict.fromkeys(task for _, task, _ in found))
    tasks = [task for task in tasks if all((one, task, seed) in found for one in settings for seed in seeds)]
    return {one: np.array([[found[one, task, seed] for task in tasks] for seed in seeds]) for one in settings}


def aggregate(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    Compare settings over tasks and seeds.

    :param rows: of :func:`measure`
    :return: for each score and setting: interquartile mean, probability of improvement over the first setting, and
        their stratified bootstrap intervals (95 %)
    :raises ImportError: if rliable is missing
    """
    library, metrics = load_rliable()
    bootstrap = {"reps": RESAMPLES, "random_state": np.random.RandomState(0)}
    results = []
    for score in SCORES:
        scores = matrices(rows, score)
        first = next(iter(scores))
        if not scores[first].size:
            continue
        means, of_means = library.get_interval_estimates(
            scores, lambda x: np.array([metrics.aggregate_iqm(x)]), **bootstrap
        )
        pairs = {name: (values, scores[first]) for name, values in scores.items() if name != first}
        better, of_better = (
            library.get_interval_estimates(pairs, metrics.probability_of_improvement, **bootstrap)
            if pairs
            else ({}, {})
        )
        for name, values in scores.items():
            row = {"score": score, "setting": name, "runs": values.size, "iqm": float(means[name][0])}
            row["iqm_95"] = of_means[name].ravel().tolist()
            if name in better:
                row |= {"better": float(better[name]), "better_95": np.ravel(of_better[name]).tolist()}
            results.append(row)
    return results


def comparison(results: list[dict[str, Any]]) -> str:
    """
    Make the table of the settings.

    :param results: of :func:`aggregate`
    :return: Markdown, one line per score and setting
    """
    lines = [("score", "setting", "runs", "interquartile mean", "probability of improvement")]
    for row in results:
        mean = f"{row['iqm']:.2f} ({row['iqm_95'][0]:.2f} to {row['iqm_95'][1]:.2f})"
        low, high = row.get("better_95", (0.0, 0.0))
        better = f"{row['better']:.2f} ({low:.2f} to {high:.2f})" if "better" in row else "-"
        lines.append((SCORES[row["score"]], row["setting"], str(row["runs"]), mean, better))
    return markdown_table(lines)


def figure(rows: list[dict[str, Any]], path: Path) -> None:
    """
    Draw the practicing actors' learning curves, a panel for each task.

    Lines are means over seeds, and bands reach from the worst to the best seed. Gray is the frozen VLA with Wilson's
    interval.

    :param rows: of :func:`measure`
    :param path: where the picture goes
    """
    tasks, settings = (list(dict.fromkeys(row[name] for row in rows)) for name in ("task", "setting"))
    lines = -(-len(tasks) // 2)
    fig, axes = plt.subplots(lines, 2, figsize=(8, 2.8 * lines), sharey=True, squeeze=False, layout="constrained")
    for ax in axes.flat[len(tasks) :]:
        ax.set_visible(False)
    for ax, task in zip(axes.flat, tasks, strict=False):
        for color, setting in enumerate(settings):
            curves = [row["selection"] for row in rows if (row["task"], row["setting"]) == (task, setting)]
            if not curves:
                continue
            solved = [dict(zip([0, *c["chunks"]], [c["vla"], *c["practicing"]], strict=True)) for c in curves]
            chunks = sorted(set.intersection(*map(set, solved)))  # a resumed run may have a point of its own
            rates = np.array([[curve[at] for at in chunks] for curve in solved]) / curves[0]["n"]
            ax.fill_between(chunks, rates.min(0), rates.max(0), color=f"C{color}", alpha=0.2)
            ax.plot(chunks, rates.mean(0), color=f"C{color}", marker="o", label=f"{setting}, {len(curves)} seed(s)")
            if color == 0:
                ax.axhspan(*curves[0]["vla_wilson_95"], color="0.9", zorder=0, label="frozen VLA, 95 % interval")
                ax.axhline(curves[0]["vla"] / curves[0]["n"], color="0.5", linestyle="--")
        minutes = np.mean([row["robot_minutes"] for row in rows if row["task"] == task])
        ax.set(title=task, xlabel=f"action chunks of practice, {minutes:.0f} robot minutes in all", ylim=(0, 1.02))
    axes[0, 0].legend(loc="lower right", fontsize=7)
    for ax in axes[:, 0]:
        ax.set_ylabel("selection states solved")
    fig.savefig(path, dpi=110)
    plt.close(fig)
