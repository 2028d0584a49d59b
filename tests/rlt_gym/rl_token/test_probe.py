"""``rlt probe``: what linear models read, against constructed answers; limits; the page."""

import base64
import io
import json
import re
import shutil
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image
from vla_helpers import SHIPPED_VLAS, tiny_vla, write_demos

from rlt_gym.data.demo_set import DemoRows
from rlt_gym.data.libero_hdf5 import ROBOT
from rlt_gym.rl_token.encode_tokens import EncodeTokensConfig, encode_tokens
from rlt_gym.rl_token.io import read_rl_token, shipped_path
from rlt_gym.rl_token.pretrain import PretrainTokenConfig, pretrain_token
from rlt_gym.rl_token.probe.command import ProbeConfig, choose_rows, probe
from rlt_gym.rl_token.probe.gates import GATES, failures
from rlt_gym.rl_token.probe.page import _sheet
from rlt_gym.rl_token.probe.reports import Verdict, judge
from rlt_gym.testing import FakeVLA
from rlt_gym.vla.registry import load_vla
from rlt_sb3.cli.main import main

pytest.importorskip("sklearn")
from rlt_gym.rl_token.probe import readouts
from rlt_gym.rl_token.probe.geometry import maps, silhouettes, smoothness, spectrum
from rlt_gym.rl_token.probe.readouts import Target, read, spread, targets


def demo_rows(episodes=12, length=20, tasks=2, failures=0, objects=2, seed=0):
    """Episodes in which object 1 begins anywhere and moves from the 40th control step on; object 0 stands still."""
    rng = np.random.default_rng(seed)
    demo = np.repeat(np.arange(episodes), length)
    step = np.tile(4 * np.arange(length), episodes)
    positions = np.zeros((episodes * length, objects, 3), np.float32)
    starts = rng.normal(scale=0.01, size=(episodes, 1, 2))
    moved = np.maximum(0, step.reshape(episodes, length) - 40)[..., None] * 0.005
    positions[:, -1, :2] = (starts + moved).reshape(-1, 2)
    task = demo % tasks
    positions[:, -1, 0] += task  # another place in another task
    actions = np.zeros((len(demo), 7), np.float32)
    actions[:, 6] = np.where(step >= 40, 1, -1)
    return DemoRows(
        proprio=rng.normal(size=(len(demo), 8)).astype(np.float32), actions=actions, action_row=np.arange(len(demo)),
        action_end=(demo + 1) * length, task=task, demo=demo, step=step, success=demo >= failures,
        intervention=np.zeros(len(demo), bool), object_positions=positions,
        instructions=[f"task {i}" for i in range(tasks)], files={"a": episodes},
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------- readouts


def test_what_is_there_is_read_and_what_is_not_is_not():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(20), 15)
    x = rng.normal(size=(300, 6))
    y = x @ rng.normal(size=(6, 2)) + 3.0
    target = Target("y", np.arange(300), y, centimeters=True)
    found = read(target, x, groups)
    assert found["score"] > 0.999 and found["error"] < 1 and found["low"] <= found["score"] <= found["high"]
    assert -0.2 < read(target, x, groups, seed=0)["score"] < 0.05
    assert spread(target) == pytest.approx(100 * np.sqrt(y.var(axis=0).mean()))
    classes = Target("c", np.arange(300), (y[:, 0] > 3).astype(int))
    assert read(classes, x, groups)["score"] > 0.95 and spread(classes) is None
    assert read(classes, x, groups, seed=0)["score"] == pytest.approx(0.5, abs=0.1)
    assert "error" not in read(classes, x, groups)


