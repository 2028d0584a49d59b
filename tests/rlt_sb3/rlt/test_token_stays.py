"""``train_token`` on a shipped RL token and LIBERO's pictures: it begins where stage 1 ended, and forgets nothing."""

from dataclasses import replace
from itertools import pairwise

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from rlt_models import SMALL
from stable_baselines3.common.logger import configure

from rlt_gym.data.demo_set import DemoRows
from rlt_gym.rl_token.env import RLTokenVectorEnv
from rlt_gym.rl_token.held_out import evaluate_token
from rlt_gym.rl_token.io import load_rl_token, read_autoencoder, shipped_path
from rlt_gym.rl_token.tokens import TokenCache, TokenOrigin
from rlt_gym.rl_token.trainable import TrainableToken
from rlt_gym.testing import FakeLiberoVectorEnv
from rlt_gym.vla import load_vla
from rlt_sb3 import RLT, GymnasiumVecEnv

N, CHUNKS = 2, 10


@pytest.fixture(scope="module")
def recorded():
    """What the VLA sees in two episodes of each of two simulators: rows to train on, and rows that are held out."""
    kwargs = {"task_ids": [1], "assets": "embedded", "image_size": 128, "show_tokens": True}
    env = gym.make_vec("RLToken-LIBERO-v0", num_envs=N, **kwargs)
    parts = []
    for seed in (3, 4):
        obs, _ = env.reset(seed=seed)
        part = []
        for _ in range(CHUNKS):
            part.append({key: value.copy() for key, value in obs.items()})
            obs, *_ = env.step(obs["vla_ref"])
        parts.append(part)
    env.close()
    return parts


def cache(rows) -> TokenCache:
    """The rows as stage 1 has them."""
    tokens = th.tensor(np.concatenate([row["vla_tokens"] for row in rows]))
    mask = (tokens != 0.0).any(2)
    count = int(mask.sum(1).max())
    about = DemoRows(*[np.zeros(len(tokens))] * 10, [], {})
    return TokenCache(TokenOrigin.of(load_vla("mini"), ("all",)), about, tokens[:, :count], mask[:, :count])


def error(encoder, decoder, rows) -> float:
    """What stage 1 and ``rlt probe`` report, from the RL token alone."""
    tokens = cache(rows)
    every = np.arange(len(tokens))
    return evaluate_token(encoder, decoder, tokens, every, every)["L_ro_z_only"]


@pytest.mark.parametrize(("dropout", "reported"), [(1.0, "L_ro_z_only"), (0.0, "L_ro_teacher_forced")])
def test_it_begins_with_the_loss_that_stage_1_reports(recorded, dropout, reported):
    """Against ``evaluate_token`` with the autoencoder of the shipped file; both numbers need no random dropout."""
    vla = load_vla("mini")
    token = TrainableToken.of(load_rl_token("auto", vla))
    token.encoder.config = replace(token.encoder.config, context_dropout=dropout)
    tokens = cache(recorded[1])
    every = np.arange(len(tokens))
    wanted = evaluate_token(*read_autoencoder(shipped_path(vla)), tokens, every, every)
    z_rl, loss = token.reconstruct(th.tensor(np.concatenate([row["vla_tokens"] for row in recorded[1]])))
    assert loss.item() == pytest.approx(wanted[reported], rel=1e-4) and loss.item() < 0.1
    shown = np.concatenate([row["z_rl"] for row in recorded[1]])
    assert np.allclose(z_rl.detach().numpy(), shown, atol=2e-2)  # float16


def make_model(rows, **train_token) -> RLT:
    """A model with the shipped token, and recorded rows in its buffer; every second episode is a success."""
    raw = FakeLiberoVectorEnv(N, chunk_length=8, max_episode_steps=160, image_size=128)
    venv = GymnasiumVecEnv(RLTokenVectorEnv(raw, load_vla("mini"), "auto", show_tokens=True))
    networks = {"net_arch": [32, 32], "critic_precision": "float32", "offset_search": False, "train_token": train_token}
    model = RLT("MultiInputPolicy", venv, **SMALL | {"critic_warmup_updates": 0, "policy_kwargs": networks})
    for number, (obs, new) in enumerate(pairwise(rows)):
        ends = number == CHUNKS - 2
        rewards = [np.full(8, ends and index % 2 == 0, dtype=np.float32) / 8 for index in range(N)]
        infos = [{"step_rewards": one, "chunk_steps": 8, "TimeLimit.truncated": False} for one in rewards]
        paid = np.array([one.sum() for one in rewards])
        model.replay_buffer.add(obs, new, obs["vla_ref"], paid, np.full(N, ends), infos)
    model.num_timesteps = model.replay_buffer.size()
    model.set_logger(configure(None, []))
    return model


def errors(model, held_out, rounds: int) -> list[float]:
    """Errors on held-out rows, as shares of the first, after every ten updates."""
    token = model.policy.token_training.features.token
    first = error(token.encoder, token.decoder, held_out)
    found = []
    for _ in range(rounds):
        model.train(10, 8)
        found.append(error(token.encoder, token.decoder, held_out) / first)
    return found


def test_the_reconstruction_stays_within_10_percent_only_with_the_regularizer(recorded):
    train, held_out = recorded
    assert max(errors(make_model(train, recon_coef=1.0), held_out, rounds=4)) < 1.1
    assert errors(make_model(train, recon_coef=0.0, encoder_lr=1e-3), held_out, rounds=1)[-1] > 2.0
