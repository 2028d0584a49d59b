"""What the frozen VLA has done on the states of a run, so that it need not be played on them again."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rlt_sb3.common.fingerprint import Fingerprint, check_fingerprint, of_run
from rlt_sb3.evaluation.results import Evaluation

if TYPE_CHECKING:
    from rlt_sb3.experiment.config import TrainConfig

#: how tables call it
NAME = "frozen VLA"
#: under which names evaluations.json of a run has its outcomes
KEYS = {"eval": "vla", "selection": "vla_selection"}
#: settings of the environment that do not change what the VLA does
NO_MATTER = {"num_envs", "rl_token", "show_tokens", "show_pictures", "show_task", "train_episode_steps", "device"}


def known_vla(run: Path, split: str, pairs: range) -> Evaluation | None:
    """
    Take the frozen VLA's outcomes from a run's own evaluation.

    :param run: folder of the run
    :param split: "eval", "selection" or another one, of which a run knows nothing
    :param pairs: numbers of the initial states
    :return: the outcomes, None if the run does not have all of them
    """
    from rlt_sb3.experiment.report import read_evaluations

    try:
        known = Evaluation.from_dict(read_evaluations(run)[KEYS[split]])
    except (KeyError, ValueError):
        return None
    rows = {row.pair: row for row in known.rows}
    if any(pair not in rows for pair in pairs):
        return None
    return Evaluation(NAME, split, [rows[pair] for pair in pairs])


def check_vla_of(config: TrainConfig) -> None:
    """
    Refuse ``evaluation.vla_of`` if that run's VLA has not played the same states in the same environment.

    :param config: settings of the new run
    :raises ValueError: if the folder is no run, its environment has other settings, or it has too few states
    """
    from rlt_sb3.experiment.config import load_config

    settings = config.evaluation
    if settings.vla_of is None:
        return
    run = Path(settings.vla_of)
    given, theirs = asdict(config.env), asdict(load_config(run / "config.yaml").env)
    for name in sorted(given.keys() - NO_MATTER):
        if given[name] != theirs[name]:
            raise ValueError(
                f"evaluation.vla_of needs a run in the same environment: {run} has env.{name} {theirs[name]!r}, given "
                f"was {given[name]!r}. Leave evaluation.vla_of out, or name another run."
            )
    for split in KEYS:
        wanted = settings.states(split)
        if known_vla(run, split, range(wanted)) is None:
            raise ValueError(
                f"evaluation.vla_of needs the frozen VLA's outcomes on {wanted} states of the split {split!r}, and "
                f"{run} does not have all of them. Leave evaluation.vla_of out, or name another run."
            )


def check_weights_of(run: Path, present: Fingerprint | None) -> None:
    """
    Refuse ``evaluation.vla_of`` if that run's VLA has other weights.

    :param run: the run that it names
    :param present: hashes of the environment's models
    :raises ValueError: if they differ
    """
    stored = {name: value for name, value in (of_run(run) or {}).items() if name == "vla"}
    check_fingerprint(f"The run {run}", stored, present, "Leave evaluation.vla_of out, or name another run.")
