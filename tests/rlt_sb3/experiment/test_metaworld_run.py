"""Demonstrations, VLA and a run on the second simulator: nothing of it knows LIBERO."""

import numpy as np
import pytest
from run_helpers import SMALL_RLT

from rlt_sb3.experiment.config import EnvConfig, EvalSettings, TrainConfig
from rlt_sb3.experiment.report import read_metrics
from rlt_sb3.experiment.train import train

pytest.importorskip("metaworld")
DRAWER_CLOSE = 5


def test_from_demonstrations_to_a_report(tmp_path):
    from rlt_gym.metaworld.collect import collect
    from rlt_gym.vla.mini.model import MiniVLAConfig
    from rlt_gym.vla.mini.training import TrainVLAConfig, train_vla

    demos = collect("MT10", [DRAWER_CLOSE], demos=2, out=str(tmp_path / "demos"), noise=0.0, image_size=32, num_envs=1)
    tiny = MiniVLAConfig(horizon=4, width=32, layers=1, heads=2, mlp_ratio=2, stem=(8, 8, 16), image_size=32)
    file = tmp_path / "vla.safetensors"
    vla = train_vla(
        TrainVLAConfig(
            [str(demos[0])], str(file), tiny, steps=3, batch_size=4, warmup_steps=1, held_out=0.0, progress=False
        )
    )
    assert vla.spec.action_dim == 4 and vla.spec.cameras == ("corner2", "gripperPOV")
    config = TrainConfig(
        name="drawer",
        out=str(tmp_path),
        env=EnvConfig(
            "RLToken-MetaWorld-v0", 2, "MT10", [DRAWER_CLOSE], chunk_length=4, vla=str(file), rl_token="mean",
            max_episode_steps=12,
        ),
        algorithms={"rlt": SMALL_RLT},
        evaluation=EvalSettings(n_states=2, selection_states=2, selection_every=30, record_states=1),
        total_chunks=40,
        progress=False,
    )  # fmt: skip
    train(config)
    folder = tmp_path / "drawer"
    assert (folder / "report.html").exists() and (folder / "before.mp4").exists()
    metrics = read_metrics(folder)
    last = {name: values[~np.isnan(values)][-1] for name, values in metrics.items() if (~np.isnan(values)).any()}
    assert last["time/robot_minutes"] == pytest.approx(last["time/control_steps"] / 80 / 60)  # 80 steps a second
    assert {f"rollout/vla_distance_{name}" for name in ("x", "y", "z", "gripper")} <= metrics.keys()
