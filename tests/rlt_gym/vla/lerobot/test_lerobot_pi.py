"""PI0 and PI05, which LeRobot runs from 0.6 on (Python 3.12)."""

import numpy as np
import pytest

pytest.importorskip("lerobot.policies.pi_gemma", reason="needs LeRobot 0.6, on Python 3.12")

import torch
from lerobot_pi import make_pi, tiny_pi
from safetensors.torch import load_file, save_file
from vla_helpers import write_demos

from rlt_gym.rl_token.moving import moving_tokens
from rlt_gym.testing import check_vla
from rlt_gym.vla.registry import load_vla


@pytest.fixture(scope="module", params=["pi0", "pi05"])
def checkpoint(request, tmp_path_factory):
    return request.param, make_pi(tmp_path_factory.mktemp("policies") / request.param, request.param)


def test_the_contract_is_kept(checkpoint):
    kind, folder = checkpoint
    with tiny_pi(kind):
        vla = load_vla(f"lerobot:{folder}")
    output = check_vla(vla)
    assert output.tokens.shape == (4, 8 + vla._config.tokenizer_max_length, 32) == (4, vla.spec.max_tokens, 32)
    assert vla.spec.kinds == ("image", "text") and vla.spec.stochastic and vla.spec.language


def test_the_chunk_is_lerobots_and_the_tokens_are_the_language_models(checkpoint):
    kind, folder = checkpoint
    obs = {
        key: np.random.default_rng(1).integers(0, 256, (2, 64, 64, 3), dtype=np.uint8) for key in ("agentview", "wrist")
    }
    obs["state"] = np.linspace(-0.5, 0.5, 16, dtype=np.float32).reshape(2, 8)
    tasks, seeds = ["open the drawer", "put the bowl on the plate"], [3, 4]
    with tiny_pi(kind):
        vla = load_vla(f"lerobot:{folder}")
    seen = []
    norm = vla.policy.model.paligemma_with_expert.paligemma.model.language_model.norm
    handle = norm.register_forward_hook(lambda *call: seen.append(call[2][0]))
    output = vla.forward(obs, tasks, seed=seeds)
    handle.remove()
    assert torch.equal(output.tokens, seen[0]), "after the last norm"
    pictures = {
        f"observation.images.{name}": torch.tensor(np.rot90(obs[key], 2, (1, 2)).copy()).permute(0, 3, 1, 2) / 255
        for key, name in (("agentview", "image"), ("wrist", "image2"))
    }
    batch = vla._pre({**pictures, "observation.state": torch.tensor(obs["state"]), "task": tasks})
    noise = torch.stack([torch.randn(8, 7, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
    with torch.no_grad():
        chunk = vla._post(vla.policy.predict_action_chunk(batch, noise=noise)).clamp(-1, 1)
    torch.testing.assert_close(output.chunk, chunk, rtol=0, atol=1e-6)
    for _ in range(2):  # the cache stays as it is
        torch.testing.assert_close(output.chunk_of(noise, vla.spec), chunk, rtol=0, atol=1e-6)
    assert (output.chunk_of(-noise, vla.spec) - chunk).abs().max() > 1e-3
    words = batch["observation.language.attention_mask"]
    assert torch.equal(output.mask, torch.cat([torch.ones(2, 8, dtype=torch.bool), words.bool()], dim=1))


def test_weights_that_are_missing_are_never_random(checkpoint, tmp_path):
    kind, folder = checkpoint
    state = load_file(folder / "model.safetensors")
    with tiny_pi(kind):
        for name, value in load_vla(f"lerobot:{folder}").policy.state_dict().items():
            assert torch.equal(value, state[name]), name
        copy = tmp_path / "copy"
        copy.mkdir()
        for file in folder.iterdir():
            (copy / file.name).symlink_to(file)
        (copy / "model.safetensors").unlink()
        gone = "model.action_out_proj.weight"
        save_file({key: value for key, value in state.items() if key != gone}, copy / "model.safetensors")
        with pytest.raises(ValueError, match=f"cannot be read as a {kind} policy: .* missing: {gone}"):
            load_vla(f"lerobot:{copy}")
        # as openpi's weights are ported: without the first part of their names
        save_file({key.removeprefix("model."): value for key, value in state.items()}, copy / "model.safetensors")
        for name, value in load_vla(f"lerobot:{copy}").policy.state_dict().items():
            assert torch.equal(value, state[name]), name
        if kind == "pi05":  # LeRobot leaves this one out with a warning, if the model has no place for it
            more = {"paligemma_with_expert.gemma_expert.model.norm.weight": torch.zeros(32)}
            save_file({**state, **more}, copy / "model.safetensors")
            with pytest.raises(ValueError, match=r"surplus: paligemma_with_expert\.gemma_expert\.model\.norm\.weight"):
                load_vla(f"lerobot:{copy}")


def test_it_learns_beside_the_rl_token(checkpoint, tmp_path):
    """Its own loss of a flow falls, and what is written is what has learned; torch's random numbers are left alone."""
    kind, folder = checkpoint
    demos, rows = write_demos(tmp_path / "a.hdf5", "push the button", demos=2, length=6, size=64), np.arange(8)
    with tiny_pi(kind):
        vla = load_vla(f"lerobot:{folder}")
        before, losses = vla.fingerprint(), []
        tokens = moving_tokens(vla, [str(demos)], None, 1, ("all",), 1.0, 1e-2)
        state = torch.get_rng_state()
        for _ in range(15):
            seen, _, loss = tokens.learn(rows, 5, 1.0)  # the same noise and times
            losses.append(loss)
            tokens.step(1.0, 1.0)
        assert torch.equal(torch.get_rng_state(), state)
        moved = tokens.learner.save(tmp_path / "moved", {})
    assert losses[-1] < 0.8 * losses[0] and not seen.requires_grad
    assert vla.fingerprint() == before != moved.fingerprint()
    mine, theirs = tokens.learner.net.state_dict(), moved.policy.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
