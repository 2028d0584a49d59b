"""The rules that the bridge from Gymnasium to Stable-Baselines3 must keep."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from sleepy_env import SleepyVectorEnv
from stable_baselines3.common.vec_env import VecMonitor

from rlt_gym.testing import FakeLiberoVectorEnv, FakeRLTokenVectorEnv
from rlt_sb3 import GymnasiumVecEnv
from rlt_sb3.common.vec_env import WorkDuringStep


def zeros(venv: GymnasiumVecEnv) -> np.ndarray:
    return np.zeros((venv.num_envs, *venv.action_space.shape), dtype=np.float32)


class Recorder(VectorWrapper):
    """Keeps the arguments of reset() and lets a test change the results of step()."""

    def __init__(self, env: VectorEnv, change=None):
        super().__init__(env)
        self.resets: list[tuple[Any, Any]] = []
        self.change = change

    def reset(self, *, seed=None, options=None):
        self.resets.append((seed, options))
        return self.env.reset(seed=seed, options=options)

    def step(self, actions):
        result = self.env.step(actions)
        return self.change(*result) if self.change else result


class Counter(gym.Env):
    """Plain environment: no chunk keys, flat observation = step counter, ends after `length` steps."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, length: int, render_mode: str | None = None):
        self.length, self.render_mode, self.count = length, render_mode, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(1, dtype=np.float32), {"nested": {"count": 0}}

    def step(self, action):
        self.count += 1
        end = self.count == self.length
        # both flags at once, which Gymnasium allows
        return np.full(1, self.count, dtype=np.float32), 1.0, end, end, {"nested": {"count": self.count}}

    def render(self):
        return np.full((4, 4, 3), self.count, dtype=np.uint8)

    def double(self, x: int) -> int:
        return 2 * x + self.length


def counters(*lengths: int) -> SyncVectorEnv:
    makers = [lambda n=n: Counter(n, render_mode="rgb_array") for n in lengths]
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)


def test_spaces_are_those_of_one_env():
    env = FakeLiberoVectorEnv(3)
    venv = GymnasiumVecEnv(env)
    assert venv.num_envs == 3
    assert venv.observation_space == env.single_observation_space
    assert venv.action_space == env.single_action_space


@pytest.mark.parametrize("mode", [AutoresetMode.DISABLED, AutoresetMode.NEXT_STEP])
def test_other_autoreset_modes_are_refused(mode):
    env = SyncVectorEnv([lambda: Counter(3)], autoreset_mode=mode)
    for other in (env, FakeLiberoVectorEnv(2, autoreset_mode=mode)):
        with pytest.raises(ValueError, match="SAME_STEP"):
            GymnasiumVecEnv(other)


def test_single_env_and_nested_spaces_are_refused():
    with pytest.raises(TypeError, match="make_vec"):
        GymnasiumVecEnv(Counter(3))
    env = FakeLiberoVectorEnv(1)
    env.single_observation_space = spaces.Dict({"a": spaces.Dict({"b": spaces.Discrete(2)})})
    with pytest.raises(ValueError, match="Nested"):
        GymnasiumVecEnv(env)


