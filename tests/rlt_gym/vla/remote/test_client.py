"""A VLA over the wire is the VLA: same outputs, same name; a lost server is looked for, and given up with one line."""

import gc
import os
import pickle
import sys
import threading
import time
import warnings

import numpy as np
import pytest
import torch

pytest.importorskip("websockets")
pytest.importorskip("msgpack")

from other_servers import Other, plain_openpi
from vla_helpers import observations, tiny_vla

from rlt_gym.rl_token.io import load_rl_token
from rlt_gym.rl_token.make import make_rl_token_vec
from rlt_gym.testing import FakeLiberoVectorEnv, FakeVLA
from rlt_gym.testing.envs import FAKE_ROBOT
from rlt_gym.vla import load_vla
from rlt_gym.vla.base import FrozenVLA, VLASpec, VLAUnavailableError
from rlt_gym.vla.conformance import check_vla
from rlt_gym.vla.remote.client import OpenPIVLA, RemoteVLA
from rlt_gym.vla.remote.codec import pack, unpack
from rlt_gym.vla.remote.server import PolicyServer, VLAService

TASKS = ["open the drawer", "lift the bowl", "open the drawer", "push the plate", "lift the bowl"]


def server_of(vla, port=0, **settings):
    return PolicyServer(VLAService(vla, **settings), port=port)


