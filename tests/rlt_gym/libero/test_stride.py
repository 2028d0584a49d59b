"""Rows between the chunks, all the way from the environment to the updates."""

import numpy as np
import pytest

from rlt_gym.testing import FakeLiberoVectorEnv, FakeRLTokenVectorEnv
from rlt_sb3 import RLT, GymnasiumVecEnv

C = 4


def make_model(num_envs=2, stride=2, **kwargs):
    venv = GymnasiumVecEnv(FakeRLTokenVectorEnv(num_envs, chunk_length=C, seed=3, obs_stride=stride))
    settings = dict(learning_starts=20, critic_warmup_updates=5, batch_size=16, exploration_std=0.3, seed=0)
    settings["replay_buffer_kwargs"] = {"timeout_is_failure": False}  # rows tell both ends of an episode apart
    return RLT("MultiInputPolicy", venv, device="cpu", **(settings | kwargs))


@pytest.mark.parametrize("stride", [None, 1, 2, 3])
def test_every_stored_row_can_be_played_again(stride):
    """(r, s', done) of each row by moving the point of the fake task one control step at a time."""
    model = make_model(stride=stride, utd=0.1)
    model.learn(120)
    buffer, env = model.replay_buffer, model.env.env
    assert buffer.stride == stride
    rows = np.flatnonzero(buffer.storage.is_row(np.arange(buffer.storage.size)))
    decode = np.linalg.pinv(env._encoder)
    before = buffer.storage.obs["z_rl"][rows] @ decode  # position, goal, place the VLA aims at
    after = buffer.storage.obs["z_rl"][buffer.storage.next_slot[rows]] @ decode
    for place, slot in enumerate(rows):
        position, goal = before[place, :2].copy(), before[place, 2:4]
        steps = buffer.storage.chunk_steps[slot]
        for step in range(steps):
            position = position + env.SPEED * buffer.storage.actions[slot, step, :2]
            solved = np.linalg.norm(position - goal) < env.RADIUS
            assert buffer.storage.step_rewards[slot, step] == float(solved)
            assert not solved or step == steps - 1
        np.testing.assert_allclose(position, after[place, :2], atol=1e-4)
        np.testing.assert_allclose(before[place, 2:], after[place, 2:], atol=1e-4)  # the same episode
        assert buffer.storage.terminated[slot] == solved
        assert steps == C or solved or buffer.storage.truncated[slot]
        assert not buffer.storage.step_rewards[slot, steps:].any()
    if stride is not None:
        assert len(rows) > 1.5 * 120 * (1 + (C - 1) // stride) / 2


def test_updates_follow_the_rows():
    model = make_model(stride=1, utd=0.5)
    model.learn(20)
    before = model.replay_buffer.rows_stored
    model.learn(60, reset_num_timesteps=False)
    model._train_meanwhile()  # the updates that it still owes
    stored = model.replay_buffer.rows_stored - before
    assert stored > 3 * 60 and model._n_updates == 5 + int(0.5 * stored + 1e-6)


def test_the_bridge_hands_inner_observations_on():
    raw = FakeLiberoVectorEnv(2, chunk_length=C, max_episode_steps=10, success_step=7, obs_stride=1)
    venv = GymnasiumVecEnv(raw)
    venv.reset()
    for _ in range(3):
        _, _, dones, infos = venv.step(np.zeros((2, C, 7), np.float32))
        for info, done in zip(infos, dones, strict=True):
            assert info["inner_count"] == min(C, info["chunk_steps"]) - 1
            begins = info["episode_steps"] - info["chunk_steps"]
            counted = info["inner_obs"]["proprio"][: info["inner_count"], 0]
            assert counted.tolist() == [begins + 1 + n for n in range(info["inner_count"])]
            if done:
                assert info["terminal_observation"]["proprio"][0] == info["episode_steps"]
    assert [episode.number for episode in raw.episodes] == [3, 2]  # the second one of each


@pytest.mark.parametrize("stride", [0, C])
def test_strides_that_do_not_fit(stride):
    with pytest.raises(ValueError, match="obs_stride"):
        FakeRLTokenVectorEnv(chunk_length=C, obs_stride=stride)
