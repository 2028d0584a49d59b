"""The online part of a run: training, new or resumed, with selection evaluations, checkpoints and metrics."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
from stable_baselines3.common.callbacks import CallbackList
from stable_baselines3.common.logger import KVWriter, Logger

from rlt_gym.cluster.connection import ClusterError
from rlt_gym.vla.base import VLAUnavailableError
from rlt_sb3.callbacks.base import StatefulCallback
from rlt_sb3.callbacks.budget import BudgetCallback
from rlt_sb3.callbacks.checkpoint import RunCheckpointCallback
from rlt_sb3.callbacks.metrics import MetricsCallback
from rlt_sb3.callbacks.selection import SelectionCallback, SelectionPoint
from rlt_sb3.callbacks.video import VideoCallback
from rlt_sb3.common.files import replacing
from rlt_sb3.common.loggers import CSVWriter, TensorBoardWriter, WandbWriter
from rlt_sb3.common.robot_time import control_frequency, robot_minutes
from rlt_sb3.common.trials import horizon_by_task
from rlt_sb3.evaluation.evaluate import Predictor
from rlt_sb3.evaluation.horizon import fitting_horizons
from rlt_sb3.evaluation.results import Evaluation
from rlt_sb3.experiment.algorithms import get_algorithm
from rlt_sb3.experiment.checkpoints import (
    BUFFER,
    Checkpoint,
    all_checkpoints,
    discard_later,
    rng_state,
    set_rng_state,
    write_checkpoint,
)
from rlt_sb3.experiment.models import as_predictor, in_env, load_model, make_model, make_vec_env

if TYPE_CHECKING:
    import gymnasium as gym
    from stable_baselines3.common.vec_env import VecEnv

    from rlt_sb3.experiment.context import Run


class Training:
    """
    Trains and evaluates the model of a run.

    :param run: the run, with its environment, folder and results so far
    :param baseline: the frozen VLA on the selection states
    :param checkpoint: the checkpoint to resume from; None for a new run
    """

    def __init__(self, run: Run, baseline: Evaluation, checkpoint: Checkpoint | None = None):
        self.run, self.baseline = run, baseline
        config = self.config = run.config
        self.horizon = self._fitting_horizon()
        self.algorithm = get_algorithm(config.algorithm)
        name, settings = config.algorithm, config.settings
        self.venv: VecEnv = make_vec_env(name, run.env, settings) if run.collectors is None else run.collectors
        state = checkpoint.read_state() if checkpoint is not None else None
        self.model = self._model(checkpoint)
        report = getattr(self.model, "memory_report", None)
        if report is not None:
            run.progress.say(report)
            run.store(memory=report)
        self.budget = BudgetCallback(
            config.total_chunks, config.total_control_steps, config.max_minutes, on_progress=run.progress.set_fraction
        )
        self.metrics = MetricsCallback()
        self._evaluated = -1  # chunks at the last selection evaluation
        self.videos: VideoCallback | None = None
        if config.video_every is not None:
            self.videos = VideoCallback(run.files.path / "videos", config.video_every)
        self.selection = SelectionCallback(
            self._evaluate,
            config.evaluation.selection_every,
            baseline,
            self.budget,
            run.files.path / "best_model.zip",
            self._on_point,
            config.guard,
            separate_eval_envs=run.eval_env is not run.env or run.collectors is not None,
        )
        self.checkpoints = RunCheckpointCallback(
            self.selection, self._restart, self._save, config.save_every, run.interrupt.check
        )
        #: in the order in which they are called
        self.callbacks: dict[str, StatefulCallback] = {
            "budget": self.budget,
            "metrics": self.metrics,
            "checkpoints": self.checkpoints,
            "selection": self.selection,
        }
        if self.videos is not None:
            self.callbacks["videos"] = self.videos
        for callback in self.callbacks.values():
            callback.init_callback(self.model)
        self._open_logger(None if state is None else self.model.num_timesteps)
        if state is not None:
            assert checkpoint is not None
            self._set_state(state, checkpoint)
        else:
            self._begin()

    # ---------------------------------------------------------------- beginning

    def _fitting_horizon(self) -> int | list[int] | None:
        """Return the horizon of training episodes in control steps; None: the environment has it already."""
        env: Any = self.run.env.unwrapped
        default = getattr(env, "train_episode_steps", None)
        if default is None or "train_episode_steps" in self.config.env.make_kwargs():
            return None
        steps = fitting_horizons(env, self.baseline)
        said = str(steps)
        if not isinstance(steps, int):
            said = ", ".join(f"{own} in task {task.task_id}" for own, task in zip(steps, env.tasks, strict=True))
        self.run.progress.say(
            f"training episodes end after {said} control steps (the environment's default: {default})"
        )
        self.run.store(train_episode_steps=steps)
        return steps

    def _model(self, checkpoint: Checkpoint | None) -> Any:
        config = self.config
        if checkpoint is None:
            # Stable-Baselines3 seeds Python, NumPy and torch when the model is made
            return make_model(config.algorithm, self.venv, config.model_settings, config.seed)
        device = self.algorithm.device(config.settings)
        model = load_model(config.algorithm, checkpoint.model, env=self.venv, device=device)
        if self.algorithm.on_resume is not None:
            self.algorithm.on_resume(model, config.settings)
        if getattr(model, "replay_buffer", None) is None:
            return model
        model.load_replay_buffer(checkpoint.path / BUFFER)
        return model

    def _begin(self) -> None:
        """Tell the untrained model what the VLA did, and save it as a checkpoint."""
        if hasattr(self.model, "know_vla"):
            env: Any = self.run.env.unwrapped
            steps = getattr(env, "train_episode_steps", None) if self.horizon is None else self.horizon
            self.model.know_vla(self.baseline, horizon_by_task(steps, getattr(env, "tasks", ())))
        if starts_at_the_vla(self._predictor(self.model), self.run.eval_env):
            # The untrained model is the frozen VLA: the best one can never be worse than it on the selection states.
            self.selection.keep(self.baseline)
        elif self.algorithm.starts_at_vla:
            self.run.progress.say(
                "WARNING: the untrained model does not play the frozen VLA's chunk; it starts somewhere else."
            )
        self.checkpoints.restart_episodes()
        self._save()

    def _restart(self, number: int) -> Any:
        """
        Begin new training episodes; their initial states follow from the run's seed and ``number`` alone.

        :param number: how often this has been done before
        :return: first observations
        """
        # The replay buffer must not read an evaluation as the continuation of the episodes before it.
        if hasattr(self.model, "end_trajectories"):
            self.model.end_trajectories()
        if getattr(self.model, "action_noise", None) is not None:
            self.model.action_noise.reset()
        if self.videos is not None:
            self.videos.restart()
        self.venv.seed(self.config.seed + 10_007 * number)
        horizon = {} if self.horizon is None else {"train_episode_steps": self.horizon}
        self.venv.set_options({"init_states": "train", **horizon})
        return self.venv.reset()

    def _open_logger(self, last_step: int | None) -> None:
        path, config = self.run.files.path, self.config
        writers: list[KVWriter] = [
            TensorBoardWriter(path / "tensorboard", last_step),
            CSVWriter(path / "metrics.csv", last_step),
        ]
        if config.wandb is not None:
            writers.append(WandbWriter(path, config.wandb, config.name, self.run.data["config"]))
        self.model.set_logger(Logger(str(path), writers))

    # ---------------------------------------------------------------- state

    def _save(self, resumable: bool = True) -> None:
        write_checkpoint(self.run.files.path, self.model, self._state(), self.config.keep_checkpoints, resumable)

    def _state(self) -> dict[str, Any]:
        logger = self.model.logger
        return {
            "results": self.run.data,
            "callbacks": {name: callback.state_dict() for name, callback in self.callbacks.items()},
            "logged": {
                key: [_number(value), logger.name_to_count[key], list(logger.name_to_excluded[key])]
                for key, value in logger.name_to_value.items()
            },
            "rng": rng_state(self.model),
        }

    def _set_state(self, state: dict[str, Any], checkpoint: Checkpoint) -> None:
        for name, callback in self.callbacks.items():
            if name in state["callbacks"]:  # films may be new in the resumed run
                callback.load_state_dict(state["callbacks"][name])
        self.budget.num_timesteps = self.model.num_timesteps  # Stable-Baselines3 tells it when training begins
        self.run.progress.skip("training", self.budget.used)
        self.run.progress.skip("selection", len(self.selection.points) / self.config.selections)
        self._restore_best()
        discard_later(self.run.files.path, checkpoint.chunks)
        self.checkpoints.restart_episodes()
        logger = self.model.logger
        for key, (value, count, excluded) in state["logged"].items():
            logger.name_to_value[key] = value
            logger.name_to_count[key] = count
            logger.name_to_excluded[key] = tuple(excluded)
        set_rng_state(state["rng"], self.model)

    def _restore_best(self) -> None:
        """best_model.zip as it was at the checkpoint: a run that was killed later may have found a better one."""
        path = self.run.files.path
        for checkpoint in all_checkpoints(path):
            if self.selection.best is not None and checkpoint.chunks == self.selection.best_chunks:
                with replacing(path / "best_model.zip") as temporary:
                    shutil.copyfile(checkpoint.model, temporary)

    # ---------------------------------------------------------------- selection

    def _predictor(self, model: Predictor) -> Predictor:
        name, settings = self.config.algorithm, self.config.settings
        return in_env(name, as_predictor(name, model), self.run.eval_env, settings)

    def _evaluate(self, model: Predictor) -> Evaluation:
        run, every = self.run, self.config.video_every
        run.progress.phase("selection")
        # the practicing actor's evaluation comes second, where it is played at all: the plan counts one a point
        first, self._evaluated = self._evaluated != self.model.num_timesteps, self.model.num_timesteps
        return run.evaluate(
            self._predictor(model),
            "selection",
            self.algorithm.label,
            record_states=0 if every is None else range(0, self.config.evaluation.selection_states, every),
            counts=first,
        )

    def _on_point(self, point: SelectionPoint) -> None:
        run, baseline = self.run, self.baseline
        self.store()
        label, k, n = self.algorithm.label, point.evaluation.successes, point.evaluation.n
        practicing = ""
        films = f"selection-{point.chunks:08d}"
        run.files.write_films(films, point.evaluation)
        if point.candidate is not None and point.candidate is not point.evaluation:
            practicing = f" (practicing actor: {point.candidate.successes}/{n})"
            run.files.write_films(f"{films}-practicing", point.candidate)
        minutes = robot_minutes(point.control_steps, control_frequency(self.venv))
        robot = "" if minutes is None else f", {minutes:.1f} robot minutes"
        run.progress.say(
            f"selection after {point.chunks} chunks ({point.control_steps} control steps{robot}, {point.minutes:.1f} "
            f"min): {label} {k}/{n}, frozen VLA {baseline.successes}/{baseline.n}{practicing}"
        )
        if self.selection.below_vla(point.evaluation):
            what = "the best networks so far are put back" if self.config.guard == "restore" else "it goes on"
            run.progress.say(
                f"WARNING: {label} is below the frozen VLA's 95 % interval ({baseline.interval[0]:.0%} to "
                f"{baseline.interval[1]:.0%}) on the selection states; the best model so far is kept, {what}."
            )
        run.progress.phase("training")

    def store(self) -> None:
        """Write evaluations.json."""
        model, frequency = self.model, control_frequency(self.venv)
        self.run.store(
            control_frequency=frequency,
            selection=[
                point.to_dict() | {"robot_minutes": robot_minutes(point.control_steps, frequency)}
                for point in self.selection.points
            ],
            training={
                "chunks": model.num_timesteps,
                "control_steps": self.budget.control_steps,
                "minutes": self.budget.minutes,
                "robot_minutes": robot_minutes(self.budget.control_steps, frequency),
                "episodes": self.budget.episodes,
            },
        )

    # ---------------------------------------------------------------- learning

    def learn(self) -> None:
        """
        Train to the end of the budget.

        :raises KeyboardInterrupt: after a checkpoint, if the run was interrupted
        :raises VLAUnavailableError: after a checkpoint, if the VLA runs elsewhere and cannot be reached any more
        :raises ClusterError: after a checkpoint, if the cluster has no room for a worker any more
        """
        run, model, config = self.run, self.model, self.config
        run.progress.phase("training")
        try:
            left = config.total_chunks - model.num_timesteps
            if left > 0 and (self.budget.used < 1.0 or model.num_timesteps == 0):
                try:
                    model.learn(
                        left, callback=CallbackList(list(self.callbacks.values())), log_interval=config.log_interval,
                        reset_num_timesteps=False,
                    )  # fmt: skip
                except (
                    VLAUnavailableError,
                    ClusterError,
                ):  # the chunk that it could not see is lost, all before it is stored
                    self.checkpoints.finish()
                    raise
            try:
                if self.selection.last < model.num_timesteps:
                    self.selection.run()
            finally:
                self.checkpoints.finish()
        finally:
            self._close()

    def _close(self) -> None:
        path = self.run.files.path / "model.zip"
        try:
            with replacing(path) as temporary, temporary.open("wb") as file:
                self.model.save(file)
            self.store()
        except (OSError, RuntimeError) as error:  # must not hide what ended the training
            self.run.progress.say(f"WARNING: {path} could not be written: {error}")
        finally:
            self.model.logger.close()


def starts_at_the_vla(model: Predictor, env: gym.vector.VectorEnv, tolerance: float = 1e-4) -> bool:
    """
    Tell whether the deterministic policy plays the reference chunk on the first held-out observations.

    :param model: the untrained model
    :param env: Gymnasium vector environment
    :param tolerance: largest difference of a number
    :return: whether it does
    """
    obs, _ = env.reset(options={"init_states": "eval"})
    actions, _ = model.predict(obs, deterministic=True)
    return bool(np.max(np.abs(actions - obs["vla_ref"])) <= tolerance)


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
