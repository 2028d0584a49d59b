"""The gradient steps of stage 1 against oracles: averages, epochs, accumulation, the best weights, resuming."""

import csv
import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from vla_helpers import tiny_vla, write_demos

from rlt_gym.rl_token.decoder import reconstruction_loss
from rlt_gym.rl_token.io import read_autoencoder
from rlt_gym.rl_token.pretrain import PretrainTokenConfig, pretrain_token
from rlt_gym.rl_token.trainer import TokenTrainer
from rlt_gym.testing import FakeVLA
from rlt_sb3.cli.main import main, parse


@pytest.fixture
def config(tmp_path):
    write_demos(tmp_path / "a.hdf5", "a", demos=4, length=6, size=32)  # 18 rows to train on, 6 held out
    return PretrainTokenConfig(
        demos=[str(tmp_path)], output=str(tmp_path / "token.safetensors"), width=16, heads=2, layers=1, steps=12,
        batch_size=8, held_out=0.25, frame_stride=1, bfloat16=False, progress=False,
    )  # fmt: skip


@pytest.fixture
def trainers(monkeypatch):
    """Every trainer that was made."""
    made, init = [], TokenTrainer.__init__

    def spy(self, *args):
        init(self, *args)
        made.append(self)

    monkeypatch.setattr(TokenTrainer, "__init__", spy)
    return made


def metrics(config):
    with open(config.folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def report(config):
    return json.loads(Path(config.output).with_suffix(".json").read_text())


def weights(model):
    return [p.detach().clone() for p in model.modules().parameters()]


def equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ------------------------------------------------------------------------------------------- steps, epochs, batches


@pytest.mark.parametrize(
    ("steps", "epochs", "taken"), [(37, None, 37), (None, 3, 7), (None, 0.5, 2), (5, 3, 5), (9, 3, 7)]
)
def test_exactly_so_many_steps_or_epochs(config, steps, epochs, taken):
    """18 rows in batches of 8: three epochs end in the 7th step."""
    pretrain_token(replace(config, steps=steps, epochs=epochs), FakeVLA())
    rows = metrics(config)
    assert [int(row["step"]) for row in rows] == list(range(1, taken + 1))
    assert float(rows[-1]["epoch"]) == pytest.approx(taken * 8 / 18) and report(config)["train"]["steps"] == taken
    board = EventAccumulator(str(config.folder / "tensorboard"))
    board.Reload()
    for key in ("L_ro_mean", "gradient_norm", "learning_rate"):
        events = board.Scalars(f"pretrain_token/{key}")
        assert [event.step for event in events] == list(range(1, taken + 1))
        np.testing.assert_allclose([event.value for event in events], [float(row[key]) for row in rows], rtol=1e-6)


def test_2000_steps_if_nothing_is_said():
    assert PretrainTokenConfig().steps == 2000 and PretrainTokenConfig(epochs=2).steps is None


def test_an_epoch_reads_every_row_once(config, trainers):
    pretrain_token(replace(config, steps=1), FakeVLA())
    (trainer,) = trainers
    read = np.concatenate([trainer.batch_rows(number) for number in range(9)])  # 72 rows: four epochs
    epochs = read.reshape(4, 18)
    assert all(sorted(epoch) == sorted(trainer.train_rows) for epoch in epochs)
    assert not np.array_equal(epochs[0], epochs[1])
    assert not set(trainer.train_rows) & set(trainer.held_rows) and len(trainer.held_rows) == 6


def test_accumulated_gradients_are_those_of_one_large_batch(config, trainers):
    """All rows have equally many tokens, so the mean of means is the mean."""
    change = {"steps": 3, "context_dropout": 0.0}
    pretrain_token(replace(config, **change), FakeVLA())
    pretrain_token(replace(config, **change, batch_size=2, accumulate=4), FakeVLA())
    for first, second in zip(*(weights(trainer.model) for trainer in trainers), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("loss", ["mean", "token", "sum"])
def test_the_loss_that_is_chosen_is_the_one_that_is_followed(config, monkeypatch, loss):
    gradients, step = [], torch.optim.AdamW.step

    def spy(self):
        gradients.append([p.grad.clone() for p in self.param_groups[0]["params"]])
        return step(self)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    for one in ("mean", loss):
        pretrain_token(replace(config, steps=1, loss=one, clip_norm=1e9), FakeVLA(n_tokens=5, token_dim=12))
    factor = {"mean": 1, "token": 12, "sum": 12 * 4}[loss]  # four tokens of five: the instruction's checksum is odd
    for base, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, factor * base, rtol=1e-3, atol=1e-6)


def test_the_three_scales_of_the_loss():
    torch.manual_seed(0)
    prediction, z, mask = torch.randn(3, 4, 2), torch.randn(3, 4, 2), torch.rand(3, 4) < 0.6
    errors = [((prediction[b, n] - z[b, n]) ** 2).sum().item() for b in range(3) for n in range(4) if mask[b, n]]
    found = reconstruction_loss(prediction, z, mask)
    assert found["mean"].item() == pytest.approx(np.mean(errors) / 2)
    assert found["token"].item() == pytest.approx(np.mean(errors))
    assert found["sum"].item() == pytest.approx(np.sum(errors) / 3)


@pytest.mark.parametrize(("name", "kind"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)])
def test_optimizer_schedule_and_decay(config, trainers, name, kind):
    change = {"optimizer": name, "weight_decay": 0.03, "schedule": "constant", "warmup_steps": 4, "learning_rate": 0.01}
    pretrain_token(replace(config, **change), FakeVLA())
    assert type(trainers[0].optimizer) is kind and trainers[0].optimizer.param_groups[0]["weight_decay"] == 0.03
    rates = [float(row["learning_rate"]) for row in metrics(config)]
    np.testing.assert_allclose(rates, [0.0025, 0.005, 0.0075, *[0.01] * 9])


