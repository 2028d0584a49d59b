"""A client's connection to a policy server: made again when it breaks, given up after a while."""

from __future__ import annotations

import os
import socket
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from rlt_gym.vla.base import VLAUnavailableError
from rlt_gym.vla.remote.codec import CodecError, need, pack, unpack
from rlt_gym.vla.remote.protocol import KEY_VARIABLE

#: Pauses between two attempts to connect, in seconds: from the first, doubled, up to the second.
PAUSES = (0.1, 5.0)


class Connection:
    """
    A connection to a policy server that is made again when it breaks.

    A request is asked again after a break: a frozen VLA gives the same reply. When nobody has this object any
    more, its connection ends.

    :param host: The server's name or address.
    :param port: Its port.
    :param key: What it wants to be sent; ``None`` = the environment variable ``RLT_SERVE_KEY``, if there is one.
    :param timeout: Seconds to wait for a reply.
    :param patience: Seconds for which a lost server is looked for, in a running program.
    :param wait: Seconds for which it is looked for the first time.
    :param max_bytes: Most bytes of a reply.
    :raises ValueError: If the extra is missing.
    :raises VLAUnavailableError: If there is no server, or it refuses.
    """

    def __init__(
        self, host: str, port: int, key: str | None, timeout: float, patience: float, wait: float, max_bytes: int
    ) -> None:
        for name, value in (("timeout", timeout), ("patience", patience), ("wait", wait)):
            if not value >= 0 or (name == "timeout" and value == 0):
                raise ValueError(f"{name} must be a number of seconds above 0, got {value!r}.")
        need("msgpack")
        self._client = need("websockets.sync.client")
        self._key = os.environ.get(KEY_VARIABLE) if key is None else key
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.timeout, self.patience, self.max_bytes = timeout, patience, max_bytes
        self._socket: Any = None
        self._end: weakref.finalize[..., Connection] | None = None
        self.metadata: dict[str, Any] = {}
        self._lock = threading.Lock()
        with self._lock:
            self._again_and_again(self._connect, wait)

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """
        Send a request and wait for the reply.

        :param request: The request.
        :return: The reply.
        :raises VLAUnavailableError: If the server is gone and does not come back in time, or comes back with
            another VLA.
        :raises ValueError: If the server refuses this request; it says why.
        """
        message = pack(dict(request))

        def once() -> str | bytes:
            if self._socket is None:
                self._connect()
            self._socket.send(message)
            return self._socket.recv(timeout=self.timeout)

        with self._lock:
            reply = self._again_and_again(once, self.patience)
        if isinstance(reply, str):
            line = (reply.strip().splitlines() or [""])[-1]  # openpi sends a traceback, whose last line says what
            raise ValueError(f"The VLA server at {self.address} refuses: {line[:500]}")
        return self._map(reply)

    def close(self) -> None:
        """Close the connection."""
        if self._end is not None:
            self._end.detach()
            self._end = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _map(self, data: bytes) -> dict[str, Any]:
        try:
            message = unpack(data, self.max_bytes)
        except CodecError as error:
            raise VLAUnavailableError(f"The server at {self.address} sends what cannot be read: {error}") from error
        if not isinstance(message, dict):
            raise VLAUnavailableError(f"The server at {self.address} sent {type(message).__name__} instead of a map.")
        return message

    def _connect(self) -> None:
        """One attempt."""
        from websockets.exceptions import InvalidStatus

        headers = {"Authorization": f"Api-Key {self._key}"} if self._key else None
        try:
            connection = self._client.connect(
                f"ws://{self.address}", compression=None, max_size=self.max_bytes, additional_headers=headers,
                open_timeout=self.timeout, close_timeout=1.0, proxy=None,
            )  # fmt: skip
            # websockets wants a context manager since version 17.1; it is left by close()
            self._socket = connection.__enter__()
            # its threads know the websocket only, so they do not keep this object
            self._end = weakref.finalize(self, _shut, self._socket, os.getpid())
            self._end.atexit = False
        except InvalidStatus as error:
            status = error.response.status_code
            if status != 401:
                raise
            problem = "a wrong key" if self._key else "no key"
            raise VLAUnavailableError(
                f"The server at {self.address} got {problem}: set the environment variable {KEY_VARIABLE} to its key."
            ) from error
        greeting = self._socket.recv(timeout=self.timeout)
        if isinstance(greeting, str):
            raise VLAUnavailableError(f"The server at {self.address} greets with {greeting[:200]!r}, not metadata.")
        metadata = self._map(greeting)
        if self.metadata and metadata != self.metadata:
            self.close()
            raise VLAUnavailableError(
                f"The server at {self.address} came back with another VLA or other settings than before: start "
                "it again with the same ones."
            )
        self.metadata = metadata

    def _again_and_again(self, action: Callable[[], Any], patience: float) -> Any:
        """Try until it works; the time to do so begins with the first failure."""
        from websockets.exceptions import ConnectionClosed, WebSocketException

        pause, until = PAUSES[0], None
        while True:
            try:
                return action()
            except VLAUnavailableError:  # looking for it again would not help
                self.close()
                raise
            except (OSError, WebSocketException) as error:  # a TimeoutError is an OSError
                self.close()
                if isinstance(error, ConnectionClosed) and 1009 in (_code(error.rcvd), _code(error.sent)):
                    raise VLAUnavailableError(
                        f"A message to or from the server at {self.address} is too large ({error}): raise max_bytes, "
                        "or use a smaller max_batch."
                    ) from error
                now = time.monotonic()
                if until is None:
                    until = now + patience
                    if self.metadata and patience:
                        warnings.warn(
                            f"The VLA server at {self.address} does not answer ({_short(error)}); looking for it for "
                            f"{patience:g} s.",
                            stacklevel=4,
                        )
                if now >= until:
                    raise VLAUnavailableError(self._given_up(error, patience)) from error
                time.sleep(min(pause, until - now))
                pause = min(2 * pause, PAUSES[1])
            except BaseException:  # Ctrl-C: a reply that comes later must not be taken for that to the next request
                self.close()
                raise

    def _given_up(self, error: Exception, patience: float) -> str:
        frame = getattr(error, "rcvd", None)
        if frame is not None and frame.code == 1013:
            return (
                f"The VLA server at {self.address} takes no more clients ({frame.reason.rstrip('.') or 'too many'}; "
                f"asked for {patience:g} s): end runs and close() VLAs that are no longer needed, or start another "
                "server."
            )
        return (
            f"No VLA server is at {self.address} ({_short(error)}; looked for it for {patience:g} s): start it with "
            "`rlt serve`."
        )


def _shut(websocket: Any, process: int) -> None:
    """End a connection without a word: the garbage collector calls this in any thread, so it must not wait."""
    if os.getpid() == process:  # a fork has the same socket, and its parent goes on with it
        try:
            websocket.socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other side has ended it
            pass


def _code(frame: Any) -> int | None:
    return getattr(frame, "code", None)


def _short(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:120] or type(error).__name__


def address_of(rest: str, scheme: str, default_port: int) -> tuple[str, int]:
    """
    Read what stands behind a scheme.

    :param rest: ``"//host:port"``, or ``"//host"`` for the default port.
    :param scheme: For messages.
    :param default_port: The default port.
    :return: Host and port.
    :raises ValueError: If it has another form.
    """
    try:
        parts = urlsplit(f"{scheme}:{rest}")
        host, port = parts.hostname, parts.port or default_port
    except ValueError:
        host, port = None, 0
    if not host or not rest.startswith("//") or parts.path.strip("/") or parts.query or parts.username:
        raise ValueError(f"The VLA {scheme}:{rest!s} has no address: write {scheme}://host:port.")
    return host, port
