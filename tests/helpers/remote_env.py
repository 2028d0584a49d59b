"""The fake LIBERO seen through a VLA by name, and VLA servers in processes of their own that can be killed."""

import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import gymnasium as gym

from rlt_gym.rl_token.env import RLTokenVectorEnv
from rlt_gym.testing import FakeLiberoVectorEnv
from rlt_gym.vla import load_vla
from rlt_gym.vla.remote.client import RemoteVLA


def make(
    num_envs=1,
    vla="mini",
    rl_token="mean",
    device="cpu",
    chunk_length=4,
    patience=60.0,
    show_tokens=False,
    show_pictures=False,
    show_task=False,
    **kwargs,
):
    """What ``RLToken-LIBERO-v0`` is, without simulators."""
    if isinstance(vla, str) and vla.startswith("rlt:"):
        vla = RemoteVLA.at(vla.removeprefix("rlt:"), device, patience=patience)
    vla = load_vla(vla, device)
    raw = FakeLiberoVectorEnv(num_envs, chunk_length=chunk_length, **kwargs)
    return RLTokenVectorEnv(raw, vla, rl_token, device, show_tokens, show_pictures, show_task)


gym.register("RemoteLibero-v0", vector_entry_point=make)

SERVER = """
import sys
from rlt_gym.vla import load_vla
from rlt_gym.vla.remote.server import PolicyServer, VLAService
server = PolicyServer(VLAService(load_vla(sys.argv[2]), tokens_dtype=sys.argv[3]), port=int(sys.argv[1]))
print(server.port, flush=True)
server.serve_forever()
"""


class VLAServer:
    """A server of a VLA in a process of its own, which :meth:`kill` ends as a crash would."""

    def __init__(self, vla="rlt_gym.testing.vla:FakeVLA", tokens_dtype="float32"):
        self.arguments = [vla, tokens_dtype]
        self.port, self.process = 0, None

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *unused):
        self.kill()

    def start(self):
        helpers = Path(__file__).parent
        environment = os.environ | {
            "PYTHONPATH": f"{helpers.parent.parent}{os.pathsep}{helpers}",
            "RLT_ALLOWED_IMPORTS": "foreign_vla",
        }
        command = [sys.executable, "-c", SERVER, str(self.port), *self.arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        self.port = int(self.process.stdout.readline())
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                assert urllib.request.urlopen(f"http://127.0.0.1:{self.port}/healthz", timeout=5).status == 200
                return
            except OSError:
                time.sleep(0.05)
        raise AssertionError("the server does not start")

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
