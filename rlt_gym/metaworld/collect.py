"""``python -m rlt_gym.metaworld.collect``: demonstrations of Meta-World's scripted experts, one file per task."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import auto_cli

from rlt_gym.core.episodes import SPLIT_SIZES
from rlt_gym.data.libero_hdf5 import DemoWriter
from rlt_gym.metaworld.make import MetaWorldVectorEnv
from rlt_gym.metaworld.tasks import SAWYER

#: Episodes come from the upper end of the training split, which online training draws from only rarely.
_FIRST = SPLIT_SIZES["train"] // 2


def collect(
    suite: str = "MT10",
    task_ids: list[int] | None = None,
    demos: int = 50,
    out: str = "demos",
    noise: float = 0.3,
    image_size: int = 128,
    num_envs: int = 2,
    max_steps: int = 200,
) -> list[Path]:
    """
    Record successes of Meta-World's scripted experts.

    :param suite: ``MT10`` or ``MT50``
    :param task_ids: tasks of the suite; all if not given
    :param demos: episodes per task
    :param out: folder for one ``<suite>_<task>.hdf5`` per task
    :param noise: standard deviation of disturbances, as a share of the action range; the recorded action is the
        expert's own
    :param image_size: side of the pictures in pixels
    :param num_envs: worker processes
    :param max_steps: control steps before an episode counts as a failure
    :return: the files
    :raises RuntimeError: an expert fails more often than it succeeds
    """
    env = MetaWorldVectorEnv(num_envs, suite, task_ids, image_size=image_size)
    paths = []
    try:
        for task in env.tasks:
            path = Path(out) / f"{suite}_{task.task_id}.hdf5"
            path.parent.mkdir(parents=True, exist_ok=True)
            made = {"env_id": "MetaWorld-v0", "suite": suite, "task_id": task.task_id, "noise": noise}
            with DemoWriter(path, task.instruction, made, SAWYER) as writer:
                tried = 0
                while writer.num_demos < demos:
                    if tried > 2 * demos + num_envs:
                        raise RuntimeError(f"The expert of {task.name} fails too often: lower noise")
                    indices = range(_FIRST + tried, _FIRST + tried + num_envs)
                    common = {"noise": noise, "max_steps": max_steps}
                    asked = [{"task_id": task.task_id, "arguments": {"index": i, **common}} for i in indices]
                    tried += num_envs
                    for index, episode in zip(indices, env.call_workers(_RECORD, asked), strict=True):
                        if episode["success"] and writer.num_demos < demos:
                            writer.add(**episode, init_index=index)
            print(f"{path}: {writer.num_demos} successes of {tried} episodes", flush=True)
            paths.append(path)
    finally:
        env.close()
    return paths


_RECORD = "rlt_gym.metaworld.simulator:record_demo"

if __name__ == "__main__":
    auto_cli(collect, as_positional=False)
