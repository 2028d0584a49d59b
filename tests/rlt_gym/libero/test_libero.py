"""The LIBERO layer on real scenes: equality with stock LIBERO, vector semantics, seeds, errors, processes."""

import subprocess
import sys
import time
import types
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.utils.env_checker import check_env

from rlt_gym.core import worker_vector_env
from rlt_gym.core.episodes import EpisodeSequence
from rlt_gym.libero.suites.tasks import episode_seed, get_task, get_tasks, load_init_states
from rlt_gym.libero.vector_env import LiberoVectorEnv
from rlt_gym.testing import check_vector_env
from rlt_gym.workers.backend import SPLITS

FAST = {"assets": "embedded", "render": "fast", "image_size": 64}


@pytest.fixture(scope="module")
def env():
    """Two workers, two tasks, episodes short enough to end by the horizon inside a few chunks."""
    made = LiberoVectorEnv(2, "libero_goal", [1, 8], chunk_length=4, max_episode_steps=10, **FAST)
    yield made
    made.close()


def test_steps_in_two_parts_are_those_in_one(env):
    """The same pictures, rewards and infos over ends of episodes; the workers play between the parts."""
    chunks = np.random.default_rng(0).uniform(-1, 1, (4, 2, 4, 7))
    found = []
    for parts in (False, True):
        env.reset(seed=3, options={"init_states": "train"})
        results = []
        for number, chunk in enumerate(chunks):
            if not parts:
                results.append(env.step(chunk))
                continue
            env.step_async(chunk)
            if number == 0:
                limits = env._pool._limits(dict.fromkeys(range(2), ()))
                deadline = time.monotonic() + 60
                while env._pool._ready(limits) != [0, 1] and time.monotonic() < deadline:
                    time.sleep(0.01)  # answers come, although nobody waits for the step
                assert env._pool._ready(limits) == [0, 1]
                with pytest.raises(AlreadyPendingCallError, match="call_workers"):
                    env.call_workers("rlt_gym.libero.collect:anything", [{"task_id": 1, "arguments": {}}])
            results.append(env.step_wait())
        found.append(results)
    for one, two in zip(*found, strict=True):
        assert all(np.array_equal(one[0][key], two[0][key]) for key in one[0])
        assert all(np.array_equal(a, b) for a, b in zip(one[1:4], two[1:4], strict=True))
        assert np.array_equal(one[4]["init_index"], two[4]["init_index"])
    assert any(result[3].any() for result in found[0])  # an episode ended
    with pytest.raises(NoAsyncCallError):
        env.step_wait()


# ---------------------------------------------------------------- tables, no simulator


def test_number_of_initial_states():
    sequence = EpisodeSequence(1, len(get_tasks("libero_goal", [1, 8])))
    assert sequence.init_state_counts == {"selection": 1000, "eval": 1000}


def test_tasks_follow_libero():
    task = get_task("libero_goal", 1)
    assert task.instruction == "put the bowl on the stove"
    assert task.bddl_file.is_file()
    assert load_init_states(task).shape[0] == 50
    assert get_task("libero_90", 0).instruction == "close the top drawer of the cabinet"
    assert [len(get_tasks(suite)) for suite in ("libero_spatial", "libero_10", "libero_90")] == [10, 10, 90]


def test_splits_never_share_a_seed():
    """Each split owns one third of the seeds; training placements cannot be evaluation placements."""
    task = get_task("libero_goal", 1)
    seeds = {split: {episode_seed(task, split, index) for index in range(2000)} for split in SPLITS}
    assert not seeds["train"] & seeds["selection"]
    assert not seeds["train"] & seeds["eval"]
    assert not seeds["selection"] & seeds["eval"]
    assert len(seeds["train"]) > 1990


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"suite": "libero_gaol"}, "libero_gaol.*Available.*libero_goal"),
        ({"task_ids": [10]}, r"Unknown task 10 .*0\.\.9"),
        ({"task_ids": []}, "at least one task"),
        ({"task_ids": [1, 1]}, "each once"),
        ({"num_envs": 0}, "num_envs must be an integer in 1"),
        ({"chunk_length": 0}, "chunk_length"),
        ({"image_size": 1000}, "image_size"),
        ({"init_states": "test"}, "init_states must be one of"),
        ({"render": "pretty"}, "render must be one of"),
        ({"render_mode": "human"}, "render_mode"),
        ({"assets": "/nowhere"}, "/nowhere"),
        ({"obs_stride": 0}, "obs_stride must be an integer in 1..7"),
        ({"obs_stride": 8}, "obs_stride must be an integer in 1..7"),
        ({"chunk_length": 1, "obs_stride": 1}, "chunk_length=1"),
        ({"autoreset_mode": "sometimes"}, r"autoreset_mode must be one of NEXT_STEP \('NextStep'\), .*'sometimes'"),
    ],
)
def test_bad_arguments_raise_before_any_process_starts(arguments, message, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("a process was started"))
    with pytest.raises(ValueError, match=message):
        LiberoVectorEnv(**{**FAST, **arguments})


