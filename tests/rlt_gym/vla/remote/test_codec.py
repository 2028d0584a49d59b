"""Messages of policy servers: what goes in comes out, and nothing else does any harm."""

import random
import struct
import sys
import tracemalloc

import numpy as np
import pytest

msgpack = pytest.importorskip("msgpack")

from rlt_gym.vla.remote.codec import MAX_DEPTH, MAX_ITEMS, CodecError, need, pack, unpack  # noqa: E402

MESSAGE = {
    "obs": {
        "agentview": np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3),
        "state": np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8),
    },
    "tasks": ["open the drawer", "öffne die Schublade"],
    "seed": [0, 2**63],
    "limits": {"low": np.float32(-1.5), "n": np.int64(-3), "on": np.bool_(True)},
    "none": None,
    "raw": b"\x00\xff",
}


def same(a, b):
    if isinstance(a, np.ndarray | np.generic):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and bool(np.all(a == b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def raw(**changes):
    """An array as bytes on the wire, with some of its entries changed."""
    entries = {b"__ndarray__": True, b"data": bytes(24), b"dtype": "<f4", b"shape": [2, 3]}
    for key, value in changes.items():
        entries[key.strip("_").encode() if key != "mark" else b"__ndarray__"] = value
    return msgpack.packb({"x": entries})


def test_round_trip():
    assert same(unpack(pack(MESSAGE)), MESSAGE)


@pytest.mark.parametrize("dtype", ["bool", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 1)])
def test_every_kind_of_array(dtype, shape):
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    assert same(unpack(pack({"x": array}))["x"], array)


def test_arrays_that_are_not_contiguous():
    array = np.arange(24, dtype=np.float32).reshape(4, 6)[::-2, ::3].T
    assert same(unpack(pack(array)), array)


def test_the_form_is_openpi_s():
    """Written down from the text of openpi's client, byte keys included."""
    assert msgpack.unpackb(pack(np.array([[1.0, 2.0]], dtype="<f4")), strict_map_key=False) == {
        b"__ndarray__": True, b"data": struct.pack("<2f", 1, 2), b"dtype": "<f4", b"shape": [1, 2],
    }  # fmt: skip
    assert msgpack.unpackb(pack(np.float32(0.5)), strict_map_key=False) == {
        b"__npgeneric__": True, b"data": 0.5, b"dtype": "<f4",
    }  # fmt: skip


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, np.array([object()]), np.array(["text"]), np.array([1j]), np.array([(1, 2)], dtype="i4,i4"),
     np.datetime64("2026-01-01"), 2**64, np.zeros(2, dtype=">f4"), lambda: None],
)  # fmt: skip
def test_what_no_message_holds(value):
    with pytest.raises(CodecError, match="cannot be written"):
        pack({"x": value})


@pytest.mark.parametrize(
    "data, says",
    [
        (raw(dtype="|O"), "dtype '|O'"),
        (raw(dtype="|V8"), "dtype"),
        (raw(dtype="<U6"), "dtype"),
        (raw(dtype="<c8"), "dtype"),
        (raw(dtype=">f4"), "dtype"),
        (raw(dtype="<M8[s]"), "dtype"),
        (raw(dtype="f4,f4"), "dtype"),
        (raw(dtype="(1000000000,)f4"), "dtype"),
        (raw(dtype=7), "dtype"),
        (raw(dtype=b"<f4\xff"), "dtype"),
        (raw(shape=[2, 2]), "do not fit"),
        (raw(shape=[-2, -3]), "shape"),
        (raw(shape=[True, 6]), "shape"),
        (raw(shape=[2.0, 3]), "shape"),
        (raw(shape=6), "shape"),
        (raw(shape=[1] * 64 + [6]), "shape"),
        (raw(shape=[2**62, 2**62]), "do not fit"),
        (raw(shape=[0, 2**62], data=b""), "empty array"),
        (raw(data="text"), "do not fit"),
        (raw(data=[1] * 24), "do not fit"),
        (raw(mark=1), "other keys"),
        (raw(more=1), "other keys"),
        (raw(dtype="|b1", shape=[3], data=b"\x00\x02\x01"), "truth values"),
        (msgpack.packb({b"__npgeneric__": True, b"data": 300, b"dtype": "|u1"}), "cannot be read"),
        (msgpack.packb({b"__npgeneric__": True, b"data": "1", b"dtype": "<f4"}), "announced"),
        (msgpack.packb({b"__npgeneric__": True, b"data": True, b"dtype": "<i4"}), "announced"),
        (msgpack.packb({b"__npgeneric__": True, b"data": [1], b"dtype": "|O"}), "dtype"),
        (msgpack.packb({b"__npgeneric__": True, b"dtype": "<f4"}), "other keys"),
        (msgpack.packb(msgpack.ExtType(5, b"x")), "cannot be read"),
        (b"\xc7\x00\x05", "extension"),
        (msgpack.packb(msgpack.Timestamp(1)), "cannot be read"),
        (msgpack.packb({1: 2}), "cannot be read"),
        (b"\x82\xa1a\x01\xa1a\x02", "same key twice"),
        (b"\xa2\xff\xfe", "cannot be read"),
        (pack(MESSAGE) + b"\x00", "cannot be read"),
        (pack(MESSAGE)[:-1], "cannot be read"),
        (b"", "cannot be read"),
        (b"\xc1", "cannot be read"),
        ("text", "must be bytes"),
        (msgpack.packb("x" * 100_000), "cannot be read"),
    ],
)  # fmt: skip
def test_what_is_refused(data, says):
    with pytest.raises(CodecError, match="(?s)" + says.replace("|", r"\|")) as caught:
        unpack(data)
    assert "\n" not in str(caught.value)


