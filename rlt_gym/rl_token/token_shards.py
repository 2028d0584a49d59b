"""
Tokens on disk, for sets that do not fit into memory.

A folder holds ``index.json``, ``rows.safetensors`` (what is known about the rows besides their tokens) and shards
``tokens-00000.safetensors`` of equally many rows: ``tokens`` (n, N, H), ``mask`` bool (n, N), ``kind`` uint8 (n, N) and
``pictures`` uint8 (n, cameras, S, S, 3), upright, N being the most tokens of a row of this shard. The index is written
anew after every shard, so that a writer that was killed goes on where it was; what else it left, its temporary
folders and rows without an index, the next one replaces.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save as save_arrays
from safetensors.torch import save_file

from rlt_gym.core.files import atomic_write, write_json
from rlt_gym.core.robot_spec import RobotSpec
from rlt_gym.data.demo_set import DemoRows
from rlt_gym.rl_token.tokens import TokenOrigin, Tokens

FORMAT = "rlt-tokens-2"
#: Types in which tokens may be kept.
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_INDEX, _ROWS = "index.json", "rows.safetensors"
_LISTS = ("instructions", "files")


class TokenWriter:
    """
    Writes shards, and finds those that an interrupted writer has left. One at a time may write in a folder.

    :param folder: Where they lie; made if it is missing.
    :param origin: Whose tokens they are.
    :param rows: What is known about the rows besides their tokens.
    :param rows_per_shard: Rows of each shard; the last one may have fewer.
    :param settings: What else the tokens depend on, of types that JSON can hold.
    :param robot: The robot that the rows show; ``None`` = not said.
    :raises ValueError: If the folder holds something else, or tokens of other demonstrations, settings or VLA.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        origin: TokenOrigin,
        rows: DemoRows,
        rows_per_shard: int,
        settings: Mapping[str, Any],
        robot: RobotSpec | None = None,
    ) -> None:
        self.folder = Path(folder)
        arrays = {field.name: getattr(rows, field.name) for field in fields(rows) if field.name not in _LISTS}
        lists = {key: getattr(rows, key) for key in _LISTS}
        self.index: dict[str, Any] = {
            "format": FORMAT,
            "origin": asdict(origin),
            "rows": len(rows),
            "rows_per_shard": rows_per_shard,
            "settings": dict(settings),
            **lists,
        }
        about = hashlib.sha256(json.dumps(self.index, sort_keys=True).encode())
        for key, value in sorted(arrays.items()):
            about.update(f"{key} {value.dtype} {value.shape}".encode() + np.ascontiguousarray(value).tobytes())
        # no part of the job: the same command adds it to a folder of a version that did not write it
        about_robot = None if robot is None else robot.to_dict()
        self.index |= {"job": about.hexdigest(), "robot": about_robot, "complete": False, "shards": {}}
        if (self.folder / _INDEX).exists():
            found = _read_index(self.folder)
            if found["job"] != self.index["job"]:
                raise ValueError(
                    f"{self.folder} holds tokens of {found['origin']['vla']!r} that were made of other demonstrations, "
                    "with other settings or by another VLA: choose another output, or delete the folder."
                )
            self.index["shards"] = found["shards"]
        elif self.folder.exists() and {*self.folder.iterdir()} - {self.folder / _ROWS, *_left_over(self.folder)}:
            raise ValueError(f"{self.folder} is not empty and holds no tokens: choose another output.")
        for path in _left_over(self.folder):
            shutil.rmtree(path, ignore_errors=True)
        content = save_arrays({key: np.ascontiguousarray(value) for key, value in arrays.items()})
        path = self.folder / _ROWS
        if not path.is_file() or path.read_bytes() != content:
            with atomic_write(path) as temporary:
                temporary.write_bytes(content)
        if not (self.folder / _INDEX).exists():  # last: whoever finds it finds the rows as well
            self._write_index()

    def _write_index(self) -> None:
        write_json(self.folder / _INDEX, self.index)

    @property
    def shards(self) -> list[slice]:
        """Rows of each shard."""
        total, size = self.index["rows"], self.index["rows_per_shard"]
        return [slice(start, min(start + size, total)) for start in range(0, total, size)]

    def intact(self, number: int) -> bool:
        """
        Whether a shard is there, bit for bit as it was written.

        :param number: Of the shard.
        :return: The answer; it takes reading the file once.
        """
        name = _shard_name(number)
        written = self.index["shards"].get(name)
        path = self.folder / name
        return written is not None and path.is_file() and _sha256(path) == written["sha256"]

    def write(
        self, number: int, tokens: torch.Tensor, mask: torch.Tensor, kind: torch.Tensor, pictures: np.ndarray
    ) -> None:
        """
        Write a shard.

        :param number: Of the shard.
        :param tokens: (n, N, H) in the type in which they are to be kept.
        :param mask: bool (n, N).
        :param kind: uint8 (n, N), see :data:`~rlt_gym.vla.base.TOKEN_KINDS`.
        :param pictures: uint8 (n, cameras, S, S, 3).
        """
        name = _shard_name(number)
        data = {
            "tokens": tokens.contiguous(),
            "mask": mask.contiguous(),
            "kind": kind.contiguous(),
            "pictures": torch.from_numpy(np.ascontiguousarray(pictures)),
        }
        with atomic_write(self.folder / name) as temporary:
            save_file(data, temporary, metadata={"job": self.index["job"]})  # of two keys, the order would be random
            entry = {"tokens": tokens.shape[1], "sha256": _sha256(temporary)}
        self.index["shards"][name] = entry
        self._write_index()

    def close(self) -> None:
        """Say that all shards are there."""
        self.index["complete"] = True
        self._write_index()


