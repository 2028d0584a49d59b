"""Joint stage 1 with a policy of LeRobot: it learns by LeRobot's loss while the RL token is trained on its tokens."""

import csv
import json
from dataclasses import replace
from importlib.metadata import version

import numpy as np
import pytest

pytest.importorskip("lerobot", reason="needs the extra 'lerobot' (scripts/lerobot_env.sh)")

import lerobot_policies as tiny
import torch
from vla_helpers import write_demos

from rlt_gym.data.demo_set import DemoReader
from rlt_gym.rl_token.io import load_rl_token, read_rl_token
from rlt_gym.rl_token.moving import moving_tokens
from rlt_gym.rl_token.pretrain import PretrainTokenConfig, pretrain_token
from rlt_gym.rl_token.tokens import cache_tokens
from rlt_gym.vla.lerobot.learner import LeRobotLearner
from rlt_gym.vla.registry import load_vla

MEAN, STD = 0.05, 0.4  # of the actions in ``lerobot_policies.statistics``


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = tmp_path_factory.mktemp("policies")
    return {
        "act": tiny.make_act(made / "act", dropout=0.0),
        "vae": tiny.make_act(made / "vae", use_vae=True),
        "smolvla": tiny.make_smolvla(made / "smolvla"),
        "whole": tiny.make_smolvla(made / "whole", train_expert_only=False),
    }


@pytest.fixture
def config(tmp_path):
    write_demos(tmp_path / "demos" / "push.hdf5", "push", demos=4, length=6, size=64, assets="embedded", render="fast")
    return PretrainTokenConfig(
        demos=[str(tmp_path / "demos")],
        output=str(tmp_path / "out" / "token.safetensors"),
        width=16,
        heads=2,
        layers=1,
        steps=6,
        batch_size=8,
        held_out=0.25,
        frame_stride=1,
        alpha=1.0,
        vla_learning_rate=1e-3,
        ema_decay=0.0,
        save_every=3,
        progress=False,
    )


def vla_of(folder, **kwargs):
    return load_vla(f"lerobot:{folder}", vla_kwargs=kwargs)


def observations(data, rows):
    return {"agentview": data.pictures["agentview"][rows], "wrist": data.pictures["wrist"][rows]} | {
        "state": data.proprio[rows]
    }


@pytest.mark.parametrize("kind", ["act", "vae", "smolvla"])
def test_the_tokens_are_those_of_the_frozen_policy(folders, config, kind):
    vla = vla_of(folders[kind])
    found = moving_tokens(vla, config.demos, None, 1, ("all",), 1.0, 1e-3)
    wanted = cache_tokens(vla, DemoReader(config.demos), ("all",), vla.spec.image_size)
    rows = np.arange(len(wanted))
    assert len(found) == len(wanted) and found.origin == wanted.origin and found.count == wanted.count
    (tokens, mask), (others, other_mask) = found.batch(rows, "cpu"), wanted.batch(rows, "cpu")
    assert torch.allclose(tokens, others, atol=5e-3) and torch.equal(mask, other_mask)  # float16 in the cache
    assert tokens.std() > 0.1


@pytest.mark.parametrize("gripper", ["env", "open", "closed", "open-signed"])
def test_the_loss_is_that_of_act_written_out(folders, config, gripper):
    """
    Mean absolute error of normalized actions, without VAE and dropout.

    What follows the end of a demonstration counts as zero error in LeRobot 0.4, and not at all in 0.6.
    """
    vla = vla_of(folders["act"], gripper=gripper)
    learner, rows = LeRobotLearner(vla, config.demos), np.array([1, 4, 9, 23])
    _, loss = learner.forward(rows)
    data = learner.data
    seen = []
    handle = vla.policy.model.action_head.register_forward_hook(lambda *call: seen.append(call[-1]))
    vla.forward(observations(data, rows), ["push"] * 4)
    handle.remove()
    total, real = 0.0, 0
    for number, row in enumerate(rows):
        actions = data.actions[data.action_row[row] : data.action_end[row]][:8].copy()
        hand = actions[:, 6]
        actions[:, 6] = {"env": hand, "open": (1 - hand) / 2, "closed": (1 + hand) / 2, "open-signed": -hand}[gripper]
        total += np.abs(seen[0][number, : len(actions)].numpy() - (actions - MEAN) / STD).sum()
        real += len(actions)
    count = 4 * 8 if version("lerobot").startswith("0.4") else real
    assert float(loss.detach()) == pytest.approx(total / (count * 7), rel=1e-5)


@pytest.mark.parametrize("kind", ["vae", "smolvla"])
def test_chance_follows_from_the_generator_given(folders, config, kind):
    """The noise of VAE, dropout and flow; nobody else's random numbers are used up."""
    learner, rows = LeRobotLearner(vla_of(folders[kind]), config.demos), np.arange(4)
    state = torch.get_rng_state()
    one, two, other = (float(learner.forward(rows, np.random.default_rng(seed))[1].detach()) for seed in (1, 1, 2))
    assert one == two != other
    assert torch.equal(torch.get_rng_state(), state) and not learner.net.training


