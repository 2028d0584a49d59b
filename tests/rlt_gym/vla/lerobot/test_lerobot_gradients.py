"""A copy of an ACT through which gradients flow: it gives what the frozen one gives, and its gradients are right."""

import json
import shutil

import numpy as np
import pytest

pytest.importorskip("lerobot", reason="needs the extra 'lerobot' (scripts/lerobot_env.sh)")

import lerobot_policies as tiny
import torch
from torch.func import functional_call

from rlt_gym.libero.robot import PANDA
from rlt_gym.rl_token.encoder import RLTokenConfig, RLTokenEncoder
from rlt_gym.rl_token.make import make_rl_token_vec
from rlt_gym.rl_token.shown import shown_pictures
from rlt_gym.rl_token.trainable_vla import TrainableVLA, gradients_of
from rlt_gym.vla.lerobot.gradients import ACTGradients
from rlt_gym.vla.registry import load_vla

TASKS, SEEDS, CAMERAS = ["push", "open the drawer", "push"], [5, 0, 7], ("agentview", "wrist")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Its first and last action are clipped."""
    return tiny.make_act(tmp_path_factory.mktemp("act") / "vae", stats=tiny.statistics(action_std=0.7), use_vae=True)


def observations(size=64, seed=0):
    rng = np.random.default_rng(seed)
    pictures = {camera: rng.integers(0, 256, (3, size, size, 3), dtype=np.uint8) for camera in CAMERAS}
    return {**pictures, "state": rng.normal(0, 0.3, (3, 8)).astype(np.float32)}


def run(copy, obs):
    pictures = {camera: torch.tensor(obs[camera]) for camera in CAMERAS}
    return copy(pictures, torch.tensor(obs["state"]), TASKS, SEEDS)


def same(mine, frozen):
    names = ("tokens", "mask", "kind", "chunk")
    return [name for name in names if not torch.equal(getattr(mine, name), getattr(frozen, name))]


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({}, 64),
        ({}, 128),
        ({"orientation": "flipped", "gripper": "open-signed"}, 64),
        ({"orientation": "mirrored", "gripper": "closed"}, 128),
        ({"orientation": "same", "gripper": "open", "dtype": "bfloat16"}, 64),
        ({"cameras": {"agentview": "observation.images.image2", "wrist": "observation.images.image"}}, 64),
    ],
)
def test_the_copy_gives_what_the_frozen_policy_gives(folder, settings, size):
    """Bit for bit: the same modules run on the same numbers, with gradients or without."""
    vla, obs = load_vla(f"lerobot:{folder}", vla_kwargs=settings), observations(size)
    frozen, before = vla.forward(obs, TASKS, seed=SEEDS), vla.fingerprint()
    assert frozen.chunk.std() > 0.1 and not torch.equal(frozen.chunk[0], frozen.chunk[1])
    copy = gradients_of(vla).of(vla)
    mine = run(copy, obs)
    assert same(mine, frozen) == [] and mine.chunk.requires_grad and mine.tokens.requires_grad
    assert not frozen.chunk.requires_grad and not frozen.tokens.requires_grad
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.add_(0.1)
    assert same(run(copy, obs), frozen) == ["tokens", "chunk"]
    assert same(vla.forward(obs, TASKS, seed=SEEDS), frozen) == [] and vla.fingerprint() == before
    vla._digest = None
    assert vla.fingerprint() == before


def test_a_copy_is_made_again_without_the_checkpoint(folder, tmp_path):
    moved = shutil.copytree(folder, tmp_path / "moved")
    vla = load_vla(f"lerobot:{moved}", vla_kwargs={"config": {"n_action_steps": 4}})
    frozen, first = vla.forward(observations(), TASKS), gradients_of(vla).of(vla)
    shutil.rmtree(moved)
    again = ACTGradients(json.loads(json.dumps(first.architecture)))
    again.load_state_dict(first.state_dict())
    assert same(run(again, observations()), frozen) == []
    assert again._config.n_action_steps == 4 and not any("vae" in name for name in again.state_dict())


def lerobots_own(folder):
    """LeRobot's network and its batch, made without the adapter."""
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    config = PreTrainedConfig.from_pretrained(folder)
    policy = get_policy_class("act").from_pretrained(folder, strict=True).eval()
    pre, _ = make_pre_post_processors(config, str(folder))
    obs = observations()
    turned = {
        f"observation.images.{name}": torch.tensor(np.rot90(obs[camera], 2, (1, 2)).copy()).permute(0, 3, 1, 2) / 255
        for camera, name in (("agentview", "image"), ("wrist", "image2"))
    }
    batch = pre({**turned, "observation.state": torch.tensor(obs["state"]), "task": TASKS})
    return policy.model, {**batch, "observation.images": [batch[key] for key in turned]}


def make_copy(folder, part):
    vla = load_vla(f"lerobot:{folder}")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        encoder = RLTokenEncoder(RLTokenConfig(32, max_tokens=10, z_dim=12, width=12, layers=1, heads=2))
    copy, obs = TrainableVLA.of(vla, encoder, part, 2), observations()
    shown = shown_pictures(obs, CAMERAS, TASKS, SEEDS)
    rows = {name: torch.tensor(value) for name, value in shown.items()}
    return copy, rows | {
        "proprio": torch.tensor(obs["state"]), "vla_ref": torch.zeros(3, 5, 7), "z_rl": torch.zeros(3, 12)
    }  # fmt: skip


