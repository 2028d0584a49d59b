"""Tokens on disk: bit for bit what the VLA gave, whatever happened while they were written."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmark_helpers import run_benchmark
from safetensors.torch import load_file, save_file
from vla_helpers import tiny_vla, write_demos

from rlt_gym.data.demo_set import DemoReader, load_demo_set
from rlt_gym.rl_token.encode_tokens import EncodeTokensConfig, encode_tokens
from rlt_gym.rl_token.pretrain import PretrainTokenConfig, pretrain_token
from rlt_gym.rl_token.token_shards import TokenShards
from rlt_gym.testing import FakeVLA
from rlt_sb3.cli.main import main


@pytest.fixture
def config(tmp_path):
    """35 rows: shards of 8, 8, 8, 8 and 3."""
    write_demos(tmp_path / "demos" / "a.hdf5", "task a", demos=1, length=11, size=16)
    write_demos(tmp_path / "demos" / "b.hdf5", "task b", demos=2, length=12, size=16, seed=1)
    return EncodeTokensConfig(
        [str(tmp_path / "demos")], str(tmp_path / "tokens"), frame_stride=1, picture_size=8, rows_per_shard=8,
        batch_size=4, progress=False,
    )  # fmt: skip


def files(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_shards_hold_what_the_vla_gave(config, dtype):
    """In the type that was asked for; rows are read in any order, twice where they are asked for twice."""
    vla = FakeVLA(n_tokens=7)
    encode_tokens(replace(config, dtype=dtype), vla)
    assert vla.calls == [4] * 8 + [3]
    tokens = TokenShards(config.output)
    data = load_demo_set(config.demos, 16)
    rows = np.array([34, 3, 3, 17, 8, 0, 33])
    found, mask = tokens.batch(rows, "cpu")
    assert found.dtype == torch.float32 and (len(tokens), tokens.count, tokens.rows_per_shard) == (35, 7, 8)
    for place, row in enumerate(rows):
        batch = np.arange(row - row % 4, min(row - row % 4 + 4, 35))  # as the VLA saw it
        obs = {camera: pictures[batch] for camera, pictures in data.pictures.items()} | {"state": data.proprio[batch]}
        output = FakeVLA(n_tokens=7).forward(obs, [data.instructions[task] for task in data.task[batch]])
        assert torch.equal(mask[place], output.mask[row % 4])
        expected = output.tokens[row % 4] * output.mask[row % 4][:, None]
        assert torch.equal(found[place], expected.to(getattr(torch, dtype)).float())
    with open(Path(config.output) / "tokens-00004.safetensors", "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    assert header["tokens"] == {
        "dtype": {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}[dtype],
        "shape": [3, 6, 12],  # a seventh token has the first task only
        "data_offsets": header["tokens"]["data_offsets"],
    }


def test_shards_hold_what_is_known_about_the_rows(config):
    encode_tokens(config, FakeVLA())
    tokens, data = TokenShards(config.output), load_demo_set(config.demos, 16)
    for key in set(vars(tokens.rows)) - {"instructions", "files"}:
        np.testing.assert_array_equal(getattr(tokens.rows, key), getattr(data, key))
        assert getattr(tokens.rows, key).dtype == getattr(data, key).dtype
    assert tokens.rows.instructions == ["task a", "task b"] and tokens.rows.files == {"a.hdf5": 1, "b.hdf5": 2}
    assert tokens.rows.step.tolist() == [*range(11), *range(12), *range(12)]
    pictures = tokens.pictures(np.array([20, 1]))
    assert pictures.shape == (2, 2, 8, 8, 3) and tokens.origin.cameras == ("agentview", "wrist")
    for number, camera in enumerate(tokens.origin.cameras):
        upright = data.pictures[camera][[20, 1], ::-1].astype(float).reshape(2, 8, 2, 8, 2, 3).mean((2, 4))
        found = pictures[:, number]
        assert 2 * np.abs(found - upright).mean() < np.abs(found - upright[:, ::-1]).mean()


def test_training_on_shards_is_training_on_demonstrations(config, tmp_path):
    """With batches that begin where shards do; also the report is the same."""
    common = {"width": 16, "heads": 2, "layers": 1, "steps": 5, "held_out": 0.25, "progress": False, "batch_size": 8}
    for name, length in (("a", 11), ("b", 12)):
        write_demos(tmp_path / "demos" / f"{name}.hdf5", f"task {name}", demos=3, length=length, size=32)
    encode_tokens(replace(config, batch_size=8), tiny_vla())
    reports = []
    for source in ({"demos": config.demos, "frame_stride": 1}, {"tokens": config.output}):
        settings = PretrainTokenConfig(**common, **source, output=str(tmp_path / "token.safetensors"))
        token = pretrain_token(settings, tiny_vla() if "demos" in source else None)
        reports.append((token.fingerprint(), json.loads((tmp_path / "token.json").read_text())["held_out"]))
    assert reports[0] == reports[1]


KILLED = """
import os, signal, sys
from rlt_gym.rl_token.encode_tokens import EncodeTokensConfig, encode_tokens
from rlt_gym.testing import FakeVLA

