"""Messages between an environment and a worker, over a socket.

Neither side may rely on the other having the same Python or numpy (:mod:`rlt_gym.workers.launch`): arrays travel as
their bytes, since numpy 2 pickles them under module names that numpy 1 does not know.
"""

from __future__ import annotations

import io
import pickle
import socket
import struct
import time
from typing import Any

import numpy as np

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
    Pickle a message.

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
        Send a message.

        :param message: As for :func:`encode`.
        :param timeout: Seconds; ``None``: without end.
        :raises OSError: The other end is gone, or did not read for ``timeout`` seconds (``socket.timeout``).
        """
        content = encode(message)
        self._socket.settimeout(timeout)
        self._socket.sendall(_LENGTH.pack(len(content)) + content)

    def receive(self, timeout: float | None = None) -> Any:
        """
        Wait for a message.

        :param timeout: Seconds; ``None``: without end.
        :return: The message.
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

    def fileno(self) -> int:
        """
        Descriptor of the socket, -1 once closed.

        :return: The descriptor.
        """
        return self._socket.fileno()

    def close(self) -> None:
        """Wakes a thread that waits in :meth:`receive`. Safe to call twice."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # closed already, by us or by the other end
        self._socket.close()
