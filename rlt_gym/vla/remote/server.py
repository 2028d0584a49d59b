"""
A policy server: one websocket, first the metadata, then a reply to each request.

The frame is openpi's, so its clients can talk to it: a binary message is msgpack (:mod:`~rlt_gym.vla.remote.codec`), a
text message is an error. ``GET /healthz`` answers ``OK``. There is no encryption: beyond one machine use a network that
you trust, or a tunnel.
"""

from __future__ import annotations

import hmac
import ipaddress
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Protocol

import numpy as np

from rlt_gym.vla.base import FrozenVLA, forward_seed
from rlt_gym.vla.remote import openpi
from rlt_gym.vla.remote.batching import Batcher
from rlt_gym.vla.remote.codec import CodecError, need, pack, unpack
from rlt_gym.vla.remote.protocol import KEY_VARIABLE, PORT, TOKENS_DTYPES, describe


class Service(Protocol):
    """What a server offers."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The first message to every client."""
        ...

    def answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """
        Answer a request; called by the threads of all clients at the same time.

        :param request: What the client sent.
        :return: The reply.
        :raises Exception: What was wrong; the client is told its first line, and may ask again.
        """
        ...


class VLAService:
    """
    Any frozen VLA.

    :class:`~rlt_gym.vla.remote.client.RemoteVLA` gets tokens and chunks of many rows, openpi's clients one chunk.
    Requests that wait at the same time are joined into one forward pass.

    :param vla: The VLA.
    :param max_batch: Most rows of a request, and of requests that are joined.
    :param max_bytes: Most bytes of a request.
    :param tokens_dtype: Type in which tokens travel, one of
        :data:`~rlt_gym.vla.remote.protocol.TOKENS_DTYPES`.
    :param max_wait_ms: Milliseconds for which a request waits for others to be joined with it; 0: those that came while
        the VLA was busy are joined; ``None``: every request is a forward pass of its own.
    :param copies: Further copies of the VLA, on other devices for example; each runs a batch of its own.
    :raises ValueError: If one of them cannot be, or a copy is another VLA.
    """

    def __init__(
        self,
        vla: FrozenVLA,
        max_batch: int = 64,
        max_bytes: int = 64 << 20,
        tokens_dtype: str = "float16",
        max_wait_ms: float | None = 0.0,
        copies: Sequence[FrozenVLA] = (),
    ) -> None:
        if tokens_dtype not in TOKENS_DTYPES:
            raise ValueError(f"tokens_dtype must be one of {', '.join(TOKENS_DTYPES)}, got {tokens_dtype!r}.")
        if not 1 <= max_batch <= 1024:
            raise ValueError(f"max_batch must be from 1 to 1024, got {max_batch!r}.")
        if max_wait_ms is not None and not 0 <= max_wait_ms <= 1000:
            raise ValueError(f"max_wait_ms must be from 0 to 1000, or None, got {max_wait_ms!r}.")
        if any(copy.fingerprint() != vla.fingerprint() for copy in copies):
            raise ValueError("The copies of a VLA must have its fingerprint, and one has another one.")
        # no larger than the VLA itself allows, where its specification says it
        self.max_batch = min(max_batch, getattr(vla.spec, "max_batch", None) or max_batch)
        self.vla, self.tokens_dtype = vla, tokens_dtype
        self._batcher = Batcher([vla, *copies], self.max_batch, max_wait_ms)
        self._asked = itertools.count(1)
        self.metadata = describe(vla, self.max_batch, max_bytes, tokens_dtype)

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """
        Run the VLA.

        :param request: ``obs`` (as :data:`~rlt_gym.vla.base.VLAObs`), ``tasks``, ``seed``; or an observation in
            openpi's form for LIBERO.
        :return: ``tokens``, ``mask``, ``kind``, ``chunk``; or ``actions``.
        :raises ValueError: If the request has another form, or the output breaks the contract.
        """
        if "tasks" not in request:
            spec, began = self.vla.spec, time.perf_counter()
            obs, task, seed = openpi.read_observation(request, spec.cameras, spec.state_dim, spec.frame_size)
            output = self._batcher.forward(obs, [task], [forward_seed(0, next(self._asked)) if seed is None else seed])
            return openpi.reply(output.chunk[0].cpu().numpy(), obs, began)
        rows, tasks, given = self._read(request)
        output = self._batcher.forward(rows, tasks, given)
        return {
            "tokens": self._tokens(output),
            "mask": output.mask.cpu().numpy(),
            "kind": output.kind.cpu().numpy().astype(np.uint8),
            "chunk": output.chunk.cpu().numpy(),
        }

    def _read(self, request: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], list[str], list[int] | None]:
        obs, tasks, seeds = (request.get(key) for key in ("obs", "tasks", "seed"))
        if not isinstance(tasks, list) or not all(isinstance(task, str) for task in tasks):
            raise ValueError("tasks must be a list of texts.")
        rows = len(tasks)
        if not 1 <= rows <= self.max_batch:
            raise ValueError(f"A request may have 1 to {self.max_batch} rows (max_batch), got {rows}.")
        if seeds is not None and (
            not isinstance(seeds, list) or len(seeds) != rows or not all(type(seed) is int for seed in seeds)
        ):
            raise ValueError(f"seed must be {rows} integers, one for each row, or nothing.")
        spec = self.vla.spec
        wanted = {*spec.cameras, "state"}
        if not isinstance(obs, dict) or set(obs) != wanted:
            given = sorted(map(str, obs)) if isinstance(obs, dict) else type(obs).__name__
            raise ValueError(f"obs must have the arrays {sorted(wanted)}, got {given}.")
        for key, value in obs.items():
            dtype, shape = ("float32", (rows, spec.state_dim)) if key == "state" else ("uint8", (rows, None, None, 3))
            fits = isinstance(value, np.ndarray) and value.dtype == dtype and len(value.shape) == len(shape)
            if not fits or any(want not in (None, have) for want, have in zip(shape, value.shape, strict=True)):
                have = f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
                raise ValueError(f"{key} must be {dtype} {str(shape).replace('None', 'any')}, got {have}.")
        if not np.isfinite(obs["state"]).all():
            raise ValueError("state has NaN or infinite values.")
        # what a VLA may write to, as in an environment of this process
        return {key: value.copy() for key, value in obs.items()}, tasks, seeds

    def _tokens(self, output: Any) -> np.ndarray:
        tokens = output.tokens.detach().float().masked_fill(~output.mask[..., None], 0.0).cpu().numpy()
        largest = float(np.abs(tokens).max(initial=0.0))
        if self.tokens_dtype == "float16" and largest > float(np.finfo(np.float16).max):
            raise ValueError(f"Tokens reach {largest:.3g}, too much for float16: serve with --tokens_dtype float32.")
        return tokens.astype(self.tokens_dtype)


