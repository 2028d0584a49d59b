"""Workers: how they start, break, are replaced and end. On real scenes, since it is their processes that matter."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from rlt_gym.libero.vector_env import LiberoVectorEnv
from rlt_gym.workers.pool import WorkerError
from rlt_gym.workers.processes import LaunchPlan

FAST = {"assets": "embedded", "render": "fast", "image_size": 48}
CHUNK = 2
FAULTS = "rlt_gym.libero.worker.fault_injection:"


def inject(env, index, name, **arguments):
    """Call a function of rlt_gym.libero.worker.fault_injection in one worker."""
    question = {"function": FAULTS + name, "task_id": 1, "arguments": arguments}
    answers, failures = env._pool.ask({index: ("call", question)})
    assert not failures
    return answers[index]


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def assert_all_end(pids, seconds=100):
    """The promise is 5 s, which benchmarks/faults.py measures; here the time only bounds a hang."""
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if alive(pid)]


def descriptors():
    """Sockets, pipes and logs that this process has open; the memory of the pictures goes with the object."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:  # what the listing itself had open
            continue
        if target.startswith(("socket:", "pipe:")) or "-log" in target:
            found.add((entry.name, target))
    return found


def zygote_of(env):
    """Process id of the zygote, the parent of the workers."""
    with open(f"/proc/{env.worker_pids[0]}/stat") as file:
        return int(file.read().rsplit(")", 1)[1].split()[1])


@pytest.fixture(scope="module")
def env():
    vector_env = LiberoVectorEnv(
        2,
        "libero_goal",
        [1],
        chunk_length=CHUNK,
        max_episode_steps=50,
        max_restarts=100,
        render_mode="rgb_array",
        **FAST,
    )
    yield vector_env
    vector_env.close()


def equal(left, right, index):
    return all(np.array_equal(left[key][index], right[key][index]) for key in left)


@pytest.mark.parametrize("fault", ["sigkill", "sigstop", "exception", "crash", "hang", "gl"])
def test_a_broken_worker_ends_its_episode_and_nothing_else(env, fault):
    actions = np.random.default_rng(0).uniform(-1, 1, (3, 2, CHUNK, 7)).astype(np.float32)
    first, start = env.reset(seed=7)
    undisturbed = [env.step(chunk) for chunk in actions]

    env.reset(seed=7)
    before = env.step(actions[0])[0]
    restarts, pid = env.worker_restarts, env.worker_pids[0]
    if fault in ("sigkill", "sigstop"):
        os.kill(pid, signal.SIGKILL if fault == "sigkill" else signal.SIGSTOP)
    else:
        names = {"exception": "raise_at_step", "crash": "crash_at_step", "hang": "hang_at_step", "gl": "lose_gl"}
        inject(env, 0, names[fault])
    if fault in ("sigstop", "hang"):
        env._pool.clients[0]._timeout = 0.5  # it will never answer, however long one waits
    obs, rewards, terminations, truncations, infos = env.step(actions[1])

    assert truncations.tolist() == [True, False] and not terminations.any() and not rewards.any()
    assert env.worker_restarts == restarts + 1 and not alive(pid)
    final = infos["final_info"]
    assert infos["worker_restarted"].tolist() == [True, False] and final["worker_restarted"][0]
    assert final["chunk_steps"][0] == 0 and not final["step_rewards"][0].any() and not final["is_success"][0]
    assert final["episode_steps"][0] == CHUNK and final["final_frame"][0].shape == (256, 256, 3)
    # The final observation is the last good one; the same episode begins again; the neighbor saw nothing.
    assert all(np.array_equal(infos["final_obs"][0][key], before[key][0]) for key in before)
    assert infos["init_index"][0] == start["init_index"][0] and equal(obs, first, 0)
    assert equal(obs, undisturbed[1][0], 1) and infos["chunk_steps"].tolist() == [0, CHUNK]

    obs, _, _, truncations, infos = env.step(actions[2])
    assert not truncations.any() and not infos["worker_restarted"].any()
    assert equal(obs, undisturbed[2][0], 1)


