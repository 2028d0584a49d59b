"""Pictures that a worker and its owner see in the same memory, so that none goes through a socket."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from typing import Mapping, Sequence

import numpy as np


def anonymous_file(name: str, size: int = 0) -> int:
    """
    Open a file in memory that has no path, so that it is gone with its last user.

    :param name: Shown in ``/proc/PID/fd``.
    :param size: Its length in bytes.
    :return: Descriptor of a file in memory that has no path: nothing is left of it when its last user is gone.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(name)
    else:
        descriptor, path = tempfile.mkstemp(prefix=name)
        os.unlink(path)
    os.ftruncate(descriptor, size)
    return descriptor


class SharedPictures:
    """
    Slots for the pictures of an observation, and one for a frame, in memory that both processes map.

    :param descriptor: An :func:`anonymous_file` of :meth:`size_for` bytes.
    :param shapes: Shape (height, width, 3) of each picture of an observation, by key.
    :param frame_size: Side of the frame for people.
    :param slots: Slot 0 is for the end of a chunk, the others for the observations inside it.
    """

    def __init__(self, descriptor: int, shapes: Mapping[str, Sequence[int]], frame_size: int, slots: int):
        memory = mmap.mmap(descriptor, self.size_for(shapes, frame_size, slots))
        everything = np.frombuffer(memory, dtype=np.uint8)
        self._pictures: dict[str, np.ndarray] = {}
        start = 0
        for key, shape in shapes.items():
            stop = start + slots * math.prod(shape)
            self._pictures[key] = everything[start:stop].reshape(slots, *shape)
            start = stop
        self.frame = everything[start:].reshape(frame_size, frame_size, 3)

    @staticmethod
    def size_for(shapes: Mapping[str, Sequence[int]], frame_size: int, slots: int) -> int:
        """
        Compute the size of the shared memory.

        :param shapes: As in the constructor.
        :param frame_size: As in the constructor.
        :param slots: As in the constructor.
        :return: Bytes needed.
        """
        return slots * sum(math.prod(shape) for shape in shapes.values()) + 3 * frame_size**2

    def put(self, observation: dict[str, np.ndarray], slot: int) -> dict[str, np.ndarray]:
        """
        Leave the pictures of an observation in the shared memory.

        :param observation: Pictures and small arrays by key.
        :param slot: Where its pictures are to be left.
        :return: What is left of the observation for the message.
        """
        for key, pictures in self._pictures.items():
            pictures[slot] = observation[key]
        return {key: value for key, value in observation.items() if key not in self._pictures}

    def take(self, rest: dict[str, np.ndarray], slot: int) -> dict[str, np.ndarray]:
        """
        Read an observation back.

        :param rest: What :meth:`put` returned.
        :param slot: Where it put the pictures.
        :return: The observation, in new arrays.
        """
        return {**{key: pictures[slot].copy() for key, pictures in self._pictures.items()}, **rest}
