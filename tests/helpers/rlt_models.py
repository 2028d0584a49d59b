"""Small RLT models on the fake environment, and an independent float64 NumPy reference of their networks."""

import numpy as np
import torch as th
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecMonitor

from rlt_gym.testing import FakeRLTokenVectorEnv
from rlt_sb3 import RLT, GymnasiumVecEnv

# Other numbers than the defaults where these would hide a part of the learner from the oracles (no noise, a pull that
# changes, time-outs as failures, updates that are owed) or round them (bfloat16); test_recipe.py has the defaults
PLAIN = dict(bc_coef=20.0, target_policy_noise=0.1, action_scale=1.0, gate=False, train_freq=1)
SMALL = PLAIN | dict(policy_kwargs=dict(net_arch=[32, 32]), batch_size=32, device="cpu", seed=0)


def make_venv(num_envs: int = 2, monitor: bool = True, **kwargs):
    venv = GymnasiumVecEnv(FakeRLTokenVectorEnv(num_envs, **kwargs))
    return VecMonitor(venv, info_keywords=("is_success",)) if monitor else venv


def make_model(num_envs: int = 2, venv=None, **kwargs) -> RLT:
    settings = SMALL | kwargs
    # a small network unless a test asks for another one
    small = {"net_arch": [32, 32], "critic_precision": "float32", "offset_search": False}
    settings["policy_kwargs"] = small | settings["policy_kwargs"]
    settings["replay_buffer_kwargs"] = {"timeout_is_failure": False} | settings.get("replay_buffer_kwargs", {})
    return RLT("MultiInputPolicy", make_venv(num_envs) if venv is None else venv, **settings)


def fast(**kwargs) -> dict:
    return dict(learning_starts=16, critic_warmup_updates=4) | kwargs


