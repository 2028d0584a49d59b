"""What ``RLT.learn`` counts, which actor acts when, which rows it stores, and what it logs."""

import warnings

import numpy as np
import pytest
import torch as th
from rlt_models import (
    Rows,
    fast,
    make_model,
    make_venv,
    random_obs,
)
from stable_baselines3 import TD3
from stable_baselines3.common.callbacks import BaseCallback, CheckpointCallback, EvalCallback
from stable_baselines3.common.logger import Logger

from rlt_sb3 import RLT
from rlt_sb3.common.chunk_outcome import ChunkOutcome
from rlt_sb3.common.value_bias import ValueBias


@pytest.mark.parametrize(("num_envs", "train_freq"), [(1, 1), (3, 1), (1, 4), (3, 4), (1, (2, "episode"))])
@pytest.mark.parametrize("utd", [0.3, 1.0, 2.5])
def test_updates_per_row_are_exact(num_envs, train_freq, utd):
    model = make_model(num_envs, utd=utd, learning_starts=12, critic_warmup_updates=7, train_freq=train_freq)
    model.learn(60)
    rows = model.num_timesteps - 12
    assert model._n_updates == 7 + int(utd * rows + 1e-6)
    model.learn(30, reset_num_timesteps=False)
    assert model._n_updates == 7 + int(utd * (model.num_timesteps - 12) + 1e-6)


def test_policy_delay_is_counted_over_calls():
    model = make_model(**fast(policy_delay=3, critic_warmup_updates=0))
    model.learn(20)
    calls = []
    original = model._update_actor
    model._update_actor = lambda *args, **kwargs: (calls.append(model._n_updates), original(*args, **kwargs))[1]
    for _ in range(12):
        model.train(1, 32)
    assert calls == [n for n in range(calls[0], calls[0] + 12, 3)] and all(n % 3 == 0 for n in calls)


def test_actor_waits_for_the_critics():
    model, rows = make_model(learning_starts=16, critic_warmup_updates=30, utd=1.0, exploration_std=0.0), Rows()
    start = [p.clone() for p in model.actor.parameters()]
    critic = [p.clone() for p in model.critic.parameters()]
    model.learn(18, callback=rows)
    assert model._n_updates == 32
    model = make_model(learning_starts=16, critic_warmup_updates=30, utd=1e-6)
    model.learn(18)
    assert model._n_updates == 30
    assert all(th.equal(a, b) for a, b in zip(start, model.actor.parameters(), strict=True))
    assert not all(th.equal(a, b) for a, b in zip(critic, model.critic.parameters(), strict=True))
    model.train(2, 32)
    assert not all(th.equal(a, b) for a, b in zip(start, model.actor.parameters(), strict=True))


@pytest.mark.parametrize("act_with", ["target", "online"])
def test_which_actor_acts(act_with):
    model = make_model(policy_kwargs=dict(act_with=act_with), **fast())
    model.learn(40)
    obs = random_obs(model, 6)
    tensors = {key: th.as_tensor(value) for key, value in obs.items()}
    with th.no_grad():
        online, target = model.actor(tensors).numpy(), model.actor_target(tensors).numpy()
    assert not np.array_equal(online, target)
    played = model.predict(obs, deterministic=True)[0].reshape(6, -1)
    assert np.array_equal(played, target if act_with == "target" else online)


def test_direct_actor_is_fitted_to_the_vla_while_it_waits():
    model = make_model(
        policy_kwargs={"actor_mode": "direct"}, learning_starts=64, critic_warmup_updates=600, learning_rate=1e-3
    )
    obs = None
    model.learn(66)
    obs = model.replay_buffer.sample(64).observations
    with th.no_grad():
        error = (model.actor(obs) - obs["vla_ref"].flatten(1)).pow(2).mean().item()
    assert error < 0.05


