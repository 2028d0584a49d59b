"""A new chunked environment is a small class; it has everything that LIBERO-v0 has around its simulators."""

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from rlt_gym.core.chunk_vector_env import ChunkVectorEnv, Played, Task
from rlt_gym.core.in_process import InProcessVectorEnv
from rlt_gym.core.robot_spec import Camera, ProprioPart, RobotSpec
from rlt_gym.core.single_env import SingleEnv
from rlt_gym.rl_token.env import RLTokenVectorEnv
from rlt_gym.rl_token.untrained import MeanToken
from rlt_gym.testing import FakeVLA, check_vector_env

C, D = 4, 7

# ---------------------------------------------------------------- the environment, as a user would write it

SLIDER = RobotSpec(
    name="slider",
    cameras=(Camera("agentview"), Camera("wrist")),
    proprio=(ProprioPart("place", 1, scale=(2.0,)), ProprioPart("goal", 7)),
    action_names=("push", "b", "c", "d", "e", "f", "gripper"),
    control_frequency=10.0,
    gripper_index=6,
)
PICTURE = spaces.Box(0, 255, (8, 8, 3), np.uint8)
SPACE = spaces.Dict(agentview=PICTURE, wrist=PICTURE, proprio=spaces.Box(-np.inf, np.inf, (8,), np.float32))


class Slider(InProcessVectorEnv):
    """Push a block along a line to the goal, which is 1 to 2 away."""

    def __init__(self, num_envs=1, **settings):
        super().__init__(num_envs, [Task(0, "slide"), Task(3, "glide")], SPACE, SLIDER, **settings)
        self.place, self.goal = np.zeros(num_envs), np.zeros(num_envs)

    def _begin(self, env):
        self.place[env] = 0.0
        self.goal[env] = np.random.default_rng(self.episodes[env].init_index).uniform(1.0, 2.0)

    def _control_step(self, env, action):
        self.place[env] += 0.3 * action[0]
        solved = bool(self.place[env] >= self.goal[env])
        return float(solved), solved

    def _observe(self, env):
        picture = np.full((8, 8, 3), np.clip(100 * abs(self.place[env]), 0, 255), dtype=np.uint8)
        proprio = np.array([self.place[env], *[self.goal[env]] * 7], dtype=np.float32)
        return {"agentview": picture, "wrist": picture.copy(), "proprio": proprio}

    def _frame(self, env):
        return self._observe(env)["agentview"]


# ---------------------------------------------------------------- what it gets for that


def make(num_envs=2, **settings):
    return Slider(num_envs, **{"chunk_length": C, "max_episode_steps": 10, **settings})


def push(num_envs=2):
    actions = np.zeros((num_envs, C, D), dtype=np.float32)
    actions[..., 0] = 1.0
    return actions


@pytest.mark.parametrize("settings", [{}, {"obs_stride": 1}, {"init_states": "eval"}, {"group_size": 2}])
def test_it_keeps_the_contract(settings):
    check_vector_env(make(**settings))


def test_a_vla_can_play_it():
    """Pictures go to the VLA, which gives a reference chunk and a token."""
    vla = FakeVLA(horizon=6)
    env = RLTokenVectorEnv(make(3, obs_stride=2), vla, MeanToken(vla.spec.token_dim))
    assert env.metadata["robot"] is SLIDER
    check_vector_env(env)
    obs, infos = env.reset(seed=0)
    assert obs["vla_ref"].shape == (3, C, D) and infos["instruction"].tolist().count("glide") in (1, 2)
    *_, infos = env.step(obs["vla_ref"])
    assert infos["inner_obs"]["z_rl"].shape == (3, 1, vla.spec.token_dim) and infos["inner_count"].tolist() == [1] * 3


