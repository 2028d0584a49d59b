"""Success rates of a VLA's own chunks, on the fake whose even initial states succeed at control step 13."""

import pytest
import toy_env  # noqa: F401 registers the fakes

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
    assert [seed for _, seed in vla.given][:6] == [0, 8, 1000, 1008, 1016, 2000]  # 1000 * init_index + control steps


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
        "render": "fast", "assets": "x", "success_step": 10**6,
    }  # fmt: skip
