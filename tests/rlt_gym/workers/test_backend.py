"""Workers of a simulator that is not LIBERO: its folder is all that a second one needs."""

import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from rlt_gym.core.chunk_vector_env import Task
from rlt_gym.core.robot_spec import Camera, ProprioPart, RobotSpec
from rlt_gym.core.worker_vector_env import WorkerVectorEnv
from rlt_gym.workers.backend import backend_key, backend_settings
from rlt_gym.workers.pool import WorkerError, WorkerFailure, WorkerPool
from rlt_gym.workers.processes import LaunchPlan
from rlt_gym.workers.shared_memory import SharedPictures, anonymous_file

SHAPES = {"camera": (4, 6, 3)}


def pool_of(
    start, max_restarts=2, num_workers=2, backend="CounterBackend", times=(60.0, 60.0), tasks=(5,), resident=2, **hooks
):
    settings = {
        "name": "Toy",
        "backend": backend_settings(f"toy_backend:{backend}", width=6),
        "pictures": SHAPES,
        "frame_size": 8,
        "resident": resident,
        "hooks": {"action_size": 1, **hooks},
    }
    return WorkerPool(
        num_workers, LaunchPlan.checked(start, None), settings, 2, tasks, times[0], max_restarts, times[1]
    )


def played(pool, worker, answer):
    """Count and camera's number of the last observation, rewards, success and the counts inside the chunk."""
    rest, rewards, success, inner, _, frames = answer
    assert frames == []
    obs = pool.clients[worker].pictures.take(rest, 0)
    assert obs["camera"].shape == SHAPES["camera"] and (obs["camera"] == int(obs["count"][0])).all()
    inside = [pool.clients[worker].pictures.take(entry, slot) for slot, entry in enumerate(inner, start=1)]
    assert all((entry["camera"] == int(entry["count"][0])).all() for entry in inside)
    return obs["count"][0], rewards.tolist(), success, [entry["count"][0] for entry in inside]


@pytest.mark.parametrize("start", ["spawn", "zygote"])
def test_a_pool_of_another_simulator_replaces_a_killed_worker(start):
    pool = pool_of(start)
    try:
        resets = {worker: ("reset", {"task_id": 5, "split": "train", "index": worker}) for worker in range(2)}
        answers, failures = pool.ask(resets)
        assert not failures and [answers[worker][0]["count"][0] for worker in range(2)] == [0, 1]
        chunk = ("step", {"actions": np.ones((2, 1)), "observe_at": (1,)})
        answers, _ = pool.ask({0: chunk, 1: chunk})
        assert played(pool, 0, answers[0]) == (2, [0, 0], False, [1])
        assert played(pool, 1, answers[1]) == (3, [0, 0], False, [2])

        os.kill(pool.clients[0].pid, signal.SIGKILL)
        answers, failures = pool.ask({0: chunk, 1: chunk})
        assert played(pool, 1, answers[1]) == (5, [0, 1], True, [4])  # its neighbor did not notice
        assert list(failures) == [0] and "Toy worker" in str(failures[0]) and "died" in str(failures[0])
        pool.restart(0, failures[0])
        assert pool.restarts.tolist() == [1, 0]
        assert not pool.ask({0: resets[0]})[1]
        answers, _ = pool.ask({0: chunk})
        assert played(pool, 0, answers[0]) == (2, [0, 0], False, [1])
        filmed = ("step", {"actions": np.ones((4, 1)), "film": True})  # the goal is 5
        *_, reported, frames = pool.ask({0: filmed})[0][0]
        assert [frame.max() for frame in frames] == [3, 4] and frames[0].shape == (8, 8, 3) and reported == {}
        assert not pool.ask({0: ("render", {})})[1]
        assert pool.clients[0].pictures.frame.shape == (8, 8, 3) and (pool.clients[0].pictures.frame == 5).all()
    finally:
        pool.close()


def test_workers_work_while_the_owner_does_something_else():
    """It may take longer than the time-out; one that died meanwhile is reported, its neighbor's answer is there."""
    pool = pool_of("zygote", times=(1.0, 60.0))
    try:
        assert not pool.ask({w: ("reset", {"task_id": 5, "split": "train", "index": w}) for w in range(2)})[1]
        chunks = {worker: ("step", {"actions": np.ones((2, 1))}) for worker in range(2)}
        unasked = pool.begin(chunks)
        time.sleep(1.3)  # longer than the time-out
        deadline = time.monotonic() + 30.0  # another program may have the cores
        while sorted(pool._ready(pool._limits(chunks))) != [0, 1]:  # answered, though nobody has read it yet
            assert time.monotonic() < deadline
            time.sleep(0.05)
        answers, failures = pool.finish(chunks, unasked)
        assert not failures and [played(pool, w, answers[w])[0] for w in range(2)] == [2, 3]

        os.kill(pool.clients[0].pid, signal.SIGSTOP)  # so that it cannot answer before it is killed
        unasked = pool.begin(chunks)
        os.kill(pool.clients[0].pid, signal.SIGKILL)
        answers, failures = pool.finish(chunks, unasked)
        assert list(failures) == [0] and played(pool, 1, answers[1])[0] == 5
        unasked = pool.begin(chunks)
        assert set(unasked) <= {0}  # whether the end of a dead process is seen at once is the system's affair
        answers, failures = pool.finish(chunks, unasked)
        assert list(failures) == [0] and list(answers) == [1]

        pool.begin({1: chunks[1]})  # given up: the answer is never fetched
        reset = {1: ("reset", {"task_id": 5, "split": "train", "index": 4})}
        answers, failures = pool.ask(reset)
        assert not failures and answers[1][0]["count"][0] == 4
    finally:
        pool.close()


