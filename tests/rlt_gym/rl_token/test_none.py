"""rl_token="none": z_rl is one zero, whatever the VLA gives, and a VLA without tokens is refused everything else."""

import numpy as np
import pytest
import torch
from vla_helpers import observations, tiny_vla, write_demos

from rlt_gym.rl_token.encode_demos import EncodeDemosConfig, encode_demos
from rlt_gym.rl_token.env import RLTokenVectorEnv
from rlt_gym.rl_token.io import load_rl_token
from rlt_gym.rl_token.none import NoToken
from rlt_gym.rl_token.pretrain import PretrainTokenConfig, pretrain_token
from rlt_gym.testing import FakeLiberoVectorEnv, FakeVLA, check_vector_env
from rlt_gym.vla import VLAOutput, VLASpec


class Tokenless(FakeVLA):
    """Only the chunk, as behind openpi's server."""

    def __init__(self):
        super().__init__()
        self.spec = VLASpec("tokenless", 1, 8, image_size=16, state_dim=8, kinds=())

    def forward(self, obs, tasks, *, seed=None):
        chunk = super().forward(obs, tasks, seed=seed).chunk
        rows = len(tasks)
        kind = torch.zeros(rows, 0, dtype=torch.uint8)
        return VLAOutput(torch.zeros(rows, 0, 1), kind.bool(), kind, chunk)


@pytest.mark.parametrize("make", [Tokenless, FakeVLA, tiny_vla])
def test_it_is_one_zero_for_every_vla(make):
    vla, obs = make(), observations(3)
    encoder = load_rl_token("none", vla)
    z_rl = encoder(vla.forward(obs, ["a", "b", "c"]))
    assert z_rl.shape == (3, encoder.z_dim) == (3, 1) and z_rl.dtype == torch.float32 and not z_rl.any()
    assert encoder.fingerprint() == load_rl_token("none", FakeVLA()).fingerprint()
    assert load_rl_token(encoder, vla, "meta")(vla.forward(obs, ["a", "b", "c"])).device.type == "meta"


def test_the_environment_keeps_its_form():
    env = RLTokenVectorEnv(FakeLiberoVectorEnv(2, chunk_length=4), Tokenless(), "none")
    check_vector_env(env)
    obs, _ = env.reset()
    assert {key: value.shape for key, value in obs.items()} == {"z_rl": (2, 1), "vla_ref": (2, 4, 7), "proprio": (2, 8)}
    assert not obs["z_rl"].any() and obs["vla_ref"].any()
    raw, _ = FakeLiberoVectorEnv(2, chunk_length=4).reset()
    chunk = FakeVLA().forward({**raw, "state": raw["proprio"]}, ["", ""], seed=[0, 0]).chunk[:, :4]
    np.testing.assert_allclose(obs["vla_ref"], chunk)
    assert isinstance(env.encoder, NoToken)
    env.close()


@pytest.mark.parametrize("rl_token", ["auto", "mean", "some.safetensors"])
def test_a_vla_without_tokens_is_refused_every_other_encoder(rl_token):
    with pytest.raises(ValueError, match=r"'tokenless' gives no tokens, so .*: use rl_token='none'") as caught:
        load_rl_token(rl_token, Tokenless())
    assert "\n" not in str(caught.value)


def test_demonstrations(tmp_path):
    """Encoded with a zero; there is nothing to train on."""
    write_demos(tmp_path / "demos.hdf5", "lift the bowl")
    config = EncodeDemosConfig(
        [str(tmp_path / "demos.hdf5")], str(tmp_path / "rows.safetensors"), chunk_length=4, progress=False
    )
    from safetensors.numpy import load_file

    rows = load_file(encode_demos(config, Tokenless(), NoToken()))
    assert rows["obs/z_rl"].shape == (len(rows["actions"]), 1) and not rows["obs/z_rl"].any()
    with pytest.raises(ValueError, match="'tokenless' gives no tokens"):
        pretrain_token(
            PretrainTokenConfig([str(tmp_path / "demos.hdf5")], output=str(tmp_path / "z.safetensors")), Tokenless()
        )
