"""A made-up world that knows every control step, to compare stored rows with."""

import numpy as np
import torch as th
from gymnasium import spaces

from rlt_sb3 import ChunkReplayBuffer

C, D, GAMMA = 4, 2, 0.9


OBS = spaces.Dict(
    {
        "z_rl": spaces.Box(-np.inf, np.inf, (3,), np.float32),
        "proprio": spaces.Box(-np.inf, np.inf, (3,), np.float32),
        "vla_ref": spaces.Box(-1.0, 1.0, (C, D), np.float32),
    }
)


ACT = spaces.Box(-1.0, 1.0, (C, D), np.float32)


def make(size: int = 1000, n_envs: int = 1, n_steps: int = 1, **kwargs) -> ChunkReplayBuffer:
    told_apart = {"timeout_is_failure": False}  # the oracle knows both ends of an episode
    return ChunkReplayBuffer(
        size, OBS, ACT, device="cpu", n_envs=n_envs, n_steps=n_steps, gamma=GAMMA, **(told_apart | kwargs)
    )


def number(*key: int) -> float:
    """Some number in (-1, 1) that belongs to a control step."""
    return float(np.sin(1.0 + 12.9898 * key[0] + 78.233 * key[1] + 37.719 * key[2]))


def observation(env: int, episode: int, step: int) -> dict[str, np.ndarray]:
    key = np.array([env, episode, step], dtype=np.float32)
    return {"z_rl": key + 0.5, "proprio": key, "vla_ref": np.full((C, D), number(env, episode, step) / 2, np.float32)}


def stack(rows: list[dict]) -> dict[str, np.ndarray]:
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}


