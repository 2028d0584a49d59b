"""
The rows of the chunk buffer against an oracle that knows every control step: an observation is (env, episode, control
step), and actions and rewards follow from it.
"""

import threading
import time

import numpy as np
import pytest
import torch as th
from buffer_world import ACT, GAMMA, OBS, C, D, World, everything, make, observation, stack
from gymnasium import spaces

from rlt_sb3 import ChunkReplayBuffer
from rlt_sb3.common.chunk_outcome import ChunkOutcome


@pytest.mark.parametrize("stride", [None, 1, 2, 3])
@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("count", [1, 3, 60])
def test_every_row_against_the_oracle(stride, n_steps, count):
    """Each row replayed control step by control step, and exactly the rows that there should be."""
    world = World(3, seed=count, stride=stride)
    buffer = make(1000, 3, n_steps, stride=stride)
    world.feed(buffer, count)
    batch = everything(buffer)
    assert world.check(batch, n_steps) == set(world.starts())
    assert len(batch.rewards) == buffer.size() == buffer.rows_stored == len(world.starts())
    if count > 1:
        np.random.seed(0)
        sampled = world.check(buffer.sample(300), n_steps)
        assert len(sampled) > min(100, 0.7 * buffer.size())


@pytest.mark.parametrize("stride", [None, 2])
@pytest.mark.parametrize("n_steps", [1, 9])
@pytest.mark.parametrize("size", [1, 4, 25, 80])
def test_wrapped_ring(stride, n_steps, size):
    """Rows that survived are the newest and still right, with their next observations and returns."""
    world = World(2, seed=size, stride=stride)
    buffer = make(size, 2, n_steps, stride=stride)
    for _ in range(12):
        world.feed(buffer, 5)
        assert 1 <= buffer.size() <= buffer.storage.size
        kept = world.check(everything(buffer), n_steps)
        newest = sorted(kept & {start for start in world.starts() if start[0] == 0})
        all_of_env = sorted(start for start in world.starts() if start[0] == 0)
        if stride is None and newest:
            assert newest == all_of_env[-len(newest) :]
    assert buffer.full and buffer.rows_stored == len(world.starts())
    # slots hold rows, final observations and newest observations, nothing else
    if size >= 25:
        assert buffer.size() >= 0.6 * buffer.storage.size


@pytest.mark.parametrize("stride", [None, 2])
def test_broken_chunks_leave_no_row(stride):
    world = World(3, seed=4, stride=stride, longest=40)
    buffer = make(2000, 3, 2, stride=stride)
    world.feed(buffer, 150, broken=0.15)
    assert len(world.finished) > 10 and len(world.known) > len(world.finished) + 20
    assert world.check(everything(buffer), 2) == set(world.starts())


