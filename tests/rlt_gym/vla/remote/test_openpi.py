"""openpi's observations of LIBERO, and what a VLA of this package reads: which pixel comes from where."""

import numpy as np
import pytest
from vla_helpers import observations, tiny_vla

from rlt_gym.vla.remote.openpi import read_actions, read_observation, write_observation

pytest.importorskip("websockets")
pytest.importorskip("msgpack")

CAMERAS = ("agentview", "wrist")


def request(size=8, **changes):
    """As openpi's LIBERO example makes it from a raw observation of robosuite: ``picture[::-1, ::-1]``."""
    rng = np.random.default_rng(0)
    raw = {key: rng.integers(0, 256, (size, size, 3), dtype=np.uint8) for key in CAMERAS}
    sent = {
        "observation/image": np.ascontiguousarray(raw["agentview"][::-1, ::-1]),
        "observation/wrist_image": np.ascontiguousarray(raw["wrist"][::-1, ::-1]),
        "observation/state": np.linspace(-1, 1, 8),
        "prompt": "lift the bowl",
    }
    return raw, sent | changes


def test_pictures_are_turned_back():
    raw, sent = request()
    obs, task, seed = read_observation(sent, CAMERAS, 8)
    assert np.array_equal(obs["agentview"], raw["agentview"][None]) and np.array_equal(obs["wrist"], raw["wrist"][None])
    # not only by the same slices: the corner that a person sees on the upper left is the raw frame's lower right
    assert np.array_equal(obs["agentview"][0, 7, 7], sent["observation/image"][0, 0])
    assert np.array_equal(obs["agentview"][0, 0, 7], sent["observation/image"][7, 0])
    assert obs["state"].dtype == np.float32 and obs["state"].shape == (1, 8)
    assert (task, seed) == ("lift the bowl", None)


def test_a_vla_sees_the_same_through_it():
    vla, obs = tiny_vla(), observations(2)
    expected = vla.forward(obs, ["a b", "c"])
    for row, task in enumerate(["a b", "c"]):
        read, prompt, _ = read_observation(write_observation(obs, task, row, size=None), CAMERAS, 8)
        assert all(np.array_equal(read[key][0], obs[key][row]) for key in obs)
        np.testing.assert_allclose(vla.forward(read, [prompt]).chunk[0], expected.chunk[row], atol=1e-5)


def test_sizes():
    """Both ways: openpi's 224 pixels, and the size of the frames that a policy was trained on."""
    half = np.zeros((64, 64, 3), np.uint8)
    half[:, 32:] = 200  # bright on the right in the raw frame, so on the left as openpi shows it
    sent = write_observation({"agentview": half[None], "wrist": half[None], "state": np.zeros((1, 8))}, "x")
    picture = sent["observation/image"]
    assert picture.shape == (224, 224, 3) and picture[:, :100].min() == 200 and picture[:, 124:].max() == 0
    obs, _, _ = read_observation(sent, CAMERAS, 8, frame_size=64)
    assert obs["agentview"].shape == (1, 64, 64, 3)
    assert obs["agentview"][0, :, :28].max() == 0 and obs["agentview"][0, :, 36:].min() == 200
    assert read_observation(sent, CAMERAS, 8)[0]["wrist"].shape == (1, 224, 224, 3)


def test_a_seed_can_be_given():
    assert read_observation(request(seed=7)[1], CAMERAS, 8)[2] == 7
    assert read_observation(request(seed=np.int64(7))[1], CAMERAS, 8)[2] == 7
    assert (
        "seed" not in write_observation(observations(1), "x")
        and write_observation(observations(1), "x", seed=0)["seed"] == 0
    )


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"observation/image": np.zeros((8, 8, 3))}, "observation/image must be uint8"),
        ({"observation/image": np.zeros((3, 8, 8), np.uint8)}, "must be uint8"),
        ({"observation/image": [1]}, "got list"),
        ({"observation/wrist_image": np.zeros((8, 9, 3), np.uint8)}, "as high as it is wide"),
        ({"observation/wrist_image": np.zeros((0, 0, 3), np.uint8)}, "is empty"),
        ({"observation/state": np.zeros(7)}, "must be 8 numbers"),
        ({"observation/state": np.full(8, np.nan)}, "NaN or infinite"),
        ({"observation/state": "x"}, "must be 8 numbers"),
        ({"prompt": b"x"}, "prompt must be a text, got bytes"),
        ({"seed": -1}, "seed must be an integer"),
        ({"seed": True}, "seed must be an integer"),
        ({"seed": "1"}, "seed must be an integer"),
    ],
)
def test_what_is_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        read_observation(request(**changes)[1], CAMERAS, 8, frame_size=8)


def test_what_is_missing():
    with pytest.raises(ValueError, match=r"lacks \['observation/wrist_image', 'prompt'\]"):
        read_observation({key: request()[1][key] for key in ("observation/image", "observation/state")}, CAMERAS, 8)
    with pytest.raises(ValueError, match=r"no picture for the cameras \['side'\]"):
        read_observation(request()[1], ("agentview", "side"), 8)


def test_actions_are_limited():
    actions = read_actions({"actions": np.array([[1.5, -2.0, 0.25]])}, "s")
    assert actions.dtype == np.float32 and actions.tolist() == [[1.0, -1.0, 0.25]]
