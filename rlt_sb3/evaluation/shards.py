"""Merges an evaluation that was played in parts: ``rlt eval RUN --shard 1/3``, then ``rlt eval --merge FILES``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlt_sb3.common.errors import RunError
from rlt_sb3.evaluation.results import Evaluation

#: What all parts must have in common.
SAME = ("policy", "split", "n_states", "model_sha256", "settings", "fingerprint")


class MergeError(RunError):
    """Raised if the parts do not make one evaluation."""


def parse_shard(text: str | None) -> tuple[int, int]:
    """
    Read which part of an evaluation to play.

    :param text: "k/n", counted from 1; None for the whole evaluation
    :return: (k - 1, n)
    :raises ValueError: if the text has another form
    """
    if text is None:
        return 0, 1
    parts = text.split("/")
    if len(parts) == 2 and all(part.isdigit() for part in parts) and 1 <= int(parts[0]) <= int(parts[1]):
        return int(parts[0]) - 1, int(parts[1])
    raise ValueError(f"shard must be k/n with 1 <= k <= n, for example 1/3, got {text!r}.")


def read_json(path: Path, otherwise: str) -> dict[str, Any]:
    """
    Read a file of an evaluation.

    :param path: the file
    :param otherwise: the message for a file that holds no JSON object
    :return: its contents
    :raises FileNotFoundError: if there is none
    :raises ValueError: if it holds something else
    :raises RunError: if it cannot be read
    """
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise FileNotFoundError(f"There is no file {path}.") from error
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ValueError(otherwise) from error
    if not isinstance(data, dict):
        raise ValueError(otherwise)
    return data


def merge(files: list[Path]) -> dict[str, Any]:
    """
    Put the parts of an evaluation together.

    :param files: JSON files of ``rlt eval --shard``
    :return: contents of the file that one evaluation of all states would have written: rows of the policy, and of the
        frozen VLA where every part has them
    :raises FileNotFoundError: if a file is missing
    :raises ValueError: if a file is no part of an evaluation
    :raises MergeError: if a part is missing, there twice, incomplete, or of another evaluation
    """
    parts: dict[int, dict[str, Any]] = {}
    first: dict[str, Any] = {}
    for path in files:
        otherwise = f"{path} is no part of an evaluation: --merge takes the JSON files of rlt eval --shard."
        data = read_json(path, otherwise)
        try:
            (index, count), _, _ = data["shard"], data["n_states"], data["rows"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(otherwise) from error
        first = first or data
        for key in SAME:
            if data.get(key) != first.get(key):
                raise MergeError(
                    f"{path} belongs to another evaluation than {files[0]}: {key} is {data.get(key)}, not "
                    f"{first.get(key)}."
                )
        if count != first["shard"][1]:
            raise MergeError(
                f"{path} is part {index}/{count}, but {files[0]} is one of {first['shard'][1]}: give the parts of one "
                "division."
            )
        if index in parts:
            raise MergeError(f"Part {index}/{count} is there twice ({path}): give each part once.")
        expected = list(range(index - 1, data["n_states"], count))
        for rows in [data["rows"]] + ([data["vla"]["rows"]] if "vla" in data else []):
            if [row["pair"] for row in rows] != expected:
                raise MergeError(
                    f"{path} does not have each of the initial states of part {index}/{count} once: play it again with "
                    f"rlt eval --shard {index}/{count}."
                )
        parts[index] = data
    count = first["shard"][1] if first else 0
    missing = sorted(set(range(1, count + 1)) - parts.keys())
    if missing or not parts:
        what = ", ".join(f"part {k}/{count}" for k in missing) or "every part"
        raise MergeError(f"Missing: {what}. Give the JSON file that rlt eval --shard has written for each part.")
    merged = {key: first[key] for key in ("run", "model", *SAME) if key in first}
    merged |= _joined(list(parts.values())).to_dict()
    if all("vla" in part for part in parts.values()):
        merged["vla"] = _joined([part["vla"] for part in parts.values()]).to_dict()
    return merged


def _joined(parts: list[dict[str, Any]]) -> Evaluation:
    evaluations = [Evaluation.from_dict(part) for part in parts]
    rows = sorted((row for evaluation in evaluations for row in evaluation.rows), key=lambda row: row.pair)
    return Evaluation(evaluations[0].policy, evaluations[0].split, rows)
