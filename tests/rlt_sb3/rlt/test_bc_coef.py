"""The actor's pull: on which rows, how strong, and how strong when; what belongs to it is saved and resumed."""

import shutil

import numpy as np
import pytest
import torch as th
import yaml
from rlt_models import Numpy, compare_gradients, fast, make_model, make_venv, oracle_model, random_obs, to_numpy
from run_helpers import quick, same, without_clocks
from stable_baselines3.common.utils import LinearSchedule

from rlt_sb3 import RLT
from rlt_sb3.cli.main import parse
from rlt_sb3.common.schedules import ChunkSchedule
from rlt_sb3.experiment.models import resolve_settings
from rlt_sb3.experiment.train import resume, train

# ---------------------------------------------------------------- which rows


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_failures_pull_less(weight):
    """Loss and gradients against numpy; rows of both kinds are in the batch."""
    model, batch = oracle_model(reference_dropout=0.0, bc_failure_weight=weight)
    with th.no_grad():  # interior actions, as in the test of the plain update
        batch.observations["vla_ref"].mul_(0.2)
        for parameter in (model.actor.mu[-1].weight, model.actor.mu[-1].bias):
            parameter.mul_(0.1)
    success = np.arange(16) % 3 == 0
    batch = batch._replace(successful=th.as_tensor(success[:, None].astype(np.float32)))
    oracle = Numpy(model)
    obs, _, _ = to_numpy(batch)
    reference = obs["vla_ref"].reshape(16, -1)

    def loss() -> float:
        actions = oracle.actor("actor", obs)
        q = oracle.q("critic", obs, actions).mean(0)
        per_row = ((actions - reference) ** 2).mean(axis=1)
        return float(-q.mean() + 3.0 * sum(d if s else weight * d for d, s in zip(per_row, success, strict=True)) / 16)

    stats = model._update_actor(batch)
    assert float(stats[0]) == pytest.approx(loss(), abs=1e-5)
    assert stats[5] == pytest.approx(success.mean())
    compare_gradients(model, oracle, "actor", ("mu.0.weight", "mu.4.bias"), 10, loss)


def test_a_direct_actor_is_first_fitted_to_the_vla_on_all_rows():
    """Before it follows the critics, failures show as well as successes what the VLA does."""
    model, batch = oracle_model(reference_dropout=0.0, policy_kwargs={"actor_mode": "direct"}, bc_failure_weight=0.0)
    batch = batch._replace(successful=th.zeros(16, 1))
    stats = model._update_actor(batch, follow_q=False)
    assert float(stats[0]) == pytest.approx(3.0 * float(stats[2])) and float(stats[2]) > 0.1


@pytest.mark.parametrize("stride", [None, 2])
def test_marks_in_training_follow_the_episodes(stride):
    model = make_model(3, venv=make_venv(3, obs_stride=stride), learning_starts=1000)
    episodes: list[list] = [[] for _ in range(3)]
    expected: dict[bytes, bool] = {}
    store = model._store_transition

    def watch(buffer, action, new_obs, reward, dones, infos):
        before = {key: value.copy() for key, value in model._last_obs.items()}
        store(buffer, action, new_obs, reward, dones, infos)
        for i, info in enumerate(infos):
            seen = [before["z_rl"][i]]
            if stride:
                seen += [info["inner_obs"]["z_rl"][n] for n in range(int(info["inner_count"]))]
            episodes[i] += [z.tobytes() for z in seen]
            if dones[i]:
                expected.update(dict.fromkeys(episodes[i], bool(info["is_success"])))
                episodes[i] = []

    model._store_transition = watch
    model.learn(90)
    rows = model.replay_buffer.storage
    expected.update((key, False) for episode in episodes for key in episode)  # still running
    slots = np.flatnonzero(rows.is_row(np.arange(rows.size)))
    marks = {rows.obs["z_rl"][slot].tobytes(): bool(rows.successful[slot]) for slot in slots}
    assert len(marks) > 80 and set(marks.values()) == {True, False}
    assert marks == {key: expected[key] for key in marks}


def test_an_episode_cut_off_is_no_success():
    model = make_model(1, learning_starts=1000)
    model.learn(1)
    model.end_trajectories()
    obs = random_obs(model, 1)
    info = {"step_rewards": np.array([0, 0, 0, 1.0]), "chunk_steps": 4, "is_success": True}
    model.replay_buffer.add(obs, obs, np.zeros((1, 4, 7)), np.ones(1), np.ones(1, bool), [info])
    rows = model.replay_buffer.storage
    assert [bool(rows.successful[slot]) for slot in range(rows.written) if rows.is_row(slot)] == [False, True]