def test_a_direct_actor_does_not_follow_critics_that_know_nothing():
    model = make_model(policy_kwargs={"actor_mode": "direct"}, learning_starts=16, critic_warmup_updates=20, utd=1.0)
    calls, original = [], model._update_actor

    def watched(batch, follow_q, bc_coef):
        calls.append((model._n_updates, follow_q))
        return original(batch, follow_q, bc_coef)

    model._update_actor = watched
    model.learn(40)
    assert calls == [(count, count > 20) for count in range(2, model._n_updates + 1, 2)] and calls[-1][1]


def test_control_steps_and_n_step_buffer():
    model, rows = make_model(**fast(n_steps=4, gamma=0.95)), Rows()
    model.learn(60, callback=rows)
    assert model.num_control_steps == sum(info["chunk_steps"] for info in rows.infos)
    assert model.replay_buffer.n_steps == 4 and model.replay_buffer.gamma == 0.95 and model.n_steps == 4


def test_time_outs_bootstrap_in_the_stored_rows():
    model = make_model(**fast())
    model.learn(200)
    buffer = model.replay_buffer
    rows = np.flatnonzero(buffer.storage.is_row(np.arange(1000)))
    timed_out, solved = buffer.storage.truncated[rows], buffer.storage.step_rewards[rows].sum(1) > 0
    assert timed_out.any() and solved.any()
    assert np.array_equal(buffer.storage.terminated[rows], solved)
    # the row of a time-out leads to the last observation of its episode, not to the first one of the next
    batch = buffer._gather(rows)
    way = batch.next_observations["proprio"] - batch.observations["proprio"]
    assert way[:, :2].norm(dim=1)[th.as_tensor(timed_out)].max() <= 4 * 0.1 * np.sqrt(2) + 1e-5


def test_learn_twice_cuts_returns():
    model = make_model(learning_starts=1000, n_steps=3)
    model.learn(10)
    model.learn(10)
    rows = model.replay_buffer.storage
    # the observation after the tenth row is no row: the second call began with a reset
    newest = [episode.slot for episode in model.replay_buffer.open_episodes if episode is not None]
    open_ends = {
        int(slot)
        for slot in rows.next_slot[rows.is_row(np.arange(rows.size))]
        if not rows.is_row(slot) and slot not in newest
    }
    finals = {int(slot) for slot, done in zip(rows.next_slot, rows.terminated | rows.truncated, strict=True) if done}
    assert len(open_ends - finals) == 2


def test_training_twice_gives_the_same_model():
    def run():
        model = make_model(venv=make_venv(2), **fast())
        model.learn(60)
        return model.policy.state_dict()

    first, second = run(), run()
    assert all(th.equal(first[key], second[key]) for key in first)


def outcome(steps, rewards) -> ChunkOutcome:
    return ChunkOutcome(steps, np.array(rewards, dtype=float), np.zeros((2, 1)))


