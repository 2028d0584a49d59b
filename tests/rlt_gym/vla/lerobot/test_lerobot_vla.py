"""LeRobot's policies as VLAs: what they give is what LeRobot's own code gives, row by row."""

import numpy as np
import pytest

lerobot = pytest.importorskip("lerobot", reason="needs the extra 'lerobot' (scripts/lerobot_env.sh)")

import lerobot_policies as tiny  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from rlt_gym.rl_token.env import RLTokenVectorEnv  # noqa: E402
from rlt_gym.testing import FakeLiberoVectorEnv, check_vector_env, check_vla  # noqa: E402
from rlt_gym.vla.base import TOKEN_KINDS  # noqa: E402
from rlt_gym.vla.registry import load_vla  # noqa: E402

TASKS = ["put the bowl on the plate", "open the drawer", "push the button and then go back"]
SEEDS = [5, 2**32 - 1, 0]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policies")
    return {name: getattr(tiny, f"make_{name}")(folder / name) for name in ("act", "diffusion", "smolvla", "other")}


def observations(rows=3, size=64, seed=0):
    rng = np.random.default_rng(seed)
    pictures = {
        camera: rng.integers(0, 256, (rows, size, size, 3), dtype=np.uint8) for camera in ("agentview", "wrist")
    }
    return {**pictures, "state": rng.normal(0, 0.3, (rows, 8)).astype(np.float32)}


def lerobots_own(folder):
    """Policy and processors as LeRobot loads them."""
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    config = PreTrainedConfig.from_pretrained(folder)
    policy = get_policy_class(config.type).from_pretrained(folder, strict=True)
    return policy, *make_pre_post_processors(config, str(folder))


def lerobots_observation(obs, tasks=TASKS):
    """As LeRobot's datasets of LIBERO have it: turned by 180 degrees, channels first, in [0, 1]."""
    pictures = {
        f"observation.images.{name}": torch.tensor(np.rot90(obs[camera], 2, (1, 2)).copy()).permute(0, 3, 1, 2) / 255
        for camera, name in (("agentview", "image"), ("wrist", "image2"))
    }
    return {**pictures, "observation.state": torch.tensor(obs["state"]), "task": list(tasks)}


@pytest.mark.parametrize("name", ["act", "diffusion", "smolvla"])
def test_the_contract_is_kept(folders, name):
    check_vla(load_vla(f"lerobot:{folders[name]}"))


def test_a_diffusion_policy_with_an_encoder_per_camera(tmp_path):
    folder = tiny.make_diffusion(tmp_path / "two", use_separate_rgb_encoder_per_camera=True, n_obs_steps=1)
    assert check_vla(load_vla(f"lerobot:{folder}")).tokens.shape == (4, 8, 512)


def test_act_gives_what_lerobot_gives(folders):
    obs, vla = observations(), load_vla(f"lerobot:{folders['act']}")
    policy, pre, post = lerobots_own(folders["act"])
    seen = []
    handle = policy.model.decoder.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    normalized = policy.predict_action_chunk(pre(lerobots_observation(obs)))
    handle.remove()
    assert (normalized.abs() > 1).any(), "what is normalized goes beyond 1 and must not be clipped"
    output = vla.forward(obs, TASKS)
    torch.testing.assert_close(output.chunk, post(normalized).clamp(-1, 1), rtol=0, atol=1e-5)
    torch.testing.assert_close(output.tokens, seen[0].transpose(0, 1), rtol=0, atol=1e-5)
    kinds = [TOKEN_KINDS[name] for name in ["pad", "state", *["image"] * 8]]
    assert output.kind.tolist() == [kinds] * 3 and output.mask.tolist() == [[False, *[True] * 9]] * 3
    spec = vla.spec
    assert (spec.name, spec.token_dim, spec.horizon, spec.max_tokens, spec.kinds) == (
        "lerobot-act", 32, 8, 10, ("image", "state"),
    )  # fmt: skip
    assert (spec.cameras, spec.image_size, spec.state_dim) == (("agentview", "wrist"), 64, 8)
    assert (spec.dtype, spec.orientation, spec.stochastic, spec.language) == ("float32", "turned", False, False)


