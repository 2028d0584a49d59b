"""Rollouts of a VLA as data, against a replay of their actions and against the VLA itself."""

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from vla_helpers import TINY

from rlt_gym.data.demo_set import DemoReader
from rlt_gym.data.libero_hdf5 import DemoFile
from rlt_gym.libero.collect import CollectConfig, collect, collect_rollouts
from rlt_gym.libero.rollouts import play_vla
from rlt_gym.libero.suites.tasks import get_tasks
from rlt_gym.libero.vector_env import LiberoVectorEnv
from rlt_gym.rl_token.encode_tokens import EncodeTokensConfig, encode_tokens
from rlt_gym.rl_token.env import RLTokenVectorEnv
from rlt_gym.rl_token.io import load_rl_token
from rlt_gym.rl_token.pretrain import PretrainTokenConfig, pretrain_token
from rlt_gym.rl_token.token_shards import TokenShards
from rlt_gym.testing import FakeLiberoVectorEnv, FakeVLA
from rlt_gym.vla import load_vla
from rlt_gym.vla.mini.training import TrainVLAConfig, train_vla

STEPS = 19  # two chunks of 8, and one that the horizon cuts


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    config = CollectConfig(
        policy="vla", task_ids=[8], demos=2, max_episode_steps=STEPS, assets="embedded", seed=3, progress=False,
        out=str(tmp_path_factory.mktemp("rollouts")), intervention="intervention_hooks:EveryThird",
    )  # fmt: skip
    (path,) = collect(config)
    return path


@pytest.mark.sim
def test_the_files_say_what_they_are(path):
    with DemoFile(path) as file:
        assert path.name == "libero_goal_8.hdf5" and file.instruction == "put the bowl on the plate"
        vla = load_vla("mini")
        expected = {
            "policy": "vla", "vla": "mini", "suite": "libero_goal", "task_id": 8, "assets": "embedded",
            "render": "fast", "image_size": 128, "chunk_length": 8, "max_episode_steps": STEPS,
            "intervention": "intervention_hooks:EveryThird",
        }  # fmt: skip
        assert {key: file.env_args[key] for key in expected} == expected
        assert file.env_args["fingerprint"]["vla"] == vla.fingerprint()
        assert sorted(demo.attrs["init_index"] for demo in file) == [8000, 8001]
        assert [(demo.attrs["success"], len(demo)) for demo in file] == [(False, STEPS)] * 2


@pytest.mark.sim
def test_a_replay_of_the_actions_sees_what_was_recorded(path):
    env = LiberoVectorEnv(
        1, "libero_goal", [8], 1, "embedded", render="fast", image_size=128, max_episode_steps=STEPS + 1, seed=0
    )
    with DemoFile(path) as file:
        for demo in file:
            episode = (8, demo.attrs["init_index"])
            obs, _ = env.reset(options={"init_states": "train", "episodes": [episode]})
            pictures = {camera: demo.frames(camera) for camera in ("agentview", "wrist")}
            for step in range(STEPS):
                np.testing.assert_array_equal(obs["proprio"][0], demo.proprio[step])
                for camera, frames in pictures.items():
                    np.testing.assert_array_equal(obs[camera][0], frames[step])
                obs, *_ = env.step(demo.actions[None, None, step])
            assert np.abs(np.diff(demo.proprio[:, :3], axis=0)).max() > 0.001
    env.close()


