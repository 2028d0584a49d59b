"""The shipped checker accepts the shipped fakes and names what is wrong with broken environments."""

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, VectorWrapper

from rlt_gym.core.split_step import SplitStepWrapper
from rlt_gym.testing import FakeLiberoVectorEnv, FakeRLTokenVectorEnv, FakeVLA, check_vector_env
from rlt_gym.vla.base import FrozenVLA


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("make", [FakeLiberoVectorEnv, FakeRLTokenVectorEnv])
@pytest.mark.parametrize("init_states", ["train", "selection", "eval"])
def test_fakes_pass(make, num_envs, init_states):
    check_vector_env(make(num_envs, init_states=init_states))


class Broken(VectorWrapper):
    """Changes what step() returns."""

    def __init__(self, change):
        super().__init__(FakeLiberoVectorEnv(2))
        self.change = change

    def step(self, actions):
        result = [*self.env.step(actions)]
        self.change(result)
        return tuple(result)


def shared_observations(result, memory={}):  # noqa: B006
    memory.setdefault("obs", result[0])
    for key, value in result[0].items():
        memory["obs"][key][:] = value
    result[0] = memory["obs"]


def drop(key):
    def change(result):
        result[4].pop(key, None)

    return change


def final_steps(value):
    def change(result):
        if "final_info" in result[4]:
            result[4]["final_info"]["chunk_steps"][:] = value

    return change


def reset_infos_not_reset(result):
    result[4]["episode_steps"][:] = 8


def final_obs_is_next_obs(result):
    if "final_obs" in result[4]:
        result[4]["final_obs"][:] = 3


def reward_without_steps(result):
    result[1] = result[1] + 1.0


def set_item(index, function):
    def change(result):
        result[index] = function(result[index])

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shared_observations, "new objects"),
        (drop("final_obs"), "final_obs"),
        (drop("_final_obs"), "final_obs"),
        (drop("final_info"), "final_info"),
        (drop("step_rewards"), "step_rewards"),
        (drop("chunk_steps"), "chunk_steps"),
        (final_steps(0), "chunk_steps"),
        (final_steps(1), "zero after"),
        (reset_infos_not_reset, "episode_steps"),
        (final_obs_is_next_obs, "final observation"),
        (reward_without_steps, "sum of step_rewards"),
        (set_item(0, lambda obs: obs | {"proprio": obs["proprio"].astype(np.float64)}), "observation_space"),
        (set_item(1, lambda rewards: rewards.tolist()), "rewards"),
        (set_item(2, lambda flags: flags.astype(np.float32)), "terminations"),
        (set_item(3, lambda flags: flags.astype(int)), "truncations"),
    ],
)
def test_broken_steps_are_found(change, message):
    with pytest.raises(AssertionError, match=message):
        check_vector_env(Broken(change), n_steps=20)


def test_parts_of_a_step_that_are_not_the_step_are_found():
    class OneMore(SplitStepWrapper):
        def step(self, actions):
            return self.env.step(actions)

        def step_async(self, actions):
            super().step_async(actions)

        def step_wait(self):
            obs, *rest = super().step_wait()
            return {**obs, "proprio": obs["proprio"] + 1}, *rest

    check_vector_env(SplitStepWrapper(FakeLiberoVectorEnv(2)))
    with pytest.raises(AssertionError, match="two rollouts with the same seed and actions differ, first at step 1"):
        check_vector_env(OneMore(FakeLiberoVectorEnv(2)))


def test_other_faults_are_found():
    class Unseeded(VectorWrapper):
        def reset(self, *, seed=None, options=None):
            return self.env.reset(seed=None, options=options)

    with pytest.raises(AssertionError, match="same seed"):
        check_vector_env(Unseeded(FakeRLTokenVectorEnv(2)))

    class AcceptsNaN(VectorWrapper):
        def step(self, actions):
            return self.env.step(np.nan_to_num(actions))

    with pytest.raises(AssertionError, match="NaN"):
        check_vector_env(AcceptsNaN(FakeLiberoVectorEnv(2)))

    class AcceptsAnyShape(VectorWrapper):
        def step(self, actions):
            return self.env.step(np.resize(actions, self.action_space.shape))

    with pytest.raises(AssertionError, match="wrong shape"):
        check_vector_env(AcceptsAnyShape(FakeLiberoVectorEnv(2)))

    with pytest.raises(AssertionError, match="SAME_STEP"):
        check_vector_env(FakeLiberoVectorEnv(2, autoreset_mode=AutoresetMode.DISABLED))
    with pytest.raises(AssertionError, match="VectorEnv"):
        check_vector_env(object())
    with pytest.raises(AssertionError, match="no episode ended"):
        check_vector_env(FakeLiberoVectorEnv(2, max_episode_steps=1000, success_step=1000), n_steps=5)
    wrong = FakeLiberoVectorEnv(2)
    wrong.action_space = wrong.single_action_space
    with pytest.raises(AssertionError, match="action_space"):
        check_vector_env(wrong)


