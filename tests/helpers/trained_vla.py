"""Small RLT models whose VLA learns (``train_vla``), on the fake environment."""

import torch as th
from rlt_models import SMALL
from vla_helpers import tiny_vla

from rlt_gym.rl_token.encoder import RLTokenConfig, RLTokenEncoder
from rlt_gym.rl_token.env import RLTokenVectorEnv
from rlt_gym.testing import FakeLiberoVectorEnv
from rlt_gym.vla.mini.model import MiniVLA
from rlt_sb3 import RLT, GymnasiumVecEnv

N = 2
GATE = {"share": 0.5, "window": 4}


def make_env(show_pictures=True, vla=None, image_size=32, **form):
    """``form``: of the encoder."""
    with th.random.fork_rng(devices=[]):
        vla = vla or MiniVLA(tiny_vla().net, {"frame_size": 32})
        spec = vla.spec
        encoder = RLTokenEncoder(
            RLTokenConfig(spec.token_dim, max_tokens=spec.max_tokens, z_dim=12, width=12, layers=1, heads=2, **form)
        )
    encoder.set_statistics(th.full((spec.token_dim,), 0.1), th.full((spec.token_dim,), 2.0))
    raw = FakeLiberoVectorEnv(N, chunk_length=3, max_episode_steps=16, success_step=14, image_size=image_size)
    return GymnasiumVecEnv(RLTokenVectorEnv(raw, vla, encoder, show_pictures=show_pictures))


def make_model(venv=None, train_vla=None, train_token=None, **kwargs) -> RLT:
    networks = {"net_arch": [16, 16], "critic_precision": "float32", "offset_search": False}
    networks |= {"train_vla": train_vla, "train_token": train_token}
    settings = SMALL | {"learning_starts": 8, "critic_warmup_updates": 6, "policy_kwargs": networks} | kwargs
    return RLT("MultiInputPolicy", venv or make_env(), **settings)


def weights_of(model, network="critic"):
    return [value.detach().clone() for value in getattr(model.policy, network).features_extractor.weights]


def same(first, second) -> bool:
    return len(first) == len(second) and all(th.equal(one, other) for one, other in zip(first, second, strict=True))