@pytest.mark.sim
def test_the_first_recorded_observation_is_the_one_after_the_objects_have_settled(path):
    """Against ten control steps without motion, gripper open; in another process, since importing LIBERO changes it."""
    code = """
import json, sys
import numpy as np
from rlt_gym.libero.assets import resolve_assets
from rlt_gym.libero.worker.libero_import import prepare_libero
prepare_libero(resolve_assets("embedded").path)
from rlt_gym.libero.worker.simulator import LiberoSimulator
simulator = LiberoSimulator("libero_goal", 8)
for index in map(int, sys.argv[1:]):
    simulator.restart("train", index)
    trace = [simulator.proprio()]
    for _ in range(10):
        trace.append(simulator.step_chunk(np.array([[0, 0, 0, 0, 0, 0, -1]]), observe=False).observation["proprio"])
    print(json.dumps(np.array(trace).tolist()))
"""
    with DemoFile(path) as file:
        first = {demo.attrs["init_index"]: demo.proprio[0] for demo in file}
    command = [sys.executable, "-c", code, *map(str, first)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    for line, recorded in zip(done.stdout.splitlines()[-len(first) :], first.values(), strict=True):
        distance = np.abs(np.array(json.loads(line)) - recorded).max(1)
        assert distance[10] < 1e-6 < 1e-4 < distance[:9].min(), distance


@pytest.mark.sim
def test_the_vla_chose_the_other_actions_from_these_pictures(path):
    vla = load_vla("mini")
    with DemoFile(path) as file:
        for demo in file:
            taken = demo.intervention
            assert taken.tolist() == [step % 3 == 2 for step in range(STEPS)]
            np.testing.assert_array_equal(demo.actions[taken, 0], 0.5)
            for start in range(0, STEPS, 8):
                row = {camera: demo.frames(camera)[start : start + 1] for camera in ("agentview", "wrist")}
                chunk = vla.forward({**row, "state": demo.proprio[start : start + 1]}, [file.instruction]).chunk[0]
                rows = np.arange(start, min(start + 8, STEPS))
                own = ~taken[rows]
                np.testing.assert_allclose(demo.actions[rows][own], chunk[: len(rows)].numpy()[own], atol=1e-4)


@pytest.mark.sim
def test_labels_go_into_the_shards(path, tmp_path):
    config = EncodeTokensConfig([str(path)], str(tmp_path / "tokens"), successes_only=False, progress=False)
    encode_tokens(config)
    rows = TokenShards(config.output).rows
    assert rows.step.tolist() == [0, 4, 8, 12, 16] * 2 and not rows.success.any()
    assert rows.intervention.tolist() == [step % 3 == 2 for step in rows.step]
    assert DemoReader(path).failures == 2
    with pytest.raises(ValueError, match="no usable demonstration"):
        encode_tokens(replace(config, successes_only=True, output=str(tmp_path / "other")))


class Counting(FakeLiberoVectorEnv):
    """Episodes of even initial states succeed, unless ``success_step`` lies beyond the horizon."""

    assets = SimpleNamespace(kind="fake")


def fake_rollouts(out, successes_only, success_step=7):
    """Four rollouts of a made-up VLA without a simulator: (initial state, success) of each."""
    config = CollectConfig(policy="vla", task_ids=[0], demos=4, successes_only=successes_only, out=out, progress=False)
    raw = Counting(2, chunk_length=4, max_episode_steps=10, obs_stride=1, image_size=32, success_step=success_step)
    env = RLTokenVectorEnv(raw, FakeVLA(horizon=4), "none")
    (path,) = collect_rollouts(config, get_tasks("libero_goal", [0]), lambda: (env, play_vla, {}))
    with DemoFile(path) as file:
        return [(demo.attrs["init_index"], demo.attrs["success"]) for demo in file]


def test_failures_are_kept_unless_successes_alone_are_wanted(tmp_path):
    kept = fake_rollouts(str(tmp_path / "a"), False)
    assert sorted(kept) == [(5000 + number, number % 2 == 0) for number in range(4)]
    successes = fake_rollouts(str(tmp_path / "b"), True)
    assert [index % 2 for index, _ in successes] == [0] * 4 == [1 - success for _, success in successes]
    assert len({index for index, _ in successes}) == 4
    with pytest.raises(ValueError, match=r"solved only 0 of 40 episodes of .* and 4 successes are wanted"):
        fake_rollouts(str(tmp_path / "c"), True, success_step=11)
    assert not list((tmp_path / "c").iterdir())


def test_a_vla_and_an_rl_token_can_be_trained_on_rollouts(tmp_path):
    """Two of the four rollouts are successes, of seven control steps each: the VLA and the token learn from these."""
    fake_rollouts(str(tmp_path / "rollouts"), False)
    demos, output = [str(tmp_path / "rollouts")], str(tmp_path / "vla.safetensors")
    common = {"batch_size": 4, "bfloat16": False, "progress": False}
    vla = train_vla(TrainVLAConfig(demos, output, TINY, steps=3, held_out=0.5, **common))
    assert vla.provenance["rows"] == {"train": 7, "held_out": 7} and vla.provenance["failures_left_out"] == 2
    config = PretrainTokenConfig(
        demos, output, output=str(tmp_path / "token.safetensors"), width=16, layers=1, heads=2, steps=3, held_out=0.5,
        frame_stride=1, **common,
    )  # fmt: skip
    token = pretrain_token(config)
    report = json.loads((tmp_path / "token.json").read_text())
    assert report["rows"] == vla.provenance["rows"] and report["train"]["steps"] == 3
    assert token.vla_fingerprint == vla.fingerprint() and 0 < report["held_out"]["L_ro_z_only"] < 10
    load_rl_token(config.output, load_vla(output))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "mini"}, "policy is 'mini'; it may be 'expert', 'vla' or the folder of a run"),
        ({"vla": "mini"}, "vla cannot be used with policy 'expert'"),
        ({"policy": "vla", "noise": 0.1}, "noise cannot be used with policy 'vla'"),
        ({"policy": "vla", "model": "best"}, "model cannot be used with policy 'vla'"),
        ({"policy": "vla", "format": "lerobot"}, "no place for failures and intervention labels: set successes_only"),
        ({"policy": "vla", "task_ids": [99]}, "99"),
    ],
)
def test_settings_that_do_not_go_together(arguments, message):
    with pytest.raises(ValueError, match=message):
        CollectConfig(**arguments)


def test_runs_are_played_elsewhere(tmp_path):
    with pytest.raises(ValueError, match=r"rlt_sb3\.experiment\.collect"):
        collect(CollectConfig(policy=str(tmp_path)))
