"""Joint stage 1: the VLA learns by imitation while the RL token is trained on its tokens."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from vla_helpers import tiny_vla, write_demos

from rlt_gym.data.demo_set import DemoReader
from rlt_gym.rl_token.io import load_rl_token, read_rl_token
from rlt_gym.rl_token.moving import moving_tokens
from rlt_gym.rl_token.pretrain import PretrainTokenConfig, pretrain_token
from rlt_gym.rl_token.tokens import cache_tokens
from rlt_gym.testing import FakeVLA
from rlt_gym.vla.mini.model import MiniVLA


@pytest.fixture
def config(tmp_path):
    write_demos(tmp_path / "a.hdf5", "a", demos=4, length=6, size=32)
    return PretrainTokenConfig(
        demos=[str(tmp_path)], output=str(tmp_path / "out" / "token.safetensors"), width=16, heads=2, layers=1, steps=6,
        batch_size=8, held_out=0.25, frame_stride=1, alpha=1.0, vla_learning_rate=1e-2, ema_decay=0.0, save_every=3,
        progress=False,
    )  # fmt: skip


def moving(config, vla, alpha=1.0):
    return moving_tokens(vla, config.demos, None, 1, ("all",), alpha, 1e-2)


def trained_vla(config) -> MiniVLA:
    return MiniVLA.load(config.output.replace(".safetensors", "_vla.safetensors"))


def test_the_tokens_are_those_of_the_vla(config):
    """Before a step, they equal what the frozen VLA gives, row for row."""
    vla = tiny_vla()
    found, wanted = moving(config, vla), cache_tokens(vla, DemoReader(config.demos), ("all",), vla.config.image_size)
    rows = np.arange(len(wanted))
    assert len(found) == len(wanted) and found.origin == wanted.origin and found.count == wanted.count
    (tokens, mask), (others, other_mask) = found.batch(rows, "cpu"), wanted.batch(rows, "cpu")
    assert torch.allclose(tokens, others, atol=2e-3) and torch.equal(mask, other_mask)  # float16 in the cache


@pytest.mark.parametrize("alpha", [0.5, 2.0])
def test_the_gradient_is_alpha_times_that_of_imitation(config, alpha):
    """Against the mean absolute error of the chunks written out; two parts of a batch add up."""
    tokens = moving(config, tiny_vla(), alpha)
    rows, net = np.array([1, 4, 9, 13]), tokens.learner.net
    seen, _, loss = tokens.learn(rows, 7, 0.5)
    tokens.learn(rows, 7, 0.5)
    found = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
    assert not seen.requires_grad
    net.zero_grad()
    batches, data = tokens.learner._batches, tokens.learner.data
    _, chunk = net(*batches.inputs(rows, np.random.default_rng(7)))
    index = data.action_row[rows][:, None] + np.arange(chunk.shape[1])
    mask = index < data.action_end[rows][:, None]
    target = data.actions[np.minimum(index, data.action_end[rows][:, None] - 1)]
    error = (chunk - torch.tensor(target)).abs()[torch.tensor(mask)].mean()
    (alpha * error).backward()
    assert loss == pytest.approx(float(error.detach()), rel=1e-5)
    wanted = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(found, wanted, strict=True))


def test_both_learn_and_the_files_belong_together(config):
    vla = tiny_vla()
    before = vla.fingerprint()
    token = pretrain_token(config, vla)
    moved = trained_vla(config)
    assert vla.fingerprint() == before != moved.fingerprint()
    assert token.vla_fingerprint == moved.fingerprint() and moved.provenance["init"]["fingerprint"] == before
    load_rl_token(config.output, moved)
    with pytest.raises(ValueError, match="belongs to the VLA"):
        read_rl_token(config.output, vla)
    with open(config.folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == config.steps and all(float(row["L_vla"]) > 0 for row in rows)
    report = json.loads((config.folder.parent / "token.json").read_text())
    assert report["held_out"] and report["vla_fingerprint"] == moved.fingerprint()


def test_imitation_makes_the_vla_better(config):
    """On the demonstrations themselves, by their own loss without augmentation."""
    vla = tiny_vla()
    pretrain_token(replace(config, steps=40), vla)
    rows = np.arange(24)
    with torch.no_grad():
        before, after = (float(moving(config, one).learner.forward(rows)[1]) for one in (vla, trained_vla(config)))
    assert after < 0.8 * before


def test_without_alpha_nothing_moves(config):
    vla = tiny_vla()
    before = vla.fingerprint()
    token = pretrain_token(replace(config, alpha=0.0), vla)
    assert token.vla_fingerprint == vla.fingerprint() == before
    assert not list(config.folder.parent.glob("*_vla.safetensors"))


def test_an_interrupted_training_goes_on_bit_for_bit(config, tmp_path):
    first = replace(config, schedule="constant", warmup_steps=0)  # else the number of steps changes the rates
    second = replace(first, output=str(tmp_path / "again" / "token.safetensors"))
    pretrain_token(first, tiny_vla())
    pretrain_token(replace(second, steps=3), tiny_vla())
    pretrain_token(replace(second, resume=str(second.folder)), tiny_vla())
    assert trained_vla(first).fingerprint() == trained_vla(second).fingerprint()
    one, two = (read_rl_token(each.output).state_dict() for each in (first, second))
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_errors(config):
    with pytest.raises(ValueError, match="cannot learn here"):
        pretrain_token(config, FakeVLA())
    with pytest.raises(ValueError, match="tokens on disk are those of a frozen VLA"):
        replace(config, tokens="folder", demos=[])
    with pytest.raises(ValueError, match=r"alpha is -1"):
        replace(config, alpha=-1.0)
