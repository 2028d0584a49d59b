"""A run on LIBERO whose training episodes go by a reward model, and whose evaluations go by the simulator."""

import numpy as np
import pytest
import torch
from run_helpers import SMALL_RLT

from rlt_gym.reward.model import RewardModel, RewardModelConfig, save_reward_model
from rlt_gym.vla import load_vla
from rlt_sb3.experiment.config import EnvConfig, EvalSettings, TrainConfig
from rlt_sb3.experiment.report import read_metrics
from rlt_sb3.experiment.train import train


def test_run(tmp_path):
    vla, path = load_vla("mini"), tmp_path / "reward.safetensors"
    easy = RewardModel(RewardModelConfig(vla.spec.token_dim, threshold=0.0), vla.fingerprint(), "mini")
    save_reward_model(path, easy, {})  # whatever it sees is a success: every training episode has one chunk
    env = EnvConfig(
        num_envs=2, suite="libero_goal", task_ids=[1], assets="embedded", max_episode_steps=24, reward_model=str(path)
    )
    config = TrainConfig(
        name="judged",
        out=str(tmp_path),
        env=env,
        algorithms={"rlt": SMALL_RLT},
        evaluation=EvalSettings(n_states=2, selection_states=2, selection_every=20, record_states=0, videos=False),
        total_chunks=40,
        deterministic=True,
        progress=False,
    )
    result = train(config)
    metrics = read_metrics(tmp_path / "judged")
    last = {name: values[~np.isnan(values)][-1] for name, values in metrics.items() if (~np.isnan(values)).any()}
    assert last["rollout/success_rate"] == 1.0 and last["rollout/judged_wrongly"] == 1.0
    assert last["rollout/ep_len_mean"] == 1.0 and last["selection/success_rate"] == 0.0
    assert torch.are_deterministic_algorithms_enabled()
    assert result.best.successes == 0  # nothing is solved in 24 control steps
    torch.use_deterministic_algorithms(False)
    with pytest.raises(ValueError, match="There is no reward model at nowhere"):
        train(TrainConfig(out=str(tmp_path), env=EnvConfig(reward_model="nowhere.safetensors"), progress=False))