@pytest.mark.parametrize("tokens_dtype, tolerance", [("float32", 1e-5), ("float16", 1e-3)])
@pytest.mark.parametrize("max_batch", [64, 2])
def test_remote_equals_in_process(tokens_dtype, tolerance, max_batch):
    """Chunks exactly where the batch is the same one; tokens to the precision of their type."""
    vla, obs = tiny_vla(), observations(5)
    with server_of(vla, tokens_dtype=tokens_dtype, max_batch=max_batch) as server:
        remote = RemoteVLA(port=server.port)
        there, here = remote.forward(obs, TASKS), vla.forward(obs, TASKS)
    assert there.tokens.dtype == getattr(torch, tokens_dtype)
    torch.testing.assert_close(there.tokens.float(), here.tokens, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(there.chunk, here.chunk, atol=0 if max_batch == 64 else 1e-6, rtol=0)
    assert torch.equal(there.mask, here.mask) and torch.equal(there.kind, here.kind)


def test_the_shipped_vla_on_real_shapes():
    vla, rng = load_vla("mini"), np.random.default_rng(0)
    size = vla.spec.frame_size
    obs = {camera: rng.integers(0, 256, (3, size, size, 3), dtype=np.uint8) for camera in vla.spec.cameras}
    obs["state"] = rng.normal(size=(3, 8)).astype(np.float32)
    with server_of(vla, tokens_dtype="float32") as server:
        remote = load_vla(f"rlt://127.0.0.1:{server.port}")
        check_vla(remote)
        there, here = remote.forward(obs, TASKS[:3]), vla.forward(obs, TASKS[:3])
        assert torch.equal(there.tokens, here.tokens) and torch.equal(there.chunk, here.chunk)
        # its own RL token belongs to it, by the fingerprint
        z_rl = load_rl_token("auto", remote)(there)
        assert torch.equal(z_rl, load_rl_token("auto", vla)(here))


def test_another_vla_s_rl_token_is_refused():
    with server_of(tiny_vla()) as server, pytest.raises(ValueError, match="No shipped RL token belongs to the VLA"):
        load_rl_token("auto", RemoteVLA(port=server.port))


def test_it_obeys_the_contract():
    vla = FakeVLA(stochastic=True)
    with server_of(vla, tokens_dtype="float32", max_batch=2) as server:
        remote = RemoteVLA(port=server.port)
        assert isinstance(remote, FrozenVLA)
        assert remote.spec == vla.spec and isinstance(remote.spec, VLASpec)
        assert remote.fingerprint() == vla.fingerprint()
        check_vla(remote, observations(5, size=16), TASKS)
        assert remote.to("cpu") is remote and remote.device == torch.device("cpu")


class Ragged(FakeVLA):
    """Pads to the longest instruction of its batch, as many do; a row has as many tokens as its instruction words."""

    def forward(self, obs, tasks, *, seed=None):
        from rlt_gym.vla.base import VLAOutput

        words = [len(task.split()) for task in tasks]
        mask = torch.arange(max(words))[None] < torch.tensor(words)[:, None]
        tokens = torch.as_tensor(obs["state"])[:, :1, None] + torch.arange(max(words))[None, :, None]
        self.calls.append(len(tasks))
        return VLAOutput(
            tokens=tokens.expand(-1, -1, 12).contiguous() * mask[..., None],
            mask=mask,
            kind=2 * mask.to(torch.uint8),
            chunk=torch.zeros(len(tasks), 8, 7),
        )


def test_requests_of_other_lengths_are_put_together():
    vla, tasks = Ragged(), ["one", "one two three", "one two", "one", "one two three four"]
    obs = observations(5, size=16)
    here = vla.forward(obs, tasks)
    vla.calls.clear()
    with server_of(vla, tokens_dtype="float32", max_batch=2) as server:
        there = RemoteVLA(port=server.port).forward(obs, tasks)
    assert vla.calls == [2, 2, 1]
    for name in ("tokens", "mask", "kind", "chunk"):
        assert torch.equal(getattr(there, name), getattr(here, name)), name


def test_max_batch_of_the_client():
    vla = FakeVLA()
    with server_of(vla) as server:
        RemoteVLA(port=server.port, max_batch=3).forward(observations(5, size=16), TASKS)
    assert vla.calls == [3, 2]
    with pytest.raises(ValueError, match="max_batch must be at least 1, got 0"):
        RemoteVLA(max_batch=0)


def test_requests_are_no_larger_than_the_server_takes():
    vla, obs = FakeVLA(), observations(5, size=64)  # 24 KB a row
    service = VLAService(vla, max_bytes=64 << 10)
    with PolicyServer(service, port=0, max_bytes=64 << 10) as server:
        RemoteVLA(port=server.port).forward(obs, TASKS)
        assert vla.calls == [2, 2, 1]
        with pytest.raises(ValueError, match=r"An observation has 9.* bytes, .* takes 65536 at once: .*--max_mb"):
            RemoteVLA(port=server.port).forward(observations(1, size=128), TASKS[:1])


def test_the_order_of_seeds_is_kept():
    vla, obs = FakeVLA(stochastic=True), observations(5, size=16)
    seeds = [5, 2**63, 7, 100, 3]
    with server_of(vla, max_batch=2) as server:
        there = RemoteVLA(port=server.port).forward(obs, TASKS, seed=seeds)
    assert torch.equal(there.chunk, vla.forward(obs, TASKS, seed=seeds).chunk)


def test_what_the_vla_refuses_is_said_here():
    with server_of(tiny_vla()) as server:
        remote = RemoteVLA(port=server.port)
        with pytest.raises(ValueError, match=r"server at 127.0.0.1:\d+ refuses: agentview is uint8 .* S >= 32"):
            remote.forward(observations(2, size=16), TASKS[:2])
        remote.forward(observations(2), TASKS[:2])  # the connection is still there


@pytest.mark.parametrize(
    "obs, tasks, says",
    [
        ({"agentview": np.zeros((1, 16, 16, 3), np.uint8)}, ["a"], "needs .*'agentview', 'wrist', 'state'"),
        (observations(2, size=16), "a text", "list of instructions"),
        (observations(2, size=16), [], "list of instructions"),
        (observations(2, size=16), ["a"], "1 instructions need as many rows"),
    ],
)
def test_wrong_arguments(obs, tasks, says):
    with server_of(FakeVLA()) as server, pytest.raises(ValueError, match=says):
        RemoteVLA(port=server.port).forward(obs, tasks)


# ------------------------------------------------------------------------------------------------ lost servers


def again_later(vla, port, seconds, started):
    """A server at the same port, after a while."""

    def run():
        time.sleep(seconds)
        started.append(server_of(vla, port).start())

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_server_that_comes_back_in_time_is_found():
    vla, obs, started = FakeVLA(), observations(5, size=16), []
    with server_of(vla) as server:
        remote = RemoteVLA(port=server.port, patience=20.0)
        before = remote.forward(obs, TASKS)
    thread = again_later(vla, server.port, 1.0, started)
    with pytest.warns(UserWarning, match="does not answer .* looking for it for 20 s"):
        after = remote.forward(obs, TASKS)
    thread.join()
    started[0].close()
    assert torch.equal(before.tokens, after.tokens) and torch.equal(before.chunk, after.chunk)


@pytest.mark.filterwarnings("ignore:The VLA server")
def test_a_server_that_does_not_come_back_is_given_up():
    with server_of(FakeVLA()) as server:
        remote = RemoteVLA(port=server.port, patience=0.5)
    began = time.monotonic()
    with pytest.raises(VLAUnavailableError, match=r"No VLA server is at .* looked for it for 0.5 s") as caught:
        remote.forward(observations(5, size=16), TASKS)
    assert 0.4 < time.monotonic() - began < 5.0
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:The VLA server")
def test_another_vla_at_its_place_is_refused():
    with server_of(FakeVLA()) as server:
        remote = RemoteVLA(port=server.port)
    with (
        server_of(FakeVLA(horizon=6), server.port),
        pytest.raises(VLAUnavailableError, match="came back with another VLA"),
    ):
        remote.forward(observations(5, size=16), TASKS)


def test_no_server_at_first():
    with server_of(FakeVLA()) as server:
        port = server.port
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(VLAUnavailableError, match=rf"No VLA server is at 127.0.0.1:{port} .*start it with"):
            RemoteVLA(port=port, wait=0.2, patience=60.0)
    assert time.monotonic() - began < 5.0


@pytest.mark.filterwarnings("ignore:The VLA server")
def test_a_server_that_hangs_is_given_up():
    """It takes requests and never replies."""
    release = threading.Event()

    class Hangs(FakeVLA):
        def forward(self, obs, tasks, *, seed=None):
            release.wait(30)
            return super().forward(obs, tasks, seed=seed)

    with server_of(Hangs()) as server:
        remote = RemoteVLA(port=server.port, timeout=0.3, patience=0.0)
        began = time.monotonic()
        with pytest.raises(VLAUnavailableError, match="No VLA server"):
            remote.forward(observations(1, size=16), TASKS[:1])
        assert time.monotonic() - began < 10.0
        release.set()


def test_a_late_reply_is_not_taken_for_that_to_the_next_request():
    """After Ctrl-C in the middle of a request."""

    class Slow(FakeVLA):
        def forward(self, obs, tasks, *, seed=None):
            time.sleep(0.3 if tasks[0] == "slow" else 0.0)
            return super().forward(obs, tasks, seed=seed)

    vla, obs = Slow(), observations(2, size=16)
    one, two = ({key: value[i : i + 1] for key, value in obs.items()} for i in range(2))
    with server_of(vla) as server:
        remote = RemoteVLA(port=server.port)
        receive = remote._connection._socket.recv

        def interrupted(timeout=None):
            raise KeyboardInterrupt

        remote._connection._socket.recv = interrupted
        with pytest.raises(KeyboardInterrupt):
            remote.forward(one, ["slow"])
        if remote._connection._socket is not None:
            remote._connection._socket.recv = receive
        assert torch.equal(remote.forward(two, ["fast"]).chunk, vla.forward(two, ["fast"]).chunk)


@pytest.mark.parametrize("given, says", [(None, "got no key"), ("wrong", "got a wrong key")])
def test_keys(given, says, monkeypatch):
    monkeypatch.delenv("RLT_SERVE_KEY", raising=False)
    with PolicyServer(VLAService(FakeVLA()), port=0, key="secret") as server:
        with pytest.raises(VLAUnavailableError, match=f"{says}: set the environment variable RLT_SERVE_KEY"):
            RemoteVLA(port=server.port, key=given)
        assert RemoteVLA(port=server.port, key="secret").spec.name == "fake"
        monkeypatch.setenv("RLT_SERVE_KEY", "secret")
        assert load_vla(f"rlt://127.0.0.1:{server.port}").spec.name == "fake"


def test_a_copy_has_a_connection_of_its_own():
    with server_of(FakeVLA()) as server:
        remote = RemoteVLA(port=server.port, max_batch=3)
        copy = pickle.loads(pickle.dumps(remote))
        remote.close()
        assert copy.max_batch == 3 and copy.spec == remote.spec
        copy.forward(observations(2, size=16), TASKS[:2])


def until(condition, seconds=10.0):
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_an_environment_that_nobody_has_any_more_ends_its_connection():
    """More of them, one after the other, than the server takes at a time."""
    with PolicyServer(VLAService(FakeVLA()), port=0, max_clients=2) as server:
        before = threading.active_count()
        for _ in range(4):
            env = make_rl_token_vec(
                lambda loaded, **raw: FakeLiberoVectorEnv(1, **raw), FAKE_ROBOT, vla=f"rlt://127.0.0.1:{server.port}",
                rl_token="mean", vla_kwargs={"wait": 5.0},
            )  # fmt: skip
            env.reset()
            env.close()
            del env
            gc.collect()
        assert until(lambda: not server._connections) and until(lambda: threading.active_count() <= before)


def test_a_fork_does_not_end_the_connection_of_its_parent():
    obs = observations(2, size=16)
    with server_of(FakeVLA()) as server:
        remote = RemoteVLA(port=server.port, patience=0.0)
        child = os.fork()
        if not child:
            try:
                del remote
                gc.collect()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        (connection,) = server._connections
        remote.forward(obs, TASKS[:2])
        assert server._connections == {connection}


def test_too_many_clients_are_told_so():
    """Not that there is no server; once one has left, the next may come."""
    with PolicyServer(VLAService(FakeVLA()), port=0, max_clients=1) as server:
        first = RemoteVLA(port=server.port)
        with pytest.raises(
            VLAUnavailableError,
            match=r"takes no more clients \(There are 1 clients already; asked for 0.2 s\): .*or start another server",
        ) as caught:
            RemoteVLA(port=server.port, wait=0.2)
        assert "\n" not in str(caught.value)
        first.close()
        RemoteVLA(port=server.port, wait=5.0).forward(observations(2, size=16), TASKS[:2])


@pytest.mark.parametrize(
    "name", ["rlt:", "rlt://", "rlt:host", "rlt://host:port", "rlt://host:8765/path", "rlt://a@b:1"]
)
def test_names_without_an_address(name):
    with pytest.raises(ValueError, match="has no address: write rlt://host:port"):
        load_vla(name)


def test_missing_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "websockets.sync.client", None)
    with pytest.raises(ValueError, match=r"pip install 'rlt\[serve\]'"):
        load_vla("rlt://127.0.0.1:9")


