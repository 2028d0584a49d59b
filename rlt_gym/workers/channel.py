"""Messages between an environment and a worker, over a socket: plain data and arrays, no pickles.

Neither side may rely on the other having the same Python or numpy (:mod:`rlt_gym.workers.launch`). A message is JSON,
in which each array, number of numpy and text of bytes stands for a part of the bytes that follow.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_LENGTHS = struct.Struct("!QQ")  # of the message, and of its JSON
_PLAIN = (type(None), bool, int, float, str)


def encode(message: Any) -> bytes:
    """
    Write a message.

    :param message: ``None``, truth values, numbers, texts, bytes, lists, tuples, dicts, arrays and numbers of numpy.
    :return: Its bytes.
    :raises TypeError: Something else is in it.
    """
    blobs: list[bytes] = []

    def plain(value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is list:
            return [plain(entry) for entry in value]
        if kind is tuple:
            return {"tuple": [plain(entry) for entry in value]}
        if kind is dict:
            return {"dict": [[plain(key), plain(entry)] for key, entry in value.items()]}
        if isinstance(value, str):  # numpy's
            return str(value)
        if kind is bytes:
            blobs.append(value)
            return {"bytes": len(value)}
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
            blobs.append(value.tobytes())
            name = "array" if isinstance(value, np.ndarray) else "number"
            return {name: [value.dtype.str, list(value.shape), len(blobs[-1])]}
        raise TypeError(f"messages to and from workers hold plain data and arrays, got {kind.__name__}")

    text = json.dumps(plain(message)).encode()
    content = b"".join([text, *blobs])
    return _LENGTHS.pack(len(content), len(text)) + content


def decode(content: bytes, text: int) -> Any:
    """
    Read a message.

    :param content: Its bytes after the lengths.
    :param text: Length of the JSON.
    :return: The message; arrays are new ones.
    """
    place = text

    def take(length: int) -> bytes:
        nonlocal place
        place += length
        return content[place - length : place]

    def value_of(entry: Any) -> Any:
        if type(entry) is list:
            return [value_of(one) for one in entry]
        if type(entry) is not dict:
            return entry
        ((name, value),) = entry.items()
        if name == "tuple":
            return tuple(value_of(one) for one in value)
        if name == "dict":
            return {value_of(key): value_of(one) for key, one in value}
        if name == "bytes":
            return take(value)
        dtype, shape, length = value
        array = np.frombuffer(take(length), dtype=np.dtype(dtype)).reshape(shape)
        return array.copy() if name == "array" else array[()]

    return value_of(json.loads(content[:text].decode()))


class Channel:
    """
    Whole messages over a connected stream socket.

    :param connection: The socket; the channel owns it.
    """

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._inside = False  # whether a message has been read or written in part

    def send(self, message: Any, timeout: float | None = None) -> None:
        """
        Send a message.

        :param message: As for :func:`encode`.
        :param timeout: Seconds; ``None``: without end.
        :raises TypeError: As of :func:`encode`; nothing has been sent.
        :raises OSError: The other end is gone, or did not read for ``timeout`` seconds (``socket.timeout``).
        """
        content = encode(message)
        self._socket.settimeout(timeout)
        with self._whole():
            self._inside = True
            self._socket.sendall(content)

    def receive(self, timeout: float | None = None) -> Any:
        """
        Wait for a message.

        :param timeout: Seconds; ``None``: without end.
        :return: The message.
        :raises EOFError: The other end is gone.
        :raises OSError: So is this one, or no whole message came within ``timeout`` seconds (``socket.timeout``).
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._whole():
            self._wait(deadline)
            self._socket.recv(1, socket.MSG_PEEK)  # an interrupt while waiting takes nothing from the stream
            self._inside = True
            length, text = _LENGTHS.unpack(self._read(_LENGTHS.size, deadline))
            content = self._read(length, deadline)
        return decode(content, text)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Close the connection after an interrupt inside a message: what follows could not be read any more."""
        try:
            yield
        except BaseException:
            if self._inside:
                self.close()
            raise
        self._inside = False

    def _wait(self, deadline: float | None) -> None:
        # A timeout of 0 would mean "do not block"
        self._socket.settimeout(None if deadline is None else max(0.001, deadline - time.monotonic()))

    def _read(self, length: int, deadline: float | None) -> bytes:
        content = bytearray(length)
        view, done = memoryview(content), 0
        while done < length:
            self._wait(deadline)
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
