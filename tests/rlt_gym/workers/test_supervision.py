"""Workers: how they start, break, are replaced and end. On real scenes, since it is their processes that matter."""

import ast
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import rlt_gym
from rlt_gym.libero.vector_env import LiberoVectorEnv
from rlt_gym.workers import gl
from rlt_gym.workers.channel import Channel, encode
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


def assert_all_end(pids, seconds=30):
    """The promise is 5 s (benchmarks/faults.py measures it); a starved test machine gets more."""
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if alive(pid)]


def descriptors():
    """Sockets, pipes and logs that this process has open. (The memory of the pictures goes with the object.)"""
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


# ---------------------------------------------------------------- broken workers


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
    # The final observation is the last good one; the same episode begins again; the neighbour saw nothing.
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


def test_too_many_restarts_raise_with_the_last_words_and_close_ends_the_zygote(interpreter):
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


# ---------------------------------------------------------------- the end


def test_close_during_a_step_ends_it():
    before = descriptors()
    env = LiberoVectorEnv(1, "libero_goal", [1], chunk_length=1, **FAST)
    env.reset(seed=0)
    inject(env, 0, "hang_at_step")
    pids = env.worker_pids
    raised = []

    def step():
        with pytest.raises(WorkerError, match="closed"):
            env.step(np.zeros((1, 1, 7)))
        raised.append(True)

    thread = threading.Thread(target=step)
    thread.start()
    time.sleep(0.3)
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


@pytest.mark.parametrize("how", ["sigkill", "sigint"])
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
        os.killpg(parent.pid, signal.SIGINT)  # what Ctrl-C does
    _, errors = parent.communicate(timeout=60)
    assert how == "sigkill" or "KeyboardInterrupt" in errors
    assert_all_end(pids)


# ---------------------------------------------------------------- processes and transport


def test_a_worker_has_no_training_library_and_its_zygote_one_thread(env):
    env.reset(seed=0)
    loaded = set(inject(env, 0, "loaded_modules"))
    assert "mujoco" in loaded
    assert not loaded & {"torch", "transformers", "wandb", "stable_baselines3", "h5py", "tqdm", "rlt_sb3"}
    top = {name for name in loaded if name.startswith("rlt_gym.") and name.count(".") == 1}
    assert top == {"rlt_gym.libero", "rlt_gym.workers"}
    assert len(os.listdir(f"/proc/{zygote_of(env)}/task")) == 1


def test_another_interpreter_by_plain_subprocess_gives_the_same_bits(env, interpreter):
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
        ({"build_timeout": -1}, "build_timeout must be a number of seconds above 0, got -1"),
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


PACKAGE = Path(rlt_gym.__file__).parent
#: The rooms whose code runs under a worker's interpreter; ruff is told the same ones in pyproject.toml.
ROOMS = ("rlt_gym.workers", "rlt_gym.libero.suites", "rlt_gym.libero.worker", "rlt_gym.libero.rendering")


def imports_of(name):
    """Modules that a module of a worker imports, anywhere in it; it must be Python 3.8."""
    path = PACKAGE.joinpath(*name.split(".")[1:]).with_suffix(".py")
    tree = ast.parse(path.read_text(), feature_version=(3, 8))
    future = False
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            future = future or node.module == "__future__"
            base = node.module or ""
            for alias in node.names:
                member = PACKAGE.joinpath(*base.split(".")[1:], f"{alias.name}.py")
                yield f"{base}.{alias.name}" if base.startswith("rlt_gym") and member.is_file() else base
        elif isinstance(node, ast.Call) and any(keyword.arg == "strict" for keyword in node.keywords):
            pytest.fail(f"{name}.py:{node.lineno}: zip(strict=) is of Python 3.10")
    assert future, f"{name}.py: annotations are evaluated without `from __future__ import annotations`"


