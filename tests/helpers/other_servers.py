"""Policy servers that are not this package's."""

import threading

import numpy as np
from websockets.sync.server import serve

from rlt_gym.vla.remote.codec import pack, unpack


class Other:
    """A server written for these tests, which shares no code with ours but the codec."""

    def __init__(self, metadata, answer=None):
        #: Clients that are connected.
        self.talking = 0

        def talk(connection):
            self.talking += 1
            try:
                connection.send(metadata)
                for message in connection:
                    connection.send(answer(message))
            finally:
                self.talking -= 1

        self._server = serve(talk, "127.0.0.1", 0, compression=None, max_size=None)
        self.port = self._server.socket.getsockname()[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *unused):
        self._server.shutdown()


def plain_openpi(request):
    """What openpi's server answers, its checks of the form included."""
    obs = unpack(request)
    assert set(obs) == {"observation/image", "observation/wrist_image", "observation/state", "prompt"}
    assert obs["observation/image"].shape == obs["observation/wrist_image"].shape == (224, 224, 3)
    assert obs["observation/image"].dtype == np.uint8 and obs["observation/state"].shape == (8,)
    actions = np.zeros((10, 7))
    actions[:, 0] = obs["observation/state"][0] * 3
    actions[:, 1] = obs["observation/image"][0, 0, 0] / 255  # upper left as openpi turns it
    actions[:, 6] = len(obs["prompt"]) / 100
    return pack({"actions": actions, "policy_timing": {"infer_ms": 1.0}})
