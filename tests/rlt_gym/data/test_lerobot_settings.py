"""LeRobot datasets in every command that reads demonstrations: as HDF5 files are, and with unusual columns."""

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lerobot_folder import LENGTHS, picture, png, upright, write, write_hdf5
from offline_helpers import C
from safetensors.torch import load_file
from vla_helpers import TINY, tiny_vla, write_fake_token

from rlt_gym.data.demo_set import DemoReader, DemoRows
from rlt_gym.data.lerobot import LeRobotSettings
from rlt_gym.data.lerobot_writer import ExportLeRobotConfig
from rlt_gym.rl_token.encode_demos import EncodeDemosConfig, encode_demos
from rlt_gym.rl_token.encode_tokens import EncodeTokensConfig, encode_tokens
from rlt_gym.rl_token.pretrain import PretrainTokenConfig, pretrain_token
from rlt_gym.rl_token.probe.command import ProbeConfig, probe
from rlt_gym.rl_token.token_shards import TokenShards
from rlt_gym.testing import FakeVLA
from rlt_gym.vla.mini.training import TrainVLAConfig, train_vla
from rlt_sb3.cli.main import main, parse

COLUMNS = {"agentview": "front", "wrist": "hand", "state": "joints", "action": "command"}
UNUSUAL = {"lerobot_columns": COLUMNS, "lerobot_gripper": "open", "lerobot_rotated": False}


def write_unusual(root, success=False):
    """As :func:`write`, but with other names, pictures as LIBERO gives them, and a gripper that opens with 1."""
    path = write(root, 3, "unusual", success=success) / "data/chunk-000/file-000.parquet"
    rows = pq.read_table(path).to_pylist()
    for row in rows:
        row["command"][6] = float(row["command"][6] < 0)
        for name, wrist in (("front", False), ("hand", True)):
            row[name] = png(picture(row["episode_index"], row["frame_index"], wrist))
    pq.write_table(pa.Table.from_pylist(rows), path)
    return root


def tokens_of(demos, output, **settings):
    config = EncodeTokensConfig(
        [str(demos)], str(output), frame_stride=2, picture_size=16, rows_per_shard=4, batch_size=4,
        successes_only=False, dtype="float32", progress=False, **settings,
    )  # fmt: skip
    return encode_tokens(config, tiny_vla())


def assert_same_tokens(one, other):
    """Every shard bit for bit, and all that is known about the rows."""
    names = sorted(path.name for path in one.glob("tokens-*"))
    assert len(names) == 3 and names == sorted(path.name for path in other.glob("tokens-*"))
    for name in names:
        theirs, ours = load_file(one / name), load_file(other / name)
        assert theirs.keys() == ours.keys() and all(torch.equal(theirs[key], ours[key]) for key in theirs), name
    theirs, ours = TokenShards(one), TokenShards(other)
    assert theirs.robot == ours.robot
    for name in {field.name for field in fields(DemoRows)} - {"files"}:
        np.testing.assert_array_equal(getattr(theirs.rows, name), getattr(ours.rows, name), err_msg=name)


@pytest.mark.parametrize("version", [2, 3])
def test_the_same_tokens_as_from_libero_s_own_files(tmp_path, version):
    write(tmp_path / "set", version, success=False)
    write_hdf5(tmp_path)
    dataset, files = (tokens_of(tmp_path / name, tmp_path / out) for name, out in (("set", "a"), ("*.hdf5", "b")))
    assert_same_tokens(dataset, files)
    rows = TokenShards(dataset).rows
    assert len(rows) == 6 + 4 + 2 and rows.success.tolist() == [True] * 6 + [False] * 4 + [True] * 2
    wrong = tokens_of(tmp_path / "set", tmp_path / "c", lerobot_rotated=False)
    name = "tokens-00000.safetensors"
    assert not torch.equal(load_file(wrong / name)["tokens"], load_file(files / name)["tokens"]), "pictures matter"


