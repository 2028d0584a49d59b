"""MiniVLA: the FrozenVLA contract, files, and that training lowers the loss."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from vla_helpers import SHIPPED_VLAS, TINY, observations, tiny_vla, write_demos

from rlt_gym.vla import FrozenVLA, VLASpec, load_vla
from rlt_gym.vla.mini.model import VOCABULARY, MiniVLA, MiniVLAConfig, normalize_frames, word_ids
from rlt_gym.vla.mini.training import TrainVLAConfig, random_shift, train_vla

TASKS = ["put the bowl on the stove", "open the top drawer and more words than before", "frobnicate", "push the plate"]


def test_contract():
    vla = tiny_vla()
    assert isinstance(vla, FrozenVLA)
    output = vla.forward(observations(4), TASKS).check(vla.spec, 4)
    assert output.tokens.shape == (4, tiny_vla().net.num_tokens, 32) and output.chunk.shape == (4, 4, 7)
    assert output.kind[0].bincount().tolist() == [0, 16 + 4, 1, 1, 4]
    assert not any(parameter.requires_grad for parameter in vla.net.parameters())
    assert not output.tokens.is_inference()


def test_rows_do_not_depend_on_the_batch():
    vla, obs = tiny_vla(), observations(4)
    whole = vla.forward(obs, TASKS)
    order = [2, 0, 3, 1]
    shuffled = vla.forward({key: value[order] for key, value in obs.items()}, [TASKS[i] for i in order])
    torch.testing.assert_close(shuffled.tokens, whole.tokens[order], atol=1e-5, rtol=1e-5)
    for i, task in enumerate(TASKS):
        one = vla.forward({key: value[i : i + 1] for key, value in obs.items()}, [task])
        torch.testing.assert_close(one.tokens[0], whole.tokens[i], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(one.chunk[0], whole.chunk[i], atol=1e-5, rtol=1e-5)


def test_every_input_matters():
    vla, obs = tiny_vla(), observations(1)
    chunk = vla.forward(obs, TASKS[:1]).chunk
    assert not torch.equal(chunk, vla.forward(obs, TASKS[1:2]).chunk)
    for key, other in observations(1, seed=1).items():
        assert not torch.equal(chunk, vla.forward({**obs, key: other}, TASKS[:1]).chunk), key


def test_frames_are_turned_upright():
    """A marker at the top left of the upright picture is at the bottom left of LIBERO's."""
    upright = np.zeros((1, 64, 64, 3), np.uint8)
    upright[0, :16, :16] = 255
    seen = normalize_frames(torch.from_numpy(upright[:, ::-1].copy()), 32)
    assert seen.shape == (1, 3, 32, 32)
    assert (seen[0, :, :8, :8] > 1).all() and (seen[0, :, 8:] < -1).all() and (seen[0, :, :, 8:] < -1).all()


def test_larger_frames_are_averaged():
    vla, obs = tiny_vla(), observations(1)
    big = {**obs, **{key: obs[key].repeat(2, axis=1).repeat(2, axis=2) for key in ("agentview", "wrist")}}
    torch.testing.assert_close(vla.forward(big, TASKS[:1]).chunk, vla.forward(obs, TASKS[:1]).chunk)


def test_words():
    assert word_ids("Put the bowl!") == [VOCABULARY.index(word) for word in ("put", "the", "bowl")]
    (unknown,) = word_ids("frobnicate")
    assert len(VOCABULARY) <= unknown < len(VOCABULARY) + 32
    assert word_ids("") == [] and tiny_vla().forward(observations(1), [""]).chunk.isfinite().all()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"agentview": np.zeros((2, 32, 32, 3), np.float32)}, "agentview is float32"),
        ({"wrist": np.zeros((2, 16, 16, 3), np.uint8)}, "S >= 32"),
        ({"state": np.zeros((2, 7), np.float32)}, "state has shape"),
    ],
)
def test_bad_observations(change, match):
    with pytest.raises(ValueError, match=match):
        tiny_vla().forward({**observations(2), **change}, TASKS[:2])


