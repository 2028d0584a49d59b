"""Frames from inside the chunks of a real scene."""

import itertools

import numpy as np
import pytest

from rlt_gym.libero.vector_env import LiberoVectorEnv

STEPS = 8


@pytest.mark.sim
def test_frames_inside_a_chunk_are_those_of_single_steps():
    """Equal, bit for bit, to what ``render`` gives between chunks of one control step; states do not notice."""
    actions = np.random.default_rng(0).uniform(-0.6, 0.6, (1, STEPS, 7)).astype(np.float32)
    played = {}
    for length, filmed in ((1, ()), (4, (0,)), (4, ())):
        env = LiberoVectorEnv(
            1,
            "libero_goal",
            [1],
            chunk_length=length,
            render="fast",
            assets="embedded",
            render_mode="rgb_array",
            seed=3,
        )
        try:
            env.film(filmed)
            obs, _ = env.reset()
            frames = [env.render()[0]]
            for start in range(0, STEPS, length):
                obs, *_, infos = env.step(actions[:, start : start + length])
                frames += infos.get("inner_frames", [[]])[0]
                frames.append(env.render()[0])
            played[length, bool(filmed)] = frames, obs
        finally:
            env.close()
    frames, _ = played[1, False]
    assert len(frames) == STEPS + 1 and all((a != b).any() for a, b in itertools.pairwise(frames))
    np.testing.assert_array_equal(played[4, True][0], frames)
    assert len(played[4, False][0]) == STEPS // 4 + 1
    for _, obs in played.values():
        for key, value in obs.items():
            np.testing.assert_array_equal(value, played[1, False][1][key])
