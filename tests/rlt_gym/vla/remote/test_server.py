"""Policy servers: what they say first, whom they let in, and what they answer to good and to bad requests."""

import pickle
import socket
import sys
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest

pytest.importorskip("websockets")
pytest.importorskip("msgpack")

import msgpack
from vla_helpers import observations, tiny_vla
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from rlt_gym.testing import FakeVLA
from rlt_gym.vla.remote.codec import pack, unpack
from rlt_gym.vla.remote.server import PolicyServer, VLAService, is_loopback

TASKS = ["open the drawer", "lift the bowl"]


@pytest.fixture(scope="module")
def server():
    with PolicyServer(VLAService(FakeVLA(), max_batch=4, max_bytes=1 << 20), port=0, max_bytes=1 << 20) as server:
        yield server


@pytest.fixture
def client(server):
    with connect(f"ws://127.0.0.1:{server.port}", compression=None, max_size=None, proxy=None) as client:
        client.metadata = unpack(client.recv(timeout=10))
        yield client


def ask(client, request):
    client.send(request if isinstance(request, bytes | str) else pack(request))
    reply = client.recv(timeout=10)
    return reply if isinstance(reply, str) else unpack(reply)


def request(rows=2, **changes):
    return {"obs": observations(rows, size=16), "tasks": (TASKS * rows)[:rows], "seed": list(range(rows))} | changes


def test_metadata_come_first(client):
    vla = FakeVLA()
    assert client.metadata["protocol"] == "rlt.vla" and client.metadata["version"] == 1
    assert client.metadata["fingerprint"] == vla.fingerprint()
    assert client.metadata["spec"]["cameras"] == ["agentview", "wrist"]
    assert {key: client.metadata["spec"][key] for key in ("name", "token_dim", "horizon", "state_dim")} == {
        "name": "fake", "token_dim": 12, "horizon": 8, "state_dim": 8,
    }  # fmt: skip
    assert client.metadata["max_batch"] == 4 and client.metadata["tokens_dtype"] == "float16"


def test_a_batch(client):
    sent = request()
    reply, expected = ask(client, sent), FakeVLA().forward(sent["obs"], sent["tasks"], seed=sent["seed"])
    assert reply["tokens"].dtype == np.float16 and reply["chunk"].dtype == np.float32
    assert np.array_equal(reply["chunk"], expected.chunk.numpy())
    assert np.array_equal(reply["mask"], expected.mask.numpy()) and not reply["mask"].all()
    assert np.array_equal(reply["kind"], expected.kind.numpy())
    valid = reply["mask"]
    assert np.array_equal(reply["tokens"][valid], expected.tokens.numpy().astype(np.float16)[valid])
    assert reply["server_timing"]["infer_ms"] >= 0


def test_openpi_s_form_is_answered_too(client):
    """One observation; pictures turned by 180 degrees."""
    obs = observations(1, size=16)
    sent = {
        "observation/image": obs["agentview"][0, ::-1, ::-1],
        "observation/wrist_image": obs["wrist"][0, ::-1, ::-1],
        "observation/state": obs["state"][0].astype(np.float64),
        "prompt": TASKS[0],
    }
    reply = ask(client, sent)
    assert np.array_equal(reply["actions"], FakeVLA().forward(obs, TASKS[:1]).chunk[0].numpy())
    assert np.array_equal(reply["state"], obs["state"][0])


