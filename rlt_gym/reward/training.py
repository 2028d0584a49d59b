"""``rlt train-reward``: a network learns to see success, from episodes in a simulator or from recorded ones."""

from __future__ import annotations

import math
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from scipy.stats import binomtest
from torch import nn

from rlt_gym.core.files import git_commit
from rlt_gym.data.lerobot import LeRobotSettings
from rlt_gym.reward.labels import Labels, recorded_features, recorded_labels, watch
from rlt_gym.reward.model import RewardModel, RewardModelConfig, save_reward_model
from rlt_gym.vla.base import FrozenVLA
from rlt_gym.vla.registry import load_vla

#: Shares of the episodes that train the network and that choose its threshold; the rest measures it.
_SHARES = (0.6, 0.2)
#: Settings that only episodes in a simulator have, and that only recorded ones have.
_PLAYED = ("env_id", "suite", "task_ids", "env_kwargs", "episodes", "noise", "num_envs")
_RECORDED = ("frame_stride", "success_frames", "batch_size")


@dataclass
class TrainRewardConfig(LeRobotSettings):
    """
    Settings of :func:`train_reward`.

    :param demos: Recorded episodes with success labels: files of ``rlt collect`` or in its layout, glob patterns or
        folders, also of LeRobot datasets. No simulator is started. Empty = the VLA plays episodes in one.
    :param env_id: Id of a registered vector environment with a VLA in it.
    :param suite: Suite of the tasks; ``None`` = the environment's default.
    :param task_ids: Tasks to see success in.
    :param vla: Frozen VLA, which plays and whose tokens are read; named as in ``--env.vla``.
    :param vla_kwargs: Further arguments of whoever makes this VLA.
    :param env_kwargs: Further arguments of the environment.
    :param episodes: Episodes per task.
    :param noise: Largest standard deviation of noise on the VLA's actions, constant within a chunk; each episode has
        its own share of it, so that states beside the VLA's own paths are seen.
    :param frame_stride: Use one observation of ``demos`` in this many, counted back from the last one of each episode.
        The chunk length of practice is a good choice, as practice judges the ends of chunks.
    :param success_frames: Last observations of each success of ``demos`` that show the task solved. More than 1 if the
        recordings go on after success.
    :param batch_size: Observations of ``demos`` per forward pass, at most the VLA's ``max_batch``.
    :param hidden: Width of the network's hidden layer.
    :param steps: Gradient steps, each on all observations.
    :param learning_rate: Of AdamW.
    :param weight_decay: Of AdamW.
    :param false_positives: The threshold is the lowest one at which at most this share of the episodes has a chunk end
        that is called a success and is none.
    :param output: ``.safetensors`` file to write; what the model can do goes beside it with suffix ``.json``.
    :param num_envs: Simulators.
    :param device: Where VLA and network run.
    :param seed: Seed of initial states, noise and initialization.
    :param progress: Show a progress bar.
    """

    demos: list[str] = field(default_factory=list)
    env_id: str = "rlt_gym:RLToken-LIBERO-v0"
    suite: str | None = None
    task_ids: list[int] = field(default_factory=lambda: [1])
    vla: str = "mini"
    vla_kwargs: dict[str, Any] | None = None
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    episodes: int = 300
    noise: float = 0.03
    frame_stride: int = 8
    success_frames: int = 1
    batch_size: int = 64
    hidden: int = 64
    steps: int = 300
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    false_positives: float = 0.05
    output: str = "reward.safetensors"
    num_envs: int = 2
    device: str = "cpu"
    seed: int = 0
    progress: bool = True

    def __post_init__(self) -> None:
        defaults = {
            entry.name: entry.default if entry.default_factory is MISSING else entry.default_factory()
            for entry in fields(self)
        }
        others = _PLAYED if self.demos else _RECORDED
        given = [name for name in others if getattr(self, name) != defaults[name]]
        if given:
            raise ValueError(
                f"{', '.join(given)} cannot be used {'with' if self.demos else 'without'} demos: leave out."
            )
        for name in _RECORDED:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.episodes < 10:
            raise ValueError(f"episodes is {self.episodes}; it must be at least 10, to train, choose and measure.")
        for name in ("noise", "learning_rate", "weight_decay"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be a number >= 0.")
        if not 0.0 <= self.false_positives < 1.0:
            raise ValueError(f"false_positives is {self.false_positives}; it must be in [0, 1).")
        if Path(self.output).suffix != ".safetensors":
            raise ValueError(f"output is {self.output!r}; it must end in .safetensors.")


def fit(labels: Labels, config: TrainRewardConfig, vla: FrozenVLA) -> RewardModel:
    """
    Train the network.

    :param labels: What to learn from.
    :param config: How.
    :param vla: The VLA whose tokens they are of.
    :return: The model, with a threshold of 0.5.
    """
    torch.manual_seed(config.seed)
    features = torch.as_tensor(labels.features, device=config.device)
    targets = torch.as_tensor(labels.reached, device=config.device).float()
    architecture = RewardModelConfig(features.shape[1] // 2, config.hidden)
    model = RewardModel(architecture, vla.fingerprint(), vla.spec.name).to(config.device)
    model.center.copy_(features.mean(0))
    model.scale.copy_(features.std(0).clamp_min(1e-3))
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, weight_decay=config.weight_decay)
    for _ in range(config.steps):
        loss = nn.functional.binary_cross_entropy_with_logits(model.logits(features), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


def probabilities(model: RewardModel, labels: Labels) -> np.ndarray:
    """
    Judge labeled observations.

    :param model: The model.
    :param labels: The observations.
    :return: Probabilities (R,).
    """
    features = torch.as_tensor(labels.features, device=model.center.device)
    with torch.no_grad():
        return torch.sigmoid(model.logits(features)).cpu().numpy()


def lowest_threshold(values: np.ndarray, labels: Labels, false_positives: float) -> float:
    """
    Choose the threshold.

    :param values: Probabilities (R,).
    :param labels: Their labels.
    :param false_positives: Allowed share of the episodes with a chunk end that is called a success and is none.
    :return: The lowest threshold that keeps to it, at least 0.5.
    """
    episodes = np.unique(labels.episode)
    negative = ~labels.reached
    worst = [values[negative & (labels.episode == episode)].max(initial=0.0) for episode in episodes]
    allowed = int(false_positives * len(episodes))
    return max(0.5, float(np.sort(worst)[::-1][allowed]))


def measure(values: np.ndarray, labels: Labels, threshold: float) -> dict[str, Any]:
    """
    Say what a model can do, as practice would use it: an episode ends with the first verdict of success.

    :param values: Probabilities (R,).
    :param labels: Their labels.
    :param threshold: What is greater is called a success.
    :return: ``false_positive_chunks`` and ``missed_chunks`` (of those that are none, and of those that are),
        ``false_positive_episodes`` (the first verdict of success is wrong), ``detected_episodes`` (of those whose goal
        is reached, the first verdict is right), each as count, number and Wilson's 95 % interval; ``delay_chunks``,
        mean number of chunks between the goal and its detection; ``calibration_error``, the expected one over ten bins.
    """
    said, reached = values > threshold, labels.reached
    wrong = detected = solved = 0
    delays = []
    episodes = np.unique(labels.episode)
    for episode in episodes:
        rows = np.flatnonzero(labels.episode == episode)
        first = next((row for row in rows if said[row]), None)
        goals = rows[reached[rows]]
        solved += len(goals) > 0
        if first is not None and not reached[first]:
            wrong += 1
        elif first is not None:
            detected += 1
            delays.append(int(first - goals[0]))
    bins = np.minimum((10 * values).astype(int), 9)
    gaps = [
        abs(values[bins == number].mean() - reached[bins == number].mean()) * (bins == number).mean()
        for number in np.unique(bins)
    ]
    return {
        "false_positive_chunks": _share(int((said & ~reached).sum()), int((~reached).sum())),
        "missed_chunks": _share(int((~said & reached).sum()), int(reached.sum())),
        "false_positive_episodes": _share(wrong, len(episodes)),
        "detected_episodes": _share(detected, solved),
        "delay_chunks": float(np.mean(delays)) if delays else None,
        "calibration_error": float(np.sum(gaps)),
    }


def _share(count: int, number: int) -> dict[str, Any]:
    interval = None
    if number:
        low, high = binomtest(count, number).proportion_ci(method="wilson")
        interval = [float(low), float(high)]
    return {"count": count, "of": number, "wilson_95": interval}


def divide(labels: Labels, config: TrainRewardConfig) -> tuple[Labels, Labels, Labels]:
    """
    Divide observations by whole episodes.

    :param labels: The observations.
    :param config: Seed of the choice.
    :return: Those that train the network, that choose its threshold, and that measure it.
    :raises ValueError: The first or the last part has no success, or nothing else.
    """
    episodes = np.random.default_rng(config.seed).permutation(np.unique(labels.episode))
    cuts = np.cumsum([round(share * len(episodes)) for share in _SHARES])
    learn, choose, test = (labels.of(part) for part in np.split(episodes, cuts))
    advice = "play more episodes, a VLA that succeeds in some of them, or another task"
    for name, part in {"learns from": learn, "is measured on": test}.items():
        if part.reached.all() or not part.reached.any():
            raise ValueError(
                f"The network {name} {len(part.reached)} observations, and "
                f"{'all' if part.reached.any() else 'none'} of them show the goal: "
                f"{'give more successes and failures, or another seed' if config.demos else advice}."
            )
    return learn, choose, test


def _play(config: TrainRewardConfig, vla: FrozenVLA) -> Labels:
    """Start simulators, play episodes in them, end them."""
    given = {"suite": config.suite, "device": config.device, "rl_token": "none"} | config.env_kwargs
    given = {key: value for key, value in given.items() if value is not None}
    env = gymnasium.make_vec(
        config.env_id, num_envs=config.num_envs, task_ids=config.task_ids, vla=vla, seed=config.seed, **given
    )
    try:
        return watch(config, env)
    finally:
        env.close()


def train_reward(config: TrainRewardConfig) -> Path:
    """
    Train a reward model on rollouts of a frozen VLA, or on recorded episodes.

    :param config: Settings.
    :return: The file.
    :raises ValueError: A bad argument, before a simulator starts or the VLA reads a picture; or the rollouts have no
        success, or no failure.
    """
    recorded = recorded_labels(config) if config.demos else None
    if recorded is not None:
        divide(recorded, config)  # refuses labels that do not suffice while only they have been read
    vla = load_vla(config.vla, config.device, config.vla_kwargs)
    if recorded is None:
        labels = _play(config, vla)
    else:
        labels = replace(recorded, features=recorded_features(config, vla))
    learn, choose, test = divide(labels, config)
    model = fit(learn, config, vla)
    threshold = lowest_threshold(probabilities(model, choose), choose, config.false_positives)
    model.config = replace(model.config, threshold=threshold)
    found = measure(probabilities(model, test), test, threshold)
    provenance = {"config": asdict(config), "commit": git_commit(), "threshold": threshold, "held_out": found}
    save_reward_model(config.output, model, provenance)
    if config.progress:
        print(f"threshold {threshold:.3f}, held-out episodes:")
        for name, value in found.items():
            shown = f"{value['count']}/{value['of']}" if isinstance(value, dict) else value
            print(f"  {name.replace('_', ' ')}: {shown}")
        print(f"-> {config.output}")
    return Path(config.output)
