"""
Compare what RLlib's runner records with the raw environment: every row of every episode is played again.

python rllib_rows.py EXAMPLE ENV MODE CHUNKS [JSON-OF-SETTINGS]
"""

import importlib.util
import json
import sys

import gymnasium as gym
import numpy as np
import ray
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner


def main(example, env, mode, chunks, settings="{}"):
    spec = importlib.util.spec_from_file_location("rllib_ppo", example)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ray.init(address="local", num_cpus=1, include_dashboard=False)
    config = module.config_of(env, mode, int(chunks))
    config.env_config.update(json.loads(settings))
    # states that have a number, in episodes of several chunks
    config.env_config["init_states"] = "eval"
    runner = SingleAgentEnvRunner(config=config)
    episodes = runner.sample(num_timesteps=int(chunks), random_actions=True)
    # the raw environment: Dict observations, no corrections
    plain = {key: value for key, value in config.env_config.items() if key not in ("id", "flat", "init_states")}
    raw = gym.make(env, init_states="eval", **plain)
    space = raw.observation_space
    rows = 0  # a VLA rounds differently in a batch of another size, hence the tolerances
    for episode in episodes:
        first = episode.get_infos(0)
        obs, info = raw.reset(options={"episodes": [(first["task_id"], first["init_index"])]})
        assert info["init_index"] == first["init_index"] and first["episode_steps"] == 0, first
        np.testing.assert_allclose(episode.get_observations(0), gym.spaces.flatten(space, obs), atol=1e-4)
        for t in range(len(episode)):
            low, high = raw.action_space.low, raw.action_space.high
            chunk = obs["vla_ref"] + np.float32(0.25) * episode.get_actions(t).reshape(low.shape)
            obs, reward, terminated, truncated, info = raw.step(np.clip(chunk, low, high))
            np.testing.assert_allclose(episode.get_observations(t + 1), gym.spaces.flatten(space, obs), atol=1e-4)
            assert episode.get_rewards(t) == reward and episode.get_infos(t + 1)["chunk_steps"] == info["chunk_steps"]
            last = t == len(episode) - 1
            assert not (terminated or truncated) or last, "RLlib went on after the end of an episode"
            rows += 1
        assert (episode.is_terminated, episode.is_truncated) == (terminated, truncated), (terminated, truncated)
    raw.close()
    runner.stop()
    ended = sum(episode.is_done for episode in episodes)
    print(f"{rows} rows of {len(episodes)} episodes equal, {ended} ended")


if __name__ == "__main__":
    main(*sys.argv[1:])