# ------------------------------------------------------------------------------------------------ other servers


def good_metadata(**changes):
    return dict(VLAService(FakeVLA()).metadata) | changes


@pytest.mark.parametrize(
    "metadata, error, says",
    [
        (pack({}), ValueError, "no server of `rlt serve VLA`.*name it openpi://"),
        (pack(good_metadata(version=2)), ValueError, "version 2 of the protocol, this side version 1"),
        (pack(good_metadata(spec={"name": "x"})), ValueError, "describes its VLA otherwise"),
        (pack(good_metadata(spec=good_metadata()["spec"] | {"more": 1})), ValueError, "describes its VLA otherwise"),
        (pack(good_metadata(spec=good_metadata()["spec"] | {"horizon": "8"})), ValueError, "describes its VLA other"),
        (pack(good_metadata(max_batch=0)), ValueError, "does not say max_batch"),
        (pack([1]), VLAUnavailableError, "sent list instead of a map"),
        (b"\xc1", VLAUnavailableError, "cannot be read"),
        ("Traceback", VLAUnavailableError, "greets with 'Traceback'"),
    ],
)  # fmt: skip
def test_greetings(metadata, error, says):
    with Other(metadata) as server, pytest.raises(error, match=says):
        RemoteVLA(port=server.port)


def reply_of(request):
    return VLAService(FakeVLA()).answer(unpack(request))


