"""RL token: masks, causality, the loss against a NumPy oracle, files and their refusals."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from vla_helpers import observations, tiny_vla, write_demos, write_fake_token

from rlt_gym.rl_token import io
from rlt_gym.rl_token.decoder import RLTokenDecoder, reconstruction_loss
from rlt_gym.rl_token.encoder import RLTokenConfig, RLTokenEncoder
from rlt_gym.rl_token.io import load_rl_token, read_autoencoder, save_rl_token
from rlt_gym.rl_token.pretrain import PretrainTokenConfig, pretrain_token
from rlt_gym.rl_token.trainable import TrainableToken
from rlt_gym.rl_token.trainer import Autoencoder
from rlt_gym.testing import FakeVLA
from rlt_gym.vla.base import VLAOutput
from rlt_gym.vla.tokens import select_tokens

CONFIG = RLTokenConfig(token_dim=12, max_tokens=20, z_dim=10, width=16, heads=2, context_dropout=0.0)


def make_output(batch: int = 3, count: int = 9, seed: int = 0) -> VLAOutput:
    torch.manual_seed(seed)
    kind = torch.tensor([1] * (count - 4) + [2, 3, 4, 4], dtype=torch.uint8).expand(batch, -1)
    tokens = torch.randn(batch, count, 12)
    return VLAOutput(tokens, torch.ones(batch, count, dtype=torch.bool), kind, torch.zeros(batch, 2, 7))


def make_encoder(config: RLTokenConfig = CONFIG) -> RLTokenEncoder:
    torch.manual_seed(1)
    encoder = RLTokenEncoder(config)
    encoder.set_statistics(0.1 * torch.randn(config.max_tokens, 12), torch.rand(12) + 0.5)
    return encoder.eval()


def test_statistics_per_channel_and_per_place():
    """Means of the shape (H,) are those of every place, (N, H)."""
    mean, std = torch.randn(12), torch.rand(12) + 0.5
    tokens = torch.randn(2, CONFIG.max_tokens, 12)
    standard = []
    for given in (mean, mean.expand(CONFIG.max_tokens, 12)):
        encoder = RLTokenEncoder(CONFIG)
        encoder.set_statistics(given, std)
        standard.append(encoder.standardize(tokens))
    assert torch.equal(*standard)
    torch.testing.assert_close(standard[0], (tokens - mean) / std)


def test_shape_and_scale():
    z = make_encoder()(make_output())
    assert z.shape == (3, 10) and z.dtype == torch.float32
    torch.testing.assert_close(z.mean(dim=1), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(z.std(dim=1, unbiased=False), torch.ones(3), atol=1e-3, rtol=0)


@pytest.mark.parametrize("place", ["front", "middle", "back", "one row"])
def test_pads_anywhere_change_nothing(place):
    """Pads hold garbage; in "one row" the other rows have valid tokens in their place."""
    encoder, output = make_encoder(), make_output()
    expected = encoder(output)
    at = {"front": 0, "middle": 4, "back": 9, "one row": 4}[place]
    tokens = torch.cat([output.tokens[:, :at], 100 * torch.randn(3, 3, 12), output.tokens[:, at:]], dim=1)
    kind = torch.cat([output.kind[:, :at], torch.full((3, 3), 1, dtype=torch.uint8), output.kind[:, at:]], dim=1)
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[slice(None) if place != "one row" else 0, at : at + 3] = False
    rows = slice(None) if place != "one row" else slice(0, 1)
    z = encoder(VLAOutput(tokens, mask, kind, output.chunk))
    torch.testing.assert_close(z[rows], expected[rows], atol=1e-5, rtol=0)


def test_kinds_filter():
    encoder, output = make_encoder(replace(CONFIG, kinds=("image",))), make_output()
    tokens, mask = select_tokens(output, ("image", "state"))
    assert tokens.shape == (3, 6, 12) and mask.all()
    z = encoder(output)
    output.tokens[:, 5:] += 1
    torch.testing.assert_close(encoder(output), z)
    output.tokens[:, 0] += 1
    assert not torch.allclose(encoder(output), z)
    output.mask[1, :5] = False
    with pytest.raises(ValueError, match="Row 1 has no valid token"):
        encoder(output)


def test_every_token_and_its_place_matter():
    encoder, output = make_encoder(), make_output(batch=1)
    z = encoder(output)
    for i in range(9):
        tokens = output.tokens.clone()
        tokens[0, i] += 1
        assert not torch.allclose(encoder(replace_tokens(output, tokens)), z, atol=1e-4), i
    swapped = output.tokens[:, [1, 0, *range(2, 9)]]
    assert not torch.allclose(encoder(replace_tokens(output, swapped)), z, atol=1e-4)


def replace_tokens(output: VLAOutput, tokens: torch.Tensor) -> VLAOutput:
    return VLAOutput(tokens, output.mask, output.kind, output.chunk)


def test_decoder_is_causal():
    """Row i of the reconstruction may depend on z_rl and on tokens before i, and on nothing else."""
    torch.manual_seed(0)
    decoder = RLTokenDecoder(CONFIG).eval()
    z_rl, z = torch.randn(2, 10), torch.randn(2, 9, 12)
    base = decoder(z_rl, z)
    assert base.shape == z.shape
    for j in range(9):
        changed = z.clone()
        changed[:, j] += 1
        difference = (decoder(z_rl, changed) - base).abs().amax(dim=(0, 2))
        assert (difference[: j + 1] == 0).all()
        assert (difference[j + 1 :] > 1e-6).all()
    assert ((decoder(z_rl + torch.randn(2, 10), z) - base).abs().amax(dim=(0, 2)) > 1e-5).all()
    torch.testing.assert_close(decoder(z_rl, torch.randn(2, 9, 12), 1.0), decoder(z_rl, z, 1.0))


def test_loss_against_numpy():
    rng = np.random.default_rng(0)
    prediction, z = rng.normal(size=(2, 3, 5, 4))
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]], dtype=bool)
    per_token = [((prediction[b, i] - z[b, i]) ** 2).sum() for b, i in zip(*np.nonzero(mask), strict=True)]
    losses = reconstruction_loss(torch.tensor(prediction), torch.tensor(z), torch.tensor(mask))
    assert losses["mean"].item() == pytest.approx(sum(per_token) / (9 * 4), rel=1e-6)
    assert losses["sum"].item() == pytest.approx(sum(per_token) / 3, rel=1e-6)


def test_gradients_reach_the_token_only():
    """Stop-gradient: neither the VLA nor the targets nor the decoder's context pass gradients back."""
    output = make_output()
    output.tokens.requires_grad_(True)
    encoder, decoder = make_encoder(), RLTokenDecoder(CONFIG)
    tokens, mask = select_tokens(output, ("all",))
    z = encoder.standardize(tokens)
    reconstruction_loss(decoder(encoder.encode(z, mask), z), z, mask)["mean"].backward()
    assert output.tokens.grad is None
    assert all(
        p.grad is not None and p.grad.abs().sum() > 0 for p in (encoder.e_rl, encoder.input.weight, decoder.head.weight)
    )

    vla = tiny_vla()
    vla.net.requires_grad_(True)  # even if somebody thawed it
    out = vla.forward(observations(2), ["a", "b"])
    RLTokenEncoder(RLTokenConfig(32, max_tokens=40))(out).square().sum().backward()
    assert all(parameter.grad is None for parameter in vla.net.parameters())


