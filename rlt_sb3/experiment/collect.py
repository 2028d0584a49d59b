"""rlt collect: demonstrations and rollouts; those of a run are what its model plays without noise."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlt_sb3.common.fingerprint import check_run, of_run
from rlt_sb3.evaluation.evaluate import as_policy
from rlt_sb3.experiment.config import TrainConfig, load_config
from rlt_sb3.experiment.environment import check_device, make_env
from rlt_sb3.experiment.evaluate_run import MODELS, load_predictor
from rlt_sb3.experiment.imports import check_hooks
from rlt_sb3.experiment.models import check_fits, in_env

if TYPE_CHECKING:
    from rlt_gym.libero.collect import CollectConfig
    from rlt_gym.libero.rollouts import Policy
    from rlt_gym.rl_token.env import RLTokenVectorEnv

#: the environment whose pictures can be recorded
ENV_ID = "RLToken-LIBERO-v0"


def collect(config: CollectConfig) -> list[Path]:
    """
    Record demonstrations of the scripted expert, or rollouts of a frozen VLA or of a run.

    :param config: what to record
    :return: the files written, one per task, or the folder of the LeRobot dataset
    :raises ValueError: as :func:`rlt_gym.libero.collect.collect`; for a folder that is no run, a run of another
        environment or a model that does not exist, before any process starts; for other frozen weights than those that
        the run was trained on, before anything is played
    """
    from rlt_gym.libero.collect import collect as collect_without_run
    from rlt_gym.libero.collect import collect_rollouts
    from rlt_gym.libero.suites.tasks import get_tasks

    hooks = {"intervention": config.intervention}
    check_hooks(hooks, "collect")
    if config.policy in ("expert", "vla"):
        return collect_without_run(config)
    run = Path(config.policy)
    settings = load_config(run / "config.yaml")
    if settings.env.id.rpartition(":")[2] != ENV_ID:
        raise ValueError(f"The run {run} has env.id {settings.env.id!r}; rollouts are recorded of {ENV_ID} only.")
    path = _model(config, run)
    device = config.device or settings.env.device or "cpu"
    check_device(device)
    suite, task_ids = settings.env.suite or "libero_goal", config.task_ids or settings.env.task_ids
    settings.env = replace(settings.env, suite=suite, task_ids=task_ids, num_envs=config.num_envs, device=device)
    return collect_rollouts(config, get_tasks(suite, task_ids), lambda: _start(config, run, path, settings))


def _model(config: CollectConfig, run: Path) -> Path:
    """Find the model to play: what ``predict()`` of the finished run plays."""
    if config.model is None:
        found = [run / name for name in MODELS.values() if (run / name).is_file()]
        if not found:
            raise ValueError(f"The run {run} has neither {' nor '.join(MODELS.values())}: let it train first.")
        return found[0]
    path = run / MODELS[config.model] if config.model in MODELS else Path(config.model)
    if not path.is_file():
        raise ValueError(f"There is no model {path}; model is 'best', 'last' or the path of a saved model.")
    return path


def _start(
    config: CollectConfig, run: Path, path: Path, settings: TrainConfig
) -> tuple[RLTokenVectorEnv, Policy, dict[str, Any]]:
    """
    Load the model and start the simulators.

    :return: environment, policy, and what the files tell about it
    """
    from rlt_gym.libero.collect import recording_kwargs
    from rlt_gym.rl_token.env import RLTokenVectorEnv

    env_config = settings.env
    assert env_config.suite is not None and env_config.device is not None
    given = recording_kwargs(config, env_config.suite, env_config.chunk_length or 8)
    given["max_episode_steps"] = config.max_episode_steps or env_config.max_episode_steps or given["max_episode_steps"]
    del given["init_states"]
    kwargs = {key: value for key, value in env_config.kwargs.items() if key != "group_size"} | given
    model = load_predictor(settings.algorithm, path, env_config.device)
    env_config = replace(
        env_config, max_episode_steps=None, train_episode_steps=None, render_mode=None, kwargs=kwargs
    )  # the horizons are in kwargs
    env = make_env(env_config, "train", settings.seed)
    try:
        assert isinstance(env, RLTokenVectorEnv)
        check_run(run, of_run(run), env.metadata.get("fingerprint"))
        check_fits(model, env, path)
        player = in_env(settings.algorithm, model, env, settings.settings)
    except BaseException:
        env.close()
        raise
    return env, as_policy(player), {"model": path.name, "model_sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
