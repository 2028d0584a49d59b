"""Batches as the updates want them: several read at once, features computed once for all networks."""

from collections.abc import Iterator

import torch as th
from stable_baselines3.common.policies import BaseModel
from torch import nn

from rlt_sb3.common.replay.buffer import ChunkReplayBuffer
from rlt_sb3.common.replay.storage import ChunkBatch
from rlt_sb3.rlt.policies import RLTFeatures

#: Size up to which the observations of several batches are read together; larger arrays cost page faults each time
NUMBERS_AT_ONCE = 2**19


def training_batches(
    buffer: ChunkReplayBuffer, networks: tuple[BaseModel, ...], count: int, batch_size: int
) -> Iterator[ChunkBatch]:
    """
    :param buffer: where the rows are
    :param networks: all that will see them
    :param count: number of batches
    :param batch_size: rows in each
    :return: the batches, one after the other
    """
    extractors = [network.features_extractor for network in networks if network.features_extractor is not None]
    width = int(getattr(extractors[0], "features_dim", 1))
    at_once = max(1, NUMBERS_AT_ONCE // (batch_size * width))
    for done in range(0, count, at_once):
        number = min(at_once, count - done)
        yield from buffer.sample_batches(number, batch_size, lambda batch: add_features(batch, *extractors))


def add_features(batch: ChunkBatch, *extractors: nn.Module) -> None:
    """
    Compute the features of a batch once for all networks, where they have no parameters.

    :param batch: ``features`` is added to its observations
    :param extractors: those of the networks; nothing is done unless all are plain :class:`RLTFeatures`
    """
    if all(type(extractor) is RLTFeatures for extractor in extractors):
        with th.no_grad():
            for observations in (batch.observations, batch.next_observations):
                observations["features"] = extractors[0](observations)