def test_a_fold_holds_out_whole_episodes():
    """Labels and features are an episode's own, so neighbors would give them away."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(30), 10)
    x = np.repeat(rng.normal(size=(30, 25)), 10, axis=0) + 0.01 * rng.normal(size=(300, 25))
    y = np.repeat(rng.normal(size=(30, 1)), 10, axis=0)
    assert read(Target("y", np.arange(300), y), x, groups)["score"] < 0.1
    assert read(Target("y", np.arange(300), y), x, np.arange(300))["score"] > 0.6, "as it would be without groups"


def test_targets_of_episodes():
    rows = demo_rows(failures=6)
    found, left = targets(rows, ROBOT)
    by_name = {target.name: target for target in found}
    assert list(by_name) == [
        "phase of the episode",
        "gripper closes",
        "task",
        "success",
        "object positions",
        "placement",
    ]
    assert not left
    phase = by_name["phase of the episode"].values[:, 0]
    assert phase.min() == 0 and phase.max() == 1 and phase[10] == pytest.approx(40 / 76)
    assert by_name["gripper closes"].values.tolist() == [int(step >= 40) for step in rows.step]
    assert by_name["object positions"].values.shape[1] == 2, "only what moves: one object, horizontally"
    placement = by_name["placement"]
    # it has moved 1 cm at step 44 (0.005 * 4 * sqrt(2) > 0.01), and 16 control steps before are left out
    assert sorted(set(rows.step[placement.rows])) == list(range(0, 29, 4))
    starts = rows.object_positions[::20, 1, :2]
    for task in (0, 1):
        centered = starts[rows.task[::20] == task] - starts[rows.task[::20] == task].mean(axis=0)
        part = rows.task[placement.rows] == task
        np.testing.assert_allclose(placement.values[part], np.repeat(centered, 8, axis=0), atol=1e-6)


def test_targets_that_the_data_do_not_have():
    rows = demo_rows(tasks=1, failures=2)
    _, left = targets(rows, ROBOT)
    assert left == {"task": "the data have one class only", "success": "a class has 2 episodes, and 5 are needed"}
    rows.object_positions[:] = np.nan
    found, left = targets(rows, ROBOT)
    assert "placement" in left and left["object positions"] == "the data have no object positions"
    assert [target.name for target in found] == ["phase of the episode", "gripper closes"]
    still = demo_rows(tasks=1)
    still.object_positions[:] = still.object_positions[:1]
    found, left = targets(still, ROBOT)
    assert "no object is moved" in left["placement"]


def test_an_object_that_moves_at_once_has_no_placement():
    rows = demo_rows(tasks=1)
    rows.object_positions[rows.step > 0, 1] += 0.3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, left = targets(rows, ROBOT)
    assert "no object is moved" in left["placement"]


def test_an_object_that_moves_in_few_episodes_has_no_placement():
    rows = demo_rows(tasks=1)
    rows.object_positions[rows.demo >= 3] = rows.object_positions[:1]
    _, left = targets(rows, ROBOT)
    assert left["placement"] == "an object is moved in 3 episodes, and 5 are needed"


# ------------------------------------------------------------------------------------------------------- geometry


def test_spectrum():
    rng = np.random.default_rng(0)
    found = spectrum(rng.normal(size=(20000, 8)))
    assert found["effective_rank"] == pytest.approx(8, abs=0.05) and sum(found["shares"]) == pytest.approx(1)
    line = spectrum(rng.normal(size=(500, 1)) @ rng.normal(size=(1, 20)))
    assert line["effective_rank"] == pytest.approx(1, abs=1e-3) and line["top_10"] == pytest.approx(1)


def test_smoothness():
    rows = demo_rows()
    walk = np.stack([rows.step, np.zeros(len(rows))], axis=1).astype(float)
    found = smoothness(walk, rows)
    assert found["jump"] == pytest.approx(4 / (4 * 20 / 3), rel=0.1), "neighbors are 4 apart, others a third of 80"
    assert found["cosine"] > 0.8
    noise = smoothness(np.random.default_rng(0).normal(size=(len(rows), 30)), rows)
    assert noise["jump"] == pytest.approx(1, abs=0.05) and abs(noise["cosine"]) < 0.1


def test_silhouettes_and_maps():
    rows = demo_rows(failures=6)
    far = rows.task[:, None] * np.array([[50.0, 0.0, 0.0]]) + np.random.default_rng(0).normal(size=(len(rows), 3))
    found = silhouettes(far, rows)
    assert found["task"] > 0.9 and abs(found["success"]) < 0.1
    assert set(silhouettes(far, demo_rows(tasks=1))) == set()
    for name, xy in maps(far).items():
        assert xy.shape == (len(rows), 2) and xy.min() == 0 and xy.max() == 1, name
        first, second = (xy[rows.task == task] for task in (0, 1))
        assert np.linalg.norm(first.mean(0) - second.mean(0)) > 0.4, f"{name} shows the tasks apart"


def test_whole_episodes_are_chosen():
    rows = demo_rows()
    assert len(choose_rows(rows, 10**6)) == 240
    chosen = choose_rows(rows, 100)
    assert len(chosen) == 100 and rows.demo[chosen].tolist() == np.repeat([0, 3, 6, 8, 11], 20).tolist()
    with pytest.raises(ValueError, match="one episode only"):
        choose_rows(demo_rows(episodes=1, tasks=1), 100)


def test_rows_are_taken():
    rows = demo_rows()
    part = rows.take(np.array([5, 200]))
    assert len(part) == 2 and part.demo.tolist() == [0, 10] and len(part.actions) == 240
    np.testing.assert_array_equal(part.object_positions, rows.object_positions[[5, 200]])


# ---------------------------------------------------------------------------------------------------------- limits


def test_every_limit_is_kept_or_not():
    good = {gate.number: gate.limit for gate in GATES}
    assert failures(good) == []
    for gate in GATES:
        bad = good | {gate.number: gate.limit + (-0.01 if gate.above else 0.01)}
        (sentence,) = failures(bad)
        assert gate.number in sentence and gate.means in sentence
        assert failures(good | {gate.number: float("nan")}), "not a number is no pass"
    assert failures({}) == []


# ------------------------------------------------------------------------------------------------------ the command


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A token trained on demonstrations, one trained on the same with their pixels in a random order, and tokens."""
    folder = tmp_path_factory.mktemp("probe")
    for name in ("demos", "pixels"):
        write_demos(folder / name / "a.hdf5", "go", demos=8, length=20, size=32)
        write_demos(folder / name / "b.hdf5", "stop", demos=8, length=20, size=32, seed=1)
    rng = np.random.default_rng(0)
    for path in sorted(folder.glob("*/*.hdf5")):
        with h5py.File(path, "r+") as file:
            for demo in file["data"].values():  # a clock in the picture: a bar that grows
                for key in ("agentview_rgb", "eye_in_hand_rgb"):
                    for step in range(20):
                        demo["obs"][key][step, :8, : step + 4] = 255
    for path in sorted((folder / "pixels").iterdir()):
        with h5py.File(path, "r+") as file:
            for demo in file["data"].values():
                for key in ("agentview_rgb", "eye_in_hand_rgb"):
                    pictures = demo["obs"][key][:]
                    demo["obs"][key][:] = rng.permuted(pictures.reshape(len(pictures), -1), axis=1).reshape(
                        pictures.shape
                    )
    common = {"steps": 400, "frame_stride": 1, "learning_rate": 3e-3, "warmup_steps": 10, "save_every": 0}
    for name in ("demos", "pixels"):
        config = PretrainTokenConfig(
            demos=[str(folder / name)], output=str(folder / f"{name}.safetensors"), progress=False, **common
        )
        pretrain_token(config, tiny_vla())
    encode_tokens(
        EncodeTokensConfig([str(folder / "demos")], str(folder / "tokens"), frame_stride=1, progress=False), tiny_vla()
    )
    return folder


