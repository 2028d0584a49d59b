"""One run: the frozen VLA plays, an algorithm trains on top of it, the best model plays the same held-out states."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlt_gym.cluster.connection import ClusterError, connected
from rlt_gym.vla.base import VLAUnavailableError
from rlt_sb3.common.errors import RunError
from rlt_sb3.common.fingerprint import check_run
from rlt_sb3.evaluation.compare import Comparison, compare, describe_tasks_below
from rlt_sb3.evaluation.evaluate import check_n_states
from rlt_sb3.evaluation.results import Evaluation
from rlt_sb3.experiment.algorithms import algorithm_names, get_algorithm
from rlt_sb3.experiment.checkpoints import Checkpoint, find_checkpoint, later_checkpoints, resumable_checkpoints
from rlt_sb3.experiment.collecting import make_collectors
from rlt_sb3.experiment.config import TrainConfig, load_config, save_config
from rlt_sb3.experiment.context import Run
from rlt_sb3.experiment.environment import check_device, make_env, make_training_env, set_deterministic, set_threads
from rlt_sb3.experiment.frozen_vla import NAME, check_vla_of, check_weights_of
from rlt_sb3.experiment.interrupt import Interrupt
from rlt_sb3.experiment.models import as_predictor, check_names, in_env, load_model, resolve_settings
from rlt_sb3.experiment.practice import gated, lowest_point, milestones, practicing, training_minutes
from rlt_sb3.experiment.progress import Progress
from rlt_sb3.experiment.run_dir import RunDir
from rlt_sb3.experiment.token_report import check_token

if TYPE_CHECKING:
    from rlt_sb3.callbacks.selection import SelectionPoint

# A chunk of training costs this much more than one of evaluation (gradient steps); only the ETA depends on it.
TRAINING_COST = 1.5
# Chunks per episode until the first evaluation has measured it; only the ETA depends on it.
GUESSED_CHUNKS = 25.0


@dataclass
class TrainResult:
    """The outcome of a run.

    :param run: its folder
    :param vla: the frozen VLA on the held-out states
    :param best: the best model on the same states
    :param comparison: comparison of the two, state by state
    :param selection: evaluations during training, on the selection states
    """

    run: Path
    vla: Evaluation
    best: Evaluation
    comparison: Comparison
    selection: list[SelectionPoint]


def train(config: TrainConfig) -> TrainResult:
    """Run everything that ``make demo`` shows, or resume a run (``config.resume``).

    Three disjoint sets of initial states: training uses "train", the best model is chosen on "selection", and only
    "eval" is reported, on which frozen VLA and best model are paired.

    :param config: the run
    :return: the evaluations; every file is in the run's folder
    :raises ValueError: for settings that cannot work, before any process starts, and if the run to resume was
        trained on other frozen weights than the environment's, before anything is played
    :raises CheckpointError: if a checkpoint cannot be written or read
    :raises KeyboardInterrupt: after saving, if interrupted
    :raises RunError: after saving, if the frozen VLA runs elsewhere and cannot be reached any more, or if the cluster
        has no room for a worker any more
    """
    config.check()
    import torch

    # Building the first optimizer imports this lazily; after software OpenGL has been loaded that import can crash.
    import torch._dynamo  # noqa: F401

    from rlt_sb3.common.loggers import import_wandb
    from rlt_sb3.experiment.report import read_evaluations, write_report

    if config.rollout.workers is None or config.rollout.mode == "async":  # else each worker checks it on its machine
        check_device(config.env.device or "cpu")
    device = get_algorithm(config.algorithm).device(config.settings)
    check_device(device)
    resolve_settings(config.algorithm, config.model_settings)
    _check_budget(config)
    if config.wandb is not None:
        import_wandb()
    folder, checkpoint, data = _resumed(config)
    if folder is None:  # a run that was begun goes on
        for name, section in config.algorithms.items():
            check_names(name, section)
        check_token(config.env, config.accept_poor_token)
        check_vla_of(config)
    set_threads(config.torch_threads, device)
    set_deterministic(config.deterministic)
    with _cluster(config):
        result = _train(config, folder, checkpoint, data)
    write_report(result.run)
    print(summary(read_evaluations(result.run)))
    print(f"\nEverything is in {result.run}; open {result.run / 'report.html'}")
    return result


def _check_budget(config: TrainConfig) -> None:
    """
    Refuse a budget that ends in the warm-up. ``TrainConfig.check`` cannot: the defaults are in classes that need torch.

    :raises ValueError: names both settings
    """
    algorithm = get_algorithm(config.algorithm)
    known = {setting.name: setting.default for setting in algorithm.settings()}
    starts = (known | algorithm.defaults(1, 1) | config.settings).get("learning_starts", 0)
    if config.total_chunks <= starts:
        raise ValueError(
            f"total_chunks ({config.total_chunks:,}) must exceed {config.algorithm}.learning_starts ({starts:,}): the "
            "VLA would play the whole budget, and nothing would be learned. Raise the one or lower the other."
        )


def _train(
    config: TrainConfig, folder: Path | None, checkpoint: Checkpoint | None, data: dict[str, Any] | None
) -> TrainResult:
    """Make the environment, and carry out or resume the run in it."""
    env = eval_env = make_training_env(config, "eval")
    collectors = None
    progress = Progress(enabled=config.progress)
    with Interrupt() as interrupt:
        try:
            if folder is not None and data is not None:
                check_run(folder, data.get("fingerprint"), env.metadata.get("fingerprint"))
            elif config.evaluation.vla_of is not None:
                check_weights_of(Path(config.evaluation.vla_of), env.metadata.get("fingerprint"))
            if config.rollout.mode == "async":
                collectors = make_collectors(config)
            elif config.evaluation.num_envs is not None:
                more = replace(config.env, num_envs=config.evaluation.num_envs)
                eval_env = make_env(more, "eval", config.seed, like=env)
            # before there is a folder, which would be left with nothing in it
            check_n_states(eval_env, "eval", config.evaluation.n_states, "evaluation.n_states")
            check_n_states(eval_env, "selection", config.evaluation.selection_states, "evaluation.selection_states")
            files = RunDir.create(Path(config.out) / config.name) if folder is None else RunDir(folder)
            run = Run(config, env, eval_env, files, progress, interrupt, data, collectors)
            save_config(config, files.path / "config.yaml")
            _plan(progress, config, GUESSED_CHUNKS)
            where = "" if config.rollout.workers is None else f" of {config.rollout.workers} workers"
            progress.say(f"Run {files.path}: {config.env.id}, {config.num_envs} simulators{where}, seed {config.seed}")
            try:
                return _phases(run, checkpoint)
            except KeyboardInterrupt:
                progress.say(f"Interrupted, {_how_to_go_on(files.path)}")
                raise
            except (VLAUnavailableError, ClusterError) as error:
                raise RunError(f"{error} Then: {_how_to_go_on(files.path)}") from error
        finally:
            progress.close()
            if collectors is not None:
                collectors.close()
            env.close()
            if eval_env is not env:
                eval_env.close()


def _cluster(config: TrainConfig) -> AbstractContextManager[Any]:
    workers, needs = config.rollout.workers or 0, config.ray.of_worker(config.envs_per_worker)
    return connected(config.ray, workers * needs["num_cpus"]) if workers else nullcontext()


def _how_to_go_on(folder: Path) -> str:
    saved = resumable_checkpoints(folder)
    what = f"{saved[-1].chunks} chunks are saved" if saved else "nothing is trained yet"
    return f"{what}; resume with: rlt train --resume {folder}"


def _phases(run: Run, checkpoint: Checkpoint | None) -> TrainResult:
    """Evaluate the frozen VLA, train, and evaluate the best model."""
    from rlt_sb3.experiment.session import Training

    config, progress = run.config, run.progress
    label = get_algorithm(config.algorithm).label
    vla = run.vla("eval", "frozen VLA, held-out states")
    _plan(progress, config, float(np.mean([row.chunks for row in vla.rows])))
    baseline = run.vla("selection", "frozen VLA, selection states")

    training = Training(run, baseline, checkpoint)
    training.learn()

    progress.phase("best model, held-out states")
    best = load_model(config.algorithm, run.files.path / "best_model.zip", device=training.model.device)
    player = in_env(config.algorithm, as_predictor(config.algorithm, best), run.eval_env, config.settings)
    final = run.evaluate(player, "eval", label, run.filmed)
    comparison = compare(vla, final)
    run.store(**{config.algorithm: final.to_dict(), "comparison": asdict(comparison)})
    if run.filmed and not vla.frames:  # its outcomes are from a file, which has no films
        again = run.evaluate("vla", "eval", NAME, run.filmed, n_states=run.filmed)
        vla.frames, vla.fps = again.frames, again.fps
    run.store(videos=run.files.write_videos(vla, final) if run.filmed else None)
    return TrainResult(run.files.path, vla, final, comparison, training.selection.points)


def resume(path: str | Path, **changes: Any) -> TrainResult:
    """
    Go on with a run from Python; ``rlt train --resume`` does the same.

    :param path: folder of the run, or one of its checkpoints
    :param changes: settings to change, for example ``total_chunks``
    :return: the evaluations, as :func:`train` returns them
    """
    run, _ = find_checkpoint(Path(path))
    return train(replace(load_config(run / "config.yaml"), resume=str(path), **changes))


#: What a resumed run may not change, besides ``env.device`` and settings of algorithms (see ``Algorithm.may_change``):
#: it is in the checkpoint, or results could not be compared any more.
FIXED = ("algorithm", "seed", "evaluation.n_states", "evaluation.selection_states")


def _resumed(config: TrainConfig) -> tuple[Path | None, Checkpoint | None, dict[str, Any] | None]:
    """
    Read the run that ``--resume`` names.

    :return: folder, checkpoint and results of the run to resume, or None each; no checkpoint if it was interrupted
        before its training began
    :raises ValueError: if a setting was changed that must stay
    """
    if config.resume is None:
        return None, None, None
    folder, checkpoint = find_checkpoint(Path(config.resume))
    saved = load_config(folder / "config.yaml")
    fixed = {name: (attrgetter(name)(saved), attrgetter(name)(config)) for name in FIXED}
    fixed["env"] = replace(saved.env, device=None, num_envs=1), replace(config.env, device=None, num_envs=1)
    fixed["the number of simulators"] = saved.num_envs, config.num_envs
    for name in saved.algorithms | config.algorithms:
        must_keep = get_algorithm(name).fixed
        fixed[name] = must_keep(saved.algorithms.get(name, {})), must_keep(config.algorithms.get(name, {}))
    fixed["rollout.mode"] = saved.mode, config.mode
    for name, (old, new) in fixed.items():
        if old != new:
            raise ValueError(
                f"A resumed run must keep {name}: the run has {old}, given was {new}. Leave it out, or begin a new run."
            )
    if checkpoint is None:  # what it has are evaluations of the VLA
        results = folder / "evaluations.json"
        return folder, None, json.loads(results.read_text()) if results.is_file() else None
    data = checkpoint.read_state()["results"]
    later = [c.path.name for c in later_checkpoints(folder, checkpoint.chunks)]
    if later:  # printed while there is time for Ctrl-C: simulators and VLA take a while to start
        print(
            f"The run goes on from {checkpoint.path.name}; what it has after that is discarded: {', '.join(later)} and "
            f"their rows of metrics.csv. To keep them, copy {folder} first.",
            flush=True,
        )
    for key in (config.algorithm, "comparison", "videos"):  # of a run that had come to its end
        data.pop(key, None)
    return folder, checkpoint, data


def _plan(progress: Progress, config: TrainConfig, chunks_per_episode: float) -> None:
    """Tell the progress bar how much each phase costs, in chunks."""
    settings = config.evaluation
    progress.plan(
        {
            "frozen VLA, held-out states": (settings.n_states * chunks_per_episode, settings.n_states),
            "frozen VLA, selection states": (settings.selection_states * chunks_per_episode, settings.selection_states),
            "training": (config.total_chunks * TRAINING_COST, 1),
            "selection": (
                config.selections * settings.selection_states * chunks_per_episode,
                config.selections * settings.selection_states,
            ),
            "best model, held-out states": (settings.n_states * chunks_per_episode, settings.n_states),
        }
    )


def summary(data: dict[str, Any]) -> str:
    """
    Write the table that a run prints and reports.

    :param data: contents of evaluations.json
    """
    lines = ["", f"{'policy':<12} {'success':>9} {'rate':>6}  {'95 % interval':<15} {'steps to success':>16}"]
    for key in ("vla", *algorithm_names()):
        if key in data:
            result = Evaluation.from_dict(data[key])
            low, high = result.interval
            steps = "-" if np.isnan(result.steps_to_success) else f"{result.steps_to_success:.0f}"
            solved, interval = f"{result.successes}/{result.n}", f"{low:.0%} to {high:.0%}"
            lines.append(f"{result.policy:<12} {solved:>9} {result.rate:>6.0%}  {interval:<15} {steps:>16}")
    if "comparison" in data:
        c = data["comparison"]
        lines.append(
            f"paired on the same {data['vla']['n']} held-out initial states: {c['fixed']} fixed, {c['broken']} broken, "
            f"{c['both']} both, {c['neither']} neither; McNemar p = {c['p_value']:.2g}"
        )
        vla, best = (Evaluation.from_dict(data[key]) for key in ("vla", data["config"]["algorithm"]))
        lines += filter(None, [describe_tasks_below(vla, best)])
    lowest = lowest_point(data)
    if lowest:
        lines.append(f"lowest point of the practicing actor, selection states: {lowest}")
    lines += [f"predict() on the selection states, {milestone}" for milestone in milestones(data)]
    if gated(data):
        lines += [f"practicing actor on the selection states, {found}" for found in milestones(data, practicing)]
    if "training" in data:
        t, minutes = data["training"], training_minutes(data)
        robot = "" if minutes is None else f" ({minutes} robot minutes)"
        lines.append(
            f"training: {t['episodes']} episodes, {t['chunks']} chunks, {t['control_steps']} control steps{robot}, "
            f"{t['minutes']:.1f} min; whole run {data['minutes']:.1f} min"
        )
    return "\n".join(lines)
