"""Whether an RL token is good enough to train on: its report is asked before simulators start."""

from __future__ import annotations

import warnings
from pathlib import Path

from rlt_sb3.experiment.config import EnvConfig


def check_token(config: EnvConfig, accept: bool) -> None:
    """
    Refuse an RL token whose report says that it does not keep a limit.

    Names, "auto" among them, pass: the shipped tokens are tested with the package. ``gymnasium.make_vec`` asks for no
    report.

    :param config: the environment's settings
    :param accept: warn instead
    :raises ValueError: which number, which limit, and what to do
    """
    name = config.make_kwargs().get("rl_token")
    if not isinstance(name, str) or not Path(name).is_file():
        return  # the environment says what is wrong with a file that is missing
    from rlt_gym.rl_token.probe.reports import judge

    verdict = judge(name)
    measure = f"measure it with `rlt probe {name}`"
    for reason in verdict.ignored:
        _warn(f"{reason}: it is ignored; {measure}.")
    if verdict.report is None:
        if not verdict.ignored:
            _warn(f"The RL token {name} has no report beside it, so nothing is known about its worth: {measure}.")
        return
    if not verdict.failures:
        return
    found = f"The RL token {name} does not keep a limit, as {verdict.report.name} says: {'; '.join(verdict.failures)}."
    if not accept:
        raise ValueError(
            f"{found} Train it longer (`rlt pretrain-token` with more --steps or --demos, and with context "
            "dropout, 0.9 by default), or use it all the same with --accept_poor_token true."
        )
    _warn(f"{found} It is used all the same (accept_poor_token).")


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)