def test_a_worker_lost_between_steps_is_replaced(env):
    """While a picture is asked for: the episode ends with the next step. At a reset: nobody notices."""
    env.reset(seed=3)
    os.kill(env.worker_pids[1], signal.SIGKILL)
    assert [frame.shape for frame in env.render()] == [(256, 256, 3)] * 2
    *_, truncations, infos = env.step(np.zeros((2, CHUNK, 7)))
    assert truncations.tolist() == [False, True] and infos["worker_restarted"].tolist() == [False, True]
    expected, _ = env.reset(seed=4)
    os.kill(env.worker_pids[0], signal.SIGKILL)
    obs, infos = env.reset(seed=4)
    assert equal(obs, expected, 0) and equal(obs, expected, 1) and not infos["worker_restarted"].any()


def test_a_megabyte_on_stdout_and_stderr_is_harmless(env):
    env.reset(seed=0)
    restarts = env.worker_restarts
    for _ in range(3):
        inject(env, 0, "shout", size=2 << 20)
        assert not env.step(np.zeros((2, CHUNK, 7)))[3].any()
    assert env.worker_restarts == restarts
    assert os.fstat(env._pool.clients[0]._log).st_size < 9 << 20  # the log starts over


@pytest.fixture()
def interpreter(tmp_path):
    """A wrapper script that stands for another interpreter."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return path


def test_too_many_restarts_raise_and_close_ends_the_zygote(interpreter):
    # its own interpreter, so that it does not share the zygote of the other environments here
    start = {"worker_python": interpreter, "worker_start": "zygote"}
    before = descriptors()
    env = LiberoVectorEnv(1, "libero_goal", [1], chunk_length=1, max_restarts=1, **start, **FAST)
    pids = [*env.worker_pids, zygote_of(env)]
    for _ in range(2):
        env.reset(seed=0)
        inject(env, 0, "raise_at_step", after=0)
        if env.worker_restarts == 0:
            assert env.step(np.zeros((1, 1, 7)))[-1]["worker_restarts"].tolist() == [1]
        else:
            with pytest.raises(WorkerError, match=r"(?s)max_restarts=1.*injected failure"):
                env.step(np.zeros((1, 1, 7)))
        pids += env.worker_pids
    env.close()
    env.close()
    assert_all_end(pids)
    assert descriptors() <= before


def test_a_dead_zygote_is_replaced_with_its_workers(env):
    first, _ = env.reset(seed=0)
    pids = [*env.worker_pids, zygote_of(env)]
    os.kill(pids[-1], signal.SIGKILL)
    assert_all_end(pids)
    *_, truncations, infos = env.step(np.zeros((2, CHUNK, 7)))
    assert truncations.all() and infos["worker_restarted"].all()
    obs, _ = env.reset(seed=0)
    assert equal(obs, first, 0) and equal(obs, first, 1)


def test_close_during_a_step_ends_it(tmp_path):
    before = descriptors()
    hang = {"intervention": "intervention_hooks:hang", "intervention_kwargs": {"folder": str(tmp_path)}}
    env = LiberoVectorEnv(1, "libero_goal", [1], chunk_length=1, **hang, **FAST)
    env.reset(seed=0)
    pids = env.worker_pids
    raised = []

    def step():
        with pytest.raises(WorkerError, match="closed"):
            env.step(np.zeros((1, 1, 7)))
        raised.append(True)

    thread = threading.Thread(target=step)
    thread.start()
    deadline = time.monotonic() + 100  # only so that the test ends
    while not (tmp_path / "inside").exists() and thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (tmp_path / "inside").exists() and thread.is_alive()
    env.close()
    thread.join(timeout=60)
    assert raised
    assert_all_end(pids)
    assert descriptors() <= before


_PARENT = """
import os, sys, threading, time
from rlt_gym.libero.vector_env import LiberoVectorEnv
made = []
def make():
    for start in sys.argv[1:]:
        made.append(LiberoVectorEnv(1, "libero_goal", [1], worker_start=start, **%r))
thread = threading.Thread(target=make)  # ends before the parent does
thread.start()
thread.join()
pids = [pid for env in made for pid in env.worker_pids]
for env in made:
    env.reset(seed=0)
