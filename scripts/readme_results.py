"""
The rows of README's table of results, from finished runs of the demo.

    rlt train --config demo --seed 1                                              # and seeds 0 and 2
    python scripts/readme_results.py runs/demo runs/demo-2 runs/demo-3            # prints the table
    python scripts/readme_results.py --write runs/demo runs/demo-2 runs/demo-3    # puts it into README.md
"""

import argparse
import re
from pathlib import Path

from rlt_sb3.evaluation.compare import compare
from rlt_sb3.evaluation.results import Evaluation
from rlt_sb3.experiment.practice import lowest, practicing, training_minutes
from rlt_sb3.experiment.report import read_evaluations

README = Path(__file__).parent.parent / "README.md"
#: the lines between these two are written by this script
MARKS = ("<!-- results: begin -->\n", "<!-- results: end -->")
HEAD = (
    "| task | seed | frozen VLA | RLT | fixed / broken | lowest evaluation of the practicing actor "
    "| robot minutes | minutes |\n"
    "|---|---|---|---|---|---|---|---|\n"
)


def rate(evaluation: Evaluation) -> str:
    """Return k/n with Wilson's 95 % interval."""
    low, high = evaluation.interval
    return f"{evaluation.successes}/{evaluation.n} ({low:.0%} to {high:.0%})".replace("%", " %")


def row(run: Path) -> str:
    """
    Make a run's line of the table.

    :param run: folder of a finished run
    :return: its line of the table
    """
    data = read_evaluations(run)
    env, seed = data["config"]["env"], data["config"]["seed"]
    vla, rlt = (Evaluation.from_dict(data[name]) for name in ("vla", "rlt"))
    paired = compare(vla, rlt)
    point = lowest(data)
    assert point is not None, f"{run} has no selection evaluation"
    worst = practicing(point)
    task = f"{env['suite']} {', '.join(map(str, env['task_ids']))}"
    return (
        f"| {task} | {seed} | {rate(vla)} | {rate(rlt)} | {paired.fixed} / {paired.broken} | "
        f"{worst['successes']}/{worst['n']} (VLA: {data['vla_selection']['successes']}/{worst['n']}) | "
        f"{training_minutes(data) or '-'} | {data['minutes']:.0f} |\n"
    )


def put(table: str, text: str) -> str:
    """
    Put a table between the marks of a text.

    :param table: new contents
    :param text: of README
    :return: the text with the contents between the marks
    :raises ValueError: if it has not exactly one pair of marks
    """
    pattern = re.escape(MARKS[0]) + ".*?" + re.escape(MARKS[1])
    new, count = re.subn(pattern, lambda _: MARKS[0] + table + MARKS[1], text, flags=re.S)
    if count != 1:
        raise ValueError(f"README must have one pair of {MARKS}, found {count}.")
    return new


def main() -> None:
    """Print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--write", action="store_true", help="write into README.md instead of printing")
    args = parser.parse_args()
    table = HEAD + "".join(map(row, args.runs))
    if args.write:
        README.write_text(put(table, README.read_text()))
    else:
        print(table, end="")


if __name__ == "__main__":
    main()
