"""
Messages between a policy server and its clients: msgpack, with arrays in openpi's form.

An array is the map ``{b"__ndarray__": True, b"data": bytes, b"dtype": "<f4", b"shape": [2, 3]}``, a NumPy number is
``{b"__npgeneric__": True, b"data": number, b"dtype": "<f4"}``. A message comes from another machine: :func:`unpack`
trusts nothing in it, makes no object but plain data and arrays of numbers, and allocates little more than the message
has bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

#: Largest number of values in a message; an array counts as one.
MAX_ITEMS = 20_000
#: Entries of one list or map, characters of one text.
MAX_LENGTH, MAX_TEXT = 1_024, 65_536
#: How deep lists and maps may lie in each other.
MAX_DEPTH = 8
#: Numbers and truth values, little-endian or of one byte.
_DTYPE = re.compile(r"\|b1|[|<]?[iu]1|<?[iu][248]|<?f[248]")
_ARRAY = {b"__ndarray__", b"data", b"dtype", b"shape"}
_NUMBER = {b"__npgeneric__", b"data", b"dtype"}


class CodecError(ValueError):
    """A message that cannot be read, or a value that no message can hold."""


def need(module: str) -> Any:
    """
    Import a module of the extra ``serve``.

    :param module: ``"msgpack"``, or a module of ``websockets``.
    :return: The module.
    :raises ValueError: If it is not installed; says what to install.
    """
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError as error:
        raise ValueError(f"Policy servers need {module.split('.')[0]}: pip install 'rlt[serve]'.") from error


def pack(message: Any) -> bytes:
    """
    Write a message.

    :param message: Numbers, texts, bytes, lists, maps, arrays of numbers.
    :return: The bytes.
    :raises CodecError: For a value of another type, or a number of more than 64 bits.
    """
    msgpack = need("msgpack")
    try:
        return msgpack.packb(message, default=_plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CodecError(f"The message cannot be written: {error}.") from error


def _plain(value: Any) -> dict[bytes, Any]:
    """Turn what msgpack does not know into a map."""
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.byteorder == ">" or not _DTYPE.fullmatch(value.dtype.str):
            raise TypeError(f"arrays of {value.dtype} are not allowed")
        if isinstance(value, np.generic):
            return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
        return {
            b"__ndarray__": True,
            b"data": np.ascontiguousarray(value).data.cast("B") if value.size else b"",
            b"dtype": value.dtype.str,
            b"shape": list(value.shape),
        }
    raise TypeError(f"{type(value).__name__} is not allowed")


def unpack(data: bytes, max_bytes: int | None = None) -> Any:
    """
    Read a message.

    :param data: The bytes.
    :param max_bytes: Refuse more than these; ``None`` = no limit but memory.
    :return: The value; its arrays cannot be written to.
    :raises CodecError: For whatever is no message of :func:`pack` or of openpi's clients and servers: damaged or too
        large, too deep, with too many values, with arrays of objects, texts or structures, or whose bytes do not fit
        their shape.
    """
    msgpack = need("msgpack")
    if not isinstance(data, bytes | bytearray | memoryview):
        raise CodecError(f"A message must be bytes, got {type(data).__name__}.")
    if max_bytes is not None and len(data) > max_bytes:
        raise CodecError(f"The message has {len(data)} bytes; allowed are {max_bytes}.")
    hooks = _Hooks()
    try:
        value = msgpack.unpackb(
            data, raw=False, strict_map_key=True, ext_hook=_no_extension, list_hook=hooks.on_list,
            object_pairs_hook=hooks.on_pairs, max_str_len=MAX_TEXT, max_array_len=MAX_LENGTH, max_map_len=MAX_LENGTH,
            max_ext_len=0,
        )  # fmt: skip
    except CodecError:
        raise
    except (msgpack.exceptions.UnpackException, ValueError, TypeError, OverflowError, RecursionError) as error:
        reason = str(error) or type(error).__name__
        raise CodecError(f"The message cannot be read: {reason.splitlines()[0][:200]}.") from error
    _check_depth(value)
    return value


class _Hooks:
    """Called for every list and map as soon as it is complete: msgpack's own limits hold for each alone."""

    def __init__(self) -> None:
        self._items = 0

    def _count(self, items: int) -> None:
        self._items += 1 + items
        if self._items > MAX_ITEMS:
            raise CodecError(f"The message has more than {MAX_ITEMS} values.")

    def on_list(self, items: list[Any]) -> list[Any]:
        self._count(len(items))
        return items

    def on_pairs(self, pairs: list[tuple[Any, Any]]) -> Any:
        self._count(2 * len(pairs))
        items = dict(pairs)
        if len(items) != len(pairs):
            raise CodecError("The message has a map with the same key twice.")
        if b"__ndarray__" in items:
            return _array(items)
        return _number(items) if b"__npgeneric__" in items else items


def _no_extension(code: int, data: bytes) -> None:
    raise CodecError(f"The message has a value of msgpack's extension type {code}, which is not allowed.")


def _check_depth(value: Any, left: int = MAX_DEPTH) -> None:
    if isinstance(value, dict | list):
        if left == 0:
            raise CodecError(f"The message has more than {MAX_DEPTH} lists and maps in each other.")
        for item in value.values() if isinstance(value, dict) else value:
            _check_depth(item, left - 1)


def _dtype(name: Any) -> np.dtype:
    if isinstance(name, bytes):
        name = name.decode("ascii", "replace")
    # np.dtype() itself would also take structures, objects, and texts that cost much
    if not isinstance(name, str) or not _DTYPE.fullmatch(name):
        raise CodecError(f"The message has an array of dtype {str(name)[:40]!r}; allowed are numbers and truth values.")
    return np.dtype(name)


def _array(items: dict[Any, Any]) -> np.ndarray:
    if set(items) != _ARRAY or items[b"__ndarray__"] is not True:
        raise CodecError("The message has an array with other keys than __ndarray__, data, dtype, shape.")
    dtype, shape, data = _dtype(items[b"dtype"]), items[b"shape"], items[b"data"]
    if not isinstance(shape, list) or len(shape) > MAX_DEPTH or not all(type(n) is int and n >= 0 for n in shape):
        raise CodecError(f"The message has an array whose shape is not {MAX_DEPTH} or fewer numbers.")
    if not isinstance(data, bytes) or math.prod(shape) * dtype.itemsize != len(data):
        raise CodecError(f"The message has an array whose bytes do not fit the shape {shape} of {dtype}.")
    if not data and max(shape, default=0) > MAX_LENGTH:
        raise CodecError(f"The message has an empty array of the shape {shape}.")
    array = np.frombuffer(data, dtype)
    if dtype.kind == "b" and array.size and array.view(np.uint8).max() > 1:
        raise CodecError("The message has an array of truth values with others than 0 and 1.")
    return array.reshape(shape)


def _number(items: dict[Any, Any]) -> np.generic:
    if set(items) != _NUMBER or items[b"__npgeneric__"] is not True:
        raise CodecError("The message has a number with other keys than __npgeneric__, data, dtype.")
    data, dtype = items[b"data"], _dtype(items[b"dtype"])
    allowed: Callable[[Any], bool] = {
        "b": lambda number: type(number) is bool,
        "f": lambda number: type(number) in (int, float),
    }.get(dtype.kind, lambda number: type(number) is int)
    if not allowed(data):
        raise CodecError(f"The message has a {type(data).__name__} where a number of {dtype} is announced.")
    with np.errstate(over="ignore"):  # too large for its type: infinite, as in C
        return dtype.type(data)