@pytest.mark.parametrize("part", ["head", "lora", "all"])
def test_the_gradients_against_lerobots_network_written_out(folder, part):
    """For weights that have moved: LoRA's product begins at zero, and so do some biases of ACT."""
    if part == "lora":
        pytest.importorskip("peft", exc_type=ImportError)
    copy, rows = make_copy(folder, part)
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: (value + 0.05 * torch.randn(value.shape, generator=generator)).detach().requires_grad_()
        for name, value in copy.moving.items()
    }
    z_rl, chunk = copy.run(rows, weights)
    wish = torch.randn(chunk.shape, generator=generator), torch.randn(z_rl.shape, generator=generator)
    loss = (wish[0] * chunk).sum() + (wish[1] * z_rl).sum()
    found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)

    network, batch = lerobots_own(folder)
    leaves = {name: value.detach().clone().requires_grad_() for name, value in weights.items()}
    own = {name.removeprefix("vla.policy.model."): value for name, value in leaves.items()}
    for name in [name for name in own if ".lora_A." in name]:
        layer, up = name.split(".lora_A")[0], own[name.replace("lora_A", "lora_B")]
        own[f"{layer}.weight"] = network.get_parameter(f"{layer}.weight").detach() + up @ own[name]
    own = {name: value for name, value in own.items() if "lora_" not in name}
    seen = []
    handle = network.encoder.register_forward_hook(lambda *call: seen.append(call[2]))
    actions = functional_call(network, own, (batch,))[0]
    handle.remove()
    expected = (actions * 0.7 + 0.05)[:, :5].clamp(-1, 1)  # the statistics of tiny.statistics()
    assert torch.allclose(chunk, expected, atol=1e-5) and 0.05 < float((expected.abs() == 1).float().mean()) < 0.95
    other = (wish[0] * expected).sum()
    if part != "head":
        token = copy.encoder.encode(copy.encoder.scale(seen[0].transpose(0, 1)[:, 1:]))
        assert torch.allclose(z_rl, token, atol=1e-4)
        other = other + (wish[1] * token).sum()
    compared = 0
    grads = torch.autograd.grad(other, list(leaves.values()), allow_unused=True)
    for name, one, two in zip(leaves, found, grads, strict=True):
        assert (one is None) == (two is None), name
        if two is not None:
            assert torch.allclose(one, two, rtol=1e-3, atol=1e-3 * float(two.abs().max()) + 1e-6), name
            compared += float(two.abs().max()) > 1e-4
    assert compared >= {"head": 18, "lora": 8, "all": 60}[part]


def test_the_head_is_what_follows_the_tokens(folder):
    """No more: tokens do not depend on it. No less: they depend on all the rest that acts."""
    vla = load_vla(f"lerobot:{folder}")
    copy = gradients_of(vla).of(vla)
    output = run(copy, observations())
    weight = torch.randn(output.tokens.shape, generator=torch.Generator().manual_seed(0))
    (weight * output.tokens * output.mask[..., None]).sum().backward(retain_graph=True)
    without = {name for name, value in copy.named_parameters() if value.grad is None}
    assert without == {name for name, _ in copy.named_parameters() if name.startswith(copy.head)} != set()
    idle = [name for name, value in copy.named_parameters() if value.grad is not None and not value.grad.any()]
    assert idle == ["policy.model.encoder_latent_input_proj.weight"]  # the latent is zero when it acts
    copy.zero_grad()
    output.chunk.square().sum().backward()
    assert all(value.grad is not None for value in copy.parameters())


def test_dropout_stays_off(folder):
    copy, rows = make_copy(folder, "all")
    copy.train()
    assert not copy.training and not any(module.training for module in copy.modules())
    first, second = copy.run(rows, copy.moving), copy.run(rows, copy.moving)
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


def test_lora_reaches_each_feed_forward_layer(folder):
    pytest.importorskip("peft", exc_type=ImportError)
    copy, rows = make_copy(folder, "lora")
    layers = {name.split(".lora_")[0] for name in copy.moving}
    places = [f"vla.policy.model.{half}.layers.0.linear{n}" for half in ("encoder", "decoder") for n in (1, 2)]
    assert layers == set(places) and len(copy.moving) == 8
    plain, _ = make_copy(folder, "head")
    plain.part = "all"
    for one, two in zip(copy.run(rows, copy.moving), plain.run(rows, {}), strict=True):
        assert torch.equal(one, two)


def no_simulator(*args, **kwargs):
    raise AssertionError("the environment is made")


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("diffusion", {}, r"a diffusion gives no gradients: policies of LeRobot that can learn by RL are act; use one"),
        ("smolvla", {}, r"a smolvla gives no gradients: policies of LeRobot that can learn by RL are act; use one"),
        (
            "act",
            {"hook": "model.encoder.layers.0", "layout": "m b h -> b m h"},
            r"The tokens of hook 'model.encoder.layers.0' give no gradients: .* leave hook out",
        ),
        ("act", {"dtype": "float16"}, r"dtype 'float16' may make small gradients zero: .*dtype: float32"),
        ("act", {"config": {"use_amp": True}}, r"use_amp of the checkpoint may make small gradients zero"),
    ],
)
def test_what_cannot_learn_is_refused_before_simulators_start(tmp_path, name, settings, message):
    vla = f"lerobot:{getattr(tiny, f'make_{name}')(tmp_path / name)}"
    with pytest.raises(ValueError, match=message) as caught:
        make_rl_token_vec(no_simulator, PANDA, 4, vla, settings, "mean", show_pictures=True)
    assert "\n" not in str(caught.value)
    with pytest.raises(AssertionError, match="the environment is made"):
        make_rl_token_vec(no_simulator, PANDA, 4, vla, settings, "mean")
