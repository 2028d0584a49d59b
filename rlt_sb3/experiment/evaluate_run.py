"""``rlt eval``: evaluate models of a run; what it needs to know is in the run's own files."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rlt_sb3.common.files import replacing
from rlt_sb3.common.fingerprint import Fingerprint, check_run, of_run
from rlt_sb3.evaluation.compare import compare, describe_tasks_below
from rlt_sb3.evaluation.evaluate import Predictor, check_split, evaluate
from rlt_sb3.evaluation.results import Evaluation, StateResult, csv_rows, dumps
from rlt_sb3.evaluation.shards import merge, parse_shard
from rlt_sb3.experiment.algorithms import get_algorithm
from rlt_sb3.experiment.checkpoints import FOLDER, all_checkpoints
from rlt_sb3.experiment.config import TrainConfig, load_config
from rlt_sb3.experiment.environment import check_device, make_env
from rlt_sb3.experiment.eval_config import EvalConfig
from rlt_sb3.experiment.frozen_vla import NAME, known_vla
from rlt_sb3.experiment.models import as_predictor, check_fits, in_env, load_model
from rlt_sb3.experiment.parallel_eval import evaluate_in_parallel
from rlt_sb3.experiment.progress import quiet_bar

MODELS = {"best": "best_model.zip", "last": "model.zip"}
#: label -> (name for tables, file of the model; None for the frozen VLA)
Models = dict[str, tuple[str, Path | None]]
FROZEN_VLA = (NAME, None)


def evaluate_run(config: EvalConfig) -> Evaluation:
    """Evaluate a run's model (or its frozen VLA) on fixed initial states and write JSON and CSV.

    :param config: which run, model and states
    :return: the outcome (with ``all_checkpoints``: of the best one)
    :raises ValueError: for a folder that is no run, an unknown model or split, before any process starts; for other
        frozen weights than those that the run was trained on, before anything is played
    """
    config.check()
    shard = parse_shard(config.shard)
    assert config.run is not None
    run = Path(config.run)
    settings = load_config(run / "config.yaml")
    if config.device is not None:
        settings.env.device = config.device
    check_device(settings.env.device or "cpu")
    split = config.split or ("selection" if config.all_checkpoints else "eval")
    check_split(split)
    if config.num_envs is not None:
        settings.env.num_envs = config.num_envs
    if config.tasks is not None:
        settings.env.task_ids = list(config.tasks)
    if config.perturbations is not None:
        settings.env.kwargs["perturbations"] = dict(config.perturbations)
    settings.env.render_mode = None
    n_states = config.n_states
    if n_states is None:
        n_states = settings.evaluation.states(split)
    models = _models(config, run, settings)
    pairs = range(shard[0], n_states, shard[1])
    # with other tasks the same numbers are other states
    same_states = config.tasks is None and config.perturbations is None
    vla = known_vla(run, split, pairs) if config.beside_vla and same_states and "vla" not in models else None
    wanted = dict(models)
    if config.beside_vla and vla is None:
        wanted = {"vla": FROZEN_VLA} | models
    fingerprint = None
    if config.max_parallel > 1:
        results = _play_in_parallel(config, wanted, n_states, split)
    else:
        results, fingerprint = _play(config, settings, wanted, n_states, split, shard)
    if "vla" not in models:
        vla = results.pop("vla", vla)
    if config.all_checkpoints:
        return _write_table(config, run, split, results, vla)
    ((label, (_, file)),) = models.items()
    result = results[label]
    data = {
        "run": str(run),
        "model": config.model,
        "n_states": n_states,
        "model_sha256": hashlib.sha256(file.read_bytes()).hexdigest() if file else None,
        "settings": {"env": asdict(settings.env) | {"num_envs": None}},
        "fingerprint": fingerprint,
        **result.to_dict(),
    }
    if vla is not None:
        data["vla"] = vla.to_dict()
    if config.shard is not None:
        data["shard"] = [shard[0] + 1, shard[1]]
    _write(output_path(config), data)
    return result


def _play(
    config: EvalConfig, settings: TrainConfig, models: Models, n_states: int, split: str, shard: tuple[int, int]
) -> tuple[dict[str, Evaluation], Fingerprint | None]:
    """
    One after the other, on the same simulators.

    :return: outcomes, and which frozen weights the environment has
    """
    policies: dict[str, str | Predictor] = {
        label: "vla" if file is None else load_predictor(settings.algorithm, file, config.device or "cpu")
        for label, (_, file) in models.items()
    }
    env = make_env(settings.env, split, settings.seed)
    try:
        fingerprint = env.metadata.get("fingerprint")
        run = Path(config.run or "")
        check_run(run, of_run(run), fingerprint)
        results = {}
        for label, (_, file) in models.items():
            if file is not None:
                check_fits(policies[label], env, file)  # type: ignore[arg-type]
                policies[label] = in_env(settings.algorithm, policies[label], env, settings.settings)  # type: ignore[arg-type]
        for label, (name, _) in models.items():
            with quiet_bar(
                total=len(range(shard[0], n_states, shard[1])), disable=not config.progress, desc=name
            ) as bar:

                def on_episode(row: StateResult, bar: Any = bar) -> None:
                    bar.update(1)

                results[label] = evaluate(
                    policies[label], env, n_states, split=split, name=name, on_episode=on_episode, shard=shard
                )
        return results, fingerprint
    finally:
        env.close()


def _play_in_parallel(config: EvalConfig, models: Models, n_states: int, split: str) -> dict[str, Evaluation]:
    """Evaluate ``max_parallel`` models at a time, each with separate simulators."""
    assert config.run is not None
    arguments = [config.run, "--split", split, "--n_states", str(n_states)]
    for option, value in (("--num_envs", config.num_envs), ("--device", config.device), ("--tasks", config.tasks)):
        arguments += [] if value is None else [option, str(value)]
    files = {label: "vla" if file is None else str(file) for label, (_, file) in models.items()}
    results = evaluate_in_parallel(files, arguments, config.max_parallel, config.progress)
    return {label: replace(result, policy=models[label][0]) for label, result in results.items()}


def _models(config: EvalConfig, run: Path, settings: TrainConfig) -> Models:
    title = get_algorithm(settings.algorithm).label
    if config.all_checkpoints:
        found = all_checkpoints(run)
        if not found:
            raise ValueError(
                f"{run} has no checkpoints in {run / 'checkpoints'}: use save_every, or leave all_checkpoints out."
            )
        return {c.path.name: (f"{title} ({c.path.name})", c.model) for c in found}
    if config.model == "vla":
        return {"vla": FROZEN_VLA}
    path = run / MODELS[config.model] if config.model in MODELS else Path(config.model)
    if not path.is_file():
        raise ValueError(f"There is no model {path}; model is 'best', 'last', 'vla' or the path of a saved model.")
    label = _label(config.model)
    return {label: (f"{title} ({label})", path)}


def _label(model: str) -> str:
    """Name a model in tables and names of files; those of all checkpoints are the file model.zip in a folder each."""
    if model in (*MODELS, "vla"):
        return model
    path = Path(model).resolve()
    return path.parent.name if path.parent.parent.name == FOLDER else path.stem


def load_predictor(algorithm: str, path: Path, device: str) -> Predictor:
    """
    Load a model for playing; call this before simulators start.

    :param algorithm: of the run
    :param path: a saved model
    :param device: torch device
    :return: what :func:`~rlt_sb3.experiment.models.in_env` takes
    :raises ValueError: if the file is no model of this algorithm
    """
    import torch

    # See rlt_sb3.experiment.train: before any software OpenGL.
    import torch._dynamo

    torch.set_num_threads(1)
    return as_predictor(algorithm, load_model(algorithm, path, device=device))


def output_path(config: EvalConfig) -> Path:
    """
    Name the file of an evaluation.

    :param config: settings of the command, with a run and one model
    """
    if config.out is not None:
        return Path(config.out)
    assert config.run is not None
    label = _label(config.model)
    shard = "" if config.shard is None else "-" + config.shard.replace("/", "of")
    return Path(config.run) / f"eval-{label}-{config.split or 'eval'}{_suffix(config)}{shard}.json"


def _suffix(config: EvalConfig) -> str:
    """Return the part of the file's name that keeps an evaluation of other tasks or scenes from replacing the run's."""
    tasks = "" if config.tasks is None else "-tasks-" + "-".join(map(str, config.tasks))
    return tasks + config.scenes


def merge_run(config: EvalConfig) -> Evaluation:
    """Join the parts of the evaluation of a run's model, and write JSON and CSV.

    :param config: names the files
    :return: the outcome
    :raises MergeError: if the files do not make one evaluation
    """
    assert config.merge is not None
    files = [Path(name) for name in config.merge]
    data = merge(files)
    _write(Path(config.out) if config.out else files[0].with_name(f"{files[0].stem}-merged.json"), data)
    return Evaluation.from_dict(data)


def _write(path: Path, data: dict[str, Any]) -> None:
    """Write JSON and CSV of an evaluation, and print its table."""
    result = Evaluation.from_dict(data)
    evaluations = [result]
    data["per_task"] = {str(task): part.to_dict() for task, part in result.per_task().items()}
    lines = [f"{'policy':<28} {'task':>5}  success"]
    vla = Evaluation.from_dict(data["vla"]) if "vla" in data else None
    for evaluation in [result] if vla is None else [vla, result]:
        lines.append(f"{evaluation.policy:<28} {'all':>5}  {evaluation}")
        lines += [f"{'':<28} {task:>5}  {part}" for task, part in evaluation.per_task().items()]
    if vla is not None:
        paired = compare(vla, result)
        data["comparison"] = asdict(paired)
        evaluations.insert(0, vla)
        lines.append(
            f"paired on the same {result.n} initial states ({result.split}): {paired.fixed} fixed, {paired.broken} "
            f"broken, {paired.both} both, {paired.neither} neither; McNemar p = {paired.p_value:.2g}"
        )
        lines += filter(None, [describe_tasks_below(vla, result)])
    with replacing(path) as temporary:
        temporary.write_text(dumps(data))
    with replacing(path.with_suffix(".csv")) as temporary:
        temporary.write_text(csv_rows(evaluations))
    print("\n".join([*lines, f"written: {path}"]))


def _write_table(
    config: EvalConfig, run: Path, split: str, results: dict[str, Evaluation], vla: Evaluation | None
) -> Evaluation:
    """Write a table of all checkpoints, one line each."""
    best = max(results.values(), key=lambda e: (e.successes, -e.steps_to_success if e.successes else 0.0))
    lines = [f"{'policy':<28} success on the {split} states"]
    for result in ([vla] if vla is not None else []) + list(results.values()):
        lines.append(f"{result.policy:<28} {result}{'  <- best' if result is best else ''}")
    data: dict[str, Any] = {
        "run": str(run),
        "split": split,
        "checkpoints": {label: result.to_dict() for label, result in results.items()},
    }
    if vla is not None:
        data["vla"] = vla.to_dict()
    path = Path(config.out) if config.out else run / f"eval-checkpoints-{split}{_suffix(config)}.json"
    with replacing(path) as temporary:
        temporary.write_text(dumps(data))
    print("\n".join([*lines, f"written: {path}"]))
    return best