@pytest.fixture
def few_fits(monkeypatch):
    """The search for the strength of regularization is most of a probe's time, and tested above."""
    monkeypatch.setattr(readouts, "ALPHAS", (1.0, 1e2))
    monkeypatch.setattr(readouts, "INNER_FOLDS", 2)


@pytest.mark.usefixtures("few_fits")
def test_a_good_token_keeps_all_limits_and_has_a_page(trained, tmp_path, capsys):
    config = ProbeConfig(
        str(trained / "demos.safetensors"), tokens=str(trained / "tokens"), output=str(tmp_path / "p.html")
    )
    assert probe(config) == 0
    assert "all limits kept" in capsys.readouterr().out
    result = json.loads((tmp_path / "p.json").read_text())
    assert result["failures"] == [] and result["observations"] == 320 and result["episodes"] == 16
    assert set(result["readouts"]) == {"phase of the episode", "gripper closes", "task", "object positions"}
    for found in result["readouts"].values():
        scores = found["scores"]
        assert set(scores) == {
            "z_rl", "proprio", "z_rl and proprio", "mean of the tokens", "z_rl, labels in random order"
        }  # fmt: skip
    for name in ("phase of the episode", "task"):
        scores = result["readouts"][name]["scores"]
        assert scores["z_rl"]["score"] > scores["z_rl, labels in random order"]["score"] + 0.1
    assert result["left_out"] == {
        "success": "the data have one class only",
        "placement": "no object is moved, or all begin at the same place",
    }
    page = (tmp_path / "p.html").read_text()
    assert "It keeps all limits." in page and "http" not in page.replace("http://www.w3.org/2000/svg", "")
    data = json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page).group(1))
    assert len(data["points"]) == 320 and set(data["points"][0]["maps"]) == {"PCA", "t-SNE"}
    assert page.count("layer 2") == 5 and "share of the attention" in page, "frames of two tasks and cameras, the table"
    assert "go, wrist" in page and "of wrist, over its mean" in page
    looks = result["attention"]
    assert set(looks["shares"]) > {"agentview", "wrist", "state"}
    assert {camera: len(peaks) for camera, peaks in looks["peaks"].items()} == {"agentview": 3, "wrist": 3}
    assert data["tasks"] == ["go", "stop"] and data["points"][25]["episode"] == 1 and data["points"][25]["step"] == 5


