"""A chunked environment without a simulator, whose every outcome is known beforehand."""

import os
import subprocess
import sys

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from rlt_gym.testing import FakeRLTokenVectorEnv

CHUNK = (2, 3)


class ToyVectorEnv(gym.vector.VectorEnv):
    """
    Episode number p lasts 2 + p % 3 chunks of 2 control steps; it succeeds if the last chunk begins with a plus.

    ``vla_ref`` is +0.5 in episodes with even p and -0.5 in the others, so the frozen policy solves every second one;
    the sign can be read off ``z_rl``. Pictures show how many chunks the episode has had.
    """

    fingerprint = None

    def __init__(
        self, num_envs=1, n_states=1000, render_mode=None, init_states="train", seed=0, suite=None, task_ids=None
    ):
        if suite == "unknown":
            raise ValueError(f"Unknown suite {suite!r}; choose one of ['toy'].")
        self.num_envs, self.n_states, self.render_mode = num_envs, n_states, render_mode
        self.task_ids = task_ids or [7]
        self.metadata = {"render_modes": ["rgb_array"], "autoreset_mode": AutoresetMode.SAME_STEP}
        if self.fingerprint is not None:
            self.metadata["fingerprint"] = self.fingerprint
        box = gym.spaces.Box(-1, 1, CHUNK, np.float32)
        self.single_observation_space = gym.spaces.Dict(
            z_rl=gym.spaces.Box(-np.inf, np.inf, (4,), np.float32),
            vla_ref=box,
            proprio=gym.spaces.Box(-np.inf, np.inf, (3,), np.float32),
        )
        self.single_action_space = box
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(box, num_envs)
        self.splits = []
        self.seeds = []
        self.split = init_states
        self.split_of_steps = []
        self.closed_workers = False

    def _obs(self):
        signs = np.where(self.pair % 2 == 0, 1.0, -1.0).astype(np.float32)
        return {
            "z_rl": np.stack([signs, np.zeros_like(signs), np.ones_like(signs), -signs], axis=1),
            "vla_ref": np.broadcast_to(0.5 * signs[:, None, None], (self.num_envs, *CHUNK)).copy(),
            "proprio": np.stack([self.t, self.t, self.t], axis=1).astype(np.float32),
        }

    def _infos(self, envs, chunk_steps):
        infos = {}
        for i in envs:
            entry = {
                "task_id": self.task_ids[self.pair[i] % len(self.task_ids)],
                "init_index": int(self.pair[i] % self.n_states),
                "episode_steps": int(2 * self.t[i]),
                "is_success": bool(self.success[i]),
                "chunk_steps": chunk_steps,
                "step_rewards": np.array([0.0, self.success[i]], dtype=np.float32),
                "instruction": "show the sign",
            }
            infos = self._add_info(infos, entry, i)
        return infos

    def reset(self, *, seed=None, options=None):
        self.split = (options or {}).get("init_states", self.split)
        self.splits.append((options or {}).get("init_states"))
        self.seeds.append(seed)
        self.shard = (options or {}).get("shard", (0, 1))
        self.pair = (self.num_envs - 1 - np.arange(self.num_envs)) * self.shard[1] + self.shard[0]
        self.t = np.zeros(self.num_envs, dtype=int)
        self.success = np.zeros(self.num_envs, dtype=bool)
        return self._obs(), self._infos(range(self.num_envs), 0)

    def step(self, actions):
        assert actions.shape == (self.num_envs, *CHUNK)
        self.split_of_steps.append(self.split)
        self.t += 1
        done = self.t >= 2 + self.pair % 3
        self.success = done & (actions[:, 0, 0] > 0)
        term, trunc = self.success.copy(), done & ~self.success
        finals = {"final_obs": np.full(self.num_envs, None, dtype=object), "_final_obs": done, "_final_info": done}
        infos = self._infos(range(self.num_envs), 2)
        if done.any():
            finals["final_info"] = self._infos(np.flatnonzero(done), 2)
            obs = self._obs()
            for i in np.flatnonzero(done):
                finals["final_obs"][i] = {key: value[i] for key, value in obs.items()}
            self.pair = np.where(done, self.pair + self.num_envs * self.shard[1], self.pair)
            self.t[done] = 0
            infos |= finals
        return self._obs(), term.astype(float), term, trunc, infos

    def render(self):
        return tuple(np.full((16, 16, 3), 40 * self.t[i], dtype=np.uint8) for i in range(self.num_envs))

    def close_extras(self, **kwargs):
        self.closed_workers = True


class BreakingVectorEnv(FakeRLTokenVectorEnv):
    """
    Has a process of its own, as simulators do. Breaks in the training step that the environment variable
    ``TOY_BREAKS_AT`` names: a setting would be part of the run, and the resumed run would break again.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.breaks_at = int(os.environ.get("TOY_BREAKS_AT", -1))
        self.training_steps = 0
        program = [sys.executable, "-c", "import time; time.sleep(600)"]
        self.worker = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def step(self, actions):
        self.training_steps += self.init_states == "train"
        if self.training_steps == self.breaks_at:
            raise RuntimeError("the simulator has exploded")
        return super().step(actions)

    def close_extras(self, **kwargs):
        self.worker.kill()
        self.worker.wait()


gym.register("ToyRLToken-v0", vector_entry_point=ToyVectorEnv)
# Its training states depend on the seed, its policies can learn.
gym.register("FakeRLToken-v0", vector_entry_point="rlt_gym.testing:FakeRLTokenVectorEnv")
# As LIBERO-v0: no VLA.
gym.register("FakeLIBERO-v0", vector_entry_point="rlt_gym.testing:FakeLiberoVectorEnv")
gym.register("BreakingRLToken-v0", vector_entry_point=BreakingVectorEnv)