def test_save_and_load(tmp_path):
    vla, obs = tiny_vla(), observations(2)
    path = tmp_path / "vla.safetensors"
    vla.save(path)
    loaded = load_vla(path)
    assert isinstance(loaded, MiniVLA) and loaded.config == TINY
    assert loaded.fingerprint() == vla.fingerprint() == json.loads(path.with_suffix(".json").read_text())["fingerprint"]
    torch.testing.assert_close(
        loaded.forward(obs, TASKS[:2]).chunk, vla.forward(obs, TASKS[:2]).chunk, atol=5e-3, rtol=0
    )
    changed = tiny_vla()
    with torch.no_grad():
        changed.net.norm.bias[3] += 0.01
    assert changed.fingerprint() != vla.fingerprint()
    assert tiny_vla(1).fingerprint() != vla.fingerprint()


def test_file_errors(tmp_path):
    for load, kind in ((load_vla, "VLA"), (MiniVLA.load, "MiniVLA")):
        with pytest.raises(ValueError, match=rf"no {kind} weights at .*none\.safetensors; train one"):
            load(tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match=rf"allowed are .*{', '.join(map(repr, SHIPPED_VLAS))}"):
        load_vla("maxi")
    path = tmp_path / "vla.safetensors"
    tiny_vla().save(path)
    path.write_bytes(path.read_bytes()[:-100])
    for load, kind in ((load_vla, "VLA"), (MiniVLA.load, "MiniVLA")):
        with pytest.raises(ValueError, match=rf"vla\.safetensors cannot be read as {kind} weights .*; train one"):
            load(path)
    with pytest.raises(ValueError, match="lacks spec"):
        load_vla(object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="multiple of 16"):
        MiniVLAConfig(image_size=60)


def test_contract_check_finds_faults():
    vla = tiny_vla()
    output = vla.forward(observations(1), TASKS[:1])
    with pytest.raises(ValueError, match="chunk is"):
        output.check(VLASpec("x", 32, 5), 1)
    output.chunk[0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="outside"):
        output.check(vla.spec, 1)


def test_random_shift_moves_whole_frames():
    frames = np.arange(8 * 8, dtype=np.uint8).reshape(1, 8, 8, 1).repeat(3, axis=3).repeat(20, axis=0)
    moved = random_shift(frames, 2, np.random.default_rng(0))
    offsets = moved[:, 4, 4, 0].astype(int) - frames[:, 4, 4, 0]
    assert set(offsets) <= {8 * dy + dx for dy in range(-2, 3) for dx in range(-2, 3)} and len(set(offsets)) > 5


def test_training_lowers_the_loss_and_is_repeatable(tmp_path):
    write_demos(tmp_path / "a.hdf5", "put the bowl on the stove", demos=6)
    write_demos(tmp_path / "b.hdf5", "put the bowl on the plate", demos=6, seed=1)
    config = TrainVLAConfig(
        demos=[str(tmp_path / "*.hdf5")],
        output=str(tmp_path / "out.safetensors"),
        model=TINY,
        steps=1,
        batch_size=16,
        warmup_steps=5,
        ema_decay=0.9,
        held_out=0.2,
        progress=False,
    )
    before = train_vla(config).provenance["train_losses"]
    vla = train_vla(replace(config, steps=150))
    record = vla.provenance
    assert record["train_losses"]["action"] < 0.6 * before["action"]
    assert record["train_losses"]["aux"] < 0.8 * before["aux"]
    assert record["demos"] == {"a.hdf5": 6, "b.hdf5": 6} and record["success_rates"] is None
    assert set(record["held_out_losses"]) == {"action", "pose", "gripper", "aux"}
    assert np.abs(vla.net.proprio_mean.numpy()).max() > 0
    assert train_vla(replace(config, steps=10)).fingerprint() == train_vla(replace(config, steps=10)).fingerprint()


def test_a_blind_policy_learns_and_never_sees(tmp_path):
    write_demos(tmp_path / "a.hdf5", "open the middle drawer of the cabinet", demos=6)
    config = TrainVLAConfig(
        [str(tmp_path)], str(tmp_path / "out.safetensors"), TINY, steps=1, batch_size=16, held_out=0.0, progress=False
    )
    before = train_vla(replace(config, blind=True)).provenance["train_losses"]["action"]
    for blind in (True, False):
        vla = train_vla(replace(config, blind=blind, steps=150))
        assert vla.provenance["train_losses"]["action"] < 0.8 * before
        obs = observations(2)
        other = {**obs, "agentview": 255 - obs["agentview"], "wrist": 255 - obs["wrist"]}
        moved = {**obs, "state": obs["state"] + 0.1}
        chunks = [vla.forward(one, ["a", "b"]).chunk for one in (obs, other, moved)]
        assert torch.equal(chunks[0], chunks[1]) is blind and not torch.equal(chunks[0], chunks[2])


