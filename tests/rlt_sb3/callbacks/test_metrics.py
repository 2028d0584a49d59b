"""What a run logs: documented keys in both places, numbers against independent sums, films, Weights & Biases."""

import csv
import json
import re
import threading
from types import SimpleNamespace

import gymnasium as gym
import imageio.v2 as imageio
import numpy as np
import psutil
import pytest
import toy_env
from run_helpers import ROOT, quick, small
from stable_baselines3.common.logger import Logger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlt_gym.core.wrappers import GripperPenalty
from rlt_gym.testing import FakeRLTokenVectorEnv
from rlt_sb3.callbacks.metrics import MetricsCallback, action_names, control_frequency, throughput
from rlt_sb3.common.loggers import CSVWriter, WandbWriter
from rlt_sb3.experiment.config import EvalSettings
from rlt_sb3.experiment.models import make_model, make_vec_env
from rlt_sb3.experiment.report import read_evaluations, read_metrics
from rlt_sb3.experiment.train import train

PAGE = (ROOT / "docs" / "modules" / "metrics.md").read_text()
DOCUMENTED = set(re.findall(r"`((?:time|rollout|train|selection|buffer)/[a-z_*]+)`", PAGE))


def hooked(**kwargs):
    """Someone turns every other action round, the policy acts from control step 4 on, the gripper costs."""
    env = FakeRLTokenVectorEnv(
        intervention=lambda simulator, proposed, step: -proposed if step % 2 else None,
        critical_phase=lambda simulator: simulator.env._steps[simulator.index] >= 4,
        **kwargs,
    )
    return GripperPenalty(env, signal="command")


