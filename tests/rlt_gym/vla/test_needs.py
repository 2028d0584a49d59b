"""What a VLA says that it needs, it gets; or it is refused in one line that names both sides, before it runs."""

from dataclasses import fields, replace

import numpy as np
import pytest
from vla_helpers import SHIPPED_VLAS, tiny_vla, write_demos

from rlt_gym.core.robot_spec import Camera
from rlt_gym.data.libero_hdf5 import ROBOT
from rlt_gym.libero.make import make_rl_token_libero_vec
from rlt_gym.libero.robot import PANDA
from rlt_gym.rl_token.encode_demos import EncodeDemosConfig, encode_demos
from rlt_gym.rl_token.env import RLTokenVectorEnv
from rlt_gym.rl_token.pretrain import PretrainTokenConfig, pretrain_token
from rlt_gym.testing import FakeLiberoVectorEnv, FakeVLA
from rlt_gym.vla import VLASpec, load_vla
from rlt_gym.vla.base import ORIENTATIONS
from rlt_gym.vla.mini.model import MiniVLA


def needing(**spec):
    vla = FakeVLA(horizon=8)
    vla.spec = replace(vla.spec, **spec)
    return vla


#: What the VLA says, and what the refusal must say of both sides.
UNMET = [
    ({"cameras": ("agentview", "front")}, r"needs the cameras \['front'\], and the robot .* has \['agentview', 'wr"),
    ({"upside_down": False}, "takes pictures upright, and the robot '.*' has 'agentview' upside down"),
    ({"state_dim": 9}, "reads a state of 9 numbers, and the robot '.*' has 8"),
    ({"proprio": ("joints", "fingers")}, "reads the state joints, fingers, and the robot .* has position, or"),
    ({"action_dim": 8}, "gives actions of 8 numbers, and the robot '.*' takes 7"),
    ({"control_mode": "absolute"}, "gives absolute actions, and the robot '.*' takes relative ones"),
    ({"control_frequency": 10.0}, "plans 10 control steps per second, and the robot '.*' makes 20"),
]  # fmt: skip


@pytest.fixture
def raw(monkeypatch, tmp_path):
    """Every raw environment that the factory makes, with its arguments."""
    made = []
    monkeypatch.chdir(tmp_path)

    class Recording(FakeLiberoVectorEnv):
        def __init__(self, *args, **kwargs):
            made.append(kwargs)
            super().__init__(*args, **kwargs)
            self.metadata["render"] = kwargs.get("render", "exact")

    monkeypatch.setattr("rlt_gym.libero.vector_env.LiberoVectorEnv", Recording)
    return made


@pytest.mark.parametrize(("spec", "message"), UNMET)
def test_a_vla_that_does_not_fit_the_robot(raw, tmp_path, spec, message):
    vla = needing(**spec)
    vla.forward = lambda *args, **kwargs: pytest.fail("it ran")
    with pytest.raises(ValueError, match=f"^The VLA 'fake' {message}") as caught:
        make_rl_token_libero_vec(1, vla=vla, rl_token="mean")
    assert raw == [] and "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=f"^The VLA 'fake' {message}"):
        RLTokenVectorEnv(FakeLiberoVectorEnv(1), vla, "mean")
    demos = str(write_demos(tmp_path / "a.hdf5", "x"))
    with pytest.raises(ValueError, match=f"^The VLA 'fake' {message}"):
        pretrain_token(PretrainTokenConfig([demos], progress=False), vla)
    with pytest.raises(ValueError, match=f"^The VLA 'fake' {message}"):
        encode_demos(EncodeDemosConfig([demos], rl_token="mean", progress=False), vla)
    met = needing(
        cameras=("wrist",), upside_down=True, state_dim=8, proprio=("position", "orientation", "fingers"), action_dim=7,
        control_mode="relative", control_frequency=20,
    )  # fmt: skip
    met.forward = lambda obs, *args, **kwargs: FakeVLA().forward({"agentview": obs["wrist"], **obs}, *args, **kwargs)
    assert make_rl_token_libero_vec(1, vla=met, rl_token="mean").num_envs == 1


@pytest.mark.parametrize("robot", [PANDA, ROBOT])
def test_the_shipped_vlas_fit_and_say_all_that_they_need(robot):
    for name in SHIPPED_VLAS:
        spec = load_vla(name).spec
        spec.check_robot(robot)
        unsaid = {field.name for field in fields(spec) if getattr(spec, field.name) is None}
        assert unsaid == {"max_batch", "noise"} and spec.check_render() == "fast"


def test_demonstrations_show_the_robot_of_libero():
    """Told twice, since neither room may import the other."""
    for name in ("cameras", "action_names", "control_frequency", "control_mode"):
        assert getattr(ROBOT, name) == getattr(PANDA, name)
    assert [(p.name, p.size, p.kind) for p in ROBOT.proprio] == [(p.name, p.size, p.kind) for p in PANDA.proprio]


def test_only_cameras_that_it_reads_must_be_the_right_way_up():
    robot = replace(PANDA, cameras=(Camera("agentview"), Camera("wrist", upside_down=True)))
    needing(cameras=("wrist",), upside_down=True).spec.check_robot(robot)
    with pytest.raises(ValueError, match="takes pictures upside down, and the robot 'panda' has 'agentview' upright"):
        needing(upside_down=True).spec.check_robot(robot)
    silent = replace(robot, control_mode=None)
    needing(control_mode="absolute").spec.check_robot(silent)


