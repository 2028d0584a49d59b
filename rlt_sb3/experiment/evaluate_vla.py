"""``rlt eval --vla``: evaluate any frozen VLA on suites of LIBERO, without a run."""

from __future__ import annotations

import itertools
import os
import platform
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlt_sb3.common.errors import RunError
from rlt_sb3.common.files import replacing
from rlt_sb3.common.films import write_video
from rlt_sb3.evaluation.benchmark import NOTED, SAME, SPLIT, BenchmarkResult, Place, differences, read
from rlt_sb3.evaluation.results import dumps
from rlt_sb3.evaluation.shards import parse_shard
from rlt_sb3.experiment.eval_config import EvalConfig
from rlt_sb3.experiment.evaluation_page import table, write_page
from rlt_sb3.experiment.interrupt import Interrupt
from rlt_sb3.experiment.progress import quiet_bar

if TYPE_CHECKING:
    import gymnasium as gym

    from rlt_gym.vla.base import FrozenVLA
    from rlt_gym.vla.rollouts import PlayedEpisode

#: Packages whose versions decide what a policy does; those that are not installed are left out.
PACKAGES = (
    "rlt", "torch", "numpy", "mujoco", "robosuite", "hf-libero", "gymnasium", "lerobot", "transformers",
)  # fmt: skip
#: Simulators if ``num_envs`` is not given.
NUM_ENVS = 4
#: Most seconds whose episodes an interruption without warning can lose, besides those being played.
WRITE_EVERY = 10.0


def evaluate_vla(config: EvalConfig) -> BenchmarkResult:
    """
    Play a VLA's own chunks on suites of LIBERO, and write JSON, HTML and films.

    If the JSON file exists, the evaluation goes on where it was.

    :param config: which VLA, suites, protocol
    :return: the outcome
    :raises ValueError: for a bad setting, or a VLA that does not fit, before any process starts
    :raises RunError: if the file has another evaluation
    """
    from rlt_gym.vla.registry import load_vla

    header = _header_without_vla(config)
    shard = parse_shard(config.shard)
    assert config.vla is not None
    vla = load_vla(config.vla, config.device or "cpu", config.vla_kwargs)
    header |= _header_of_vla(config, vla, header)
    header = {key: header[key] for key in (*SAME, *NOTED)}
    result = BenchmarkResult(header, None if config.shard is None else (shard[0] + 1, shard[1]))
    if not result.places:
        raise ValueError(f"shard {config.shard} has no initial state: there are fewer states than parts.")
    path = Path(config.out) if config.out else default_path(config)
    if path.exists():
        result = _resumed(path, result)
    path.parent.mkdir(parents=True, exist_ok=True)
    if result.left:
        print(_announcement(config, result), flush=True)
        _play(config, vla, result, path)
    return write_result(path, result, films=config.films)


def write_result(path: Path, result: BenchmarkResult, folders: Sequence[Path] = (), films: int = 3) -> BenchmarkResult:
    """
    Write JSON and HTML of an evaluation, and print its table.

    :param path: the JSON file
    :param result: the evaluation
    :param folders: folders of the parts whose films it has; copies are put beside the JSON file
    :param films: most films per suite
    :return: the evaluation
    """
    for folder in folders:
        for film in result.films.values():
            source, target = folder / film["file"], path.with_name(f"{path.stem}-films") / Path(film["file"]).name
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
    if folders:
        for film in result.films.values():
            film["file"] = f"{path.stem}-films/{Path(film['file']).name}"
    _write(path, result, films)
    page = write_page(path, result)
    print("\n".join([*table(result), f"written: {path}, {page}"]))
    return result