@pytest.mark.parametrize(
    ("kinds", "expected"), [(("official", "official"), "official"), (("official", "embedded"), None), (("", ""), None)]
)
def test_the_assets_of_the_demonstrations_are_remembered(tmp_path, kinds, expected):
    for number, kind in enumerate(kinds):
        write_demos(tmp_path / f"{number}.hdf5", "a", demos=2, seed=number, **({"assets": kind} if kind else {}))
    output = str(tmp_path / "out.safetensors")
    config = TrainVLAConfig(
        demos=[str(tmp_path)], output=output, model=TINY, steps=1, batch_size=4, held_out=0.0, progress=False
    )
    assert train_vla(config).spec.assets == expected == load_vla(output).spec.assets


def test_train_config_is_checked():
    with pytest.raises(ValueError, match="safetensors"):
        TrainVLAConfig(output="x.pt")
    with pytest.raises(ValueError, match="held_out"):
        TrainVLAConfig(held_out=1.0)


@pytest.fixture
def fine_tuning(tmp_path):
    """Demonstrations whose hand is elsewhere than in the training of the VLA, and one that failed."""
    vla = tiny_vla(3)
    with torch.no_grad():
        vla.net.proprio_mean.fill_(0.7)
        vla.net.proprio_std.fill_(1.3)
    vla.provenance["assets"] = "official"
    vla.save(tmp_path / "old.safetensors")
    write_demos(tmp_path / "demos" / "good.hdf5", "put the bowl on the stove", demos=6, render="fast")
    write_demos(tmp_path / "demos" / "bad.hdf5", "put the bowl on the plate", demos=3, success=False, render="fast")
    write_demos(tmp_path / "demos" / "more.hdf5", "put the bowl on the plate", demos=2, seed=1, render="fast")
    return TrainVLAConfig(
        demos=[str(tmp_path / "demos")], output=str(tmp_path / "new.safetensors"), batch_size=16, held_out=0.0,
        init=str(tmp_path / "old.safetensors"), steps=1, warmup_steps=1, ema_decay=0.5,
    )  # fmt: skip


def test_fine_tuning_goes_on_from_the_weights_and_leaves_failures_out(fine_tuning, capsys):
    old = MiniVLA.load(fine_tuning.init)
    same = train_vla(replace(fine_tuning, learning_rate=0.0, weight_decay=0.0))
    assert same.fingerprint() == old.fingerprint() and same.config == TINY
    assert "3 episodes failed and are left out" in capsys.readouterr().out
    new = train_vla(replace(fine_tuning, steps=80, progress=False))
    assert new.fingerprint() != old.fingerprint()
    for name in ("proprio_mean", "proprio_std"):
        assert torch.equal(getattr(new.net, name), getattr(old.net, name)), name
    record = new.provenance
    assert record["init"] == {"vla": fine_tuning.init, "fingerprint": old.fingerprint()}
    assert record["demos"] == {"bad.hdf5": 0, "good.hdf5": 6, "more.hdf5": 2} and record["failures_left_out"] == 3
    assert record["train_losses"]["action"] < 0.9 * same.provenance["train_losses"]["action"]


def test_fine_tuning_of_what_does_not_fit(fine_tuning):
    with pytest.raises(ValueError, match=r"the architecture MiniVLAConfig.* asks for another"):
        train_vla(replace(fine_tuning, model=replace(TINY, layers=2)))
    with pytest.raises(ValueError, match="Unknown VLA 'maxi'"):
        train_vla(replace(fine_tuning, init="maxi"))
    write_demos(Path(fine_tuning.demos[0]) / "other.hdf5", "put the bowl on the stove", demos=2, render="exact")
    with pytest.raises(ValueError, match=r"other\.hdf5 has other pictures than init"):
        train_vla(fine_tuning)
