"""Policies made of transformers' models: two OFT-style ones of the real architectures, tiny and with random weights."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")
from tiny_hf import HIGH, LOW, libero_frames, write_qwen_oft

from rlt_gym.rl_token.io import load_rl_token
from rlt_gym.testing import check_vla
from rlt_gym.vla import VLASpec, load_vla
from rlt_gym.vla.hf import HFVLA
from rlt_gym.vla.pretrained import hf_class, load_pretrained, load_processor, read_statistics

sys.path.append(str(Path(__file__).parents[3] / "examples" / "vlas"))
import qwen_oft

TASKS = ["open the drawer", "put the bowl on the plate", "lift it"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_qwen_oft(tmp_path_factory.mktemp("qwen_oft"), qwen_oft.Head)


def qwen(path, **kwargs):
    return qwen_oft.QwenOFT(path, **{"dtype": "float32", "horizon": 4} | kwargs)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-4), ("bfloat16", 5e-2)])
def test_qwen_oft_obeys_the_contract(checkpoint, monkeypatch, dtype, tolerance):
    """By its name, as a user names it."""
    monkeypatch.setenv("RLT_ALLOWED_IMPORTS", "qwen_oft")
    kwargs = {"path": str(checkpoint), "dtype": dtype, "horizon": 4, "max_batch": 3}
    vla = load_vla("qwen_oft:QwenOFT", "cpu", kwargs)
    output = check_vla(vla, libero_frames(3), TASKS, tolerance=tolerance)
    assert output.tokens.dtype == getattr(torch, dtype) and output.tokens.shape[2] == 64
    counts = [(output.kind == number).sum(dim=1).tolist() for number in range(5)]
    assert counts[1] == [128] * 3 and counts[4] == [4] * 3  # 2 pictures of 64 tokens, 4 queries
    assert counts[0][0] == len(TASKS[1]) - len(TASKS[0]) and counts[0][1] == 0  # one token per letter
    assert set(output.chunk[..., 6].unique().tolist()) <= {-1.0, 1.0}
    assert load_rl_token("mean", vla)(output).shape == (3, 64)


def test_qwen_oft_over_the_wire(checkpoint):
    pytest.importorskip("websockets")
    from rlt_gym.vla.remote.server import PolicyServer, VLAService

    vla, obs = qwen(checkpoint, max_batch=2), libero_frames(3)
    with PolicyServer(VLAService(vla, tokens_dtype="float32"), port=0) as server:
        remote = load_vla(f"rlt://127.0.0.1:{server.port}")
        there, here = check_vla(remote, obs, TASKS), check_vla(vla, obs, TASKS)
    assert remote.fingerprint() == vla.fingerprint() and torch.equal(there.kind, here.kind)
    torch.testing.assert_close(there.tokens[there.mask], here.tokens[here.mask], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(there.chunk, here.chunk, atol=1e-5, rtol=1e-5)


def test_qwen_oft_is_its_parts(checkpoint, tmp_path):
    """Written again without the base class: pictures, one forward pass, head, q01/q99, gripper."""
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint).eval()
    processor, head = AutoProcessor.from_pretrained(checkpoint), qwen_oft.Head(64, 7)
    head.load_state_dict(load_file(checkpoint / "head.safetensors"))
    obs, query = libero_frames(6), processor.tokenizer.convert_tokens_to_ids("🔍")
    all_states, raw = [], []
    for row, task in enumerate(TASKS * 2):
        pictures = [
            Image.fromarray(obs[camera][row][::-1, ::-1].copy()).resize((224, 224), Image.Resampling.BILINEAR)
            for camera in ("agentview", "wrist")
        ]
        picture = "<|vision_start|><|image_pad|><|vision_end|>"
        text = (
            f"<|im_start|>user\n{picture}{picture}{task} Please predict the next 4 robot actions: "
            "<action>🔍🔍🔍🔍<action>.<|im_end|>\n<|im_start|>assistant\n"
        )
        inputs = processor(text=[text], images=[pictures], return_tensors="pt")
        with torch.no_grad():
            states = model(**inputs, output_hidden_states=True).hidden_states[-1][0]
            raw.append(head(states[inputs["input_ids"][0] == query]).numpy())
        all_states.append(states)
    shift = 0.5 - float(np.median(np.stack(raw)[..., 6]))  # so that it is opened and closed

    path = changed(checkpoint, tmp_path, "head.safetensors", lambda t: t["5.bias"][6].add_(shift))
    output = qwen(path).forward(obs, TASKS * 2)
    for row, normalized in enumerate(raw):
        normalized[:, 6] += shift
        actions = np.clip(normalized, -1, 1)
        actions[:, 6] = np.where(actions[:, 6] < 0.5, 0, 1)  # cut first, as Qwen-OFT does
        expected = 0.5 * (actions + 1) * (np.array(HIGH) - np.array(LOW)) + np.array(LOW)
        expected[:, 6] = 1 - 2 * (actions[:, 6] > 0.5)  # then open (1) is -1
        torch.testing.assert_close(output.tokens[row][output.mask[row]], all_states[row], atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(output.chunk[row].numpy(), expected, atol=1e-5)
    assert (np.abs(np.stack(raw)[..., :6]) > 1).any() and output.chunk[..., 6].unique().tolist() == [-1.0, 1.0]


def test_the_fingerprint_is_of_weights_prompt_and_conventions(checkpoint, tmp_path):
    first = qwen(checkpoint).fingerprint()
    assert qwen(checkpoint, max_batch=1).fingerprint() == first
    assert qwen(checkpoint, horizon=5).fingerprint() != first
    other = shutil.copytree(checkpoint, tmp_path / "other")
    tensors = load_file(other / "head.safetensors")
    tensors["5.bias"][0] += 1e-3
    save_file(tensors, other / "head.safetensors")
    assert qwen(other).fingerprint() != first

    class Asks(qwen_oft.QwenOFT):
        def prompt(self, task, state):
            return super().prompt(task + "!", state)

    Asks.__qualname__ = "QwenOFT"
    assert Asks(checkpoint, dtype="float32", horizon=4).fingerprint() != first


def changed(checkpoint, tmp_path, file, change):
    path = shutil.copytree(checkpoint, tmp_path / "changed")
    tensors = load_file(path / file)
    change(tensors)
    save_file(tensors, path / file, metadata={"format": "pt"})
    return path


@pytest.mark.parametrize(
    "file, change, says",
    [
        ("model.safetensors", lambda t: t.pop("model.norm.weight"), "missing: model.*norm.weight"),
        ("model.safetensors", lambda t: t.update(more=torch.zeros(2)), "surplus: more"),
        (
            "model.safetensors", lambda t: t.update({"model.norm.weight": torch.zeros(32)}),
            "does not fit Qwen2_5_VLForConditionalGeneration: .* of another shape: .*norm.weight",
        ),
        ("head.safetensors", lambda t: t.pop("5.bias"), "missing: 5.bias"),
        ("head.safetensors", lambda t: t.update({"5.bias": torch.zeros(8)}), r"5.bias \(\(8,\) in the file, \(7,\)"),
    ],
)  # fmt: skip
def test_loading_is_strict(checkpoint, tmp_path, file, change, says):
    path = changed(checkpoint, tmp_path, file, change)
    with pytest.raises(ValueError, match=says) as caught:
        qwen(path)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_loaded(checkpoint, tmp_path, monkeypatch):
    path = shutil.copytree(checkpoint, tmp_path / "changed")
    action = {"q01": LOW, "q99": HIGH, "mask": [True] * 7}
    (path / "dataset_statistics.json").write_text(json.dumps({"a": {"action": action}, "b": {"action": action}}))
    with pytest.raises(ValueError, match=r"has statistics of a, b; unnorm_key must be one, got None"):
        qwen(path)
    with pytest.raises(ValueError, match="mask says that the gripper is normalized"):
        qwen(path, unnorm_key="a")
    with pytest.raises(ValueError, match="no statistics of actions"):
        read_statistics(checkpoint / "config.json", "text_config")
    (path / "model.safetensors").write_bytes(b"not weights")
    for read in (lambda: load_pretrained("Qwen2_5_VLForConditionalGeneration", path), lambda: load_processor(tmp_path)):
        with pytest.raises(
            ValueError, match=r"has no (weights of Qwen2_5_VLForConditionalGeneration|processor): "
        ) as caught:
            read()
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="has no NoSuchModel that can be imported"):
        load_pretrained("NoSuchModel", checkpoint)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"pip install 'rlt\[hf\]'"):
        hf_class("AutoModel")


def test_a_number_of_queries_that_is_not_the_horizon(checkpoint):
    vla = qwen(checkpoint)
    with pytest.raises(ValueError, match="Row 1 has 5 action queries, 'qwen-oft' has 4"):
        vla.forward(libero_frames(2), ["lift it", "lift 🔍"])


# ------------------------------------------------------------------------------------------------ the base class


class Plain(HFVLA):
    """Shows its pictures; the rest is not needed."""

    def __init__(self, spec=None, **kwargs):
        default = VLASpec("plain", 1, 2, cameras=("agentview",), image_size=4, orientation="turned", stochastic=True)
        super().__init__(torch.nn.Linear(1, 1), spec or default, **kwargs)


def test_pictures_are_turned_cropped_and_resized():
    ramp = np.tile(np.arange(0, 240, 30, dtype=np.uint8)[None, None, :, None], (1, 8, 1, 3))  # dark left, bright right
    shown = Plain(resample="box").frames({"agentview": ramp})["agentview"]
    assert shown.shape == (1, 4, 4, 3) and shown[0, 0, :, 0].tolist() == [195, 135, 75, 15]
    exact = Plain().frames({"agentview": ramp[:, :4, :4]})["agentview"]
    assert np.array_equal(exact, ramp[:, :4, :4][:, ::-1, ::-1])
    middle = Plain(resample="box", crop=0.25).frames({"agentview": ramp})["agentview"]  # half of each edge
    assert middle[0, 0, :, 0].tolist() == [150, 120, 90, 60]
    # OpenVLA-OFT keeps 90 % of the area
    cropped = Plain(resample="lanczos", crop=0.9).frames({"agentview": ramp})["agentview"]
    assert not np.array_equal(cropped, Plain(resample="lanczos").frames({"agentview": ramp})["agentview"])
    with pytest.raises(ValueError, match="'plain' needs square ones"):
        Plain().frames({"agentview": ramp[:, :4]})


def test_noise_follows_from_the_seed_alone():
    vla = Plain()
    both, one = vla.noise([3, 2**63 + 5], (2, 7)), vla.noise([2**63 + 5], (2, 7))
    assert torch.equal(both[1:], one) and not torch.equal(both[:1], one) and both.shape == (2, 2, 7)
    with pytest.raises(ValueError, match="needs a seed"):
        vla.noise(None, (2, 7))


@pytest.mark.parametrize(
    "kwargs, says",
    [
        ({"spec": VLASpec("x", 1, 1, image_size=8)}, "orientation and .image_size of 'x' must be said"),
        ({"resample": "best"}, "resample may be nearest, box"),
        ({"crop": 1.5}, "crop must be above 0"),
        ({"gripper": "up"}, "'up' is not a valid Gripper"),
    ],
)
def test_what_a_policy_may_not_say(kwargs, says):
    with pytest.raises(ValueError, match=says):
        Plain(**kwargs)


def test_what_a_policy_must_say():
    obs = {"agentview": np.zeros((1, 4, 4, 3), np.uint8), "state": np.zeros((1, 8), np.float32)}
    with pytest.raises(NotImplementedError, match=r"Plain must define prompt\(task, state\)"):
        Plain().forward(obs, ["x"])


# ------------------------------------------------------------------------------------------------ OpenVLA-OFT's way


def test_an_openvla_like_policy_obeys_the_contract():
    from tiny_openvla import OpenVLALike

    vla = OpenVLALike()
    output = check_vla(vla, libero_frames(3), TASKS)
    assert output.tokens.shape[2] == 48 and output.chunk.shape == (3, 4, 7)
    last = ~output.mask[2]  # the shortest instruction: a hole before the queries
    assert last.any() and bool(output.mask[2, -1]) and bool((output.chunk[..., 3:6].abs() < 1).all())
    assert load_rl_token("mean", vla)(output).shape == (3, 48)


def test_openvla_oft_sees_in_both_directions():
    """Stock transformers reads a mask (B, M) as causal: the first token would not know the last ones."""
    from tiny_openvla import OpenVLALike

    obs, other = libero_frames(1), ["lift that"]
    for bidirectional in (True, False):
        vla = OpenVLALike(bidirectional=bidirectional)
        first, second = vla.forward(obs, ["lift this"]), vla.forward(obs, other)
        assert bool((first.tokens[0, 1] - second.tokens[0, 1]).abs().max() > 1e-4) is bidirectional
        assert not torch.allclose(first.tokens[0, -2], second.tokens[0, -2], atol=1e-4)