# ---------------------------------------------------------------- semantics on LIBERO


def test_check_vector_env(env):
    check_vector_env(env)


def test_horizon_truncates_inside_a_chunk(env):
    """Horizon 10 with chunks of 4: the third chunk executes 2 steps and ends the episode."""
    env.reset(seed=3)
    still = np.zeros((2, 4, 7), dtype=np.float32)
    executed = []
    for _ in range(3):
        _, rewards, terminations, truncations, infos = env.step(still)
        executed.append(infos["final_info"]["chunk_steps"] if truncations.any() else infos["chunk_steps"])
    assert np.array_equal(executed, [[4, 4], [4, 4], [2, 2]])
    assert truncations.all() and not terminations.any() and not rewards.any()
    assert np.array_equal(infos["final_info"]["episode_steps"], [10, 10])
    assert np.array_equal(infos["episode_steps"], [0, 0])  # the top level is the new episode's


def test_training_episodes_may_be_shorter():
    with pytest.raises(ValueError, match=r"train_episode_steps must be an integer in 1\.\.9, got 10"):
        LiberoVectorEnv(1, "libero_goal", [1], max_episode_steps=9, train_episode_steps=10, **FAST)
    short = LiberoVectorEnv(
        1, "libero_goal", [1], chunk_length=4, max_episode_steps=9, train_episode_steps=6, init_states="eval", **FAST
    )
    lengths = {}
    for split in ("eval", "train", "selection"):
        short.reset(options={"init_states": split})
        for _ in range(3):
            _, _, _, truncations, infos = short.step(np.zeros((1, 4, 7), dtype=np.float32))
            if truncations[0]:
                lengths[split] = int(infos["final_info"]["episode_steps"][0])
                break
    short.close()
    assert lengths == {"eval": 9, "train": 6, "selection": 9}


@pytest.mark.sim
def test_resets_in_the_next_step_show_what_resets_in_the_same_step_show(env):
    """The same two episodes, bit for bit; only the step that resets comes in between, whatever its action."""
    other = LiberoVectorEnv(
        2, "libero_goal", [1, 8], chunk_length=4, max_episode_steps=10, autoreset_mode="NextStep", **FAST
    )
    actions = np.random.default_rng(2).uniform(-1, 1, (4, 2, 4, 7)).astype(np.float32)
    first, second = env.reset(seed=6)[0], other.reset(seed=6)[0]
    for index, action in enumerate(actions):
        assert all(np.array_equal(first[key], second[key]) for key in first)
        first, _, _, truncations, infos = env.step(action)
        second, _, _, their_truncations, their_infos = other.step(action)
        assert truncations.tolist() == their_truncations.tolist() == [index == 2] * 2
        if index == 2:
            for member in range(2):
                final = infos["final_obs"][member]
                assert all(np.array_equal(final[key], second[key][member]) for key in final)
            second, rewards, _, truncations, their_infos = other.step(-action)
            assert not rewards.any() and not truncations.any() and not their_infos["chunk_steps"].any()
        assert infos["init_index"].tolist() == their_infos["init_index"].tolist()
    assert all(np.array_equal(first[key], second[key]) for key in first)
    other.close()


class NoWorkers:
    """In place of the workers, where only the arguments count."""

    def __init__(self, num_workers, *_):
        self.restarts = np.zeros(num_workers, dtype=np.int64)

    def ask(self, *_, **__):
        return {}, {}

    def close(self):
        pass


@pytest.mark.parametrize(
    "suite, whole, training",
    [
        ("libero_spatial", 220, 160),
        ("libero_object", 280, 200),
        ("libero_goal", 300, 160),
        ("libero_10", 520, 380),
        ("libero_90", 400, 290),
    ],
)
def test_each_suite_has_its_horizons(suite, whole, training, monkeypatch):
    monkeypatch.setattr(worker_vector_env, "WorkerPool", NoWorkers)
    for arguments, expected in (
        ({}, (training, whole)),
        ({"max_episode_steps": 90}, (90, 90)),
        ({"max_episode_steps": 1000}, (1000, 1000)),
        ({"train_episode_steps": 100}, (100, whole)),
        ({"train_episode_steps": whole}, (whole, whole)),
        ({"train_episode_steps": 40, "max_episode_steps": 90}, (40, 90)),
    ):
        env = LiberoVectorEnv(1, suite, [0], **arguments, **FAST)
        lengths = []
        for split in ("train", "eval"):
            env.sequence.restart(split)
            lengths.append(env._horizon(0))
        assert tuple(lengths) == expected, arguments
    page = (Path(__file__).parents[3] / "docs/guide/vector_env.md").read_text()
    assert f"| `{suite}` | {training} | {whole} |" in page


