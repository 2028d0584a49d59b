"""The checker accepts the VLAs that are here and names what is wrong with broken ones."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from toy_vla import ToyVLA
from vla_helpers import observations, tiny_vla

from rlt_gym.testing import FakeVLA
from rlt_gym.vla import load_vla
from rlt_gym.vla.conformance import check_vla_outputs

TASKS = ["put the bowl on the stove", "open the top drawer", "frobnicate", "push the plate"]


@pytest.mark.parametrize(
    "make", [tiny_vla, lambda: load_vla("mini"), FakeVLA, lambda: FakeVLA(stochastic=True), ToyVLA],
    ids=["tiny", "mini", "fake", "stochastic", "toy"],
)  # fmt: skip
def test_ours_pass(make):
    vla = make()
    output = check_vla_outputs(vla, observations(4, vla.spec.image_size or 32), TASKS)
    assert output.chunk.shape == (4, vla.spec.horizon, 7)


class Broken(ToyVLA):
    """A ToyVLA whose output is changed afterwards."""

    def __init__(self, change, **spec):
        super().__init__()
        self.change = change
        self.spec = replace(self.spec, **spec)

    def forward(self, obs, tasks, *, seed=None):
        output = super().forward(obs, tasks, seed=seed)
        self.change(output, obs, seed)
        return output


def adds(value):
    """Adds to the chunk what ``value(output, obs, seed)`` gives."""

    def change(output, obs, seed):
        output.chunk[:, :, 5] += value(output, obs, seed)

    return change


def sets(name, value):
    return lambda output, obs, seed: setattr(output, name, value(getattr(output, name)))


def row_noise(output, obs, seed):
    return torch.tensor(seed)[:, None] / 100


def batch_noise(output, obs, seed):
    return torch.tensor([sum(seed)] * len(seed))[:, None] / 100


def pads_first(output, obs, seed):
    output.mask = output.mask.clone()
    output.mask[1::2, -1] = False


def paints(output, obs, seed):
    obs["wrist"][:] = 0


counter = iter(range(10**6))


@pytest.mark.parametrize(
    ("change", "spec", "message"),
    [
        (adds(lambda o, obs, seed: 2.0), {}, r"chunk has values outside \[-1, 1\]"),
        (sets("chunk", lambda chunk: chunk.double()), {}, "chunk is torch.float64"),
        (sets("tokens", lambda tokens: tokens[:, :, :4]), {}, "tokens is torch.float32"),
        (sets("tokens", lambda tokens: tokens.requires_grad_()), {}, "carry gradients"),
        (sets("tokens", lambda tokens: tokens * torch.nan), {}, "valid tokens are NaN"),
        (sets("mask", lambda mask: mask & False), {}, "a row has no valid token"),
        (sets("kind", lambda kind: kind * 0), {}, r"valid tokens have the kinds \[0\]"),
        (sets("kind", lambda kind: kind.to("meta")), {"max_tokens": 1}, "more than spec.max_tokens = 1"),
        (paints, {}, "changes the observation 'wrist'"),
        (adds(lambda o, obs, seed: next(counter) / 100), {}, "the same call a second time has other chunk"),
        (adds(lambda o, obs, seed: torch.arange(len(o.chunk))[:, None] / 10), {}, "row 3 in another place has other"),
        (adds(lambda o, obs, seed: len(o.chunk) / 10), {}, "row 0 without the other rows has other chunk"),
        (pads_first, {}, r"row \d in another place has \d valid tokens, not \d"),
        (adds(row_noise), {}, "spec.stochastic is False, but"),
        (lambda *_: None, {"stochastic": True}, "spec.stochastic is True, but"),
    ],
)  # fmt: skip
def test_faults_are_named(change, spec, message):
    vla = Broken(change, **spec)
    with pytest.raises(ValueError, match=f"The VLA 'toy' breaks the FrozenVLA contract: .*{message}"):
        check_vla_outputs(vla, observations(4), TASKS)


def test_row_noise_is_right_and_batch_noise_is_wrong():
    check_vla_outputs(Broken(adds(row_noise), stochastic=True), observations(4), TASKS, seeds=[3, 9, 4, 5])
    with pytest.raises(ValueError, match="row 0 without the other rows"):
        check_vla_outputs(Broken(adds(batch_noise), stochastic=True), observations(4), TASKS, seeds=[3, 9, 4, 5])


def test_fingerprint_and_size_of_the_batch():
    vla = ToyVLA()
    with pytest.raises(ValueError, match="was given 1 rows; it needs at least two"):
        check_vla_outputs(vla, observations(1), TASKS[:1])
    vla.fingerprint = lambda: str(np.random.default_rng().random())
    with pytest.raises(ValueError, match="another string when it is called again"):
        check_vla_outputs(vla, observations(4), TASKS)
    vla.fingerprint = lambda: ""
    with pytest.raises(ValueError, match="fingerprint"):
        check_vla_outputs(vla, observations(4), TASKS)
