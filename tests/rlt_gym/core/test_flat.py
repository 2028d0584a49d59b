"""Flat observations and actions, and corrections of the VLA's chunk, compared with the environment below."""

import copy

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

from rlt_gym.core.flat import FlatVectorEnv
from rlt_gym.core.residual import ResidualAction
from rlt_gym.core.single_env import SingleEnv
from rlt_gym.libero import vector_env as libero
from rlt_gym.rl_token.untrained import MeanToken
from rlt_gym.testing import FakeLiberoVectorEnv, FakeRLTokenVectorEnv, FakeVLA

C, D, N = 4, 7, 3
MODES = list(AutoresetMode)


def fake(num_envs=N, mode=AutoresetMode.SAME_STEP, **settings):
    return FakeRLTokenVectorEnv(num_envs, chunk_length=C, autoreset_mode=mode, obs_stride=2, **settings)


def single(**settings):
    return SingleEnv(FlatVectorEnv(fake(1, AutoresetMode.DISABLED, **settings)))


def flattened(space, observations, lead):
    """Gymnasium's own flattening, one observation at a time."""
    shape = observations["z_rl"].shape[:lead]
    rows = [
        spaces.flatten(space, {key: value[index] for key, value in observations.items()}) for index in np.ndindex(shape)
    ]
    return np.reshape(rows, (*shape, -1))


def equal_infos(flat, infos, space):
    assert flat.keys() == infos.keys()
    for key, value in infos.items():
        if key == "final_obs":
            for row, other in zip(value, flat[key], strict=True):
                assert (row is None) == (other is None)
                if row is not None:
                    np.testing.assert_array_equal(spaces.flatten(space, row), other)
                    assert other.dtype == np.float32
        elif key == "inner_obs":
            np.testing.assert_array_equal(flattened(space, value, 2), flat[key])
        elif isinstance(value, dict):
            equal_infos(flat[key], value, space)
        else:
            np.testing.assert_array_equal(value, flat[key])


@pytest.mark.parametrize("mode", MODES)
def test_rows_are_those_of_the_dict_environment(mode):
    """With actions that no symmetry hides, over several episodes, some solved and some not."""
    env, flat = fake(mode=mode), FlatVectorEnv(fake(mode=mode))
    space = env.single_observation_space
    (obs, infos), (rows, flat_infos) = env.reset(seed=3), flat.reset(seed=3)
    rng = np.random.default_rng(0)
    ends = {"terminations": 0, "truncations": 0}
    for _ in range(40):
        np.testing.assert_array_equal(rows, flattened(space, obs, 1))
        assert rows in flat.observation_space and rows[0] in flat.single_observation_space
        equal_infos(flat_infos, infos, space)
        noise = 0.5 * rng.standard_normal((N, C, D)).astype(np.float32)
        chunks = np.clip(obs["vla_ref"] + noise, -1, 1)
        (obs, *numbers, infos), (rows, *others, flat_infos) = env.step(chunks), flat.step(chunks.reshape(N, C * D))
        for number, other in zip(numbers, others, strict=True):
            np.testing.assert_array_equal(number, other)
        ends["terminations"] += numbers[1].sum()
        ends["truncations"] += numbers[2].sum()
        done = numbers[1] | numbers[2]
        assert ("final_obs" in flat_infos) == (mode == AutoresetMode.SAME_STEP and done.any())
        if mode == AutoresetMode.DISABLED and done.any():
            options = {"reset_mask": done}
            (obs, infos), (rows, flat_infos) = env.reset(options=options), flat.reset(options=options)
    assert min(ends.values()) > 3


def test_spaces_are_flat_wherever_a_library_looks():
    vector, one = FlatVectorEnv(fake()), single()
    size = 16 + C * D + 8
    for env in (vector, vector.unwrapped):
        assert env.single_observation_space == spaces.Box(-np.inf, np.inf, (size,), np.float32) or (
            env.single_observation_space.shape == (size,) and env.single_observation_space.dtype == np.float32
        )
        assert env.observation_space.shape == (N, size) and env.action_space.shape == (N, C * D)
        assert env.single_action_space == spaces.Box(-1, 1, (C * D,), np.float32)
    for env in (one, one.unwrapped):
        assert env.observation_space.shape == (size,) and env.action_space.shape == (C * D,)
    assert vector.get_attr("action_space") == (vector.single_action_space,) * N
    flat = vector.metadata["flat"]
    assert flat["observation_space"] == fake().single_observation_space and flat["action_shape"] == (C, D)
    obs, _ = one.reset(seed=0)
    assert isinstance(obs, np.ndarray) and obs in one.observation_space
    back = spaces.unflatten(one.metadata["flat"]["observation_space"], obs)
    assert back.keys() == {"z_rl", "vla_ref", "proprio"} and back["vla_ref"].shape == (C, D)


@pytest.mark.filterwarnings("ignore:.*Box observation space.*infinity:UserWarning")
@pytest.mark.parametrize("make", [single, lambda: ResidualAction(single())], ids=["flat", "residual"])
def test_gymnasium_checks_it(make):
    check_env(make(), skip_render_check=True)