def test_smolvla_gives_what_lerobot_gives(folders):
    obs, vla = observations(), load_vla(f"lerobot:{folders['smolvla']}")
    policy, pre, post = lerobots_own(folders["smolvla"])
    batch = pre(lerobots_observation(obs))
    noise = torch.stack([torch.randn(8, 7, generator=torch.Generator().manual_seed(seed)) for seed in SEEDS])
    seen = []
    last = policy.model.vlm_with_expert.get_vlm_model().text_model.norm
    handle = last.register_forward_hook(lambda *call: seen.append(call[2]))
    chunk = post(policy.predict_action_chunk(dict(batch), noise=noise)).clamp(-1, 1)
    handle.remove()
    words, valid = (batch[f"observation.language.{name}"] for name in ("tokens", "attention_mask"))
    pictures, state = torch.ones(3, 8, dtype=torch.bool), torch.ones(3, 1, dtype=torch.bool)
    mask = torch.cat([pictures, valid.bool(), state], dim=1)
    output = vla.forward(obs, TASKS, seed=SEEDS)
    torch.testing.assert_close(output.chunk, chunk, rtol=0, atol=1e-5)
    assert torch.equal(output.mask, mask)
    torch.testing.assert_close(output.tokens[mask], seen[0][mask], rtol=0, atol=1e-5)
    # 64 pixels, patches of 16, 2 x 2 of them in one token: 4 tokens per camera
    for row, count in enumerate(valid.sum(dim=1).tolist()):
        kinds = ["image"] * 8 + ["text"] * count + ["pad"] * (words.shape[1] - count) + ["state"]
        assert output.kind[row].tolist() == [TOKEN_KINDS[name] for name in kinds]
    assert vla.spec.stochastic and vla.spec.language and vla.spec.max_tokens == 8 + 48 + 1


def test_smolvla_makes_chunks_of_given_noise_without_seeing_again(folders):
    obs, vla = observations(), load_vla(f"lerobot:{folders['smolvla']}")
    policy, pre, post = lerobots_own(folders["smolvla"])
    batch, noise = pre(lerobots_observation(obs)), torch.randn(3, 8, 7, generator=torch.Generator().manual_seed(0))
    wanted = post(policy.predict_action_chunk(dict(batch), noise=noise)).clamp(-1, 1)
    output, seen = vla.forward(obs, TASKS, seed=SEEDS), []
    model = vla.policy.model.vlm_with_expert.get_vlm_model()
    handles = [
        part.register_forward_hook(lambda *call: seen.append(1)) for part in (model.vision_model, model.connector)
    ]
    with torch.random.fork_rng():
        for _ in range(2):  # the cache stays as it is
            torch.testing.assert_close(output.chunk_of(noise, vla.spec), wanted, rtol=0, atol=1e-5)
    for handle in handles:
        handle.remove()
    assert not seen and vla.spec.noise == (8, 7)
    torch.testing.assert_close(vla.forward(obs, TASKS, seed=SEEDS).chunk, output.chunk, rtol=0, atol=0)
    for name in ("act", "diffusion"):  # one draws nothing, the other one also on the way
        assert load_vla(f"lerobot:{folders[name]}").spec.noise is None


def test_diffusion_gives_what_lerobot_gives(folders):
    obs, vla = observations(), load_vla(f"lerobot:{folders['diffusion']}")
    policy, pre, post = lerobots_own(folders["diffusion"])
    batch, maps = pre(lerobots_observation(obs)), []
    pictures = torch.stack([batch[f"observation.images.{name}"] for name in ("image", "image2")], dim=1)
    twice = {
        "observation.images": torch.stack([pictures, pictures], dim=1),
        "observation.state": torch.stack([batch["observation.state"]] * 2, dim=1),
    }
    handle = policy.diffusion.rgb_encoder.backbone.register_forward_hook(lambda *call: maps.append(call[2]))
    with torch.no_grad():
        condition = policy.diffusion._prepare_global_conditioning(twice)
        chunks = [  # all noise of a row comes from its generator: the first and that of each step
            policy.diffusion.conditional_sample(
                1, global_cond=condition[row : row + 1], generator=torch.Generator().manual_seed(seed)
            )
            for row, seed in enumerate(SEEDS)
        ]
    handle.remove()
    output = vla.forward(obs, TASKS, seed=SEEDS)
    expected = post(torch.cat(chunks)[:, 1:9]).clamp(-1, 1)
    torch.testing.assert_close(output.chunk, expected, rtol=0, atol=1e-5)
    tokens = maps[0].unflatten(0, (3, 2, 2))[:, 1]  # rows, observations, cameras, 512, 2, 2
    torch.testing.assert_close(output.tokens[2, 5], tokens[2, 1, :, 0, 1], rtol=0, atol=1e-5)
    assert output.tokens.shape == (3, 8, 512) and vla.spec.kinds == ("image",)