def test_truncation_and_termination_rows():
    # With 2 envs and chunks of 8: env 0 plays init 1 (never succeeds, horizon 20), env 1 plays init 0 (success at 13).
    venv = GymnasiumVecEnv(FakeLiberoVectorEnv(2))
    obs = venv.reset()
    assert obs["proprio"][:, 0].tolist() == [0, 0]
    assert [info["init_index"] for info in venv.reset_infos] == [1, 0]

    obs, rewards, dones, infos = venv.step(zeros(venv))
    assert obs["proprio"][:, 0].tolist() == [8, 8] and not dones.any()
    assert all("terminal_observation" not in info for info in infos)
    assert [info["chunk_steps"] for info in infos] == [8, 8]

    obs, rewards, dones, infos = venv.step(zeros(venv))
    assert dones.tolist() == [False, True] and rewards.tolist() == [0.0, 1.0]
    assert rewards.dtype == np.float32 and dones.dtype == bool
    final = infos[1]
    # info of the finished episode, not of the next one
    assert final["is_success"] is True and final["chunk_steps"] == 5 and final["episode_steps"] == 13
    assert final["step_rewards"].tolist() == [0, 0, 0, 0, 1, 0, 0, 0]
    assert final["terminal_observation"]["proprio"][:2].tolist() == [13, 0]
    assert final["TimeLimit.truncated"] is False
    # the observation is the first one of the next episode, and its info is kept apart
    assert obs["proprio"][1, :2].tolist() == [0, 2]
    assert venv.reset_infos[1]["init_index"] == 2 and venv.reset_infos[1]["chunk_steps"] == 0

    _, rewards, dones, infos = venv.step(zeros(venv))
    assert dones.tolist() == [True, False] and rewards.tolist() == [0.0, 0.0]
    assert infos[0]["TimeLimit.truncated"] is True and infos[0]["is_success"] is False
    assert infos[0]["chunk_steps"] == 4 and infos[0]["terminal_observation"]["proprio"][0] == 20
    assert infos[1]["TimeLimit.truncated"] is False


def test_termination_wins_and_infos_are_unbatched():
    venv = GymnasiumVecEnv(counters(1, 3))
    venv.reset()
    _, _, dones, infos = venv.step(zeros(venv))
    assert dones.tolist() == [True, False]
    assert infos[0]["TimeLimit.truncated"] is False
    assert infos[0]["nested"] == {"count": 1} and infos[0]["terminal_observation"].tolist() == [1.0]
    assert infos[1]["nested"] == {"count": 1}
    assert not any(key.startswith("_") for info in infos for key in info)


@pytest.mark.parametrize("key", ["final_obs", "final_info"])
@pytest.mark.parametrize("how", ["absent", "masked"])
def test_missing_final_data_raises(key, how):
    def change(obs, rewards, terminations, truncations, infos):
        if key in infos:
            if how == "absent":
                del infos[key], infos["_" + key]
            else:
                infos["_" + key][:] = False
        return obs, rewards, terminations, truncations, infos

    venv = GymnasiumVecEnv(Recorder(FakeLiberoVectorEnv(2), change))
    venv.reset()
    venv.step(zeros(venv))
    with pytest.raises(RuntimeError, match=key):
        venv.step(zeros(venv))


def test_final_obs_may_be_a_batched_dict():
    def change(obs, rewards, terminations, truncations, infos):
        if "final_obs" in infos:
            rows = [value or {key: item[0] for key, item in obs.items()} for value in infos["final_obs"]]
            infos["final_obs"] = {key: np.stack([row[key] for row in rows]) for key in obs}
        return obs, rewards, terminations, truncations, infos

    venv = GymnasiumVecEnv(Recorder(FakeLiberoVectorEnv(2), change))
    venv.reset()
    venv.step(zeros(venv))
    _, _, _, infos = venv.step(zeros(venv))
    assert infos[1]["terminal_observation"]["proprio"][:2].tolist() == [13, 0]


def test_seeds_and_options_are_passed_once():
    env = Recorder(FakeRLTokenVectorEnv(2))
    venv = GymnasiumVecEnv(env)
    venv.seed(7)
    venv.set_options({"init_states": "eval"})
    venv.reset()
    venv.reset()
    assert env.resets == [([7, 8], {"init_states": "eval"}), (None, None)]
    venv.set_options([{"init_states": "eval"}, {"init_states": "train"}])
    with pytest.raises(ValueError, match="one options dict"):
        venv.reset()


def test_same_seed_same_rollout():
    def rollout(seed):
        venv = GymnasiumVecEnv(FakeRLTokenVectorEnv(2))
        venv.seed(seed)
        out = [venv.reset()["z_rl"]]
        for _ in range(6):
            out.append(venv.step(zeros(venv))[0]["z_rl"])
        return np.array(out)

    assert np.array_equal(rollout(3), rollout(3)) and not np.array_equal(rollout(3), rollout(4))


