"""``train_freq=(n, "overlap")``: updates while the simulators play, one chunk later, and nothing else."""

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from rlt_models import SMALL, Rows, fast, make_model, make_venv
from run_helpers import same
from sleepy_env import SleepyVectorEnv
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecMonitor

from rlt_sb3 import RLT, GymnasiumVecEnv
from rlt_sb3.common.schedules import ChunkSchedule

OVERLAP = (1, "overlap")
#: All that depends on when something happens: a schedule of the pull, trials, an odd number of updates per row.
SETTINGS = fast(
    utd=0.75, bc_coef=ChunkSchedule(20.0, 5.0, chunks=60), gate={"share": 0.5, "window": 4}, action_scale="auto"
)


def sleepy(num_envs=2, **kwargs):
    return VecMonitor(GymnasiumVecEnv(SleepyVectorEnv(num_envs, **kwargs)), info_keywords=("is_success",))


def everything(model):
    """Networks, optimizers, counters, the gate and the rows."""
    storage = model.replay_buffer.storage
    rows = np.flatnonzero(storage.is_row(np.arange(storage.size)))
    return {
        "parameters": model.get_parameters(),
        "counters": [model.num_timesteps, model._n_updates, model._update_credit, model.num_control_steps],
        "gate": None if model.gate is None else model.gate.state_dict(),
        "gaps": list(model._value_bias.gaps),
        "rows": [th.as_tensor(storage.actions[rows]), th.as_tensor(storage.obs["z_rl"][rows])],
    }


def reference_loop(model, env, chunks, delay):
    """
    A learner written by hand on RLT's parts: act, step, then the updates for the rows of ``delay`` steps before.

    The updates that a serial learner does after step t are done after step t + delay has begun. What is begun cannot
    be seen by the fake task, so the updates are done before its ``step`` here.
    """
    model._setup_learn(chunks)
    owed, updates, waiting = 0.0, 0, []
    while model.num_timesteps < chunks:
        actions, stored_actions = model._sample_action(model.learning_starts, None, env.num_envs)
        if delay:
            for count in waiting:
                model.train(count, model.batch_size)
            waiting = []
        obs, rewards, dones, infos = env.step(actions)
        model.num_timesteps += env.num_envs
        before = model.replay_buffer.rows_stored
        model._update_info_buffer(infos, dones)
        model._store_transition(model.replay_buffer, stored_actions, obs, rewards, dones, infos)
        model._update_current_progress_remaining(model.num_timesteps, chunks)
        if model.num_timesteps > model.learning_starts:
            owed += model.utd * (model.replay_buffer.rows_stored - before)
            count = int(owed + 1e-9) + max(model.critic_warmup_updates - updates, 0)
            owed -= int(owed + 1e-9)
            updates += count
            waiting.append(count)
        if not delay:
            for count in waiting:
                model.train(count, model.batch_size)
            waiting = []
    return waiting, owed


@pytest.mark.parametrize("num_envs", [1, 3])
def test_it_is_the_serial_loop_with_one_chunk_of_delay(num_envs):
    model = make_model(num_envs, **SETTINGS, train_freq=OVERLAP)
    model.learn(120)
    other = make_model(num_envs, **SETTINGS)
    waiting, owed = reference_loop(other, other.env, 120, delay=1)
    assert model._n_updates > 60 and model.gate.candidates and len(waiting) == 1
    assert model._update_credit == pytest.approx(waiting[0] + owed)
    model._update_credit = other._update_credit = 0.0
    assert same(everything(model), everything(other))


