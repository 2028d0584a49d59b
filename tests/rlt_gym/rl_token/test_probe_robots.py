"""``rlt probe`` from demonstrations to the page, on other robots than LIBERO's and on data that lack something."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from vla_helpers import TINY

from rlt_gym.core.robot_spec import Camera
from rlt_gym.data.demo_set import DemoReader
from rlt_gym.data.libero_hdf5 import ROBOT, DemoWriter
from rlt_gym.metaworld.tasks import SAWYER
from rlt_gym.rl_token.decoder import RLTokenDecoder
from rlt_gym.rl_token.encode_tokens import EncodeTokensConfig, encode_tokens
from rlt_gym.rl_token.encoder import RLTokenConfig, RLTokenEncoder
from rlt_gym.rl_token.io import save_rl_token
from rlt_gym.rl_token.probe.command import ProbeConfig, probe
from rlt_gym.rl_token.token_shards import TokenShards
from rlt_gym.vla.mini.model import MiniVLA, MiniVLANet
from rlt_sb3.cli.main import main

pytest.importorskip("sklearn")
pytest.importorskip("jinja2")
from rlt_gym.rl_token.probe import readouts

SIZE, LENGTH = 32, 12
STILL_OBJECTS = {"object positions": "no position of an object varies by more than 2 mm (deviation)"}
NOTHING_MOVES = {"placement": "no object is moved, or all begin at the same place"}
NO_POSITIONS = dict.fromkeys(("object positions", "placement"), "the data have no object positions")
ONE_CLASS = dict.fromkeys(("task", "success"), "the data have one class only")


@pytest.fixture(autouse=True)
def few_fits(monkeypatch):
    monkeypatch.setattr(readouts, "ALPHAS", (1.0, 1e2))
    monkeypatch.setattr(readouts, "INNER_FOLDS", 2)


def write_episodes(path, robot, episodes=6, positions=None):
    """A bar that grows at the upper edge of upright pictures; the gripper closes (command 1) in the second half."""
    with DemoWriter(path, "push it", robot=robot) as writer:
        for number in range(episodes):
            rng = np.random.default_rng(number)
            frames = {}
            for camera in robot.cameras:
                upright = rng.integers(0, 30, (LENGTH, SIZE, SIZE, 3), dtype=np.uint8)
                for step in range(LENGTH):
                    upright[step, : SIZE // 4, : 2 * step + 4] = 250
                frames[camera.key] = upright[:, ::-1] if camera.upside_down else upright
            actions = rng.uniform(0.1, 0.2, (LENGTH, robot.action_size)).astype(np.float32)
            actions[:, -1] = np.where(np.arange(LENGTH) < LENGTH // 2, -1.0, 1.0)
            proprio = rng.normal(size=(LENGTH, robot.proprio_size)).astype(np.float32)
            places = None if positions is None else positions + rng.normal(scale=1e-4, size=(LENGTH, 2, 3))
            writer.add(actions, proprio, places, **frames)


def write_vla(folder, robot):
    """A VLA of this robot and an RL token of it, both untrained."""
    torch.manual_seed(0)
    vla = MiniVLA(MiniVLANet(TINY, robot), {"frame_size": SIZE})
    vla.save(folder / "vla.safetensors")
    vla = MiniVLA.load(folder / "vla.safetensors")
    config = RLTokenConfig(vla.spec.token_dim, vla.spec.max_tokens, z_dim=8, width=16, layers=1, heads=2)
    save_rl_token(
        folder / "token.safetensors",
        RLTokenEncoder(config, vla.fingerprint(), vla.spec.name),
        RLTokenDecoder(config),
    )
    return vla


def probed(folder, *more):
    """The report of ``rlt probe`` on the command line; it refuses an untrained token, and has a page."""
    words = ["probe", folder / "token.safetensors", "--output", folder / "p.html", "--progress", "false", *more]
    assert main([str(word) for word in words]) == 1
    result = json.loads((folder / "p.json").read_text())
    page = (folder / "p.html").read_text()
    for name, why in result["left_out"].items():
        assert (f"Left out: {name} ({why})" if name != "attention" else f"Left out: {why}") in page
    return result


@pytest.mark.parametrize(
    ("robot", "positions", "left", "read"),
    [
        (SAWYER, None, NO_POSITIONS, {"gripper closes"}),
        (
            replace(SAWYER, gripper_index=None),
            None,
            {**NO_POSITIONS, "gripper closes": "the robot sawyer has no gripper"},
            set(),
        ),
        (SAWYER, 0.1, {**STILL_OBJECTS, **NOTHING_MOVES}, {"gripper closes"}),
        (ROBOT, None, NO_POSITIONS, {"gripper closes"}),
        (ROBOT, 0.1, {**STILL_OBJECTS, **NOTHING_MOVES}, {"gripper closes"}),
    ],
)
def test_the_whole_probe(tmp_path, robot, positions, left, read):
    write_episodes(tmp_path / "a.hdf5", robot, positions=positions)
    write_vla(tmp_path, robot)
    result = probed(
        tmp_path, "--demos", tmp_path / "a.hdf5", "--vla", tmp_path / "vla.safetensors", "--frame_stride", "1"
    )
    assert result["left_out"] == {**ONE_CLASS, **left}
    assert set(result["readouts"]) == {"phase of the episode", *read}
    if read:  # the bar tells the phase and with it the gripper: what is read is the right number of the action
        assert result["readouts"]["gripper closes"]["scores"]["mean of the tokens"]["score"] > 0.75
    assert result["readouts"]["phase of the episode"]["scores"]["mean of the tokens"]["score"] > 0.8


def test_a_gripper_that_opens_with_one(tmp_path):
    """And whose number is not the last one."""
    write_episodes(tmp_path / "a.hdf5", SAWYER)
    rows = DemoReader(tmp_path / "a.hdf5").rows
    for opens in (-1.0, 1.0):
        (_, gripper), _ = readouts.targets(rows, replace(SAWYER, gripper_opens=opens))
        assert gripper.name == "gripper closes"
        assert gripper.values.tolist() == 6 * ([opens > 0] * 6 + [opens < 0] * 6)
    found, left = readouts.targets(rows, replace(SAWYER, gripper_index=0))
    assert len(found) == 1 and left["gripper closes"] == "the data have one class only"


@pytest.mark.parametrize("turn", [(False, False), (True, True), (False, True)])
def test_pictures_on_the_page_are_upright(tmp_path, turn):
    """Whichever way the robot's cameras hang: the bar is at the upper edge."""
    cameras = tuple(Camera(old.key, upside_down) for old, upside_down in zip(SAWYER.cameras, turn, strict=True))
    robot = replace(SAWYER, cameras=cameras)
    write_episodes(tmp_path / "a.hdf5", robot, episodes=1)
    config = EncodeTokensConfig([str(tmp_path / "a.hdf5")], str(tmp_path / "tokens"), picture_size=8, progress=False)
    encode_tokens(config, write_vla(tmp_path, robot))
    tokens = TokenShards(config.output)
    assert tokens.robot == robot
    pictures = tokens.pictures(np.array([len(tokens) - 1]))[0]
    for picture in pictures:
        assert picture[0, :4].min() > 200 and picture[-1].max() < 60


