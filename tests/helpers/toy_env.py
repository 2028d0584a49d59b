"""A chunked environment without a simulator, whose every outcome is known beforehand."""

import os
import subprocess
import sys

import gymnasium as gym
import numpy as np

from rlt_gym.core.chunk_vector_env import Task
from rlt_gym.core.episodes import Episode, EpisodeSequence
from rlt_gym.core.flat import FlatVectorEnv
from rlt_gym.core.in_process import InProcessVectorEnv
from rlt_gym.core.robot_spec import ProprioPart, RobotSpec
from rlt_gym.core.single_env import SingleEnv, arguments_of_one
from rlt_gym.testing import FakeRLTokenVectorEnv

CHUNK = (2, 3)
ROBOT = RobotSpec("toy", (), (ProprioPart("chunks", 3),), ("sign", "a", "b"), control_frequency=20.0)


class FromTheStart(EpisodeSequence):
    """Every reset starts the sequence over, in training too; the state is the number of the episode."""

    n_states = 1000

    def episode(self, number):
        return Episode(number, number % self.num_tasks, number % self.n_states)

    def restart(self, split=None, seed=None, shard=None):
        super().restart(split, seed, shard)
        self._next = [0] * self.num_envs


class ToyVectorEnv(InProcessVectorEnv):
    """
    Episode number p lasts 2 + p % 3 chunks of 2 control steps; it succeeds if the last chunk begins with a plus.

    ``vla_ref`` is +0.5 in episodes with even p and -0.5 in the others, so the frozen policy solves every second one;
    the sign can be read off ``z_rl``. Pictures show how many chunks the episode has had.
    """

    fingerprint = None
    last_picture = False  # whether it shows the end of an episode; other people's environments need not
    init_state_counts = {}  # noqa: RUF012  (a test sets it)

    def __init__(
        self, num_envs=1, n_states=1000, render_mode=None, init_states="train", seed=0, suite=None, task_ids=None,
        train_episode_steps=None,
    ):  # fmt: skip
        if suite == "unknown":
            raise ValueError(f"Unknown suite {suite!r}; choose one of ['toy'].")
        space = gym.spaces.Dict(
            z_rl=gym.spaces.Box(-np.inf, np.inf, (4,), np.float32),
            vla_ref=gym.spaces.Box(-1, 1, CHUNK, np.float32),
            proprio=gym.spaces.Box(-np.inf, np.inf, (3,), np.float32),
        )
        super().__init__(
            num_envs, [Task(task_id, "show the sign") for task_id in task_ids or [7]], space, ROBOT, CHUNK[0],
            init_states=init_states, seed=seed, render_mode=render_mode, sequence=FromTheStart,
            train_episode_steps=train_episode_steps,
        )  # fmt: skip
        self.sequence.n_states = n_states
        if self.fingerprint is not None:
            self.metadata["fingerprint"] = self.fingerprint
        self.first = [0.0] * num_envs  # what the chunk began with
        self.splits = []
        self.seeds = []
        self.split_of_steps = []
        self.closed_workers = False

    def _horizon(self, env):
        return CHUNK[0] * (2 + self.episodes[env].number % 3)

    def _begin(self, env):
        pass

    def _control_step(self, env, action):
        if self._steps[env] % CHUNK[0] == 0:
            self.first[env] = action[0]
        success = self._steps[env] + 1 == self._horizon(env) and self.first[env] > 0
        return float(success), success

    def _observe(self, env):
        sign, t = 1.0 - 2.0 * (self.episodes[env].number % 2), self._steps[env] // CHUNK[0]
        return {
            "z_rl": np.array([sign, 0, 1, -sign], dtype=np.float32),
            "vla_ref": np.full(CHUNK, 0.5 * sign, dtype=np.float32),
            "proprio": np.full(3, t, dtype=np.float32),
        }

    def _frame(self, env):
        return np.full((16, 16, 3), 40 * (self._steps[env] // CHUNK[0]), dtype=np.uint8)

    def reset(self, *, seed=None, options=None):
        self.splits.append((options or {}).get("init_states"))
        self.seeds.append(seed)
        return super().reset(seed=seed, options=options)

    def step(self, actions):
        self.split_of_steps.append(self.init_states)
        result = super().step(actions)
        if not self.last_picture:
            for key in ("final_frame", "_final_frame"):
                result[-1].get("final_info", {}).pop(key, None)
        return result

    def close_extras(self, **kwargs):
        self.closed_workers = True


class BreakingVectorEnv(FakeRLTokenVectorEnv):
    """
    Has a separate process, as simulators do. Breaks in the training step that the environment variable
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


def make_fake_vec(num_envs=1, flat=False, **kwargs):
    env = FakeRLTokenVectorEnv(num_envs, **kwargs)
    return FlatVectorEnv(env) if flat else env


def make_fake(**kwargs):
    return SingleEnv(make_fake_vec(autoreset_mode="Disabled", **arguments_of_one(kwargs)))


gym.register("ToyRLToken-v0", vector_entry_point=ToyVectorEnv)
# Its training states depend on the seed, its policies can learn.
gym.register("FakeRLToken-v0", entry_point="toy_env:make_fake", vector_entry_point="toy_env:make_fake_vec")
# As LIBERO-v0: no VLA.
gym.register("FakeLIBERO-v0", vector_entry_point="rlt_gym.testing:FakeLiberoVectorEnv")
gym.register("BreakingRLToken-v0", vector_entry_point=BreakingVectorEnv)