def test_it_is_that_on_libero_too():
    """Real simulators and the shipped VLA; the workers have begun to play before the updates."""
    env = gym.make_vec("RLToken-LIBERO-v0", 2, task_ids=[1], assets="embedded", max_episode_steps=24)
    venv, begun = GymnasiumVecEnv(env), []
    settings = SETTINGS | {"learning_starts": 6, "batch_size": 16, "device": "cpu", "seed": 0}
    try:
        model = RLT("MultiInputPolicy", venv, **settings, train_freq=OVERLAP)
        train = model.train
        model.train = lambda *args, **kwargs: (begun.append(env.unwrapped._begun), train(*args, **kwargs))
        model.learn(24)
        other = RLT("MultiInputPolicy", venv, **settings)
        waiting, _ = reference_loop(other, other.env, 24, delay=1)
    finally:
        venv.close()
    assert len(begun) == 8 and all(step is not None for step in begun) and len(waiting) == 1
    other._update_credit = model._update_credit
    assert model._n_updates > 4 and same(everything(model), everything(other))


def test_the_serial_loop_has_no_delay():
    model = make_model(2, **SETTINGS)
    model.learn(120)
    other = make_model(2, **SETTINGS)
    reference_loop(other, other.env, 120, delay=0)
    other._update_credit = model._update_credit
    assert same(everything(model), everything(other))
    overlapped = make_model(2, **SETTINGS, train_freq=OVERLAP)
    overlapped.learn(120)
    assert not same(overlapped.get_parameters(), model.get_parameters())


def test_timing_changes_nothing():
    """Simulators that take random times, twice, and some that take none."""
    results = []
    for longest in (0.02, 0.005, 0.0):
        model = make_model(venv=sleepy(2, longest=longest), **SETTINGS, train_freq=OVERLAP)
        model.learn(90)
        results.append(everything(model))
    at_once = make_model(2, **SETTINGS, train_freq=OVERLAP)  # nothing happens between the parts of a step
    at_once.learn(90)
    assert at_once._n_updates > 40
    assert all(same(everything(at_once), result) for result in results)


