"""What a chunk did: read once in the bridge, the same for everyone who asks."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from stable_baselines3.common.callbacks import CallbackList
from stable_baselines3.common.logger import Logger

from rlt_gym.testing import FakeRLTokenVectorEnv
from rlt_sb3 import RLT, GymnasiumVecEnv
from rlt_sb3.callbacks.budget import BudgetCallback
from rlt_sb3.callbacks.metrics import MetricsCallback
from rlt_sb3.common.chunk_outcome import ChunkOutcome, mean_over_chunks, outcomes_of
from rlt_sb3.common.vec_env import WholeEpisodeMonitor

C = 4


def test_an_env_that_tells_nothing_has_played_a_complete_chunk():
    chunk = np.full((C, 7), 0.5, np.float32)
    outcome = ChunkOutcome.from_info({}, chunk, 0.25)
    assert outcome.steps == C and outcome.step_rewards.tolist() == [0.25, 0, 0, 0]
    assert np.array_equal(outcome.executed, chunk) and outcome.success and not outcome.broken
    assert outcome.critical and not outcome.taken_over and outcome.task_id == 0 and outcome.episode_steps is None
    assert not ChunkOutcome.from_info({}, chunk, 0.0).success
    flat = ChunkOutcome.from_info({}, np.zeros(3), 1.0)
    assert flat.steps == 1 and flat.executed.shape == (1, 3)
    assert mean_over_chunks([outcome]) == {}


def test_what_an_env_tells_is_believed():
    info = {
        "chunk_steps": 2,
        "step_rewards": np.array([0.0, 1.0, 0.0, 0.0]),
        "executed_actions": np.ones((C, 7)),
        "intervention": np.array([True, False, False, False]),
        "critical_chunk": False,
        "is_success": False,
        "worker_restarted": True,
        "task_id": 3,
        "episode_steps": 11,
        "reward_terms": {"gripper": np.full(C, -0.5)},
        "inner_obs": {"z_rl": np.zeros((3, 2))},
        "inner_count": 1,
    }
    outcome = ChunkOutcome.from_info(info, np.zeros((C, 7)), 1.0)
    assert (outcome.steps, outcome.task_id, outcome.episode_steps, outcome.inner_count) == (2, 3, 11, 1)
    assert outcome.executed.all() and outcome.taken_over and not outcome.critical
    assert outcome.broken and not outcome.success and outcome.inner_obs is info["inner_obs"]
    assert mean_over_chunks([outcome]) == {"intervention": 0.5, "critical_phase": 0.0, "reward_gripper": -2.0}


def test_the_bridge_makes_one_per_sub_environment_and_step():
    venv = WholeEpisodeMonitor(GymnasiumVecEnv(FakeRLTokenVectorEnv(3, chunk_length=C, max_episode_steps=6)))
    obs = venv.reset()
    for _ in range(4):
        obs, rewards, _, infos = venv.step(obs["vla_ref"])
        for info in infos:
            outcome = info["outcome"]
            assert outcome.steps == info["chunk_steps"] and outcome.episode_steps == info["episode_steps"]
            assert outcome.success == info["is_success"]
        assert [info["outcome"].step_rewards.sum() for info in infos] == rewards.tolist()
        carried = outcomes_of(infos, obs["vla_ref"], rewards)
        assert all(outcome is info["outcome"] for outcome, info in zip(carried, infos, strict=True))


class Silent(gym.Env):
    """Episodes of three chunks, of which the last one is rewarded; says nothing of control steps."""

    def __init__(self):
        self.observation_space = gym.spaces.Dict(
            z_rl=gym.spaces.Box(-1, 1, (3,), np.float32),
            proprio=gym.spaces.Box(-1, 1, (2,), np.float32),
            vla_ref=gym.spaces.Box(-1, 1, (C, 2), np.float32),
        )
        self.action_space = gym.spaces.Box(-1, 1, (C, 2), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.chunks = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.chunks += 1
        over = self.chunks == 3
        return self.observation_space.sample(), float(over), over, False, {}


@pytest.mark.parametrize("bridge", ["gymnasium", "stable-baselines3"])
def test_everybody_counts_the_same_control_steps(bridge):
    """Without ``chunk_steps`` some counted one control step per chunk and others C."""
    if bridge == "gymnasium":
        env = GymnasiumVecEnv(SyncVectorEnv([Silent, Silent], autoreset_mode=AutoresetMode.SAME_STEP))
    else:
        from stable_baselines3.common.env_util import make_vec_env

        env = make_vec_env(Silent, n_envs=2)
    model = RLT(
        "MultiInputPolicy", env, learning_starts=8, batch_size=8, seed=0, device="cpu", gate={"window": 2},
        policy_kwargs={"net_arch": [8]},
    )  # fmt: skip
    model.set_logger(Logger(None, []))
    budget, metrics = BudgetCallback(24), MetricsCallback()
    model.learn(24, callback=CallbackList([budget, metrics]), log_interval=10**6)
    assert budget.control_steps == model.num_control_steps == 24 * C
    storage = model.replay_buffer.storage
    assert set(storage.chunk_steps[storage.is_row(np.arange(storage.size))].tolist()) == {C}
    assert {trial.steps for trial in model.gate.baseline.ended()} == {3 * C}
    assert all(success for success, _ in metrics.episodes) and len(metrics.episodes) == 8
    if bridge == "stable-baselines3":  # which has a monitor
        assert {steps for _, steps in metrics.episodes} == {3 * C}
