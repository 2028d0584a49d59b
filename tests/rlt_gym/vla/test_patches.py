"""Patches of pictures as tokens: which pixel is where, and an RL token trained on them for a policy without tokens."""

import numpy as np
import pytest
import torch
from vla_helpers import write_demos

pytest.importorskip("websockets")
pytest.importorskip("msgpack")

from other_servers import Other, plain_openpi

from rlt_gym.rl_token.io import load_rl_token
from rlt_gym.rl_token.pretrain import PretrainTokenConfig, pretrain_token
from rlt_gym.vla import load_vla
from rlt_gym.vla.patches import patch_tokens
from rlt_gym.vla.remote.codec import pack


def test_which_pixel_is_where():
    rng = np.random.default_rng(0)
    small, large = (rng.integers(0, 256, (2, size, size, 3), dtype=np.uint8) for size in (64, 256))
    tokens = patch_tokens([small, large])
    assert tokens.shape == (2, 128, 192) and tokens.dtype == torch.float32 and tokens.abs().max() <= 1
    block = small[1, 8:16, 24:32].transpose(2, 0, 1).reshape(-1)  # second row of patches, fourth of eight
    np.testing.assert_allclose(tokens[1, 8 + 3], block / 127.5 - 1, atol=1e-6)
    mean = large[0, 252:, 252:].reshape(-1, 3).mean(axis=0)  # the last pixel of 64 by 64
    np.testing.assert_allclose(tokens[0, -1].view(3, 64)[:, -1], mean / 127.5 - 1, atol=1e-5)


def test_an_rl_token_of_the_pictures(tmp_path):
    """For a policy behind openpi's server."""
    demos = write_demos(tmp_path / "demos.hdf5", "lift the bowl", demos=3, length=4, size=256)
    with Other(pack({}), plain_openpi) as server:
        name = f"openpi://127.0.0.1:{server.port}"
        vla = load_vla(name, vla_kwargs={"tokens": "pictures"})
        assert vla.fingerprint() != load_vla(name).fingerprint()
        config = PretrainTokenConfig(
            [str(demos)], name, {"tokens": "pictures"}, str(tmp_path / "z.safetensors"), z_dim=16, width=16, layers=1,
            steps=3, frame_stride=2, progress=False,
        )  # fmt: skip
        trained = pretrain_token(config)
        rng = np.random.default_rng(0)
        obs = {camera: rng.integers(0, 256, (2, 256, 256, 3), dtype=np.uint8) for camera in ("agentview", "wrist")}
        output = vla.forward({**obs, "state": np.zeros((2, 8), np.float32)}, ["a", "a"]).check(vla.spec, 2)
        z_rl = load_rl_token(tmp_path / "z.safetensors", vla)(output)
        assert z_rl.shape == (2, 16) and not torch.allclose(z_rl[0], z_rl[1], atol=1e-5)
        assert torch.equal(z_rl, trained(output)) and load_rl_token("mean", vla)(output).shape == (2, 192)
        with pytest.raises(ValueError, match="gives no tokens"):
            load_rl_token(tmp_path / "z.safetensors", load_vla(name))
        with pytest.raises(ValueError, match="may be 'none' or 'pictures', got 'all'"):
            load_vla(name, vla_kwargs={"tokens": "all"})
