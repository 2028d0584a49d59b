"""rlt serve: a VLA by name, and the practiced policy of a run under openpi's protocol."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from dataclasses import replace

import numpy as np
import pytest
import torch
from run_helpers import SMALL_RLT, SMALL_SB3, environment, quick
from vla_helpers import TINY, write_fake_token

pytest.importorskip("websockets")
pytest.importorskip("msgpack")

import msgpack
import remote_env  # (registers RemoteLibero-v0)
from websockets.sync.client import connect

from rlt_gym.rl_token.decoder import RLTokenDecoder
from rlt_gym.rl_token.encoder import RLTokenConfig, RLTokenEncoder
from rlt_gym.rl_token.env import RLTokenVectorEnv
from rlt_gym.rl_token.io import save_rl_token
from rlt_gym.testing import FakeLiberoVectorEnv, FakeVLA
from rlt_gym.vla import load_vla, register_vla
from rlt_gym.vla.base import forward_seed
from rlt_gym.vla.mini.model import MiniVLA, MiniVLANet
from rlt_gym.vla.registry import VLAS
from rlt_gym.vla.remote.openpi import write_observation
from rlt_gym.vla.remote.server import PolicyServer
from rlt_sb3.cli.main import main
from rlt_sb3.experiment.checkpoints import all_checkpoints
from rlt_sb3.experiment.config import EvalSettings, load_config, save_config
from rlt_sb3.experiment.models import as_predictor, load_model
from rlt_sb3.experiment.serve import RunService, ServeConfig, make_server
from rlt_sb3.experiment.train import train

assert remote_env.make


@pytest.fixture(scope="module", autouse=True)
def fake_vla():
    register_vla("fake-vla", lambda device: FakeVLA(stochastic=True).to(device))
    yield
    VLAS.remove("fake-vla")


def trained(out, algorithm="rlt", token=None, vla=None, tasks=None):
    """
    A run whose actor plays something else than the VLA.

    With a token or a VLA, it has trained that. With several tasks, it knows which one it plays.
    """
    policy_kwargs = {"net_arch": [16], "n_critics": 2} | ({} if token is None else {"train_token": {}})
    if vla is not None:
        policy_kwargs["train_vla"] = {"part": "all"}
    settings = {"rlt": SMALL_RLT | {"policy_kwargs": policy_kwargs}, "tqc": SMALL_SB3}
    config = quick(
        out, "RemoteLibero-v0", total_chunks=60, evaluation=EvalSettings(2, 2, 60, videos=False),
        algorithm=algorithm, **settings,
    )  # fmt: skip
    config.env.vla = "fake-vla"
    config.env.kwargs = {"image_size": 24}
    config.env.task_ids, config.env.show_task = tasks, tasks is not None or None
    if token is not None:
        config.env.rl_token = str(token)
        config.env.show_tokens = True
    if vla is not None:
        config.env.vla, config.env.rl_token, config.env.show_pictures = (
            str(vla),
            str(vla.with_name("token.safetensors")),
            True,
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlt_sb3.experiment.report.write_report", lambda run: None)
        folder = train(config).run
    # sixty chunks teach little: move the last model away from the VLA, so that one cannot be taken for the other
    model = load_model(algorithm, folder / "model.zip", device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in getattr(model.policy, "training_actor", model.actor).parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    model.save(folder / "model.zip")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def tqc_run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("run"), "tqc")


@pytest.fixture(scope="module")
def token_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return trained(folder, token=write_fake_token(folder / "token.safetensors"))


@pytest.fixture(scope="module")
def vla_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    vla = MiniVLA(MiniVLANet(replace(TINY, image_size=16)), {"frame_size": 24, "render": None})
    vla.save(folder / "vla.safetensors")
    config = RLTokenConfig(vla.spec.token_dim, vla.spec.max_tokens, width=12, layers=1, heads=2)
    encoder = RLTokenEncoder(config, vla.fingerprint(), "mini")
    save_rl_token(folder / "token.safetensors", encoder, RLTokenDecoder(config))
    return trained(folder, vla=folder / "vla.safetensors")


@pytest.fixture(scope="module")
def task_run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("run"), tasks=[0, 2])


@pytest.fixture
def world():
    """Raw environment of two tasks, whose pictures are of the run's size."""
    env = FakeLiberoVectorEnv(2, task_ids=[0, 2], chunk_length=4, image_size=24, init_states="eval")
    yield env
    env.close()


