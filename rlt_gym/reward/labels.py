"""Observations and whether they show success: those of episodes in a simulator, and those of recorded episodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from rlt_gym.core.episodes import SPLIT_SIZES
from rlt_gym.core.judging import Judged
from rlt_gym.data.demo_set import resize_frames
from rlt_gym.data.lerobot import STEP_SUCCESS, LeRobotDemo
from rlt_gym.data.libero_hdf5 import Demo
from rlt_gym.data.sources import DemoSource, demo_sources
from rlt_gym.reward.model import pooled
from rlt_gym.vla.base import FrozenVLA, forward_seed
from rlt_gym.vla.batches import run_vla
from rlt_gym.vla.demos import check_demo_frames, check_demos

if TYPE_CHECKING:
    from rlt_gym.reward.training import TrainRewardConfig

#: Episodes come from the upper end of the training split, which online training draws from only rarely.
_FIRST_INDEX = SPLIT_SIZES["train"] // 2


@dataclass(frozen=True)
class Labels:
    """
    Observations, and whether they show success.

    :param features: Of :func:`~rlt_gym.reward.model.pooled`, float32 (R, 2 H).
    :param reached: Whether the goal is reached, bool (R,).
    :param episode: Number of the episode, (R,); rows of an episode are in their order.
    """

    features: np.ndarray
    reached: np.ndarray
    episode: np.ndarray

    def of(self, episodes: np.ndarray) -> Labels:
        """
        Take the rows of some episodes.

        :param episodes: Their numbers.
        :return: The rows.
        """
        rows = np.isin(self.episode, episodes)
        return Labels(self.features[rows], self.reached[rows], self.episode[rows])


def watch(config: TrainRewardConfig, env: Any) -> Labels:
    """
    Play episodes to their horizon, and note at the end of each chunk whether the goal is reached.

    :param config: What to play.
    :param env: The environment.
    :return: The labels.
    """
    seen: dict[int, np.ndarray] = {}

    def judge(shown: Mapping[int, Judged]) -> dict[int, bool]:
        seen.update(zip(shown, pooled(env.look(shown)).cpu().numpy(), strict=True))
        return dict.fromkeys(shown, False)

    env.unwrapped.judge_success(judge)
    rng = np.random.default_rng(config.seed)
    numbers = [_FIRST_INDEX + (config.seed * 1000 + number) % _FIRST_INDEX for number in range(config.episodes)]
    listed = [(task, number) for task in config.task_ids for number in numbers]
    size = dict(zip(listed, rng.uniform(0.0, config.noise, len(listed)), strict=True))
    held: dict[int, list[tuple[np.ndarray, bool]]] = {index: [] for index in range(env.num_envs)}
    done: dict[tuple[int, int], list[tuple[np.ndarray, bool]]] = {}
    with tqdm(total=len(listed), desc="episodes", disable=not config.progress) as bar:
        obs, infos = env.reset(seed=config.seed, options={"init_states": "train", "episodes": listed})
        while len(done) < len(listed):
            playing = zip(infos["task_id"].tolist(), infos["init_index"].tolist(), strict=True)
            scale = np.array([size[episode] for episode in playing])[:, None, None]
            noise = rng.normal(size=(env.num_envs, 1, env.single_action_space.shape[1]))
            seen.clear()
            obs, _, _, truncations, infos = env.step(obs["vla_ref"] + scale * noise)
            for index in range(env.num_envs):
                info = infos["final_info"] if truncations[index] else infos
                if index in seen:
                    held[index].append((seen[index], bool(info["goal_reached"][index])))
                if truncations[index]:
                    rows, held[index] = held[index], []
                    if not info["worker_restarted"][index]:  # else it is played again
                        done[int(info["task_id"][index]), int(info["init_index"][index])] = rows
                        bar.update()
    table = [(*row, number) for number, episode in enumerate(listed) for row in done[episode]]
    features, reached, episodes = zip(*table, strict=True)
    return Labels(np.array(features, np.float32), np.array(reached), np.array(episodes))


def recorded_labels(config: TrainRewardConfig) -> Labels:
    """
    Read which observations of recorded episodes show success; only labels are read, no pictures.

    Row t of a file is the observation before action t. It shows success

    - if the task is solved after action t - 1, where the file says so of control steps: ``rewards`` of an HDF5 file,
      ``next.success`` or ``next.reward`` of a LeRobot dataset, 1 or 0;
    - among the last ``success_frames`` of a success. An episode is a success by its attribute ``success``, and without
      one if the task is solved after its last action. No file has the observation after the last action: the last one
      stands for it.

    ``dones`` are not read, as a time-out ends an episode too.

    :param config: Files, ``frame_stride`` and ``success_frames``.
    :return: The labels, with features of width 0.
    :raises ValueError: An episode has no label, or two that contradict each other; there are fewer than 10 episodes, no
        success or no failure.
    """
    reached, episode, solved = [], [], []
    for number, (source, demo) in enumerate(_episodes(config)):
        shown = _shows_success(source, demo, config.success_frames)
        steps = _steps(demo, config.frame_stride)
        reached.append(shown[steps])
        episode.append(np.full(len(steps), number))
        solved.append(bool(shown.any()))
    if len(solved) < 10:
        raise ValueError(f"demos has {len(solved)} episodes; it must have at least 10, to train, choose and measure.")
    if all(solved) or not any(solved):
        found, missing = ("successes", "failures") if solved[0] else ("failures", "successes")
        raise ValueError(
            f"All {len(solved)} episodes of demos are {found}: give {missing} too; `rlt collect --policy vla` keeps "
            "both."
        )
    rows = np.concatenate(reached)
    return Labels(np.zeros((len(rows), 0), np.float32), rows, np.concatenate(episode))


def recorded_features(config: TrainRewardConfig, vla: FrozenVLA) -> np.ndarray:
    """
    Show recorded episodes to a VLA.

    :param config: Files, ``frame_stride``, ``batch_size``.
    :param vla: The VLA.
    :return: Features of the rows of :func:`recorded_labels`, float32 (R, 2 H).
    :raises ValueError: The VLA needs other cameras, another state, or other pictures.
    """
    check_demos(vla.spec, demo_sources(config.demos, config))
    sizes = [_frame_size(vla, source, demo) for source, demo in _episodes(config)]
    features = []
    bar = tqdm(_episodes(config), total=len(sizes), desc="episodes", disable=not config.progress)
    for number, (source, demo) in enumerate(bar):
        steps = _steps(demo, config.frame_stride)
        frames = {camera: demo.frames(camera)[steps] for camera in vla.spec.cameras}
        obs = {camera: resize_frames(value, sizes[number]) for camera, value in frames.items()}
        obs["state"] = demo.proprio[steps]
        for start in range(0, len(steps), config.batch_size):
            part = {key: value[start : start + config.batch_size] for key, value in obs.items()}
            seeds = [forward_seed(number, step) for step in steps[start : start + config.batch_size].tolist()]
            features.append(pooled(run_vla(vla, part, [source.instruction] * len(seeds), seeds)).cpu().numpy())
    return np.concatenate(features).astype(np.float32)


def _episodes(config: TrainRewardConfig) -> Iterator[tuple[DemoSource, Demo | LeRobotDemo]]:
    for source in demo_sources(config.demos, config):
        for demo in source.demos():
            yield source, demo


def _steps(demo: Demo | LeRobotDemo, stride: int) -> np.ndarray:
    """Control steps of the observations that are used: the last one always, because it may be the only success."""
    return np.arange((len(demo) - 1) % stride, len(demo), stride)


def _shows_success(source: DemoSource, demo: Demo | LeRobotDemo, success_frames: int) -> np.ndarray:
    """Return whether each observation shows success, bool (T,)."""
    label, steps = demo.success, demo.step_success
    if label is None and steps is None:
        needed = "the attribute success (true or false), or an array rewards"
        if source.number is not None:  # a LeRobot dataset
            needed = f"a column {' or '.join(STEP_SUCCESS)}"
        raise ValueError(
            f"{demo.name} of {source.name} does not say whether it is a success: give it {needed} of 0 and 1, or leave "
            "the file out."
        )
    if label is False and steps is not None and steps.any():
        raise ValueError(
            f"{demo.name} of {source.name} has success=False and rewards of 1: correct one of them, or leave the file "
            "out."
        )
    shown = np.zeros(len(demo), dtype=bool)
    if steps is not None:
        shown[1:] = steps[:-1]
    if label or (label is None and steps is not None and steps[-1:].any()):
        shown[-success_frames:] = True
    return shown


def _frame_size(vla: FrozenVLA, source: DemoSource, demo: Demo | LeRobotDemo) -> int:
    """Choose the size of the frames that the VLA is shown of an episode: what it is shown in practice."""
    height, width = demo.frame_shape
    size = vla.spec.frame_size or height
    if height != width or height % size:
        raise ValueError(
            f"{demo.name} of {source.name} has frames of {height} x {width} pixels, and the VLA {vla.spec.name!r} "
            f"needs square ones with an edge of {size} or a multiple of it: record them so (--image_size of `rlt "
            "collect`)."
        )
    check_demo_frames(vla.spec, size)
    return size