@pytest.mark.sim
def test_what_users_of_gymnasium_see_of_the_horizons():
    """Nothing is reported: a training episode ends after 160 control steps, an evaluation's after LIBERO's 300."""
    single = gym.make("LIBERO-v0", task_ids=[1], chunk_length=100, **FAST)
    still = np.zeros((100, 7), dtype=np.float32)
    lengths = {}
    for split in ("train", "eval"):
        single.reset(seed=0, options={"init_states": split})
        truncated = False
        while not truncated:
            *_, truncated, info = single.step(still)
        lengths[split] = info["episode_steps"]
    single.unwrapped.vector_env.set_attr("max_episode_steps", 50)
    single.reset(options={"init_states": "train"})
    assert single.step(still)[-1]["episode_steps"] == 50
    single.close()
    assert lengths == {"train": 160, "eval": 300}


def test_inner_observations_are_those_of_shorter_chunks():
    """Chunks of 5 observed every 2 steps, horizon 9: what one-step chunks see after steps 2, 4, 7 (and not 9: the
    episode's last observation is no inner one), bit for bit, zeros elsewhere.
    """
    arguments = {**FAST, "render": "exact", "max_episode_steps": 9}
    actions = np.random.default_rng(1).uniform(-1, 1, (2, 5, 7)).astype(np.float32)
    chunked = LiberoVectorEnv(1, "libero_goal", [1], chunk_length=5, obs_stride=2, **arguments)
    chunked.reset(seed=4)
    infos = [chunked.step(chunk[None])[-1] for chunk in actions]
    chunked.close()
    stepwise = LiberoVectorEnv(1, "libero_goal", [1], chunk_length=1, **arguments)
    stepwise.reset(seed=4)
    seen = {}
    for step, action in enumerate(actions.reshape(-1, 7)[:8], start=1):
        seen[step] = stepwise.step(action[None, None])[0]
    stepwise.close()
    assert [info["inner_count"].tolist() for info in infos] == [[2], [1]]
    for chunk, index, step in ((0, 0, 2), (0, 1, 4), (1, 0, 7)):
        for key, value in seen[step].items():
            assert np.array_equal(infos[chunk]["inner_obs"][key][0, index], value[0]), (step, key)
    for key, value in infos[1]["inner_obs"].items():
        assert value.shape[:2] == (1, 2) and value.dtype == chunked.single_observation_space[key].dtype
        assert not value[0, 1].any()


def test_evaluation_sequence_covers_each_pair_once_and_restarts(env):
    """Episodes of all envs, in evaluate_policy's static split, are pairs 0..n-1 of (state, task)."""
    still = np.zeros((2, 4, 7), dtype=np.float32)
    for _ in range(2):
        _, infos = env.reset(options={"init_states": "eval"})
        seen = [[], []]
        for _ in range(2 * 3):
            current = infos
            for index in range(2):
                pair = (int(current["task_id"][index]), int(current["init_index"][index]))
                if not seen[index] or seen[index][-1] != pair:
                    seen[index].append(pair)
            *_, infos = env.step(still)
        # env 1 plays even numbers (task 1), env 0 odd ones (task 8)
        assert seen[1][:2] == [(1, 0), (1, 1)]
        assert seen[0][:2] == [(8, 0), (8, 1)]
    parts = []
    for k in range(2):  # a shard of the same sequence: every second pair
        _, infos = env.reset(options={"init_states": "eval", "shard": (k, 2)})
        parts.append(list(zip(infos["task_id"].tolist(), infos["init_index"].tolist(), strict=True)))
    assert parts == [[(1, 1), (1, 0)], [(8, 1), (8, 0)]]
    env.reset(options={"init_states": "train"})


def test_evaluation_goes_on_after_liberos_own_states(env):
    """State 50 and those after it are sampled: as reproducible as LIBERO's own, and different from them."""
    first, _ = env.reset(options={"init_states": "eval"})
    later, infos = env.reset(options={"init_states": "eval", "shard": (100, 101)})
    again, _ = env.reset(options={"init_states": "eval", "shard": (100, 101)})
    assert sorted(infos["init_index"].tolist()) == [50, 100]
    for key, value in later.items():
        assert np.array_equal(value, again[key])
        assert not np.array_equal(value, first[key])
    env.reset(options={"init_states": "train"})


def test_training_states_follow_seed_not_number_of_workers(env):
    _, two = env.reset(seed=5)
    _, again = env.reset(seed=5)
    _, other = env.reset(seed=6)
    assert np.array_equal(two["init_index"], again["init_index"])
    assert not np.array_equal(two["init_index"], other["init_index"])
    numbers = [env.sequence.number(index, 0) for index in range(2)]
    assert sorted(numbers) == [0, 1]
    assert two["init_index"][0] != two["init_index"][1]


