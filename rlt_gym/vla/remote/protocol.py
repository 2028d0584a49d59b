"""What a VLA server says about its VLA, and what the two ends call the parts of a message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from rlt_gym.vla.base import FrozenVLA, VLASpec

#: Says that the server speaks this protocol; a plain openpi server has no such entry in its metadata.
PROTOCOL = "rlt.vla"
#: Raised when one end can no longer read what the other one writes.
VERSION = 1
#: Environment variable with the key of a server: on a command line every user of the machine could read it.
KEY_VARIABLE = "RLT_SERVE_KEY"
PORT = 8765
#: Types in which tokens travel.
TOKENS_DTYPES = ("float16", "float32")


def describe(vla: FrozenVLA, max_batch: int, max_bytes: int, tokens_dtype: str) -> dict[str, Any]:
    """
    Make the metadata of a VLA server, its first message.

    :param vla: The VLA.
    :param max_batch: Most rows of a request.
    :param max_bytes: Most bytes of a request.
    :param tokens_dtype: Type of the tokens in a reply.
    :return: Plain data.
    """
    spec = asdict(vla.spec)
    if spec.get("dtype") is not None:  # of the tokens, as they arrive
        spec["dtype"] = tokens_dtype
    spec["noise"] = None  # the server keeps nothing of a forward pass, and so makes no chunks of other noise
    return {
        "protocol": PROTOCOL,
        "version": VERSION,
        "spec": spec,
        "fingerprint": vla.fingerprint(),
        "max_batch": max_batch,
        "max_bytes": max_bytes,
        "tokens_dtype": tokens_dtype,
    }


def read_description(metadata: Mapping[str, Any], server: str) -> tuple[VLASpec, str]:
    """
    Read what :func:`describe` made.

    :param metadata: The first message.
    :param server: Address, for messages.
    :return: Specification and fingerprint of the VLA.
    :raises ValueError: If the server has no VLA, or speaks another version.
    """
    if metadata.get("protocol") != PROTOCOL:
        raise ValueError(
            f"{server} is no server of `rlt serve VLA` (its metadata have {sorted(map(str, metadata))[:8]}): "
            "a plain openpi server gives actions only; name it openpi://host:port to use it as a reference."
        )
    if metadata.get("version") != VERSION:
        raise ValueError(
            f"{server} speaks version {metadata.get('version')!r} of the protocol, this side version {VERSION}: "
            "install the same version of rlt on both."
        )
    spec, known = metadata.get("spec"), {field.name for field in fields(VLASpec)}
    sizes = ("token_dim", "horizon", "action_dim")
    if (
        not isinstance(spec, Mapping)
        or not {"name", *sizes} <= set(spec) <= known
        or not all(type(spec[name]) is int and spec[name] > 0 for name in sizes)
    ):
        raise ValueError(f"{server} describes its VLA otherwise than this version reads it: install the same version.")
    limits = [metadata.get(name) for name in ("max_batch", "max_bytes")]
    if not all(type(limit) is int and limit > 0 for limit in limits) or not isinstance(
        metadata.get("fingerprint"), str
    ):
        raise ValueError(f"{server} does not say max_batch, max_bytes and fingerprint: install the same version.")
    plain: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in spec.items()}
    return VLASpec(**plain), str(metadata["fingerprint"])