def random_obs(model: RLT, batch: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    obs = {key: rng.normal(size=(batch, *space.shape)) for key, space in model.observation_space.spaces.items()}
    obs["vla_ref"] = np.clip(1.5 * obs["vla_ref"], -1.0, 1.0)  # many values on the border
    return {key: value.astype(np.float32) for key, value in obs.items()}


class Rows(BaseCallback):
    """Keeps what was executed and what the actor saw."""

    def _on_training_start(self) -> None:
        self.obs, self.actions, self.infos = [], [], []

    def _on_step(self) -> bool:
        self.obs.append({key: value.copy() for key, value in self.model._last_obs.items()})
        self.actions.append(self.locals["actions"].copy())
        self.infos += self.locals["infos"]
        return True


def layer_norm(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


class Numpy:
    """The same networks written again, in float64, one critic and one layer at a time."""

    def __init__(self, model: RLT):
        self.p = {k: v.detach().double().numpy().copy() for k, v in model.policy.state_dict().items()}
        self.n = model.critic.n_critics
        self.layer_norm = model.policy.layer_norm

    def features(self, net: str, obs: dict) -> np.ndarray:
        z = layer_norm(obs["z_rl"])
        p = obs["proprio"]
        out = [z]
        out.append((p[:, :3] - [0.0, 0.0, 0.7]) / [0.15, 0.15, 0.25])
        out.append((p[:, 6:] - [0.02, -0.02]) / 0.02)
        columns = []
        for v in p[:, 3:6]:
            angle = np.linalg.norm(v)
            x, y, z_ = v / angle
            skew = np.array([[0, -z_, y], [z_, 0, -x], [-y, x, 0]])
            rotation = np.eye(3) + np.sin(angle) * skew + (1 - np.cos(angle)) * skew @ skew
            columns.append(np.concatenate([rotation[:, 0], rotation[:, 1]]))
        return np.concatenate([*out, np.array(columns)], axis=1)

    def actor_raw(self, net: str, obs: dict, keep=None) -> np.ndarray:
        reference = obs["vla_ref"].reshape(len(obs["vla_ref"]), -1)
        seen = reference if keep is None else reference * keep
        h = np.concatenate([self.features(net, obs), seen], axis=1)
        for layer in (0, 2):
            h = np.maximum(h @ self.p[f"{net}.mu.{layer}.weight"].T + self.p[f"{net}.mu.{layer}.bias"], 0)
        return reference + h @ self.p[f"{net}.mu.4.weight"].T + self.p[f"{net}.mu.4.bias"]

    def actor(self, net: str, obs: dict, keep=None) -> np.ndarray:
        return np.clip(self.actor_raw(net, obs, keep), -1, 1)

    def q(self, net: str, obs: dict, actions: np.ndarray) -> np.ndarray:
        x = np.concatenate([self.features(net, obs), actions], axis=1)
        out = []
        for i in range(self.n):
            h = x
            for layer in range(2):
                h = h @ self.p[f"{net}.ensemble.weights.{layer}"][i] + self.p[f"{net}.ensemble.biases.{layer}"][i]
                h = np.maximum(layer_norm(h) if self.layer_norm else h, 0)
            out.append((h @ self.p[f"{net}.ensemble.weights.2"][i] + self.p[f"{net}.ensemble.biases.2"][i])[:, 0])
        return np.array(out)


def oracle_model(policy_kwargs=None, **kwargs):
    """A model with random weights everywhere, and a batch whose rows were written by hand."""
    model = make_model(
        n_steps=2, gamma=0.9, learning_rate=1e-2, bc_coef=3.0, buffer_size=64,
        policy_kwargs={"n_critics": 3} | (policy_kwargs or {}), **kwargs,
    )  # fmt: skip
    th.manual_seed(1)
    with th.no_grad():
        for parameter in model.policy.parameters():
            parameter.add_(0.1 * th.randn_like(parameter))
    rng = np.random.default_rng(2)
    new = random_obs(model, 2, 0)
    for t in range(12):
        obs, new = new, random_obs(model, 2, t + 1)
        done = rng.random(2) < 0.4
        infos = []
        for env in range(2):
            k = int(rng.integers(1, 5)) if done[env] else 4
            rewards = np.where(np.arange(4) < k, rng.random(4) * 0.5, 0.0).astype(np.float32)
            infos.append({"step_rewards": rewards, "chunk_steps": k, "TimeLimit.truncated": bool(done[env] and t % 2)})
        chunks = rng.uniform(-1, 1, size=(2, 4, 7)).astype(np.float32)
        model.replay_buffer.add(obs, new, chunks, np.array([i["step_rewards"].sum() for i in infos]), done, infos)
    np.random.seed(3)
    batch = model.replay_buffer.sample(16)
    return model, batch


def to_numpy(batch):
    def convert(obs):
        return {key: value.double().numpy() for key, value in obs.items()}

    return convert(batch.observations), convert(batch.next_observations), batch.actions.double().numpy()


def numeric_gradient(function, array: np.ndarray, indices, step: float = 1e-6) -> np.ndarray:
    gradient = []
    for index in indices:
        old = array[index]
        array[index] = old + step
        high = function()
        array[index] = old - step
        low = function()
        array[index] = old
        gradient.append((high - low) / (2 * step))
    return np.array(gradient)


def compare_gradients(model: RLT, oracle: Numpy, network: str, names, count: int, loss) -> list[tuple]:
    """
    Compare gradients after an update with numeric ones, at random places of some parameters.

    :return: for each parameter, at these places: the values before the update, the gradient, the values after it
    """
    parameters, rng, found = dict(getattr(model, network).named_parameters()), np.random.default_rng(0), []
    for name in names:
        array = oracle.p[f"{network}.{name}"]
        indices = [tuple(rng.integers(0, size) for size in array.shape) for _ in range(count)]
        gradient = numeric_gradient(loss, array, indices)
        got = np.array([parameters[name].grad[index].item() for index in indices])
        np.testing.assert_allclose(got, gradient, atol=1e-5)
        after = np.array([parameters[name][index].item() for index in indices])
        found.append((np.array([array[index] for index in indices]), gradient, after))
    return found


SCALE = [1.0, 1.0, 1.0, 0.2, 0.3, 0.4, 2.0]
