"""A reward model from recorded episodes: rows and labels against lists by hand, figures against a count, refusals."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pyarrow.parquet as pq
import pytest
from lerobot_folder import write, write_hdf5
from offline_helpers import CountingVLA
from scipy.stats import binomtest
from vla_helpers import tiny_vla

from rlt_gym.data.libero_hdf5 import DemoWriter
from rlt_gym.reward.labels import recorded_features, recorded_labels
from rlt_gym.reward.model import load_reward_model
from rlt_gym.reward.training import TrainRewardConfig, train_reward
from rlt_gym.vla.batches import run_vla
from rlt_sb3.cli.main import parse

#: As few as may be, successes and failures in turn.
GOOD = 5 * [(3, True, None), (3, False, None)]


def write_episodes(path, episodes, size=8, instruction="do it"):
    """
    Write a file as ``rlt collect --policy vla`` does; states have the control step and the episode's number.

    ``episodes`` are (length, success, rewards or None); success None: no such attribute, as in files of others.
    """
    with DemoWriter(path, instruction) as writer:
        for number, (length, success, _) in enumerate(episodes):
            state = np.zeros((length, 8), np.float32)
            state[:, 0], state[:, 1] = np.arange(length), number
            frames = np.zeros((length, size, size, 3), np.uint8)
            frames[:] = (10 * number + np.arange(length))[:, None, None, None]
            labels = {"success": bool(success), "intervention": np.zeros(length, bool)}
            writer.add(np.zeros((length, 7), np.float32), state, agentview=frames, wrist=frames, **labels)
    with h5py.File(path, "r+") as file:
        for number, (_, success, rewards) in enumerate(episodes):
            group = file[f"data/demo_{number}"]
            if success is None:
                del group.attrs["success"]
            if rewards is not None:
                group["rewards"] = np.array(rewards, np.float32)
    return path


def rows_of(config):
    """(state's step, state's number, brightness, whether it shows success, number of the episode) of each row."""
    labels, features = recorded_labels(config), recorded_features(config, CountingVLA())
    assert features.dtype == np.float32 and features.shape == (len(labels.reached), 32) and not features[:, 16:].any()
    seen = features[:, [0, 1, 8]].astype(int).tolist()
    return [(*row, bool(r), e) for row, r, e in zip(seen, labels.reached, labels.episode.tolist(), strict=True)]


def test_rows_and_labels(tmp_path):
    a = [
        (7, True, None), (6, False, None),  # as `rlt collect` labels them
        (4, None, (0, 0, 0, 1)), (4, None, (0, 0, 0, 0)),  # as LIBERO's own files do
        (7, None, (0, 0, 1, 1, 0, 0, 0)),  # reached and lost
        (8, True, (0, 0, 0, 1, 1, 1, 1, 1)),  # the recording goes on after success
    ]  # fmt: skip
    b = [
        (5, True, (0, 0, 0, 0, 0)),  # a recorder that leaves rewards at 0
        (5, False, (-0.3, -0.2, -0.1, 0.5, 1)),  # shaped rewards say nothing
        (1, True, None), (2, False, (0, 0)),
    ]  # fmt: skip
    files = [str(write_episodes(tmp_path / f"{name}.hdf5", rows)) for name, rows in (("b", b), ("a", a))]
    config = TrainRewardConfig(files, frame_stride=3, batch_size=2, progress=False)
    by_hand = [  # control step, number in the file, brightness, success, episode
        (0, 0, 0, False, 0), (3, 0, 3, False, 0), (6, 0, 6, True, 0),
        (2, 1, 12, False, 1), (5, 1, 15, False, 1),
        (0, 2, 20, False, 2), (3, 2, 23, True, 2),
        (0, 3, 30, False, 3), (3, 3, 33, False, 3),
        (0, 4, 40, False, 4), (3, 4, 43, True, 4), (6, 4, 46, False, 4),
        (1, 5, 51, False, 5), (4, 5, 54, True, 5), (7, 5, 57, True, 5),
        (1, 0, 1, False, 6), (4, 0, 4, True, 6),
        (1, 1, 11, False, 7), (4, 1, 14, False, 7),
        (0, 2, 20, True, 8),
        (1, 3, 31, False, 9),
    ]  # fmt: skip
    assert rows_of(config) == by_hand
    more = rows_of(TrainRewardConfig(files, frame_stride=3, success_frames=4, progress=False))
    also = {(3, 0, 3, 0), (0, 2, 20, 2), (1, 0, 1, 6)}  # within the last four of a success
    assert more == [(*row, reached or (*row, episode) in also, episode) for *row, reached, episode in by_hand]
    all_rows = rows_of(TrainRewardConfig(files, frame_stride=1, progress=False))
    assert len(all_rows) == 36 + 13 and [row for row in all_rows if row[4] == 4] == [
        (step, 4, 40 + step, step in (3, 4), 4) for step in range(7)  # after the actions 2 and 3
    ]  # fmt: skip


@pytest.mark.parametrize("version", [2, 3])
def test_lerobot_datasets(tmp_path, version):
    """By ``next.success`` or ``next.reward``, with the rows of the same episodes in HDF5."""
    folders = [write(tmp_path / f"set{number}", version, success=False) for number in range(4)]
    for path in folders[1].glob("data/*/*.parquet"):
        table = pq.read_table(path)
        pq.write_table(
            table.rename_columns([name.replace("next.success", "next.reward") for name in table.column_names]), path
        )
    config = TrainRewardConfig([str(folder) for folder in folders], frame_stride=5, progress=False)
    rows = rows_of(config)
    by_hand = [(0, 0, False), (5, 0, False), (10, 0, True), (2, 2, False), (7, 2, False), (2, 1, True)]
    assert [(step, demo, reached) for step, demo, _, reached, _ in rows] == 4 * by_hand
    for number in range(4):
        (tmp_path / f"files{number}").mkdir()
        write_hdf5(tmp_path / f"files{number}")
    files = [str(tmp_path / f"files{number}") for number in range(4)]
    assert rows_of(TrainRewardConfig(files, frame_stride=5, progress=False)) == rows
    unlabeled = str(write(tmp_path / "unlabeled", version))
    with pytest.raises(
        ValueError, match=r"episode_0 of unlabeled does not say .*: give it a column next\.success or next\.reward"
    ):
        recorded_labels(TrainRewardConfig([unlabeled]))


def test_from_files_to_a_reward(tmp_path, monkeypatch):
    """Success is bright; the figures of the held-out episodes are those of a count, and no simulator starts."""
    monkeypatch.setattr("gymnasium.make_vec", None)
    tiny_vla().save(tmp_path / "vla.safetensors")
    held_out = np.random.default_rng(0).permutation(30)[24:]
    deceives = next(number for number in held_out if number % 3 == 0)  # a failure that looks like a success
    rng = np.random.default_rng(0)
    with DemoWriter(tmp_path / "a.hdf5", "do it") as writer:
        for number in range(30):
            success, length = number % 3 > 0, 9 + number % 4
            frames = rng.integers(0, 60, (length, 128, 128, 3), dtype=np.uint8)
            frames[-2:] += np.uint8(120 * (success or number == deceives))
            state = rng.normal(size=(length, 8)).astype(np.float32)
            writer.add(np.zeros((length, 7), np.float32), state, success=success, agentview=frames, wrist=frames)
    config = TrainRewardConfig(
        [str(tmp_path / "*.hdf5")], vla=str(tmp_path / "vla.safetensors"), frame_stride=1, success_frames=2,
        weight_decay=0.0, output=str(tmp_path / "reward.safetensors"), progress=False,
    )  # fmt: skip
    path = train_reward(config)
    vla = tiny_vla()
    model = load_reward_model(path, vla)
    said = json.loads(path.with_suffix(".json").read_text())
    assert said["threshold"] == model.config.threshold and said["config"]["demos"] == config.demos
    wrong = failures = missed = successes = 0
    with h5py.File(tmp_path / "a.hdf5") as file:
        for number in held_out:
            obs = file[f"data/demo_{number}/obs"]
            seen = {
                "agentview": obs["agentview_rgb"][:],
                "wrist": obs["eye_in_hand_rgb"][:],
                "state": np.concatenate([obs["ee_states"][:], obs["gripper_states"][:]], axis=1),
            }
            verdicts = model.verdicts(run_vla(vla, seen, ["do it"] * len(seen["state"])))
            solved = np.arange(len(verdicts)) >= len(verdicts) - 2 * (number % 3 > 0)
            wrong, failures = wrong + int((verdicts & ~solved).sum()), failures + int((~solved).sum())
            missed, successes = missed + int((~verdicts & solved).sum()), successes + int(solved.sum())
    low, high = binomtest(wrong, failures).proportion_ci(method="wilson")
    assert said["held_out"]["false_positive_chunks"] == {"count": wrong, "of": failures, "wilson_95": [low, high]}
    assert (said["held_out"]["missed_chunks"]["count"], said["held_out"]["missed_chunks"]["of"]) == (missed, successes)
    assert (wrong, missed) == (2, 0) and successes > 2  # bright pictures are seen


def test_the_vla_reads_frames_of_the_size_of_practice(tmp_path):
    """Larger ones are average-pooled to what the environment would draw for it."""
    path = write_episodes(tmp_path / "a.hdf5", GOOD)
    with h5py.File(path, "r+") as file:
        file["data/demo_1/obs/agentview_rgb"][2, :2, :2] = np.array([[10, 20], [30, 60]])[..., None]
    vla = CountingVLA()
    config = TrainRewardConfig([str(path)], frame_stride=3, progress=False)
    assert recorded_features(config, vla)[:3, 8].tolist() == [2, 10, 22]
    vla.spec = replace(vla.spec, frame_size=4)
    assert recorded_features(config, vla)[:3, 8].tolist() == [2, 30, 22]


@pytest.mark.parametrize(
    ("episodes", "message"),
    [
        (GOOD[:9], r"demos has 9 episodes; it must have at least 10"),
        ([*GOOD, (3, None, None)], r"demo_10 of a\.hdf5 does not say whether it is .* give it the attribute success"),
        ([*GOOD, (3, None, (0, 0, 2))], r"demo_10 of a\.hdf5 does not say .* rewards of 0 and 1, or leave the"),
        ([*GOOD, (3, False, (0, 1, 0))], r"demo_10 of a\.hdf5 has success=False and rewards of 1: correct one of them"),
        (10 * GOOD[:1], r"All 10 episodes of demos are successes: give failures too; `rlt collect --policy vla`"),
        (10 * GOOD[1:2], r"All 10 episodes of demos are failures: give successes too"),
        ([*GOOD[:1], *(19 * GOOD[1:2])], r"and none of them show the goal: give more successes and failures"),
    ],
)  # fmt: skip
def test_labels_that_do_not_suffice(tmp_path, monkeypatch, episodes, message):
    """They are refused before the VLA is loaded."""
    monkeypatch.setattr("rlt_gym.reward.training.load_vla", None)
    write_episodes(tmp_path / "a.hdf5", episodes)
    with pytest.raises(ValueError, match=message) as error:
        train_reward(TrainRewardConfig([str(tmp_path)], output=str(tmp_path / "r.safetensors")))
    assert "\n" not in str(error.value)


def test_a_text_is_no_label(tmp_path):
    path = write_episodes(tmp_path / "a.hdf5", GOOD)
    with h5py.File(path, "r+") as file:
        file["data/demo_3"].attrs["success"] = "False"
    with pytest.raises(ValueError, match=r"demo_3 of .*a\.hdf5 has the attribute success='False', which is neither"):
        recorded_labels(TrainRewardConfig([str(path)]))


def test_pictures_that_do_not_fit(tmp_path, monkeypatch):
    """They are refused before the VLA reads the first one."""
    monkeypatch.setattr("rlt_gym.reward.labels.run_vla", None)
    vla = tiny_vla()
    config = TrainRewardConfig([str(write_episodes(tmp_path / "a.hdf5", GOOD, 64))], progress=False)
    with pytest.raises(ValueError, match=r"demo_0 of a\.hdf5 has frames of 64 x 64 .* edge of 128 or a multiple of it"):
        recorded_features(config, vla)
    other = CountingVLA()
    other.spec = replace(other.spec, cameras=("front",))
    with pytest.raises(
        ValueError, match=r"needs the cameras \['front'\], and the robot .* has \['agentview', 'wrist'\]"
    ):
        recorded_features(config, other)
    path = write_episodes(tmp_path / "b.hdf5", GOOD, 128)
    with h5py.File(path, "r+") as file:
        del file["data/demo_7/obs/agentview_rgb"]
        file["data/demo_7/obs/agentview_rgb"] = np.zeros((3, 128, 256, 3), np.uint8)
    config = TrainRewardConfig([str(path)], progress=False)
    with pytest.raises(ValueError, match=r"demo_7 of b\.hdf5 has frames of 128 x 256 pixels"):
        recorded_features(config, vla)
    with h5py.File(path, "r+") as file:
        for number in range(10):
            del file[f"data/demo_{number}/obs/eye_in_hand_rgb"]
        del file["data/demo_7/obs/agentview_rgb"]
        file["data/demo_7/obs/agentview_rgb"] = np.zeros((3, 128, 128, 3), np.uint8)
    with pytest.raises(ValueError, match=r"demo_0 of .*b\.hdf5 has no array obs/eye_in_hand_rgb"):
        recorded_features(config, vla)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"demos": ["x"], "episodes": 50, "suite": "libero_goal"}, r"suite, episodes cannot be used with demos: leave"),
        ({"demos": ["x"], "env_kwargs": {"assets": "embedded"}}, r"env_kwargs cannot be used with demos"),
        ({"success_frames": 5}, r"success_frames cannot be used without demos"),
        ({"demos": ["x"], "frame_stride": 0}, r"frame_stride is 0; it must be at least 1"),
    ],
)
def test_settings_that_do_not_fit(wrong, message):
    with pytest.raises(ValueError, match=message):
        TrainRewardConfig(**wrong)


def test_commands_of_the_page():
    page = (Path(__file__).parents[3] / "docs/guide/reward.md").read_text()
    lines = [shlex.split(line)[1:] for line in re.findall(r"^rlt .*$", page, flags=re.M)]
    found = [(command, parse(command, words)) for command, *words in lines]
    assert [command for command, _ in found] == ["train-reward", "train", "collect", "train-reward"]
    collected, trained = found[2][1], found[3][1]
    assert trained.demos == [collected.out] and collected.policy == "vla" and not collected.successes_only