def test_an_episode_step_by_step():
    """Against a second account of the same rules: goal g is reached at control step ceil(g / 0.3)."""
    env = make(2, obs_stride=3, render_mode="rgb_array")
    _, infos = env.reset(seed=4)
    assert env.metadata["render_fps"] == 2.5
    for _ in range(5):
        steps = infos["episode_steps"].copy()
        left = [int(np.ceil(np.random.default_rng(i).uniform(1.0, 2.0) / 0.3)) for i in infos["init_index"]] - steps
        states = list(zip(infos["task_id"], infos["init_index"], strict=True))
        obs, rewards, terminations, truncations, infos = env.step(push())
        for i in range(2):
            k = min(left[i], C)
            ended = left[i] <= C
            info = infos["final_info"] if ended else infos
            assert (info["task_id"][i], info["init_index"][i]) == states[i] and info["chunk_steps"][i] == k
            assert terminations[i] == ended == info["is_success"][i] and not truncations[i]
            assert info["step_rewards"][i].tolist() == [float(ended and step == k - 1) for step in range(C)]
            assert rewards[i] == float(ended) and info["episode_steps"][i] == steps[i] + k
            assert infos["inner_count"][i] == (k > 3)
            last = infos["final_obs"][i]["proprio"][0] if ended else obs["proprio"][i, 0]
            assert last == pytest.approx(0.3 * (steps[i] + k))
            if ended:
                assert obs["proprio"][i, 0] == 0.0 and infos["episode_steps"][i] == 0
                assert info["final_frame"][i].max() == infos["final_obs"][i]["agentview"].max() > 0
    assert [frame.max() for frame in env.render()] == obs["agentview"].max((1, 2, 3)).tolist()


def test_frames_inside_the_chunks_of_the_filmed_environments():
    """With those of ``render`` they are one for every control step: the block's place after 0.3, 0.6, ..."""
    env = make(2, render_mode="rgb_array", max_episode_steps=6)
    env.film([1])
    env.reset(seed=4)
    brightness = [env.render()[1].max()]
    for _ in range(2):
        _, _, terminations, truncations, infos = env.step(push() / 10)
        assert not terminations.any()
        info = infos["final_info"] if truncations[1] else infos
        assert info["_inner_frames"].tolist() == [False, True] and isinstance(info["inner_frames"][1], list)
        brightness += [frame.max() for frame in info["inner_frames"][1]]
        brightness.append(info["final_frame"][1].max() if truncations[1] else env.render()[1].max())
    assert truncations.all() and "inner_frames" not in infos
    assert brightness == [int(100 * 0.03 * step) for step in range(7)]
    env.film()
    assert "inner_frames" not in env.step(push())[-1]
    with pytest.raises(ValueError, match="render_mode='rgb_array'"):
        make().film([0])


def test_horizons_of_the_splits():
    env = make(1, train_episode_steps=6)
    lengths = {}
    for split in ("train", "eval"):
        env.reset(options={"init_states": split})
        truncations = [False]
        while not truncations[0]:
            _, _, terminations, truncations, infos = env.step(np.zeros((1, C, D)))
            assert not terminations[0]
        lengths[split] = int(infos["final_info"]["episode_steps"][0])
    assert lengths == {"train": 6, "eval": 10} and env.init_state_counts == {"selection": 1000, "eval": 1000}


def test_a_reset_sets_the_horizon_of_training():
    """It stays, also through autoresets and other splits; what is refused changes nothing."""
    env = make(1, train_episode_steps=6)

    def length(options):
        env.reset(options=options)
        for _ in range(2):  # the second episode begins by itself
            truncations = [False]
            while not truncations[0]:
                _, _, _, truncations, infos = env.step(np.zeros((1, C, D)))
        return int(infos["final_info"]["episode_steps"][0])

    assert length({"init_states": "train", "train_episode_steps": 9}) == 9
    assert length({"init_states": "eval"}) == 10
    assert length({"init_states": "train"}) == 9
    for bad in (0, 11, 4.0, None, True):
        with pytest.raises(ValueError, match=r"train_episode_steps must be an integer in 1\.\.10, got"):
            env.reset(options={"train_episode_steps": bad})
    with pytest.raises(ValueError, match="init_states"):
        env.reset(options={"train_episode_steps": 3, "init_states": "moon"})
    assert env.train_episode_steps == 9 and length(None) == 9