def test_returned_arrays_are_fresh():
    shared = np.zeros((1, 1), dtype=np.float32)

    class Reusing(VectorWrapper):
        def step(self, actions):
            _, *rest = self.env.step(actions)
            shared[:] += 1
            return (shared, *rest)

    venv = GymnasiumVecEnv(Reusing(counters(9)))
    venv.reset()
    first = venv.step(zeros(venv))[0]
    venv.step(zeros(venv))
    assert first.tolist() == [[1.0]]


def test_returned_dicts_have_fresh_arrays():
    """SB3 keeps the last observation while the env writes the next one to the same arrays."""

    class Reusing(VectorWrapper):
        def step(self, actions):
            obs, *rest = self.env.step(actions)
            for key, array in obs.items():
                shared[key][...] = array
            return (shared, *rest)

    env = FakeLiberoVectorEnv(2)
    shared = {key: np.zeros(space.shape, space.dtype) for key, space in env.observation_space.spaces.items()}
    venv = GymnasiumVecEnv(Reusing(env))
    venv.reset()
    kept = venv.step(zeros(venv))[0]
    before = {key: array.copy() for key, array in kept.items()}
    for array in shared.values():
        array[...] = 77
    assert all(np.array_equal(kept[key], before[key]) and not (before[key] == 77).all() for key in before)


def test_attributes_methods_pictures():
    venv = GymnasiumVecEnv(counters(2, 5))
    venv.reset()
    assert venv.get_attr("length") == [2, 5] and venv.get_attr("length", indices=1) == [5]
    assert venv.get_attr("render_mode") == ["rgb_array", "rgb_array"]
    assert venv.env_method("double", 10) == [22, 25] and venv.env_method("double", 10, indices=[1]) == [25]
    venv.set_attr("length", 4)
    assert venv.get_attr("length") == [4, 4]
    with pytest.raises(ValueError, match="all 2"):
        venv.set_attr("length", 4, indices=0)
    with pytest.raises(AttributeError):
        venv.get_attr("no_such_attribute")
    assert venv.has_attr("length") and not venv.has_attr("no_such_attribute")
    assert venv.env_is_wrapped(gym.Wrapper) == [False, False]
    venv.step(zeros(venv))
    assert [image.max() for image in venv.get_images()] == [1, 1]
    assert venv.render().shape[-1] == 3

    fake = GymnasiumVecEnv(FakeLiberoVectorEnv(2))
    assert fake.get_attr("chunk_length") == [8, 8] and fake.get_images() == [None, None]
    with pytest.raises(AttributeError, match="no_such"):
        fake.get_attr("no_such_attribute")
    with pytest.raises(AttributeError, match="no_such"):
        fake.set_attr("no_such_attribute", 1)
    with pytest.raises(AttributeError, match="no_such"):
        fake.env_method("no_such_method")


def test_close_once_and_order_of_calls():
    closed = []

    class Closing(FakeLiberoVectorEnv):
        def close_extras(self, **kwargs):
            closed.append(1)

    venv = GymnasiumVecEnv(Closing(1))
    with pytest.raises(RuntimeError, match="step_async"):
        venv.step_wait()
    venv.close()
    venv.close()
    assert closed == [1]


def test_vec_monitor_counts_episodes(tmp_path):
    file = str(tmp_path / "m.monitor.csv")
    venv = VecMonitor(GymnasiumVecEnv(FakeLiberoVectorEnv(2)), file, info_keywords=("is_success",))
    venv.reset()
    episodes = []
    for _ in range(6):
        infos = venv.step(zeros(venv))[3]
        episodes += [info["episode"] for info in infos if "episode" in info]
    venv.close()
    # env 1 plays even inits only (success in 2 chunks), env 0 odd ones (horizon in 3 chunks)
    assert [(e["r"], e["l"], e["is_success"]) for e in episodes[:2]] == [(1.0, 2, True), (0.0, 3, False)]
    assert len(episodes) == 5


