"""The table and the self-contained HTML page of an evaluation on suites, from its result alone."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np

from rlt_sb3.common.files import replacing
from rlt_sb3.evaluation.benchmark import BenchmarkResult
from rlt_sb3.evaluation.results import Evaluation


def stated(result: BenchmarkResult) -> dict[str, str]:
    """
    Say under which conditions a number holds.

    :param result: an evaluation
    :return: name -> what was so, in words
    """
    protocol, played = result.header["protocol"], result.header["played"]
    changed = f", changed: {', '.join(protocol['changed'])}" if protocol["changed"] else ""
    horizons = ", ".join(f"{suite} {steps}" for suite, steps in protocol["horizons"].items())
    episodes, changes = result.header["episodes"], played.get("perturbations", {})
    return {
        "protocol": f"{protocol['name']}{changed} ({protocol['about']})",
        "horizons": f"{horizons} control steps, after {protocol['settle_steps']} to settle",
        "initial states": f"numbers 0 to {episodes - 1} of every task, each once"
        + (" (LIBERO has 50, the others are sampled from its placement regions)" if episodes > 50 else ""),
        "replanning": f"every {played['chunk_length']} of {result.header['vla']['horizon']} control steps",
        "pictures": f"{played['image_size']} x {played['image_size']}, {played['render']}, {played['assets']} assets",
        "noise": f"seed {protocol['seed']}" if result.header["vla"]["stochastic"] else "none",
        "changed scenes": ", ".join(f"{kind} {strength:g}" for kind, strength in changes.items()) or "none",
    }


def table(result: BenchmarkResult) -> list[str]:
    """
    Write an evaluation as lines of text.

    :param result: an evaluation
    :return: what was evaluated how, then a line per suite and task, then the mean of the suites
    """
    lines = [f"{'policy':<16} {result.header['policy']} (fingerprint {result.header['vla']['fingerprint'][:12]})"]
    lines += [f"{name:<16} {text}" for name, text in stated(result).items()]
    for name, suite in result.suites.items():
        lines.append(f"{name:<16} {'all':>4}  {suite}")
        lines += [f"{'':<16} {task:>4}  {part}" for task, part in suite.per_task().items()]
    mean = result.mean_of_suites
    if mean is not None and len(result.header["tasks"]) > 1:
        lines.append(f"{'mean of suites':<16} {'':>4}  {mean:.1%}")
    if result.left:
        lines.append(f"NOT COMPLETE: {len(result.left)} of {len(result.places)} episodes are left")
    return lines


def write_page(path: Path, result: BenchmarkResult) -> Path:
    """
    Write the page of an evaluation beside its JSON file.

    :param path: the JSON file, in whose folder the films are
    :param result: the evaluation
    :return: the page
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("rlt_sb3.experiment"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    header = result.header
    page = environment.get_template("evaluation.html.j2").render(
        policy=header["policy"],
        vla=header["vla"],
        stated=stated(result),
        suites=[_suite(result, name, suite) for name, suite in result.suites.items()],
        mean=None if result.mean_of_suites is None else f"{result.mean_of_suites:.1%}",
        left=len(result.left),
        total=len(result.places),
        shard=result.shard,
        films=[film for film in _films(path, result) if film["video"]],
        versions=_one_or_all(header["versions"]),
        machine=header["machine"],
        num_envs=header["num_envs"],
    )
    target = path.with_suffix(".html")
    with replacing(target) as temporary:
        temporary.write_text(page)
    return target


def _one_or_all(versions: Any) -> dict[str, str]:
    """Join the versions of the parts of an evaluation, where they differ."""
    if isinstance(versions, dict):
        return versions
    names = dict.fromkeys(name for entry in versions for name in entry)
    return {name: " / ".join(dict.fromkeys(entry.get(name, "–") for entry in versions)) for name in names}


def _row(evaluation: Evaluation) -> dict[str, Any]:
    low, high = evaluation.interval
    steps = evaluation.steps_to_success
    return {
        "successes": f"{evaluation.successes}/{evaluation.n}",
        "rate": f"{evaluation.rate:.0%}",
        "interval": f"{low:.0%} to {high:.0%}",
        "steps": "–" if np.isnan(steps) else f"{steps:.0f}",
        "low": 100 * low,
        "width": 100 * (high - low),
        "at": 100 * evaluation.rate,
    }


def _suite(result: BenchmarkResult, name: str, suite: Evaluation) -> dict[str, Any]:
    tasks = [
        {"task": task, "instruction": result.instructions[f"{name}/{task}"], **_row(part)}
        for task, part in suite.per_task().items()
    ]
    return {"name": name, "horizon": result.header["protocol"]["horizons"][name], "tasks": tasks, **_row(suite)}


def _films(path: Path, result: BenchmarkResult) -> list[dict[str, Any]]:
    films = []
    for key in (f"{suite}/{task}" for suite, tasks in result.header["tasks"].items() for task in tasks):
        if key in result.films:
            film = result.films[key]
            file = path.parent / film["file"]
            films.append(
                {
                    "name": key,
                    "state": film["init_index"],
                    "instruction": result.instructions[key],
                    "video": base64.b64encode(file.read_bytes()).decode() if file.is_file() else None,
                }
            )
    return films
