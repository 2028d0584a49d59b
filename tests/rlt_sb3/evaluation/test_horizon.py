"""The horizon of training episodes, against numbers worked out by hand."""

import re

import gymnasium as gym
import pytest
from toy_env import ToyVectorEnv

from rlt_sb3 import evaluate, fit_horizon
from rlt_sb3.evaluation.horizon import fitting_horizon, fitting_horizons
from rlt_sb3.evaluation.results import Evaluation, StateResult


def vla(**steps: list[int]) -> Evaluation:
    """Successes after so many steps, by task; and two failures of each at 300."""
    rows = []
    for name, successes in steps.items():
        task = int(name[1:])
        rows += [StateResult(len(rows) + i, task, i, True, n, -(-n // 8)) for i, n in enumerate(successes)]
        rows += [StateResult(len(rows) + i, task, 90 + i, False, 300, 38) for i in range(2)]
    return Evaluation("frozen VLA", "selection", rows)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ({"t1": [60] * 9 + [70]}, 80),  # the 90 % quantile is 61; 76.25 in whole chunks
        ({"t1": [100] * 10}, 128),  # 125
        ({"t1": [256] * 6}, 300),  # 320, and evaluations end at 300
        ({"t1": [60] * 4}, 160),  # too few to make it shorter
        ({"t1": [200]}, 256),  # but enough to make it longer
        ({"t1": []}, 160),
    ],
)
def test_horizon(steps, expected):
    assert fitting_horizon(vla(**steps), present=160, longest=300, chunk_length=8) == expected


def test_whole_chunks_unless_it_is_the_longest():
    assert fitting_horizon(vla(t1=[100] * 5), 160, 300, 10) == 130
    assert fitting_horizon(vla(t1=[100] * 5), 160, 127, 8) == 127


def test_fit_horizon_changes_training_episodes_only():
    env = ToyVectorEnv(2, train_episode_steps=30)
    env.max_episode_steps = 80  # a toy episode has its own end, so the horizon is only looked up
    selection = vla(t7=[20] * 10)
    assert fit_horizon(env, selection) == 26 == env.train_episode_steps  # 25, in whole chunks of 2
    assert (env.init_states, env.splits) == ("train", ["train"])
    assert fit_horizon(env, vla(t7=[20] * 4)) == 26  # too few successes: as it is
    env.train_episode_steps = None  # as long as evaluations
    assert fit_horizon(env, vla(t7=[20] * 4)) == 80
    assert env.max_episode_steps == 80


def test_each_task_has_its_own():
    env = ToyVectorEnv(2, task_ids=[3, 1, 2], train_episode_steps=30)
    env.max_episode_steps = 300
    selection = vla(t1=[64] * 10, t2=[60] * 4, t3=[100] * 10)
    assert fit_horizon(env, selection) == [126, 80, 76] == env.train_episode_steps  # in the order of its tasks
    assert fitting_horizons(env, vla(t1=[200], t2=[])) == [126, 250, 76]  # too few: as it is, or longer


def test_fit_horizon_refuses_held_out_states_and_other_environments():
    env = ToyVectorEnv(2)
    with pytest.raises(ValueError, match="selection', got those of 'eval'"):
        fit_horizon(env, evaluate("vla", env, 4))
    assert env.splits == ["eval"]
    other = gym.make_vec("CartPole-v1", num_envs=1)
    message = "CartPoleVectorEnv has no max_episode_steps and train_episode_steps: give fit_horizon a vector env"
    with pytest.raises(ValueError, match=re.escape(message)):
        fit_horizon(other, vla(t1=[60] * 9))
    other.close()
