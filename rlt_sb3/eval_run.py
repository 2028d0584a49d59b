"""``rlt eval``: evaluate models of a run; what it needs to know is in the run's own files."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlt_sb3.algorithms import as_predictor, get_algorithm, load_model
from rlt_sb3.checkpoints import all_checkpoints
from rlt_sb3.config import EvalConfig, TrainConfig, load_config
from rlt_sb3.evaluation import SPLITS, Evaluation, Predictor, StateResult, compare, csv_rows, dumps, evaluate
from rlt_sb3.progress import quiet_bar
from rlt_sb3.run_dir import replacing
from rlt_sb3.shards import merge, parse_shard
from rlt_sb3.train import check_device, make_env

if TYPE_CHECKING:
    import gymnasium as gym

MODELS = {"best": "best_model.zip", "last": "model.zip"}


def evaluate_run(config: EvalConfig) -> Evaluation:
    """Evaluate a run's model (or its frozen VLA) on fixed initial states and write JSON and CSV.

    :param config: which run, model and states
    :return: the outcome (with ``all_checkpoints``: of the best one)
    :raises ValueError: for a folder that is no run, an unknown model or split, before any process starts
    :raises MergeError: if the files of ``merge`` do not make one evaluation
    """
    if config.merge is not None:
        return _merge(config)
    shard = parse_shard(config.shard)
    run = Path(config.run)
    settings = load_config(run / "config.yaml")
    check_device(config.device)
    split = config.split or ("selection" if config.all_checkpoints else "eval")
    if split not in SPLITS:
        raise ValueError(f"Unknown split {split!r}; choose one of {SPLITS}.")
    if config.num_envs is not None:
        settings.env.num_envs = config.num_envs
    settings.env.render_mode = None
    n_states = config.n_states
    if n_states is None:
        n_states = settings.evaluation.selection_states if split == "selection" else settings.evaluation.n_states
    models = _models(config, run, settings)
    env = make_env(settings.env, split, settings.seed)
    try:
        session = _Session(env, n_states, split, shard, config.progress)
        vla = _vla(run, session) if config.vla and "vla" not in models else None
        results = {label: session.play(policy, name) for label, (name, policy, _) in models.items()}
    finally:
        env.close()
    if config.all_checkpoints:
        return _write_table(config, run, split, results, vla)
    ((label, (_, _, file)),) = models.items()
    result = results[label]
    data = {
        "run": str(run),
        "model": config.model,
        "n_states": n_states,
        "model_sha256": hashlib.sha256(file.read_bytes()).hexdigest() if file else None,
        "settings": {"env": asdict(settings.env) | {"num_envs": None}},
        **result.to_dict(),
    }
    if vla is not None:
        data["vla"] = vla.to_dict()
    suffix = ""
    if config.shard is not None:
        data["shard"] = [shard[0] + 1, shard[1]]
        suffix = f"-{shard[0] + 1}of{shard[1]}"
    path = Path(config.out) if config.out else run / f"eval-{label}-{split}{suffix}.json"
    _write(path, data)
    return result


class _Session:
    """One environment on which several policies play the same states."""

    def __init__(self, env: gym.vector.VectorEnv, n_states: int, split: str, shard: tuple[int, int], progress: bool):
        self.env, self.n_states, self.split, self.shard, self.progress = env, n_states, split, shard, progress

    @property
    def pairs(self) -> list[int]:
        return list(range(self.shard[0], self.n_states, self.shard[1]))

    def play(self, policy: str | Predictor, name: str) -> Evaluation:
        with quiet_bar(total=len(self.pairs), disable=not self.progress, desc=name) as bar:

            def on_episode(row: StateResult) -> None:
                bar.update(1)

            return evaluate(
                policy, self.env, self.n_states,
                split=self.split, name=name, on_episode=on_episode, shard=self.shard,
            )  # fmt: skip


def _models(
    config: EvalConfig, run: Path, settings: TrainConfig
) -> dict[str, tuple[str, str | Predictor, Path | None]]:
    """``label -> (name for tables, policy, file)``."""
    algorithm = settings.algorithm
    title = get_algorithm(algorithm).label
    if config.all_checkpoints:
        found = all_checkpoints(run)
        if not found:
            raise ValueError(f"{run} has no checkpoints (folder {run / 'checkpoints'}).")
        return {
            c.path.name: (f"{title} ({c.path.name})", _load(algorithm, c.model, config.device), c.model) for c in found
        }
    if config.model == "vla":
        return {"vla": ("frozen VLA", "vla", None)}
    path = run / MODELS[config.model] if config.model in MODELS else Path(config.model)
    if not path.is_file():
        raise ValueError(f"There is no model {path}; model is 'best', 'last', 'vla' or the path of a saved model.")
    label = config.model if config.model in MODELS else path.stem
    return {label: (f"{title} ({label})", _load(algorithm, path, config.device), path)}


def _load(algorithm: str, path: Path, device: str) -> Predictor:
    import torch

    # See rlt_sb3.train: before any software OpenGL.
    import torch._dynamo

    torch.set_num_threads(1)
    return as_predictor(algorithm, load_model(algorithm, path, device=device))


def _vla(run: Path, session: _Session) -> Evaluation:
    """The frozen VLA on the session's states: from the run's own evaluation where it has them, else played."""
    from rlt_sb3.report import read_evaluations

    key = {"eval": "vla", "selection": "vla_selection"}.get(session.split, "")
    try:
        known = Evaluation.from_dict(read_evaluations(run)[key])
    except (KeyError, ValueError):
        return session.play("vla", "frozen VLA")
    rows = {row.pair: row for row in known.rows}
    if any(pair not in rows for pair in session.pairs):
        return session.play("vla", "frozen VLA")
    return Evaluation("frozen VLA", session.split, [rows[pair] for pair in session.pairs])


def _merge(config: EvalConfig) -> Evaluation:
    assert config.merge is not None
    files = [Path(name) for name in config.merge]
    data = merge(files)
    _write(Path(config.out) if config.out else files[0].with_name(f"{files[0].stem}-merged.json"), data)
    return Evaluation.from_dict(data)


def _write(path: Path, data: dict[str, Any]) -> None:
    """JSON and CSV of an evaluation, and the table on the terminal."""
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
    with replacing(path) as temporary:
        temporary.write_text(dumps(data))
    with replacing(path.with_suffix(".csv")) as temporary:
        temporary.write_text(csv_rows(evaluations))
    print("\n".join([*lines, f"written: {path}"]))


def _write_table(
    config: EvalConfig, run: Path, split: str, results: dict[str, Evaluation], vla: Evaluation | None
) -> Evaluation:
    """All checkpoints, one line each."""
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
    path = Path(config.out) if config.out else run / f"eval-checkpoints-{split}.json"
    with replacing(path) as temporary:
        temporary.write_text(dumps(data))
    print("\n".join([*lines, f"written: {path}"]))
    return best
