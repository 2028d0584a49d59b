"""
The server's end of ``rlt://host:port`` for a policy that lives in another project's environment.

Needs numpy, msgpack and websockets >= 13, and nothing of rlt: copy this file beside the policy's own server. It
listens on this machine only; from another one use a tunnel, ``ssh -L 8765:127.0.0.1:8765 gpu-machine``.
"""

import hashlib
import re
import sys
import threading
import traceback
from http import HTTPStatus
from pathlib import Path

import msgpack
import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import serve as listen

KINDS = {"pad": 0, "image": 1, "text": 2, "state": 3, "action": 4}
MAX_BATCH, MAX_BYTES = 16, 64 << 20
DTYPE = re.compile(r"\|b1|[|<]?[iu]1|<?[iu][248]|<?f[248]")


def pack(message):
    """Write a message; arrays have openpi's form."""

    def plain(value):
        array = np.ascontiguousarray(value)
        return {b"__ndarray__": True, b"data": array.tobytes(), b"dtype": array.dtype.str, b"shape": list(array.shape)}

    return msgpack.packb(message, default=plain)


def unpack(data):
    """Read a message; arrays of objects and texts are refused."""

    def array(items):
        if b"__ndarray__" not in items:
            return items
        if not DTYPE.fullmatch(items[b"dtype"]):
            raise ValueError(f"arrays of {items[b'dtype']!r} are not allowed")
        return np.frombuffer(items[b"data"], items[b"dtype"]).reshape(items[b"shape"]).copy()

    return msgpack.unpackb(data, object_hook=array)


def fingerprint(checkpoint, *settings):
    """Hash the files of a checkpoint and the settings with which it is run, so that RL tokens know it again."""
    if not Path(checkpoint).is_dir():
        raise SystemExit(f"There is no folder {checkpoint}: download the checkpoint first.")
    digest = hashlib.sha256(repr(settings).encode())
    for path in sorted(path for path in Path(checkpoint).rglob("*") if path.is_file()):
        digest.update(str(path.relative_to(checkpoint)).encode())
        with path.open("rb") as file:
            while piece := file.read(1 << 24):
                digest.update(piece)
    return digest.hexdigest()


def padded(rows):
    """Put rows of (tokens, mask, kind, chunk) below each other; shorter ones get pads at their end."""
    longest = max(len(tokens) for tokens, _, _, _ in rows)
    arrays = {}
    for place, (name, dtype) in enumerate((("tokens", np.float16), ("mask", bool), ("kind", np.uint8))):
        values = [row[place] for row in rows]
        filled = [np.concatenate([v, np.zeros((longest - len(v), *v.shape[1:]), v.dtype)]) for v in values]
        with np.errstate(over="ignore"):  # seen below
            arrays[name] = np.stack(filled).astype(dtype)
    chunk = np.stack([np.clip(row[3], -1, 1) for row in rows]).astype(np.float32)
    arrays["tokens"][~arrays["mask"]] = 0
    if not (np.isfinite(chunk).all() and np.isfinite(arrays["tokens"]).all()):
        raise ValueError("tokens or chunk are NaN, infinite, or too large for float16")
    return {**arrays, "chunk": chunk}


def start(policy, spec, identity, port=8765):
    """
    Make a server; ``serve_forever()`` of what is returned answers.

    :param policy: Called with pictures (one (H, W, 3) per camera, as LIBERO draws them: upside down), state (8,), task
        and seed; gives tokens (M, H), mask (M,), kind (M,) and chunk (T, 7) in LIBERO's units.
    :param spec: Fields of rlt's ``VLASpec``; what can be measured is measured here.
    :param identity: What :func:`fingerprint` gave.
    :param port: Port; 0 chooses a free one.
    """
    cameras, edge = spec["cameras"], spec["frame_size"]
    blank = {camera: np.zeros((edge, edge, 3), np.uint8) for camera in cameras}
    tokens, _, _, chunk = policy(blank, np.zeros(spec["state_dim"], np.float32), "do nothing", 0)
    spec = {
        **spec,
        "token_dim": tokens.shape[1],
        "dtype": "float16",
        "horizon": len(chunk),
        "action_dim": len(chunk[0]),
    }
    limits = {"max_batch": MAX_BATCH, "max_bytes": MAX_BYTES}
    about = {"protocol": "rlt.vla", "version": 1, "spec": spec, "fingerprint": identity, "tokens_dtype": "float16"}
    one_at_a_time = threading.Lock()

    def answer(message):
        request = unpack(message)
        obs, tasks, seeds = request["obs"], request["tasks"], request["seed"]
        if set(obs) != {*cameras, "state"} or not 1 <= len(tasks) <= MAX_BATCH:
            raise ValueError(
                f"obs has {sorted(obs)} and {len(tasks)} rows; needed are {cameras}, state, 1 to {MAX_BATCH}"
            )
        rows = []
        with one_at_a_time:
            for row, task in enumerate(tasks):
                pictures = {camera: obs[camera][row] for camera in cameras}
                rows.append(policy(pictures, obs["state"][row], task, 0 if seeds is None else seeds[row]))
        return pack(padded(rows))

    def talk(connection):
        connection.send(pack({**about, **limits}))
        try:
            for message in connection:
                try:
                    connection.send(answer(message))
                except Exception as error:  # the next request may be good
                    traceback.print_exc(file=sys.stderr)
                    connection.send(f"{type(error).__name__}: {error}".splitlines()[0])
        except ConnectionClosed:
            pass

    def health(connection, request):
        return connection.respond(HTTPStatus.OK, "OK\n") if request.path == "/healthz" else None

    return listen(talk, "127.0.0.1", port, compression=None, max_size=MAX_BYTES, process_request=health, origins=[None])
