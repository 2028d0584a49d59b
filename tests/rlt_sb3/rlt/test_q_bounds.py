"""Rewards that do not fit ``q_bounds`` are not learned in silence."""

import warnings

import numpy as np
import pytest
from rlt_models import fast, make_model, make_venv

from rlt_gym.core.wrappers import RewardScale
from rlt_gym.testing import FakeRLTokenVectorEnv
from rlt_sb3 import GymnasiumVecEnv
from rlt_sb3.common.chunk_outcome import ChunkOutcome
from rlt_sb3.common.value_bias import ValueBias


def paying(function):
    """An environment whose step rewards are changed by ``function``."""
    venv = make_venv(2)
    env = venv.unwrapped.env.unwrapped
    step = env._control_step

    def changed(index, action):
        reward, *rest = step(index, action)
        return (function(reward), *rest)

    env._control_step = changed
    return venv


@pytest.mark.parametrize(
    ("function", "bounds", "what"),
    [
        (lambda r: 5.0 * r, (0.0, 1.0), r"discounted return 4\.|discounted return 5"),
        (lambda r: r - 1.0, (0.0, 1.0), r"discounted return -"),
        (lambda r: r - 1.0, (-30.0, -10.0), r"discounted return -[0-9.]+, but .* q_bounds=\(-30.0, -10.0\)"),
    ],
)
def test_returns_outside_are_told_once(function, bounds, what):
    model = make_model(venv=paying(function), **fast(q_bounds=bounds))
    with pytest.warns(UserWarning, match=what) as told:
        model.learn(200)
    assert sum("q_bounds" in str(warning.message) for warning in told) == 1


@pytest.mark.parametrize(
    ("function", "bounds"),
    [(lambda r: r, (0.0, 1.0)), (lambda r: 5.0 * r, (0.0, 5.0)), (lambda r: r - 1.0, (-100.0, 0.0)), (np.sign, None)],
)
def test_returns_inside_are_not(function, bounds):
    model = make_model(venv=paying(function), **fast(q_bounds=bounds))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*q_bounds")
        model.learn(200)
    assert model._value_bias.range[0] < np.inf


def test_the_last_chunk_has_a_return_of_its_own():
    """A late reward of 3 is worth 0.375 at the start and 1.5 in the last chunk: critics learn both."""
    tracker = ValueBias(1, gamma=0.5)
    for rewards, done in (([0.0, 0.0], False), ([0.0, 3.0], True)):
        tracker.step([ChunkOutcome(2, np.array(rewards), np.zeros((2, 1)))], np.array([done]), None)
    assert tracker.range == (0.5**3 * 3, 0.5 * 3)


def test_a_reward_that_the_bounds_would_clip_is_refused():
    venv = GymnasiumVecEnv(RewardScale(FakeRLTokenVectorEnv(2), 5.0))
    message = (
        r"q_bounds=\(0.0, 1.0\) would clip what a success pays, reward_coef=5: set q_bounds to \(0, 5\), and bc_coef"
    )
    with pytest.raises(ValueError, match=message):
        make_model(venv=venv)
    model = make_model(venv=venv, q_bounds=(0.0, 5.0), **fast()).learn(60)
    paid = model.replay_buffer.storage.step_rewards
    assert np.isin(paid, (0.0, 5.0)).all() and paid.max() == 5.0
