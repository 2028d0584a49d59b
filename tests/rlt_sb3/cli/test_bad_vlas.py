"""Frozen VLAs that cannot be used: each is refused in one line, before a simulator is started."""

import re
import sys

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

pytest.importorskip("websockets")
pytest.importorskip("msgpack")

import msgpack
from other_servers import Other

from rlt_gym.testing import FakeVLA
from rlt_gym.vla.mini import WEIGHTS
from rlt_gym.vla.remote.codec import pack
from rlt_gym.vla.remote.server import PolicyServer, VLAService
from rlt_sb3.cli.main import main


def metadata(**changes):
    return dict(VLAService(FakeVLA()).metadata) | changes


def array(dtype, shape, data=b"12345678"):
    """What no honest server sends."""
    return {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": shape}


#: name -> the server's greeting, what the line says
GREETINGS = {
    "array of objects": (msgpack.packb({"x": array("|O", [1])}), r"sends what cannot be read: .*dtype '\|O'"),
    "bytes that do not fit": (msgpack.packb({"x": array("<f8", [10**9])}), "bytes do not fit the shape"),
    "too many values": (pack([[0] * 1000] * 30), "more than 20000 values"),
    "no message": (b"\xc1", "sends what cannot be read"),
    "oversized": (pack(metadata(fingerprint="x" * 5000)), "too large.*raise max_bytes"),
    "another protocol": (pack({}), "no server of `rlt serve VLA`.*openpi://"),
    "another version": (pack(metadata(version=2)), "speaks version 2 of the protocol, this side version 1"),
    "wrong cameras": (
        pack(metadata(spec=metadata()["spec"] | {"cameras": ["side"]})), r"needs the cameras \['side'\], and .*wrist",
    ),
    "actions of a robot with 8 joints": (
        pack(metadata(spec=metadata()["spec"] | {"action_dim": 8})), "gives actions of 8 numbers, and .* takes 7",
    ),
    "a size that cannot be": (
        pack(metadata(spec=metadata()["spec"] | {"image_size": -1})), "image_size of 'fake' must be an integer from 1",
    ),
}  # fmt: skip
#: name -> arguments, what the line says
NAMES = {
    "unknown name": (["maxi"], "Unknown VLA 'maxi': allowed are .*'mini', .*a FrozenVLA object"),
    "unknown scheme": (["hub:someone/policy"], r"Unknown VLA 'hub:someone/policy': no such scheme .*'rlt:'"),
    "class that is not allowed": (["os:system"], "may only name rlt_gym.*RLT_ALLOWED_IMPORTS=os"),
    "class that is not there": (["rlt_gym.testing.vla:Nothing"], "there is no 'rlt_gym.testing.vla:Nothing'"),
    "wrong argument": (
        ["rlt_gym.testing.vla:FakeVLA", "--env.vla_kwargs", "{path: x}"], "unexpected keyword argument 'path'.*allowed",
    ),
    "no address": (["rlt:host"], "has no address: write rlt://host:port"),
    "no file": (["nothing.safetensors"], "There are no VLA weights at nothing.safetensors"),
    "chunk too short": (["rlt_gym.testing.vla:FakeVLA", "--env.chunk_length", "30"], "chunk_length is 30.* horizon 8"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_simulator(monkeypatch):
    monkeypatch.setattr("rlt_gym.libero.vector_env.LiberoVectorEnv", lambda **unused: pytest.fail("a simulator"))


def line_of(words, tmp_path, capsys):
    """What ``rlt train`` says."""
    out = ["--name", "x", "--out", str(tmp_path / "runs"), "--progress=false"]
    assert main(["train", *out, "--env.rl_token", "none", "--env.vla", *words]) != 0
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("rlt train: ") and not (tmp_path / "runs" / "x").exists()
    return line


@pytest.mark.parametrize("name", NAMES)
def test_names(name, tmp_path, capsys):
    words, says = NAMES[name]
    assert re.search(says, line_of(words, tmp_path, capsys))


@pytest.mark.parametrize("name", GREETINGS)
def test_servers(name, tmp_path, capsys):
    greeting, says = GREETINGS[name]
    with Other(greeting) as server:
        words = [f"rlt://127.0.0.1:{server.port}", "--env.vla_kwargs", "{wait: 0, max_bytes: 4000}"]
        if name == "too many values":
            words[-1] = "{wait: 0}"
        assert re.search(says, line_of(words, tmp_path, capsys))


@pytest.mark.parametrize(
    "vla, missing, extra",
    [("rlt://127.0.0.1:9", "websockets.sync.client", "serve"), ("openpi://127.0.0.1:9", "msgpack", "serve")],
)
def test_a_missing_extra_is_named(vla, missing, extra, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    assert f"pip install 'rlt[{extra}]'" in line_of([vla], tmp_path, capsys)


class NaN(FakeVLA):
    """One number of one action."""

    def forward(self, obs, tasks, *, seed=None):
        output = super().forward(obs, tasks, seed=seed)
        output.chunk[0, 3, 2] = np.nan
        return output


def test_a_chunk_that_is_nan(tmp_path, capsys, monkeypatch):
    """In this process and over the wire."""
    monkeypatch.setattr("rlt_gym.testing.vla.FakeVLA", NaN)
    monkeypatch.setattr(NaN, "__module__", "rlt_gym.testing.vla")
    with PolicyServer(VLAService(NaN()), port=0) as server:
        for vla in ("rlt_gym.testing.vla:FakeVLA", f"rlt://127.0.0.1:{server.port}"):
            line = line_of([vla], tmp_path, capsys)
            assert "'fake' breaks the FrozenVLA contract: chunk has values outside [-1, 1] or NaN" in line


def shipped(change, path):
    source = WEIGHTS / "mini_vla.safetensors"
    with safe_open(source, framework="numpy") as file:
        about = file.metadata()
    tensors = load_file(source)
    change(tensors)
    save_file(tensors, path, metadata=about)


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda t: t.update({k: np.zeros((3, 3), v.dtype) for k, v in list(t.items())[:1]}), "of another shape"),
        (lambda t: t.pop(next(iter(t))), "missing"),
        (lambda t: t.update(more=np.zeros(1)), "surplus: more"),
    ],
)
def test_a_checkpoint_of_another_size(change, says, tmp_path, capsys):
    path = tmp_path / "vla.safetensors"
    shipped(change, path)
    assert says in line_of([str(path)], tmp_path, capsys)
    path.write_bytes(b"not weights at all")
    assert "cannot be read as VLA weights" in line_of([str(path)], tmp_path, capsys)