def test_disabled_mode_and_reset_mask():
    env = FakeLiberoVectorEnv(2, autoreset_mode=AutoresetMode.DISABLED)
    env.reset()
    zeros = np.zeros(env.action_space.shape, dtype=np.float32)
    env.step(zeros)
    obs, _, terminations, _, infos = env.step(zeros)
    assert terminations.tolist() == [False, True] and obs["proprio"][:, 0].tolist() == [16, 13]
    assert infos["chunk_steps"].tolist() == [8, 5] and "final_obs" not in infos
    with pytest.raises(RuntimeError, match="reset"):
        env.step(zeros)
    obs, infos = env.reset(options={"reset_mask": np.array([False, True])})
    assert obs["proprio"][:, 0].tolist() == [16, 0] and infos["_init_index"].tolist() == [False, True]
    for mask in (np.zeros(2, dtype=bool), np.ones(3, dtype=bool), np.ones(2)):
        with pytest.raises(ValueError, match="reset_mask"):
            env.reset(options={"reset_mask": mask})


def test_evaluation_sets_start_again_at_every_reset():
    env = FakeRLTokenVectorEnv(3, init_states="eval")
    first, infos = env.reset(seed=1)
    assert infos["init_index"].tolist() == [2, 1, 0]
    for _ in range(9):
        env.step(np.zeros(env.action_space.shape, dtype=np.float32))
    again, _ = env.reset(seed=2)
    assert all(np.array_equal(first[key], again[key]) for key in first)
    other, _ = env.reset(options={"init_states": "selection"})
    assert not np.array_equal(first["z_rl"], other["z_rl"])


def test_shards_divide_the_sequence():
    env = FakeRLTokenVectorEnv(2, init_states="eval")
    whole = env.reset()[0]["z_rl"]
    parts = [env.reset(options={"shard": (k, 2)})[1]["init_index"].tolist() for k in range(2)]
    assert parts == [[2, 0], [3, 1]]
    assert np.array_equal(env.reset()[0]["z_rl"], whole)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(num_envs=0), "num_envs"),
        (dict(chunk_length=0), "chunk_length"),
        (dict(init_states="test"), "init_states"),
        (dict(render_mode="human"), "render_mode"),
        (dict(autoreset_mode="sometimes"), "autoreset_mode"),
    ],
)
def test_fakes_refuse_bad_arguments(arguments, message):
    for make in (FakeLiberoVectorEnv, FakeRLTokenVectorEnv):
        with pytest.raises(ValueError, match=message):
            make(**(dict(num_envs=1) | arguments))
    with pytest.raises(ValueError, match="seed"):
        FakeLiberoVectorEnv(2).reset(seed=[1])


def test_fake_vla_keeps_the_contract():
    vla = FakeVLA(horizon=6, stochastic=True)
    assert isinstance(vla, FrozenVLA)
    picture = np.zeros((3, 8, 8, 3), dtype=np.uint8)
    obs = {"agentview": picture, "wrist": picture, "state": np.arange(24, dtype=np.float32).reshape(3, 8)}
    output = vla.forward(obs, ["a", "b", "a"], seed=[1, 2, 3])
    output.check(vla.spec, 3)
    again = vla.forward(obs, ["a", "b", "a"], seed=[1, 2, 3])
    assert (output.tokens == again.tokens).all() and (output.chunk == again.chunk).all()
    assert not (output.chunk == vla.forward(obs, ["a", "b", "a"], seed=[4, 5, 6]).chunk).all()
    assert vla.calls == [3, 3, 3] and vla.to("cpu") is vla
    assert vla.fingerprint() == FakeVLA(horizon=6, stochastic=True).fingerprint() != FakeVLA().fingerprint()
    with pytest.raises(ValueError, match="rows"):
        vla.forward(obs, ["a"])
