"""The lists of ``rlt list`` that come from ``rlt_gym``: VLAs, suites, tasks."""

from __future__ import annotations

from rlt_gym.libero.suites.tasks import SUITE_HORIZONS, get_tasks


def vlas() -> dict[str, str]:
    """Return for each registered VLA its description; that of a shipped one names the tasks that it has learned."""
    from rlt_gym.vla.registry import list_vlas

    return list_vlas()


def token_configs() -> dict[str, str]:
    """Return for each shipped configuration of ``rlt pretrain-token`` what it is for."""
    from rlt_gym.rl_token.pretrain import PretrainTokenConfig
    from rlt_sb3.experiment.config import shipped_configs

    return shipped_configs(PretrainTokenConfig.configs)


def suites() -> dict[str, str]:
    """Return for each suite its number of tasks and its horizon."""
    return {
        suite: f"tasks 0 to {len(get_tasks(suite)) - 1}, {horizon} control steps"
        for suite, horizon in SUITE_HORIZONS.items()
    }


def tasks(suite: str) -> dict[str, str]:
    """
    List the tasks of a suite.

    :param suite: Name of the suite.
    :return: Task -> instruction.
    :raises ValueError: Unknown suite.
    """
    return {str(task.task_id): task.instruction for task in get_tasks(suite)}