def test_without_is_success_a_positive_last_reward_is_one():
    for reward, success in ((1.0, True), (0.0, False), (-0.1, False)):
        model = make_model(1)
        obs, info = random_obs(model, 1), {"step_rewards": np.array([0, reward, 0, 0]), "chunk_steps": 2}
        model.replay_buffer.add(obs, obs, np.zeros((1, 4, 7)), np.full(1, reward), np.ones(1, bool), [info])
        assert bool(model.replay_buffer.sample(1).successful) is success


def test_zero_weight_is_no_pull_and_a_large_one_nothing_else():
    """With weight 0 the target of the pull changes no gradient; with weight 1000 the actor ends at the target."""
    model, batch = oracle_model(reference_dropout=0.0)
    model.bc_coef = 0.0
    gradients = []
    for shift in (0.0, 0.5):  # another reference to be pulled to must not matter
        th.manual_seed(0)
        state = {key: value.clone() for key, value in model.policy.state_dict().items()}
        model._update_actor(batch._replace(bc_target=batch.bc_target + shift))
        gradients.append([parameter.grad.clone() for parameter in model.actor.parameters()])
        model.policy.load_state_dict(state)
    assert all(th.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert max(float(g.abs().max()) for g in gradients[0]) > 0

    strong, batch = oracle_model(reference_dropout=0.0, policy_kwargs={"actor_mode": "direct"})
    strong.bc_coef = 1e3
    strong.actor.optimizer.param_groups[0]["lr"] = 3e-3
    for _ in range(800):
        strong._update_actor(batch)
    with th.no_grad():
        distance = strong.actor(batch.observations) - batch.bc_target
    assert float(distance.pow(2).mean()) < 1e-3


# ---------------------------------------------------------------- when


def test_schedule_follows_the_progress():
    """The weight used is the schedule's at the present progress, in the loss and in the log."""
    model, batch = oracle_model(reference_dropout=0.0)
    distance = (model.actor(batch.observations) - batch.bc_target).pow(2).mean().item()
    q = model.critic.actor_q(batch.observations, model.actor(batch.observations)).mean().item()
    state = {key: value.clone() for key, value in model.policy.state_dict().items()}
    model.bc_coef = LinearSchedule(20.0, 5.0, 0.5)
    for progress, weight in ((1.0, 20.0), (0.8, 14.0), (0.5, 5.0), (0.1, 5.0)):
        model._current_progress_remaining = progress
        stats = model._update_actor(batch)
        assert float(stats[4]) == pytest.approx(weight)
        assert float(stats[0]) == pytest.approx(weight * distance - q, abs=1e-4)
        model.policy.load_state_dict(state)


def test_constant_and_constant_schedule_are_the_same_run():
    def trained(bc_coef):
        return make_model(learning_starts=16, critic_warmup_updates=4, bc_coef=bc_coef).learn(60).policy.state_dict()

    assert same(trained(7.0), trained(lambda progress: 7.0))


def test_schedules_are_saved_with_the_model(tmp_path):
    model = make_model(learning_starts=16, critic_warmup_updates=4, bc_coef=LinearSchedule(20.0, 5.0, 1.0))
    model.learn(60)
    model.save(tmp_path / "model.zip")
    loaded = RLT.load(tmp_path / "model.zip", device="cpu")
    assert [loaded.bc_coef(progress) for progress in (1.0, 0.5, 0.0)] == [20.0, 12.5, 5.0]
    # gone on with, it goes on where it was: 60 of 120 chunks are half of it
    loaded.set_env(make_venv(2))
    seen = []
    update = loaded._update_actor
    loaded._update_actor = lambda *args, **kwargs: seen.append(update(*args, **kwargs)) or seen[-1]
    loaded.learn(60, reset_num_timesteps=False)
    weights = [float(stats[4]) for stats in seen]
    assert 12.0 < weights[0] < 12.5 and weights[-1] < 5.3 and np.all(np.diff(weights) <= 0)


def test_bad_schedules():
    for bad, message in (
        (lambda progress: progress - 0.5, "bc_coef must be >= 0, or a schedule"),
        ("lin_20", "bc_coef must be a number or a schedule"),
        ({"start": 1.0, "end": 0.0}, "bc_coef must be a number or a schedule"),
    ):
        with pytest.raises(ValueError, match=message):
            make_model(bc_coef=bad)
    with pytest.raises(ValueError, match="bc_failure_weight"):
        make_model(bc_failure_weight=1.5)


# ---------------------------------------------------------------- in configurations


def test_schedules_in_configurations(tmp_path):
    (tmp_path / "c.yaml").write_text("rlt:\n  bc_coef: {start: 20, end: 5, end_fraction: 0.5}\n  learning_rate: 1e-3\n")
    config = parse("train", ["--config", str(tmp_path / "c.yaml")])
    settings = resolve_settings("rlt", config.settings)
    assert [settings["bc_coef"](progress) for progress in (1.0, 0.75, 0.2)] == [20.0, 12.5, 5.0]
    # the configuration itself stays what can be written to a file
    assert config.settings["bc_coef"] == {"start": 20, "end": 5, "end_fraction": 0.5}
    override = parse("train", ["--config", str(tmp_path / "c.yaml"), "--rlt.bc_coef", "{start: 3, end: 1}"])
    assert resolve_settings("rlt", override.settings)["bc_coef"](0.5) == 2.0
    assert resolve_settings("tqc", {"learning_rate": {"start": 1, "end": 0}})["learning_rate"](0.25) == 0.25
    for bad, message in (
        ({"start": 20}, "start: NUMBER, end: NUMBER"),
        ({"start": 20, "end": 5, "shape": 1}, "start: NUMBER, end: NUMBER"),
        ({"start": 20, "end": "low"}, "start: NUMBER, end: NUMBER"),
        ({"start": 20, "end": 5, "end_fraction": 2}, "end_fraction must be in"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve_settings("rlt", {"bc_coef": bad})


def test_a_resumed_run_equals_the_whole_one(tmp_path, monkeypatch):
    """Schedule, marks of successes and rows of interventions are continued bit for bit."""
    monkeypatch.setattr("rlt_sb3.experiment.report.write_report", lambda run: None)
    config = quick(tmp_path, name="one", total_chunks=120, save_every=80)
    config.algorithms["rlt"] = config.settings | {
        "bc_coef": {"start": 20.0, "end": 1.0}, "bc_failure_weight": 0.1,
        "replay_buffer_kwargs": {"offline_ratio": 0.25, "intervention_rows": 30},
    }  # fmt: skip
    config.env.kwargs = {"intervention": {"target": "intervention_runs:someone", "kwargs": {}, "path": None}}
    one = train(config).run
    assert yaml.safe_load((one / "config.yaml").read_text())["rlt"]["bc_coef"] == {"start": 20.0, "end": 1.0}
    shutil.copytree(one, tmp_path / "two")
    two = resume(tmp_path / "two" / "checkpoints" / "chunk-00000080").run
    parameters = [RLT.load(run / "model.zip", device="cpu").get_parameters() for run in (one, two)]
    assert same(*parameters)
    rows = [without_clocks(run / "metrics.csv") for run in (one, two)]
    assert rows[0] == rows[1] and len(rows[0]) > 10
    weights = [float(row["train/bc_coef"]) for row in rows[0] if "train/bc_coef" in row]
    assert len(weights) > 5 and np.all(np.diff(weights) < 0) and 1.0 < weights[-1] < 5.0


def test_a_schedule_in_chunks_ignores_the_length_of_training():
    """3,000 chunks are 3,000 chunks in a short and in a long learn(); SB3's schedules stretch."""
    seen = {}
    for total in (60, 90):
        model = make_model(bc_coef=ChunkSchedule(10.0, 2.0, chunks=60), **fast())
        log = seen[total] = {}
        original = model._update_actor

        def spy(batch, follow_q, bc_coef, model=model, log=log, original=original):
            stats = original(batch, follow_q, bc_coef)
            log[model.num_timesteps] = stats[4].item()
            return stats

        model._update_actor = spy
        model.learn(total)
    assert seen[60].items() <= seen[90].items() and len(seen[60]) > 10
    assert seen[90] == {n: pytest.approx(max(10 - 8 * n / 60, 2.0)) for n in seen[90]}
    with pytest.raises(ValueError, match=r"two numbers and an integer >= 1 \(chunks\), got ChunkSchedule\(start=1"):
        ChunkSchedule(1.0, 0.5, 0)
    with pytest.raises(ValueError, match="bc_coef must be a ChunkSchedule of numbers >= 0"):
        make_model(bc_coef=ChunkSchedule(-1.0, 0.5, 10))
