"""Evaluates in parts, each a task on a Ray cluster, and joins them: ``rlt eval RUN --workers 4``."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlt_gym.cluster.connection import RayConfig, check_room, connected
from rlt_sb3.common.errors import RunError
from rlt_sb3.experiment.progress import quiet_bar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rlt_sb3.evaluation.benchmark import BenchmarkResult
    from rlt_sb3.evaluation.results import Evaluation
    from rlt_sb3.experiment.eval_config import EvalConfig

    Evaluate = Callable[[EvalConfig], Evaluation | BenchmarkResult]

#: Files of a run that an evaluation reads, beside the model.
READ = ("config.yaml", "evaluations.json")
#: Name of a part's file.
PART = "part.json"


def evaluate_on_ray(config: EvalConfig, evaluate: Evaluate) -> Evaluation | BenchmarkResult:
    """
    Play every part as a Ray task. A task whose machine is lost is played again elsewhere.

    The files of a run travel to the tasks. Everything else that settings name by a path must be there on each machine.

    :param config: settings with ``workers``
    :param evaluate: ``rlt eval`` without workers
    :return: the outcome, written as the same command without workers writes it
    :raises RunError: if a VLA's file exists
    :raises ClusterError: if the cluster cannot be reached, or not even one part fits into it
    """
    from rlt_sb3.experiment.config import load_config
    from rlt_sb3.experiment.evaluate_run import MODELS, output_path
    from rlt_sb3.experiment.evaluate_vla import NUM_ENVS, default_path

    assert config.workers is not None
    given: dict[str, bytes] = {}
    part = replace(config, workers=None, ray=RayConfig(), out=None, progress=False)
    if config.run is not None:
        run = Path(config.run)
        path, num_envs = output_path(config), config.num_envs or load_config(run / "config.yaml").env.num_envs
        model = run / MODELS[config.model] if config.model in MODELS else Path(config.model)
        given = {name: (run / name).read_bytes() for name in READ if (run / name).is_file()}
        if config.model != "vla":
            given[model.name] = model.read_bytes()
    else:
        path = Path(config.out) if config.out else default_path(config)
        num_envs = config.num_envs or NUM_ENVS
        if path.exists():
            raise RunError(f"{path} exists, and parts do not go on from it: give another --out, or delete it.")
    needs = config.ray.of_worker(num_envs)
    with tempfile.TemporaryDirectory(prefix="rlt-eval-") as folder, connected(
        config.ray, config.workers * needs["num_cpus"]
    ) as ray:  # fmt: skip
        check_room(1, needs)
        play = ray.remote(play_part).options(scheduling_strategy="SPREAD", **needs)
        shards = [f"{k}/{config.workers}" for k in range(1, config.workers + 1)]
        waiting = {play.remote(evaluate, replace(part, shard=shard), given): shard for shard in shards}
        files = {shard: Path(folder) / shard.replace("/", "of") / PART for shard in shards}
        with quiet_bar(total=len(shards), disable=not config.progress, desc="parts") as bar:
            while waiting:
                (done,), _ = ray.wait(list(waiting), num_returns=1)
                _unpack(_result(ray, done), files[waiting.pop(done)].parent, config)
                bar.update(1)
        return evaluate(type(config)(merge=[str(files[shard]) for shard in shards], out=str(path), films=config.films))


def play_part(evaluate: Evaluate, config: EvalConfig, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """
    Play one part, in a Ray task.

    :param evaluate: ``rlt eval`` without workers
    :param config: its settings
    :param files: contents of the run's files by name, none for a VLA
    :return: contents of the files that the evaluation wrote, by path
    """
    with tempfile.TemporaryDirectory(prefix="rlt-part-") as folder:
        run, out = Path(folder) / "run", Path(folder) / "out"
        for path in (run, out):
            path.mkdir()
        for name, content in files.items():
            (run / name).write_bytes(content)
        if config.run is not None:
            config = replace(config, run=str(run))
            if Path(config.model).suffix:
                config = replace(config, model=str(run / Path(config.model).name))
        with contextlib.redirect_stdout(io.StringIO()):  # the table of the whole is printed at the end
            evaluate(replace(config, out=str(out / PART)))
        return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def _result(ray: Any, reference: Any) -> dict[str, bytes]:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None


def _unpack(written: Mapping[str, bytes], folder: Path, config: EvalConfig) -> None:
    """Write the files of a part; what it says about the run's place is said as seen from here."""
    for name, content in written.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    if config.run is not None:
        data = json.loads(written[PART]) | {"run": config.run, "model": config.model}
        (folder / PART).write_text(json.dumps(data))
