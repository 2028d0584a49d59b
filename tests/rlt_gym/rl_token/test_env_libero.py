"""RLToken-LIBERO-v0 with the shipped weights on real scenes."""

import os
import signal
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from rlt_gym.testing import check_vector_env

KWARGS = {"task_ids": [1], "assets": "embedded", "image_size": 128}


def test_ids_are_known_without_importing_us():
    """The line that the project promises, in a fresh interpreter; it must end by itself, workers too."""
    code = (
        "import gymnasium as g; e = g.make('RLToken-LIBERO-v0', assets='embedded'); "
        "print(*sorted(e.reset(seed=0)[0].keys())); e.close()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd="/")
    assert done.stdout.split() == ["proprio", "vla_ref", "z_rl"], done.stderr[-2000:]


def test_single_env_passes_gymnasiums_checker():
    env = gym.make("RLToken-LIBERO-v0", **KWARGS)
    check_env(env.unwrapped, skip_render_check=True)
    env.close()


def test_contract_is_kept_and_close_leaves_no_process():
    env = gym.make_vec("RLToken-LIBERO-v0", num_envs=2, max_episode_steps=24, **KWARGS)
    pids = env.unwrapped.worker_pids
    check_vector_env(env, n_steps=8)
    env.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def test_the_frozen_policy_plays_the_same_twice():
    """The reference chunks move the scene, and a seed repeats them and the RL tokens bit for bit."""
    env = gym.make_vec("RLToken-LIBERO-v0", num_envs=1, init_states="eval", **KWARGS)
    runs = []
    for _ in range(2):
        obs, _ = env.reset(seed=1)
        trace = [obs]
        for _ in range(4):
            obs, *_ = env.step(obs["vla_ref"])
            trace.append(obs)
        runs.append(trace)
    env.close()
    for first, second in zip(*runs, strict=True):
        assert all(np.array_equal(first[key], second[key]) for key in first)
    start, end = runs[0][0], runs[0][-1]
    assert np.linalg.norm(end["proprio"][0, :3] - start["proprio"][0, :3]) > 0.02
    assert not np.allclose(start["z_rl"], end["z_rl"])


def test_bad_arguments_raise_before_any_process_starts(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("a process was started"))
    for arguments, message in (
        ({"chunk_length": 9}, "horizon 8"),
        ({"suite": "libero_gaol"}, "libero_goal"),
        ({"vla": "/nowhere.safetensors"}, "/nowhere.safetensors"),
        ({"rl_token": "/nowhere.safetensors"}, "/nowhere.safetensors"),
        ({"assets": "/nowhere"}, "/nowhere"),
    ):
        with pytest.raises(ValueError, match=message):
            gym.make_vec("RLToken-LIBERO-v0", num_envs=1, **{**KWARGS, **arguments})


def test_mini_vla_on_other_assets_warns(monkeypatch, tmp_path):
    """It has never seen them; without a word its few successes would look like a bug."""
    import rlt_gym.libero.vector_env as module
    from rlt_gym.libero.assets import AssetsInfo
    from rlt_gym.libero.assets import resolve_assets as resolve

    monkeypatch.setattr(module, "resolve_assets", lambda assets: AssetsInfo(resolve("embedded").path, "official"))
    with pytest.warns(UserWarning, match="assets='embedded'"):
        gym.make_vec("RLToken-LIBERO-v0", num_envs=1, **KWARGS).close()