@pytest.mark.parametrize("name", ["diffusion", "smolvla", "other"])
def test_noise_leaves_torchs_generator_alone(folders, name):
    vla = load_vla(f"lerobot:{folders[name]}", vla_kwargs={"hook": "eyes"} if name == "other" else {})
    obs, before = observations(1), torch.get_rng_state()
    first = vla.forward(obs, TASKS[:1], seed=[1])
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(7)
    again, other = (vla.forward(obs, TASKS[:1], seed=[seed]) for seed in (1, 2))
    assert torch.equal(first.chunk, again.chunk) and not torch.equal(first.chunk, other.chunk)


def test_larger_pictures_are_pooled_and_rounded_as_a_dataset_is(folders):
    vla, obs = load_vla(f"lerobot:{folders['act']}"), observations(size=128)
    small = {}
    for camera in ("agentview", "wrist"):
        blocks = obs[camera].reshape(3, 64, 2, 64, 2, 3).astype(np.float64).mean((2, 4))
        small[camera] = np.round(blocks).astype(np.uint8)
        np.testing.assert_array_equal(vla.frames(obs)[camera] * 255, small[camera][:, ::-1, ::-1])
    assert torch.equal(vla.forward(obs, TASKS).chunk, vla.forward({**small, "state": obs["state"]}, TASKS).chunk)
    with pytest.raises(ValueError, match=r"agentview is uint8 \(3, 32, 32, 3\); lerobot-act reads .* S >= 64"):
        vla.forward(observations(size=32), TASKS)
    with pytest.raises(ValueError, match="image_size is 32; the VLA 'lerobot-act' needs frames of at least 64"):
        vla.spec.check_frame_size(32)
    assert vla.spec.check_frame_size(128) == 128
    with pytest.raises(ValueError, match=r"state has the shape \(3, 7\); lerobot-act reads \(3, 8\)"):
        vla.forward({**obs, "state": obs["state"][:, :7]}, TASKS)


def test_orientation_gripper_and_cameras_are_the_callers_to_change(folders):
    obs, name = observations(), f"lerobot:{folders['act']}"
    turned = {key: np.ascontiguousarray(obs[key][:, ::-1, ::-1]) for key in ("agentview", "wrist")}
    first = load_vla(name).forward(obs, TASKS)
    same = load_vla(name, vla_kwargs={"orientation": "same", "gripper": "open-signed"})
    other = same.forward({**turned, "state": obs["state"]}, TASKS)
    assert torch.equal(first.tokens, other.tokens)
    assert torch.equal(first.chunk[..., :6], other.chunk[..., :6]) and torch.equal(
        first.chunk[..., 6], -other.chunk[..., 6]
    )
    swap = {"agentview": "observation.images.image2", "wrist": "observation.images.image"}
    swapped = load_vla(name, vla_kwargs={"cameras": swap})
    again = swapped.forward({**obs, "agentview": obs["wrist"], "wrist": obs["agentview"]}, TASKS)
    assert torch.equal(first.chunk, again.chunk)
    prints = {vla.fingerprint() for vla in (load_vla(name), same, swapped)}
    assert len(prints) == 3, "each gives something else for the same observation"


def test_precision(folders):
    obs = observations()
    full = load_vla(f"lerobot:{folders['act']}", vla_kwargs={"dtype": "float32"}).forward(obs, TASKS)
    vla = load_vla(f"lerobot:{folders['act']}", vla_kwargs={"dtype": "bfloat16"})
    half = check_vla(vla, obs, TASKS, tolerance=0.05)
    assert half.tokens.dtype is torch.bfloat16 and vla.spec.dtype == "bfloat16"
    assert 1e-6 < (half.chunk - full.chunk).abs().max() < 0.05
    with pytest.raises(ValueError, match="dtype may be float32, bfloat16, float16, got 'int8'"):
        load_vla(f"lerobot:{folders['act']}", vla_kwargs={"dtype": "int8"})


