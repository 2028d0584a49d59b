"""
Checks that what was learned from frozen models is used with the same ones.

An environment lists a hash for each of its frozen models in ``metadata["fingerprint"]``, e.g. ``{"vla": ...,
"rl_token": ...}``. An environment without this entry is not checked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

Fingerprint = Mapping[str, str]


def check_fingerprint(owner: str, stored: Fingerprint | None, present: Fingerprint | None, advice: str) -> None:
    """
    Compare the frozen models that both sides know.

    :param owner: run or file, for the message
    :param stored: hashes of the models that it was made with
    :param present: hashes of the environment's models
    :param advice: what to do, a sentence
    :raises ValueError: if one of them has changed
    """
    stored, present = stored or {}, present or {}
    changed = [name for name in stored if name in present and stored[name] != present[name]]
    if changed:
        differences = " and ".join(f"{name} {stored[name][:12]}... (here: {present[name][:12]}...)" for name in changed)
        raise ValueError(f"{owner} was made with other frozen weights than the environment's: {differences}. {advice}")


def check_run(run: Path, stored: Fingerprint | None, present: Fingerprint | None) -> None:
    """
    Refuse an environment with other frozen models than those that a run was trained on.

    :param run: folder of the run
    :param stored: the fingerprint in its results
    :param present: hashes of the environment's models
    :raises ValueError: if they differ
    """
    check_fingerprint(f"The run {run}", stored, present, "Put the run's weights back, or train again.")


def of_run(run: Path) -> Fingerprint | None:
    """
    Read the fingerprint in a run's results.

    :param run: folder of a run
    :return: the fingerprint, ``None`` if the results have none
    """
    path = run / "evaluations.json"
    return json.loads(path.read_text()).get("fingerprint") if path.is_file() else None
