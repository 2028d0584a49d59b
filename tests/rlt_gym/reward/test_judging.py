"""With a judge, an episode of practice goes by its verdict; what measures the policy goes by the simulator's."""

import os
import signal

import numpy as np
import pytest

from rlt_gym.libero.make import make_rl_token_libero_vec
from rlt_gym.testing import FakeRLTokenVectorEnv

#: Training states of libero_goal 1: the shipped VLA puts the bowl on the stove in some of them.
STATES = [(1, state) for state in range(6)]
KEYS = ("chunk_steps", "episode_steps", "goal_reached", "is_success", "step_rewards")


@pytest.fixture(scope="module")
def env():
    made = make_rl_token_libero_vec(
        2, "libero_goal", [1], assets="embedded", chunk_length=8, train_episode_steps=120, seed=0
    )
    yield made
    made.close()


def play(env, judge, split="train"):
    """Play the states; the judge gets the number of control steps. Return final infos, rewards, and what was asked."""
    asked = []

    def judged(seen):
        asked.extend((index, row.episode_steps, row.instruction) for index, row in seen.items())
        assert all(row.observation["agentview"].shape == (128, 128, 3) for row in seen.values())
        return {index: judge(row.episode_steps) for index, row in seen.items()}

    env.unwrapped.judge_success(judged)
    obs, infos = env.reset(seed=0, options={"init_states": split, "episodes": STATES})
    assert not infos["goal_reached"].any()
    finals, reached, rewards = [], [], []
    while len(finals) < len(STATES):
        obs, reward, terminations, truncations, infos = env.step(obs["vla_ref"])
        for index in range(2):
            ended = terminations[index] or truncations[index]
            info = {key: (infos["final_info"] if ended else infos)[key][index] for key in KEYS}
            if info["chunk_steps"]:
                assert info["chunk_steps"] == 8 or env.unwrapped.until_success
                rewards.append(reward[index])
                reached.append(info["goal_reached"])
                assert info["step_rewards"].sum() == reward[index]
                assert info["step_rewards"][: info["chunk_steps"] - 1].sum() == 0
            if ended:
                assert terminations[index] == info["is_success"] and truncations[index] != terminations[index]
                finals.append(info)
    return finals, rewards, reached, asked


def test_the_judge_decides_in_practice(env):
    finals, rewards, _, asked = play(env, lambda steps: steps >= 24)
    assert [info["episode_steps"] for info in finals] == [24] * 6 and all(info["is_success"] for info in finals)
    assert sum(rewards) == 6 and not any(info["goal_reached"] for info in finals)  # nothing is solved so soon
    assert sorted({steps for _, steps, _ in asked}) == [8, 16, 24]
    assert {task for *_, task in asked} == {"put the bowl on the stove"}


def test_the_simulator_plays_on_after_success(env):
    finals, rewards, reached, _ = play(env, lambda steps: False)
    assert [info["episode_steps"] for info in finals] == [120] * 6 and not any(info["is_success"] for info in finals)
    assert not any(rewards) and any(reached)


def test_evaluations_go_by_the_simulator(env):
    finals, rewards, _, asked = play(env, lambda steps: True, "selection")
    assert not asked and 0 < sum(rewards) < 6
    for info in finals:
        assert info["goal_reached"] == info["is_success"] == (info["episode_steps"] < env.unwrapped.max_episode_steps)


def test_a_lost_worker_is_not_judged(env):
    asked = []
    env.unwrapped.judge_success(lambda seen: asked.append(list(seen)) or dict.fromkeys(seen, True))
    obs, _ = env.reset(seed=0, options={"init_states": "train"})
    os.kill(env.unwrapped.worker_pids[0], signal.SIGKILL)
    _, rewards, terminations, truncations, infos = env.step(obs["vla_ref"])
    assert asked == [[1]] and rewards.tolist() == [0.0, 1.0]
    assert terminations.tolist() == [False, True] and truncations.tolist() == [True, False]
    assert infos["final_info"]["worker_restarted"].tolist() == [True, False]


def test_environments_that_cannot_play_on_refuse():
    env = FakeRLTokenVectorEnv(1)
    with pytest.raises(ValueError, match=r"FakeRLTokenVectorEnv cannot have a reward model: its simulators end"):
        env.unwrapped.judge_success(lambda seen: {})
    assert np.isfinite(env.reset(seed=0)[0]["z_rl"]).all()