@pytest.mark.parametrize(
    ("needs", "given", "drawn"),
    [
        (None, None, "exact"),
        (None, "fast", "fast"),
        ("fast", None, "fast"),
        ("exact", None, "exact"),
        ("exact", "stock", "stock"),
        ("exact", "fast", None),
        ("fast", "exact", None),
        ("fast", "stock", None),
    ],
)
def test_pictures_are_drawn_as_those_that_it_was_trained_on(raw, needs, given, drawn):
    vla = needing(render=needs)
    arguments = {} if given is None else {"render": given}
    if drawn is None:
        message = f"^render is '{given}'; the VLA 'fake' was trained on '{needs}' pictures"
        with pytest.raises(ValueError, match=message):
            make_rl_token_libero_vec(1, vla=vla, rl_token="mean", **arguments)
        assert raw == []
        env = FakeLiberoVectorEnv(1)
        env.metadata["render"] = given
        with pytest.raises(ValueError, match=message):
            RLTokenVectorEnv(env, vla, "mean")
    else:
        make_rl_token_libero_vec(1, vla=vla, rl_token="mean", **arguments)
        assert raw[0]["render"] == drawn


def test_a_vla_of_256_exact_pixels_never_sees_128_fast_ones_in_silence(raw, tmp_path):
    vla = needing(render="exact", frame_size=256)
    make_rl_token_libero_vec(1, vla=vla, rl_token="mean")
    assert (raw[0]["image_size"], raw[0]["render"]) == (256, "exact")
    for wrong, message in (
        ({"image_size": 128}, "needs frames of 256 pixels"),
        ({"render": "fast"}, "'exact' pictures"),
    ):
        with pytest.raises(ValueError, match=message):
            make_rl_token_libero_vec(1, vla=vla, rl_token="mean", **wrong)
    fast = str(write_demos(tmp_path / "fast.hdf5", "x", render="fast", size=256))
    small = str(write_demos(tmp_path / "small.hdf5", "x", render="exact", size=128))
    commands = (
        lambda demos: pretrain_token(PretrainTokenConfig([demos], progress=False), vla),
        lambda demos: encode_demos(EncodeDemosConfig([demos], rl_token="mean", progress=False), vla),
    )
    for command in commands:
        with pytest.raises(ValueError, match=r"fast\.hdf5 has other pictures .*trained on 'exact' pictures"):
            command(fast)
        with pytest.raises(ValueError, match="shown to the VLA 'fake' in frames of 128 pixels, and it reads 256"):
            command(small)


def test_what_a_specification_cannot_say():
    for spec, message in (
        ({"horizon": 0}, "VLASpec.horizon of 'x' must be an integer from 1 on, got 0"),
        ({"kinds": ("image", "pad")}, "VLASpec.kinds of 'x' may be image, text, state, action, got 'pad'"),
        ({"orientation": "left"}, "VLASpec.orientation of 'x' may be same, flipped, mirrored, turned, got 'left'"),
        ({"render": "stock"}, "VLASpec.render of 'x' may be exact, fast, got 'stock'"),
    ):
        with pytest.raises(ValueError, match=message.replace(".", r"\.")):
            VLASpec(**{"name": "x", "token_dim": 4, "horizon": 2, **spec})


def test_kinds_of_tokens_that_it_does_not_give(raw, tmp_path):
    vla = needing(kinds=("text", "action"))
    with pytest.raises(ValueError, match="tokens image are asked for, and the VLA 'fake' gives text, action"):
        make_rl_token_libero_vec(1, vla=vla, rl_token="mean")
    config = PretrainTokenConfig([str(write_demos(tmp_path / "a.hdf5", "x"))], kinds=("image", "text"), progress=False)
    with pytest.raises(ValueError, match="tokens image, text are asked for, and the VLA 'fake' gives text, action"):
        pretrain_token(config, vla)
    vla.spec.check_kinds(("all",))
    vla.spec.check_kinds(("action",))


def test_orientations():
    picture = np.arange(12).reshape(1, 2, 2, 3)
    corner = {name: int(change(picture)[0, 0, 0, 0]) for name, change in ORIENTATIONS.items()}
    assert corner == {"same": 0, "flipped": 6, "mirrored": 3, "turned": 9}


def test_training_notes_how_the_pictures_were_drawn(tmp_path):
    from rlt_gym.vla.mini.training import _said

    for number, render in enumerate(("exact", "exact", "fast")):
        write_demos(tmp_path / f"{number}.hdf5", "x", demos=1, length=2, render=render)

    class Config:
        demos = [str(tmp_path / "0.hdf5"), str(tmp_path / "1.hdf5")]  # noqa: RUF012

    assert _said(Config, "render") == "exact" and _said(Config, "assets") is None
    Config.demos = [str(tmp_path)]
    assert _said(Config, "render") is None
    net = tiny_vla().net
    assert [MiniVLA(net, p).spec.render for p in ({}, {"render": "exact"}, {"render": None})] == ["fast", "exact", None]
