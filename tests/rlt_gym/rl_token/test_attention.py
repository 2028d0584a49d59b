"""Where the RL token looks: against softmax by hand, and tokens made to look at one place."""

import base64
import io
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from vla_helpers import observations, tiny_vla, write_demos

from rlt_gym.core.robot_spec import Camera
from rlt_gym.data.libero_hdf5 import ROBOT
from rlt_gym.rl_token import encoder as encoder_module
from rlt_gym.rl_token.encode_tokens import EncodeTokensConfig, encode_tokens
from rlt_gym.rl_token.encoder import RLTokenConfig, RLTokenEncoder
from rlt_gym.rl_token.probe.attention import PHASES, attention, choose_frames, look
from rlt_gym.rl_token.probe.page import BLUE, RED, _overlays, overlay
from rlt_gym.rl_token.token_shards import TokenShards
from rlt_gym.rl_token.tokens import TokenOrigin
from rlt_gym.testing import FakeVLA
from rlt_gym.vla.base import TOKEN_KINDS, VLASpec
from rlt_gym.vla.conformance import check_vla
from rlt_gym.vla.mini.model import MiniVLA

pytest.importorskip("jinja2")


def make_encoder(width=32, layers=3, seed=0, **settings):
    torch.manual_seed(seed)
    encoder = RLTokenEncoder(RLTokenConfig(width, layers=layers, heads=2, **{"max_tokens": 40, **settings})).eval()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter += 0.3 * torch.randn_like(parameter)  # so that attention is far from even
    return encoder


@pytest.mark.parametrize("masked", [False, True])
def test_weights_are_the_softmax_of_what_the_forward_pass_compares(masked, monkeypatch):
    """Queries and keys are taken where the encoder hands them to torch's attention."""
    encoder, z = make_encoder(), torch.randn(4, 9, 32)
    mask = torch.ones(4, 9, dtype=torch.bool)
    if masked:
        mask[1, 5:] = mask[2, 1:] = False
    before = encoder.encode(z, mask)
    layers, rollout = attention(encoder, z, mask)
    assert torch.equal(encoder.encode(z, mask), before), "the forward pass stays as it was"

    seen, original = [], encoder_module.F.scaled_dot_product_attention

    def spy(q, k, v, attn_mask=None, is_causal=False):
        seen.append((q.detach().double().numpy(), k.detach().double().numpy()))
        return original(q, k, v, attn_mask=attn_mask, is_causal=is_causal)

    monkeypatch.setattr(encoder_module.F, "scaled_dot_product_attention", spy)
    encoder.encode(z, mask)
    allowed = np.concatenate([mask.numpy(), np.ones((4, 1), bool)], axis=1)
    assert len(seen) == 3 and layers.shape == (4, 3, 10)
    for number, (q, k) in enumerate(seen):
        for row in range(4):
            expected = np.zeros(10)
            for head in range(2):
                powers = np.exp([q[row, head, -1] @ key / 4 for key in k[row, head]]) * allowed[row]  # 4 = sqrt(16)
                expected += powers / powers.sum() / 2
            np.testing.assert_allclose(layers[row, number], expected, atol=1e-5)
            assert expected.max() > 2 / 10, "uneven, so that another place would be noticed"
    torch.testing.assert_close(layers.sum(dim=2), torch.ones(4, 3))
    torch.testing.assert_close(rollout.sum(dim=1), torch.ones(4))
    assert not layers[~torch.as_tensor(allowed)[:, None].expand(-1, 3, -1)].any()
    assert not rollout[~torch.as_tensor(allowed)].any()


def test_the_rollout_of_one_layer_is_its_mean_with_the_identity():
    encoder, z = make_encoder(layers=1), torch.randn(2, 5, 32)
    layers, rollout = attention(encoder, z)
    expected = layers[:, 0] / 2
    expected[:, -1] += 0.5
    torch.testing.assert_close(rollout, expected)


