"""What Gymnasium and the libraries around it expect of an environment beside ``reset`` and ``step``."""

import copy
import pickle

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import load_env_creator
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from still_env import Still

from rlt_gym.core.single_env import SingleEnv
from rlt_gym.libero import vector_env as libero
from rlt_gym.libero.make import make_libero
from rlt_gym.rl_token.env import RLTokenVectorEnv
from rlt_gym.rl_token.untrained import MeanToken
from rlt_gym.testing import FakeLiberoVectorEnv, FakeRLTokenVectorEnv, FakeVLA

IDS = ("LIBERO-v0", "RLToken-LIBERO-v0")
VLA = FakeVLA(horizon=8)
#: Further arguments of each id, so that nothing is loaded.
MORE = {"LIBERO-v0": {}, "RLToken-LIBERO-v0": {"vla": VLA, "rl_token": MeanToken(VLA.spec.token_dim)}}


@pytest.fixture
def no_simulator(monkeypatch):
    monkeypatch.setattr(libero, "LiberoVectorEnv", FakeLiberoVectorEnv)


def modes(render_mode=None):
    made = []
    for mode in (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED):
        raw = FakeLiberoVectorEnv(2, autoreset_mode=mode, render_mode=render_mode)
        made += [(mode, raw), (mode, RLTokenVectorEnv(raw, VLA, MeanToken(VLA.spec.token_dim)))]
    return made


def test_the_mode_of_autoreset_is_an_attribute_as_in_gymnasium():
    """TorchRL reads it."""
    assert SyncVectorEnv([lambda: gym.make("CartPole-v1")]).autoreset_mode == AutoresetMode.NEXT_STEP
    for mode, env in modes():
        assert env.autoreset_mode == env.metadata["autoreset_mode"] == mode


@pytest.mark.parametrize("id", IDS)
def test_entry_points_tell_their_render_modes(id):
    for entry_point in (gym.spec(id).entry_point, gym.spec(id).vector_entry_point):
        assert load_env_creator(entry_point).metadata["render_modes"] == ["rgb_array"]
    assert load_env_creator(gym.spec(id).vector_entry_point).metadata["autoreset_mode"] == AutoresetMode.SAME_STEP


@pytest.mark.parametrize("id", IDS)
def test_gymnasium_adds_the_modes_that_we_have_not(id, no_simulator):
    with pytest.warns(UserWarning, match="HumanRendering wrapper is being applied"):
        env = gym.make(id, render_mode="human", **MORE[id])
    assert isinstance(env, gym.wrappers.HumanRendering) and env.metadata["render_fps"] == 2.5
    env = gym.make(id, render_mode="rgb_array_list", **MORE[id])
    env.reset(seed=0)
    env.step(env.action_space.sample())
    assert [frame.shape for frame in env.render()] == [(32, 32, 3)] * 2
    assert gym.make(id, **MORE[id]).metadata["render_fps"] == 2.5


def copies(env):
    return pickle.loads(pickle.dumps(env)), copy.deepcopy(env)


def play(env, chunks=4):
    """Everything that can be seen of an environment with another seed."""
    shape = env.action_space.shape
    seen = [env.reset()]
    seen += [env.step(np.full(shape, 0.1, dtype=np.float32)) for _ in range(chunks)]
    return seen


@pytest.mark.parametrize(
    "env",
    [
        Still(3, seed=4, group_size=2),
        SingleEnv(Still(1, seed=4, autoreset_mode=AutoresetMode.DISABLED)),
        FakeRLTokenVectorEnv(2, seed=3),
        RLTokenVectorEnv(FakeLiberoVectorEnv(2, success_step=5), VLA, MeanToken(VLA.spec.token_dim)),
    ],
    ids=lambda env: type(env).__name__,
)
def test_a_copy_is_made_with_the_same_arguments_and_begins_anew(env):
    chunks = 2 if isinstance(env, SingleEnv) else 4
    played = play(env, chunks)
    for other in copies(env):
        assert type(other) is type(env) and other is not env
        assert data_equivalence(play(other, chunks), played)
        for again in copies(other):
            assert data_equivalence(play(again, chunks), played)


@pytest.mark.parametrize("id", IDS)
def test_what_gymnasium_makes_can_be_copied(id, no_simulator):
    single, vector = gym.make(id, success_step=5, **MORE[id]), gym.make_vec(id, num_envs=2, success_step=5, **MORE[id])
    for env in (single, vector):
        for other in copies(env):
            assert other.unwrapped.spec.id == id
            for each in (env, other):
                each.reset(seed=1)
            results = [each.step(np.zeros(env.action_space.shape, dtype=np.float32)) for each in (env, other)]
            assert data_equivalence(*results)


def test_a_copy_without_a_seed_draws_its_own():
    env = Still(2)
    assert len({env.np_random_seed, *(other.np_random_seed for other in copies(env))}) == 3


