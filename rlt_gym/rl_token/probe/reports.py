"""What is known about the file of an RL token: the report beside it, of its training or of ``rlt probe``."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from rlt_gym.rl_token.io import read_rl_token
from rlt_gym.rl_token.probe.gates import failures


def probe_page(rl_token: str | os.PathLike[str]) -> Path:
    """
    Name the page of ``rlt probe``; its numbers, the report, have the same name with suffix ``.json``.

    :param rl_token: The file of an RL token.
    :return: ``TOKEN_probe.html`` beside it.
    """
    path = Path(rl_token)
    return path.with_name(f"{path.stem}_probe.html")


@dataclass(frozen=True)
class Verdict:
    """
    What reports say about an RL token.

    :param report: The report that counts; ``None`` = there is none.
    :param failures: The limits of :mod:`~rlt_gym.rl_token.probe.gates` that it does not keep, a sentence for each.
    :param ignored: Reports that do not count, a sentence for each.
    """

    report: Path | None
    failures: list[str]
    ignored: list[str]


def judge(rl_token: str | os.PathLike[str]) -> Verdict:
    """
    Read the report of an RL token: that of ``rlt probe`` if there is one, else that of its training.

    :param rl_token: Its ``.safetensors`` file.
    :return: What the report says. One that cannot be read, or is of other weights, does not count.
    :raises ValueError: If the RL token cannot be read.
    """
    path = Path(rl_token)
    fingerprint = read_rl_token(path).fingerprint()
    ignored = []
    for report, key in ((probe_page(path).with_suffix(".json"), "numbers"), (path.with_suffix(".json"), "held_out")):
        if not report.is_file():
            continue
        try:
            content = json.loads(report.read_text(encoding="utf-8"))
            numbers = {name: float(value) for name, value in content[key].items()}
            of = content.get("fingerprint")
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            ignored.append(f"{report} cannot be read as the report of an RL token ({type(error).__name__}: {error})")
            continue
        if of != fingerprint:
            whose = f"with fingerprint {of[:12]}..." if isinstance(of, str) else "without a fingerprint"
            ignored.append(f"{report} is of an RL token {whose}, and {path.name} has {fingerprint[:12]}...")
            continue
        return Verdict(report, failures(numbers), ignored)
    return Verdict(None, [], ignored)