def test_value_bias():
    tracker = ValueBias(2, gamma=0.5, window=4, patience=3)
    outcomes = [outcome(2, [0, 0]), outcome(1, [1, 0])]
    dones = np.array([False, True])
    tracker.step(outcomes, dones, lambda: np.array([0.5, 0.25]))
    assert tracker.gap == pytest.approx(0.25 - 1.0) and tracker.control_steps == 3
    # env 0 goes on: reward 1 at its fourth control step; env 1's next episode was not promised anything
    outcomes = [outcome(2, [0, 1]), outcome(2, [0, 0])]
    tracker.step(outcomes, np.array([True, True]), None)
    assert list(tracker.gaps) == pytest.approx([-0.75, 0.5 - 0.5**3])
    with pytest.warns(UserWarning, match="over-estimate"):
        for _ in range(8):
            tracker.step([outcome(2, [0, 0])] * 2, np.array([True, True]), lambda: np.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            tracker.step([outcome(2, [0, 0])] * 2, np.array([True, True]), lambda: np.ones(2))


def test_a_broken_episode_has_no_gap():
    """What its return would have been, nobody knows; the next episode has a promise of its own."""
    tracker = ValueBias(2, gamma=0.5)
    broken = ChunkOutcome(0, np.zeros(2), np.zeros((2, 1)), broken=True)
    tracker.step([outcome(2, [0, 0])] * 2, np.array([False, False]), lambda: np.ones(2))
    tracker.step([broken, outcome(1, [1, 0])], np.array([True, True]), lambda: np.full(2, 9.0))
    assert list(tracker.gaps) == [1.0 - 0.5**2]
    tracker.step([outcome(1, [1, 0])] * 2, np.array([True, True]), lambda: np.full(2, 0.25))
    assert list(tracker.gaps)[1:] == [0.25 - 1.0] * 2


def test_a_reset_from_outside_forgets_what_running_episodes_were_promised():
    model = make_model(**fast())
    model.learn(60)
    tracker = model._value_bias
    while tracker.new.any() or np.isnan(tracker.promised).any():
        model.learn(2, reset_num_timesteps=False)
    gaps = list(tracker.gaps)
    model.end_trajectories()
    ends = [outcome(1, [1, 0])] * 2
    tracker.step(ends, np.array([True, True]), lambda: np.full(2, 0.25))
    assert list(tracker.gaps)[len(gaps) :] == [0.25 - 1.0] * 2


def test_logs(tmp_path):
    model = make_model(**fast(tensorboard_log=str(tmp_path)))
    values = {}

    class Collect(BaseCallback):
        def _on_step(self) -> bool:
            values.update(self.logger.name_to_value)
            return True

    model.learn(80, callback=Collect(), log_interval=10**6)
    model.dump_logs()
    assert list(tmp_path.glob("RLT_1/events*"))
    wanted = {"critic_loss", "q_mean", "q_std", "target_mean", "target_min", "target_max"}
    wanted |= {"actor_loss", "actor_q", "bc_loss", "bc_distance", "n_updates", "learning_rate"}
    assert {f"train/{name}" for name in wanted} <= values.keys()
    assert 0.0 <= values["train/target_min"] <= values["train/target_max"] <= 1.0
    assert model._value_bias.gap is not None


def test_logged_errors_are_those_of_the_critics():
    model = make_model(policy_kwargs={"n_critics": 3}, **fast(target_policy_noise=0.0))  # no chance in the targets
    model.learn(40)
    model.set_logger(Logger(None, []))
    original, errors = model._update_critic, []

    def watch(batch):
        with th.no_grad():
            errors.append(model.critic.q_values(batch.observations, batch.actions) - model._targets(batch))
        return original(batch)

    model._update_critic = watch
    model.train(5, 32)
    squares = th.stack(errors).pow(2)
    assert squares.shape == (5, 3, 32)
    logged = model.logger.name_to_value
    assert logged["train/td_error"] == pytest.approx(squares.mean().sqrt().item())
    assert logged["train/critic_loss"] == pytest.approx(3 * squares.mean().item())


def test_callbacks_and_progress_bar(tmp_path):
    model = make_model(**fast())
    evaluate = EvalCallback(
        make_venv(2, init_states="eval"), n_eval_episodes=4, eval_freq=10, log_path=str(tmp_path), verbose=0,
        best_model_save_path=str(tmp_path / "best"),
    )  # fmt: skip
    checkpoint = CheckpointCallback(20, str(tmp_path), save_replay_buffer=True)
    model.learn(60, callback=[evaluate, checkpoint], progress_bar=True)
    results = np.load(tmp_path / "evaluations.npz")
    assert results["successes"].shape == (3, 4)
    assert (tmp_path / "best" / "best_model.zip").exists() and (tmp_path / "rl_model_40_steps.zip").exists()
    assert isinstance(RLT.load(tmp_path / "best" / "best_model.zip"), TD3)
    assert len(model.ep_success_buffer) > 0
