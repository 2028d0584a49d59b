"""A frozen VLA's tokens of demonstrations: how stage 1 reads them, and how they are computed."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from tqdm import tqdm

from rlt_gym.data.demo_set import DemoReader, DemoRows
from rlt_gym.vla.base import FrozenVLA, forward_seed
from rlt_gym.vla.batches import run_vla
from rlt_gym.vla.tokens import select_tokens


@dataclass(frozen=True)
class TokenOrigin:
    """
    The VLA that gave tokens, and which of its tokens they are.

    :param vla: Name of the VLA.
    :param fingerprint: Its fingerprint.
    :param token_dim: Width H of its tokens.
    :param kinds: Kinds of tokens that were kept.
    :param max_tokens: Most tokens that it gives for an observation; ``None`` = it does not say.
    :param picture_grids: Where in the pictures its picture tokens are, see :class:`~rlt_gym.vla.base.VLASpec`; ``None``
        = it does not say.
    :param orientation: What it does with the pictures before it reads them; ``None`` = it does not say.
    :param cameras: The cameras whose pictures are kept with the tokens, in their order.
    """

    vla: str
    fingerprint: str
    token_dim: int
    kinds: tuple[str, ...]
    max_tokens: int | None
    picture_grids: tuple[tuple[str, int, int], ...] | None = None
    orientation: str | None = None
    cameras: tuple[str, ...] = ()

    @classmethod
    def of(cls, vla: FrozenVLA, kinds: tuple[str, ...]) -> "TokenOrigin":
        """
        Describe the tokens of a VLA.

        :param vla: The VLA.
        :param kinds: Kinds of tokens to keep.
        :return: The description.
        """
        spec = vla.spec
        pictures = (spec.picture_grids, spec.orientation, tuple(spec.cameras))
        return cls(spec.name, vla.fingerprint(), spec.token_dim, tuple(kinds), spec.max_tokens, *pictures)


class Tokens(ABC):
    """
    A VLA's tokens of many observations, read in batches.

    :param origin: Whose tokens they are.
    :param rows: What is known about the observations otherwise.
    :param count: Most tokens N in a row.
    """

    def __init__(self, origin: TokenOrigin, rows: DemoRows, count: int) -> None:
        self.origin = origin
        self.rows = rows
        self.count = count

    def __len__(self) -> int:
        return len(self.rows)

    @abstractmethod
    def batch(self, rows: np.ndarray, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Get some rows.

        :param rows: Row numbers (B,).
        :param device: Where to put them.
        :return: Tokens float32 (B, N, H), valid ones first, and mask bool (B, N).
        """

    def batches(self, rows: np.ndarray, most: int = 256, limit: int = 1 << 28) -> Iterator[np.ndarray]:
        """
        Divide rows into batches whose tokens do not fill the memory.

        :param rows: Row numbers.
        :param most: Most rows per batch.
        :param limit: Most bytes of the float32 tokens of a batch; there are at least two rows in it all the same.
        :return: Row numbers of each batch.
        """
        size = max(2, min(most, limit // (4 * self.count * self.origin.token_dim)))
        for start in range(0, len(rows), size):
            yield rows[start : start + size]


class TokenCache(Tokens):
    """
    Tokens in memory.

    :param origin: Whose tokens they are.
    :param rows: What is known about the observations otherwise.
    :param tokens: float16 (R, N, H), valid ones first.
    :param mask: bool (R, N).
    """

    def __init__(self, origin: TokenOrigin, rows: DemoRows, tokens: torch.Tensor, mask: torch.Tensor) -> None:
        super().__init__(origin, rows, tokens.shape[1])
        self.tokens = tokens
        self.mask = mask

    def batch(self, rows: np.ndarray, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Get some rows.

        :param rows: Row numbers (B,).
        :param device: Where to put them.
        :return: Tokens float32 (B, N, H), valid ones first, and mask bool (B, N).
        """
        index = torch.as_tensor(rows)
        return self.tokens[index].to(device).float(), self.mask[index].to(device)


@dataclass(frozen=True)
class EncodedRows:
    """
    What a VLA made of some consecutive rows.

    :param rows: Which rows.
    :param tokens: float32 (r, N, H), valid ones first, N = most tokens of these rows.
    :param mask: bool (r, N).
    :param kind: uint8 (r, N), see :data:`~rlt_gym.vla.base.TOKEN_KINDS`.
    :param frames: The pictures of each camera, uint8 (r, size, size, 3), as the environment gives them.
    """

    rows: slice
    tokens: torch.Tensor
    mask: torch.Tensor
    kind: torch.Tensor
    frames: dict[str, np.ndarray]


def encode_rows(
    vla: FrozenVLA,
    demos: DemoReader,
    kinds: tuple[str, ...],
    image_size: int,
    batch_size: int = 64,
    start: int = 0,
    stop: int | None = None,
) -> Iterator[EncodedRows]:
    """
    Run a frozen VLA over demonstrations. The pictures in memory are those of one demonstration and one batch.

    :param vla: The VLA.
    :param demos: Demonstrations.
    :param kinds: Kinds of tokens to keep.
    :param image_size: Edge in pixels of the frames that it is shown.
    :param batch_size: Observations per forward pass, at most the VLA's ``max_batch``.
    :param start: First row.
    :param stop: One past the last row; ``None`` = to the end.
    :return: The tokens of every row, batch after batch.
    :raises ValueError: If a row has no token of the wanted kinds.
    """
    known, cameras = demos.rows, vla.spec.cameras
    for first, frames in _joined(demos.frames(cameras, image_size, start, stop), batch_size):
        part = slice(start + first, start + first + len(frames[cameras[0]]))
        tasks = [known.instructions[task] for task in known.task[part]]
        places = zip(known.demo[part].tolist(), known.step[part].tolist(), strict=True)
        seeds = [forward_seed(demo, step) for demo, step in places]
        output = run_vla(vla, {**frames, "state": known.proprio[part]}, tasks, seeds)
        tokens, mask = select_tokens(output, kinds)
        chosen, _ = select_tokens(replace(output, tokens=output.kind[..., None].float()), kinds)  # in the same order
        yield EncodedRows(part, tokens, mask, chosen[..., 0].to(torch.uint8), frames)


def _joined(blocks: Iterator[dict[str, np.ndarray]], size: int) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Cut blocks of any length into batches of ``size`` rows (the last has fewer), each with its first row's number."""
    first = 0
    held: dict[str, np.ndarray] = {}
    for block in blocks:
        held = {key: np.concatenate([held[key], value]) for key, value in block.items()} if held else block
        while len(next(iter(held.values()))) >= size:
            yield first, {key: value[:size] for key, value in held.items()}
            held = {key: value[size:] for key, value in held.items()}
            first += size
    if held and len(next(iter(held.values()))):
        yield first, held


def cache_tokens(
    vla: FrozenVLA,
    demos: DemoReader,
    kinds: tuple[str, ...],
    image_size: int,
    batch_size: int = 64,
    progress: bool = False,
    memory_limit: float | None = None,
) -> TokenCache:
    """
    Run a frozen VLA over demonstrations once, and keep the tokens in memory as float16.

    :param vla: The VLA.
    :param demos: Demonstrations.
    :param kinds: Kinds of tokens to keep.
    :param image_size: Edge in pixels of the frames that it is shown.
    :param batch_size: Observations per forward pass, at most the VLA's ``max_batch``.
    :param progress: Show a progress bar.
    :param memory_limit: Most GiB of tokens; ``None`` = any number.
    :return: The tokens of every row. While a batch has rows with more tokens than all before, they are there twice.
    :raises ValueError: If a row has no token of the wanted kinds, or the tokens need more than ``memory_limit``.
    """
    rows, width = demos.rows, vla.spec.token_dim
    tokens = torch.zeros(len(rows), 0, width, dtype=torch.float16)
    mask = torch.zeros(len(rows), 0, dtype=torch.bool)
    with tqdm(total=len(rows), disable=not progress, desc="tokens", mininterval=2.0) as bar:
        for found in encode_rows(vla, demos, kinds, image_size, batch_size):
            count = found.mask.shape[1]
            if count > mask.shape[1]:
                needed = len(rows) * count * width * 2 / 2**30
                if memory_limit is not None and needed > memory_limit:
                    raise ValueError(
                        f"The tokens of {len(rows)} observations ({count} x {width}) need {needed:.2g} GiB, and "
                        f"memory_limit is {memory_limit:g}: write them to disk with `rlt encode-tokens --output FOLDER`"
                        " first, and give --tokens FOLDER in place of --demos."
                    )
                tokens = torch.nn.functional.pad(tokens, (0, 0, 0, count - mask.shape[1]))
                mask = torch.nn.functional.pad(mask, (0, count - mask.shape[1]))
            tokens[found.rows, :count] = found.tokens.half().cpu()
            mask[found.rows, :count] = found.mask.cpu()
            bar.update(len(found.mask))
    return TokenCache(TokenOrigin.of(vla, kinds), rows, tokens, mask)
