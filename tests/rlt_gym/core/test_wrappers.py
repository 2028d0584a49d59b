"""Reward terms, against a count written independently."""

from itertools import pairwise

import numpy as np
import pytest

from rlt_gym.core.wrappers import GripperPenalty, RewardScale
from rlt_gym.testing import FakeLiberoVectorEnv, check_vector_env


def closes_at(step, chunks=5, length=4, num_envs=2):
    """Gripper commands: open, closed from a control step on."""
    actions = np.zeros((chunks, num_envs, length, 7), dtype=np.float32)
    actions[..., 6] = np.where(np.arange(chunks * length).reshape(chunks, 1, length) < step, -1, 1)
    return actions


def play(env, chunks):
    """Rewards (chunks, N) and per-step rewards and terms (chunks, N, C) of the chunks just played."""
    rewards, steps, terms = [], [], []
    for actions in chunks:
        _, reward, terminated, truncated, infos = env.step(actions)
        final = (terminated | truncated)[:, None]

        def of_chunk(*keys, infos=infos, final=final):
            here, there = infos, infos.get("final_info", infos)
            for key in keys:
                here, there = here[key], there[key]
            return np.where(final, there, here)

        rewards.append(reward)
        steps.append(of_chunk("step_rewards"))
        terms.append({name: of_chunk("reward_terms", name) for name in ("success", "gripper")})
    return np.array(rewards), np.array(steps), {name: np.array([t[name] for t in terms]) for name in terms[0]}


def penalized_steps(commands, threshold):
    """The oracle: control steps of one episode at which a decisive command differs from the last decisive one."""
    decisive = [(step, np.sign(value)) for step, value in enumerate(commands) if abs(value) > threshold]
    return [step for (_, old), (step, new) in pairwise(decisive) if old != new]


@pytest.mark.parametrize(
    "signal, expected",
    # the fingers are at -1 + 7 / 4 after the seventh closing command, control step 12
    [("command", [(1, 0, 2), (1, 1, 2)]), ("fingers", [(3, 0, 0), (3, 1, 0)])],
)
def test_fires_once_per_transition_and_terms_add_up(signal, expected):
    env = GripperPenalty(FakeLiberoVectorEnv(2, chunk_length=4), penalty=0.25, signal=signal)
    _, infos = env.reset()
    assert not infos["reward_terms"]["gripper"].any()
    rewards, steps, terms = play(env, closes_at(6))
    # env 1 plays state 0 and succeeds at control step 13; env 0 runs into the horizon of 20
    fired = [tuple(map(int, place)) for place in np.argwhere(terms["gripper"])]
    assert fired == expected and set(terms["gripper"].ravel().tolist()) == {0.0, -0.25}
    np.testing.assert_array_equal(np.argwhere(terms["success"]), [[3, 1, 0]])
    np.testing.assert_allclose(terms["success"] + terms["gripper"], steps)
    np.testing.assert_allclose(steps.sum(-1), rewards)


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.9])
def test_random_commands_and_thresholds(threshold):
    """The first command of an episode is free, also right after another episode; small ones change nothing."""
    env = GripperPenalty(FakeLiberoVectorEnv(1, chunk_length=3, max_episode_steps=10, success_step=99), 1.0, "command",
                         threshold)  # fmt: skip
    env.reset()
    commands = np.random.default_rng(int(threshold * 10)).uniform(-1, 1, (3, 10))
    commands[:, -1], commands[:, 0] = 1.0, -1.0  # ends closed, begins open: no transition between episodes
    for episode in commands:
        chunks = np.zeros((4, 1, 3, 7), dtype=np.float32)
        chunks.reshape(12, 7)[:10, 6] = episode
        chunks.reshape(12, 7)[10:, 6] = -1.0  # beyond the horizon: not executed
        _, steps, _ = play(env, chunks)
        assert np.flatnonzero(steps.ravel()).tolist() == penalized_steps(episode.astype(np.float32), threshold)


@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.9])
def test_the_first_closing_of_an_episode_counts(threshold):
    """LIBERO's episodes begin with an open gripper, also where the one before ended with a closed one."""
    env = GripperPenalty(FakeLiberoVectorEnv(1, chunk_length=10, max_episode_steps=10), 1.0, threshold=threshold)
    env.reset()
    for _ in range(2):
        rewards, _, _ = play(env, closes_at(0, chunks=1, length=10, num_envs=1))
        assert rewards[0, 0] == -1.0


@pytest.mark.parametrize("signal", ["fingers", "command"])
@pytest.mark.parametrize("options", [None, {}, {"reset_mask": None}, {"reset_mask": np.ones(2, bool)}])
def test_a_reset_of_all_forgets_the_grippers_of_all(signal, options):
    """However it is said: an open gripper costs nothing in a new episode, after a closed one."""
    env = GripperPenalty(FakeLiberoVectorEnv(2, chunk_length=10, max_episode_steps=99), 1.0, signal)
    env.reset()
    play(env, closes_at(0, chunks=1, length=10))
    env.reset(options=options)
    _, _, terms = play(env, closes_at(99, chunks=1, length=10))
    assert not terms["gripper"].any()


