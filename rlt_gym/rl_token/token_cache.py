"""Computes a frozen VLA's tokens of demonstrations once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm

from rlt_gym.data.demo_set import DemoSet
from rlt_gym.data.libero_hdf5 import ROBOT
from rlt_gym.data.sources import demo_sources
from rlt_gym.data.storage import IN_MEMORY, ArrayStorage
from rlt_gym.rl_token.encoder import select_tokens
from rlt_gym.vla.base import FrozenVLA, VLASpec, forward_seed
from rlt_gym.vla.batches import run_vla


@dataclass
class TokenCache:
    """
    A VLA's tokens of many observations.

    :param tokens: Selected tokens float16 (R, N, H), valid ones first, in memory or in a file.
    :param mask: bool (R, N).
    """

    tokens: torch.Tensor
    mask: torch.Tensor

    def batch(self, rows: np.ndarray | torch.Tensor, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Get some rows.

        :param rows: Row numbers.
        :param device: Where to put them.
        :return: Tokens float32 and mask.
        """
        index = torch.as_tensor(rows)
        return self.tokens[index].to(device).float(), self.mask[index].to(device)

    def batches(self, rows: np.ndarray, most: int = 256, limit: int = 1 << 28) -> Iterator[np.ndarray]:
        """
        Divide rows into batches whose tokens do not fill the memory.

        :param rows: Row numbers.
        :param most: Most rows per batch.
        :param limit: Most bytes of the float32 tokens of a batch; there are at least two rows in it all the same.
        :return: Row numbers of each batch.
        """
        size = max(2, min(most, limit // (4 * self.tokens[0].numel())))
        for start in range(0, len(rows), size):
            yield rows[start : start + size]


def check_demos(spec: VLASpec, demos: Sequence[str] = ()) -> None:
    """
    Refuse a VLA that cannot read demonstrations of LIBERO.

    :param spec: Specification of the VLA.
    :param demos: HDF5 files, glob patterns or folders, also of LeRobot datasets. Those of ``rlt collect`` say how their
        pictures were drawn.
    :raises ValueError: If it needs other cameras, another state or action, or pictures that were drawn otherwise.
    """
    spec.check_robot(ROBOT)
    for source in demo_sources(demos) if demos else ():
        try:
            spec.check_render(source.made.get("render"))
        except ValueError as error:
            raise ValueError(f"{source.name} has other pictures than the VLA needs: {error}") from error


def check_demo_frames(spec: VLASpec, size: int) -> None:
    """
    Refuse frames that have fewer pixels than a VLA reads.

    :param spec: Specification of the VLA.
    :param size: Edge in pixels of the frames that it would be shown.
    :raises ValueError: If they are too small.
    """
    needed = spec.image_size or spec.frame_size or 0
    if size < needed:
        raise ValueError(
            f"The demonstrations would be shown to the VLA {spec.name!r} in frames of {size} pixels, and it reads "
            f"{needed}: collect them with a larger --image_size."
        )


def cache_tokens(
    vla: FrozenVLA,
    data: DemoSet,
    kinds: tuple[str, ...],
    batch_size: int = 64,
    progress: bool = False,
    storage: ArrayStorage = IN_MEMORY,
) -> TokenCache:
    """
    Run a frozen VLA over demonstrations once.

    :param vla: The VLA.
    :param data: Demonstrations.
    :param kinds: Kinds of tokens to keep.
    :param batch_size: Observations per forward pass, at most the VLA's ``max_batch``.
    :param progress: Show a progress bar.
    :param storage: Where the tokens lie. They exist once, and a second time while the array is made larger for a batch
        whose rows have more tokens than all before.
    :return: The tokens of every row of ``data``.
    :raises ValueError: If the demonstrations do not fit the VLA, or a row has no token of the wanted kinds.
    """
    check_demos(vla.spec)
    cache = _new_cache(storage, len(data), 0, vla.spec.token_dim)
    for start in tqdm(range(0, len(data), batch_size), disable=not progress, desc="tokens", mininterval=2.0):
        rows = range(len(data))[start : start + batch_size]
        part = slice(rows.start, rows.stop)
        obs = {camera: np.asarray(getattr(data, camera)[part]) for camera in vla.spec.cameras}
        obs["state"] = data.proprio[part]
        tasks = [data.instructions[task] for task in data.task[part]]
        seeds = [forward_seed(int(data.demo[row]), row) for row in rows]
        output = run_vla(vla, obs, tasks, seeds)
        tokens, mask = select_tokens(output, kinds)
        count = mask.shape[1]
        if count > cache.mask.shape[1]:
            larger = _new_cache(storage, len(data), count, vla.spec.token_dim)
            larger.tokens[:start, : cache.mask.shape[1]] = cache.tokens[:start]
            larger.mask[:start, : cache.mask.shape[1]] = cache.mask[:start]
            cache = larger
        cache.tokens[part, :count] = tokens.half().cpu()
        cache.mask[part, :count] = mask.cpu()
    return cache


def _new_cache(storage: ArrayStorage, rows: int, count: int, width: int) -> TokenCache:
    tokens = storage.zeros((rows, count, width), np.float16)
    return TokenCache(torch.from_numpy(tokens), torch.zeros(rows, count, dtype=torch.bool))