gym.register("Hooked-v0", vector_entry_point=hooked)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    before = threading.active_count(), len(psutil.Process().children(recursive=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlt_sb3.experiment.report.write_report", lambda run: None)
        evaluation = EvalSettings(n_states=4, selection_states=4, selection_every=40, videos=False)
        config = small(tmp_path_factory.mktemp("run"), total_chunks=100, evaluation=evaluation, video_every=3)
        config.settings.update({"gate": {"share": 0.5, "window": 2}, "utd": 1.5})
        folder = train(config).run
    # clean shutdown: no thread, no process is left
    assert (threading.active_count(), len(psutil.Process().children(recursive=True))) == before
    return folder


def test_logged_keys_are_the_documented_ones(run, tmp_path, monkeypatch):
    """``*`` in the documentation stands for the action's dimensions, tasks and terms of the reward."""
    in_wandb = set()
    account = SimpleNamespace(id="x", log=lambda numbers, step: in_wandb.update(numbers), finish=lambda: None)
    monkeypatch.setattr("rlt_sb3.common.loggers.import_wandb", lambda: SimpleNamespace(init=lambda **settings: account))
    monkeypatch.setattr("rlt_sb3.experiment.report.write_report", lambda run: None)
    # with everything that adds keys and is not in the other run
    config = quick(tmp_path, "Hooked-v0", guard="restore", wandb={"project": "x"})
    config.env.task_ids = [0, 1]
    with_hooks = train(config).run
    assert in_wandb == set(read_metrics(with_hooks))
    general = set()
    for folder in (run, with_hooks):
        columns = set(read_metrics(folder))
        events = EventAccumulator(str(folder / "tensorboard")).Reload()
        assert columns == set(events.Tags()["scalars"])
        general |= {re.sub(r"(_distance_|_rate_task_|/reward_).*", r"\1*", key) for key in columns}
    # of on-policy algorithms, of a token or a VLA that is trained (test_trained_token.py, test_trained_vla.py), and of
    # collectors (test_async_run.py), of a reward model (test_reward_run.py), of a gripper's critic
    # (test_gripper_critic.py)
    elsewhere = {"time/iterations", "train/recon_loss", "train/imitation_loss", "rollout/staleness"}
    elsewhere |= {"rollout/stale_chunks", "rollout/tasks_deployed", "rollout/judged_wrongly", "train/gripper_loss"}
    elsewhere |= {"rollout/task_weight_*"}
    assert general == DOCUMENTED - elsewhere


def test_numbers(run):
    metrics = read_metrics(run)
    last = -1
    assert metrics["time/robot_minutes"][last] == pytest.approx(200 / 20 / 60)
    assert metrics["time/control_steps"][last] == 200 and metrics["time/chunks"][last] == 100
    assert (np.diff(metrics["time/total_timesteps"]) > 0).all()
    assert metrics["rollout/worker_restarts"][last] == 0
    # two environments, 98 chunks stored before the last step; they are 2, 4, ... 98 chunks old
    assert metrics["buffer/rows"][last] == 98 and metrics["buffer/age_chunks"][last] == np.arange(2, 100, 2).mean()
    known = metrics["rollout/throughput"][~np.isnan(metrics["rollout/throughput"])]
    assert (known >= 0).all() and known.max() > 0
    # three successes in 600 control steps (half a simulated minute) are sixty in ten minutes
    assert throughput(3, 600, 20.0) == 60.0 and throughput(0, 0, 20.0) == 0.0
    # during learning_starts the VLA's chunks are played
    distances = metrics["rollout/vla_distance_sign"]
    first, *_, newest = np.flatnonzero(~np.isnan(distances))
    assert metrics["time/chunks"][first] < 20 and distances[first] == 0.0 and distances[newest] > 0


def test_the_rate_of_trials_is_that_of_a_full_window(run):
    rates = read_metrics(run)["rollout/trial_success_rate"]
    rates = rates[~np.isnan(rates)]
    assert len(rates) > 5 and np.isin(rates, np.arange(3) / 2).all()


def test_updates_follow_the_rows(run):
    """1.5 for every row after the first 20, and 5 for the warm-up; no more than that since a row was stored."""

    def updates(chunks):
        return np.where(chunks > 20, 5 + 1.5 * (chunks - 20), 0)

    metrics = read_metrics(run)
    steps = metrics["time/total_timesteps"]
    made = updates(steps - 2)  # those for the last step are owed: they are made while the next one is played
    np.testing.assert_array_equal(metrics["train/n_updates"], np.where(made > 0, made, np.nan))
    ages = [updates(step - 2) - updates(np.arange(2, step, 2) - 2).mean() for step in steps]
    np.testing.assert_allclose(metrics["buffer/age_updates"], ages)
    assert (np.diff(made) > 0).sum() > 10


def test_selection_evaluations_as_they_were_played(run):
    metrics = read_metrics(run)
    points = read_evaluations(run)["selection"]
    lengths = np.array([4, 6, 8, 4])  # control steps of the toy's episodes 0 to 3, solved or not
    for point in points:
        at = np.flatnonzero(metrics["time/total_timesteps"] == point["chunks"])
        solved = np.array([row["success"] for row in point["evaluation"]["rows"]])
        assert solved.any()
        assert metrics["selection/success_rate"][at] == solved.mean()
        assert metrics["selection/steps_to_success"][at] == pytest.approx(lengths[solved].mean())
        # ten minutes are 12,000 control steps
        assert metrics["selection/throughput"][at] == pytest.approx(solved.sum() * 12_000 / lengths.sum())
    assert [point["chunks"] for point in points] == [40, 80, 100]


def test_every_task_has_its_own_rate_and_all_share_one_batch(tmp_path, monkeypatch):
    """Ten tasks in three environments; each task's successes are counted, the policy is asked once per step."""
    from rlt_sb3 import RLT

    monkeypatch.setattr("rlt_sb3.experiment.report.write_report", lambda run: None)
    batches, outcomes, episodes = [], {}, []
    choose, store = RLT._sample_action, RLT._store_transition

    def watch_choice(self, *args, **kwargs):
        chunks, stored = choose(self, *args, **kwargs)
        batches.append(len(chunks))
        return chunks, stored

    def watch_store(self, buffer, action, new_obs, reward, dones, infos):
        for info, done in zip(infos, dones, strict=True):
            if done:
                outcomes.setdefault(info["task_id"], []).append(info["is_success"])
                episodes.append((info["is_success"], info["episode_steps"]))
        store(self, buffer, action, new_obs, reward, dones, infos)

    monkeypatch.setattr(RLT, "_sample_action", watch_choice)
    monkeypatch.setattr(RLT, "_store_transition", watch_store)
    config = quick(tmp_path, total_chunks=360, evaluation=EvalSettings(10, 10, 120, videos=False))
    config.env.num_envs, config.env.task_ids = 3, list(range(10))
    metrics = read_metrics(train(config).run)
    assert batches == [3] * 120
    assert set(outcomes) == set(range(10))
    for task in range(10):
        column = metrics[f"rollout/success_rate_task_{task}"]
        assert column[~np.isnan(column)][-1] == pytest.approx(np.mean(outcomes[task]))
        chosen = metrics[f"selection/success_rate_task_{task}"]
        assert set(chosen[~np.isnan(chosen)]) <= {0.0, 1.0} and (~np.isnan(chosen)).any()
    assert len({float(np.mean(seen)) for seen in outcomes.values()}) > 2
    # of the last hundred episodes; ten minutes are 12,000 control steps
    solved, steps = np.array(episodes[-100:]).T
    assert len(episodes) > 100 and 0 < solved.sum() < 100
    assert metrics["rollout/steps_to_success"][-1] == pytest.approx(steps[solved == 1].mean())
    assert metrics["rollout/throughput"][-1] == pytest.approx(solved.sum() * 12_000 / steps.sum())


class BreaksOnce(FakeRLTokenVectorEnv):
    """Sub-environment 0 loses its worker in the first chunk, as ``LIBERO-v0`` tells it."""

    steps = 0

    def step(self, actions):
        self.steps += 1
        obs, rewards, terminations, truncations, infos = super().step(actions)
        if self.steps == 1:
            assert not (terminations | truncations).any()
            truncations[0], first = True, np.array([True, False])
            final = {key: value for key, value in infos.items() if not key.startswith("_")}
            infos |= {"final_info": final | {"worker_restarted": first}, "_final_info": first}
            infos |= {"final_obs": obs, "_final_obs": first}
            self._steps[0] = self.episodes[0].steps = 0
        return obs, rewards, terminations, truncations, infos


def test_broken_episodes_are_in_no_mean():
    venv = make_vec_env("rlt", BreaksOnce(2, chunk_length=2, max_episode_steps=8))
    model = make_model("rlt", venv, {"learning_starts": 100}, seed=0)
    callback = MetricsCallback()
    model.learn(2 * 12, callback=callback)
    assert callback.restarts == 1 and model._episode_num > len(callback.episodes) > 0
    assert len(model.ep_info_buffer) == len(model.ep_success_buffer) == len(callback.episodes) == model._episode_num - 1
    assert [bool(success) for success in model.ep_success_buffer] == [success for success, _ in callback.episodes]


@pytest.mark.parametrize("critical", [None, False, True])
@pytest.mark.parametrize("taken_over", [False, True])
def test_distance_is_that_of_the_executed_chunk(critical, taken_over):
    """The policy plays the reference plus 0.25; a takeover holds 0.5 at control steps 0, 2, ... of an episode."""
    hooks = {}
    if taken_over:
        hooks["intervention"] = lambda simulator, proposed, step: np.full(7, 0.5) if step % 2 == 0 else None
    if critical is not None:
        hooks["critical_phase"] = lambda simulator: critical
    venv = make_vec_env("rlt", FakeRLTokenVectorEnv(1, max_episode_steps=8, **hooks))
    model = make_model("rlt", venv, {"learning_starts": 100}, seed=0)
    model.set_logger(Logger(None, []))
    callback = MetricsCallback()
    callback.init_callback(model)
    model._last_obs = obs = venv.reset()
    reference = obs["vla_ref"].copy()
    reference[..., 6] = 0.0  # room for a difference within [-1, 1]
    obs["vla_ref"] = reference
    chosen = np.clip(reference + 0.25, -1.0, 1.0)
    _, _, _, infos = venv.step(chosen)
    callback._record_distance([info["outcome"] for info in infos])
    assert infos[0]["chunk_steps"] == 4
    # before the critical phase the environment plays its own reference, whose gripper is at -1
    policy = reference if critical is False else chosen
    expected = (policy - reference)[0, :, 2] ** 2
    if taken_over:
        expected[::2] = 0.5**2
    assert model.logger.name_to_value["rollout/vla_distance_z"] == pytest.approx(np.sqrt(expected.mean()))


def test_names_and_frequency_are_those_of_the_robot():
    env = FakeRLTokenVectorEnv(1)
    venv = make_vec_env("rlt", env)
    assert control_frequency(venv) == 20.0 and action_names(venv, 7)[-1] == "gripper"
    env.metadata["robot"] = SimpleNamespace(control_frequency=10.0, action_names=tuple("abcdefg"))
    assert control_frequency(venv) == 10.0 and action_names(venv, 7) == tuple("abcdefg")
    assert action_names(venv, 2) == ("0", "1")
    del env.metadata["robot"]
    assert control_frequency(venv) is None and action_names(venv, 2) == ("0", "1")


def test_films_of_training_and_selection(run):
    films = {path.name: path for path in (run / "videos").iterdir()}
    training = [name for name in films if name.startswith("train-")]
    episodes = {int(name.split("-")[1]) for name in training}
    assert episodes and all(number % 3 == 0 for number in episodes)
    assert {name.split("-")[0] for name in films} == {"train", "selection"}
    outcomes = {name.rsplit("-", 1)[1] for name in films}
    assert outcomes == {"success.mp4", "failure.mp4"}
    # pairs 0 and 3 last two chunks of two control steps; the toy has no picture of the end
    for end in ("state-000-success.mp4", "state-003-failure.mp4"):
        name = (
            f"selection-00000040-practicing-{end}"  # what predict() plays is still the VLA, which does not play again
        )
        assert len(imageio.mimread(films[name])) == 4, name


class ToyWithLastPicture(toy_env.ToyVectorEnv):
    """Shows the end of an episode as well, as ``LIBERO-v0`` does; pictures are brighter by 20 after each step."""

    last_picture = True

    def _frame(self, env):
        return np.full((16, 16, 3), 20 * self._steps[env], dtype=np.uint8)


class ToyWithoutFilm(ToyWithLastPicture):
    """Cannot draw inside its chunks, as other people's environments."""

    film = None


gym.register("ToyWithLastPicture-v0", vector_entry_point=ToyWithLastPicture)
gym.register("ToyWithoutFilm-v0", vector_entry_point=ToyWithoutFilm)


def chunks_of_toy_episodes(num_steps):
    """Of two environments: number of the episode, in the order in which they begin -> its length, if it has ended."""
    lengths, pairs, current, left = [], [1, 0], [0, 0], [0, 0]
    ended = set()
    for _ in range(num_steps):
        for env in range(2):
            if left[env] == 0:
                current[env], left[env] = len(lengths), 2 + pairs[env] % 3
                lengths.append(left[env])
                pairs[env] += 2
        for env in range(2):
            left[env] -= 1
            if left[env] == 0:
                ended.add(current[env])
    return {episode: lengths[episode] for episode in sorted(ended)}


@pytest.mark.parametrize("env_id, step, fps", [("ToyWithLastPicture-v0", 1, 20.0), ("ToyWithoutFilm-v0", 2, 10.0)])
def test_films_show_every_control_step(env_id, step, fps, tmp_path, monkeypatch):
    """
    The first picture and one after every control step, each of its own environment, in training and in selection, and
    in real time (20 control steps a second). Without ``film``, one picture for each chunk.
    """
    monkeypatch.setattr("rlt_sb3.experiment.report.write_report", lambda run: None)
    settings = EvalSettings(n_states=2, selection_states=4, selection_every=10**6, videos=False)
    config = small(tmp_path, env_id, total_chunks=60, evaluation=settings, video_every=2)
    shown = {}
    for path in (train(config).run / "videos").iterdir():
        kind, number = path.name.split("-")[0], int(path.name.split("-")[1 if path.name.startswith("train") else 3])
        shown[kind, number] = [round(float(frame.mean()) / 20) for frame in imageio.mimread(path)]
        assert imageio.get_reader(path).get_meta_data()["fps"] == fps
    lengths = {("train", episode): chunks for episode, chunks in chunks_of_toy_episodes(30).items()}
    lengths |= {("selection", pair): 2 + pair % 3 for pair in range(4)}
    assert len(lengths) > 20
    assert shown == {key: [*range(0, 2 * chunks + 1, step)] for key, chunks in lengths.items() if key[1] % 2 == 0}


def test_no_film_without_the_setting(tmp_path, monkeypatch):
    monkeypatch.setattr("rlt_sb3.experiment.report.write_report", lambda run: None)
    monkeypatch.setattr(toy_env.ToyVectorEnv, "render", lambda self: pytest.fail("rendered"))
    config = small(tmp_path, total_chunks=40, evaluation=EvalSettings(2, 2, 40, videos=False))
    assert not (train(config).run / "videos").exists()


def test_csv_rows_increase_and_survive(tmp_path):
    path = tmp_path / "metrics.csv"
    logger = Logger(None, [CSVWriter(path)])

    def log(step, **values):
        for key, value in values.items():
            logger.record(key, value)
        logger.dump(step)

    def rows():  # as another process sees them, nothing closed
        with path.open() as file:
            return list(csv.DictReader(file))

    log(10, a=1)
    log(20, a=2, b="x, y")
    log(20, c=3.5)  # a second row for the same step becomes part of the first
    log(30, b="z")
    names = ["time/total_timesteps", "a", "b", "c"]
    assert [[row[n] for n in names] for row in rows()] == [
        ["10", "1", "", ""], ["20", "2", "x, y", "3.5"], ["30", "", "z", ""],
    ]  # fmt: skip
    with path.open("a") as file:
        file.write("4")  # killed in the middle of a row
    logger = Logger(None, [CSVWriter(path, last_step=20)])
    log(25, a=9)
    assert [row["time/total_timesteps"] for row in rows()] == ["10", "20", "25"]
    logger.close()


def test_wandb(tmp_path):
    pytest.importorskip("wandb")
    settings = {"mode": "offline", "settings": {"console": "off", "x_disable_stats": True}}
    logger = Logger(None, [WandbWriter(tmp_path, settings, "toy", {"seed": 3})])
    logger.record("train/q_mean", 0.5)
    logger.dump(10)
    logger.close()
    assert json.loads((tmp_path / "wandb.json").read_text())["id"]
    (stored,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert stored.stat().st_size > 0


def test_wandb_missing(monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"pip install rlt\[wandb\]"):
        train(small(tmp_path, wandb={"project": "x"}))
    assert list(tmp_path.iterdir()) == []