@pytest.mark.parametrize("kind", ["act", "smolvla", "whole"])
def test_what_lerobot_trains_learns(folders, config, kind):
    """A SmolVLA's language model stays frozen unless its configuration says otherwise; its expert learns."""
    vla = vla_of(folders[kind])
    before, frozen = vla.fingerprint(), {name: value.clone() for name, value in vla.policy.named_parameters()}
    tokens = moving_tokens(vla, config.demos, None, 1, ("all",), 1.0, 1e-2)
    first, _ = tokens.batch(np.arange(4), "cpu")
    seen, _, _ = tokens.learn(np.arange(4), 3, 1.0)
    tokens.step(1.0, 1.0)
    assert not seen.requires_grad and vla.fingerprint() == before
    now = dict(tokens.learner.net.named_parameters())
    moved = {name for name, value in now.items() if not torch.equal(value.detach(), frozen[name])}
    assert moved and moved <= vla.trained
    assert any(".vlm." in name for name in moved) == (kind == "whole")
    assert any(".lm_expert." in name for name in moved) == (kind != "act")
    assert not torch.equal(first, tokens.batch(np.arange(4), "cpu")[0])


@pytest.mark.parametrize("kind", ["act", "whole"])
def test_both_learn_and_the_files_belong_together(folders, config, kind, tmp_path):
    vla = vla_of(folders[kind])
    before = vla.fingerprint()
    token = pretrain_token(config, vla)
    folder = tmp_path / "out" / "token_vla"
    moved = vla_of(folder)
    assert vla.fingerprint() == before != moved.fingerprint() == token.vla_fingerprint
    load_rl_token(config.output, moved)
    with pytest.raises(ValueError, match="belongs to the VLA"):
        read_rl_token(config.output, vla)
    provenance = json.loads((folder / "provenance.json").read_text())
    assert provenance["init"]["fingerprint"] == before and provenance["joint"]["alpha"] == 1.0
    with open(config.folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == config.steps and all(float(row["L_vla"]) > 0 for row in rows)
    assert not list(folder.parent.glob(".token_vla*"))


def test_lerobot_reads_the_folder(folders, config, tmp_path):
    from lerobot.policies.act.modeling_act import ACTPolicy

    pretrain_token(config, vla_of(folders["act"]))
    folder = tmp_path / "out" / "token_vla"
    mine, theirs = vla_of(folder).policy.state_dict(), ACTPolicy.from_pretrained(folder, strict=True).state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_checkpoint_keeps_what_is_known_of_its_pictures(folders, config, tmp_path):
    folder = tiny.make_act(tmp_path / "known")
    (folder / "provenance.json").write_text(json.dumps({"demonstrations": {"render": "fast", "assets": "embedded"}}))
    pretrain_token(config, vla_of(folder, control_frequency=20.0, orientation="flipped"))
    spec = vla_of(tmp_path / "out" / "token_vla").spec
    assert (spec.render, spec.assets) == ("fast", "embedded")


def test_imitation_makes_the_policy_better(folders, config, tmp_path):
    vla, rows = vla_of(folders["act"]), np.arange(24)
    pretrain_token(replace(config, steps=40), vla)
    moved = vla_of(tmp_path / "out" / "token_vla")
    with torch.no_grad():
        before, after = (float(LeRobotLearner(one, config.demos).forward(rows)[1]) for one in (vla, moved))
    assert after < 0.8 * before


def test_an_interrupted_training_goes_on_bit_for_bit(folders, config, tmp_path):
    """With the dropout and the noise of a VAE."""
    first = replace(config, schedule="constant", warmup_steps=0)  # else the number of steps changes the rates
    second = replace(first, output=str(tmp_path / "again" / "token.safetensors"))
    pretrain_token(first, vla_of(folders["vae"]))
    pretrain_token(replace(second, steps=3), vla_of(folders["vae"]))
    moved = tmp_path / "again" / "token_vla"
    with pytest.raises(ValueError, match=r"token_vla is there already: remove it"):
        pretrain_token(replace(second, resume=str(second.folder)), vla_of(folders["vae"]))
    moved.rename(tmp_path / "half")
    pretrain_token(replace(second, resume=str(second.folder)), vla_of(folders["vae"]))
    assert vla_of(moved).fingerprint() == vla_of(tmp_path / "out" / "token_vla").fingerprint()
    assert vla_of(moved).fingerprint() != vla_of(tmp_path / "half").fingerprint()
    one, two = (read_rl_token(each.output).state_dict() for each in (first, second))
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_errors(folders, config, tmp_path):
    with pytest.raises(ValueError, match=r"a diffusion policy of LeRobot cannot learn here .*act, smolvla, pi0, pi05"):
        pretrain_token(config, vla_of(tiny.make_diffusion(tmp_path / "diffusion")))
    with pytest.raises(ValueError, match=r"dtype 'float16' may make small gradients zero"):
        pretrain_token(config, vla_of(folders["act"], dtype="float16"))