def test_a_smolvla_that_was_in_half_precision_stays_so(folders, tmp_path):
    import json
    import shutil

    shutil.copytree(folders["smolvla"], tmp_path / "half")
    config = json.loads((tmp_path / "half" / "config.json").read_text())
    (tmp_path / "half" / "config.json").write_text(json.dumps({**config, "load_vlm_weights": True}))
    vla = load_vla(f"lerobot:{tmp_path / 'half'}")
    stored = load_file(folders["smolvla"] / "model.safetensors")
    types = {name: value.dtype for name, value in vla.policy.state_dict().items()}
    language = {name for name in types if name.startswith("model.vlm_with_expert.vlm.")}
    assert {types[name] for name in language} == {torch.bfloat16}
    assert {types[name] for name in set(types) - language} == {torch.float32}
    for name, value in vla.policy.state_dict().items():
        assert torch.equal(value, stored[name].to(value.dtype)), name
    check_vla(vla, tolerance=0.05)


def test_any_other_policy_gives_its_tokens_through_a_hook(folders):
    name = f"lerobot:{folders['other']}"
    with pytest.raises(ValueError, match=r"Where the tokens of a other policy are is not known .*hook: model\.encoder"):
        load_vla(name)
    vla = load_vla(name, vla_kwargs={"hook": "eyes"})
    assert vla.spec.stochastic and vla.spec.max_batch == 1, "it draws from one generator for all rows"
    output = check_vla(vla)
    assert output.tokens.shape == (4, 2 * 16, 16) and vla.spec.kinds == ("image",)
    policy, pre, _ = lerobots_own(folders["other"])
    obs = observations(1)
    batch = pre(lerobots_observation(obs, TASKS[:1]))
    place = policy.eyes(batch["observation.images.image2"])[0, :, 2, 1]  # second camera, third row, second column
    torch.testing.assert_close(vla.forward(obs, TASKS[:1]).tokens[0, 16 + 2 * 4 + 1], place.detach())
    with pytest.raises(ValueError, match="runs one row at a time"):
        vla.forward(observations(), TASKS)
    calm = load_vla(name, vla_kwargs={"hook": "eyes", "kind": "state", "config": {"noise": 0.0}, "max_batch": 2})
    assert not calm.spec.stochastic and calm.spec.max_batch == 2 and calm.spec.kinds == ("state",)
    check_vla(calm)
    lines = load_vla(name, vla_kwargs={"hook": "eyes", "layout": "b h y x -> b y (x h)"})
    assert lines.spec.token_dim == 64 and lines.spec.max_tokens is None
    for arguments, message in [
        ({"hook": "ears"}, "A other policy has no module 'ears'; it has eyes, idle, head"),
        ({"hook": "idle"}, "The module 'idle' does not run when the policy acts"),
        ({"hook": "eyes", "layout": "m b h -> b m h"}, "layout 'm b h -> b m h' does not fit"),
        ({"hook": "eyes", "layout": "b h y x -> b y x h"}, r"layout .* gives \(1, 4, 4, 16\), not 1 rows of tokens"),
        ({"hook": "eyes", "kind": "sound"}, "kind may be image, text, state, action, got 'sound'"),
        ({"hook": "eyes", "config": {"speed": 1}}, "config names speed, which a other policy of LeRobot does not have"),
    ]:
        with pytest.raises(ValueError, match=message) as caught:
            load_vla(name, vla_kwargs=arguments)
        assert "\n" not in str(caught.value)


def test_a_hook_reads_other_tokens_of_a_known_policy(folders):
    arguments = {"hook": "model.encoder.layers.0", "layout": "m b h -> b m h", "max_batch": 3}
    vla = load_vla(f"lerobot:{folders['act']}", vla_kwargs=arguments)
    output = check_vla(vla)
    whole = load_vla(f"lerobot:{folders['act']}")
    # one layer, and behind it nothing: the encoder's output is the layer's
    torch.testing.assert_close(output.tokens, check_vla(whole).tokens)
    assert vla.spec.max_batch == 3 and vla.fingerprint() != whole.fingerprint()


def test_an_environment_plays_its_chunks(folders):
    env = RLTokenVectorEnv(
        FakeLiberoVectorEnv(num_envs=2, chunk_length=4, image_size=64),
        load_vla(f"lerobot:{folders['smolvla']}"),
        "mean",
    )
    check_vector_env(env)
    env.close()