def test_an_evaluation_does_not_set_practice_back(env):
    """Training goes on with the episode after the last one it began; a seed starts its sequence anew."""
    _, first = env.reset(seed=9)
    _, second = env.reset()
    env.reset(options={"init_states": "selection"})
    env.reset()
    _, third = env.reset(options={"init_states": "train"})
    _, again = env.reset(seed=9)
    assert np.array_equal(first["init_index"], again["init_index"])
    _, again = env.reset()
    assert np.array_equal(second["init_index"], again["init_index"])
    _, again = env.reset()
    assert np.array_equal(third["init_index"], again["init_index"])
    assert len({tuple(info["init_index"]) for info in (first, second, third)}) == 3


def test_bad_actions_leave_the_workers_alive(env):
    env.reset(seed=0)
    for bad, message in (
        (np.zeros((2, 3, 7)), r"\(2, 4, 7\).*\(2, 3, 7\)"),
        (np.full((2, 4, 7), np.nan), "finite"),
        (np.full((2, 4, 7), "x"), "finite"),
    ):
        with pytest.raises(ValueError, match=message):
            env.step(bad)
    *_, infos = env.step(np.zeros((2, 4, 7)))
    assert np.array_equal(infos["chunk_steps"], [4, 4])


def test_bad_reset_options(env):
    with pytest.warns(UserWarning, match=r"\['split'\] are ignored"):
        env.reset(options={"split": "eval"})
    with pytest.raises(ValueError, match="init_states must be one of"):
        env.reset(options={"init_states": "test"})
    with pytest.raises(ValueError, match="shard must be"):
        env.reset(options={"shard": (3, 3)})
    with pytest.raises(ValueError, match="reset_mask"):
        env.reset(options={"reset_mask": [True, False]})


def test_single_env_passes_gymnasiums_checker_and_renders():
    single = gym.make("LIBERO-v0", task_ids=[1], chunk_length=2, max_episode_steps=4, render_mode="rgb_array", **FAST)
    check_env(single.unwrapped, skip_render_check=True)
    single.reset(seed=0)
    frame = single.render()
    assert frame.shape == (256, 256, 3) and frame.dtype == np.uint8 and frame.std() > 20
    single.close()


class ClipByImageio:
    """moviepy's class, as far as Gymnasium's RecordVideo uses it: moviepy is no dependency of this package."""

    def __init__(self, frames, fps):
        self.frames, self.fps = frames, fps

    def write_videofile(self, path, **_):
        import imageio.v3 as iio

        iio.imwrite(path, np.stack(self.frames), fps=self.fps)


def test_gymnasiums_wrappers_work(tmp_path, monkeypatch):
    """RecordEpisodeStatistics and RecordVideo, for one environment and for a vector."""
    import imageio.v3 as iio

    for name in ("moviepy", "moviepy.video", "moviepy.video.io", "moviepy.video.io.ImageSequenceClip"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["moviepy.video.io.ImageSequenceClip"].ImageSequenceClip = ClipByImageio
    arguments = {"task_ids": [1], "chunk_length": 2, "render_mode": "rgb_array", **FAST}
    single = gym.make("LIBERO-v0", **arguments, max_episode_steps=6)
    single = gym.wrappers.RecordEpisodeStatistics(single)
    single = gym.wrappers.RecordVideo(single, str(tmp_path / "single"), episode_trigger=lambda _: True)
    single.reset(seed=0)
    results = [single.step(np.zeros((2, 7), dtype=np.float32)) for _ in range(3)]
    assert [result[3] for result in results] == [False, False, True]
    assert results[-1][4]["episode"]["l"] == 3 and results[-1][4]["episode"]["r"] == 0.0
    single.close()
    vector = gym.make_vec("LIBERO-v0", num_envs=2, vectorization_mode="vector_entry_point", **arguments)
    vector.unwrapped.max_episode_steps = 4
    vector = gym.wrappers.vector.RecordEpisodeStatistics(vector)
    vector = gym.wrappers.vector.RecordVideo(vector, str(tmp_path / "vector"), step_trigger=lambda step: step == 0)
    vector.reset(seed=0)
    for _ in range(2):
        *_, truncations, infos = vector.step(np.zeros((2, 2, 7), dtype=np.float32))
    assert truncations.all()
    assert infos["episode"]["l"].tolist() == [2, 2] and infos["episode"]["r"].tolist() == [0.0, 0.0]
    vector.close()
    for folder, frames in (("single", 4), ("vector", None)):
        (video,) = (tmp_path / folder).glob("*.mp4")
        film = iio.imread(video)
        assert film.std() > 10 and (frames is None or film.shape == (frames, 256, 256, 3))