class World:
    """Episodes of random length (whole and broken chunks), half of which end in success; knows what was fed."""

    def __init__(self, n_envs: int = 1, seed: int = 0, stride: int | None = None, longest: int = 15):
        self.n_envs, self.stride, self.longest = n_envs, stride, longest
        self.rng = np.random.default_rng(seed)
        self.at = [(-1, 0)] * n_envs
        self.length: dict[tuple[int, int], int] = {}  # planned
        self.known: dict[tuple[int, int], int] = {}  # executed so far
        self.finished: set[tuple[int, int]] = set()
        for env in range(n_envs):
            self.new_episode(env)

    def new_episode(self, env: int) -> None:
        episode = self.at[env][0] + 1
        self.at[env] = (episode, 0)
        self.length[env, episode] = int(self.rng.integers(1, self.longest + 1))
        self.known[env, episode] = 0

    def reset(self) -> None:
        for env in range(self.n_envs):
            self.new_episode(env)

    def succeeds(self, env: int, episode: int) -> bool:
        return number(env, episode, -1) > 0

    def action(self, env: int, episode: int, step: int) -> np.ndarray:
        return np.full(D, number(env, episode, step))

    def reward(self, env: int, episode: int, step: int) -> float:
        return number(episode, env, step + 100)

    def feed(self, buffer: ChunkReplayBuffer, count: int, broken: float = 0.0) -> None:
        for _ in range(count):
            obs, following, actions, dones, infos = [], [], [], [], []
            for env in range(self.n_envs):
                episode, step = self.at[env]
                obs.append(observation(env, episode, step))
                steps = min(C, self.length[env, episode] - step)
                chunk = np.stack([self.action(env, episode, step + j) for j in range(C)]).astype(np.float32)
                actions.append(chunk)
                if self.rng.random() < broken:
                    following.append(observation(env, episode, step))
                    dones.append(True)
                    infos.append(self.info(env, episode, step, 0) | {"worker_restarted": True})
                    self.new_episode(env)
                    continue
                self.at[env] = (episode, step + steps)
                self.known[env, episode] = step + steps
                done = step + steps == self.length[env, episode]
                following.append(observation(env, episode, step + steps))
                dones.append(done)
                infos.append(self.info(env, episode, step, steps))
                if done:
                    infos[-1]["TimeLimit.truncated"] = not self.succeeds(env, episode)
                    infos[-1]["is_success"] = self.succeeds(env, episode)
                    self.finished.add((env, episode))
                    self.new_episode(env)
            rewards = np.array([info["step_rewards"].sum() for info in infos])
            buffer.add(stack(obs), stack(following), np.stack(actions), rewards, np.array(dones), infos)

    def info(self, env: int, episode: int, step: int, steps: int) -> dict:
        rewards = np.array([self.reward(env, episode, step + j) if j < steps else 0.0 for j in range(C)], np.float32)
        info = {"step_rewards": rewards, "chunk_steps": steps, "task_id": 10 * env, "TimeLimit.truncated": False}
        if self.stride:
            at = range(self.stride, C, self.stride)
            inner = [observation(env, episode, step + j if j < steps else -7) for j in at]
            info |= {"inner_obs": stack(inner), "inner_count": sum(j < steps for j in at)}
        return info

    def starts(self) -> list[tuple[int, int, int]]:
        """Where rows begin."""
        out = []
        for (env, episode), known in self.known.items():
            for step in range(known):
                on_grid = step % C == 0 or (self.stride is not None and step % C % self.stride == 0)
                if on_grid and ((env, episode) in self.finished or step + C <= known):
                    out.append((env, episode, step))
        return out

    def expected(self, env: int, episode: int, step: int, n_steps: int) -> dict:
        """One control step at a time."""
        known, finished = self.known[env, episode], (env, episode) in self.finished
        end = min(step + n_steps * C, known)
        if not finished:
            end = step + (end - step) // C * C
        total, discount = 0.0, 1.0
        for t in range(step, end):
            total += discount * self.reward(env, episode, t)
            discount *= GAMMA
        done = finished and end == known and self.succeeds(env, episode)
        steps = min(C, end - step)
        actions = [self.action(env, episode, step + j) for j in range(steps)]
        return dict(reward=total, discount=discount, done=float(done), end=end, actions=actions, steps=steps)

    def check(self, batch, n_steps: int) -> set[tuple[int, int, int]]:
        """Compare every row of a batch with the oracle; returns which rows were in it."""
        size = len(batch.rewards)
        assert batch.rewards.shape == batch.discounts.shape == batch.dones.shape == (size, 1)
        assert batch.actions.shape == batch.bc_target.shape == (size, C * D) and batch.mask.shape == (size, C)
        keys = [tuple(int(x) for x in row) for row in batch.observations["proprio"]]
        wanted = [self.expected(*key, n_steps) for key in keys]
        got = th.cat([batch.rewards, batch.discounts, batch.dones], dim=1)
        columns = [[want["reward"], want["discount"], want["done"]] for want in wanted]
        np.testing.assert_allclose(got, columns, atol=1e-5, rtol=1e-5)
        before = stack([observation(*key) for key in keys])
        after = stack([observation(*key[:2], want["end"]) for key, want in zip(keys, wanted, strict=True)])
        for name in OBS.spaces:
            np.testing.assert_array_equal(batch.observations[name], before[name], err_msg=name)
            np.testing.assert_array_equal(batch.next_observations[name], after[name], err_msg=name)
        valid = np.arange(C) < np.array([want["steps"] for want in wanted])[:, None]
        np.testing.assert_array_equal(batch.mask, valid)
        stored = batch.actions.numpy().reshape(size, C, D)
        np.testing.assert_allclose(stored[valid], np.concatenate([want["actions"] for want in wanted]), rtol=1e-6)
        for key, want, action in zip(keys, wanted, stored, strict=True):
            if key[2] % C:  # a row between two chunks repeats its last action
                assert (action[want["steps"] :] == action[want["steps"] - 1]).all()
        assert batch.task_ids.tolist() == [10 * key[0] for key in keys]
        known = [(env, episode) in self.finished and self.succeeds(env, episode) for env, episode, _ in keys]
        assert batch.successful.flatten().tolist() == [float(success) for success in known]
        return set(keys)


def everything(buffer: ChunkReplayBuffer):
    """Every row once."""
    return buffer._gather(np.flatnonzero(buffer.storage.is_row(np.arange(buffer.storage.size))))