def test_attributes_are_those_of_the_environment_below():
    env = FlatVectorEnv(fake())
    assert env.unwrapped is env and env.autoreset_mode == AutoresetMode.SAME_STEP and env.chunk_length == C
    env.unwrapped.max_episode_steps = 8
    assert env.env.max_episode_steps == 8
    env.set_attr("train_episode_steps", 6)
    assert env.env.train_episode_steps == 6 and env.get_attr("train_episode_steps") == (6,) * N
    env.reset(seed=0)
    assert [task.task_id for task in env.call("task")] == [0] * N
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = env.nothing
    other = copy.deepcopy(env)
    assert isinstance(other, FlatVectorEnv) and other.env is not env.env


def test_what_is_not_flat_is_refused():
    env = FlatVectorEnv(fake())
    obs, _ = env.reset(seed=0)
    for wrong in (np.zeros((N, C, D)), np.zeros((N, C * D + 1)), np.zeros(C * D)):
        with pytest.raises(ValueError, match=r"actions must have shape \(3, 28\)"):
            env.step(wrong)
    with pytest.raises(ValueError, match="finite"):
        env.step(np.full((N, C * D), np.nan))
    np.testing.assert_array_equal(env.step(env.action_space.sample())[0].shape, obs.shape)
    with pytest.raises(ValueError, match="Dict of float32 boxes"):
        FlatVectorEnv(FakeLiberoVectorEnv(1))
    with pytest.raises(ValueError, match="Dict of float32 boxes"):
        FlatVectorEnv(env)


def test_make_and_make_vec_take_the_argument(monkeypatch):
    monkeypatch.setattr(libero, "LiberoVectorEnv", FakeLiberoVectorEnv)
    vla = FakeVLA(horizon=8)
    more = {"vla": vla, "rl_token": MeanToken(vla.spec.token_dim), "success_step": 5}
    id, dims = "RLToken-LIBERO-v0", vla.spec.token_dim + 56 + 8
    one, plain = gym.make(id, flat=True, **more), gym.make(id, **more)
    assert one.observation_space.shape == one.unwrapped.observation_space.shape == (dims,)
    check_env(one.unwrapped, skip_render_check=True)
    (row, _), (obs, _) = one.reset(seed=4), plain.reset(seed=4)
    np.testing.assert_array_equal(row, spaces.flatten(plain.observation_space, obs))
    for mode in MODES:
        env = gym.make_vec(id, num_envs=2, flat=True, autoreset_mode=mode, **more)
        for vector in (env, copy.deepcopy(env)):
            assert vector.reset(seed=0)[0].shape == (2, dims) and vector.step(vector.action_space.sample())
            assert vector.unwrapped.spec.id == vector.spec.id == id and vector.autoreset_mode == mode
            assert vector.unwrapped.spec.kwargs["flat"] is True


# ---------------------------------------------------------------- corrections of the VLA's chunk


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("flat", [False, True])
def test_a_correction_of_zero_plays_the_vlas_chunks(mode, flat):
    plain, env = fake(mode=mode), fake(mode=mode)
    env = ResidualAction(FlatVectorEnv(env) if flat else env)
    assert isinstance(env, ResidualAction) and isinstance(env, gym.vector.VectorWrapper)
    obs, _ = plain.reset(seed=1)
    env.reset(seed=1)
    for _ in range(12):
        obs, *numbers, infos = plain.step(obs["vla_ref"])
        _, *others, their_infos = env.step(np.zeros(env.action_space.shape))
        for number, other in zip(numbers, others, strict=True):
            np.testing.assert_array_equal(number, other)
        np.testing.assert_array_equal(infos["step_rewards"], their_infos["step_rewards"])
        done = numbers[1] | numbers[2]
        if mode == AutoresetMode.DISABLED and done.any():
            obs, _ = plain.reset(options={"reset_mask": done})
            env.reset(options={"reset_mask": done})


SCALES = [0.3, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 2.0]]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("vector", [False, True])
def test_what_is_played_is_the_clipped_sum(vector, flat, scale):
    inner = fake(N) if vector else fake(1, AutoresetMode.DISABLED)
    below = FlatVectorEnv(inner) if flat else inner
    env = ResidualAction(below if vector else SingleEnv(below), scale=scale)
    env.action_space.seed(0)
    assert env.action_space.low.min() == -1 and env.action_space.high.max() == 1
    played = []
    checked = inner._checked_actions
    inner._checked_actions = lambda actions: (played.append(np.array(actions)), checked(actions))[1]
    env.reset(seed=0)
    clipped = 0
    for _ in range(3):
        reference = inner._batch()["vla_ref"]
        action = env.action_space.sample()
        expected = np.asarray(reference, np.float64) + np.asarray(scale) * action.reshape(reference.shape)
        clipped += (np.abs(expected) > 1).sum()
        env.step(action)
        np.testing.assert_allclose(played.pop(), np.clip(expected, -1, 1), atol=1e-6)
    assert clipped and not played


def test_corrections_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match="an observation with vla_ref"):
        ResidualAction(FakeLiberoVectorEnv(1))
    with pytest.raises(ValueError, match="an observation with vla_ref"):
        ResidualAction(gym.make("Pendulum-v1"))
    for wrong in (0.0, -1.0, np.nan, [0.1, 0.2], [1.0] * 6 + [0.0]):
        with pytest.raises(ValueError, match="scale must be a number > 0, or 7 of them"):
            ResidualAction(fake(), scale=wrong)
    env = ResidualAction(fake())
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"must have shape \(3, 4, 7\)"):
        env.step(np.zeros((N, C * D)))
