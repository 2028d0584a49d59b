"""Requests of many clients in one forward pass: everybody gets his own rows, his own error, and an answer."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

pytest.importorskip("websockets")
pytest.importorskip("msgpack")

from vla_helpers import observations, tiny_vla

from rlt_gym.testing import FakeVLA
from rlt_gym.vla.remote.client import RemoteVLA
from rlt_gym.vla.remote.server import PolicyServer, VLAService

TASK = "open the drawer"


class Gated(FakeVLA):
    """Holds its first forward pass until it is let go, so that all others wait together."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.began, self.go = threading.Event(), threading.Event()

    def forward(self, obs, tasks, *, seed=None):
        self.began.set()
        assert self.go.wait(10)
        if "raise" in tasks:
            raise RuntimeError("no memory")
        return super().forward(obs, tasks, seed=seed)


def together(vla, service, requests):
    """Answer the first request alone, and all others while it keeps the VLA busy."""
    with ThreadPoolExecutor(len(requests)) as pool:
        first = pool.submit(service.answer, requests[0])
        assert vla.began.wait(10)
        others = [pool.submit(service.answer, request) for request in requests[1:]]
        while len(service._batcher._waiting) < len(others):
            time.sleep(0.001)
        vla.go.set()
        return [answer.exception(timeout=10) or answer.result() for answer in [first, *others]]


def request(number, rows=1, size=16, seeded=True, task=TASK):
    obs = observations(rows, size=size)
    obs["state"] = np.full((rows, 8), number, np.float32)
    return {"obs": obs, "tasks": [task] * rows, "seed": [100 * number + row for row in range(rows)] if seeded else None}


def alone(sent):
    return FakeVLA(stochastic=True).forward(sent["obs"], sent["tasks"], seed=sent["seed"])


def test_requests_that_wait_together_are_one_forward_pass_of_their_own_rows():
    vla = Gated(stochastic=True)
    sent = [request(1), request(2, rows=3), request(3, size=24), request(4), request(5, rows=2), request(6, rows=2)]
    answers = together(vla, VLAService(vla, max_batch=6), sent)
    # of the five that wait, 2 + 4 + 5 have six rows; 3 has pictures of another size, 6 no room
    assert sorted(vla.calls) == [1, 1, 2, 6]
    for given, answer in zip(sent, answers, strict=True):
        assert np.array_equal(answer["chunk"], alone(given).chunk.numpy())


def test_rows_with_and_without_seeds_are_not_joined():
    vla = Gated()
    answers = together(vla, VLAService(vla), [request(1), request(2), request(3, seeded=False), request(4)])
    assert sorted(vla.calls) == [1, 1, 2] and all("chunk" in answer for answer in answers)


def test_none_joins_nothing():
    vla = Gated()
    together(vla, VLAService(vla, max_wait_ms=None), [request(number) for number in range(5)])
    assert vla.calls == [1] * 5


def test_an_error_is_told_to_whom_it_belongs():
    vla = Gated(stochastic=True)
    sent = [request(1), request(2), request(3, task="raise"), request(4)]
    answers = together(vla, VLAService(vla), sent)
    assert isinstance(answers[2], RuntimeError) and str(answers[2]) == "no memory"
    for index in (0, 1, 3):
        assert np.array_equal(answers[index]["chunk"], alone(sent[index]).chunk.numpy())


class Failing(Gated):
    """Joined requests fail; a single one of the task "slow" takes until it is let go, and then may end its thread."""

    def __init__(self, ends=None):
        super().__init__(stochastic=True)
        self.ends, self.fail, self.later = ends, threading.Event(), threading.Event()

    def forward(self, obs, tasks, *, seed=None):
        if len(tasks) > 1:
            assert self.fail.wait(10)
            raise RuntimeError("no memory")
        if "slow" in tasks:
            assert self.later.wait(10)
            if self.ends is not None:
                raise self.ends
        return super().forward(obs, tasks, seed=seed)