def detailed(obs, seed):
    """Pictures in which a turn shows."""
    rng = np.random.default_rng(seed)
    pictures = {key: rng.integers(0, 256, value.shape, dtype=np.uint8) for key, value in obs.items() if value.ndim == 4}
    return {**obs, **pictures}


@pytest.mark.parametrize("which", ["run", "tqc_run", "token_run", "vla_run", "task_run"])
@pytest.mark.parametrize("model", ["best", "last"])
def test_it_plays_what_the_run_s_model_plays(which, model, world, request):
    """The same observation through the run's environment, and the same seed of the noise."""
    folder = request.getfixturevalue(which)
    algorithm = load_config(folder / "config.yaml").algorithm
    service = RunService(folder, model)
    file = folder / {"best": "best_model.zip", "last": "model.zip"}[model]
    predictor = as_predictor(algorithm, load_model(algorithm, file, device="cpu"))
    made = load_config(folder / "config.yaml").env
    shown = {name: bool(getattr(made, name)) for name in ("show_tokens", "show_pictures", "show_task")}
    env = RLTokenVectorEnv(world, made.vla, made.rl_token or "mean", **shown)
    raw, infos = world.reset()
    for step in range(3):
        raw = detailed(raw, step)
        env._remember(infos)
        features = env._features([raw], env._instruction, env._numbers)
        expected, _ = predictor.predict(features, deterministic=True)
        if model == "last":
            assert np.abs(expected - features["vla_ref"]).max() > 0.1  # or the VLA alone would pass
        for row in range(2):
            obs = {**raw, "state": raw["proprio"]}
            seed = forward_seed(*env._numbers[row, :2].tolist())
            sent = write_observation(obs, env._instruction[row], row, size=None, seed=seed)
            reply = service.answer(sent)
            # a batch of two is rounded in another way than one row, and the fake's tokens are large
            np.testing.assert_allclose(reply["actions"], expected[row], atol=1e-3)
            assert reply["actions"].dtype == np.float32 and reply["actions"].shape == (4, 7)
        raw, *_, infos = world.step(expected)


def test_metadata(run):
    metadata = RunService(run).metadata
    assert metadata["protocol"] == "openpi" and metadata["chunk_length"] == 4 and metadata["action_dim"] == 7
    assert metadata["frame_size"] == 128 and "run toy" in metadata["policy"]
    stored = json.loads((run / "evaluations.json").read_text())["fingerprint"]
    assert metadata["fingerprint"] == stored


def test_an_instruction_that_the_run_has_not_practiced_gets_the_vla_s_chunk(task_run, run, world):
    raw, infos = world.reset()
    raw, service = detailed(raw, 0), RunService(task_run, "last")
    assert sorted(service.metadata["instructions"]) == sorted(infos["instruction"])
    assert "instructions" not in RunService(run).metadata
    obs = {**raw, "state": raw["proprio"]}
    replies = {
        task: service.answer(write_observation(obs, task, size=None, seed=3))
        for task in (infos["instruction"][0], "fold the towel")
    }
    assert [reply["practiced"] for reply in replies.values()] == [True, False]
    output = service.vla.forward({key: value[:1] for key, value in obs.items()}, ["fold the towel"], seed=[3])
    np.testing.assert_allclose(replies["fold the towel"]["actions"], output.chunk[0, :4], atol=1e-6)