BAD = {
    "not a map": (pack([1]), "must be a map, got list"),
    "a text": ("hello", "must be a binary message"),
    "no message": (b"\xc1", "cannot be read"),
    "object dtype": (
        msgpack.packb({b"__ndarray__": True, b"data": b"", b"dtype": "|O", b"shape": [0]}), "dtype '|O'",
    ),
    "too many rows": (lambda: request(5), "1 to 4 rows (max_batch), got 5"),
    "no rows": (lambda: request(0), "1 to 4 rows"),
    "tasks": (lambda: request(tasks="open the drawer"), "list of texts"),
    "seed": (lambda: request(seed=[0]), "2 integers"),
    "fewer pictures": (lambda: request() | {"obs": observations(1, size=16)}, "must be uint8 (2, any, any, 3)"),
    "float pictures": (
        lambda: request() | {"obs": {k: v.astype(np.float32) for k, v in observations(2, 16).items()}}, "must be uint8",
    ),
    "no camera": (lambda: request() | {"obs": {"state": np.zeros((2, 8), np.float32)}}, "got ['state']"),
    "another camera": (lambda: request() | {"obs": observations(2, 16) | {"side": np.zeros(2)}}, "got ['agentview'"),
    "NaN": (
        lambda: request() | {"obs": observations(2, 16) | {"state": np.full((2, 8), np.nan, np.float32)}},
        "state has NaN",
    ),
    "7 numbers": (
        lambda: request() | {"obs": observations(2, 16) | {"state": np.zeros((2, 7), np.float32)}}, "float32 (2, 8)",
    ),
    "openpi without a picture": ({"prompt": "x", "observation/state": np.zeros(8)}, "lacks ['observation/image'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_one_line_and_the_next_one_is_answered(client, name):
    bad, says = BAD[name]
    reply = ask(client, bad() if callable(bad) else bad)
    assert isinstance(reply, str) and says in reply and "\n" not in reply
    assert set(ask(client, request())) >= {"tokens", "chunk"}


class Failing(FakeVLA):
    """What goes wrong in a VLA, chosen by the instruction."""

    def forward(self, obs, tasks, *, seed=None):
        import torch

        output = super().forward(obs, tasks, seed=seed)
        if tasks[0] == "memory":
            raise RuntimeError("CUDA out of memory\nmany lines")
        if tasks[0] == "NaN":
            output.chunk[0, 0, 0] = torch.nan
        if tasks[0] == "large":
            output.tokens = output.tokens + 1e6
        return output


def test_errors_of_the_vla_leave_the_connection():
    with (
        PolicyServer(VLAService(Failing()), port=0) as server,
        connect(f"ws://127.0.0.1:{server.port}", proxy=None) as client,
    ):
        client.recv()
        assert ask(client, request(1, tasks=["memory"])) == "RuntimeError: CUDA out of memory"
        assert "breaks the FrozenVLA contract: chunk has values outside [-1, 1] or NaN" in ask(
            client, request(1, tasks=["NaN"])
        )
        assert "serve with --tokens_dtype float32" in ask(client, request(1, tasks=["large"]))
        assert "chunk" in ask(client, request(1))


def test_a_pickle_is_refused_and_runs_nothing(client, tmp_path):
    class Runs:
        def __reduce__(self):
            return open, (str(tmp_path / "ran"), "w")

    reply = ask(client, pickle.dumps(Runs()))
    assert isinstance(reply, str) and not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(Runs())).close()  # it does where it is read
    assert (tmp_path / "ran").exists()


def test_the_default_address_is_this_machine_alone():
    with PolicyServer(VLAService(FakeVLA()), port=0) as server:
        assert server._server.socket.getsockname()[0] == "127.0.0.1"


def test_masked_tokens_do_not_count():
    """They may be anything, infinite for example."""

    class Padded(FakeVLA):
        def forward(self, obs, tasks, *, seed=None):
            output = super().forward(obs, tasks, seed=seed)
            output.tokens = output.tokens.masked_fill(~output.mask[..., None], float("inf"))
            return output

    service = VLAService(Padded())
    reply = service.answer(request())
    assert not reply["mask"].all() and np.isfinite(reply["tokens"]).all()


def test_too_large_a_request_closes_the_connection(client):
    client.send(b"\xc6" + (2 << 20).to_bytes(4, "big") + bytes(2 << 20))
    with pytest.raises(ConnectionClosed) as caught:
        client.recv(timeout=10)
    assert caught.value.rcvd.code == 1009


def get(port, path):
    return urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10)


def test_healthz(server):
    reply = get(server.port, "/healthz")
    assert reply.status == 200 and reply.read() == b"OK\n"
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(server.port, "/other")
    assert caught.value.code == 426


@pytest.mark.parametrize("sent", [None, "Api-Key wrong", "Api-Key ", "secret", "Bearer secret"])
def test_without_its_key_nobody_is_let_in(sent):
    with PolicyServer(VLAService(FakeVLA()), port=0, key="secret") as server:
        headers = {} if sent is None else {"Authorization": sent}
        address = f"ws://127.0.0.1:{server.port}"
        with pytest.raises(InvalidStatus) as caught, connect(address, additional_headers=headers, proxy=None):
            pass
        assert caught.value.response.status_code == 401
        with connect(address, additional_headers={"Authorization": "Api-Key secret"}, proxy=None) as client:
            assert unpack(client.recv())["protocol"] == "rlt.vla"
        assert get(server.port, "/healthz").status == 200