def submitted(pool, vla, service, sent):
    """Send the first request, and then the others in this order while the VLA is busy."""
    asked = [pool.submit(service.answer, sent[0])]
    assert vla.began.wait(10)
    for one in sent[1:]:
        asked.append(pool.submit(service.answer, one))
        while len(service._batcher._waiting) < len(asked) - 1:
            time.sleep(0.001)
    vla.go.set()
    return asked


def test_after_a_failure_nobody_waits_for_those_who_come_later():
    """2 runs the joined batch, which fails; it has its own error, and 3 its rows, while 4 still runs."""
    vla = Failing()
    vla.fail.set()
    service = VLAService(vla)
    sent = [request(1), request(2, task="raise"), request(3), request(4, task="slow"), request(5)]
    with ThreadPoolExecutor(len(sent)) as pool:
        asked = submitted(pool, vla, service, sent)
        assert str(asked[1].exception(timeout=5)) == "no memory"
        assert np.array_equal(asked[2].result(timeout=5)["chunk"], alone(sent[2]).chunk.numpy())
        assert not asked[3].done() and not asked[4].done()
        vla.later.set()
        for index in (3, 4):
            assert np.array_equal(asked[index].result(timeout=10)["chunk"], alone(sent[index]).chunk.numpy())
    assert service._batcher._free == [vla]


def test_after_a_failure_a_free_copy_helps():
    """While 3 runs on one copy, 4 runs on the other one, which has had nothing to do since 2."""
    vla, copy = Failing(), Gated(stochastic=True)
    service = VLAService(copy, copies=[vla])
    sent = [request(1), request(2), request(3, task="slow"), request(4)]
    with ThreadPoolExecutor(len(sent)) as pool:
        asked = [pool.submit(service.answer, sent[0])]
        assert vla.began.wait(10)
        asked.append(pool.submit(service.answer, sent[1]))
        assert copy.began.wait(10)
        for one in sent[2:]:
            asked.append(pool.submit(service.answer, one))
            while len(service._batcher._waiting) < len(asked) - 2:
                time.sleep(0.001)
        vla.go.set()  # and with it joins 3 and 4, as soon as it has answered 1
        assert "chunk" in asked[0].result(timeout=10)
        while service._batcher._waiting:
            time.sleep(0.001)
        copy.go.set()
        assert "chunk" in asked[1].result(timeout=10)
        vla.fail.set()
        assert np.array_equal(asked[3].result(timeout=10)["chunk"], alone(sent[3]).chunk.numpy())
        assert not asked[2].done()
        vla.later.set()
        assert "chunk" in asked[2].result(timeout=10)
    assert len(service._batcher._free) == 2


@pytest.mark.parametrize("interrupted", [1, 2])
def test_an_interrupt_leaves_nobody_waiting(interrupted):
    """It ends a thread that runs the VLA after a failure; all others get their rows."""
    vla = Failing(ends=KeyboardInterrupt())
    vla.fail.set(), vla.later.set()
    service = VLAService(vla)
    sent = [request(number, task="slow" if number == interrupted else TASK) for number in range(4)]
    with ThreadPoolExecutor(len(sent)) as pool:
        asked = submitted(pool, vla, service, sent)
        assert isinstance(asked[interrupted].exception(timeout=10), KeyboardInterrupt)
        for index in {0, 1, 2, 3} - {interrupted}:
            assert "chunk" in asked[index].result(timeout=10)
    assert service._batcher._free == [vla]


def test_an_interrupt_of_a_joined_pass_is_told_to_all():
    class Interrupted(Gated):
        def forward(self, obs, tasks, *, seed=None):
            if len(tasks) > 1:
                raise KeyboardInterrupt
            return super().forward(obs, tasks, seed=seed)

    vla = Interrupted()
    service = VLAService(vla)
    with ThreadPoolExecutor(4) as pool:
        asked = submitted(pool, vla, service, [request(number) for number in range(4)])
        assert isinstance(asked[1].exception(timeout=10), KeyboardInterrupt)
        for index in (2, 3):
            assert str(asked[index].exception(timeout=10)) == "The VLA was interrupted: KeyboardInterrupt."
    assert service._batcher._free == [vla]


