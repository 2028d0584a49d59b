"""Meta-World in worker processes: rows, seeds, lost workers, demonstrations, and a run on it from end to end."""

import importlib.util
import os
import signal

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from rlt_gym.data.demo_set import load_demo_set
from rlt_gym.metaworld import tasks
from rlt_gym.metaworld.make import MetaWorldVectorEnv
from rlt_gym.testing import check_vector_env

if importlib.util.find_spec("metaworld") is None:
    pytest.skip("Meta-World is not installed (pip install 'rlt[metaworld]')", allow_module_level=True)

SMALL = {"image_size": 64, "chunk_length": 4}
DRAWER_CLOSE, WINDOW_OPEN = 5, 8


@pytest.fixture(scope="module")
def env():
    """Two workers, two tasks, short episodes."""
    made = MetaWorldVectorEnv(2, "MT10", [DRAWER_CLOSE, WINDOW_OPEN], max_episode_steps=10, **SMALL)
    yield made
    made.close()


def play(env, steps=5, seed=3):
    """Observations, rewards and ends of random chunks."""
    rng = np.random.default_rng(seed)
    chunks = rng.uniform(-1, 1, (steps, *env.action_space.shape)).astype(np.float32)
    rows = [env.reset(seed=seed)[0]]
    ends = []
    for chunk in chunks:
        obs, rewards, terminated, truncated, _ = env.step(chunk)
        rows.append(obs)
        ends.append((rewards.tolist(), terminated.tolist(), truncated.tolist()))
    return rows, ends


def test_the_libraries_checkers(env):
    check_vector_env(env)
    single = gymnasium.make("MetaWorld-v0", suite="MT10", task_ids=[DRAWER_CLOSE], max_episode_steps=10, **SMALL)
    try:
        check_env(single.unwrapped, skip_render_check=True)
    finally:
        single.close()


def test_the_same_seed_gives_the_same_rows(env):
    first, second = play(env), play(env)
    for one, two in zip(first[0], second[0], strict=True):
        assert all(np.array_equal(one[key], two[key]) for key in one)
    assert first[1] == second[1] and any(any(truncated) for *_, truncated in first[1])
    other = play(env, seed=4)
    assert not all(np.array_equal(one["corner2"], two["corner2"]) for one, two in zip(first[0], other[0], strict=True))


def test_a_row_is_what_meta_world_itself_gives(env):
    """The reference: Meta-World's own environment in this process, stepped by hand."""
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

    from rlt_gym.workers.backend import split_seed

    obs, infos = env.reset(options={"init_states": "eval"})
    chunks = np.random.default_rng(0).uniform(-1, 1, (2, 2, 4, 4)).astype(np.float32)
    stepped = [env.step(chunk)[0] for chunk in chunks]
    for place, task in enumerate(infos["task_id"]):
        name = tasks.SUITES["MT10"][task]
        world = ALL_V3_ENVIRONMENTS[name]()
        world._set_task_called, world._freeze_rand_vec, world.seeded_rand_vec = True, False, True
        world.seed(split_seed("eval", tasks.SUITES["MT50"].index(name), int(infos["init_index"][place])))
        state, _ = world.reset()
        assert np.array_equal(obs["proprio"][place], state[:4].astype(np.float32))
        for chunk, row in zip(chunks, stepped, strict=True):
            for action in chunk[place]:
                state = world.step(action)[0]
            assert np.array_equal(row["proprio"][place], state[:4].astype(np.float32))
    env.reset(options={"init_states": "train"})


def test_pictures_are_upright_and_show_motion(env):
    """The table is below the wall: rows of a picture get darker or lighter, and the hand moves in it."""
    obs, _ = env.reset(seed=0)
    for key in ("corner2", "gripperPOV"):
        assert obs[key].shape == (2, 64, 64, 3) and obs[key].dtype == np.uint8 and obs[key].std() > 10
    before = obs["corner2"].astype(int)
    up = np.zeros((2, 4, 4), np.float32)
    up[..., 2] = 1.0
    after = before
    for _ in range(2):
        after = env.step(up)[0]["corner2"].astype(int)
    moved = np.abs(after - before).sum(-1) > 60
    assert moved.any() and moved.mean() < 0.5
    rows = np.flatnonzero(moved[0].any(1))
    assert rows.min() < 40, "the hand is in the upper part of an upright picture"


def test_the_scripted_expert_solves_and_its_demonstrations_can_be_read(tmp_path):
    from rlt_gym.metaworld.collect import collect

    (path,) = collect("MT10", [DRAWER_CLOSE], demos=2, out=str(tmp_path), noise=0.0, image_size=32, num_envs=1)
    assert path.name == "MT10_5.hdf5"
    rows = load_demo_set([str(path)], 16)
    assert rows.robot == tasks.SAWYER and rows.instructions == ["drawer close"]
    assert rows.actions.shape[1] == 4 and rows.proprio.shape[1] == 4 and set(rows.pictures) == {"corner2", "gripperPOV"}


def test_a_worker_that_dies_is_replaced(env):
    env.reset(seed=0)
    os.kill(env.worker_pids[1], signal.SIGKILL)
    *_, infos = env.step(np.zeros((2, 4, 4), np.float32))
    lost = infos["final_info"]["worker_restarted"]
    assert lost.tolist() == [False, True]
    obs = env.step(np.zeros((2, 4, 4), np.float32))[0]
    assert obs in env.observation_space


@pytest.mark.parametrize(
    "task_ids", [[True], [1.0], 3, "1", ["1"], [[1]], [], [1, 1], [1, np.int64(1)], [-1], [10], {1: 2}, np.array(3)]
)
def test_task_ids_of_other_types_are_refused(task_ids):
    with pytest.raises(ValueError, match=r"task_ids must be different integers 0\.\.9 of MT10, got ") as caught:
        tasks.get_tasks("MT10", task_ids)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("task_ids", [[2, 0], (2, 0), range(2, -1, -2), np.array([2, 0]), [np.int32(2), 0]])
def test_task_ids_of_any_list(task_ids):
    assert [(type(task.task_id), task.task_id) for task in tasks.get_tasks("MT10", task_ids)] == [(int, 2), (int, 0)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"suite": "MT1"}, "Unknown Meta-World suite 'MT1'. Available: MT10, MT50"),
        ({"task_ids": [10]}, r"integers 0\.\.9 of MT10"),
        ({"max_episode_steps": 501}, "max_episode_steps must be an integer in 1..500"),
        ({"image_size": 600}, "image_size"),
    ],
)
def test_bad_arguments_are_told_before_any_process_starts(arguments, message):
    with pytest.raises(ValueError, match=message):
        MetaWorldVectorEnv(**arguments)


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'rlt\[metaworld\]'"):
        tasks.get_tasks("MT10")