class Mortal(FakeVLA):
    def forward(self, obs, tasks, *, seed=None):
        if len(self.calls) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(obs, tasks, seed=seed)

config = EncodeTokensConfig(
    [sys.argv[1]], sys.argv[2], frame_stride=1, picture_size=8, rows_per_shard=8, batch_size=4, progress=False
)
encode_tokens(config, Mortal())
"""


def test_a_killed_writer_goes_on_bit_for_bit(config, tmp_path):
    encode_tokens(config, FakeVLA())
    expected = files(config.output)
    again = replace(config, output=str(tmp_path / "again"))
    code = f"import sys; sys.path[:0] = {sys.path!r}\n{KILLED}"
    done = subprocess.run([sys.executable, "-c", code, config.demos[0], again.output], timeout=300)
    assert done.returncode == -9
    names = sorted(name for name in files(again.output) if name.startswith("tokens"))
    assert names == ["tokens-00000.safetensors", "tokens-00001.safetensors"]
    with pytest.raises(ValueError, match=r"again is not finished: run the same `rlt encode-tokens` command again"):
        TokenShards(again.output)
    vla = FakeVLA()
    encode_tokens(again, vla)
    assert sum(vla.calls) == 35 - 16, "two shards were there"
    assert files(again.output) == expected


KILLED_BESIDE_THE_VLA = """
import os, signal, sys
from rlt_gym.rl_token import token_shards
from rlt_gym.rl_token.encode_tokens import EncodeTokensConfig, encode_tokens
from rlt_gym.testing import FakeVLA

def die(*unused):
    os.kill(os.getpid(), signal.SIGKILL)

def in_a_shard(data, path, **more):
    path.write_bytes(b"half of it")
    die()

def in_the_rows(path):
    with atomic_write(path) as temporary:
        temporary.write_bytes(b"half of it")
        die()

