"""The SmolVLA that lerobot-train trained (examples/lerobot) loads anywhere, keeps the contract, and is practiced."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from rlt_gym.testing import check_vla
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


@pytest.mark.sim
def test_rlt_train_practices_it_on_libero(tmp_path, monkeypatch):
    """A few chunks, by the command and the configuration that the page on LeRobot names."""
    monkeypatch.chdir(EXAMPLE.parent.parent)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from rlt_sb3.cli.main import main
    from rlt_sb3.experiment.report import read_evaluations

    short = "--total_chunks 40 --rlt.learning_starts 16 --rlt.critic_warmup_updates 8 --evaluation.n_states 2"
    short += " --evaluation.selection_states 2 --evaluation.selection_every 40 --evaluation.videos false"
    words = ["train", "--config", str(EXAMPLE / "smolvla.yaml"), "--out", str(tmp_path), *short.split()]
    assert main([*words, "--progress", "false"]) == 0
    run = tmp_path / "smolvla"
    found = read_evaluations(run)
    assert found["vla"]["n"] == found["rlt"]["n"] == 2 and (run / "model.zip").is_file()
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["env"]["vla"] == "lerobot:examples/lerobot/smolvla"