def test_a_request_waits_for_others_no_longer_than_it_may():
    vla = FakeVLA()
    service = VLAService(vla, max_batch=2, max_wait_ms=1000)
    with ThreadPoolExecutor(2) as pool:
        began = time.monotonic()
        list(pool.map(service.answer, [request(1), request(2)]))
    assert vla.calls == [2] and time.monotonic() - began < 0.9  # full: it does not wait on
    service = VLAService(vla, max_wait_ms=100)
    began = time.monotonic()
    service.answer(request(1))
    assert 0.1 <= time.monotonic() - began < 0.9


def test_a_copy_answers_while_the_first_one_is_busy():
    busy, free = Gated(), FakeVLA()
    service = VLAService(free, copies=[busy])  # the last one is asked first
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(service.answer, request(1))
        assert busy.began.wait(10)
        assert "chunk" in pool.submit(service.answer, request(2)).result(timeout=10) and not first.done()
        busy.go.set()
        assert "chunk" in first.result(timeout=10)
    assert free.calls == [1] and busy.calls == [1]


def test_a_copy_is_the_same_vla():
    with pytest.raises(ValueError, match="fingerprint"):
        VLAService(FakeVLA(), copies=[FakeVLA(horizon=9)])
    with pytest.raises(ValueError, match="max_wait_ms must be from 0 to 1000, or None, got -1"):
        VLAService(FakeVLA(), max_wait_ms=-1)


def test_many_clients_get_what_one_process_computes():
    vla = tiny_vla()
    with PolicyServer(VLAService(vla, tokens_dtype="float32", max_wait_ms=5), port=0) as server:

        def play(number):
            remote, obs = RemoteVLA(port=server.port), observations(3)
            obs["state"] = obs["state"] + np.float32(number / 10)
            for _ in range(3):
                there, here = remote.forward(obs, [TASK] * 3), vla.forward(obs, [TASK] * 3)
                torch.testing.assert_close(there.chunk, here.chunk, atol=1e-6, rtol=0)
                torch.testing.assert_close(there.tokens, here.tokens, atol=1e-5, rtol=1e-5)
            remote.close()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(play, range(8)))


def test_an_exception_reaches_every_waiting_client_within_a_second():
    vla = Gated()
    with PolicyServer(VLAService(vla), port=0) as server, ThreadPoolExecutor(8) as pool:
        clients = [RemoteVLA(port=server.port) for _ in range(8)]
        asked = [pool.submit(client.forward, observations(1, 16), ["raise"]) for client in clients]
        while len(server._service._batcher._waiting) < 7:
            time.sleep(0.001)
        vla.go.set()
        began = time.monotonic()
        for answer in asked:
            assert "RuntimeError: no memory" in str(answer.exception(timeout=10))
        assert time.monotonic() - began < 1.0


def test_closing_answers_what_is_pending_and_disconnects_who_has_waited_too_long():
    for lets_go in (True, False):
        vla = Gated()
        server = PolicyServer(VLAService(vla), port=0).start()
        with ThreadPoolExecutor(5) as pool:
            clients = [RemoteVLA(port=server.port, patience=0.1) for _ in range(4)]
            asked = [pool.submit(client.forward, observations(1, 16), [TASK]) for client in clients]
            while len(server._service._batcher._waiting) < 3:
                time.sleep(0.001)
            closed = pool.submit(server.close, 5.0 if lets_go else 0.1)
            if lets_go:
                time.sleep(0.05)
                vla.go.set()
                assert all(answer.result(timeout=10).chunk.shape == (1, 8, 7) for answer in asked)
            else:
                assert all("No VLA server" in str(answer.exception(timeout=10)) for answer in asked)
                vla.go.set()
            closed.result(timeout=15)