def test_simulator_errors_reach_the_owner_with_their_name():
    pool = pool_of("spawn", max_restarts=0)
    try:
        _, failures = pool.ask({0: ("step", {"actions": np.ones((1, 1))})})  # never reset
        assert "Toy worker" in str(failures[0]) and "AttributeError" in str(failures[0])
        with pytest.raises(WorkerError, match=r"Toy worker of env 0 broke again .*max_restarts=0"):
            pool.restart(0, failures[0])
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("ClosedBackend", [[], [3], [3, 3, 4], [3, 3, 4], [3, 3, 4, 4, 5], [3, 3, 4, 4, 5, 5, 3]]),
        ("RestingBackend", [[], [], [3], [3], [3, 4], [3, 4, 5]]),
    ],
)
def test_who_is_closed_when_another_tasks_turn_comes(backend, expected):
    """The one before, unless it rests open; and in any case the one that is dropped, since two may stay."""
    pool = pool_of("spawn", backend=backend, tasks=[3], resident=2, num_workers=1)
    try:
        found = []
        for task in [3, 4, 5, 5, 3, 4]:
            answers, _ = pool.ask({0: ("reset", {"task_id": task, "split": "train", "index": 0})})
            found.append(answers[0][0]["closed"].tolist())
        assert found == expected
    finally:
        pool.close()


@pytest.mark.parametrize("resident", [1, 2])
@pytest.mark.parametrize("start", ["spawn", "zygote"])
def test_a_worker_keeps_no_more_simulators_than_it_may(start, resident):
    """Also of those that its zygote built, for this environment or for another one."""
    built = {"spawn": 0, "zygote": 3}[start]
    pool = pool_of(start, backend="CensusBackend", tasks=[3, 4, 5], resident=resident, num_workers=1)
    try:
        for turn, task in enumerate([3, 4, 5, 5, 6, 3, 4]):
            answers, _ = pool.ask({0: ("reset", {"task_id": task, "split": "train", "index": 0})})
            census = answers[0][0]["census"].tolist()
            # what has played and is still there, and what was built before but never used
            assert census == [min(min(turn, 2) + 1 if turn < 4 else 3, resident), max(0, built - min(turn + 1, 3))]
    finally:
        pool.close()


@pytest.mark.parametrize(
    "target, kwargs, message",
    [
        ("toy_backend", {}, "must be 'module:Class'"),
        ("no_such_module:Backend", {}, "there is no module 'no_such_module'"),
        ("no_such_package.backend:Backend", {}, "No module named 'no_such_package'"),
        ("__main__:Backend", {}, "put it into a separate module"),
        ("toy_backend:CounterBackend", {"width": np.zeros(2)}, "can be sent to a worker"),
    ],
)
def test_a_backend_that_workers_could_not_make_is_refused(target, kwargs, message):
    with pytest.raises(ValueError, match=message):
        backend_settings(target, **kwargs)


def test_a_backends_folder_travels_and_its_arguments_count():
    folder = str(Path(__file__).parents[2] / "helpers")
    toy = backend_settings("toy_backend:CounterBackend", width=6)
    assert toy == {"target": "toy_backend:CounterBackend", "kwargs": {"width": 6}, "path": folder}
    assert backend_settings("rlt_gym.libero.worker.backend:LiberoBackend")["path"] is None
    assert backend_key(toy) == backend_key(dict(reversed(toy.items())))
    assert backend_key(toy) != backend_key(backend_settings("toy_backend:CounterBackend", width=7))


def test_shared_pictures_keep_slots_and_keys_apart():
    shapes = {"front": (8, 8, 3), "hand": (4, 6, 3)}
    descriptor = anonymous_file("test", SharedPictures.size_for(shapes, 16, 3))
    ours, theirs = (SharedPictures(descriptor, shapes, 16, 3) for _ in range(2))
    os.close(descriptor)
    rng = np.random.default_rng(0)
    observations = [
        {key: rng.integers(0, 256, shape, dtype=np.uint8) for key, shape in shapes.items()} | {"proprio": np.zeros(8)}
        for _ in range(3)
    ]
    theirs.frame[:] = 9
    rests = [theirs.put(observation, slot) for slot, observation in enumerate(observations)]
    assert [list(rest) for rest in rests] == [["proprio"]] * 3
    for slot, (rest, observation) in enumerate(zip(rests, observations, strict=True)):
        taken = ours.take(rest, slot)
        assert all(np.array_equal(taken[key], observation[key]) for key in observation)
    assert ours.frame.shape == (16, 16, 3) and (ours.frame == 9).all()