def test_a_page_in_a_browser_is_not_let_in(server):
    """It could reach a server on loopback; browsers say where a page comes from."""
    with (
        pytest.raises(InvalidStatus) as caught,
        connect(f"ws://127.0.0.1:{server.port}", origin="http://example.com", proxy=None),
    ):
        pass
    assert caught.value.response.status_code == 403


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "robot.example.com", ""])
def test_other_machines_need_a_key(host):
    with pytest.raises(ValueError, match="needs a key: set the environment variable RLT_SERVE_KEY"):
        PolicyServer(VLAService(FakeVLA()), host, port=0)
    with pytest.raises(ValueError, match="needs a key"):
        PolicyServer(VLAService(FakeVLA()), host, port=0, key="")


def test_with_a_key_other_machines_may_connect():
    with PolicyServer(VLAService(FakeVLA()), "0.0.0.0", port=0, key="secret") as server:
        assert get(server.port, "/healthz").status == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback(host):
    assert is_loopback(host)


def test_too_many_clients():
    with PolicyServer(VLAService(FakeVLA()), port=0, max_clients=1) as server:
        address = f"ws://127.0.0.1:{server.port}"
        with connect(address, proxy=None) as first:
            first.recv()
            with connect(address, proxy=None) as second, pytest.raises(ConnectionClosed) as caught:
                second.recv(timeout=10)
            assert caught.value.rcvd.code == 1013
            assert "chunk" in ask(first, request(1))
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:  # the place is free again a moment later
            with connect(address, proxy=None) as third:
                try:
                    third.recv(timeout=10)
                    return
                except ConnectionClosed:
                    time.sleep(0.05)
        pytest.fail("the place of a client that left stays taken")


def test_one_request_at_a_time():
    """A VLA need not be safe for threads."""
    inside, most = [], []

    class Slow(FakeVLA):
        def forward(self, obs, tasks, *, seed=None):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.05)
            inside.pop()
            return super().forward(obs, tasks, seed=seed)

    def play(port):
        with connect(f"ws://127.0.0.1:{port}", proxy=None) as client:
            client.recv()
            ask(client, request(1))

    with PolicyServer(VLAService(Slow()), port=0) as server:
        threads = [threading.Thread(target=play, args=(server.port,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert set(most) == {1}  # requests that wait together are one forward pass


def test_who_does_not_greet_is_dropped():
    with (
        PolicyServer(VLAService(FakeVLA()), port=0, timeout=0.3) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=10) as silent,
    ):
        silent.sendall(b"GET / HTTP/1.1\r\n")
        while silent.recv(1024):  # ends when the server closes
            pass


def test_who_no_longer_answers_is_dropped():
    """A client whose machine is off: its connection is closed when a ping stays unanswered."""
    with PolicyServer(VLAService(FakeVLA()), port=0, timeout=0.3) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as silent:
            silent.sendall(
                b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
            )
            while silent.recv(1024):
                pass


def test_bad_settings():
    with pytest.raises(ValueError, match="max_batch must be from 1 to 1024, got 0"):
        VLAService(FakeVLA(), max_batch=0)
    with pytest.raises(ValueError, match="tokens_dtype must be one of float16, float32, got 'bfloat16'"):
        VLAService(FakeVLA(), tokens_dtype="bfloat16")


def test_the_port_is_taken(server):
    with pytest.raises(OSError, match=f"Cannot listen at 127.0.0.1:{server.port} .*choose another port"):
        PolicyServer(VLAService(FakeVLA()), port=server.port)


def test_missing_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "websockets.sync.server", None)
    with pytest.raises(ValueError, match=r"Policy servers need websockets: pip install 'rlt\[serve\]'"):
        PolicyServer(VLAService(FakeVLA()), port=0)


def test_a_real_vla():
    """MiniVLA on observations of real shapes: as in process."""
    vla, sent = tiny_vla(), {"obs": observations(3), "tasks": ["a", "b", "a"], "seed": None}
    reply, expected = VLAService(vla, tokens_dtype="float32").answer(sent), vla.forward(sent["obs"], sent["tasks"])
    assert np.array_equal(reply["tokens"], expected.tokens.numpy())
    assert np.array_equal(reply["chunk"], expected.chunk.numpy())