def test_a_size_can_be_set():
    data = pack(MESSAGE)
    assert unpack(data, len(data))
    with pytest.raises(CodecError, match=f"allowed are {len(data) - 1}"):
        unpack(data, len(data) - 1)


def test_depth():
    value = 1
    for _ in range(MAX_DEPTH):
        value = [value]
    assert unpack(pack(value)) == value
    with pytest.raises(CodecError, match="in each other"):
        unpack(pack([value]))


#: Short messages that say that much follows, or make many small objects of few bytes.
BOMBS = {
    "lists in lists": b"\x91" * 200_000,
    "maps in maps": b"\x81\xa1a" * 200_000,
    "long lists in long lists": b"\xdc\x04\x00" * 200_000,
    "longer lists in longer lists": b"\xdd\x00\x0f\xff\xff" * 200_000,
    "a list of 2**32 entries": b"\xdd\xff\xff\xff\xff",
    "a map of 2**32 entries": b"\xdf\xff\xff\xff\xff",
    "4 GB of bytes": b"\xc6\xff\xff\xff\xff",
    "a million empty maps": b"\xdc\x04\x00" + (b"\xdc\x04\x00" + b"\x80" * 1024) * 1024,
    "a million empty lists": b"\xdc\x04\x00" + (b"\xdc\x04\x00" + b"\x90" * 1024) * 1024,
    "a million numbers": b"\xdc\x04\x00" + (b"\xdc\x04\x00" + b"\xcb" + bytes(8) + b"\x01" * 1023) * 1024,
    "a shape without bytes": raw(shape=[2**40], data=b"", dtype="<f8"),
}


def largest(data):
    """Megabytes that the decoder needs at most, and what it says."""
    tracemalloc.start()
    try:
        unpack(data)
        result = "read"
    except CodecError as error:
        result = error
    finally:
        peak = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.stop()
    return peak, result


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name):
    peak, result = largest(BOMBS[name])
    assert isinstance(result, CodecError)
    assert peak < 32


def test_the_number_of_values_is_limited_over_all_lists():
    fits = [[0] * 1000] * (MAX_ITEMS // 1001 - 1)
    assert unpack(pack(fits)) == fits
    with pytest.raises(CodecError, match=str(MAX_ITEMS)):
        unpack(pack(fits + fits))


def mutated(rng, data):
    """A message with some bytes changed, left out, doubled, or replaced by ones that mean much to msgpack."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at, what = rng.randrange(len(data)), rng.randrange(5)
        if what == 0:
            data[at] = rng.randrange(256)
        elif what == 1:
            data[at : at + rng.randint(1, 9)] = b""
        elif what == 2:
            data[at:at] = data[at : at + rng.randint(1, 40)]
        elif what == 3:
            data[at:at] = bytes([rng.choice([0x80, 0x81, 0x90, 0x9F, 0xC1, 0xC4, 0xC6, 0xC7, 0xD9, 0xDC, 0xDD, 0xDF])])
        else:
            data[at] ^= 1 << rng.randrange(8)
        if not data:
            return b""
    return bytes(data)


def test_fuzz():
    """Valid messages with mutations, and bytes without sense: a plain value or CodecError, and little memory."""
    rng = random.Random(0)
    seeds = [pack(MESSAGE), raw(), pack([np.float32(1), np.zeros((2, 0, 3))]), pack({"actions": np.ones((8, 7))})]
    read = refused = 0
    tracemalloc.start()
    for number in range(12_000):
        data = mutated(rng, rng.choice(seeds)) if number % 3 else rng.randbytes(rng.randint(0, 200))
        try:
            value = unpack(data)
        except CodecError as error:
            assert str(error) and "\n" not in str(error)
            refused += 1
        else:
            check_plain(value)
            read += 1
    peak = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    assert min(read, refused) > 500  # both happen, or this test tries nothing
    assert peak < 32


def check_plain(value):
    """Nothing but data."""
    if isinstance(value, dict):
        assert all(isinstance(key, str | bytes) for key in value)
        for item in value.values():
            check_plain(item)
    elif isinstance(value, list):
        for item in value:
            check_plain(item)
    elif isinstance(value, np.ndarray):
        assert value.dtype.kind in "biuf" and not value.flags.writeable
        assert len(value.tobytes()) == value.nbytes  # every byte of it can be read
    else:
        assert value is None or isinstance(value, bool | int | float | str | bytes | np.number | np.bool_)


def test_missing_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "msgpack", None)
    for call in (lambda: pack({}), lambda: unpack(b"\x80"), lambda: need("msgpack")):
        with pytest.raises(ValueError, match=r"Policy servers need msgpack: pip install 'rlt\[serve\]'"):
            call()
