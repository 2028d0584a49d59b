"""The servers of ``examples/servers``, on stand-ins for the projects that they run in, through our own client."""

import importlib
import sys
import threading
import types
import urllib.request
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("websockets")
pytest.importorskip("msgpack")

from rlt_gym.testing import check_vla
from rlt_gym.vla import load_vla
from rlt_gym.vla.probing import example_observations

FOLDER = Path(__file__).parent.parent / "examples" / "servers"
SERVERS = ("openvla_oft_for_rlt", "openpi_for_rlt", "gr00t_for_rlt")


def numbers_of(*pictures):
    """A few numbers of pictures that change when they are turned."""
    return [
        float(picture[:, : picture.shape[1] // 3, 0].mean() + 3 * picture[:40, :, 1].mean()) / 255
        for picture in pictures
    ]


def hidden_of(numbers, length, width):
    """(1, M, H) that depends on the numbers."""
    values = torch.linspace(-1, 1, length * width).view(1, length, width)
    return values + 0.1 * torch.tensor(numbers).sum()


def module(monkeypatch, name, **attributes):
    for end in range(1, name.count(".") + 1):
        parent = ".".join(name.split(".")[:end])
        if parent not in sys.modules:
            monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    new = types.ModuleType(name)
    vars(new).update(attributes)
    monkeypatch.setitem(sys.modules, name, new)
    parent, _, child = name.rpartition(".")
    monkeypatch.setattr(sys.modules[parent], child, new, raising=False)


def openvla_oft(monkeypatch, seen):
    vla = types.SimpleNamespace(llm_dim=32, language_model=types.SimpleNamespace(model=torch.nn.Module()))
    vla.language_model.model.norm = torch.nn.Identity()

    def get_vla_action(config, vla, processor, obs, task, head, proprio):
        assert config.num_images_in_input == 2 and config.center_crop and config.use_proprio
        seen.append(obs)
        numbers = [
            *numbers_of(obs["full_image"], obs["wrist_image"]),
            float(obs["state"].sum()),
            sum(map(ord, task)) / 999,
        ]
        vla.language_model.model.norm(hidden_of(numbers, 1 + 512 + 1 + len(task) + 56 + 1, 32))
        action = np.append(np.full(6, sum(numbers) / 50), 0.9)  # open
        return [action * (1, 1, 1, 1, 1, 1, step % 2) for step in range(8)]

    parts = {
        name: lambda *args, **kwargs: None for name in ("get_processor", "get_action_head", "get_proprio_projector")
    }
    module(
        monkeypatch,
        "experiments.robot.openvla_utils",
        get_vla=lambda config: vla,
        get_vla_action=get_vla_action,
        **parts,
    )
    return ("PATH", "libero_goal_no_noops"), ([(2, 1), (1, 512), (3, 1), (2, 15), (4, 56), (2, 1)], 32, 8)


class PI0:
    """The calls that openpi's model makes of itself; 3 pictures of 4 tokens, of which one is missing; 20 words."""

    def __init__(self):
        self.config = types.SimpleNamespace(action_horizon=10, action_dim=32)
        self.paligemma_with_expert = types.SimpleNamespace(forward=self.core)

    def embed_prefix(self, images, img_masks, lang_tokens, lang_masks):
        return images, torch.cat([*(mask.repeat(1, 4) for mask in img_masks), lang_masks], dim=1), None

    def core(self, inputs_embeds, use_cache=False):
        prefix, suffix = inputs_embeds
        return [prefix, None] if suffix is None else [None, suffix], "cache"

    def sample_actions(self, numbers, words, noise):
        masks = [torch.ones(1, 1).bool(), torch.ones(1, 1).bool(), torch.zeros(1, 1).bool()]
        prefix, mask, _ = self.embed_prefix(
            hidden_of(numbers, 32, 16), masks, torch.zeros(1, 20), torch.arange(20)[None] < words
        )
        assert mask.shape == (1, 32)
        self.paligemma_with_expert.forward(inputs_embeds=[prefix, None], use_cache=True)
        for _ in range(2):
            self.paligemma_with_expert.forward(inputs_embeds=[None, torch.zeros(1, 10, 8)])
        return 0.1 * noise + sum(numbers) / 50


def openpi(monkeypatch, seen):
    model = PI0()

    def infer(request, noise):
        seen.append({"full_image": request["observation/image"], "wrist_image": request["observation/wrist_image"]})
        task, state = request["prompt"], float(request["observation/state"].sum())
        numbers = [*numbers_of(*seen[-1].values()), state, sum(map(ord, task)) / 999]
        actions = model.sample_actions(numbers, min(20, len(task) // 2), noise)
        return {"actions": actions[:, :7]}

    policy = types.SimpleNamespace(_model=model, infer=infer)
    module(monkeypatch, "openpi.policies.policy_config", create_trained_policy=lambda config, path: policy)
    module(monkeypatch, "openpi.training.config", get_config=str)
    module(monkeypatch, "openpi_client.image_tools", resize_with_pad=lambda picture, height, width: picture)
    return ("pi05_libero", "PATH"), ([(1, 8), (0, 4), (2, 7), (0, 13)], 16, 10)


def gr00t(monkeypatch, seen):
    class Backbone(torch.nn.Module):
        eagle_model = types.SimpleNamespace(image_token_index=99)

        def forward(self, inputs):
            return {
                "backbone_features": inputs["hidden"],
                "backbone_attention_mask": torch.ones(1, inputs["hidden"].shape[1]),
            }

    class Policy:
        def __init__(self, path, embodiment, modality, transform, denoising_steps):
            assert (modality, transform, denoising_steps) == ("modality", "transform", 8)
            self.model = types.SimpleNamespace(backbone=Backbone())

        def get_action(self, obs):
            assert obs["video.image"].shape == (1, 256, 256, 3) and obs["state.gripper"].shape == (1, 2)
            assert obs["state.x"].shape == (1, 1)
            (task,) = obs["annotation.human.action.task_description"]
            seen.append({"full_image": obs["video.image"][0], "wrist_image": obs["video.wrist_image"][0]})
            state = sum(float(obs[key].sum()) for key in obs if key.startswith("state."))
            numbers = [*numbers_of(*seen[-1].values()), state, sum(map(ord, task)) / 999]
            ids = torch.tensor([[99] * 8 + [5] * len(task)])
            output = self.model.backbone({"hidden": hidden_of(numbers, ids.shape[1], 24), "eagle_input_ids": ids})
            output["backbone_features"] = None  # as the action head does
            names = ("x", "y", "z", "roll", "pitch", "yaw")
            actions = {f"action.{name}": sum(numbers) / 50 + 0.1 * torch.randn(16).numpy() for name in names}
            return actions | {"action.gripper": np.arange(16) % 2}

    data = types.SimpleNamespace(modality_config=lambda: "modality", transform=lambda: "transform")
    module(monkeypatch, "gr00t.experiment.data_config", load_data_config=lambda name: data)
    module(monkeypatch, "gr00t.model.policy", Gr00tPolicy=Policy)
    return ("PATH", "config", "new_embodiment", 8), ([(1, 8), (2, 15)], 24, 16)


STAND_INS = dict(zip(SERVERS, (openvla_oft, openpi, gr00t), strict=True))


@pytest.mark.parametrize("name", SERVERS)
def test_a_server(name, monkeypatch, tmp_path):
    seen = []
    arguments, (kinds, width, horizon) = STAND_INS[name](monkeypatch, seen)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")  # openpi's sets it, for its own process
    monkeypatch.syspath_prepend(FOLDER)
    file, helper = importlib.import_module(name), importlib.import_module("rlt_server")
    assert "NEVER RUN ON REAL WEIGHTS" in file.__doc__.splitlines()[1]
    (tmp_path / "weights").write_bytes(b"1")
    identity = helper.fingerprint(tmp_path, "x")
    server = helper.start(file.Policy(*arguments), file.SPEC, identity, port=0)
    port = server.socket.getsockname()[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=10) as reply:
            assert reply.read() == b"OK\n"
        vla = load_vla(f"rlt://127.0.0.1:{port}")
        assert vla.fingerprint() == identity and (vla.spec.token_dim, vla.spec.horizon) == (width, horizon)
        obs = example_observations(vla.spec)
        output = check_vla(vla, obs)
        seen.clear()
        one = {key: value[:1] for key, value in obs.items()}
        output = vla.forward(one, ["open the drawer"], seed=[3])
        assert output.tokens.shape == (1, sum(count for _, count in kinds), width)
        assert [(kind, len(list(places))) for kind, places in groupby(output.kind[0].tolist())] == kinds
        assert torch.equal(output.mask, output.kind != 0)
        for camera, sent in (("agentview", "full_image"), ("wrist", "wrist_image")):
            assert np.array_equal(seen[-1][sent], one[camera][0, ::-1, ::-1])
        if name != "openpi_for_rlt":  # the stand-ins open at every second step, in their own numbers
            assert output.chunk[0, :, 6].tolist() == [1.0, -1.0] * (horizon // 2)
        with pytest.raises(ValueError, match="obs has"):
            vla._connection.ask({"obs": {}, "tasks": ["x"], "seed": None})
    finally:
        server.shutdown()
        for imported in (name, "rlt_server"):
            sys.modules.pop(imported)


def test_the_shared_file(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(FOLDER)
    server = importlib.import_module("rlt_server")
    from rlt_gym.vla.base import TOKEN_KINDS
    from rlt_gym.vla.remote import codec, protocol

    assert server.KINDS == TOKEN_KINDS and protocol.VERSION == 1
    message = {"a": np.arange(6, dtype=np.float16).reshape(2, 3), "b": ["x", 1, None], "c": np.array([True])}
    for read, write in ((codec.unpack, server.pack), (server.unpack, codec.pack)):
        found = read(write(message))
        assert np.array_equal(found["a"], message["a"]) and found["a"].dtype == np.float16
        assert found["b"] == message["b"] and found["c"].dtype == bool
    import msgpack

    evil = {b"__ndarray__": True, b"data": b"12345678", b"dtype": "|O", b"shape": [1]}
    with pytest.raises(ValueError, match="not allowed"):
        server.unpack(msgpack.packb(evil))
    row = (np.ones((2, 3)), np.ones(2, bool), np.ones(2), np.zeros((4, 7)))
    longer = (np.ones((3, 3)), np.array([True, False, True]), np.ones(3), np.full((4, 7), 2.0))
    arrays = server.padded([row, longer])
    assert arrays["mask"].tolist() == [[True, True, False], [True, False, True]]
    assert arrays["tokens"][:, :, 0].tolist() == [[1, 1, 0], [1, 0, 1]] and arrays["chunk"].max() == 1
    with pytest.raises(ValueError, match="NaN, infinite, or too large for float16"):
        server.padded([(np.full((2, 3), 1e6), *row[1:])])
    with pytest.raises(SystemExit, match="download the checkpoint first"):
        server.fingerprint(tmp_path / "nothing")
    (tmp_path / "weights").write_bytes(b"1")
    first = server.fingerprint(tmp_path, "key")
    assert server.fingerprint(tmp_path, "other") != first
    (tmp_path / "weights").write_bytes(b"2")
    assert server.fingerprint(tmp_path, "key") != first
