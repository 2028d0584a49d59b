"""Success rates of a VLA's own chunks, on the fake whose even initial states succeed at control step 13."""

from dataclasses import replace

import pytest
import toy_env  # noqa: F401 registers the fakes

from rlt_gym.rl_token.env import RLTokenVectorEnv
from rlt_gym.rl_token.untrained import MeanToken
from rlt_gym.testing import FakeLiberoVectorEnv, FakeVLA
from rlt_gym.vla.success_rates import success_rates


@pytest.fixture
def env_id():
    return "FakeLIBERO-v0"


class Recording(FakeVLA):
    """Keeps the seeds and instructions that it was given."""

    def forward(self, obs, tasks, *, seed=None):
        self.given = [*getattr(self, "given", []), *zip(tasks, seed, strict=True)]
        return super().forward(obs, tasks, seed=seed)


def test_each_state_counts_once(env_id):
    vla = Recording(horizon=8)
    rates = success_rates(vla, "fake", [0, 3], n_states=5, num_envs=1, progress=False, env_id=env_id)
    expected = {"successes": 3, "states": 5, "mean_steps": 13.0}
    assert rates == {f"fake/{task}": {"instruction": f"fake task {task}", **expected} for task in (0, 3)}
    assert {task for task, _ in vla.given} == {"fake task 0", "fake task 3"}


def test_the_noise_is_that_of_an_evaluation_with_the_same_seed(env_id):
    """For each state and step what RLTokenVectorEnv gives the VLA, whatever the number of environments."""

    class BySight(FakeVLA):
        """Keeps each row's seed by what the row shows: initial state and control step."""

        def forward(self, obs, tasks, *, seed=None):
            shown = [(int(state[1]), int(state[0])) for state in obs["state"]]
            self.given = {**getattr(self, "given", {}), **dict(zip(shown, seed, strict=True))}
            return super().forward(obs, tasks, seed=seed)

    given = {}
    for num_envs, seed in ((1, 0), (3, 0), (1, 1)):
        vla = BySight(horizon=8, stochastic=True)
        success_rates(vla, "fake", [0], 4, num_envs=num_envs, progress=False, env_id=env_id, seed=seed)
        given[num_envs, seed] = {key: value for key, value in vla.given.items() if key[0] < 4}
    vla = BySight(horizon=8, stochastic=True)
    env = RLTokenVectorEnv(FakeLiberoVectorEnv(2, init_states="selection", seed=0), vla, MeanToken(12))
    obs, _ = env.reset()
    while not {(0, 8), (1, 16), (2, 8), (3, 16)} <= set(vla.given):
        obs, *_ = env.step(obs["vla_ref"])
    # three environments also show how their last episodes ended
    again = {key: given[3, 0][key] for key in given[1, 0]}
    assert {key[0] for key in given[1, 0]} == {0, 1, 2, 3} and given[1, 0] == again
    assert {key: vla.given[key] for key in given[1, 0]} == given[1, 0]
    assert not set(given[1, 0].values()) & set(given[1, 1].values())


def test_arguments_reach_the_environment(env_id, monkeypatch):
    made, init = [], FakeLiberoVectorEnv.__init__

    def record(self, *args, **kwargs):
        made.append((args, kwargs))
        init(self, *args, **kwargs)

    monkeypatch.setattr(FakeLiberoVectorEnv, "__init__", record)
    vla = FakeVLA(horizon=6)
    rates = success_rates(
        vla, "fake", [1], 1, num_envs=3, progress=False, env_id=env_id, assets="x", success_step=10**6
    )
    assert rates["fake/1"]["successes"] == 0 and rates["fake/1"]["mean_steps"] is None
    (args, kwargs) = made[0]
    assert args == () and kwargs == {
        "num_envs": 3, "suite": "fake", "task_ids": [1], "init_states": "selection", "chunk_length": 6,
        "assets": "x", "success_step": 10**6, "image_size": 128,
    }  # fmt: skip
    vla.spec = replace(vla.spec, image_size=224, render="fast")
    success_rates(vla, "fake", [1], 1, num_envs=1, progress=False, env_id=env_id)
    assert made[1][1]["image_size"] == 224 and made[1][1]["render"] == "fast"
    with pytest.raises(ValueError, match="render is 'exact'; the VLA 'fake' was trained on 'fast' pictures"):
        success_rates(vla, "fake", [1], 1, num_envs=1, progress=False, env_id=env_id, render="exact")
    with pytest.raises(ValueError, match="image_size is 64; the VLA 'fake' needs frames of at least 224 pixels"):
        success_rates(vla, "fake", [1], 1, num_envs=1, progress=False, env_id=env_id, image_size=64)
