"""Stage 1: its budget, its optimizer, its memory, and the frames that the VLA is shown."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from vla_helpers import tiny_vla, write_demos

from rlt_gym.core import training
from rlt_gym.data.demo_set import DemoReader, DemoRows, load_demo_set
from rlt_gym.rl_token import pretrain, trainer
from rlt_gym.rl_token.decoder import RLTokenDecoder
from rlt_gym.rl_token.encode_demos import EncodeDemosConfig, encode_demos
from rlt_gym.rl_token.encoder import RLTokenConfig, RLTokenEncoder
from rlt_gym.rl_token.io import load_rl_token
from rlt_gym.rl_token.pretrain import PretrainTokenConfig, pretrain_token
from rlt_gym.rl_token.tokens import TokenCache, TokenOrigin, cache_tokens
from rlt_gym.rl_token.untrained import MeanToken
from rlt_gym.testing import FakeVLA
from rlt_gym.vla import load_vla
from rlt_gym.vla.mini import training as mini_training
from rlt_gym.vla.mini.model import MiniVLAConfig


@pytest.fixture
def config(tmp_path):
    write_demos(tmp_path / "a.hdf5", "a", demos=4, length=6, size=32)
    return PretrainTokenConfig(
        demos=[str(tmp_path)], output=str(tmp_path / "token.safetensors"), width=16, heads=2, layers=1, steps=3,
        batch_size=8, held_out=0.25, frame_stride=1, progress=False,
    )  # fmt: skip


def record(config):
    with open(config.output.replace(".safetensors", ".json")) as file:
        return json.load(file)


# ---------------------------------------------------------------------------------------------------- the budget


@pytest.mark.parametrize(("steps", "minutes", "taken"), [(37, None, 37), (5, 0.2, 5), (37, 0.2, 12), (37, 9.0, 37)])
def test_steps_or_minutes_whichever_comes_first(config, monkeypatch, steps, minutes, taken):
    """The clock moves by a second whenever it is read, which is once a step."""
    seconds = itertools.count()
    monkeypatch.setattr(trainer.time, "monotonic", lambda: float(next(seconds)))
    pretrain_token(replace(config, steps=steps, minutes=minutes), tiny_vla())
    assert record(config)["train"]["steps"] == taken


def test_the_rate_warms_up_and_falls_to_2_percent(config, monkeypatch):
    """0.25, 0.5, 0.75 and 1 of half a cosine, and gradients cut to norm 1."""
    rates, norms = [], []
    step, loss = torch.optim.AdamW.step, trainer.reconstruction_loss

    def spy(self, *args, **kwargs):
        (group,) = self.param_groups
        rates.append(group["lr"])
        norms.append(math.sqrt(sum(float(p.grad.double().square().sum()) for p in group["params"])))
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    monkeypatch.setattr(trainer, "reconstruction_loss", lambda *args: {k: 1e3 * v for k, v in loss(*args).items()})
    pretrain_token(replace(config, steps=20, warmup_steps=4, learning_rate=0.01), tiny_vla())
    cosine = [0.02 + 0.98 * (1 + math.cos(math.pi * step / 20)) / 2 for step in range(20)]
    warm = [0.25, 0.5, 0.75] + [1.0] * 17
    np.testing.assert_allclose(rates, [0.01 * a * b for a, b in zip(cosine, warm, strict=True)], rtol=1e-9)
    np.testing.assert_allclose(norms, 1.0, rtol=1e-3)


@pytest.mark.parametrize(
    ("device", "cpu", "gpu", "expected"),
    [
        ("cpu", True, False, True), ("cpu", False, True, False), ("cuda", True, False, False),
        ("cuda:0", False, True, True), ("meta", True, True, False),
    ],
)  # fmt: skip
def test_the_device_decides_about_bfloat16(monkeypatch, device, cpu, gpu, expected):
    """Not the processor that feeds a GPU; emulated bfloat16 is slower than float32."""
    monkeypatch.setattr(training, "cpu_has_bfloat16", lambda: cpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: gpu or including_emulation)
    assert training.has_bfloat16(device) is expected


@pytest.mark.parametrize("answer", [True, False])
def test_both_trainings_ask_for_their_device(config, monkeypatch, tmp_path, answer):
    asked, autocast = [], []
    loss, losses = trainer.reconstruction_loss, mini_training.Batches.losses

    def note(function):
        def noted(*args):
            autocast.append(torch.is_autocast_enabled("cpu"))
            return function(*args)

        return noted

    for module in (trainer, mini_training):
        monkeypatch.setattr(module, "has_bfloat16", lambda device: asked.append(device) or answer)
    monkeypatch.setattr(trainer, "reconstruction_loss", note(loss))
    pretrain_token(config, tiny_vla())
    assert asked == ["cpu"] and autocast == [answer] * 6  # three steps, each followed by the held-out loss
    monkeypatch.setattr(mini_training.Batches, "losses", note(losses))
    small = MiniVLAConfig(horizon=2, width=16, layers=1, heads=2, mlp_ratio=1, stem=(4, 4, 4), image_size=32)
    out = str(tmp_path / "vla" / "vla.safetensors")
    vla = mini_training.train_vla(
        mini_training.TrainVLAConfig(config.demos, out, small, steps=2, batch_size=4, held_out=0.0, progress=False)
    )
    assert asked == ["cpu"] * 2 and autocast == [answer] * 8
    assert vla.spec.frame_size == 32, "a VLA wants the frames that it was trained on"


# ---------------------------------------------------------------------------------------------- context dropout


def test_context_dropout_blanks_its_share_and_leaves_the_targets_alone():
    torch.manual_seed(0)
    decoder = RLTokenDecoder(RLTokenConfig(token_dim=12, max_tokens=41, z_dim=10, width=16, heads=2))
    seen = []
    decoder.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    z_rl, z = torch.randn(400, 10), torch.randn(400, 41, 12)
    before = z.clone()
    for share in (0.9, 0.0):
        decoder(z_rl, z, share, torch.Generator().manual_seed(0))
    decoder.eval()(z_rl, z)
    assert torch.equal(z, before)
    dropped = [torch.isclose(x[:, 1:] - decoder.position[1:41], decoder.blank, atol=1e-6).all(-1) for x in seen]
    assert dropped[0].float().mean().item() == pytest.approx(0.9, abs=0.02)
    assert 0.8 < dropped[0].float().mean(dim=0).min() and dropped[0].float().mean(dim=0).max() < 1.0
    assert not dropped[1].any() and not dropped[2].any()
    kept = ~dropped[0]
    assert torch.equal(seen[0][:, 1:][kept], seen[2][:, 1:][kept]), "what is not dropped is as without dropout"
    assert torch.equal(seen[0][:, 0], seen[2][:, 0]), "z_rl is never dropped"


def test_context_dropout_is_for_training_only(config, monkeypatch):
    shares, forward = [], RLTokenDecoder.forward

    def spy(self, z_rl, z, context_dropout=0.0, generator=None):
        shares.append(context_dropout)
        return forward(self, z_rl, z, context_dropout, generator)

    monkeypatch.setattr(RLTokenDecoder, "forward", spy)
    pretrain_token(replace(config, context_dropout=0.7), tiny_vla())
    report = 2 * [0.0, 0.0, 1.0, 1.0]  # teacher-forced, and from z_rl alone; of the best and of the last weights
    assert shares == [0.7, 1.0] * 3 + report, "the held-out loss after each step is that of z_rl alone"
    shares.clear()
    pretrain_token(replace(config, context_dropout=0.0), tiny_vla())
    assert shares == [0.0] * 6 + report, "a decoder that knows no blanks is not shown any"


# --------------------------------------------------------------------------------------------------- the width


def test_the_default_width_lets_the_token_use_all_its_numbers(config):
    for token_dim, heads, width in ((256, 4, 256), (2048, 4, 2048), (30, 4, 32), (6, 1, 6)):
        assert RLTokenConfig(token_dim, heads=heads).width == width
    assert RLTokenConfig(256, width=64).width == 64
    encoder = RLTokenEncoder(RLTokenConfig(256, max_tokens=4, layers=1))
    assert torch.linalg.matrix_rank(encoder.output.weight) == encoder.z_dim == 256
    assert pretrain_token(replace(config, width=None), FakeVLA(token_dim=20)).config.width == 20


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("mini", "cb711ee3ce565b64"),
        ("mini-10", "27fb751de085e34b"),
        ("mini-goal", "1932a35dd3dceb95"),
        ("mini-object", "0f2df43b0dad5231"),
        ("mini-slow", "ad03b08288ea5970"),
        ("mini-spatial", "02cc5fa6063ce827"),
        ("mini-spatial-ten", "e4c3909b79e4a69c"),
    ],
)
def test_the_shipped_tokens_are_what_they_were(name, start):
    token = load_rl_token("auto", load_vla(name))
    assert token.fingerprint().startswith(start) and token.config.width == token.config.token_dim == 128


# --------------------------------------------------------------------------------------------------- the memory


class Growing(FakeVLA):
    """Row after row has more tokens: as many as a fifth of its place."""

    def forward(self, obs, tasks, *, seed=None):
        output = super().forward(obs, tasks, seed=seed)
        done = sum(self.calls[:-1])
        for row in range(len(tasks)):
            output.mask[row] = torch.arange(output.mask.shape[1]) <= (done + row) // 5
        output.kind = output.mask.to(torch.uint8)
        return output


@pytest.mark.parametrize("batch_size", [8, 64])
def test_the_cache_holds_every_row_also_if_later_rows_have_more_tokens(tmp_path, batch_size):
    """Batches reach over demonstrations, here of 11 and of 6 rows."""
    write_demos(tmp_path / "a.hdf5", "task a", demos=1, length=11, size=16)
    write_demos(tmp_path / "b.hdf5", "task b", demos=3, length=12, size=32, seed=1)
    reader = DemoReader(tmp_path, stride=1, max_demos=2)
    data = load_demo_set(tmp_path, 16, max_demos=2)
    vla = Growing(n_tokens=7)
    cache = cache_tokens(vla, reader, ("all",), 16, batch_size)
    assert vla.calls == ([8, 8, 8, 8, 3] if batch_size == 8 else [35])
    assert cache.tokens.shape == (35, 7, 12) and cache.tokens.dtype == torch.float16 and len(cache) == 35
    vla = FakeVLA(n_tokens=7)
    for row in range(35):
        obs = {camera: pictures[[row]] for camera, pictures in data.pictures.items()} | {"state": data.proprio[[row]]}
        tokens = vla.forward(obs, [data.instructions[data.task[row]]]).tokens[0].half()
        count = row // 5 + 1
        assert cache.mask[row].tolist() == [place < count for place in range(7)]
        # a batch of another size rounds otherwise
        assert (
            torch.allclose(cache.tokens[row, :count], tokens[:count], atol=0.01) and not cache.tokens[row, count:].any()
        )


def test_tokens_that_do_not_fit_are_told_before_they_fill_the_memory(config):
    vla = FakeVLA(n_tokens=7)
    needed = 24 * 6 * 12 * 2 / 2**30  # the seventh token is not valid
    with pytest.raises(ValueError, match=r"\(6 x 12\) need 3.2e-06 GiB.*`rlt encode-tokens.*give --tokens FOLDER"):
        pretrain_token(replace(config, memory_limit=0.9 * needed), vla)
    assert vla.calls == [8], "after the first batch"
    pretrain_token(replace(config, memory_limit=1.1 * needed), vla)
    with pytest.raises(ValueError, match=r"memory_limit is -1; it must be at least 0"):
        replace(config, memory_limit=-1)


def token_cache(tokens, mask):
    rows = DemoRows(*[np.zeros(len(tokens))] * 10, [], {})
    origin = TokenOrigin("vla", "0", tokens.shape[2], ("all",), None)
    return TokenCache(origin, rows, torch.as_tensor(tokens), torch.as_tensor(mask))


def test_batches_of_wide_tokens_are_small():
    narrow = token_cache(torch.zeros(1000, 90, 128, dtype=torch.float16), torch.ones(1000, 90, dtype=torch.bool))
    assert [len(part) for part in narrow.batches(np.arange(600))] == [256, 256, 88]
    wide = token_cache(
        torch.zeros(9, 1, 1, dtype=torch.float16).expand(9, 968, 2048), torch.ones(9, 968, dtype=torch.bool)
    )
    sizes = [len(part) for part in wide.batches(np.arange(600))]
    assert sum(sizes) == 600 and max(sizes) * 968 * 2048 * 4 <= 2**28
    assert [len(part) for part in wide.batches(np.arange(5), limit=1)] == [2, 2, 1]
    assert np.concatenate(list(wide.batches(np.arange(600)))).tolist() == list(range(600))


def test_statistics_are_those_of_all_rows_in_whatever_batches(monkeypatch):
    rng = np.random.default_rng(0)
    mask = rng.random((200, 5)) < 0.7
    tokens = rng.normal(3.0, 2.0, (200, 5, 4)).astype(np.float16)
    cache = token_cache(tokens, mask)
    rows = np.arange(0, 200, 2)
    valid = np.where(mask[rows][..., None], tokens[rows].astype(float), np.nan)
    mean = np.nanmean(valid, axis=0)
    std = np.sqrt(np.nanmean((valid - mean) ** 2, axis=(0, 1)))
    batches = TokenCache.batches
    for size in (10**6, 7):
        monkeypatch.setattr(
            TokenCache, "batches", lambda self, rows, most, limit, s=size: batches(self, rows, s, limit)
        )
        found = pretrain._statistics(cache, rows)
        np.testing.assert_allclose(found[0], mean, rtol=1e-4)
        np.testing.assert_allclose(found[1], std, rtol=1e-4)


# --------------------------------------------------------------------------------------- what the VLA is shown


class Looking(FakeVLA):
    """Keeps the shapes of the pictures and the seeds that it was given."""

    def __init__(self, **spec):
        super().__init__(stochastic=True)
        self.spec = replace(self.spec, **spec)
        self.shapes, self.seeds = set(), []

    def forward(self, obs, tasks, *, seed=None):
        self.shapes.add(obs["wrist"].shape[1:])
        self.seeds += seed
        return super().forward(obs, tasks, seed=seed)


@pytest.mark.parametrize(
    ("spec", "given", "edge"),
    [({}, None, 32), ({"image_size": 16}, None, 16), ({"image_size": 24}, None, 32), ({"image_size": 8}, 16, 16)],
)
def test_frames_are_pooled_only_to_a_size_that_divides_them(config, spec, given, edge):
    vla = Looking(**spec)
    pretrain_token(replace(config, image_size=given), vla)
    assert vla.shapes == {(edge, edge, 3)} and len(set(vla.seeds)) == len(vla.seeds) == 24


def test_demonstrations_that_do_not_fit_are_refused_before_the_vla_runs(config, tmp_path):
    encode = EncodeDemosConfig(demos=config.demos, output=str(tmp_path / "rows.safetensors"), progress=False)
    for change, message in (
        (
            {"cameras": ("agentview", "front")},
            r"needs the cameras \['front'\], and the robot 'panda of the demonstrations' has",
        ),
        ({"action_dim": 14}, "gives actions of 14 numbers, and the robot 'panda of the demonstrations' takes 7"),
        ({"state_dim": 14}, "reads a state of 14 numbers, and the robot 'panda of the demonstrations' has 8"),
    ):
        vla = Looking(**change)
        for run in (
            lambda vla=vla: pretrain_token(config, vla),
            lambda vla=vla: encode_demos(encode, vla, MeanToken(12)),
        ):
            with pytest.raises(ValueError, match=message):
                run()
        assert not vla.seeds
    with pytest.raises(ValueError, match=r"frames of 32 pixels, and it reads 64: collect .* --image_size"):
        pretrain_token(config, Looking(image_size=64))


def test_each_demonstration_has_its_own_noise(config, tmp_path):
    vla = Looking()
    encode_demos(
        EncodeDemosConfig(demos=config.demos, output=str(tmp_path / "rows.safetensors"), progress=False),
        vla,
        MeanToken(12),
    )
    assert len(set(vla.seeds)) == len(vla.seeds) == 4 * 3  # four demonstrations, every second of six steps