# ---------------------------------------------------------------------------------------- averaged and best weights


@pytest.mark.parametrize(("limit", "first"), [(0.5, 0), (0.999, 0), (0.999, 20000)])
def test_the_average_follows_its_formula_and_is_what_is_written(config, monkeypatch, trainers, limit, first):
    """Six steps after the ``first``; the limit 0.999 is reached after 8,990."""
    path, step = [], TokenTrainer._step

    def spy(self, done):
        if not path:
            path.append(weights(self.model))
            self.state["step"] = first
        row = step(self, done)
        path.append(weights(self.model))
        return row

    monkeypatch.setattr(TokenTrainer, "_step", spy)
    change = {"ema_decay": limit, "steps": first + 6, "schedule": "constant", "warmup_steps": 0, "learning_rate": 0.01}
    pretrain_token(replace(config, **change), FakeVLA())
    expected = [p.double() for p in path[0]]
    assert len(path) == 7
    for number, now in enumerate(path[1:], first + 1):
        decay = min(limit, (1 + number) / (10 + number))
        expected = [decay * a + (1 - decay) * b.double() for a, b in zip(expected, now, strict=True)]
    for a, b in zip(expected, weights(trainers[0].average), strict=True):
        torch.testing.assert_close(a.float(), b, rtol=1e-5, atol=1e-6)
    last = read_autoencoder(config.output.replace(".safetensors", "_last.safetensors"))[0]
    written, raw = dict(last.named_parameters()), dict(trainers[0].model.encoder.named_parameters())
    for name, value in trainers[0].average.encoder.named_parameters():
        assert torch.equal(written[name], value.half().float())
    assert any(not torch.equal(written[name], value.half().float()) for name, value in raw.items())


def test_without_an_average_the_weights_themselves_are_written(config, trainers):
    pretrain_token(replace(config, ema_decay=0.0), FakeVLA())
    assert trainers[0].average is trainers[0].model


def test_the_best_weights_by_held_out_loss_are_written(config, monkeypatch, trainers):
    """The loss of step 4 is made the lowest."""
    evaluate, at_best = TokenTrainer.evaluate, []

    def spy(self):
        loss = evaluate(self)
        if self.state["step"] != 4:
            return loss + 1.0
        at_best.extend(weights(self.average))
        return loss

    monkeypatch.setattr(TokenTrainer, "evaluate", spy)
    pretrain_token(replace(config, eval_every=2), FakeVLA())
    rows = metrics(config)
    losses = {int(row["step"]): float(row["held_out_L_ro"]) for row in rows if row["held_out_L_ro"]}
    assert sorted(losses) == [2, 4, 6, 8, 10, 12] and min(losses, key=losses.get) == 4
    history = report(config)["train"]
    assert history["best_step"] == 4 and history["best_held_out_L_ro"] == losses[4]
    encoder, decoder = read_autoencoder(config.output)
    assert equal([p.half().float() for p in at_best], [*encoder.parameters(), *decoder.parameters()])
    last = read_autoencoder(config.output.replace(".safetensors", "_last.safetensors"))[0]
    assert not equal(encoder.parameters(), last.parameters())