atomic_write = token_shards.atomic_write
deaths = {"rows": ("atomic_write", in_the_rows), "index": ("write_json", die), "shard": ("save_file", in_a_shard)}
for place, (name, function) in deaths.items():
    config = EncodeTokensConfig(
        [sys.argv[1]], sys.argv[2] + place, frame_stride=1, picture_size=8, rows_per_shard=8, batch_size=4,
        progress=False,
    )
    child = os.fork()
    if not child:
        setattr(token_shards, name, function)
        encode_tokens(config, FakeVLA())
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
"""


def test_a_writer_that_was_killed_in_any_file_goes_on_and_cleans_up(config, tmp_path):
    """While it wrote rows, between rows and index, and while it wrote a shard."""
    encode_tokens(config, FakeVLA())
    code = f"import sys; sys.path[:0] = {sys.path!r}\n{KILLED_BESIDE_THE_VLA}"
    subprocess.run([sys.executable, "-c", code, config.demos[0], str(tmp_path / "killed-")], timeout=300, check=True)
    for place, left in (("rows", ".rows"), ("index", "rows.safetensors"), ("shard", ".tokens-00000")):
        again = replace(config, output=str(tmp_path / f"killed-{place}"))
        assert any(name.startswith(left) for name in os.listdir(again.output)), place
        assert (Path(again.output) / "index.json").exists() == (place == "shard")
        encode_tokens(again, FakeVLA())
        assert files(again.output) == files(config.output), place


@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda path: path.write_bytes(b""), lambda path: os.truncate(path, 99)]
)
def test_the_same_command_again_mends_the_rows(config, damage):
    encode_tokens(config, FakeVLA())
    expected = files(config.output)
    damage(Path(config.output) / "rows.safetensors")
    with pytest.raises(ValueError, match=r"rows.safetensors is missing or damaged .* command again, which writes it"):
        TokenShards(config.output)
    vla = FakeVLA()
    encode_tokens(config, vla)
    assert files(config.output) == expected and not vla.calls


def test_the_same_command_again_mends_what_is_damaged(config):
    encode_tokens(config, FakeVLA())
    expected = files(config.output)
    shards = [Path(config.output) / f"tokens-0000{number}.safetensors" for number in range(5)]
    shards[1].write_bytes(expected[shards[1].name][:-1])
    changed = bytearray(expected[shards[2].name])
    changed[-1] ^= 1
    shards[2].write_bytes(changed)
    shards[4].unlink()
    for rows in ([8], [34]):
        with pytest.raises(ValueError, match=r"tokens-0000[14].safetensors is missing or damaged .*writes such shards"):
            TokenShards(config.output).batch(np.array(rows), "cpu")
    vla = FakeVLA()
    encode_tokens(config, vla)
    assert sum(vla.calls) == 8 + 8 + 3 and files(config.output) == expected
    encode_tokens(config, vla)
    assert sum(vla.calls) == 19, "nothing to do"


def test_tokens_of_another_vla_are_refused(config, tmp_path):
    write_demos(tmp_path / "demos" / "a.hdf5", "task a", demos=3, length=11, size=16)
    encode_tokens(config, FakeVLA())
    other = replace(config, output=str(tmp_path / "other"))
    encode_tokens(other, FakeVLA(stochastic=True))
    with pytest.raises(ValueError, match=r"holds tokens of 'fake' that were made of other demonstrations, with other"):
        encode_tokens(config, FakeVLA(stochastic=True))
    train = PretrainTokenConfig(
        tokens=config.output, output=str(tmp_path / "token.safetensors"), width=16, heads=2, layers=1, steps=1,
        held_out=0.25, progress=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"has tokens of the VLA 'fake' with fingerprint .*encode them with this VLA"):
        pretrain_token(train, FakeVLA(stochastic=True))
    with pytest.raises(ValueError, match=r"has the kinds \['all'\], and kinds is \['image'\].*--kinds '\[all\]'"):
        pretrain_token(replace(train, kinds=("image",)))
    token = pretrain_token(train)
    assert token.vla_fingerprint == FakeVLA().fingerprint() and token.vla_name == "fake"
    shard = Path(config.output) / "tokens-00001.safetensors"
    shard.write_bytes((Path(other.output) / shard.name).read_bytes())
    with pytest.raises(ValueError, match=r"tokens-00001.safetensors belongs to other tokens than index.json"):
        TokenShards(config.output)
    encode_tokens(config, FakeVLA())
    TokenShards(config.output)


@pytest.mark.parametrize(
    "change", [{"dtype": "float32"}, {"rows_per_shard": 4}, {"batch_size": 8}, {"max_demos": 1}, {"picture_size": 4}]
)
def test_other_settings_do_not_go_on_in_the_same_folder(config, change):
    encode_tokens(config, FakeVLA())
    before = files(config.output)
    with pytest.raises(ValueError, match="choose another output, or delete the folder"):
        encode_tokens(replace(config, **change), FakeVLA())
    assert files(config.output) == before


def test_rows_with_fewer_tokens_are_padded(config):
    """Every shard is as wide as its own rows need."""

    class Growing(FakeVLA):
        def forward(self, obs, tasks, *, seed=None):
            output = super().forward(obs, tasks, seed=seed)
            output.mask[:] = torch.arange(7) <= sum(self.calls) // 6
            output.kind = output.mask.to(torch.uint8)
            return output

    encode_tokens(config, Growing(n_tokens=7))
    widths = [load_file(Path(config.output) / f"tokens-0000{n}.safetensors")["tokens"].shape[1] for n in range(5)]
    assert widths == [2, 3, 5, 6, 6]
    found, mask = TokenShards(config.output).batch(np.array([34, 0]), "cpu")
    assert found.shape == (2, 6, 12) and mask.sum(1).tolist() == [6, 1] and not found[1, 1:].any()


def test_rollouts_that_failed_are_left_out_unless_they_are_asked_for(config, tmp_path):
    write_demos(tmp_path / "demos" / "c.hdf5", "task c", demos=2, length=5, size=16, success=False)
    everything = replace(config, successes_only=False)
    encode_tokens(everything, FakeVLA())
    rows = TokenShards(config.output).rows
    assert len(rows) == 45 and rows.success.tolist() == [True] * 35 + [False] * 10
    assert len(DemoReader(config.demos).rows) == 35


def test_errors(config, tmp_path, capsys):
    with pytest.raises(ValueError, match=r"There are no tokens in .*; write some with `rlt encode-tokens`"):
        TokenShards(tmp_path / "none")
    with pytest.raises(ValueError, match="demos is not empty and holds no tokens: choose another output"):
        encode_tokens(replace(config, output=config.demos[0]), FakeVLA())
    (tmp_path / "other" / ".hidden").mkdir(parents=True)
    with pytest.raises(ValueError, match="other is not empty and holds no tokens"):
        encode_tokens(replace(config, output=str(tmp_path / "other")), FakeVLA())
    for change, message in (
        ({"dtype": "int8"}, "dtype is 'int8'; it must be one of float16, bfloat16, float32"),
        ({"rows_per_shard": 0}, "rows_per_shard is 0; it must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(config, **change)
    encode_tokens(config, FakeVLA())
    path = Path(config.output) / "index.json"
    before = path.read_bytes()
    path.write_bytes(b"{}")
    with pytest.raises(ValueError, match=r"index.json cannot be read .*: encode the tokens again, into another folder"):
        TokenShards(config.output)
    path.write_bytes(before)
    save_file({"tokens": torch.zeros(1)}, Path(config.output) / "tokens-00000.safetensors")
    with pytest.raises(ValueError, match="belongs to other tokens"):
        TokenShards(config.output)
    assert main(["encode-tokens", "--demos", str(tmp_path / "nowhere"), "--output", str(tmp_path / "x")]) == 2
    assert "No demonstration file matches" in capsys.readouterr().err and not (tmp_path / "x").exists()


WIDE = """
import resource, sys
import numpy as np
from rlt_gym.rl_token.encode_tokens import EncodeTokensConfig, encode_tokens
from rlt_gym.rl_token.token_shards import TokenShards
from rlt_gym.testing import FakeVLA

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