def test_unusual_columns_in_every_command(tmp_path):
    """Each refuses the dataset and says what to give; given that, it reads what is in LIBERO's own files."""
    pytest.importorskip("sklearn")
    dataset = str(write_unusual(tmp_path / "set", success=True))
    write_hdf5(tmp_path, failed=())
    token = write_fake_token(tmp_path / "fake.safetensors")

    def run(demos, out, **lerobot):
        out = tmp_path / out
        common = {"progress": False, **lerobot}
        yield lambda: tokens_of(demos, out / "tokens", **lerobot)
        for alpha in (0.0, 1.0):
            config = PretrainTokenConfig(
                demos=[demos], output=str(out / f"token_{alpha}.safetensors"), alpha=alpha, steps=2, width=16, heads=2,
                layers=1, frame_stride=1, held_out=0.5, **common,
            )  # fmt: skip
            yield lambda config=config: pretrain_token(config, tiny_vla())
        rows, vla, page = (str(out / name) for name in ("rows.safetensors", "vla.safetensors", "p.html"))
        encode = EncodeDemosConfig([demos], rows, rl_token=str(token), chunk_length=C, **common)
        yield lambda: encode_demos(encode, FakeVLA())
        train = TrainVLAConfig([demos], vla, TINY, steps=2, warmup_steps=1, held_out=0, **common)
        yield lambda: train_vla(train)
        measure = ProbeConfig(str(token), demos=[demos], vla="fake", output=page, **common)
        yield lambda: probe(measure, FakeVLA())

    for command in run(dataset, "refused"):
        with pytest.raises(ValueError, match=r"has no column .* lerobot_columns=\{agentview: NAME\}"):
            command()
    for folder, demos, lerobot in (("theirs", dataset, UNUSUAL), ("ours", str(tmp_path / "*.hdf5"), {})):
        (tmp_path / folder).mkdir()
        for command in run(demos, folder, **lerobot):
            command()
    assert_same_tokens(tmp_path / "theirs/tokens", tmp_path / "ours/tokens")
    for name in ("token_0.0", "token_1.0", "token_1.0_vla", "rows", "vla"):
        theirs, ours = (load_file(tmp_path / folder / f"{name}.safetensors") for folder in ("theirs", "ours"))
        assert theirs.keys() == ours.keys() and all(torch.equal(theirs[key], ours[key]) for key in theirs), name
    theirs, ours = (json.loads((tmp_path / folder / "p.json").read_text()) for folder in ("theirs", "ours"))
    assert theirs["numbers"] == ours["numbers"] and theirs["readouts"] == ours["readouts"]


def test_the_settings_on_the_command_line(tmp_path):
    """Those of the shards say how they were read: what was read otherwise does not go into the same folder."""
    dataset, output = str(write_unusual(tmp_path / "set")), str(tmp_path / "tokens")
    tiny_vla().save(tmp_path / "vla.safetensors")
    words = ["encode-tokens", "--demos", dataset, "--output", output, "--vla", str(tmp_path / "vla.safetensors")]
    words += ["--lerobot_columns", json.dumps(COLUMNS), "--lerobot_gripper", "open", "--progress", "false"]
    assert main([*words, "--lerobot_rotated", "false"]) == 0
    index = Path(output) / "index.json"
    before = index.read_bytes()
    assert json.loads(before)["settings"].items() >= UNUSUAL.items()
    assert main([*words, "--lerobot_rotated", "true"]) == 2 and index.read_bytes() == before
    write_hdf5(tmp_path)
    for number, rotated in enumerate((True, False)):  # nothing to rotate
        folder = tokens_of(tmp_path / "*.hdf5", tmp_path / "files", lerobot_rotated=rotated)
        assert "lerobot_rotated" not in json.loads((folder / "index.json").read_text())["settings"], number


@pytest.mark.parametrize(
    "command",
    ["encode-tokens", "pretrain-token", "probe", "encode-demos", "train-vla", "export-lerobot", "train-reward"],
)
def test_every_command_has_the_same_settings(command, tmp_path):
    token = write_fake_token(tmp_path / "token.safetensors")
    words = [str(token), "--demos", "x", "--vla", "mini"] if command == "probe" else []
    words += ["--lerobot_columns", json.dumps(COLUMNS), "--lerobot_gripper", "open", "--lerobot_rotated", "false"]
    settings = parse(command, words)
    assert isinstance(settings, LeRobotSettings) and settings.lerobot == UNUSUAL


def test_numbers_of_the_gripper(tmp_path):
    """The reader's actions are LIBERO's: -1 opens in the first half of each episode."""
    write_unusual(tmp_path / "set")
    reader = DemoReader(tmp_path / "set", successes_only=False, lerobot=ExportLeRobotConfig(**UNUSUAL))
    halves = [[-1.0] * -(-LENGTHS[demo] // 2) + [1.0] * (LENGTHS[demo] // 2) for demo in (0, 2, 1)]
    assert reader.rows.actions[:, 6].tolist() == [value for half in halves for value in half]
    (frames, *_) = reader.frames(["wrist"], 32)
    np.testing.assert_array_equal(frames["wrist"][3], picture(0, 3, wrist=True))
    assert not np.array_equal(frames["wrist"][3], upright(frames["wrist"][3]))
