"""Physics and pictures equal those of stock LIBERO, live and bit for bit.

``pytest -m exact`` plays two episodes of 300 control steps (or the expert's way to success) of 13 tasks, on the
official assets where ``RLT_LIBERO_ASSETS`` names them and on the embedded ones. The default run plays a short slice.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from run_helpers import ROOT

from rlt_gym.libero.vector_env import LiberoVectorEnv

SCRIPT = ROOT / "tests" / "helpers" / "compare_with_stock.py"
ASSETS = ["embedded", pytest.param("official", marks=pytest.mark.official)]
#: Over all five suites; with drawers (goal 0, 3, spatial 4, libero_10 3), stove (goal 1, 7, libero_10 2) and experts.
CASES = [
    ("libero_goal", 0, False),
    ("libero_goal", 1, True),
    ("libero_goal", 3, False),
    ("libero_goal", 7, False),
    ("libero_spatial", 3, False),
    ("libero_spatial", 4, False),
    ("libero_object", 1, False),
    ("libero_object", 6, False),
    ("libero_10", 2, False),
    ("libero_10", 3, False),
    ("libero_10", 7, False),
    ("libero_90", 30, False),
    ("libero_90", 60, False),
]


def compare(suite: str, task: int, assets: str, *options: str) -> dict:
    command = [sys.executable, str(SCRIPT), suite, str(task), "--assets", assets, *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "identical" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    summary = json.loads(done.stdout.split("identical ")[1])
    print(summary)
    assert summary["largest_difference"] == 0.0
    return summary


@pytest.mark.exact
@pytest.mark.sim
@pytest.mark.parametrize("assets", ASSETS)
@pytest.mark.parametrize(("suite", "task", "expert"), CASES)
def test_two_episodes_equal_stock(suite, task, expert, assets):
    summary = compare(suite, task, assets, *(["--expert"] if expert else []))
    assert summary["objects_moved"] > 0.005
    assert summary["success"] or not expert


@pytest.mark.sim
def test_a_short_run_equals_stock():
    """Two episodes on one simulator: the soft reset must not remember the first one."""
    summary = compare("libero_goal", 1, "embedded", "--steps", "40")
    assert summary["steps"] == 80


@pytest.mark.sim
@pytest.mark.official
def test_a_short_run_on_official_meshes_equals_stock():
    """Meshes are cut into clusters and culled, and the stove is a mirror: the pictures must not tell."""
    assert compare("libero_goal", 0, "official", "--steps", "16", "--episodes", "1")["steps"] == 16


def played(assets: str, folder, **switches) -> dict[str, np.ndarray]:
    """What two workers on two tasks (with a drawer; with the stove, a mirror) show in four chunks, and their states."""
    folder.mkdir()
    env = LiberoVectorEnv(
        2,
        "libero_goal",
        [0, 7],
        chunk_length=3,
        assets=assets,
        image_size=48,
        obs_stride=1,
        render_mode="rgb_array",
        critical_phase="intervention_hooks:note_state",
        critical_phase_kwargs={"folder": str(folder)},
        **switches,
    )
    try:
        shown = [env.reset(seed=3)[0]]
        actions = np.random.default_rng(0).uniform(-1, 1, (4, 2, 3, 7)) - [0, 0, 0.3, 0, 0, 0, 0]
        for chunk in np.clip(actions, -1, 1):
            obs, rewards, *_, infos = env.step(chunk)
            inner = {f"inner_{key}": value for key, value in infos["inner_obs"].items()}
            shown.append({**obs, **inner, "rewards": rewards, "step_rewards": infos["step_rewards"]})
        found = {f"{number} {key}": value for number, part in enumerate(shown) for key, value in part.items()}
        states = {f"states of {number}": np.fromfile(folder / str(pid)) for number, pid in enumerate(env.worker_pids)}
        return {**found, **states, "frames": env.render()}
    finally:
        env.close()


@pytest.mark.sim
@pytest.mark.parametrize(
    "assets", [pytest.param("official", marks=[pytest.mark.official, pytest.mark.expensive]), "embedded"]
)
def test_nothing_changes_when_shortcuts_are_switched_off(assets, tmp_path):
    """Pictures, inner pictures, frames, rewards, proprioception and whole states, bit for bit."""
    if assets == "official" and not os.environ.get("RLT_LIBERO_ASSETS"):
        pytest.skip("RLT_LIBERO_ASSETS is not set")
    expected = played(assets, tmp_path / "exact", render="exact")
    assert {name.split()[-1] for name in expected} >= {"agentview", "wrist", "proprio", "inner_wrist"}
    assert all(len(expected[f"states of {number}"]) > 5 * 40 for number in range(2))
    for name, switches in (("stock", {"render": "stock"}), ("both", {"render": "stock", "compiled": False})):
        found = played(assets, tmp_path / name, **switches)
        assert found.keys() == expected.keys()
        different = [name for name in expected if not np.array_equal(found[name], expected[name])]
        assert not different, (switches, different)


@pytest.mark.sim
def test_switched_off_shortcuts_are_not_even_imported(tmp_path):
    """Neither by the zygote, which builds ahead, nor by its workers."""
    interpreter = tmp_path / "python"  # its own, so that it does not share the zygote of other environments
    interpreter.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    interpreter.chmod(0o755)
    shortcuts = {"culling", "triangles", "merged_boxes", "display_lists", "decimate", "camera_geometry", "shortcuts"}
    arguments = {"assets": "embedded", "image_size": 48, "worker_start": "zygote", "worker_python": interpreter}

    def loaded(**switches) -> set[str]:
        env = LiberoVectorEnv(1, "libero_goal", [1], **arguments, **switches)
        try:
            env.reset(seed=0)
            env.step(np.zeros((1, 8, 7)))
            question = {"task_id": 1, "arguments": {}}
            (names,) = env.call_workers("rlt_gym.libero.worker.fault_injection:loaded_modules", [question])
        finally:
            env.close()
        return {name.rpartition(".")[2] for name in names if name.startswith("rlt_gym.libero.")}

    assert not loaded(render="stock", compiled=False) & (shortcuts | {"controller", "contacts"})
    assert loaded(render="exact") >= shortcuts | {"controller", "contacts"}


def test_switches_are_checked_before_any_process_starts():
    with pytest.raises(ValueError, match=r"render must be one of \('exact', 'fast', 'stock'\), got 'best'"):
        LiberoVectorEnv(assets="embedded", render="best")
    with pytest.raises(ValueError, match="compiled must be True or False, got 1"):
        LiberoVectorEnv(assets="embedded", compiled=1)