vla = FakeVLA(token_dim=2048, n_tokens=64)
small = {"frame_stride": 1, "rows_per_shard": 16, "batch_size": 16, "progress": False}
config = EncodeTokensConfig([sys.argv[1]], sys.argv[2], **small)
encode_tokens(EncodeTokensConfig([sys.argv[1]], sys.argv[2] + "0", max_demos=1, **small), vla)
tokens = TokenShards(sys.argv[2] + "0")
tokens.batch(np.arange(16), "cpu")
before = peak()
encode_tokens(config, vla)
tokens = TokenShards(sys.argv[2])
for part in tokens.batches(np.random.default_rng(0).permutation(len(tokens)), most=16):
    tokens.batch(part, "cpu")
print(len(tokens) * 64 * 2048 * 2 / 2**20, peak() - before)
"""


def test_memory_does_not_grow_with_the_number_of_rows(tmp_path):
    """100 MB of tokens, as 25 observations of a VLA with seven billion parameters have."""
    write_demos(tmp_path / "demos" / "a.hdf5", "a", demos=25, length=16, size=16)
    code = f"import sys; sys.path[:0] = {sys.path!r}\n{WIDE}"
    command = [sys.executable, "-c", code, str(tmp_path / "demos"), str(tmp_path / "tokens")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    size, grown = map(float, done.stdout.split())
    assert size == 100 and grown < 30


def test_the_benchmark_prints_the_size_beside_its_formula(tmp_path):
    words = ["tokens", "--folder", tmp_path, "--json", tmp_path / "n.json"]
    small = "--rows 300 --tokens 20 --width 32 --rows-per-shard 70 --batches 3".split()
    done = run_benchmark(*words, *small)
    assert done.returncode == 0 and "formula" in done.stdout, done.stderr
    found = json.loads((tmp_path / "n.json").read_text())
    assert found["formula_gb"] == 300 * 20 * 32 * 2 / 1e9 and [path.name for path in tmp_path.iterdir()] == ["n.json"]
    assert 0 < found["disk_gb"] - found["formula_gb"] - 300 * (20 + 64 * 64 * 3) / 1e9 < 1e-4, (
        "masks and pictures beside"
    )
    assert found["arguments"]["rows_per_shard"] == 70 and "json" not in found["arguments"]
    refused = run_benchmark(*words, "--rows", "10000000")
    assert refused.returncode == 2 and "35328 GB are needed" in refused.stderr
