"""Rows of Ray workers against those of one environment, and what becomes of lost workers."""

import os
import signal
import time
from functools import partial

import numpy as np
import pytest
import torch
from left_over import MARK, OURS, left_over, place_of, processes_with
from run_helpers import environment

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402

from rlt_gym.cluster.connection import ClusterError, RayConfig, check_room, connected  # noqa: E402
from rlt_gym.cluster.vector_env import RayVectorEnv  # noqa: E402
from rlt_gym.libero.make import make_rl_token_libero_vec  # noqa: E402
from rlt_gym.testing import FakeRLTokenVectorEnv  # noqa: E402

STORE = 80 << 20
NEEDS = {"num_cpus": 1.0, "num_gpus": 0.0}
FAKE = {"task_ids": (0, 3), "obs_stride": 3, "render_mode": "rgb_array", "max_episode_steps": 12}


def check_equal(ours, theirs, place=""):
    """Bit for bit, the types of the numbers included."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), place
        for key in theirs:
            check_equal(ours[key], theirs[key], f"{place}/{key}")
    elif isinstance(theirs, tuple | list) or (isinstance(theirs, np.ndarray) and theirs.dtype == object):
        for one, other in zip(ours, theirs, strict=True):
            check_equal(one, other, place)
    elif isinstance(theirs, np.ndarray):
        assert ours.dtype == theirs.dtype, place
        np.testing.assert_array_equal(ours, theirs, err_msg=place)
    else:
        assert ours == theirs, place


def check_same_episodes(ours, theirs, plan):
    """Play both. Return how many episodes ended."""
    ended, rng = 0, np.random.default_rng(0)
    for options, seed, steps in plan:
        now = [env.reset(seed=seed, options=options) for env in (ours, theirs)]
        check_equal(*now, place=str(options))
        for step in range(steps):
            reference = now[1][0]["vla_ref"]
            actions = np.clip(reference + rng.normal(0.0, 0.1, reference.shape), -1, 1).astype(np.float32)
            now = [env.step(actions) for env in (ours, theirs)]
            check_equal(*now, place=f"{options} {step}")
            ended += int(np.sum(now[1][2] | now[1][3]))
    return ended


@pytest.fixture(scope="module")
def cluster():
    soon = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 300, "health_check_failure_threshold": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, f"cluster-{os.getpid()}")
        patch.setenv("PYTHONPATH", environment()["PYTHONPATH"])  # workers that play make_libero_part import this file
        made = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 3, "object_store_memory": STORE, "_system_config": soon},
        )
        with connected(RayConfig(made.address), 3):
            yield made
        made.shutdown()
        assert not left_over(os.environ[MARK])


@pytest.fixture(autouse=True)
def no_orphans(cluster):
    """Workers and their simulators have ended with their environment, those of lost machines included."""
    yield
    assert not left_over(os.environ[MARK], OURS)


def fake(workers, per_worker, needs=NEEDS, **more):
    return RayVectorEnv(
        partial(FakeRLTokenVectorEnv, per_worker, **FAKE), workers, per_worker, "eval", 0, needs, **more
    )


def test_rows_are_those_of_one_environment(cluster):
    ours, theirs = fake(3, 2), FakeRLTokenVectorEnv(6, init_states="eval", **FAKE)
    evaluation, selection = {"init_states": "eval"}, {"init_states": "selection"}
    try:
        plan = [(evaluation, 3, 8), (selection, None, 5), (evaluation | {"shard": (1, 3)}, None, 4)]
        assert len(processes_with(os.environ[MARK], OURS)) == 3  # which no_orphans looks for
        assert check_same_episodes(ours, theirs, plan) > 20
        for env in (ours, theirs):
            env.film([1, 4])
        check_equal(ours.render(), theirs.render())
        assert check_same_episodes(ours, theirs, [(evaluation, None, 3)])
        assert ours.call("obs_stride") == (3,) * 6
    finally:
        ours.close()


@pytest.mark.sim
@pytest.mark.expensive
@pytest.mark.parametrize(
    ("workers", "per_worker", "names"), [(1, 2, ("mini", "auto")), (2, 1, ("one_row:OneRow", "mean"))]
)
def test_rows_of_libero_are_those_of_one_environment(cluster, workers, per_worker, names, monkeypatch):
    """In batches of other sizes the VLA rounds otherwise: so one worker, or a VLA and a token without batches."""
    monkeypatch.setenv("RLT_ALLOWED_IMPORTS", "one_row")
    kwargs = {
        "task_ids": [1, 2], "vla": names[0], "rl_token": names[1], "assets": "embedded", "obs_stride": 4,
        "max_episode_steps": 24, "seed": 0,
    }  # fmt: skip
    ours = RayVectorEnv(partial(make_libero_part, per_worker, **kwargs), workers, per_worker, seed=0, needs=NEEDS)
    theirs = make_rl_token_libero_vec(workers * per_worker, **kwargs)
    try:
        train, selection = {"init_states": "train"}, {"init_states": "selection"}
        assert ours.metadata["fingerprint"] == theirs.metadata["fingerprint"]
        shorter = train | {"train_episode_steps": 16}
        plan = [(train, 5, 7), (selection, None, 4), (train, None, 4), (shorter, None, 3), (train, None, 3)]
        assert check_same_episodes(ours, theirs, plan) >= 8
        assert ours.train_episode_steps == theirs.unwrapped.train_episode_steps == 16
        with pytest.raises(ValueError, match=r"train_episode_steps must be an integer in 1\.\.24, got 25"):
            ours.reset(options={"train_episode_steps": 25})
    finally:
        ours.close()
        theirs.close()


def test_tasks_have_the_weights_and_horizons_that_they_have_on_one_machine(cluster):
    """Also the episodes that begin without a reset, and those of a worker that is made again."""
    ours, theirs = fake(3, 2), FakeRLTokenVectorEnv(6, init_states="eval", **FAKE)
    options = {"init_states": "train", "train_episode_steps": [7, 12]}
    try:
        for weights, seed in (([1, 3], 5), ([2, 1], 6), ([1, 1], 7)):
            played = []
            for env in (ours, theirs):
                env.reset(seed=seed, options=options)
                env.set_task_weights(weights)
                ends = []
                for _ in range(8):
                    final = env.step(np.zeros(env.action_space.shape, np.float32))[-1].get("final_info", {})
                    ends += [] if not final else [(final["task_id"].tolist(), final["episode_steps"].tolist())]
                played.append(ends)
            assert played[0] == played[1]
        with pytest.raises(ValueError, match="task weights must be 2 integers"):
            ours.set_task_weights([1])
        ours.set_task_weights([0, 1])
        ours.reset(options=options)
        os.kill(place_of(ours._workers._actors[0])[1], signal.SIGKILL)
        tasks = [ours.step(np.zeros(ours.action_space.shape, np.float32))[-1]["task_id"].tolist() for _ in range(6)]
        assert ours.worker_restarts and tasks == [[3] * 6] * 6
    finally:
        ours.close()
        theirs.close()


def make_libero_part(num_envs, **kwargs):
    """As runs make their parts: one thread, a module of ours."""
    os.environ["RLT_ALLOWED_IMPORTS"] = "one_row"
    torch.set_num_threads(1)
    return make_rl_token_libero_vec(num_envs, **kwargs)


def test_errors_are_those_of_one_environment(cluster):
    env = fake(1, 2)
    try:
        env.reset()
        with pytest.raises(ValueError, match="init_states, train_episode_steps and shard only"):
            env.reset(options={"reset_mask": np.array([True, False])})
        everywhere = r"NaN or inf for environments \[0, 1\]"
        for bad, named in ((np.nan, everywhere), (np.inf, everywhere), (1j, "complex128")):
            with pytest.raises(
                ValueError, match=f"^actions must be finite real numbers, got {named}; nothing was exec"
            ):
                env.step(np.full(env.action_space.shape, bad))
        with pytest.raises(ValueError, match=r"actions must have shape \(2, "):
            env.step(np.zeros((3, *env.action_space.shape[1:])))
        with pytest.raises(ValueError, match="init_states must be one of"):
            env.reset(options={"init_states": "test"})
        with pytest.raises(ValueError, match=r"chunk_length must be an integer in 1\.\.100, got 0"):
            RayVectorEnv(partial(FakeRLTokenVectorEnv, 2, chunk_length=0), 1, 2, needs=NEEDS)
    finally:
        env.close()
    with pytest.raises(ClusterError, match=r"4 workers with 1 CPUs and 0 GPUs each do not fit: .*3 CPUs"):
        fake(4, 1)
    with pytest.raises(ClusterError, match=r"1 workers with 1 CPUs and 0\.5 GPUs each do not fit"):
        check_room(1, NEEDS | {"num_gpus": 0.5})


def kill_machine(cluster, machine):
    cluster.remove_node(machine, allow_graceful=False)
    while any(row["NodeID"] == machine.node_id and row["Alive"] for row in ray.nodes()):
        time.sleep(0.1)


def test_a_lost_machine_costs_its_episodes_only(cluster):
    """It dies between two steps. All rows of the others are those of an undisturbed run."""
    machine = cluster.add_node(num_cpus=3, object_store_memory=STORE)
    ours, theirs = fake(3, 2, timeout=60.0), FakeRLTokenVectorEnv(6, init_states="eval", **FAKE)
    try:
        for env in (ours, theirs):
            env.reset(seed=3)
        actions = np.zeros((6, 4, 7), dtype=np.float32)
        check_equal(ours.step(actions), theirs.step(actions))
        lost = [w for w, actor in enumerate(ours._workers._actors) if place_of(actor)[0] == machine.node_id]
        assert lost and len(lost) < 3  # SPREAD
        before = ours.step(actions)
        check_equal(before, theirs.step(actions))
        kill_machine(cluster, machine)
        members = np.concatenate([ours.members[w] for w in lost])
        rest = np.setdiff1d(np.arange(6), members)
        obs, rewards, terminations, truncations, infos = ours.step(actions)
        expected = theirs.step(actions)
        assert infos["worker_restarted"].tolist() == [env in members for env in range(6)]
        assert truncations[members].all() and not terminations[members].any() and not rewards[members].any()
        for key in obs:
            np.testing.assert_array_equal(obs[key][rest], expected[0][key][rest])
        np.testing.assert_array_equal(rewards[rest], expected[1][rest])
        for env in members:
            final, old = infos["final_info"], before[4]
            check_equal(infos["final_obs"][env], {key: value[env] for key, value in before[0].items()})
            assert final["chunk_steps"][env] == 0 and not final["step_rewards"][env].any()
            assert final["init_index"][env] == old["init_index"][env] == infos["init_index"][env]  # plays it again
            assert final["episode_steps"][env] == old["episode_steps"][env] and infos["episode_steps"][env] == 0
            assert infos["worker_restarts"][env] == final["worker_restarts"][env] == 1
        assert ours.worker_restarts == len(members)
        for _ in range(6):  # whole episodes: those that were lost are played, and none is left out
            obs, _, _, _, infos = ours.step(actions)
            expected = theirs.step(actions)
            for key in obs:
                np.testing.assert_array_equal(obs[key][rest], expected[0][key][rest])
            assert not infos["worker_restarted"].any()
        ours._workers._needs["num_cpus"] = 2.0  # as if the machine that is left were smaller
        os.kill(place_of(ours._workers._actors[0])[1], signal.SIGKILL)
        with pytest.raises(ClusterError, match=r"3 workers with 2 CPUs and 0 GPUs each do not fit: .* 1 machines"):
            ours.step(actions)
    finally:
        ours.close()


def test_a_worker_that_hangs_is_killed_and_made_again(cluster, monkeypatch):
    """There is room for the new one only when its process is gone."""
    env = fake(1, 2, timeout=90.0, needs={"num_cpus": 2.0})
    try:
        first, _ = env.reset(seed=1)
        pid = place_of(env._workers._actors[0])[1]
        os.kill(pid, signal.SIGSTOP)
        answer, patience = env._workers.answer, iter([1.0])  # later answers may take their time
        monkeypatch.setattr(env._workers, "answer", lambda *asked: answer(*asked, timeout=next(patience, None)))
        obs, _, _, truncations, infos = env.step(np.zeros(env.action_space.shape, dtype=np.float32))
        assert not os.path.exists(f"/proc/{pid}")
        assert truncations.all() and infos["worker_restarted"].all() and infos["init_index"].tolist() == [1, 0]
        check_equal(obs, first)
    finally:
        env.close()
