"""``rlt eval RUN``: evaluate a model of a run; what it needs to know is in the run's own files."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rlt_sb3.config import EvalConfig, load_config
from rlt_sb3.evaluation import SPLITS, Comparison, Evaluation, Predictor, compare, csv_rows, dumps, evaluate
from rlt_sb3.run_dir import replacing
from rlt_sb3.train import make_env

MODELS = {"best": "best_model.zip", "last": "model.zip"}


def evaluate_run(config: EvalConfig) -> Evaluation:
    """Evaluate a run's model (or its frozen VLA) on fixed initial states and write JSON and CSV.

    :param config: which run, model and states
    :return: the outcome
    :raises ValueError: for a folder that is no run, an unknown model or split, before any process starts
    """
    from tqdm import tqdm

    run = Path(config.run)
    settings = load_config(run / "config.yaml")
    if config.split not in SPLITS:
        raise ValueError(f"Unknown split {config.split!r}; choose one of {SPLITS}.")
    if config.num_envs is not None:
        settings.env.num_envs = config.num_envs
    settings.env.render_mode = None
    n_states = config.n_states
    if n_states is None:
        n_states = settings.evaluation.selection_states if config.split == "selection" else settings.evaluation.n_states
    policy = load_policy(config.model, run)
    name = "frozen VLA" if config.model == "vla" else f"RLT ({config.model})"
    env = make_env(settings.env, config.split, settings.seed)
    try:
        with tqdm(total=n_states, disable=not config.progress, desc=name) as bar:
            result = evaluate(
                policy, env, n_states, split=config.split, name=name, on_episode=lambda row: _advance(bar)
            )
    finally:
        env.close()
    label = config.model if config.model in (*MODELS, "vla") else Path(config.model).stem
    path = Path(config.out) if config.out else run / f"eval-{label}-{config.split}.json"
    per_task = {str(task): part.to_dict() for task, part in result.per_task().items()}
    with replacing(path) as temporary:
        temporary.write_text(dumps(result.to_dict() | {"per_task": per_task}))
    with replacing(path.with_suffix(".csv")) as temporary:
        temporary.write_text(csv_rows([result]))
    print(f"{name} on the {config.split} states of {run}: {result}")
    for task, part in result.per_task().items():
        print(f"  task {task}: {part}")
    comparison = _against_vla(run, result)
    if comparison is not None:
        print(f"  against the run's frozen VLA on the same states: {asdict(comparison)}")
    print(f"written: {path}")
    return result


def load_policy(model: str, run: Path) -> str | Predictor:
    """The policy that ``--model`` names.

    :param model: "best", "last", "vla" or a path
    :param run: folder of the run
    :raises ValueError: if there is no such model
    """
    if model == "vla":
        return model
    path = run / MODELS[model] if model in MODELS else Path(model)
    if not path.is_file():
        raise ValueError(f"There is no model {path}; model is 'best', 'last', 'vla' or the path of a saved model.")
    import torch

    # See rlt_sb3.train: before any software OpenGL.
    import torch._dynamo

    from rlt_sb3 import RLT

    torch.set_num_threads(1)
    return RLT.load(path, device="cpu")


def _against_vla(run: Path, result: Evaluation) -> Comparison | None:
    """Paired with the frozen VLA's evaluation in the run's report, where it has the same states."""
    from rlt_sb3.report import read_evaluations

    key = {"eval": "vla", "selection": "vla_selection"}.get(result.split)
    try:
        vla = Evaluation.from_dict(read_evaluations(run)[key or ""])
        return compare(vla, result)
    except (KeyError, ValueError):
        return None


def _advance(bar) -> None:
    bar.update(1)
