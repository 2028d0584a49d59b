"""One run: the frozen VLA is evaluated, RLT trains on top of it, the best model plays the same held-out states."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlt_sb3.config import EnvConfig, TrainConfig, save_config
from rlt_sb3.evaluation import Comparison, Evaluation, PolicyFn, Predictor, StateResult, compare, evaluate
from rlt_sb3.progress import Progress
from rlt_sb3.run_dir import RunDir, machine

if TYPE_CHECKING:
    import gymnasium as gym

    from rlt_sb3.callbacks import SelectionCallback, SelectionPoint

# A chunk of training costs this much more than one of evaluation (gradient steps); only the ETA depends on it.
TRAINING_COST = 1.5
# Chunks per episode until the first evaluation has measured it; only the ETA depends on it.
GUESSED_CHUNKS = 25.0


@dataclass
class TrainResult:
    """What a run found.

    :param run: its folder
    :param vla: the frozen VLA on the held-out states
    :param rlt: the best model on the same states
    :param comparison: the two, paired
    :param selection: evaluations during training, on the selection states
    """

    run: Path
    vla: Evaluation
    rlt: Evaluation
    comparison: Comparison
    selection: list[SelectionPoint]


def make_env(config: EnvConfig, split: str, seed: int) -> gym.vector.VectorEnv:
    """The run's vector environment. Its workers serve training and every evaluation.

    :param config: the environment's settings
    :param split: the initial states to begin with
    :param seed: seed of the training initial states
    """
    import gymnasium as gym

    kwargs = config.make_kwargs()
    if kwargs.get("render_mode") is None:
        kwargs.pop("render_mode", None)
    return gym.make_vec(config.id, num_envs=kwargs.pop("num_envs"), init_states=split, seed=seed, **kwargs)


def check_device(device: str) -> None:
    """Refuse a device that torch cannot use, before anything is loaded.

    :raises ValueError: names the device and what there is
    """
    import torch

    if device == "auto":
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        have = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        raise ValueError(
            f"Device {device!r} cannot be used here ({str(error).splitlines()[0]}); there is {have}."
        ) from error


def _check_rlt(settings: dict[str, Any]) -> None:
    """Refuse unknown settings of the algorithm before a simulator starts.

    :raises ValueError: names what there is
    """
    from inspect import signature

    from rlt_sb3 import RLT

    known = [name for name in signature(RLT.__init__).parameters if name != "self"]
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise ValueError(f"RLT has no setting {', '.join(unknown)}; there is {', '.join(known)}.")


class _Run:
    """The state that the phases of :func:`train` share."""

    def __init__(self, config: TrainConfig, env: gym.vector.VectorEnv, files: RunDir, progress: Progress):
        self.config = config
        self.env = env
        self.files = files
        self.progress = progress
        self.started = time.monotonic()
        self.data: dict[str, Any] = {"config": asdict(config), "machine": machine(), "selection": []}

    def store(self, **entries: Any) -> None:
        """Add results to evaluations.json, so that an interrupted run keeps what it has."""
        self.data.update(entries, minutes=(time.monotonic() - self.started) / 60)
        self.files.write_json("evaluations.json", self.data)

    def evaluate(self, policy: str | Predictor | PolicyFn, split: str, name: str, record: bool = False) -> Evaluation:
        """Evaluate and keep the progress bar moving."""
        settings = self.config.evaluation
        n_states = settings.n_states if split == "eval" else settings.selection_states

        def on_episode(row: StateResult) -> None:
            self.progress.advance(1.0)

        record_states = settings.record_states if record and settings.videos else 0
        return evaluate(
            policy, self.env, n_states, split=split, name=name, on_episode=on_episode, record_states=record_states
        )


def train(config: TrainConfig) -> TrainResult:
    """Run everything that ``make demo`` shows.

    Three disjoint sets of initial states: RLT practises on "train", the best model is chosen on "selection", and only
    "eval" is reported, on which frozen VLA and best model are paired.

    :param config: the run
    :return: the evaluations; every file is in the run's folder
    :raises ValueError: for settings that cannot work, before any process starts
    :raises KeyboardInterrupt: after saving, if interrupted
    """
    config.check()
    import torch

    # Building the first optimizer imports this lazily; after software OpenGL has been loaded that import can crash.
    import torch._dynamo

    from rlt_sb3.report import write_report

    check_device(config.env.device or "cpu")
    check_device(config.rlt.get("device", "cpu"))
    _check_rlt(config.rlt)
    torch.set_num_threads(config.torch_threads)
    env = make_env(config.env, "eval", config.seed)
    files = RunDir.create(Path(config.out) / config.name)
    progress = Progress(enabled=config.progress)
    run = _Run(config, env, files, progress)
    try:
        save_config(config, files.path / "config.yaml")
        _plan(progress, config, GUESSED_CHUNKS)
        progress.say(f"Run {files.path}: {config.env.id}, {config.env.num_envs} simulators, seed {config.seed}")

        progress.phase("frozen VLA, held-out states")
        vla = run.evaluate("vla", "eval", "frozen VLA", record=True)
        run.store(vla=vla.to_dict())
        progress.say(f"frozen VLA, held-out states:    {vla}")
        _plan(progress, config, float(np.mean([row.chunks for row in vla.rows])))
        progress.phase("frozen VLA, selection states")
        baseline = run.evaluate("vla", "selection", "frozen VLA")
        run.store(vla_selection=baseline.to_dict())
        progress.say(f"frozen VLA, selection states:   {baseline}")

        model, selection = _learn(run, baseline)

        progress.phase("RLT, held-out states")
        best = type(model).load(files.path / "best_model.zip", device=model.device)
        rlt = run.evaluate(best, "eval", "RLT", record=True)
        comparison = compare(vla, rlt)
        run.store(rlt=rlt.to_dict(), comparison=asdict(comparison))
        films = files.write_videos(vla, rlt) if config.evaluation.videos else None
        run.store(videos=films)
    finally:
        progress.close()
        env.close()
    write_report(files.path)
    print(summary(run.data))
    print(f"\nEverything is in {files.path}; open {files.path / 'report.html'}")
    return TrainResult(files.path, vla, rlt, comparison, selection.points)


def _plan(progress: Progress, config: TrainConfig, chunks_per_episode: float) -> None:
    """Tell the progress bar how much each phase costs, in chunks."""
    settings = config.evaluation
    selections = -(-config.total_chunks // settings.selection_every)
    progress.plan(
        {
            "frozen VLA, held-out states": (settings.n_states * chunks_per_episode, settings.n_states),
            "frozen VLA, selection states": (settings.selection_states * chunks_per_episode, settings.selection_states),
            "training": (config.total_chunks * TRAINING_COST, 1),
            "selection": (
                selections * settings.selection_states * chunks_per_episode,
                selections * settings.selection_states,
            ),
            "RLT, held-out states": (settings.n_states * chunks_per_episode, settings.n_states),
        }
    )


def _learn(run: _Run, baseline: Evaluation) -> tuple[Any, SelectionCallback]:
    """Online training with periodic selection evaluations.

    :param run: the run
    :param baseline: the frozen VLA on the selection states
    :return: the model as it is at the end, and the callback that knows the best one
    """
    from stable_baselines3.common.callbacks import CallbackList
    from stable_baselines3.common.logger import CSVOutputFormat, Logger, TensorBoardOutputFormat
    from stable_baselines3.common.vec_env import VecMonitor

    from rlt_sb3 import RLT, ChunkReplayBuffer, GymnasiumVecEnv
    from rlt_sb3.callbacks import BudgetCallback, SelectionCallback

    config, files, progress = run.config, run.files, run.progress
    venv = VecMonitor(GymnasiumVecEnv(run.env), info_keywords=("is_success",))

    model = RLT("MultiInputPolicy", venv, seed=config.seed, **({"device": "cpu"} | config.rlt))
    path = files.path
    model.set_logger(
        Logger(
            str(path), [TensorBoardOutputFormat(str(path / "tensorboard")), CSVOutputFormat(str(path / "metrics.csv"))]
        )
    )

    def restart() -> Any:
        # The replay buffer must not read an evaluation as the continuation of the episodes before it.
        assert isinstance(model.replay_buffer, ChunkReplayBuffer)
        model.replay_buffer.end_trajectories()
        # Coming back to the training states starts their sequence over: another seed gives other states.
        venv.seed(config.seed + 10_007 * len(selection.points))
        venv.set_options({"init_states": "train"})
        return venv.reset()

    def evaluate_selection(candidate: Predictor) -> Evaluation:
        progress.phase("selection")
        return run.evaluate(candidate, "selection", "RLT")

    def on_point(point: SelectionPoint) -> None:
        entry = {"chunks": point.chunks, "control_steps": point.control_steps, "minutes": point.minutes}
        run.data["selection"].append(entry | {"evaluation": point.evaluation.to_dict()})
        run.store(**_budget(budget, model))
        k, n = point.evaluation.successes, point.evaluation.n
        progress.say(
            f"selection after {point.chunks} chunks ({point.control_steps} control steps, {point.minutes:.1f} min): "
            f"RLT {k}/{n}, frozen VLA {baseline.successes}/{baseline.n}"
        )
        if selection.below_vla(point.evaluation):
            progress.say(
                f"WARNING: RLT is below the frozen VLA's 95 % interval ({baseline.interval[0]:.0%} to "
                f"{baseline.interval[1]:.0%}) on the selection states; the best model so far is kept."
            )
        progress.phase("training")

    budget = BudgetCallback(
        config.total_chunks, config.total_control_steps, config.max_minutes, on_progress=progress.set_fraction
    )
    selection = SelectionCallback(
        evaluate_selection,
        restart,
        config.evaluation.selection_every,
        baseline,
        budget,
        str(path / "best_model.zip"),
        on_point,
    )
    if starts_at_the_vla(model, run.env):
        # The untrained model is the frozen VLA, so the best model can never be worse than it on the selection states.
        selection.best = baseline
        model.save(path / "best_model.zip")
    else:
        progress.say("WARNING: the untrained model does not play the frozen VLA's chunk; it starts somewhere else.")
    progress.phase("training")
    venv.set_options({"init_states": "train"})
    try:
        model.learn(config.total_chunks, callback=CallbackList([budget, selection]), log_interval=config.log_interval)
        if not selection.points or selection.points[-1].chunks < model.num_timesteps:
            selection.run()
    except KeyboardInterrupt:
        progress.say(f"Interrupted after {model.num_timesteps} chunks; saved {path / 'model.zip'}.")
        raise
    finally:
        model.save(path / "model.zip")
        run.store(**_budget(budget, model))
        model.logger.close()
    return model, selection


def starts_at_the_vla(model: Predictor, env: gym.vector.VectorEnv, tolerance: float = 1e-4) -> bool:
    """Whether the deterministic policy plays the reference chunk on the first held-out observations."""
    obs, _ = env.reset(options={"init_states": "eval"})
    actions, _ = model.predict(obs, deterministic=True)
    return bool(np.max(np.abs(actions - obs["vla_ref"])) <= tolerance)


def _budget(budget: Any, model: Any) -> dict[str, Any]:
    return {
        "training": {
            "chunks": model.num_timesteps,
            "control_steps": budget.control_steps,
            "minutes": budget.minutes,
            "episodes": model._episode_num,
        }
    }


def summary(data: dict[str, Any]) -> str:
    """The table that a run prints and reports.

    :param data: contents of evaluations.json
    """
    lines = ["", f"{'policy':<12} {'success':>9} {'rate':>6}  {'95 % interval':<15} {'steps to success':>16}"]
    for key in ("vla", "rlt"):
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
    if "training" in data:
        t = data["training"]
        lines.append(
            f"training: {t['episodes']} episodes, {t['chunks']} chunks, {t['control_steps']} control steps, "
            f"{t['minutes']:.1f} min; whole run {data['minutes']:.1f} min"
        )
    return "\n".join(lines)