def look_at(encoder, place):
    """Let one number of each head say which place it is, and the first layer's query of the RL token ask for it."""
    layer, marks, width = encoder.layers[0], [0, encoder.e_rl.numel() // 2], encoder.e_rl.numel()
    with torch.no_grad():
        encoder.input.weight.zero_()
        encoder.input.bias.zero_()
        encoder.position[:, marks] = -1
        encoder.e_rl[marks] = -1
        encoder.position[place, marks] = 5
        layer.norm1.weight.fill_(1)
        layer.norm1.bias.zero_()
        layer.query.weight.zero_()
        layer.query.bias.zero_()
        layer.query.bias[marks] = 50
        layer.key_value.weight[:width].copy_(torch.eye(width))
        layer.key_value.bias.zero_()
    return encoder


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Tokens of tiny VLAs: pictures of 32 pixels, 4 x 4 and 2 x 2 tokens, then text, state and four actions."""
    folder = tmp_path_factory.mktemp("attention")
    for number, name in enumerate(("go", "stop")):
        write_demos(folder / "demos" / f"{name}.hdf5", name, demos=3, length=10, size=32, seed=number)
    config = EncodeTokensConfig(
        [str(folder / "demos")], str(folder / "all"), frame_stride=1, picture_size=16, rows_per_shard=16, progress=False
    )
    encode_tokens(config, tiny_vla())
    encode_tokens(replace(config, output=str(folder / "image"), kinds=("image",)), tiny_vla())
    encode_tokens(replace(config, output=str(folder / "text"), kinds=("text", "state")), tiny_vla())
    encode_tokens(replace(config, output=str(folder / "fake")), FakeVLA())
    return folder


@pytest.mark.parametrize("name", ["all", "image"])
@pytest.mark.parametrize(("place", "row", "column"), [(0, 0, 0), (6, 1, 2), (15, 3, 3)])
def test_a_token_that_looks_at_one_place_shows_it_there(shards, name, place, row, column):
    tokens = TokenShards(shards / name)
    found = look(look_at(make_encoder(), place), tokens, np.arange(60))
    assert found.maps == ["layer 1", "layer 2", "layer 3", "rollout"]
    view, other = found.views
    assert (view.camera, view.number, view.weights.shape) == ("agentview", 0, (6, 4, 4, 4))
    first = view.weights[:, 0]
    assert (first[:, row, column] > 0.99).all() and first.sum() < 6.001
    assert view.peaks[0] == pytest.approx(16, abs=0.2) and view.contrast > 10
    assert (other.camera, other.number) == ("wrist", 1) and other.weights[:, 0].max() < 0.01
    assert found.shares["agentview"][0] > 0.99 and found.shares["wrist"][0] < 0.01


def test_shares_of_all_sources(shards):
    """A token that looks at the state, which stands after 16 + 4 picture tokens and the text."""
    tokens = TokenShards(shards / "all")
    found = look(look_at(make_encoder(), 21), tokens, np.arange(60))
    assert list(found.shares) == ["agentview", "wrist", "text", "state", "action", "the RL token itself"]
    assert found.shares["state"][0] > 0.99
    for place, number in enumerate(found.maps):
        assert sum(shares[place] for shares in found.shares.values()) == pytest.approx(1, abs=1e-4), number
    assert [shares[-1] for shares in found.shares.values()] == pytest.approx([n / 27 for n in (16, 4, 1, 1, 4, 1)])
    assert json.loads(json.dumps(found.numbers))["shares"]["state"][0] > 0.99


def test_places_are_turned_back_as_pictures_are(shards):
    """A VLA that turns pictures by 180 degrees has its first token at the upper right of the upright picture."""
    tokens, encoder = TokenShards(shards / "all"), look_at(make_encoder(), 0)
    for orientation, place in (("flipped", (0, 0)), ("turned", (0, 3)), ("same", (3, 0)), ("mirrored", (3, 3))):
        tokens.origin = replace(tokens.origin, orientation=orientation)
        first = look(encoder, tokens, np.arange(60)).views[0].weights[:, 0]
        assert all(np.unravel_index(part.argmax(), part.shape) == place for part in first), orientation


def test_places_in_pictures_that_the_robot_gives_upright(shards):
    """What a VLA with its orientation reads in the first row is then in the first row, and else in the last one."""
    tokens, encoder = TokenShards(shards / "all"), look_at(make_encoder(), 1)
    tokens.origin = replace(tokens.origin, orientation="same")
    for robot, row in (
        (ROBOT, 3),
        (None, 3),
        (replace(ROBOT, cameras=(Camera("agentview"), Camera("wrist", upside_down=True))), 0),
        (replace(ROBOT, cameras=(Camera("agentview", upside_down=True), Camera("wrist"))), 3),
    ):
        tokens.robot = robot
        first = look(encoder, tokens, np.arange(60)).views[0].weights[:, 0]
        assert (first[:, row, 1] > 0.99).all(), robot


def test_a_second_grid_is_found_behind_the_first(shards):
    """Also where the pictures of one camera only were kept, or the cameras stand in another order than the grids."""
    tokens, encoder = TokenShards(shards / "all"), look_at(make_encoder(), 16 + 1)
    for cameras, number in ((("agentview", "wrist"), 1), (("wrist", "agentview"), 0), (("hand", "wrist"), 1)):
        tokens.origin = replace(tokens.origin, cameras=cameras)
        *_, view = look(encoder, tokens, np.arange(60)).views
        assert (view.camera, view.number, view.weights.shape) == ("wrist", number, (6, 4, 2, 2))
        assert (view.weights[:, 0, 0, 1] > 0.99).all() and view.peaks[0] == pytest.approx(4, abs=0.1)


def test_overlays_lie_on_their_own_camera(shards):
    """Without weight an overlay is the gray picture: of each frame, the one that its camera took."""
    tokens = TokenShards(shards / "all")
    found = look(make_encoder(), tokens, np.arange(60))
    even = replace(found, views=[replace(view, weights=np.ones_like(view.weights)) for view in found.views])
    pictures = np.zeros((6, 2, 16, 16, 3), np.uint8)
    pictures[:] = np.array([[50 * task + 10 * phase for phase in range(3)] for task in range(2)]).reshape(6, 1, 1, 1, 1)
    pictures[:, 1] += 100  # the wrist's
    tables = _overlays(even, tokens.rows, pictures)
    assert [(table["name"], table["camera"]) for table in tables] == [
        (task, camera) for task in ("go", "stop") for camera in ("agentview", "wrist")
    ]
    for number, table in enumerate(tables):
        for phase, frame in enumerate(table["frames"]):
            expected = 50 * (number // 2) + 10 * phase + 100 * (number % 2)
            for cell in frame["cells"]:
                image = np.asarray(Image.open(io.BytesIO(base64.b64decode(cell["jpeg"]))))
                assert np.abs(image.astype(int) - expected).max() <= 2


def test_what_is_left_out_is_said(shards):
    tokens, encoder = TokenShards(shards / "all"), make_encoder()
    origin = tokens.origin
    for change, reason in (
        ({"picture_grids": None}, "mini did not say where in the pictures its tokens are (VLASpec.picture_grids)"),
        ({"orientation": None}, "mini did not say where in the pictures its tokens are (VLASpec.orientation)"),
        ({"cameras": ("hand",)}, "there are pictures of hand and picture tokens of agentview, wrist"),
        (
            {"picture_grids": (("agentview", 4, 4),)},
            "an observation has 20 picture tokens, and the VLA's grids have 16",
        ),
    ):
        tokens.origin = replace(origin, **change)
        assert look(encoder, tokens, np.arange(60)) == reason
    assert look(encoder, TokenShards(shards / "text"), np.arange(60)) == "the RL token reads no picture tokens"
    fake = TokenShards(shards / "fake")
    assert look(make_encoder(12), fake, np.arange(60)).startswith("fake did not say")


def test_what_is_known_about_the_pictures_is_on_disk(shards):
    origin = TokenShards(shards / "all").origin
    assert origin == TokenOrigin.of(tiny_vla(), ("all",)) and origin.cameras == ("agentview", "wrist")
    assert origin.picture_grids == (("agentview", 4, 4), ("wrist", 2, 2))


def test_kinds_of_tokens_are_kept_in_their_order(shards):
    wanted = ["image"] * 20 + ["text", "state"] + ["action"] * 4
    kinds = TokenShards(shards / "all").kinds(np.array([59, 0, 17]))
    assert kinds.tolist() == [[TOKEN_KINDS[name] for name in wanted]] * 3
    tokens = TokenShards(shards / "fake")  # its fifth token is a pad in rows of some instructions
    kinds, mask = tokens.kinds(np.arange(60)), tokens.batch(np.arange(60), "cpu")[1].numpy()
    np.testing.assert_array_equal(kinds, mask)


def test_frames_are_of_several_tasks_and_times(shards):
    rows = TokenShards(shards / "all").rows
    chosen = choose_frames(rows)
    assert rows.task[chosen].tolist() == [0] * 3 + [1] * 3
    assert rows.step[chosen].tolist() == [round(9 * phase) for phase in PHASES] * 2
    assert len(np.unique(rows.demo[chosen])) == 2


# ------------------------------------------------------------------------------------------------------ overlay, spec


def test_overlay():
    picture = np.full((16, 16, 3), 100, np.uint8)
    weights = np.array([[4.0, 1.0], [1.0, 0.25]]) * np.array(4 / 6.25)  # mean 1: 2.56, 0.64, 0.64, 0.16
    image = overlay(picture, weights, 2.56).astype(int)
    edge = len(image)
    corners = [image[5, 5], image[5, edge - 5], image[edge - 5, 5], image[edge - 5, edge - 5]]
    np.testing.assert_allclose(corners[0], 0.3 * 100 + 0.7 * np.array(RED), atol=1)
    np.testing.assert_allclose(corners[3], 0.3 * 100 + 0.7 * np.array(BLUE), atol=1)
    np.testing.assert_array_equal(corners[1], corners[2])
    assert 100 < corners[1][2] < corners[3][2], "a little below the mean is a little blue"
    assert (overlay(picture, np.ones((3, 5)), 1.1) == 100).all()


def test_grids_of_the_mini_vla_are_where_its_patches_look():
    """
    Without its transformer a token depends on pixels near its place, averaged over networks and pictures.

    Three strides put its middle at 8 i of the picture as it is read; two by two of these make a token of the wrist. The
    environment's pictures are upside down.
    """
    obs = observations(8)

    def tokens(vla, obs):
        with torch.no_grad():
            for part in (part for block in vla.net.blocks for part in (block.out, block.down)):
                part.weight.zero_()
                part.bias.zero_()
        return vla.forward(obs, ["go"] * 8).tokens

    vlas, start = [tiny_vla(seed) for seed in range(8)], 0
    before = torch.stack([tokens(vla, obs) for vla in vlas])
    assert vlas[0].spec.picture_grids == (("agentview", 4, 4), ("wrist", 2, 2))
    for camera, high, wide in vlas[0].spec.picture_grids:
        for row, column in np.ndindex(high, wide):
            y, x = (8 * at if camera == "agentview" else 16 * at + 4 for at in (row, column))
            changed = {**obs, camera: obs[camera].copy()}
            changed[camera][:, 31 - y, x] ^= 255
            moved = (torch.stack([tokens(vla, changed) for vla in vlas]) - before).abs().sum(dim=(0, 1, 3))
            assert int(moved.argmax()) == start + row * wide + column, (camera, row, column)
        start += high * wide


def test_grids_that_cannot_be_are_refused():
    for grids in ((("hand", 2, 2),), (("wrist", 0, 2),), (("wrist", 2),), (("wrist", 2, 2.5),)):
        with pytest.raises(
            ValueError, match=r"picture_grids of 'x' must hold \(camera, rows, columns\) with a camera of"
        ):
            VLASpec("x", 4, 2, picture_grids=grids)
    assert VLASpec("x", 4, 2, picture_grids=[["wrist", 2, 3]]).picture_grids == (("wrist", 2, 3),), (
        "as messages have it"
    )

    class Wrong(MiniVLA):
        @property
        def spec(self):
            return replace(super().spec, picture_grids=(("agentview", 4, 4), ("wrist", 2, 3)))

    with pytest.raises(ValueError, match=r"row 0 has 20 valid image tokens, spec.picture_grids .* say 22"):
        check_vla(Wrong(tiny_vla().net))
