"""One-line changes of the algorithm that no other test notices: each test fails for the one that it names."""

import numpy as np
import pytest
import torch as th
from rlt_models import Numpy, fast, make_model, make_venv, oracle_model, random_obs, to_numpy

from rlt_sb3.common.replay.buffer import ChunkReplayBuffer

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_actor_is_pulled_to_the_target_of_the_pull():
    """Not to ``vla_ref``: they differ where someone took over and in rows of demonstrations."""
    model, batch = oracle_model(reference_dropout=0.0)
    rng = np.random.default_rng(0)
    target = rng.uniform(-1, 1, batch.bc_target.shape)
    batch = batch._replace(bc_target=th.as_tensor(target, dtype=th.float32))
    obs, _, _ = to_numpy(batch)
    oracle = Numpy(model)
    actions = oracle.actor("actor", obs)
    loss = -oracle.q("critic", obs, actions).mean() + 3.0 * ((actions - target) ** 2).mean()
    stats = model._update_actor(batch)
    assert float(stats[0]) == pytest.approx(loss, abs=1e-5)
    assert float(stats[2]) == pytest.approx(((actions - target) ** 2).mean(), abs=1e-5)


@pytest.mark.parametrize("act_with", ["target", "online"])
def test_the_actor_that_practises_goes_on_trial(act_with):
    model = make_model(**fast(gate={"share": 0.5, "window": 4}), policy_kwargs={"act_with": act_with})
    model.learn(100)
    policy, obs = model.policy, random_obs(model, 5)
    model.gate.start_trial(policy)
    with th.no_grad():
        tensors, _ = policy.obs_to_tensor(obs)
        target, online, tried = (actor(tensors) for actor in (policy.actor_target, policy.actor, policy.actor_on_trial))
    practicing, other = (target, online) if act_with == "target" else (online, target)
    assert th.equal(tried, practicing) and not th.equal(tried, other)


def rows(buffer: ChunkReplayBuffer, infos: list[dict], chunks: np.ndarray) -> None:
    """One-chunk episodes, one for each info, with the observations 0, 0.1, 0.2, ... and ``vla_ref`` 0.5."""
    for number, info in enumerate(infos):
        obs, after = (
            {key: np.full((1, *box.shape), value, np.float32) for key, box in buffer.observation_space.spaces.items()}
            for value in (0.1 * number, 0.1 * number + 0.05)
        )
        obs["vla_ref"][:] = after["vla_ref"][:] = 0.5
        buffer.add(obs, after, chunks[number][None], np.zeros(1), np.ones(1, bool), [info])


def make_buffer(**kwargs) -> ChunkReplayBuffer:
    venv = make_venv(1)
    return ChunkReplayBuffer(50, venv.observation_space, venv.action_space, device="cpu", n_envs=1, **kwargs)


def test_offline_rows_keep_their_reference():
    """The actor would see its own target in them: the VLA proposed something else than was demonstrated."""
    buffer = make_buffer(intervention_ref="replace")
    chunk = np.full((1, 4, 7), -0.25, np.float32)
    rows(buffer, [{"step_rewards": np.zeros(4), "chunk_steps": 4, "intervention": np.ones(4, bool)}], chunk)
    offline = buffer.storage
    row = np.flatnonzero(offline.is_row(np.arange(offline.size)))
    own = buffer._gather(row)  # as rows of the ring: replaced
    assert th.equal(own.observations["vla_ref"].flatten(1), own.bc_target) and (own.bc_target == -0.25).all()
    buffer.reset()
    batch = buffer._gather(row, offline)
    assert (batch.observations["vla_ref"] == 0.5).all() and (batch.next_observations["vla_ref"] == 0.5).all()
    assert (batch.bc_target == -0.25).all()


def test_rewards_after_the_executed_steps_do_not_count():
    buffer = make_buffer(gamma=0.9)
    rewards = np.array([0.0, 1.0, 50.0, np.inf])
    rows(buffer, [{"step_rewards": rewards, "chunk_steps": 2}], np.zeros((1, 4, 7), np.float32))
    assert buffer.sample(3).rewards.flatten().tolist() == pytest.approx([0.9] * 3)
    assert rewards[2] == 50.0  # the environment's array is its own