def test_updates_are_computed_while_the_simulators_play():
    venv = sleepy(2, longest=0.0)
    model = make_model(venv=venv, **SETTINGS | {"train_freq": OVERLAP, "utd": 2.0})
    events, train = venv.unwrapped.env.events, model.train

    def noted(gradient_steps, batch_size):
        events.append(gradient_steps)
        train(gradient_steps, batch_size)

    model.train = noted
    model.learn(24)
    order = [event for event in events if event != "played"]
    # 16 chunks of warm-up; the updates for the rows of step 9 are done in step 10, those of step 12 are still owed
    assert order == ["begin", "end"] * 9 + ["begin", 8, "end"] + ["begin", 4, "end"] * 2
    assert model._update_credit == 4.0
    model.learn(2, reset_num_timesteps=False)
    assert [event for event in events if event != "played"][-3:] == ["begin", 4, "end"]


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("utd", [0.3, 2.5])
@pytest.mark.parametrize("frequency", [1, 4])
def test_updates_per_row_are_those_of_the_serial_learner(num_envs, utd, frequency):
    model = make_model(
        num_envs, utd=utd, learning_starts=12, critic_warmup_updates=7, train_freq=(frequency, "overlap")
    )
    for chunks, reset in ((60, True), (36, False)):
        model.learn(chunks, reset_num_timesteps=reset)
        rollout = frequency * num_envs
        seen = -(-(model.num_timesteps - rollout) // rollout) * rollout  # all rows but those of the last rollout
        assert model._n_updates == 7 + int(utd * (seen - 12) + 1e-6)
        assert model._n_updates + int(model._update_credit + 1e-6) == 7 + int(utd * (model.num_timesteps - 12) + 1e-6)


def test_log_and_callbacks_have_the_serial_order():
    """When a callback sees step t, the updates for all rows before it are done, as without overlap."""

    class Seen(BaseCallback):
        def _on_training_start(self):
            self.seen = []

        def _on_rollout_start(self):
            self.seen.append("rollout")

        def _on_step(self):
            self.seen.append((self.num_timesteps, self.model._n_updates, self.model.replay_buffer.rows_stored))
            return True

    found = []
    for frequency in (1, OVERLAP):
        model, callback = make_model(2, **SETTINGS, train_freq=frequency), Seen()
        model.learn(60, callback=callback)
        found.append(callback.seen)
    assert found[0] == found[1] and found[0][-1][1] > 20


def test_a_callback_that_stops_leaves_the_updates_of_earlier_rows_done():
    class Stop(BaseCallback):
        def _on_step(self):
            return self.num_timesteps < 40

    counts = []
    for frequency in (1, OVERLAP):
        model = make_model(2, **SETTINGS, train_freq=frequency)
        model.learn(100, callback=Stop())
        counts.append((model.num_timesteps, model._n_updates, model.replay_buffer.rows_stored))
    assert counts[0] == counts[1] and counts[0][0] == 40


def test_learn_in_parts_is_one_learn():
    whole = make_model(2, **SETTINGS, train_freq=OVERLAP)
    whole.learn(90)
    parts = make_model(2, **SETTINGS, train_freq=OVERLAP)  # a model is seeded when it is made
    for number, chunks in enumerate((40, 20, 30)):
        parts.learn(chunks, reset_num_timesteps=number == 0)
    assert same(everything(whole), everything(parts))


def test_saved_models_keep_the_switch_and_the_owed_updates(tmp_path):
    model = make_model(2, **SETTINGS, train_freq=OVERLAP)
    model.learn(60)
    model.save(tmp_path / "model.zip")
    loaded = RLT.load(tmp_path / "model.zip", env=make_venv(2), device="cpu")
    assert loaded.overlap and loaded.train_freq == model.train_freq
    assert loaded._update_credit == model._update_credit >= 1.0
    assert not RLT.load(tmp_path / "model.zip", device="cpu", train_freq=1).overlap
    assert not RLT.load(tmp_path / "model.zip", device="cpu", train_freq=(2, "step")).overlap
    make_model(2, **SETTINGS).save(tmp_path / "serial.zip")
    assert not RLT.load(tmp_path / "serial.zip", device="cpu").overlap
    assert RLT.load(tmp_path / "serial.zip", device="cpu", train_freq=OVERLAP).overlap


def test_the_actor_that_plays_is_in_evaluation_mode():
    """Updates in the midst of a rollout leave the networks as a rollout has them."""
    modes = []

    class Modes(Rows):
        def _on_step(self):
            modes.append(self.model.policy.training)
            return super()._on_step()

    model = make_model(2, **SETTINGS, train_freq=OVERLAP)
    model.learn(40, callback=Modes())
    assert model._n_updates and not any(modes)


def test_an_interrupted_update_gives_the_step_up():
    """The next learn() resets the environments, and no row has the action of a step that was lost."""
    venv = sleepy(2, longest=0.0)
    model, train = make_model(venv=venv, **SETTINGS, train_freq=OVERLAP), RLT.train

    def interrupted(gradient_steps, batch_size):
        if model.num_timesteps == 40:
            raise KeyboardInterrupt
        train(model, gradient_steps, batch_size)

    model.train = interrupted
    with pytest.raises(KeyboardInterrupt):
        model.learn(60)
    assert venv.unwrapped.env.events[-2:] != ["played", "end"] and model.replay_buffer.rows_stored == 40
    del model.train
    rows = Rows()
    model.learn(20, callback=rows, reset_num_timesteps=False)
    assert model.num_timesteps == 60 and model.replay_buffer.rows_stored == 60
    decode = np.linalg.pinv(venv.unwrapped.env._encoder)
    assert np.abs(rows.obs[0]["z_rl"] @ decode)[:, :2].max() <= 0.1 + 1e-5  # episodes begin that near to the origin
    assert rows.infos[0]["episode_steps"] == rows.infos[0]["chunk_steps"]


def test_other_units_are_refused():
    with pytest.raises(ValueError, match=r"train_freq must be an integer >= 1 .*\(n, 'overlap'\), got \(1, 'always'\)"):
        RLT("MultiInputPolicy", make_venv(1), **SMALL | {"train_freq": (1, "always")})
    for wrong in ((0, "overlap"), (1, "overlap", 2), ("overlap", 1), "overlap", 0.5):
        with pytest.raises(ValueError, match="train_freq must be"):
            RLT("MultiInputPolicy", make_venv(1), **SMALL | {"train_freq": wrong})