def test_each_task_can_have_its_own_horizon_in_practice():
    env = make(2, train_episode_steps=[4, 9])

    def lengths(options):
        env.reset(seed=3, options=options)
        found = {0: set(), 3: set()}
        for _ in range(12):
            *_, infos = env.step(np.zeros((2, C, D)))
            for row in np.flatnonzero(infos.get("_final_info", np.zeros(2, bool))):
                final = infos["final_info"]
                found[int(final["task_id"][row])].add(int(final["episode_steps"][row]))
        return found

    assert lengths(None) == {0: {4}, 3: {9}} and lengths({"init_states": "eval"}) == {0: {10}, 3: {10}}
    assert lengths({"init_states": "train", "train_episode_steps": (7, 3)}) == {0: {7}, 3: {3}}
    assert env.train_episode_steps == [7, 3] and lengths({"train_episode_steps": 5}) == {0: {5}, 3: {5}}
    for bad, message in (([4], "an integer, or 2, one for each task; got"), ([4, 11], r"integer in 1\.\.10, got 11")):
        with pytest.raises(ValueError, match=message):
            env.reset(options={"train_episode_steps": bad})
        with pytest.raises(ValueError, match=message):
            make(train_episode_steps=bad)
    assert env.train_episode_steps == 5


def test_tasks_can_have_unequal_numbers_of_training_episodes():
    env = make(2)

    def played(options=None):
        env.reset(seed=3, options=options)
        found = [env.task(1).task_id, env.task(0).task_id]
        while len(found) < 16:
            *_, infos = env.step(push())
            found += [env.task(row).task_id for row in np.flatnonzero(infos.get("_final_info", np.zeros(2, bool)))]
        return found[:16]

    assert played().count(3) == 8
    env.set_task_weights([1, 3])
    assert played().count(3) == 12 and played({"init_states": "eval"}).count(3) == 8
    assert played({"init_states": "train"}).count(3) == 12  # it stays
    env.set_task_weights((1, 0))
    assert played().count(0) == 16
    for bad in ([1], [1, -1], [0, 0], [1.0, 1.0], 2, [True, 1]):
        with pytest.raises(ValueError, match=r"task weights must be 2 integers of 0 or more, .* got"):
            env.set_task_weights(bad)
    assert played().count(0) == 16


def test_hooks_see_and_do():
    """Someone pushes from control step 2 on; the critical phase begins behind 0.5. Nobody helps in evaluations."""
    env = make(
        1,
        hooks={
            "intervention": lambda simulator, proposed, step: push()[0, 0] if step >= 2 else None,
            "critical_phase": lambda simulator: simulator.env.place[simulator.index] > 0.5,
        },
    )
    env.reset(seed=0)
    *_, infos = env.step(np.zeros((1, C, D)))
    assert infos["intervention"].tolist() == [[False, False, True, True]]
    assert infos["executed_actions"][0, :, 0].tolist() == [0, 0, 1, 1]
    assert infos["critical_phase"].tolist() == [True] and infos["critical_chunk"].tolist() == [False]
    env.reset(options={"init_states": "eval"})
    *_, infos = env.step(np.zeros((1, C, D)))
    assert not infos["intervention"].any() and not infos["executed_actions"].any()


def test_one_of_it():
    env = SingleEnv(make(1, autoreset_mode=AutoresetMode.DISABLED))
    with pytest.raises(RuntimeError, match=r"call reset\(\) before step"):
        env.step(push()[0])
    env.reset(seed=0)
    for _ in range(3):
        obs, *_, info = env.step(0.1 * push()[0])
    assert obs["proprio"].shape == (8,) and info["chunk_steps"] == 2
    with pytest.raises(RuntimeError, match="must be reset"):
        env.step(push()[0])