def test_the_sheet_of_pictures_is_small():
    """Picture 41 is the second one of the second line; larger pictures than 40 pixels are reduced, smaller ones not."""
    pictures = np.zeros((42, 64, 64, 3), np.uint8)
    pictures[41] = [250, 20, 20]
    for given, edge in ((pictures, 40), (pictures[:, :24, :24], 24)):
        jpeg, size = _sheet(given)
        sheet = np.asarray(Image.open(io.BytesIO(base64.b64decode(jpeg)))).astype(int)
        assert size == edge and sheet.shape == (2 * edge, 40 * edge, 3)
        assert np.abs(sheet[edge + edge // 2, edge + edge // 2] - [250, 20, 20]).max() < 10
        assert sheet[edge // 2, edge // 2].max() < 10


@pytest.mark.usefixtures("few_fits")
def test_a_token_of_shuffled_pictures_fails(trained, tmp_path, capsys):
    """The page says which limits. It lies beside the token, where its report counts instead of the training's."""
    token = Path(shutil.copy(trained / "pixels.safetensors", tmp_path))
    shutil.copy(trained / "pixels.json", tmp_path)
    assert judge(token).report == tmp_path / "pixels.json"
    assert probe(ProbeConfig(str(token), tokens=str(trained / "tokens"))) == 1
    out = capsys.readouterr().out
    assert "FAILS: explained_by_z_only is" in out and "less than half of the tokens' variance" in out
    assert "It does not keep" in (tmp_path / "pixels_probe.html").read_text()
    verdict = judge(token)
    assert verdict.report == tmp_path / "pixels_probe.json" and verdict.ignored == []
    assert any(failure.startswith("explained_by_z_only is") for failure in verdict.failures)


@pytest.mark.usefixtures("few_fits")
def test_probe_from_the_command_line_on_demonstrations(trained, tmp_path, monkeypatch):
    tiny_vla().save(tmp_path / "vla.safetensors")
    words = ["probe", str(trained / "demos.safetensors"), "--demos", str(trained / "demos"), "--frame_stride", "2"]
    words += ["--vla", str(tmp_path / "vla.safetensors"), "--output", str(tmp_path / "p.html"), "--progress", "false"]
    assert main(words) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.html", "p.json", "vla.json", "vla.safetensors"]


def test_errors(trained, tmp_path, monkeypatch):
    token, tokens = str(trained / "demos.safetensors"), str(trained / "tokens")
    for arguments, message in (
        ({}, "Give --demos FILES or --tokens FOLDER .* got neither"),
        ({"tokens": tokens, "demos": ["x"]}, "Give --demos FILES or --tokens FOLDER .* got both"),
        ({"demos": ["x"]}, "--demos needs the VLA .* give --vla NAME"),
        ({"tokens": tokens, "output": "p.txt"}, "must end in .html"),
        ({"tokens": tokens, "max_rows": 10}, "max_rows is 10; it must be at least 100"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            ProbeConfig(token, **arguments)
    with pytest.raises(ValueError, match="'auto' is the shipped one of a VLA: give --vla NAME"):
        ProbeConfig("auto", tokens=tokens)
    config = ProbeConfig(token, tokens=str(tmp_path / "fake"), output=str(tmp_path / "p.html"), progress=False)
    encode = EncodeTokensConfig([str(trained / "demos")], config.tokens, frame_stride=4, progress=False)
    encode_tokens(encode, FakeVLA(token_dim=32))
    with pytest.raises(
        ValueError, match=r"belongs to the VLA 'mini' .*the tokens are of 'fake' .*encode them with the"
    ):
        probe(config)
    encode_tokens(replace(encode, output=str(tmp_path / "image"), kinds=("image",)), tiny_vla())
    with pytest.raises(ValueError, match=r"reads the kinds \['all'\], the tokens are \['image'\]"):
        probe(replace(config, tokens=str(tmp_path / "image")))
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r"needs scikit-learn: pip install 'rlt\[probe\]'"):
        probe(config)
    assert not (tmp_path / "p.html").exists()


def test_a_token_that_is_missing_is_named_before_all_else(tmp_path, capsys):
    missing = str(tmp_path / "nowhere.safetensors")
    for more in ([], ["--demos", "nowhere"], ["--tokens", "nowhere", "--max_rows", "3"]):
        assert main(["probe", missing, *more]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"rlt probe: There is no RL token {missing}: give a file of") and error.count("\n") == 1


# ------------------------------------------------------------------------------------------------------ its report


@pytest.mark.parametrize("name", SHIPPED_VLAS)
def test_the_shipped_tokens_keep_the_limits_of_their_reports(name):
    vla = load_vla(name)
    verdict = judge(shipped_path(vla))
    assert verdict.report == shipped_path(vla).with_suffix(".json")
    assert verdict.failures == [] and verdict.ignored == []


def test_the_report_of_the_training(trained, tmp_path):
    for name in ("demos", "demos_last"):
        for suffix in (".json", ".safetensors"):
            shutil.copy(trained / f"{name}{suffix}", tmp_path)
        content = json.loads((tmp_path / f"{name}.json").read_text())
        measured = content["held_out"]
        assert content["fingerprint"] == read_rl_token(tmp_path / f"{name}.safetensors").fingerprint()
        assert measured["shuffled_gap"] == pytest.approx(measured["L_ro_z_only_shuffled"] / measured["L_ro_z_only"])
        verdict = judge(tmp_path / f"{name}.safetensors")
        assert verdict == Verdict(tmp_path / f"{name}.json", failures(measured), [])
    token = tmp_path / "demos.safetensors"
    shutil.copy(trained / "pixels.safetensors", token)  # trained anew under the old name
    (sentence,) = judge(token).ignored
    assert re.search(r"demos\.json is of an RL token with fingerprint .*, and demos.safetensors has", sentence)
    assert judge(token).report is None
    assert ProbeConfig("auto", tokens="x", vla="mini").output == "probe.html"


def test_reports_that_cannot_be_read(trained, tmp_path):
    token = Path(shutil.copy(trained / "demos.safetensors", tmp_path))
    assert judge(token) == Verdict(None, [], [])
    for text in ("{", "[]", "{}", '{"held_out": {"explained_by_z_only": "much"}}', '{"held_out": 3}'):
        token.with_suffix(".json").write_text(text)
        (sentence,) = judge(token).ignored
        assert "demos.json cannot be read as the report of an RL token" in sentence, text
    token.with_suffix(".json").write_text('{"held_out": {"explained_by_z_only": 0.1}}')
    assert "is of an RL token without a fingerprint" in judge(token).ignored[0]
    print_of = json.dumps(read_rl_token(token).fingerprint())
    token.with_suffix(".json").write_text(f'{{"fingerprint": {print_of}, "held_out": {{"explained_by_z_only": NaN}}}}')
    assert judge(token).failures, "not a number is no pass"
