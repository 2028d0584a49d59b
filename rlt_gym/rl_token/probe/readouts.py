"""
What can be read from an RL token by a linear model: cross-validated over whole episodes, beside what must be beaten.

Neighboring observations are nearly equal, so a fold holds out whole episodes. The same model reads the same labels in a
random order (what it reaches without information), proprioception alone, and the mean of the VLA's tokens.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from sklearn.linear_model import Ridge, RidgeClassifier
from sklearn.metrics import balanced_accuracy_score
from sklearn.model_selection import GridSearchCV, GroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from rlt_gym.core.robot_spec import RobotSpec
from rlt_gym.data.demo_set import DemoRows

#: Strengths of regularization among which the training part of a fold chooses.
ALPHAS = (1e-2, 1.0, 1e2, 1e4)
FOLDS, INNER_FOLDS = 5, 3
#: An object has moved when it is so far from where it stood, in meters; observations closer than so many control steps
#: to that moment are left out, since the arm then points at the object.
MOVED, APPROACH = 0.01, 16
#: What varies less (meters, standard deviation) is no target.
STILL = 2e-3


@dataclass(frozen=True)
class Target:
    """
    Something to read.

    :param name: What it is.
    :param rows: Rows in which it is known (n,).
    :param values: float (n, k), or int (n,) for classes.
    :param centimeters: Whether the values are lengths in meters, whose error a reader wants in centimeters.
    """

    name: str
    rows: np.ndarray
    values: np.ndarray
    centimeters: bool = False

    @property
    def classes(self) -> bool:
        """Whether the values are classes."""
        return self.values.ndim == 1


def targets(rows: DemoRows, robot: RobotSpec | None) -> tuple[list[Target], dict[str, str]]:
    """
    List what can be read from observations.

    :param rows: What is known about them.
    :param robot: The robot that they show; ``None`` = not known.
    :return: The targets; and those that are left out -> why.
    """
    found: list[Target] = []
    left: dict[str, str] = {}
    everything = np.arange(len(rows))
    length = np.zeros(len(rows))
    for demo in np.unique(rows.demo):
        part = rows.demo == demo
        length[part] = max(1, rows.step[part].max())
    found.append(Target("phase of the episode", everything, (rows.step / length)[:, None]))
    labels = {"task": rows.task, "success": rows.success.astype(int)}
    if robot is None:
        left["gripper closes"] = "the tokens do not say of which robot they are: run `rlt encode-tokens` again"
    elif robot.gripper_index is None:
        left["gripper closes"] = f"the robot {robot.name} has no gripper"
    else:
        command = rows.actions[rows.action_row, robot.gripper_index]
        labels = {"gripper closes": (command * robot.gripper_opens < 0).astype(int), **labels}
    for name, classes in labels.items():
        episodes = [len(np.unique(rows.demo[classes == value])) for value in np.unique(classes)]
        if len(episodes) < 2:
            left[name] = "the data have one class only"
        elif min(episodes) < FOLDS:
            left[name] = f"a class has {min(episodes)} episodes, and {FOLDS} are needed"
        else:
            found.append(Target(name, everything, classes))
    positions = rows.object_positions.astype(float)
    known = np.isfinite(positions).all(axis=(0, 2)) if len(rows) else np.zeros(0, bool)
    if not known.any():
        left["object positions"] = left["placement"] = "the data have no object positions"
        return found, left
    flat = positions[:, known].reshape(len(rows), -1)
    varies = flat.std(axis=0) > STILL
    if varies.any():
        found.append(Target("object positions", everything, flat[:, varies], centimeters=True))
    else:
        left["object positions"] = f"no position of an object varies by more than {1000 * STILL:g} mm (deviation)"
    placed, values = _placements(rows, positions[:, known])
    episodes_moved = len(np.unique(rows.demo[placed]))
    if 0 < episodes_moved < FOLDS:
        left["placement"] = f"an object is moved in {episodes_moved} episodes, and {FOLDS} are needed"
    elif episodes_moved:
        found.append(Target("placement", placed, values, centimeters=True))
    else:
        left["placement"] = "no object is moved, or all begin at the same place"
    return found, left


def _placements(rows: DemoRows, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """
    Where the object of each task stood at first, seen from well before it moves, relative to its mean in the task.

    :return: Rows (n,) and horizontal positions (n, 2); empty if nothing moves or varies.
    """
    placed, values = [], []
    for task in np.unique(rows.task):
        episodes = [np.flatnonzero(rows.demo == demo) for demo in np.unique(rows.demo[rows.task == task])]
        paths = [np.linalg.norm(positions[episode] - positions[episode[0]], axis=2) for episode in episodes]
        moved = int(np.mean([path.max(axis=0) for path in paths], axis=0).argmax())
        chosen, first = [], []
        for episode, path in zip(episodes, paths, strict=True):
            far = np.flatnonzero(path[:, moved] > MOVED)
            if not len(far):
                continue
            early = episode[rows.step[episode] <= rows.step[episode[far[0]]] - APPROACH]
            chosen.append(early)
            first.append(np.repeat(positions[episode[0], None, moved, :2], len(early), axis=0))
        if chosen:
            starts = np.concatenate(first)
            if len(starts) and (starts.std(axis=0) > STILL).any():
                placed.append(np.concatenate(chosen))
                values.append(starts - starts.mean(axis=0))
    if not placed:
        return np.zeros(0, int), np.zeros((0, 2))
    return np.concatenate(placed), np.concatenate(values)


def read(target: Target, features: np.ndarray, groups: np.ndarray, seed: int | None = None) -> dict[str, float]:
    """
    Read a target by a linear model, cross-validated over whole episodes.

    :param target: What to read.
    :param features: Of the target's rows, float (n, d).
    :param groups: Episode of each of these rows (n,).
    :param seed: Put the labels in the random order of this seed; ``None`` = read them as they are.
    :return: ``score``: R2 pooled over the values, or balanced accuracy; ``low`` and ``high``: of the folds; ``error``:
        root mean squared error in cm where the values are lengths.
    """
    values = target.values
    if seed is not None:
        values = values[np.random.default_rng(seed).permutation(len(values))]
    scores, errors = [], []
    with warnings.catch_warnings():  # episodes of a fold need not have all classes
        warnings.filterwarnings("ignore", "y_pred contains classes not in y_true")
        for train, test in _folds(groups, FOLDS):
            model = _fit(features[train], values[train], groups[train], target.classes)
            predicted = model.predict(features[test])
            if target.classes:
                present = np.isin(values[test], np.unique(values[train]))
                scores.append(balanced_accuracy_score(values[test][present], predicted[present]))
                continue
            residual = values[test] - predicted.reshape(values[test].shape)
            scale = values[train].std(axis=0) + 1e-12
            base = values[test] - values[train].mean(axis=0)
            scores.append(1 - ((residual / scale) ** 2).sum() / ((base / scale) ** 2).sum())
            errors.append((residual**2).mean())
    result = {"score": float(np.mean(scores)), "low": float(np.min(scores)), "high": float(np.max(scores))}
    if target.centimeters:
        result["error"] = 100 * float(np.sqrt(np.mean(errors)))
    return result


def spread(target: Target) -> float | None:
    """
    Error of a reader that knows nothing.

    :param target: What to read.
    :return: Standard deviation in cm; ``None`` if the values are no lengths.
    """
    return 100 * float(np.sqrt(target.values.var(axis=0).mean())) if target.centimeters else None


def _folds(groups: np.ndarray, count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    count = min(count, len(np.unique(groups)))
    if count > 1:  # else there is nothing to hold out
        yield from GroupKFold(count, shuffle=True, random_state=0).split(groups, groups=groups)


def _fit(features: np.ndarray, values: np.ndarray, groups: np.ndarray, classes: bool) -> GridSearchCV:
    """Fit a linear model whose regularization other episodes of the training part choose."""
    model = make_pipeline(StandardScaler(), RidgeClassifier(class_weight="balanced") if classes else Ridge())
    grid = {f"{model.steps[-1][0]}__alpha": list(ALPHAS)}
    scoring = "balanced_accuracy" if classes else "neg_mean_squared_error"
    inner = list(_folds(groups, INNER_FOLDS))
    if classes:  # a class may have all its episodes in one part
        inner = [(a, b) for a, b in inner if set(np.unique(values[b])) <= set(np.unique(values[a]))]
    return GridSearchCV(model, grid, scoring=scoring, cv=inner or None).fit(features, values)
