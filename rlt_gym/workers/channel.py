"""What goes between an environment and a worker: messages over a socket, pictures through shared memory.

Neither side may rely on the other having the same Python or numpy (:mod:`rlt_gym.workers.launch`): arrays travel as
their bytes, since numpy 2 pickles them under module names that numpy 1 does not know.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import socket
import struct
import tempfile
import time
from typing import Any

import numpy as np

#: Side of the frames of ``render()``.
FRAME_SIZE = 256

_LENGTH = struct.Struct("!Q")
_PROTOCOL = 4  # of Python 3.8


def _array(dtype: str, shape: tuple[int, ...], content: bytes) -> np.ndarray:
    return np.frombuffer(content, dtype=np.dtype(dtype)).reshape(shape).copy()


def _scalar(dtype: str, content: bytes) -> Any:
    return np.frombuffer(content, dtype=np.dtype(dtype))[0]


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is np.ndarray and not obj.dtype.hasobject and obj.dtype.names is None:
            return _array, (obj.dtype.str, obj.shape, obj.tobytes())
        if isinstance(obj, np.generic):
            return _scalar, (obj.dtype.str, obj.tobytes())
        return NotImplemented


def encode(message: Any) -> bytes:
    """
    :param message: Anything picklable whose classes both sides have.
    :return: A pickle that any numpy can read.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=_PROTOCOL).dump(message)
    return buffer.getvalue()


class Channel:
    """
    Whole messages over a connected stream socket.

    :param connection: The socket; the channel owns it.
    """

    def __init__(self, connection: socket.socket):
        self._socket = connection

    def send(self, message: Any, timeout: float | None = None) -> None:
        """
        :raises OSError: The other end is gone, or did not read for ``timeout`` seconds (``socket.timeout``).
        """
        content = encode(message)
        self._socket.settimeout(timeout)
        self._socket.sendall(_LENGTH.pack(len(content)) + content)

    def receive(self, timeout: float | None = None) -> Any:
        """
        :raises EOFError: The other end is gone.
        :raises OSError: So is this one, or no whole message came within ``timeout`` seconds (``socket.timeout``).
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        return pickle.loads(self._read(length, deadline))

    def _read(self, length: int, deadline: float | None) -> bytes:
        content = bytearray(length)
        view, done = memoryview(content), 0
        while done < length:
            # A timeout of 0 would mean "do not block"
            self._socket.settimeout(None if deadline is None else max(0.001, deadline - time.monotonic()))
            received = self._socket.recv_into(view[done:])
            if received == 0:
                raise EOFError("the other end of the socket is closed")
            done += received
        return bytes(content)

    def close(self) -> None:
        """Wakes a thread that waits in :meth:`receive`. Safe to call twice."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # closed already, by us or by the other end
        self._socket.close()


def anonymous_file(name: str, size: int = 0) -> int:
    """
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
    Slots for the two pictures of an observation, and one for a frame, in memory that both processes map.

    :param descriptor: An :func:`anonymous_file` of :meth:`size_for` bytes.
    :param image_size: Side S of an observation's pictures.
    :param slots: Slot 0 is for the end of a chunk, the others for the observations inside it.
    """

    KEYS = ("agentview", "wrist")

    def __init__(self, descriptor: int, image_size: int, slots: int):
        memory = mmap.mmap(descriptor, self.size_for(image_size, slots))
        everything = np.frombuffer(memory, dtype=np.uint8)
        pictures = everything[: slots * len(self.KEYS) * image_size * image_size * 3]
        self._pictures = pictures.reshape(slots, len(self.KEYS), image_size, image_size, 3)
        self.frame = everything[len(pictures) :].reshape(FRAME_SIZE, FRAME_SIZE, 3)

    @classmethod
    def size_for(cls, image_size: int, slots: int) -> int:
        """
        :return: Bytes needed.
        """
        return 3 * (slots * len(cls.KEYS) * image_size**2 + FRAME_SIZE**2)

    def put(self, observation: dict[str, np.ndarray], slot: int) -> dict[str, np.ndarray]:
        """
        :return: What is left of the observation for the message.
        """
        for index, key in enumerate(self.KEYS):
            self._pictures[slot, index] = observation[key]
        return {key: value for key, value in observation.items() if key not in self.KEYS}

    def take(self, rest: dict[str, np.ndarray], slot: int) -> dict[str, np.ndarray]:
        """
        :param rest: What :meth:`put` returned.
        :return: The observation, in arrays of its own.
        """
        pictures = {key: self._pictures[slot, index].copy() for index, key in enumerate(self.KEYS)}
        return {**pictures, **rest}
