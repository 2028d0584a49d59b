"""Messages between a pool and its workers."""

import socket
import threading

import numpy as np
import pytest

from rlt_gym.workers import worker
from rlt_gym.workers.channel import Channel, decode, encode


def test_messages_keep_types_and_may_come_in_pieces():
    left, right = socket.socketpair()
    message = {"array": np.arange(6, dtype=np.float32).reshape(2, 3), "scalar": np.int64(3), "other": [1, "x", None]}
    sender, receiver = Channel(left), Channel(right)
    thread = threading.Thread(target=lambda: [sender.send((number, np.zeros(200_000))) for number in range(3)])
    thread.start()
    assert [receiver.receive(timeout=30)[0] for _ in range(3)] == [0, 1, 2]
    thread.join()
    sender.send(message)
    back = receiver.receive(timeout=30)
    assert np.array_equal(back["array"], message["array"]) and back["array"].dtype == np.float32
    assert back["array"].flags.writeable and type(back["scalar"]) is np.int64 and back["other"] == message["other"]
    with pytest.raises(TimeoutError):
        receiver.receive(timeout=0.01)
    sender.close()
    sender.close()
    with pytest.raises(EOFError):
        receiver.receive(timeout=30)


class InterruptedSocket:
    """A socket whose n-th call of a method does what it is asked for and is then interrupted."""

    def __init__(self, wrapped, method, at):
        self.wrapped, self.method, self.at = wrapped, method, at

    def __getattr__(self, name):
        original = getattr(self.wrapped, name)
        if name != self.method:
            return original

        def call(*args):
            answer = original(*args)
            self.at -= 1
            if self.at == 0:
                raise KeyboardInterrupt
            return answer

        return call


@pytest.mark.parametrize(
    ("method", "at", "usable"), [("recv", 1, True), ("recv_into", 1, False), ("recv_into", 2, False)]
)
def test_an_interrupt_inside_a_message_ends_the_connection(method, at, usable):
    """While it waits nothing is lost; later the rest of a message would be read as the beginning of the next one."""
    left, right = socket.socketpair()
    sender, receiver = Channel(left), Channel(InterruptedSocket(right, method, at))
    sender.send("first")
    sender.send("second")
    with pytest.raises(KeyboardInterrupt):
        receiver.receive(timeout=30)
    if usable:
        assert [receiver.receive(timeout=30), receiver.receive(timeout=30)] == ["first", "second"]
    else:
        with pytest.raises(OSError):
            receiver.receive(timeout=30)
        with pytest.raises(OSError):
            sender.send("third")  # the other end learns of it


def test_an_interrupt_while_sending_ends_the_connection():
    left, right = socket.socketpair()
    sender, receiver = Channel(InterruptedSocket(left, "sendall", 1)), Channel(right)
    with pytest.raises(KeyboardInterrupt):
        sender.send("whole")
    assert receiver.receive(timeout=30) == "whole"
    with pytest.raises(OSError):
        sender.send("next")
    with pytest.raises(EOFError):
        receiver.receive(timeout=30)


def test_every_kind_of_value_comes_back_as_it_was():
    message = (
        1, -2.5, True, None, "\u00e4\n", b"\x00\xff", float("inf"), 2**70, (), [], {}, [(1, [2])],
        {3: "int", (1, 2): {"x": ()}}, {"dict": 1}, {"tuple": [1]}, {"array": ["<f4", [1], 4]},
        np.bool_(True), np.float64(0.1), np.zeros((0, 3), np.uint8),
        np.arange(8, dtype=np.float16)[::2], np.array(5), np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    )  # fmt: skip
    content = encode(message)
    text = int.from_bytes(content[8:16], "big")
    assert int.from_bytes(content[:8], "big") == len(content) - 16
    back = decode(content[16:], text)
    assert type(back) is tuple and len(back) == len(message)
    for ours, theirs in zip(back, message, strict=True):
        assert type(ours) is type(theirs)
        if isinstance(theirs, np.ndarray | np.generic):
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and np.array_equal(ours, theirs)
        else:
            assert ours == theirs
    assert np.isnan(decode(encode(float("nan"))[16:], 3))


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array([object()]), np.array(["text"]), lambda: 0])
def test_what_is_no_plain_data_is_refused(value):
    left, right = socket.socketpair()
    with pytest.raises(TypeError, match="messages to and from workers hold plain data and arrays, got"):
        Channel(left).send({"x": [value]})
    left.close()
    assert right.recv(1) == b""  # nothing was sent


def test_a_pickle_is_not_executed(tmp_path):
    """Whoever writes to the socket gets an error of JSON, not his code run."""
    import os
    import pickle
    import struct

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    left, right = socket.socketpair()
    content = pickle.dumps(Evil())
    left.sendall(struct.pack("!QQ", len(content), len(content)) + content)
    with pytest.raises(ValueError):
        Channel(right).receive(timeout=30)
    assert not (tmp_path / "made").exists()


def test_an_answer_that_is_no_plain_data_is_an_error_of_the_worker(monkeypatch):
    class Strange:
        def __init__(self, *settings):
            pass

        def look(self):
            return object()

    monkeypatch.setattr(worker, "Worker", Strange)
    monkeypatch.setattr(worker, "_trim_log", lambda: None)
    left, right = socket.socketpair()
    thread = threading.Thread(target=worker.serve, args=(Channel(right), None, {}))
    thread.start()
    owner = Channel(left)
    for number in (1, 2):  # it answers the next question as well
        owner.send((number, "look", {}))
        *answer, text = owner.receive(timeout=30)
        assert answer == [number, "error"] and "messages to and from workers hold plain data" in text
    owner.close()
    thread.join()