def test_the_held_out_loss_is_that_of_the_averaged_weights(config, trainers):
    pretrain_token(config, FakeVLA())
    (trainer,) = trainers
    assert trainer.state["best_step"] == 12, "of a training this short"
    found = report(config)["held_out"]["L_ro_z_only"]
    assert found == pytest.approx(float(metrics(config)[-1]["held_out_L_ro"]), rel=1e-5)


# ---------------------------------------------------------------------------------------------------- going on


class Killed(Exception):
    pass


def killed_in_step(monkeypatch, number):
    step = TokenTrainer._step

    def spy(self, done):
        if self.state["step"] == number:
            raise Killed
        return step(self, done)

    monkeypatch.setattr(TokenTrainer, "_step", spy)
    return step


def outcome(config):
    found = {"metrics": [{**row, "seconds": ""} for row in metrics(config)], "held_out": report(config)["held_out"]}
    for name in ("", "_last"):
        found[name] = load_file(config.output.replace(".safetensors", f"{name}.safetensors"))
    return found


def same(first, second):
    assert first["metrics"] == second["metrics"] and first["held_out"] == second["held_out"]
    for name in ("", "_last"):
        assert all(torch.equal(value, second[name][key]) for key, value in first[name].items())


def test_a_killed_training_goes_on_bit_for_bit(config, monkeypatch):
    config = replace(config, save_every=5, eval_every=3, ema_decay=0.9)
    pretrain_token(config, tiny_vla())
    expected = outcome(config)
    step = killed_in_step(monkeypatch, 8)  # steps 6 to 8 are lost
    with pytest.raises(Killed):
        pretrain_token(config, tiny_vla())
    monkeypatch.setattr(TokenTrainer, "_step", step)
    assert len(metrics(config)) == 8
    pretrain_token(replace(config, resume=str(config.folder)), tiny_vla())
    same(outcome(config), expected)


def test_a_training_can_be_made_longer(config):
    long = replace(config, steps=20, schedule="constant", eval_every=5, save_every=10)
    pretrain_token(long, tiny_vla())
    expected = outcome(long)
    pretrain_token(replace(long, steps=10), tiny_vla())
    pretrain_token(replace(long, resume=str(config.folder)), tiny_vla())
    same(outcome(long), expected)


def test_what_cannot_be_resumed(config, tmp_path, monkeypatch):
    killed_in_step(monkeypatch, 2)
    with pytest.raises(ValueError, match="There is no training to resume in"):
        pretrain_token(replace(config, resume=str(config.folder)), FakeVLA())
    with pytest.raises(Killed):
        pretrain_token(config, FakeVLA())
    resumed = replace(config, resume=str(config.folder))
    with pytest.raises(ValueError, match=r"no checkpoint .*checkpoint.pt: the training was stopped before it"):
        pretrain_token(resumed, FakeVLA())
    (config.folder / "checkpoint.pt").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"checkpoint.pt cannot be read .*: begin anew"):
        pretrain_token(resumed, FakeVLA())
    with pytest.raises(ValueError, match=r"keeps its settings, and these differ: layers 1 -> 2, seed 0 -> 1\."):
        pretrain_token(replace(resumed, layers=2, seed=1), FakeVLA())
    with pytest.raises(ValueError, match=r"the training of .*other.safetensors is in .*other_training"):
        pretrain_token(replace(resumed, output=str(tmp_path / "other.safetensors")), FakeVLA())


def test_a_training_of_an_earlier_version_goes_on(config):
    """Settings that it did not have count as their defaults."""
    config = replace(config, save_every=6, schedule="constant")
    pretrain_token(replace(config, steps=6), FakeVLA())
    path = config.folder / "config.yaml"
    saved = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({key: value for key, value in saved.items() if not key.startswith("lerobot_")}))
    resumed = replace(config, steps=9, resume=str(config.folder))
    with pytest.raises(ValueError, match=r"these differ: lerobot_gripper 'env' -> 'open'\. Begin anew"):
        pretrain_token(replace(resumed, lerobot_gripper="open"), FakeVLA())
    pretrain_token(resumed, FakeVLA())
    assert len(metrics(config)) == 9


