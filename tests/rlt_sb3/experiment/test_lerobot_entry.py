"""examples/lerobot/env.py: what lerobot-eval asks of an environment; with LeRobot itself where it is installed."""

import importlib.util
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from rlt_gym.libero.suites.tasks import get_task

PATH = Path(__file__).parents[3] / "examples" / "lerobot" / "env.py"
SETTINGS = {"suites": ["libero_goal"], "task_ids": [1, 8], "image_size": 64, "render": "fast", "assets": "embedded"}


def module():
    spec = importlib.util.spec_from_file_location("hub_env", PATH)  # as LeRobot does
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def close(envs):
    for tasks in envs.values():
        for env in tasks.values():
            env.close()


def test_bad_names_come_before_simulators():
    with pytest.raises(ValueError, match="Unknown LIBERO suite 'libero_golf'"):
        module().make_env(2, suites=["libero_golf"])
    with pytest.raises(ValueError, match="Unknown task 10"):
        module().make_env(2, suites=["libero_goal"], task_ids=[10])


def test_suites_of_the_configuration_and_horizons():
    class Config:
        task, task_ids, observation_height = "libero_spatial, libero_goal", [3], 48

    envs = module().make_env(2, False, Config())
    assert {suite: list(tasks) for suite, tasks in envs.items()} == {"libero_spatial": [3], "libero_goal": [3]}
    spatial = envs["libero_spatial"][3]
    assert spatial.call("_max_episode_steps") == (280, 280)
    assert spatial.call("task_description") == (get_task("libero_spatial", 3).instruction,) * 2
    assert spatial.single_observation_space["pixels"]["image"].shape == (48, 48, 3)
    close(envs)


@pytest.mark.sim
def test_a_rollout_is_that_of_libero():
    """Pictures, state, rewards and ends of LIBERO-v0 in single steps; an ended environment rests."""
    envs = module().make_env(2, **SETTINGS)
    env, other = envs["libero_goal"][8], envs["libero_goal"][1]
    raw = gym.make_vec(
        "LIBERO-v0", 2, suite="libero_goal", task_ids=[8], chunk_length=1, image_size=64, render="fast",
        assets="embedded", max_episode_steps=12, seed=0,
    )  # fmt: skip
    try:
        env.simulators.settings["max_episode_steps"] = 12
        rng = np.random.default_rng(0)
        for first in (0, 2):  # the second rollout goes on with the states after the first one's
            obs, info = env.reset(seed=[1, 2])
            expected, _ = raw.reset(options={"init_states": "eval", "episodes": [(8, first), (8, first + 1)]})
            assert info["is_success"].tolist() == [False, False]
            for step in range(13):
                assert env.observation_space.contains(obs)
                for key, camera in (("image", "agentview"), ("image2", "wrist")):
                    turned = np.rot90(expected[camera], 2, axes=(1, 2))
                    np.testing.assert_array_equal(obs["pixels"][key], turned)
                np.testing.assert_array_equal(obs["agent_pos"], expected["proprio"])
                np.testing.assert_array_equal(env.envs[1].render(), expected["agentview"][1][::-1])
                actions = rng.uniform(-1, 1, (2, 7)).astype(np.float32)
                obs, rewards, terminations, truncations, info = env.step(actions)
                expected, *_ = raw.step(actions[:, None])
                assert truncations.tolist() == [step == 11] * 2 and not terminations.any() and not rewards.any()
                assert ("final_info" in info) == (step == 11)
        with pytest.raises(RuntimeError, match="max_parallel_tasks=1"):
            other.step(actions)
        pids = env.simulators.env.unwrapped.worker_pids
        other.close()
        assert env.simulators._env is not None and len(pids) == 2
    finally:
        raw.close()
        close(envs)
    assert env.simulators._env is None


@pytest.mark.sim
def test_lerobots_own_evaluation(tmp_path):
    """lerobot_eval.eval_policy_all with a small ACT of random weights, films included."""
    pytest.importorskip("lerobot")
    import torch
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.envs.utils import _call_make_env, _normalize_hub_result, close_envs
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.act.modeling_act import ACTPolicy
    from lerobot.processor import PolicyProcessorPipeline
    from lerobot.scripts.lerobot_eval import eval_policy_all

    picture = PolicyFeature(FeatureType.VISUAL, (3, 64, 64))
    config = ACTConfig(
        input_features={
            "observation.images.image": picture, "observation.images.image2": picture,
            "observation.state": PolicyFeature(FeatureType.STATE, (8,)),
        },
        output_features={"action": PolicyFeature(FeatureType.ACTION, (7,))},
        device="cpu", pretrained_backbone_weights=None, chunk_size=4, n_action_steps=4, dim_model=32, n_heads=2,
        dim_feedforward=32, n_encoder_layers=1, n_decoder_layers=1, use_vae=False, push_to_hub=False,
    )  # fmt: skip
    torch.manual_seed(0)
    policy, nothing = ACTPolicy(config).eval(), PolicyProcessorPipeline(steps=[])

    class Config:
        task, task_ids, observation_height, episode_length = "libero_goal", [1, 8], 64, 6

    envs = _normalize_hub_result(_call_make_env(module(), n_envs=2, use_async_envs=False, cfg=Config()))
    for env in envs["libero_goal"].values():
        env.simulators.settings |= {"render": "fast", "assets": "embedded"}
    identity = PolicyProcessorPipeline(steps=[], to_transition=lambda x: x, to_output=lambda x: x)
    info = eval_policy_all(
        envs=envs, policy=policy, env_preprocessor=nothing, env_postprocessor=identity, preprocessor=nothing,
        postprocessor=identity, n_episodes=2, max_episodes_rendered=1, videos_dir=tmp_path, start_seed=0,
    )  # fmt: skip
    close_envs(envs)
    assert info["overall"]["n_episodes"] == 4 and info["overall"]["pc_success"] == 0.0
    assert {entry["task_id"] for entry in info["per_task"]} == {1, 8}
    assert len(list(tmp_path.rglob("*.mp4"))) == 2