def test_loss_falls_on_toy_data():
    torch.manual_seed(0)
    basis = torch.randn(3, 9 * 12)  # three hidden numbers make all tokens
    z = (torch.randn(128, 3) @ basis).view(128, 9, 12) / 3**0.5
    mask = torch.ones(128, 9, dtype=torch.bool)
    encoder, decoder = RLTokenEncoder(CONFIG), RLTokenDecoder(CONFIG)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=3e-3)
    losses = []
    for _ in range(150):
        loss = reconstruction_loss(decoder(encoder.encode(z), z, 1.0), z, mask)["mean"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def toy_losses(dropout: float) -> dict[str, float]:
    """Train on tokens that three hidden numbers make; losses on other rows, before and after, from ``z_rl`` alone."""
    torch.manual_seed(0)
    basis = torch.randn(3, 9 * 12)
    z = (torch.randn(160, 3) @ basis).view(160, 9, 12) / 3**0.5
    mask = torch.ones(160, 9, dtype=torch.bool)
    config = replace(CONFIG, context_dropout=dropout)
    model = Autoencoder(RLTokenEncoder(config), RLTokenDecoder(config))
    optimizer = torch.optim.Adam(model.modules().parameters(), lr=3e-3)

    @torch.no_grad()
    def held_out(shuffled: bool) -> float:
        z_rl = model.encoder.encode(z[96:])
        predicted = model.decoder(z_rl.roll(1, dims=0) if shuffled else z_rl, z[96:], 1.0)
        return float((predicted - z[96:]).square().mean())

    before = held_out(False)
    for _ in range(150):
        loss = model.losses(z[:96], mask[:96], dropout)["mean"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {"before": before, "after": held_out(False), "gap": held_out(True) / held_out(False)}


def test_context_dropout_makes_the_decoder_use_the_token():
    """Another row's ``z_rl`` does as well without it: the decoder copies from the tokens before."""
    plain, dropped = toy_losses(0.0), toy_losses(0.9)
    assert dropped["after"] < 0.5 * dropped["before"], "on rows that were held out"
    assert dropped["gap"] > 2.0 and dropped["gap"] > 1.5 * plain["gap"]


def test_files_refuse_another_vla(tmp_path):
    vla, other = tiny_vla(0), tiny_vla(1)
    encoder = RLTokenEncoder(RLTokenConfig(32, max_tokens=vla.spec.max_tokens), vla.fingerprint(), "mini")
    path = tmp_path / "token.safetensors"
    save_rl_token(path, encoder, RLTokenDecoder(encoder.config), {"note": 1})
    loaded = load_rl_token(path, vla)
    output = vla.forward(observations(2), ["a", "b"])
    torch.testing.assert_close(loaded(output), encoder(output), atol=2e-2, rtol=0)  # stored as float16
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    with pytest.raises(ValueError, match=r"token\.safetensors: The RL token belongs to the VLA 'mini'"):
        load_rl_token(path, other)
    with pytest.raises(ValueError, match="belongs to"):
        load_rl_token(encoder, other)
    with pytest.raises(ValueError, match="No shipped RL token belongs"):
        load_rl_token("auto", other)
    path.write_bytes(b"garbage")
    with pytest.raises(ValueError, match=r"token\.safetensors cannot be read.*rlt pretrain-token"):
        load_rl_token(path, vla)
    with pytest.raises(ValueError, match="no RL-token weights"):
        load_rl_token(tmp_path / "none.safetensors", vla)
    vla.save(path)
    with pytest.raises(ValueError, match="format is"):
        load_rl_token(path, vla)


@pytest.mark.parametrize(
    ("change", "match"), [({"kinds": ("pictures",)}, "kinds"), ({"heads": 3}, "heads"), ({"z_dim": 0}, "z_dim")]
)
def test_config_is_checked(change, match):
    with pytest.raises(ValueError, match=match):
        replace(CONFIG, **change)


def test_too_many_tokens():
    with pytest.raises(ValueError, match="max_tokens=20"):
        make_encoder()(make_output(count=21))


def test_pretraining_reports_on_held_out_demonstrations(tmp_path):
    write_demos(tmp_path / "a.hdf5", "a", demos=8, size=32)
    vla = tiny_vla()
    config = PretrainTokenConfig(
        demos=[str(tmp_path)],
        output=str(tmp_path / "token.safetensors"),
        width=32,
        steps=120,
        batch_size=16,
        held_out=0.25,
        frame_stride=1,
        progress=False,
    )
    encoder = pretrain_token(config, vla)
    assert encoder.vla_fingerprint == vla.fingerprint()
    import json

    record = json.loads((tmp_path / "token.json").read_text())
    report = record["held_out"]
    assert record["rows"] == {"train": 72, "held_out": 24}
    assert report["L_ro_z_only"] < report["L_ro_position_mean"]
    assert report["L_ro_z_only"] < report["L_ro_z_only_shuffled"]
    assert {"probe_r2_proprio", "probe_r2_z_rl", "probe_r2_z_rl_proprio"} <= set(report)
    write_demos(tmp_path / "a.hdf5", "a", demos=1, size=32)
    with pytest.raises(ValueError, match="held out"):
        pretrain_token(config, vla)


def equal(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    mine, theirs = first.state_dict(), second.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_a_token_that_learns_has_the_decoder_of_its_file(tmp_path):
    path = write_fake_token(tmp_path / "token.safetensors")
    encoder = load_rl_token(path, FakeVLA())
    torch.manual_seed(3)
    token = TrainableToken.of(encoder)
    after = torch.rand(1)
    stored, decoder = read_autoencoder(path)
    assert equal(token.encoder, stored) and equal(token.decoder, decoder)
    torch.manual_seed(3)
    drawn = TrainableToken(token.architecture)
    assert torch.equal(after, torch.rand(1))  # reading the file uses up no random numbers
    loaded = load_rl_token(f"random:{path}", FakeVLA())
    torch.manual_seed(3)
    random = TrainableToken.of(loaded)
    assert equal(random.decoder, drawn.decoder) and not equal(random.decoder, decoder)
    save_rl_token(path, stored)  # without decoder
    loaded = load_rl_token(path)
    torch.manual_seed(3)
    assert equal(TrainableToken.of(loaded).decoder, drawn.decoder)
    stored.e_rl.data += 1.0
    save_rl_token(path, stored, decoder)
    with pytest.raises(ValueError, match=r"token\.safetensors no longer has the weights .* load the file again"):
        TrainableToken.of(encoder)


def test_a_frozen_token_reads_no_decoder(tmp_path, monkeypatch):
    path = write_fake_token(tmp_path / "token.safetensors")
    read = []

    class Watched:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            self.inner = self.file.__enter__()
            return self

        def __exit__(self, *error):
            return self.file.__exit__(*error)

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def get_tensor(self, key):
            read.append(key)
            return self.inner.get_tensor(key)

    original = io.safe_open
    monkeypatch.setattr(io, "safe_open", lambda *args, **kwargs: Watched(original(*args, **kwargs)))
    encoder = load_rl_token(path, FakeVLA())
    assert read and all(key.startswith("encoder.") for key in read)
    TrainableToken.of(encoder)
    assert any(key.startswith("decoder.") for key in read)