@pytest.mark.parametrize(
    "tasks, says",
    [
        (None, "lacks the tasks' instructions, which show_task needs"),
        ({"0": "lift", "2": "lift"}, "Two tasks of the run .* have the same instruction"),
    ],
)
def test_runs_whose_tasks_requests_cannot_name(task_run, tmp_path, tasks, says):
    folder = change(task_run, tmp_path)
    results = folder / "evaluations.json"
    results.write_text(json.dumps(json.loads(results.read_text()) | {"tasks": tasks}))
    with pytest.raises(ValueError, match=says) as caught:
        RunService(folder)
    assert "\n" not in str(caught.value)


def test_a_client_written_by_hand(run, world):
    """Nothing of this package at the client's end: openpi's text of the protocol, msgpack and websockets."""

    def array(value):
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}

    def decode(item):
        if b"__ndarray__" in item:
            return np.ndarray(item[b"shape"], np.dtype(item[b"dtype"]), item[b"data"])
        return item

    rng = np.random.default_rng(0)
    picture = rng.integers(0, 256, (224, 224, 3), dtype=np.uint8)
    request = {
        "observation/image": array(picture), "observation/wrist_image": array(picture),
        "observation/state": array(np.zeros(8)), "prompt": "put the bowl on the stove",
    }  # fmt: skip
    with (
        PolicyServer(RunService(run), port=0) as server,
        connect(f"ws://127.0.0.1:{server.port}", compression=None, max_size=None, proxy=None) as client,
    ):
        assert msgpack.unpackb(client.recv(), object_hook=decode)["chunk_length"] == 4
        client.send(msgpack.packb(request))
        reply = msgpack.unpackb(client.recv(), object_hook=decode)
        assert reply["actions"].shape == (4, 7) and np.abs(reply["actions"]).max() <= 1
        assert np.array_equal(reply["state"], np.zeros(8))
        assert set(reply) == {"actions", "state", "policy_timing", "server_timing"}
        client.send(msgpack.packb({**request, "observation/state": array(np.zeros(7))}))
        assert client.recv() == "observation/state must be 8 numbers, got float64 (7,)."
        client.send(msgpack.packb(request))
        assert isinstance(client.recv(), bytes)


@pytest.mark.parametrize("which", ["run", "task_run"])
def test_this_package_s_own_client_of_openpi_s_protocol(which, request):
    """The policy of a run, as the reference policy of another environment."""
    with PolicyServer(RunService(request.getfixturevalue(which)), port=0) as server:
        vla = load_vla(f"openpi://127.0.0.1:{server.port}")
        assert vla.spec.horizon == 4
        with pytest.raises(ValueError, match="no server of `rlt serve VLA`"):
            load_vla(f"rlt://127.0.0.1:{server.port}")


OPENPI = """
import sys
import numpy as np
from openpi_client import image_tools
from openpi_client.websocket_client_policy import WebsocketClientPolicy

client = WebsocketClientPolicy("127.0.0.1", int(sys.argv[1]), api_key="secret")
assert client.get_server_metadata()["chunk_length"] == 4
picture = np.random.default_rng(0).integers(0, 256, (256, 256, 3), dtype=np.uint8)
picture = image_tools.convert_to_uint8(image_tools.resize_with_pad(picture, 224, 224))
element = {"observation/image": picture, "observation/wrist_image": picture, "observation/state": np.zeros(8),
           "prompt": "put the bowl on the stove"}
first = client.infer(element)["actions"]
assert first.shape == (4, 7) and first.dtype == np.float32
try:
    client.infer({**element, "prompt": 3})
except RuntimeError as error:
    assert str(error) == "Error in inference server:\\nprompt must be a text, got int.", error
else:
    raise AssertionError("no error")
assert client.infer(element)["actions"].shape == (4, 7)
print("ok")
"""