class TokenShards(Tokens):
    """
    Reads tokens from disk. Nothing but what :meth:`batch` returns is in memory.

    :attr:`robot` is the robot that they show, ``None`` if the folder does not say it.

    :param folder: A folder that ``rlt encode-tokens`` wrote.
    :raises ValueError: If it is missing, unfinished or damaged, or has a shard of other tokens.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        index = _read_index(self.folder)
        if not index["complete"]:
            raise ValueError(f"{self.folder} is not finished: run the same `rlt encode-tokens` command again.")
        self.rows_per_shard = int(index["rows_per_shard"])
        self.robot = RobotSpec.from_dict(index["robot"]) if index.get("robot") else None
        self._shards = sorted(index["shards"])
        for name in self._shards:
            with _open(self.folder / name) as file:
                if (file.metadata() or {}).get("job") != index["job"]:
                    raise ValueError(
                        f"{self.folder / name} belongs to other tokens than {_INDEX} beside it: run the same "
                        "`rlt encode-tokens` command again, which writes such shards anew."
                    )
        try:
            columns: dict[str, Any] = {**load_arrays(self.folder / _ROWS), **{key: index[key] for key in _LISTS}}
            rows = DemoRows(**columns)
        except (SafetensorError, OSError, TypeError) as error:
            raise ValueError(
                f"{self.folder / _ROWS} is missing or damaged ({error}): run the same `rlt encode-tokens` command "
                "again, which writes it anew."
            ) from error
        super().__init__(_origin(index["origin"]), rows, max(entry["tokens"] for entry in index["shards"].values()))

    def batch(self, rows: np.ndarray, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Get some rows.

        :param rows: Row numbers (B,).
        :param device: Where to put them.
        :return: Tokens float32 (B, N, H), valid ones first, and mask bool (B, N).
        :raises ValueError: If a shard is missing or damaged.
        """
        parts = self._read(np.asarray(rows), "tokens", "mask")
        tokens = torch.zeros(len(rows), self.count, self.origin.token_dim)
        mask = torch.zeros(len(rows), self.count, dtype=torch.bool)
        for row, (part, valid) in enumerate(zip(parts["tokens"], parts["mask"], strict=True)):
            tokens[row, : len(part)] = part
            mask[row, : len(part)] = valid
        return tokens.to(device), mask.to(device)

    def pictures(self, rows: np.ndarray) -> np.ndarray:
        """
        Get small pictures.

        :param rows: Row numbers (B,).
        :return: uint8 (B, cameras, S, S, 3), upright, the cameras as in ``origin.cameras``.
        :raises ValueError: If a shard is missing or damaged.
        """
        return torch.stack(self._read(np.asarray(rows), "pictures")["pictures"]).numpy()

    def kinds(self, rows: np.ndarray) -> np.ndarray:
        """
        Get the kinds of some rows' tokens.

        :param rows: Row numbers (B,).
        :return: uint8 (B, N), see :data:`~rlt_gym.vla.base.TOKEN_KINDS`.
        :raises ValueError: If a shard is missing or damaged.
        """
        kinds = np.zeros((len(rows), self.count), np.uint8)
        for row, part in enumerate(self._read(np.asarray(rows), "kind")["kind"]):
            kinds[row, : len(part)] = part
        return kinds

    def _read(self, rows: np.ndarray, *names: str) -> dict[str, list[torch.Tensor]]:
        """Read one tensor of each name for each row; every shard is opened once."""
        found: dict[str, list[Any]] = {name: [None] * len(rows) for name in names}
        numbers, places = np.divmod(rows, self.rows_per_shard)
        for number in np.unique(numbers):
            with _open(self.folder / self._shards[number]) as file:
                slices = {name: file.get_slice(name) for name in names}
                for row in np.flatnonzero(numbers == number):
                    place = int(places[row])
                    for name, part in slices.items():
                        found[name][row] = part[place : place + 1][0]
        return found


def _origin(index: Mapping[str, Any]) -> TokenOrigin:
    """Read the origin from the index, where tuples are lists."""
    grids = index.get("picture_grids")
    tuples = {key: tuple(index[key]) for key in ("kinds", "cameras")}
    return TokenOrigin(**{**index, **tuples, "picture_grids": grids and tuple(tuple(grid) for grid in grids)})


def _left_over(folder: Path) -> list[Path]:
    """Temporary folders of :func:`atomic_write` whose writers were killed."""
    return [path for name in (_INDEX, _ROWS, "tokens-*.safetensors") for path in folder.glob(f".{name}.*")]


def _shard_name(number: int) -> str:
    return f"tokens-{number:05d}.safetensors"


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is missing or damaged ({error}): run the same `rlt encode-tokens` command again, which writes "
            "such shards anew."
        ) from error


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / _INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        if index["format"] != FORMAT:
            raise KeyError(f"format is {index['format']!r}, not {FORMAT!r}")
    except FileNotFoundError as error:
        raise ValueError(f"There are no tokens in {folder}; write some with `rlt encode-tokens`.") from error
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} cannot be read ({error}): encode the tokens again, into another folder.") from error
    return dict(index)
