"""Messages between a pool and its workers."""

import socket
import threading

import numpy as np
import pytest

from rlt_gym.workers.channel import Channel, encode


def test_messages_survive_another_numpy_and_partial_reads():
    """Pickles name no module of numpy, whose names differ between versions; a message may come in pieces."""
    left, right = socket.socketpair()
    message = {"array": np.arange(6, dtype=np.float32).reshape(2, 3), "scalar": np.int64(3), "other": [1, "x", None]}
    assert b"numpy" not in encode(message)
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