@pytest.mark.parametrize(
    "answer, error, says",
    [
        (lambda request: pack({}), VLAUnavailableError, "gave no tokens"),
        (lambda request: b"\xc1", VLAUnavailableError, "cannot be read"),
        (lambda request: pack(reply_of(request) | {"kind": [1]}), VLAUnavailableError, "gave no kind"),
        (
            lambda request: pack(reply_of(request) | {"chunk": np.full((1, 8, 7), np.nan, np.float32)}),
            ValueError, "breaks the FrozenVLA contract",
        ),
        (
            lambda request: pack(reply_of(request) | {"chunk": np.zeros((2, 8, 7), np.float32)}),
            ValueError, "breaks the FrozenVLA contract",
        ),
        (lambda request: "Traceback\n  File\nKeyError: 'x'", ValueError, "refuses: KeyError: 'x'"),
    ],
)  # fmt: skip
def test_replies(answer, error, says):
    with Other(pack(good_metadata()), answer) as server, pytest.raises(error, match=says) as caught:
        RemoteVLA(port=server.port).forward(observations(1, size=16), TASKS[:1])
    assert "\n" not in str(caught.value)


def test_too_large_a_reply():
    with (
        Other(pack(good_metadata()), lambda request: bytes(1 << 20)) as server,
        pytest.raises(VLAUnavailableError, match=r"too large.*raise max_bytes"),
    ):
        RemoteVLA(port=server.port, max_bytes=1 << 16, patience=60.0).forward(observations(1, size=16), TASKS[:1])