def test_worker_modules_are_python_3_8_and_need_nothing_but_libero():
    """All that the processes of launch.py reach inside this package."""
    # robosuite brings numba, and numba llvmlite
    allowed = {"libero", "numpy", "mujoco", "robosuite", "numba", "llvmlite", "OpenGL", *sys.stdlib_module_names}
    started = (
        "workers.launch",
        "workers.zygote",
        "workers.gl",
        "workers.worker",
        "libero.worker.backend",  # named in the settings
        "libero.worker.fault_injection",
    )
    open_, known = {f"rlt_gym.{name}" for name in started}, set()
    while open_:
        name = open_.pop()
        known.add(name)
        for module in imports_of(name):
            if module.split(".")[0] in allowed:
                continue
            assert module.startswith(ROOMS), f"{name} imports {module}"
            open_ |= {module} - known
    reached = {name.rpartition(".")[2] for name in known}
    assert {"libero_import", "simulator", "renderer", "tasks", "channel", "watchdog"} <= reached
    assert {"culling", "controller", "folders", "shared_memory", "hooks"} <= reached


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("workers/*.py")), ids=lambda path: path.stem)
def test_workers_know_no_benchmark(path):
    """Not even in a string that is imported later; test_backend.py plays another simulator."""
    if path.stem == "__init__":
        assert not [node for node in ast.parse(path.read_text()).body if not isinstance(node, ast.Expr)]  # a docstring
        return
    others = [name for name in imports_of(f"rlt_gym.workers.{path.stem}") if name.startswith("rlt_gym.")]
    assert all(name.startswith("rlt_gym.workers.") for name in others), others
    code = ast.parse(path.read_text())
    strings = [node.value for node in ast.walk(code) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert not [text for text in strings if text.startswith("rlt_gym.libero")]


def test_messages_survive_another_numpy_and_partial_reads():
    """Pickles name no module of numpy, whose names differ between versions; a message may come in pieces."""
    left, right = socket.socketpair()
    message = {"array": np.arange(6, dtype=np.float32).reshape(2, 3), "scalar": np.int64(3), "other": [1, "x", None]}
    assert b"numpy" not in encode(message)
    sender, receiver = Channel(left), Channel(right)
    thread = threading.Thread(target=lambda: [sender.send((number, np.zeros(200_000))) for number in range(3)])
    thread.start()
    assert [receiver.receive(timeout=30)[0] for _ in range(3)] == [0, 1, 2]
    thread.join()
    sender.send(message)
    back = receiver.receive(timeout=30)
    assert np.array_equal(back["array"], message["array"]) and back["array"].dtype == np.float32
    assert back["array"].flags.writeable and type(back["scalar"]) is np.int64 and back["other"] == message["other"]
    with pytest.raises(TimeoutError):
        receiver.receive(timeout=0.01)
    sender.close()
    sender.close()
    with pytest.raises(EOFError):
        receiver.receive(timeout=30)


# ---------------------------------------------------------------- EGL


class FakeEGL:
    """libEGL with devices whose CUDA numbers are given; None: a device without one, as Mesa's."""

    def __init__(self, cuda_of_egl):
        @ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int))
        def devices(size, handles, count):
            for index in range(len(cuda_of_egl)):
                handles[index] = 1000 + index
            count[0] = len(cuda_of_egl)
            return 1

        @ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_ssize_t))
        def attribute(device, name, value):
            cuda = cuda_of_egl[device - 1000]
            if name != 0x323A or cuda is None:
                return 0
            value[0] = cuda
            return 1

        self._functions = {b"eglQueryDevicesEXT": devices, b"eglQueryDeviceAttribEXT": attribute}

        class GetProcAddress:
            restype = None

            def __call__(_, name):
                return ctypes.cast(self._functions[name], ctypes.c_void_p).value

        self.eglGetProcAddress = GetProcAddress()


def test_cuda_numbers_are_mapped_to_egl_devices():
    order = [2, None, 0, 1]
    assert gl.query_cuda_indices(FakeEGL(order)) == order
    assert [gl.egl_index(cuda, order) for cuda in range(4)] == [2, 3, 0, None]
    assert gl.cuda_index({}) == 0 and gl.cuda_index({"CUDA_VISIBLE_DEVICES": "3,1"}) == 3
    assert gl.cuda_index({"CUDA_VISIBLE_DEVICES": "GPU-1234"}) == 0


def test_egl_is_chosen_where_it_works_and_osmesa_with_one_warning_elsewhere(monkeypatch, caplog):
    asked = []

    def try_egl(python, cuda):
        asked.append(cuda)
        return {"ok": cuda == 2, "device": 5, "error": "no driver"}

    monkeypatch.setattr(gl, "try_egl", try_egl)
    gl.say_no_egl.cache_clear()
    good = gl.choose_gl({"MUJOCO_GL": "egl", "CUDA_VISIBLE_DEVICES": "2"})
    assert good == gl.GLChoice("egl", 5)
    assert good.environment() == {"MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "egl", "MUJOCO_EGL_DEVICE_ID": "5"}
    assert gl.choose_gl({"MUJOCO_GL": "egl", "CUDA_VISIBLE_DEVICES": "2", "MUJOCO_EGL_DEVICE_ID": "1"}).egl_device == 1
    assert not caplog.records
    for _ in range(3):
        assert gl.choose_gl({"MUJOCO_GL": "egl"}) == gl.GLChoice("osmesa")
    assert len(caplog.records) == 1 and "no driver" in caplog.text
    assert gl.choose_gl({"MUJOCO_GL": "osmesa"}) == gl.GLChoice("osmesa")
    assert asked == [2, 2, 0, 0, 0]
