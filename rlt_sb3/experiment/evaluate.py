"""``rlt eval``: of a run, of any frozen VLA, or the parts of an evaluation; and ``rlt compare``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rlt_sb3.common.errors import RunError
from rlt_sb3.common.files import replacing
from rlt_sb3.common.stats import mcnemar_p
from rlt_sb3.evaluation.benchmark import BenchmarkResult, differences, is_benchmark, merge, read
from rlt_sb3.evaluation.compare import Comparison
from rlt_sb3.evaluation.results import Evaluation, dumps
from rlt_sb3.experiment.eval_config import CompareConfig, EvalConfig
from rlt_sb3.experiment.evaluate_run import evaluate_run, merge_run
from rlt_sb3.experiment.evaluate_vla import evaluate_vla, write_result
from rlt_sb3.experiment.ray_eval import evaluate_on_ray


def evaluate(config: EvalConfig) -> Evaluation | BenchmarkResult:
    """
    Evaluate what the settings name.

    :param config: settings of the command
    :return: the outcome
    :raises ValueError: for settings that do not go together, before anything is loaded
    """
    config.check()
    if config.workers is not None:
        return evaluate_on_ray(config, evaluate)
    if config.merge is not None:
        files = [Path(name) for name in config.merge]
        if not any(is_benchmark(file) for file in files):
            return merge_run(config)
        path = Path(config.out) if config.out else files[0].with_name(f"{files[0].stem}-merged.json")
        return write_result(path, merge(files), [file.parent for file in files], config.films)
    return evaluate_run(config) if config.run is not None else evaluate_vla(config)


def compare_files(config: CompareConfig) -> Comparison:
    """
    Compare two evaluations state by state: ``rlt compare A.json B.json``.

    :param config: the files
    :return: the comparison over all suites
    :raises FileNotFoundError: if a file is missing
    :raises ValueError: if a file is no evaluation
    :raises RunError: if the two have other states or another protocol
    """
    first, second = read(Path(config.first)), read(Path(config.second))
    protocols = _protocol(first), _protocol(second)
    different = differences(*protocols, [*protocols[0]])
    if different and not config.any_protocol:
        raise RunError(
            f"{config.second} was played under another protocol than {config.first}: {different}. "
            "Pass --any-protocol to compare them all the same."
        )
    outcomes = [
        {(name, row.task_id, row.init_index): row.success for name, rows in result.rows.items() for row in rows}
        for result in (first, second)
    ]
    common = [key for key in outcomes[0] if key in outcomes[1]]
    if not common:
        raise RunError(f"{config.first} and {config.second} have no initial state in common.")
    suites = list(dict.fromkeys(key[0] for key in common))
    pairs = {key: (outcomes[0][key], outcomes[1][key]) for key in common}
    comparisons = {suite: _compare([pair for key, pair in pairs.items() if key[0] == suite]) for suite in suites}
    whole = _compare(list(pairs.values()))
    sides = (("first", first, config.first), ("second", second, config.second))
    lines = [f"{side:<16} {result.header['policy']} ({name})" for side, result, name in sides]
    if different:
        lines.append(f"DIFFERENT PROTOCOLS: {different}")
    for _, result, name in sides:
        alone = sum(map(len, result.rows.values())) - len(common)
        if alone:
            lines.append(f"left out: {alone} states that only {name} has")
    for name, entry in [*comparisons.items(), *([("all", whole)] if len(suites) > 1 else [])]:
        n = entry.fixed + entry.broken + entry.both + entry.neither
        lines.append(
            f"{name:<16} {entry.broken + entry.both}/{n} -> {entry.fixed + entry.both}/{n}: {entry.fixed} fixed, "
            f"{entry.broken} broken, {entry.both} both, {entry.neither} neither; McNemar p = {entry.p_value:.2g}"
        )
    print("\n".join(lines))
    if config.out is not None:
        data = {
            "first": config.first,
            "second": config.second,
            "different_protocols": different or None,
            "all": asdict(whole),
            "suites": {name: asdict(entry) for name, entry in comparisons.items()},
            "states": [
                {"suite": key[0], "task_id": key[1], "init_index": key[2], "first": a, "second": b}
                for key, (a, b) in sorted(pairs.items())
            ],
        }
        with replacing(Path(config.out)) as temporary:
            temporary.write_text(dumps(data))
    return whole


def _protocol(result: BenchmarkResult) -> dict[str, object]:
    """Take what must be equal for two success rates to mean the same; pictures may be those that each VLA needs."""
    protocol = result.header["protocol"]
    keys = ("horizons", "settle_steps", "chunk_length", "image_size", "render")
    played = result.header["played"]
    return {key: protocol[key] for key in keys} | {
        "assets": played["assets"],
        "perturbations": played.get("perturbations", {}),
    }


def _compare(pairs: list[tuple[bool, bool]]) -> Comparison:
    fixed, broken = pairs.count((False, True)), pairs.count((True, False))
    return Comparison(fixed, broken, pairs.count((True, True)), pairs.count((False, False)), mcnemar_p(fixed, broken))