def test_a_reset_of_one_keeps_the_gripper_of_the_other():
    env = GripperPenalty(FakeLiberoVectorEnv(2, chunk_length=10, max_episode_steps=99), 1.0, "command")
    env.reset()
    play(env, closes_at(0, chunks=1, length=10))
    env.reset(options={"reset_mask": np.array([True, False])})
    _, _, terms = play(env, closes_at(99, chunks=1, length=10))
    assert terms["gripper"][0].any(-1).tolist() == [False, True]


def test_fingers_need_time():
    """A command that is taken back at once moves the fingers by a quarter of half their way: no transition."""
    commands = [-1, 1, -1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, 1, 1, 1]
    fingers, level = [], -1.0
    for command in commands:
        level = min(1.0, max(-1.0, level + 0.25 * command))
        fingers.append(level)
    env = GripperPenalty(FakeLiberoVectorEnv(1, chunk_length=4, max_episode_steps=99), 1.0)
    env.reset()
    chunks = np.zeros((4, 1, 4, 7), dtype=np.float32)
    chunks.reshape(16, 7)[:, 6] = commands
    assert chunks[0, 0, 1, 6] == 1
    env.env.success_step = 99
    _, steps, _ = play(env, chunks)
    closed_first = next(step for step, value in enumerate(fingers) if value > 0.5)
    assert np.flatnonzero(steps.ravel()).tolist() == [closed_first] == [9]


def test_what_was_executed_counts():
    """The policy keeps the gripper open; someone closes it for control step 2."""

    def someone(simulator, proposed, step):
        return np.array([0, 0, 0, 0, 0, 0, 1.0]) if step == 2 else None

    env = GripperPenalty(FakeLiberoVectorEnv(1, chunk_length=4, intervention=someone), 0.5, signal="command")
    env.reset()
    rewards, steps, _ = play(env, closes_at(99, chunks=1, num_envs=1))
    np.testing.assert_array_equal(steps[0, 0], [0, 0, -0.5, -0.5])
    assert rewards[0, 0] == -1.0


def test_is_a_vector_env_and_refuses():
    check_vector_env(GripperPenalty(FakeLiberoVectorEnv(2)))
    for arguments, message in (
        ({"penalty": -1.0}, "penalty must be >= 0"),
        ({"signal": "force"}, "signal must be one of"),
        ({"threshold": 1.0}, "threshold must be in"),
        ({"index": 7}, "index must be the place of the gripper among 7 numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            GripperPenalty(FakeLiberoVectorEnv(1), **arguments)


@pytest.mark.sim
def test_fires_when_the_fingers_of_the_simulator_have_moved():
    """Two short commands move nothing; a closing and an opening of libero_goal's gripper cost once each."""
    pytest.importorskip("libero")
    from rlt_gym.libero.vector_env import LiberoVectorEnv

    commands = [-1, 1, -1, -1, 1, 1, -1, -1, *12 * [1], *12 * [-1]]
    raw = LiberoVectorEnv(1, "libero_goal", [1], chunk_length=1, image_size=32, render="fast", assets="embedded")
    env = GripperPenalty(raw, 1.0)
    env.reset(seed=0)
    rewards, openings = [], []
    for command in commands:
        obs, reward, *_ = env.step(np.array([[[0, 0, 0, 0, 0, 0, command]]], dtype=np.float32))
        rewards.append(reward[0])
        openings.append(obs["proprio"][0, 6] - obs["proprio"][0, 7])
    env.close()
    crossings = np.flatnonzero(np.diff(np.array(openings) > 0.04)) + 1
    penalized = np.flatnonzero(rewards)
    assert len(crossings) == 2 and (np.abs(penalized - crossings) <= 4).all(), (penalized, crossings)


def test_reward_coef_multiplies_every_reward():
    env, plain = RewardScale(FakeLiberoVectorEnv(2, seed=0), 5.0), FakeLiberoVectorEnv(2, seed=0)
    assert env.metadata["reward_coef"] == 5.0 and "reward_coef" not in plain.metadata
    check_vector_env(env)
    rng, paid, ended = np.random.default_rng(0), 0.0, 0
    for one in (env, plain):
        one.reset(seed=3)
    for _ in range(60):
        actions = rng.uniform(-1, 1, env.action_space.shape).astype(np.float32)
        (_, rewards, *_, infos), (_, expected, *_, other) = env.step(actions), plain.step(actions)
        np.testing.assert_allclose(rewards, 5.0 * expected)
        np.testing.assert_allclose(infos["step_rewards"], 5.0 * other["step_rewards"])
        assert ("final_info" in infos) == ("final_info" in other)
        if "final_info" in infos:
            np.testing.assert_allclose(infos["final_info"]["step_rewards"], 5.0 * other["final_info"]["step_rewards"])
            ended += 1
        paid += rewards.sum()
    assert ended and paid > 0
    for wrong in (0, -1.0, "5", float("inf")):
        with pytest.raises(ValueError, match="reward_coef must be a number above 0"):
            RewardScale(plain, wrong)