class Fragile(ChunkVectorEnv):
    """A backend that answers for all environments at once; those named in ``breaks`` are lost in the next chunk."""

    def __init__(self, num_envs, **settings):
        super().__init__(num_envs, [Task(0, "hold")], SPACE, SLIDER, **settings)
        self.breaks, self.started = set(), []

    def _observation(self, env):
        proprio = np.full(8, self.episodes[env].init_index, dtype=np.float32)
        return {"agentview": np.zeros((8, 8, 3), np.uint8), "wrist": np.zeros((8, 8, 3), np.uint8), "proprio": proprio}

    def _start_episodes(self, envs):
        self.started.append([(env, self.episodes[env].number) for env in envs])
        return {env: (self._observation(env), {}) for env in envs}

    def _play(self, chunks):
        lost, self.breaks = self.breaks, set()
        for env in lost:
            self._restarts[env] += 1
        rewards = {env: np.zeros(len(chunk), dtype=np.float32) for env, chunk in chunks.items()}
        return {env: Played(self._observation(env), rewards[env], False) for env in chunks if env not in lost}


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_lost_simulator_plays_its_episode_again(mode):
    env = Fragile(3, chunk_length=C, init_states="eval", autoreset_mode=mode, max_episode_steps=100)
    before, infos = env.reset()
    env.step(push(3))
    env.breaks = {1}
    _, rewards, terminations, truncations, infos = env.step(push(3))
    assert truncations.tolist() == [False, True, False] and not terminations.any() and not rewards.any()
    same_step = mode == AutoresetMode.SAME_STEP
    info = infos["final_info"] if same_step else infos
    assert info["worker_restarted"][1] and info["chunk_steps"][1] == 0 and info["episode_steps"][1] == 4
    assert infos["worker_restarted"].tolist() == [False, True, False] and env.worker_restarts == 1
    assert infos["worker_restarts"].tolist() == [0, 1, 0] and infos["chunk_steps"].tolist()[::2] == [4, 4]
    if same_step:
        np.testing.assert_array_equal(infos["final_obs"][1]["proprio"], before["proprio"][1])
    elif mode == AutoresetMode.DISABLED:
        env.reset(options={"reset_mask": truncations})
    else:
        _, _, _, truncations, infos = env.step(push(3))
        assert not truncations.any() and infos["chunk_steps"].tolist() == [4, 0, 4]
    assert env.started == [[(0, 2), (1, 1), (2, 0)], [(1, 1)]]
    assert [episode.steps for episode in env.episodes] == (
        [12, 0, 12] if mode == AutoresetMode.NEXT_STEP else [8, 0, 8]
    )
    env.step(push(3))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"num_envs": 0}, r"num_envs must be an integer in 1\.\.1024, got 0"),
        ({"chunk_length": 0}, "chunk_length must be an integer in 1"),
        ({"obs_stride": 4}, r"obs_stride must be an integer in 1\.\.3, got 4"),
        ({"max_episode_steps": 0}, "max_episode_steps"),
        ({"train_episode_steps": 11}, r"train_episode_steps must be an integer in 1\.\.10, got 11"),
        ({"train_episode_steps": [4, 5, 6]}, "train_episode_steps must be an integer, or 2, one for each task; got"),
        ({"init_states": "test"}, "init_states must be one of"),
        ({"seed": -1}, "seed must be an integer"),
        ({"group_size": 0}, "group_size"),
        ({"render_mode": "human"}, "render_mode must be None or 'rgb_array'"),
        ({"autoreset_mode": "sometimes"}, "autoreset_mode must be one of NEXT_STEP"),
    ],
)
def test_bad_arguments(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (1j, "complex128; nothing was executed"),
        (np.nan, r"NaN or inf for environments \[0, 1\]; nothing was executed"),
        (np.inf, r"NaN or inf for environments \[0, 1\]; nothing was executed"),
        ("x", "<U1; nothing was executed"),
        (True, "bool; nothing was executed"),
        (None, "object; nothing was executed"),
    ],
)
def test_actions_that_are_no_real_numbers_are_refused(bad, named):
    env = make()
    env.reset()
    chunk = np.zeros(env.action_space.shape)
    with pytest.raises(ValueError, match=f"^actions must be finite real numbers, got {named}$"):
        env.step(np.full(chunk.shape, bad))
    for dtype in (np.float16, np.float64, np.int64, np.uint8):
        env.step(chunk.astype(dtype))


@pytest.mark.parametrize("num_envs", [1, 2])
def test_options_of_others_are_ignored_with_a_warning(num_envs):
    """Minari hands its own ones on to every environment."""
    env = make(num_envs, seed=3, autoreset_mode=AutoresetMode.DISABLED)
    env = SingleEnv(env) if num_envs == 1 else env
    with pytest.warns(UserWarning, match=r"\['minari_autoseed', 'split'\] are ignored; .* init_states, reset_mask, "):
        _, info = env.reset(options={"minari_autoseed": False, "init_states": "eval", "split": "train"})
    assert np.all(info["init_index"] == 0) and getattr(env, "vector_env", env).init_states == "eval"


def test_bad_resets():
    env = make()
    for options, message in (
        ({"reset_mask": np.array([True, False])}, "all environments in the first reset"),
        ({"shard": (2, 2)}, "shard must be"),
    ):
        with pytest.raises(ValueError, match=message):
            env.reset(options=options)