class PolicyServer:
    """
    Serves a policy until it is closed; a context manager.

    The port is open as soon as this object is made. Each client has a thread.

    :param service: What is served.
    :param host: Address to listen at; names this machine alone by default.
    :param port: Port; 0 chooses a free one, see :attr:`port`.
    :param key: What clients must send; ``None`` = nothing, which is allowed on this machine only.
    :param max_bytes: Most bytes of a request.
    :param max_clients: Most connections at a time.
    :param timeout: Seconds after which a client that no longer answers, or does not finish its greeting, is dropped.
    :raises ValueError: If the extra is missing, or another machine could connect without a key.
    :raises OSError: If the port is taken.
    """

    def __init__(
        self,
        service: Service,
        host: str = "127.0.0.1",
        port: int = PORT,
        key: str | None = None,
        max_bytes: int = 64 << 20,
        max_clients: int = 128,
        timeout: float = 20.0,
    ) -> None:
        if not key and not is_loopback(host):
            raise ValueError(
                f"host {host!r} can be reached by other machines, which needs a key: set the environment variable "
                f"{KEY_VARIABLE} (or --key) here and at the clients, or leave host at 127.0.0.1."
            )
        sync = need("websockets.sync.server")
        self._service, self._key, self._max_bytes, self._max_clients = service, key, max_bytes, max_clients
        self._greeting = pack(dict(service.metadata))
        self._idle = threading.Condition()
        self._pending, self._closing = 0, False
        self._clients = threading.Semaphore(max_clients)
        try:
            self._server = sync.serve(
                self._talk, host, port, compression=None, max_size=max_bytes, process_request=self._admit,
                origins=[None],  # pages in a browser send an origin, and may not talk to a server on loopback
                open_timeout=timeout, ping_interval=timeout, ping_timeout=timeout, close_timeout=2.0,
            )  # fmt: skip
        except OSError as error:
            reason = error.strerror or error
            raise OSError(f"Cannot listen at {host}:{port} ({reason}); choose another port.") from error
        self.host, self.port = host, int(self._server.socket.getsockname()[1])
        self._thread: threading.Thread | None = None
        self._serving = False
        self._connections: set[Any] = set()

    def serve_forever(self) -> None:
        """Serve until :meth:`close` is called in another thread."""
        self._serving = True
        self._server.serve_forever()

    def start(self) -> PolicyServer:
        """
        Serve in a thread of this process.

        :return: This object.
        """
        self._serving = True
        self._thread = threading.Thread(target=self.serve_forever, name="policy-server", daemon=True)
        self._thread.start()
        return self

    def close(self, patience: float = 5.0) -> None:
        """
        Answer what was asked so far, then close all connections and the port.

        :param patience: Seconds for which those answers are waited for; whoever has none by then is disconnected.
        """
        with self._idle:
            self._closing = True
            self._idle.wait_for(lambda: not self._pending, timeout=patience)
        if self._serving:
            self._server.shutdown()
        else:  # shutdown() would wait for the loop to end
            self._server.socket.close()
        for connection in tuple(self._connections):  # which shutdown() closes by itself from websockets 17 on
            connection.close(1001)
        if self._thread is not None:
            self._thread.join(timeout=10.0)

    def __enter__(self) -> PolicyServer:
        return self.start()

    def __exit__(self, *unused: object) -> None:
        self.close()

    def _admit(self, connection: Any, request: Any) -> Any:
        """Answer a plain HTTP request, and refuse who may not connect."""
        if request.path == "/healthz":
            return connection.respond(HTTPStatus.OK, "OK\n")
        sent = request.headers.get("Authorization") or ""
        if self._key and not hmac.compare_digest(sent.encode(), f"Api-Key {self._key}".encode()):
            return connection.respond(HTTPStatus.UNAUTHORIZED, "This server needs a key.\n")
        return None

    def _talk(self, connection: Any) -> None:
        """Talk to one client, in a thread of its own."""
        from websockets.exceptions import ConnectionClosed

        if not self._clients.acquire(blocking=False):
            connection.close(1013, f"There are {self._max_clients} clients already.")
            return
        self._connections.add(connection)
        try:
            connection.send(self._greeting)
            for message in connection:
                with self._idle:
                    if self._closing:
                        break
                    self._pending += 1
                try:
                    connection.send(self._answer(message))
                finally:
                    with self._idle:
                        self._pending -= 1
                        self._idle.notify_all()
        except ConnectionClosed:
            pass
        finally:
            self._connections.discard(connection)
            self._clients.release()

    def _answer(self, message: str | bytes) -> str | bytes:
        """Make the reply, or say in one line what was wrong."""
        began = time.perf_counter()
        try:
            if isinstance(message, str):
                raise CodecError("A request must be a binary message.")
            request = unpack(message, self._max_bytes)
            if not isinstance(request, dict):
                raise CodecError(f"A request must be a map, got {type(request).__name__}.")
            reply = dict(self._service.answer(request))
            timing = {"infer_ms": 1000.0 * (time.perf_counter() - began)}
            return pack(reply | {"server_timing": timing})
        except Exception as error:  # of a VLA of any kind; the next request may be good
            line = (str(error).splitlines() or [""])[0][:500]
            return line if isinstance(error, ValueError) and line else f"{type(error).__name__}: {line}"


def is_loopback(host: str) -> bool:
    """
    Tell whether an address names this machine for this machine only.

    :param host: Name or address.
    :return: Whether it is ``localhost`` or a loopback address.
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