def test_time_runs_for_all_workers_at_once():
    """However many of them hang, one waits as long as for one; those that answer are heard."""
    pool = pool_of("spawn", num_workers=4)
    try:
        resets = {worker: ("reset", {"task_id": 5, "split": "train", "index": worker}) for worker in range(4)}
        assert not pool.ask(resets)[1]
        for client in pool.clients:
            client._timeout = 1.0
        for worker in (0, 1, 3):
            os.kill(pool.clients[worker].pid, signal.SIGSTOP)
        for patience, words in ((1.0, r"did not answer within 1 s \(worker_timeout\)"),
                                (2.0, r"did not answer within 2 s \(2 times worker_timeout\)")):  # fmt: skip
            began = time.monotonic()
            answers, failures = pool.ask(resets, patience)
            assert patience <= time.monotonic() - began < patience + 0.9
            assert list(answers) == [2] and list(failures) == [0, 1, 3]
            assert all(re.search(words, str(failure)) for failure in failures.values())
        # answers that come late belong to questions that nobody waits for any more
        for worker in (0, 1, 3):
            os.kill(pool.clients[worker].pid, signal.SIGCONT)
        for client in pool.clients:
            client._timeout = 60.0
        answers, failures = pool.ask({worker: ("step", {"actions": np.full((1, 1), worker)}) for worker in (3, 0, 1)})
        assert not failures and list(answers) == [3, 0, 1]
        assert [played(pool, worker, answers[worker])[0] for worker in (0, 1, 3)] == [0, 2, 6]
    finally:
        pool.close()


@pytest.mark.parametrize("start", ["spawn", "zygote"])
def test_the_first_build_has_a_limit_of_its_own(start):
    """Code that is compiled first takes longer than any step may; what comes later does not."""
    build = {worker: ("build", {"task_id": 5}) for worker in range(2)}
    reset = {worker: ("reset", {"task_id": 5, "split": "train", "index": 0}) for worker in range(2)}
    pool = pool_of(start, backend="SlowCounterBackend", times=(1.0, 60.0))
    try:
        assert not pool.ask(build, building=True)[1]
        assert not pool.ask(reset)[1]
        os.kill(pool.clients[0].pid, signal.SIGSTOP)
        _, failures = pool.ask(reset)
        assert list(failures) == [0] and "within 1 s (worker_timeout)" in str(failures[0])
    finally:
        pool.close()


@pytest.mark.parametrize("start", ["spawn", "zygote"])
def test_a_first_build_that_takes_too_long_names_its_limit(start):
    with pytest.raises(WorkerError, match=r"did not answer within 0\.5 s \(build_timeout\)"):
        pool = pool_of(start, backend="SlowCounterBackend", times=(60.0, 0.5))
        try:
            _, failures = pool.ask({0: ("build", {"task_id": 5})}, building=True)
            raise failures[0]
        finally:
            pool.close()


def test_a_zygote_takes_large_settings_and_tells_of_large_errors():
    """Some hundred kilobytes, e.g. the keyword arguments of a hook; more than a socket's message may have."""
    hook = {"target": "intervention_hooks:nobody", "kwargs": {"table": ["x" * 1000] * 300}, "path": None}
    pool = pool_of("zygote", intervention=hook)
    try:
        _, failures = pool.ask({worker: ("build", {"task_id": 5}) for worker in range(2)})
        # the zygote forked both, and each got the whole of it
        assert list(failures) == [0, 1] and all("intervention_hooks" in str(failure) for failure in failures.values())
        zygote = pool.clients[0]._finalizer.peek()[2][0]._zygote
        with pytest.raises(WorkerFailure, match=r"x{100000}"):
            zygote.request("x" * 300_000)
        assert zygote.alive() and zygote.request("end", child=0) is None
    finally:
        pool.close()


@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_simulators_built_first_are_those_of_the_first_episodes(split, monkeypatch):
    """Else the first reset builds them, under the time limit of an answer."""
    asked = []
    original = WorkerPool.ask

    def ask(self, questions, *args, **kwargs):
        asked.append({env: (command, arguments["task_id"]) for env, (command, arguments) in questions.items()})
        return original(self, questions, *args, **kwargs)

    monkeypatch.setattr(WorkerPool, "ask", ask)
    robot = RobotSpec("toy", (Camera("camera"),), (ProprioPart("count", 1),), ("a",), 20.0)
    tasks = [Task(number, f"reach {number}") for number in range(5)]
    for seed in range(3):
        asked.clear()
        backend = backend_settings("toy_backend:CounterBackend", width=6)
        env = WorkerVectorEnv(
            "Toy", backend, 1 << 20, 2, tasks, robot, 4, 12, 16, init_states=split, seed=seed, resident_tasks=5
        )
        try:
            first = [env.sequence.next(number) for number in range(2)]
        finally:
            env.close()
        (built,) = asked
        assert built == {number: ("build", tasks[episode.task_index].task_id) for number, episode in enumerate(first)}