def test_tokens_that_do_not_say_their_robot(tmp_path):
    """As an earlier version wrote them. The same command again adds the robot, and computes nothing."""
    write_episodes(tmp_path / "a.hdf5", SAWYER)
    vla = write_vla(tmp_path, SAWYER)
    config = EncodeTokensConfig([str(tmp_path / "a.hdf5")], str(tmp_path / "tokens"), frame_stride=1, progress=False)
    encode_tokens(config, vla)
    index = tmp_path / "tokens" / "index.json"
    written = json.loads(index.read_text())
    index.write_text(json.dumps({key: value for key, value in written.items() if key != "robot"}))
    why = "the tokens do not say of which robot they are: run `rlt encode-tokens` again"
    assert probed(tmp_path, "--tokens", tmp_path / "tokens")["left_out"]["gripper closes"] == why
    shards = {path: path.stat().st_mtime_ns for path in index.parent.glob("tokens-*")}
    encode_tokens(config, vla)
    assert json.loads(index.read_text()) == written
    assert {path: path.stat().st_mtime_ns for path in index.parent.glob("tokens-*")} == shards
    assert "gripper closes" in probed(tmp_path, "--tokens", tmp_path / "tokens")["readouts"]


def test_two_episodes_are_enough(tmp_path):
    write_episodes(tmp_path / "a.hdf5", SAWYER, episodes=2)
    vla = write_vla(tmp_path, SAWYER)
    config = ProbeConfig(
        str(tmp_path / "token.safetensors"), demos=[str(tmp_path / "a.hdf5")], vla="mini", frame_stride=1,
        output=str(tmp_path / "p.html"), progress=False,
    )  # fmt: skip
    probe(config, vla)
    result = json.loads((tmp_path / "p.json").read_text())
    assert result["episodes"] == 2 and list(result["readouts"]) == ["phase of the episode"]
    assert result["left_out"]["gripper closes"] == "a class has 2 episodes, and 5 are needed"