@pytest.mark.parametrize("stride", [None, 2])
@pytest.mark.parametrize("missing", [{3}, {5}, {0, 2, 3, 5}, {1, 4}])
@pytest.mark.parametrize("ending", ["success", "failure", "broken"])
def test_rows_beside_a_chunk_that_is_not_stored_know_how_the_episode_ended(missing, ending, stride):
    """As when an actor was too old: the chunk is missing, in the midst of the episode or at its end."""
    buffer = make(200, 2, 3, stride=stride)

    def inner(env, n):
        return {} if stride is None else {"inner_obs": stack([observation(env, 0, C * n + 2)]), "inner_count": 1}

    for n in range(6):
        outcomes = [
            ChunkOutcome(
                C, np.zeros(C), np.zeros((C, D)), success=n == 5 and ending == "success", stored=n not in missing,
                broken=n == 5 and ending == "broken", **inner(0, n),
            ),
            ChunkOutcome(C, np.zeros(C), np.zeros((C, D)), **inner(1, n)),  # its episode goes on
        ]  # fmt: skip
        obs, after = (stack([observation(env, 0, C * (n + more)) for env in range(2)]) for more in (0, 1))
        done = np.array([n == 5, False])
        buffer.add(obs, after, np.zeros((2, C, D)), np.zeros(2), done, [{"outcome": one} for one in outcomes])
    storage = buffer.storage
    slots = np.flatnonzero(storage.is_row(np.arange(storage.size)))
    place = storage.obs["proprio"][slots].astype(int)
    mine = place[:, 0] == 0
    chunks = set((place[mine, 2] // C).tolist())
    assert chunks == set(range(6)) - missing - ({5} if ending == "broken" else set())
    assert (storage.successful[slots] == (mine if ending == "success" else False)).all()


def test_time_out_bootstraps_and_termination_does_not():
    world = World(1, seed=1)
    buffer = make()
    world.feed(buffer, 40)
    batch = everything(buffer)
    ends = [tuple(int(x) for x in row) for row in batch.next_observations["proprio"]]
    kinds = {world.succeeds(*key[:2]) for key in ends if key[:2] in world.finished}
    assert kinds == {True, False}
    for key, done in zip(ends, batch.dones[:, 0].tolist(), strict=True):
        last = key[:2] in world.finished and key[2] == world.known[key[:2]]
        assert done == float(last and world.succeeds(*key[:2]))
    careless = make(timeout_is_failure=True)
    world = World(1, seed=1)
    world.feed(careless, 40)
    assert everything(careless).dones.sum() == len(world.finished)


def test_plain_environment_counts_as_full_chunk():
    buffer = make()
    first, second = stack([observation(0, 0, 0)]), stack([observation(0, 0, 4)])
    buffer.add(first, second, np.zeros((1, C, D)), np.array([0.7]), np.array([False]), [{}])
    batch = everything(buffer)
    np.testing.assert_allclose([batch.rewards.item(), batch.discounts.item()], [0.7, GAMMA**C], rtol=1e-6)
    assert batch.mask.all()


def test_other_actions_count_as_one_control_step():
    buffer = ChunkReplayBuffer(10, OBS, spaces.Box(-1, 1, (5,), np.float32), device="cpu", gamma=GAMMA)
    first, second = stack([observation(0, 0, 0)]), stack([observation(0, 0, 1)])
    buffer.add(first, second, np.ones((1, 5)), np.array([0.7]), np.array([False]), [{}])
    batch = buffer.sample(2)
    assert batch.actions.shape == (2, 5) and batch.discounts[0].item() == pytest.approx(GAMMA)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("stride", [None, 2])
def test_reset_from_outside_cuts_returns(told, stride):
    """Also where nobody told: an observation that is not the one expected begins a new trajectory."""
    world = World(2, seed=3, stride=stride, longest=60)
    buffer = make(n_envs=2, n_steps=3, stride=stride)
    buffer.end_trajectories()  # harmless while empty
    for count in (4, 1, 7):
        world.feed(buffer, count)
        world.reset()
        if told:
            buffer.end_trajectories()
    world.feed(buffer, 2)
    assert world.check(everything(buffer), 3) == set(world.starts())


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("stride", [None, 2])
def test_interventions(overwrite, stride):
    """Control steps 1 and 2 of the second chunk are a human's: flags, stored actions and BC targets follow."""
    buffer = make(stride=stride, intervention_ref="replace" if overwrite else "target")
    world = World(1, stride=stride)
    human = np.full((C, D), 0.123, np.float32)
    taken = [np.zeros(C, bool), np.array([False, True, True, False]), np.zeros(C, bool)]
    for n, flags in enumerate(taken):
        info = world.info(0, 0, n * C, C) | {"intervention": flags}
        proposed = np.stack([world.action(0, 0, n * C + j) for j in range(C)]).astype(np.float32)
        info["executed_actions"] = np.where(flags[:, None], human, proposed)
        before, after = stack([observation(0, 0, n * C)]), stack([observation(0, 0, n * C + C)])
        buffer.add(before, after, proposed[None], np.zeros(1), np.array([False]), [info])
    batch = everything(buffer)
    flags = np.concatenate([*taken, np.zeros(C, bool)])
    for i, start in enumerate(batch.observations["proprio"][:, 2].int().tolist()):
        window = flags[start : start + C][:, None]
        own = np.stack([world.action(0, 0, start + j) for j in range(C)])
        reference = observation(0, 0, start)["vla_ref"]
        action, target = (batch.actions[i].view(C, D), batch.bc_target[i].view(C, D))
        np.testing.assert_allclose(action, np.where(window, 0.123, own), rtol=1e-6)
        np.testing.assert_allclose(target, np.where(window, 0.123, reference), rtol=1e-6)
        seen = target if overwrite else th.as_tensor(reference)
        assert th.equal(batch.observations["vla_ref"][i], seen)
        end = int(batch.next_observations["proprio"][i, 2])
        following = observation(0, 0, end)["vla_ref"]
        if overwrite and end + C <= 3 * C:
            following = np.where(flags[end : end + C][:, None], np.float32(0.123), following)
        np.testing.assert_allclose(batch.next_observations["vla_ref"][i], following, rtol=1e-6)
    assert sorted(batch.observations["proprio"][:, 2].int().tolist()) == (
        [0, 4, 8] if stride is None else [0, 2, 4, 6, 8]
    )


def test_slots_used_again_forget_interventions():
    """Final observations come where an expert's rows were: what the actor sees there is the VLA's chunk."""
    buffer = make(7, intervention_ref="replace")
    assert buffer.storage.size % 2 == 1  # an episode fills two slots: each gets both kinds of observations
    expert, own = np.full((1, C, D), -0.9, np.float32), np.full((1, C, D), 0.9, np.float32)
    for episode in range(20):
        helped = episode < 10
        info = {"step_rewards": np.zeros(C), "chunk_steps": C, "intervention": np.full(C, helped)}
        before, after = stack([observation(0, episode, 0)]), stack([observation(0, episode, C)])
        buffer.add(before, after, expert if helped else own, np.zeros(1), np.array([True]), [info])
        batch = everything(buffer)
        keys = batch.next_observations["proprio"].int().tolist()
        assert max(key[1] for key in keys) == episode
        for key, seen in zip(keys, batch.next_observations["vla_ref"], strict=True):
            np.testing.assert_array_equal(seen, observation(*key)["vla_ref"])


def test_nothing_stored_changes_with_the_arrays_given():
    """Neither the caller's arrays nor the sampled tensors share memory with the buffer."""
    world, buffer = World(1, stride=2), make(stride=2)
    originals = []
    real = buffer.add
    buffer.add = lambda *args: (originals.append(args), real(*args))
    world.feed(buffer, 6)
    for obs, next_obs, actions, _, _, infos in originals:
        for array in (*obs.values(), *next_obs.values(), actions, *infos[0]["inner_obs"].values()):
            array[...] = -77.0
        infos[0]["step_rewards"][...] = -77.0
    world.feed(buffer, 1)
    assert world.check(everything(buffer), 1) == set(world.starts())
    batch = buffer.sample(8)
    for tensor in (*batch.observations.values(), batch.actions, batch.bc_target):
        tensor[...] = -77.0
    world.check(everything(buffer), 1)


@pytest.mark.parametrize("seconds", [1.5, pytest.param(30, marks=pytest.mark.expensive)])
def test_threads(seconds):
    """Four threads add, four sample; every row sampled is one that was added, whole."""
    buffer, errors, stop = make(300, 1), [], threading.Event()
    world = World(1)

    def guarded(work, seed):
        try:
            rng = np.random.default_rng(seed)
            while not stop.is_set():
                work(rng, seed)
        except Exception as error:
            errors.append(error)

    def write(rng, writer):
        step = int(rng.integers(0, 1000))
        chunk = np.stack([world.action(writer, 0, step + j) for j in range(C)]).astype(np.float32)
        info = {"step_rewards": np.full(C, step, np.float32), "chunk_steps": C, "task_id": writer}
        before, after = stack([observation(writer, 0, step)]), stack([observation(writer, 0, step + C)])
        buffer.add(before, after, chunk[None], np.zeros(1), np.array([False]), [info])

    def read(rng, _):
        batch = buffer.sample(64)
        for i in range(0, 64, 8):
            writer, _, step = (int(x) for x in batch.observations["proprio"][i])
            np.testing.assert_allclose(batch.actions[i].view(C, D)[1], world.action(writer, 0, step + 1), rtol=1e-6)
            assert batch.next_observations["proprio"][i].tolist() == [writer, 0, step + C]
            assert batch.rewards[i].item() == pytest.approx(step * (1 - GAMMA**C) / (1 - GAMMA), rel=1e-5)
            assert batch.task_ids[i] == writer

    write(np.random.default_rng(0), 0)
    threads = [threading.Thread(target=guarded, args=(work, seed)) for seed in range(4) for work in (write, read)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds + 100  # only so that the test ends
    stop.wait(seconds)
    while buffer.rows_stored <= 300 and not errors and time.monotonic() < deadline:
        stop.wait(0.01)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    assert buffer.rows_stored > 300


@pytest.mark.parametrize(
    ("rewards", "steps"), [(np.zeros(C + 1), C), (np.zeros(C), -1), (np.zeros(C), C + 1), (np.zeros((C, 1)), 1)]
)
def test_infos_that_do_not_fit(rewards, steps):
    buffer = make()
    obs = stack([observation(0, 0, 0)])
    info = [{"step_rewards": rewards, "chunk_steps": steps}]
    with pytest.raises(ValueError, match="chunk_steps"):
        buffer.add(obs, obs, np.zeros((1, C, D)), np.zeros(1), np.zeros(1, dtype=bool), info)
    info = [{"step_rewards": np.zeros(C), "chunk_steps": C, "intervention": np.zeros(C + 1)}]
    with pytest.raises(ValueError, match="intervention"):
        buffer.add(obs, obs, np.zeros((1, C, D)), np.zeros(1), np.zeros(1, dtype=bool), info)
    assert buffer.storage.written == 0


def test_stride_needs_inner_observations():
    world, buffer = World(1, longest=50), make(stride=2)
    with pytest.raises(ValueError, match="obs_stride=2"):
        world.feed(buffer, 1)
    sparse = World(1, stride=3, longest=50)
    with pytest.raises(ValueError, match="obs_stride=1"):
        sparse.feed(make(stride=1), 1)


def test_bad_arguments():
    with pytest.raises(ValueError, match="n_steps"):
        make(n_steps=0)
    with pytest.raises(ValueError, match="gamma"):
        ChunkReplayBuffer(10, OBS, ACT, gamma=1.5)
    with pytest.raises(ValueError, match="stride"):
        make(stride=C)
    with pytest.raises(ValueError, match="optimize_memory_usage"):
        make(optimize_memory_usage=True)
    with pytest.raises(ValueError, match="empty"):
        make().sample(1)
