"""The SmolVLA that lerobot-train trained (examples/lerobot) loads anywhere, keeps the contract, and is practiced."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from rlt_gym.rl_token.env import RLTokenVectorEnv
from rlt_gym.rl_token.noise import NoiseAction
from rlt_gym.testing import FakeLiberoVectorEnv, check_vla
from rlt_gym.vla.lerobot.policies import wrapped
from rlt_gym.vla.registry import load_vla

pytest.importorskip("lerobot", reason="needs the extra 'lerobot' (scripts/lerobot_env.sh)")

EXAMPLE = Path(__file__).parent.parent / "examples" / "lerobot"
SMOLVLA = EXAMPLE / "smolvla"


def test_it_keeps_the_contract_wherever_it_lies(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    moved = shutil.copytree(SMOLVLA, tmp_path / "moved")
    vla = load_vla(f"lerobot:{moved}")
    output = check_vla(vla)
    assert vla.spec.stochastic and vla.spec.horizon == 8 and vla.spec.image_size == 64
    assert output.tokens.dtype == torch.float32  # stored in half, used in single precision
    assert vla.fingerprint() == load_vla(f"lerobot:{SMOLVLA}").fingerprint()
    # an environment draws what it was trained on
    assert (vla.spec.render, vla.spec.assets) == ("fast", "embedded")
    with pytest.raises(ValueError, match="'lerobot-smolvla' was trained on 'fast' pictures"):
        vla.spec.check_render("exact")
    # nothing in it names a folder of the machine that trained it
    for path in moved.rglob("*.json"):
        assert "runs/" not in path.read_text().replace("runs/lerobot", ""), path
    made = json.loads((moved / "provenance.json").read_text())
    assert (made["lerobot"], made["step"], made["demonstrations"]["demos"]) == ("0.4.4", 200, 60)


def test_its_backbone_is_rebuilt_by_the_script(tmp_path):
    script = EXAMPLE / "tiny_smolvlm.py"
    subprocess.run([sys.executable, str(script), str(tmp_path / "vlm")], check=True, capture_output=True, timeout=300)
    shipped = SMOLVLA / "smolvlm_tiny"
    assert sorted(path.name for path in shipped.iterdir()) == sorted(path.name for path in (tmp_path / "vlm").iterdir())
    for name in ("tokenizer.json", "config.json"):
        assert json.loads((tmp_path / "vlm" / name).read_text()) == json.loads((shipped / name).read_text()), name


def test_its_noise_can_be_chosen(monkeypatch):
    """As DSRL does: what is played is what SmolVLA's own flow makes of the noise."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    vla = load_vla(f"lerobot:{SMOLVLA}")
    raw = FakeLiberoVectorEnv(2, chunk_length=8, image_size=64)
    env = NoiseAction(RLTokenVectorEnv(raw, vla, SMOLVLA / "rl_token.safetensors"))
    assert env.single_action_space.shape == (1, 7)
    obs, infos = env.reset(seed=0)
    noise = np.random.default_rng(0).normal(size=(2, 1, 7)).astype(np.float32).clip(-1.5, 1.5)
    rows = {camera: np.stack([np.full((64, 64, 3), value, np.uint8) for value in values]) for camera, values in (
        ("agentview", [0, 0]), ("wrist", infos["init_index"]))}  # fmt: skip
    whole = torch.tensor(noise).repeat(1, 8, 1)
    seen = {**rows, "state": obs["proprio"]}
    with wrapped(vla.policy, "predict_action_chunk", lambda method, batch, noise: method(batch, noise=whole)):
        wanted = vla.forward(seen, list(infos["instruction"])).chunk
    _, _, _, _, infos = env.step(noise)
    np.testing.assert_allclose(infos["executed_actions"], wanted.numpy(), atol=1e-5)


@pytest.mark.sim
@pytest.mark.parametrize(("algorithm", "more"), [("rlt", "--rlt.critic_warmup_updates 8"), ("dsrl", "--dsrl.parts 8")])
def test_rlt_train_practices_it_on_libero(tmp_path, monkeypatch, algorithm, more):
    """A few chunks, by the command and the configuration that the page on LeRobot names."""
    monkeypatch.chdir(EXAMPLE.parent.parent)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from rlt_sb3.cli.main import main
    from rlt_sb3.experiment.report import read_evaluations

    short = f"--total_chunks 40 --algorithm {algorithm} --{algorithm}.learning_starts 16 {more} --evaluation.n_states 2"
    short += " --evaluation.selection_states 2 --evaluation.selection_every 40 --evaluation.videos false"
    words = ["train", "--config", str(EXAMPLE / "smolvla.yaml"), "--out", str(tmp_path), *short.split()]
    assert main([*words, "--progress", "false"]) == 0
    run = tmp_path / "smolvla"
    found = read_evaluations(run)
    assert found["vla"]["n"] == found[algorithm]["n"] == 2 and (run / "model.zip").is_file()
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["env"]["vla"] == "lerobot:examples/lerobot/smolvla"