def test_a_plain_openpi_server_gives_chunks_only():
    obs = observations(3, size=256)
    obs["agentview"][:, -32:, -32:] = np.array([10, 20, 30], np.uint8)[:, None, None, None]  # lower right in raw frames
    with Other(pack({}), plain_openpi) as server:
        vla = load_vla(f"openpi://127.0.0.1:{server.port}")
        assert isinstance(vla, OpenPIVLA) and vla.fingerprint().startswith("openpi-")
        assert (vla.spec.horizon, vla.spec.action_dim, vla.spec.stochastic) == (10, 7, True)
        output = vla.forward(obs, TASKS[:3], seed=[1, 2, 3]).check(vla.spec, 3)
        np.testing.assert_allclose(output.chunk[:, 0, 0], np.clip(obs["state"][:, 0] * 3, -1, 1))
        np.testing.assert_allclose(output.chunk[:, 9, 1], np.array([10, 20, 30]) / 255, rtol=1e-6)
        np.testing.assert_allclose(output.chunk[:, 0, 6], [len(task) / 100 for task in TASKS[:3]], rtol=1e-6)
        assert output.tokens.shape == (3, 0, 1) and output.mask.shape == (3, 0)


@pytest.mark.parametrize("rl_token", ["auto", "mean"])
def test_a_plain_openpi_server_has_no_rl_token(rl_token):
    with Other(pack({}), plain_openpi) as server:
        vla = OpenPIVLA(port=server.port)
    with pytest.raises(ValueError, match=r"The VLA 'openpi' gives no tokens \(openpi's servers .*rl_token='none'"):
        load_rl_token(rl_token, vla)


@pytest.mark.parametrize(
    "reply, says",
    [
        ({}, "gave no actions"),
        ({"actions": np.full((8, 7), np.inf)}, "NaN or infinite"),
        ({"actions": [1]}, "no actions"),
    ],
)
def test_openpi_servers_without_actions(reply, says):
    with Other(pack({}), lambda request: pack(reply)) as server:
        with pytest.raises(ValueError, match=says) as caught:  # its traceback keeps the VLA
            OpenPIVLA(port=server.port)
        assert until(lambda: not server.talking), f"the connection is still there after {caught.value}"