zygotes = [open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[1] for pid in pids]
print(*pids, *(pid for pid in zygotes if int(pid) != os.getpid()), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["sigkill", "sigint", "sigterm"])
def test_workers_end_with_their_parent_whatever_they_are_doing(how):
    """Started by a thread that has ended; one of them is stopped, so that it cannot do anything about it itself."""
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT % FAST, "spawn", "zygote"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 3 and all(map(alive, pids))
    if how == "sigkill":
        for pid in pids[:2]:
            os.kill(pid, signal.SIGSTOP)
        parent.kill()
    else:
        # what Ctrl-C does, and what a batch scheduler does
        os.killpg(parent.pid, signal.SIGINT if how == "sigint" else signal.SIGTERM)
    _, errors = parent.communicate(timeout=60)
    assert how != "sigint" or "KeyboardInterrupt" in errors
    assert_all_end(pids)


def test_signals_to_the_whole_group_are_the_owners_business(env):
    """An owner that stops between two chunks needs its workers until then."""
    env.reset(seed=0)
    restarts, pids = env.worker_restarts, [*env.worker_pids, zygote_of(env)]
    for number in (signal.SIGINT, signal.SIGTERM):
        for pid in pids:
            os.kill(pid, number)
        *_, infos = env.step(np.zeros((2, CHUNK, 7), np.float32))
        assert env.worker_restarts == restarts and infos["chunk_steps"].tolist() == [CHUNK, CHUNK]
    assert [*env.worker_pids, zygote_of(env)] == pids


def test_worker_has_no_training_library_and_zygote_one_thread(env):
    env.reset(seed=0)
    loaded = set(inject(env, 0, "loaded_modules"))
    assert "mujoco" in loaded
    assert not loaded & {"torch", "transformers", "wandb", "stable_baselines3", "h5py", "tqdm", "rlt_sb3"}
    top = {name for name in loaded if name.startswith("rlt_gym.") and name.count(".") == 1}
    assert top == {"rlt_gym.libero", "rlt_gym.workers"}
    assert len(os.listdir(f"/proc/{zygote_of(env)}/task")) == 1


def test_another_interpreter_gives_the_same_bits(env, interpreter):
    """Neither PYTHONPATH nor the name of our interpreter reaches the worker."""
    assert LaunchPlan.checked("auto", interpreter).start == "spawn"
    expected, _ = env.reset(seed=5)
    actions = np.random.default_rng(0).uniform(-1, 1, (2, CHUNK, 7)).astype(np.float32)
    expected_next = env.step(actions)[0]
    # one env plays the episode that the last of two plays
    before = descriptors()
    other = LiberoVectorEnv(
        1, "libero_goal", [1], chunk_length=CHUNK, max_episode_steps=50, worker_python=interpreter, **FAST
    )
    obs, _ = other.reset(seed=5)
    assert all(np.array_equal(obs[key][0], expected[key][1]) for key in obs)
    obs = other.step(actions[1:])[0]
    other.close()
    assert descriptors() <= before
    assert all(np.array_equal(obs[key][0], expected_next[key][1]) for key in obs)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"worker_start": "thread"}, "worker_start must be one of"),
        ({"worker_python": "/nowhere/python"}, "worker_python is '/nowhere/python'"),
        ({"worker_timeout": 0}, "worker_timeout"),
        ({"build_timeout": -1}, "build_timeout must be a number of seconds above 0 and up to 86400, got -1"),
        ({"worker_timeout": float("inf")}, "worker_timeout must be .* up to 86400, got inf"),
        ({"worker_timeout": float("nan")}, "worker_timeout must be .* up to 86400, got nan"),
        ({"build_timeout": 1e10}, "build_timeout must be .* up to 86400, got 10000000000.0"),
        ({"max_restarts": -1}, "max_restarts"),
        ({"resident_tasks": 0}, "resident_tasks"),
    ],
)
def test_bad_arguments_raise_before_any_process_starts(arguments, message, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("a process was started"))
    with pytest.raises(ValueError, match=message):
        LiberoVectorEnv(**{**FAST, **arguments})


def test_an_interpreter_without_libero_says_so(monkeypatch, tmp_path):
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')  # -S: without site-packages
    interpreter.chmod(0o755)
    monkeypatch.setenv("RLT_WORKER_PYTHON", str(interpreter))
    with pytest.raises(WorkerError, match=r"(?s)do not start.*No module named"):
        LiberoVectorEnv(**FAST)