@pytest.mark.skipif(
    "RLT_OPENPI_PYTHON" not in os.environ, reason="RLT_OPENPI_PYTHON names no Python with openpi-client"
)
def test_pypi_s_openpi_client(run):
    """In an environment of its own, since it needs numpy < 2."""
    with PolicyServer(RunService(run), port=0, key="secret") as server:
        done = subprocess.run(
            [os.environ["RLT_OPENPI_PYTHON"], "-c", OPENPI, str(server.port)],
            capture_output=True, text=True, timeout=120, cwd="/",
        )  # fmt: skip
    assert done.stdout == "ok\n", done.stderr[-2000:]


def change(run, out, **changes):
    """A copy of the run with other settings."""
    import shutil

    shutil.copytree(run, out / "changed")
    config = load_config(run / "config.yaml")
    for name, value in changes.items():
        setattr(config.env, name, value)
    save_config(config, out / "changed" / "config.yaml")
    return out / "changed"


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"vla": "mini"}, "made with other frozen weights than the environment's"),
        ({"id": "FakeRLToken-v0"}, "'FakeRLToken-v0' of the run has no frozen VLA and RL token of its own"),
        ({"id": "Nothing-v0"}, "'Nothing-v0' of the run cannot be found"),
        ({"kwargs": {"critical_phase": "a:b"}}, "only a simulator can tell"),
    ],
)
def test_runs_that_cannot_be_served(run, tmp_path, changes, says):
    with pytest.raises(ValueError, match=says) as caught:
        RunService(change(run, tmp_path, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["{run}", "--model", "better"], "There is no model better"),
        (["{empty}"], "There is no {empty}/config.yaml. A run is the folder"),
        (["maxi"], "Unknown VLA 'maxi'"),
        (["runs/nope"], "a FrozenVLA object. The folder of a run is allowed, too; there is none at runs/nope."),
        (["nope.safetensors"], "There are no VLA weights at nope.safetensors; train one with"),
        (["mini", "--host", "0.0.0.0"], "needs a key: set the environment variable RLT_SERVE_KEY"),
        (["mini", "--port", "70000"], "port must be from 0 to 65535, got 70000"),
        (["mini", "--max_mb", "0"], "max_mb must be at least 1, got 0"),
        (["mini", "--tokens_dtype", "int8"], "tokens_dtype must be one of float16, float32"),
        (["mini", "--max_batch", "0"], "max_batch must be from 1 to 1024, got 0"),
    ],
)
def test_bad_settings_are_one_line(arguments, says, run, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RLT_SERVE_KEY", raising=False)
    names = {"run": run, "empty": tmp_path}
    assert main(["serve", *(argument.format(**names) for argument in arguments)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("rlt serve: ") and says.format(**names) in line


def test_missing_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "websockets.sync.server", None)
    assert main(["serve", "mini", "--port", "0"]) == 2
    assert "rlt serve: Policy servers need websockets: pip install 'rlt[serve]'." in capsys.readouterr().err


def test_the_key_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("RLT_SERVE_KEY", "secret")
    server = make_server(ServeConfig("fake-vla", host="0.0.0.0", port=0))
    assert server._key == "secret"
    server.close()


def test_the_command(tmp_path):
    """Serves until it is interrupted, says where, and ends with 130 and without a traceback."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rlt_sb3", "serve", "mini", "--port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    try:
        port = int(re.fullmatch(r"Serving mini at 127.0.0.1:(\d+); Ctrl-C ends it.\n", process.stdout.readline())[1])
        assert load_vla(f"rlt://127.0.0.1:{port}").fingerprint() == load_vla("mini").fingerprint()
        assert urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=10).read() == b"OK\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
        assert process.stderr.read() == "Interrupted.\n"
    finally:
        process.kill()
        process.wait()


def test_a_checkpoint_can_be_served(run):
    assert RunService(run, str(all_checkpoints(run)[-1].model)).chunk_length == 4