def _header_without_vla(config: EvalConfig) -> dict[str, Any]:
    """Make what can be checked before the VLA is loaded."""
    from rlt_gym.libero.assets.resolve import resolve_assets
    from rlt_gym.libero.suites.protocols import FOUR_SUITES, get_protocol
    from rlt_gym.libero.suites.tasks import get_tasks
    from rlt_gym.libero.worker.perturbations import check_perturbations

    protocol = get_protocol("rlt" if config.protocol is None else config.protocol)
    suites = list(FOUR_SUITES if config.suites is None else config.suites)
    if not suites or len(set(suites)) != len(suites):
        raise ValueError(f"suites must be one or more different names, for example --suites libero_goal, got {suites}.")
    tasks = {suite: [task.task_id for task in get_tasks(suite, config.tasks)] for suite in suites}
    stated = asdict(protocol) | {"horizons": {suite: protocol.horizons[suite] for suite in suites}}
    names = {entry.name for entry in fields(protocol)} & {entry.name for entry in fields(config)}
    changed = {name: getattr(config, name) for name in sorted(names) if getattr(config, name) is not None}
    stated |= changed
    if config.max_episode_steps is not None:
        changed["max_episode_steps"] = config.max_episode_steps
        stated["horizons"] = dict.fromkeys(suites, config.max_episode_steps)
    for name, value, low, high in (
        ("episodes", stated["episodes"], 1, 500),
        ("films", config.films, 0, 1000),
        ("max_episode_steps", min(stated["horizons"].values()), 1, 100_000),
    ):
        if not low <= value <= high:
            raise ValueError(f"{name} must be from {low} to {high}, got {value}.")
    stated["changed"] = sorted(name for name in changed if changed[name] != getattr(protocol, name, None))
    assets = resolve_assets("auto" if config.assets is None else config.assets)
    return {
        "protocol": stated,
        "tasks": tasks,
        "episodes": stated.pop("episodes"),
        "assets": {"kind": assets.kind},
        "perturbations": check_perturbations(config.perturbations),
        "num_envs": config.num_envs or NUM_ENVS,
        "versions": _versions(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
    }


def _header_of_vla(config: EvalConfig, vla: FrozenVLA, header: dict[str, Any]) -> dict[str, Any]:
    """Make what follows from the VLA and the protocol together."""
    from rlt_gym.libero.robot import PANDA

    stated, spec, assets = header["protocol"], vla.spec, header["assets"]["kind"]
    changes = header["perturbations"]
    spec.check_robot(PANDA)
    if spec.assets not in (None, assets):
        warnings.warn(
            f"The VLA {spec.name!r} was trained on {spec.assets} assets and plays on {assets} ones here: expect few "
            f"successes. Use --assets {spec.assets}.",
            stacklevel=2,
        )
    length = stated["chunk_length"]
    if config.chunk_length is None:  # a protocol's is an upper bound: a policy cannot play more than it plans
        length = spec.horizon if length is None else min(length, spec.horizon)
    if not 1 <= length <= min(spec.horizon, 100):
        raise ValueError(
            f"chunk_length is {length}; with the VLA {spec.name!r} it must be from 1 to {min(spec.horizon, 100)}."
        )
    size = spec.check_frame_size(stated["image_size"])
    if not 16 <= size <= 512:
        raise ValueError(f"image_size must be from 16 to 512 pixels, got {size}.")
    render = spec.check_render(stated["render"])
    return {
        "policy": config.vla,
        "vla": {
            "name": spec.name,
            "kwargs": config.vla_kwargs or {},
            "fingerprint": vla.fingerprint(),
            "trained_on": spec.assets,
            "stochastic": spec.stochastic,
            "horizon": spec.horizon,
            "cameras": list(spec.cameras),
        },
        "played": {
            "chunk_length": length,
            "image_size": size,
            "render": render,
            "assets": assets,
            **({"perturbations": changes} if changes else {}),
        },
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def default_path(config: EvalConfig) -> Path:
    """
    Name the file of an evaluation for which no other was given.

    :param config: settings of the command
    """
    name = re.sub(r"[^\w.-]+", "-", str(config.vla)).strip("-.")
    suffix = "" if config.shard is None else "-" + config.shard.replace("/", "of")
    return Path(f"eval-{name}-{config.protocol or 'rlt'}{config.scenes}{suffix}.json")


def _resumed(path: Path, new: BenchmarkResult) -> BenchmarkResult:
    """Take the outcomes in the file, if it is of the same evaluation."""
    old = read(path)
    different = differences(old.header, new.header, (*SAME, "versions"))
    if not different and old.shard != new.shard:
        different = f"shard is {new.shard}, not {old.shard}"
    if different:
        raise RunError(f"{path} has another evaluation ({different}): give another file with --out, or delete it.")
    old.films = {key: film for key, film in old.films.items() if (path.parent / film["file"]).is_file()}
    if not old.left:
        print(f"{path} is complete: nothing is played. Delete it, or give another --out, to play again.")
    return old


def _announcement(config: EvalConfig, result: BenchmarkResult) -> str:
    """Say what will be played, which may take hours, and how to choose less."""
    tasks, left, total = result.header["tasks"], len(result.left), len(result.places)
    numbers = [f"{len(tasks)} suites" if len(tasks) > 1 else "1 suite"]
    numbers.append(f"{count} tasks" if (count := sum(map(len, tasks.values()))) > 1 else "1 task")
    numbers.append(f"{total:,} episodes" if left == total else f"{left:,} of {total:,} episodes left")
    return (
        f"{config.vla} plays {', '.join(tasks)}: {', '.join(numbers)}. --suites, --tasks and --episodes choose others; "
        "rlt list says what a shipped VLA has learned."
    )


def _play(config: EvalConfig, vla: FrozenVLA, result: BenchmarkResult, path: Path) -> None:
    """Play what is left; whatever happens, what was played is written."""
    total, left = len(result.places), result.left
    written = time.monotonic()
    try:
        with (
            Interrupt() as interrupt,
            quiet_bar(total=total, initial=total - len(left), disable=not config.progress, unit="episode") as bar,
        ):
            for suite, group in itertools.groupby(left, key=lambda place: place.suite):
                places = {(place.task_id, place.init_index): place for place in group}
                bar.set_description(f"{suite}: simulators start")
                for episode in _episodes(config, vla, result, suite, list(places), interrupt.check):
                    place = places[episode.task_id, episode.init_index]
                    result.add(place, episode.instruction, episode.success, episode.steps, episode.chunks)
                    if not episode.success and config.films:
                        _film(result, place, episode, path)
                    outcome = result.suites[suite]
                    bar.set_description(f"{suite}: {outcome.successes}/{outcome.n}")
                    bar.update(1)
                    if time.monotonic() > written + WRITE_EVERY:
                        _write(path, result, config.films)
                        written = time.monotonic()
    except BaseException:
        _write(path, result, config.films, final=False)
        if result.rows:
            print(f"{total - len(result.left)} of {total} episodes are in {path}; the same command goes on from there.")
        raise


def _episodes(
    config: EvalConfig,
    vla: FrozenVLA,
    result: BenchmarkResult,
    suite: str,
    left: Sequence[tuple[int, int]],
    on_chunk: Callable[[], None],
) -> Iterator[PlayedEpisode]:
    from rlt_gym.vla.rollouts import play_episodes

    # as many as the whole evaluation of this suite would have: a batch of another size rounds differently
    num_envs = min(result.header["num_envs"], sum(place.suite == suite for place in result.places))
    env = _make_env(config, result.header, suite, num_envs)
    try:
        seed = result.header["protocol"]["seed"]
        yield from play_episodes(vla, env, left, SPLIT, seed, config.films > 0, on_chunk)
    finally:
        env.close()


def _make_env(config: EvalConfig, header: dict[str, Any], suite: str, num_envs: int) -> gym.vector.VectorEnv:
    import gymnasium as gym

    import rlt_gym  # noqa: F401  (registers the ids)

    played = header["played"]
    return gym.make_vec(
        "LIBERO-v0",
        num_envs=num_envs,
        suite=suite,
        task_ids=header["tasks"][suite],
        chunk_length=played["chunk_length"],
        image_size=played["image_size"],
        render=played["render"],
        assets="auto" if config.assets is None else config.assets,
        max_episode_steps=header["protocol"]["horizons"][suite],
        init_states=SPLIT,
        seed=header["protocol"]["seed"],
        perturbations=played.get("perturbations"),
    )


def _film(result: BenchmarkResult, place: Place, episode: PlayedEpisode, path: Path) -> None:
    """Keep the film of each task's first failure, in the order of the initial states."""
    key = f"{place.suite}/{place.task_id}"
    known = result.films.get(key)
    if known is not None and known["init_index"] <= place.init_index:
        return
    folder = path.with_name(f"{path.stem}-films")
    folder.mkdir(exist_ok=True)
    file = folder / f"{place.suite}-task{place.task_id}-state{place.init_index}.mp4"
    # one picture per chunk
    write_video(file, episode.frames, max(20.0 / result.header["played"]["chunk_length"], 2.0))
    if known is not None:
        (path.parent / known["file"]).unlink(missing_ok=True)
    result.films[key] = {"init_index": place.init_index, "file": f"{folder.name}/{file.name}"}


def _write(path: Path, result: BenchmarkResult, films: int, final: bool = True) -> None:
    """Write the JSON file; the films of a complete evaluation are those of each suite's first failing tasks."""
    if final and not result.left:
        for suite in result.header["tasks"]:
            keys = [f"{suite}/{task}" for task in result.header["tasks"][suite]]
            for key in [key for key in keys if key in result.films][films:]:
                (path.parent / result.films.pop(key)["file"]).unlink(missing_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(dumps(result.to_dict()))