def test_the_command_line_resumes_with_the_settings_of_the_folder(config, monkeypatch, capsys):
    pretrain_token(replace(config, save_every=6, steps=6), tiny_vla())
    found = parse("pretrain-token", ["--resume", str(config.folder), "--steps", "9"])
    assert found == replace(config, save_every=6, steps=9, resume=str(config.folder))
    assert main(["pretrain-token", "--resume", str(config.folder / "none")]) == 2
    assert "There is nothing to resume in" in capsys.readouterr().err


def test_training_begins_from_a_saved_token(config, tmp_path, trainers):
    pretrain_token(config, FakeVLA())
    start = read_autoencoder(config.output)
    other = replace(config, init=config.output, output=str(tmp_path / "next.safetensors"), learning_rate=0.0, steps=2)
    pretrain_token(other, FakeVLA())
    assert equal(weights(trainers[1].model), [p for part in start for p in part.parameters()])
    assert torch.equal(trainers[1].model.encoder.token_mean, start[0].token_mean)
    with pytest.raises(ValueError, match=r"has \{'width': 16, 'layers': 1\}: give the same settings"):
        pretrain_token(replace(other, width=32, layers=2), FakeVLA())
    with pytest.raises(ValueError, match="belongs to the VLA"):
        pretrain_token(other, FakeVLA(stochastic=True))


# ------------------------------------------------------------------------------------------------ settings, presets


def test_the_published_recipe_is_one_file():
    """Of the model card: every key exists here and does what it says (the tests above)."""
    found = parse("pretrain-token", ["--config", "molmoact2"])
    card = {
        "kinds": ("all",), "context_dropout": 0.9, "loss": "token", "optimizer": "adamw", "learning_rate": 5e-5,
        "warmup_steps": 1000, "clip_norm": 1.0, "ema_decay": 0.999, "steps": 10000, "z_dim": None,
    }  # fmt: skip
    assert {key: getattr(found, key) for key in card} == card


def test_the_presets_of_both_tracks(config, trainers):
    names = {field.name for field in fields(PretrainTokenConfig)}
    for file in PretrainTokenConfig.configs.iterdir():
        assert set(yaml.safe_load(file.read_text())) <= names
    rlt, rlt_a = (parse("pretrain-token", ["--config", name]) for name in ("rlt", "rlt_a"))
    assert (rlt.kinds, rlt.loss, rlt.context_dropout, rlt.z_dim) == (("all",), "sum", 0.0, None)
    assert (rlt_a.kinds, rlt_a.z_dim) == (("action",), 256)
    for preset in (rlt, rlt_a):
        small = {"demos": config.demos, "output": config.output, "steps": 2, "frame_stride": 2, "held_out": 0.25}
        pretrain_token(replace(preset, **small, batch_size=4, progress=False), tiny_vla())
    counts = [len(trainer.tokens.batch(np.arange(1), "cpu")[1][0]) for trainer in trainers]
    assert counts == [16 + 4 + 2 + 4, 4], "all tokens, and those of the four actions"
    assert [trainer.best.encoder.z_dim for trainer in trainers] == [32, 256]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps is 0; it must be at least 1"), ({"accumulate": 0}, "accumulate is 0"),
        ({"eval_every": 0}, "eval_every is 0"), ({"save_every": -1}, "save_every is -1; it must be at least 0"),
        ({"epochs": 0}, "epochs is 0; it must be positive"), ({"minutes": -1}, "minutes is -1"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"), ({"clip_norm": 0}, "clip_norm is 0"),
        ({"ema_decay": 1.0}, r"ema_decay is 1.0; it must be in \[0, 1\)"),
        ({"loss": "max"}, "loss is 'max'; it must be one of mean, token, sum"),
        ({"optimizer": "sgd"}, "optimizer is 'sgd'; it must be one of adam, adamw"),
        ({"schedule": "step"}, "schedule is 'step'; it must be one of cosine, constant"),
        ({"held_out": 1.0}, r"held_out is 1.0; it must be in \(0, 1\)"), ({"output": "token.pt"}, "must end in"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        PretrainTokenConfig(**change)


def test_either_demonstrations_or_tokens(config):
    for change in ({"demos": []}, {"tokens": "folder"}):
        with pytest.raises(ValueError, match="Give either demos or tokens"):
            pretrain_token(replace(config, **change), FakeVLA())


def test_a_loss_that_is_not_finite_is_told_with_its_step(config):
    with pytest.raises(ValueError, match=r"diverged in step \d+ \(loss is not finite\); lower learning_rate"):
        pretrain_token(replace(config, learning_rate=1e30, warmup_steps=0, clip_norm=1e30), FakeVLA())