def test_one_environment_goes_through_the_states_of_an_evaluation(no_simulator):
    env = gym.make("rlt_gym:LIBERO-v0", task_ids=[2, 5], init_states="eval")

    def states(count, **first):
        infos = [env.reset(**first)[1]] + [env.reset()[1] for _ in range(count - 1)]
        return [(info["task_id"], info["init_index"]) for info in infos]

    # the fake's n-th state of an evaluation has the number n, whatever the task
    assert states(5) == [(2, 0), (5, 1), (2, 2), (5, 3), (2, 4)]
    assert states(2) == [(5, 5), (2, 6)]  # it goes on
    assert states(3, options={"init_states": "eval"}) == [(2, 0), (5, 1), (2, 2)] == states(3, seed=1)
    assert states(2, options={"episodes": [(5, 7), (2, 9)]}) == [(5, 7), (2, 9)]


def test_infos_of_one_environment_hold_plain_values():
    """NumPy's own scalars become arrays of objects under SyncVectorEnv, and cannot be written as JSON."""
    env = SingleEnv(FakeLiberoVectorEnv(1, autoreset_mode=AutoresetMode.DISABLED, obs_stride=3))
    for info in (env.reset(seed=0)[1], env.step(np.zeros((8, 7)))[-1]):
        kinds = {key: type(value) for key, value in info.items() if not isinstance(value, np.ndarray | dict)}
        plain = {"is_success": bool, "worker_restarted": bool, "instruction": str} | {
            key: int for key in ("chunk_steps", "episode_steps", "task_id", "init_index", "worker_restarts")
        }
        assert {key: kinds[key] for key in plain} == plain and set(kinds.values()) <= {bool, int, float, str}

    def make():
        return SingleEnv(FakeLiberoVectorEnv(1, autoreset_mode=AutoresetMode.DISABLED))

    theirs, ours = SyncVectorEnv([make, make]), FakeLiberoVectorEnv(2)
    infos = [env.reset(seed=0)[1] for env in (theirs, ours)]
    for key in ("is_success", "worker_restarted", "chunk_steps", "init_index", "step_rewards"):
        assert infos[0][key].dtype == infos[1][key].dtype != object


def lengths_of_episodes(env, chunks):
    """Control steps of the chunks played, until the first episode is truncated."""
    env.reset(seed=1)
    seen = []
    for _ in range(chunks):
        *_, truncated, info = env.step(np.zeros(env.action_space.shape, dtype=np.float32))
        ended = bool(np.all(truncated))
        info = info.get("final_info", info)
        seen.append(int(np.max(info["episode_steps"])))
        if ended:
            break
    return seen


@pytest.mark.parametrize("id", IDS)
@pytest.mark.parametrize("chunk_length", [1, 8])
def test_max_episode_steps_counts_control_steps_whoever_makes_the_environment(id, chunk_length, no_simulator):
    arguments = {"chunk_length": chunk_length, "success_step": 1000, **MORE[id]}
    counts = list(range(chunk_length, 12, chunk_length)) + [12] * (chunk_length > 1)
    single = gym.make(id, max_episode_steps=12, **arguments)
    copied = copy.deepcopy(single)
    sync = gym.make_vec(id, num_envs=2, vectorization_mode="sync", max_episode_steps=12, **arguments)
    for env in (single, gym.make(single.spec), copied, sync, gym.make_vec(id, max_episode_steps=12, **arguments)):
        assert lengths_of_episodes(env, 20)[: len(counts)] == counts
        assert lengths_of_episodes(env, 20)[-1] == 12
    # Gymnasium's own limit is there as well, and never ends an episode before the environment does
    assert single.spec.max_episode_steps == 12 and single.unwrapped.vector_env.unwrapped.max_episode_steps == 12
    assert lengths_of_episodes(gym.make(id, max_episode_steps=-1, **arguments), 30)[-1] == 20
    assert lengths_of_episodes(gym.make(id, **arguments), 30)[-1] == 20


def test_a_limit_of_another_environment_is_not_ours(no_simulator):
    """That of an environment of someone else that makes one of ours inside counts what it calls a step."""
    gym.register("Outer-v0", entry_point=lambda: make_libero(success_step=1000))
    try:
        assert lengths_of_episodes(gym.make("Outer-v0", max_episode_steps=2, disable_env_checker=True), 5) == [8, 16]
    finally:
        del gym.registry["Outer-v0"]


@pytest.mark.parametrize("id", IDS)
@pytest.mark.parametrize("argument", [{"num_envs": 2}, {"autoreset_mode": AutoresetMode.SAME_STEP}])
def test_what_only_vectors_have_is_refused_in_one_line(id, argument, no_simulator):
    with pytest.raises(ValueError, match=rf"takes no {next(iter(argument))} .*Use gymnasium\.make_vec") as error:
        gym.make(id, **argument, **MORE[id])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("id", IDS)
def test_a_closed_environment_says_so(id, no_simulator):
    for make, number in ((gym.make, 1), (gym.make_vec, 2)):
        env = make(id, **({} if number == 1 else {"num_envs": 2}), render_mode="rgb_array", **MORE[id])
        env.reset(seed=0)
        env.close()
        env.close()
        actions = np.zeros(env.action_space.shape, dtype=np.float32)
        for use in (env.reset, lambda env=env, actions=actions: env.step(actions), env.unwrapped.render):
            with pytest.raises(gym.error.ClosedEnvironmentError, match=r"VectorEnv was closed: make a new one"):
                use()