def test_bad_action_does_not_kill_the_env():
    venv = GymnasiumVecEnv(FakeLiberoVectorEnv(2))
    venv.reset()
    with pytest.raises(ValueError, match="NaN"):
        venv.step(np.full_like(zeros(venv), np.nan))
    with pytest.raises(ValueError, match="shape"):
        venv.step(zeros(venv)[:, :-1])
    assert venv.step(zeros(venv))[0]["proprio"][:, 0].tolist() == [8, 8]


class Doubling(VectorWrapper):
    """A wrapper that changes ``step`` alone, as those of other libraries do."""

    def step(self, actions):
        obs, rewards, *rest = self.env.step(actions)
        return obs, 2 * rewards, *rest


def test_simulators_begin_in_step_async():
    env = SleepyVectorEnv(2, longest=0.0)
    venv = VecMonitor(GymnasiumVecEnv(env), info_keywords=("is_success",))
    venv.reset()
    venv.step_async(zeros(venv))
    env._thread.join()
    assert env.events == ["begin", "played"]
    assert venv.step_wait()[0]["z_rl"].shape == (2, 16)
    assert env.events == ["begin", "played", "end"]


def test_asynchronous_environments_of_gymnasium_begin_in_step_async():
    makers = [lambda n=n: Counter(n) for n in (1, 3)]
    asynchronous = AsyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    venv, plain = GymnasiumVecEnv(asynchronous), GymnasiumVecEnv(counters(1, 3))
    try:
        assert np.array_equal(venv.reset(), plain.reset())
        venv.step_async(zeros(venv))
        assert asynchronous._state.value == "step"
        one, other = venv.step_wait(), plain.step(zeros(plain))
        assert np.array_equal(one[0], other[0]) and np.array_equal(one[2], other[2]) and one[2][0]
    finally:
        venv.close()


@pytest.mark.parametrize("kind", ["sync", "wrapper", "subclass", "patched"])
def test_environments_that_change_step_alone_do_all_in_step_wait(kind):
    """Their ``step`` does something that the two parts of the environment below would leave out."""

    class Own(SleepyVectorEnv):
        def step(self, actions):
            obs, rewards, *rest = super().step(actions)
            return obs, 2 * rewards, *rest

    made = {
        "sync": lambda: counters(9, 9),
        "wrapper": lambda: Doubling(SleepyVectorEnv(2)),
        "subclass": lambda: Own(2),
        "patched": lambda: SleepyVectorEnv(2),
    }
    env = made[kind]()
    if kind == "patched":
        step = env.step
        env.step = lambda actions: (lambda obs, rewards, *rest: (obs, 2 * rewards, *rest))(*step(actions))
    venv = GymnasiumVecEnv(env)
    venv.reset()
    rewards = []
    for _ in range(8):
        venv.step_async(zeros(venv) if kind == "sync" else venv.env.unwrapped._batch()["vla_ref"])
        assert getattr(env.unwrapped, "events", [])[-1:] in ([], ["end"])
        rewards.append(venv.step_wait()[1])
    assert np.max(rewards) == (1.0 if kind == "sync" else 2.0)


def test_reset_gives_a_begun_step_up():
    venv = GymnasiumVecEnv(FakeLiberoVectorEnv(2))
    venv.reset()
    venv.step_async(zeros(venv))
    with pytest.raises(AlreadyPendingCallError, match=r"call step_wait\(\) first, or reset\(\)"):
        venv.step_async(zeros(venv))
    venv.reset()
    with pytest.raises(RuntimeError, match="before step_async"):
        venv.step_wait()
    assert venv.step(zeros(venv))[0]["proprio"][:, 0].tolist() == [8, 8]


def test_work_is_done_once_between_the_parts_of_the_first_step():
    env = SleepyVectorEnv(2, longest=0.0)
    venv = WorkDuringStep(GymnasiumVecEnv(env), lambda: env.events.append("work"))
    venv.reset()
    for _ in range(2):
        venv.step(zeros(venv))
    assert [event for event in env.events if event != "played"] == ["begin", "work", "end", "begin", "end"]
