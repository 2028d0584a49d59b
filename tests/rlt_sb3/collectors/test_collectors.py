"""Asynchronous collection: rows, episodes and trials are those that were played, whatever the order of arrival."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch as th
from local_collectors import local, make_numbered
from rlt_models import fast, make_model
from run_helpers import same
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.noise import NormalActionNoise

from rlt_gym.core.episodes import EpisodeSequence
from rlt_sb3 import RLT
from rlt_sb3.collectors.collector import Collector, OrderedSeats, Orders
from rlt_sb3.collectors.vec_env import CollectorVecEnv
from rlt_sb3.common.contenders import copied
from rlt_sb3.common.gated_policy import tasks_of
from rlt_sb3.common.task_gate import TaskGate


class Arrivals(BaseCallback):
    """Keeps each vector step as it arrives."""

    def _on_training_start(self):
        self.steps = []

    def _on_step(self):
        envs = [info["outcome"].env for info in self.locals["infos"]]
        orders = dict(vars(self.locals["orders"]))
        orders["players"] = self.locals["orders"].players_of(tasks_of(self.locals["obs"]))
        orders["age"] = self.model._n_updates - orders["counters"]["_n_updates"]
        self.steps.append((envs, {name: self.locals[name] for name in KEPT}, orders))
        return True


KEPT = ("obs", "actions", "new_obs", "rewards", "dones", "infos", "began")


class Resets(BaseCallback):
    """Resets the environments in the midst of episodes, as an evaluation in the simulators of training does."""

    def __init__(self, every):
        super().__init__()
        self.every, self.count = every, 0

    def _on_rollout_start(self):
        if self.num_timesteps // self.every > self.count:
            self.count += 1
            self.model.end_trajectories()
            self.model._last_obs = self.training_env.reset()

    def _on_step(self):
        return True


def learned(chunks=240, venv=None, also=None, **kwargs):
    seen = Arrivals()
    model = make_model(venv=local() if venv is None else venv, **fast(**kwargs))
    model.learn(chunks, callback=[seen] if also is None else [seen, also])
    return model, seen.steps


def rows_by_env(steps):
    """The chunks of each environment, in the order in which they were played."""
    found = defaultdict(list)
    for envs, step, orders in steps:
        for row, env in enumerate(envs):
            info = step["infos"][row]
            after = (
                info["terminal_observation"] if step["dones"][row] else {k: v[row] for k, v in step["new_obs"].items()}
            )
            found[env].append(
                {"obs": {k: v[row] for k, v in step["obs"].items()}, "after": after, "action": step["actions"][row],
                 "done": bool(step["dones"][row]), "outcome": info["outcome"], "began": bool(step["began"][row]),
                 "state": info.get("init_index"), "player": orders["players"][row], "weights": orders["weights"]}
            )  # fmt: skip
    return found


def test_rows_and_returns_are_those_of_each_environment():
    """Returns over three chunks, computed for each environment alone from what has arrived."""
    model, steps = learned(n_steps=3, gamma=0.9, learning_starts=1000)
    played = rows_by_env(steps)
    assert sorted(played) == list(range(6)) and len({len(rows) for rows in played.values()}) > 1  # not in turn
    expected = {}
    for rows in played.values():
        for at, row in enumerate(rows):
            total, steps_before, last = 0.0, 0, at
            for last in range(at, min(at + 3, len(rows))):
                outcome = rows[last]["outcome"]
                for j in range(outcome.steps):
                    total += 0.9 ** (steps_before + j) * outcome.step_rewards[j]
                steps_before += outcome.steps
                if rows[last]["done"]:
                    break
            expected[row["obs"]["proprio"].tobytes()] = (row["action"], total, rows[last]["after"]["proprio"])
    buffer = model.replay_buffer
    slots = np.flatnonzero(buffer.storage.is_row(np.arange(buffer.storage.size)))
    batch = buffer._gather(slots)
    assert len(slots) == len(expected) == 240
    for n in range(len(slots)):
        action, total, after = expected[batch.observations["proprio"][n].numpy().tobytes()]
        np.testing.assert_array_equal(batch.actions[n].numpy(), action.ravel())
        np.testing.assert_allclose(batch.rewards[n].item(), total, rtol=1e-5, atol=1e-7)
        np.testing.assert_array_equal(batch.next_observations["proprio"][n].numpy(), after)


def test_episodes_are_those_of_one_environment_with_all_members():
    """Each is played once, none is left out, and member j of collector w is environment j * W + W - 1 - w."""
    _, steps = learned(learning_starts=1000)
    played = {env: [row["state"] for row in rows if row["began"]] for env, rows in rows_by_env(steps).items()}
    for env, states in played.items():  # the fake numbers its episodes: env i plays N - 1 - i, 2 N - 1 - i, ...
        assert states == [5 - env + 6 * turn for turn in range(len(states))] and len(states) > 3


def without_noise(steps):
    """Episodes in the order of their start: task, (player, number of its trial), chunks that are the VLA's, success."""
    episodes, running = [], {}
    for envs, step, orders in steps:
        for row, env in enumerate(envs):
            if step["began"][row]:
                task = step["infos"][row]["outcome"].task_id or 0
                running[env] = [task, (orders["players"][row], orders["trials"][task]), [], None]
                episodes.append(running[env])
            reference = np.clip(step["obs"]["vla_ref"][row], -1, 1)
            running[env][2].append(bool(np.array_equal(step["actions"][row], reference)))
            if step["dones"][row]:
                running[env][3] = step["infos"][row]["outcome"].success
    return episodes


GATE = {"window": 4, "share": 0.5, "level": 0.3}


def test_trials_are_the_episodes_that_were_played_without_noise():
    """Baseline and candidates count what the VLA and the actor on trial have played, in the order of their start."""
    model, steps = learned(740, gate=GATE, bc_coef=2.0)
    gate, episodes = model.gate, [episode[1:] for episode in without_noise(steps)]
    by_vla = [episode for episode in episodes if episode[0][0] == "vla"]
    assert all(all(vla) for _, vla, _ in by_vla)
    assert [trial.success for trial in gate.baseline.trials] == [success for *_, success in by_vla][:16]
    assert gate.candidates > 1 and gate.on_trial and not gate.screened
    tried = [episode for episode in episodes if episode[0] == ("actor", gate.candidates)]
    assert any(not all(vla) for _, vla, _ in tried)
    assert [trial.success for trial in gate.trials.trials] == [success for *_, success in tried][:12]


def test_each_task_has_trials_of_its_own():
    """Each gate counts what was played without noise of its task, by the VLA and by its own actor on trial."""
    model, steps = learned(1100, venv=local(task_ids=[0, 2], show_task=True), gate=GATE, bc_coef=2.0)
    episodes = without_noise(steps)
    assert {task for task, *_ in episodes} == {0, 2} and not model.gate.gates[1].baseline.trials
    for task in (0, 2):
        gate, mine = model.gate.gates[task], [episode[1:] for episode in episodes if episode[0] == task]
        by_vla = [episode for episode in mine if episode[0][0] == "vla"]
        assert all(all(vla) for _, vla, _ in by_vla)
        assert [trial.success for trial in gate.baseline.trials] == [success for *_, success in by_vla][:16]
        assert gate.candidates > 1 and gate.on_trial
        tried = [episode for episode in mine if episode[0] == ("actor", gate.candidates)]
        skipped = 4 if gate.screened else 0
        assert any(not all(vla) for _, vla, _ in tried)
        expected = [success for *_, success in tried][skipped:]
        assert [trial.success for trial in gate.trials.trials] == expected[: gate.trials.size]


@pytest.mark.parametrize("lose", [None, {1: 30}])
def test_collectors_follow_the_weights_of_the_tasks(monkeypatch, lose):
    """An episode has the task that the weights say at its beginning, when the episode before it has ended."""
    monkeypatch.setattr(TaskGate, "weights", property(lambda gate: [1, 9, 2 + gate.gates[0].clock // 20 % 4]))
    venv = local(task_ids=[0, 2], show_task=True, lose=lose)
    model, steps = learned(600, venv=venv, gate=GATE, learning_starts=1000)
    seen = set()
    for rows in rows_by_env(steps).values():
        for n, row in enumerate(rows):
            if not row["began"]:
                continue
            first = n == 0 or rows[n - 1]["outcome"].broken  # after a reset, which has the weights of the next order
            weights = row["weights"] if first else rows[n - 1]["weights"]
            sequence = EpisodeSequence(1, 2)
            sequence.set_task_weights(weights)
            assert row["outcome"].task_id == (0, 2)[sequence.task_at(row["state"])]
            seen.add(tuple(weights))
    assert seen == {(1, 2), (1, 3), (1, 4), (1, 5)} and venv._workers.replaced == list(lose or ())
    assert model.gate.metrics()["task_weight_1"] == 9


def test_the_episodes_that_a_lost_collector_played_leave_the_sample_of_their_task():
    """In whatever chunk they are lost, and whoever's they are."""
    for at in range(10, 18):
        venv = local(task_ids=[0, 2], show_task=True, lose={1: at}, seed=at)
        model, steps = learned(200, venv=venv, gate=GATE, learning_starts=1000)
        broken = [outcome for rows in rows_by_env(steps).values() for row in rows if (outcome := row["outcome"]).broken]
        assert len(broken) == 2 and {outcome.task_id for outcome in broken} <= {0, 2}
        for task in (0, 2):
            trials = model.gate.gates[task].baseline.trials
            running = sum(trial.success is None for trial in trials)
            assert len(trials) > 4 and running <= 6 and all(trial.task == task for trial in trials if trial.steps)


@pytest.mark.parametrize(
    "resets",
    [
        pytest.param(None, id="one reset"),
        pytest.param(Resets(every=100), id="many resets", marks=pytest.mark.expensive),
    ],
)
def test_the_search_counts_the_offsets_that_collectors_have_tried(resets):
    """The network does not learn yet, so what is played is the VLA's chunk and the offset of the episode."""
    settings = {"net_arch": [32, 32], "offset_search": {"opening": 1000, "memory": 200}}
    chunks, gate = (900, False) if resets is None else (1200, {"share": 0.5, "window": 4})
    model, steps = learned(chunks, also=resets, exploration_std=0.0, policy_kwargs=settings, gate=gate)
    expected, running, searching = [], {}, 0
    for envs, step, _ in steps:
        for row, env in enumerate(envs):
            outcome, reference = step["infos"][row]["outcome"], step["obs"]["vla_ref"][row]
            if step["began"][row] or outcome.offset is None:  # a copy that is not on trial any more is practice
                assert step["began"][row] or not outcome.searching
                running[env] = outcome.offset
            if running[env] is None:
                assert outcome.offset is None
                continue
            np.testing.assert_array_equal(outcome.offset, running[env])
            further = outcome.offset[int(reference[:, 6].mean() > 0)] * model.action_unit
            inside = np.abs(reference) < 0.7  # beyond, the actor's chunk is limited before the difference is added
            np.testing.assert_allclose(step["actions"][row][inside], (reference + further)[inside], atol=1e-5)
            if step["dones"][row]:
                expected.append((outcome.offset[:, :6].ravel(), outcome.success))
                searching += outcome.searching
    found = list(model.search.samples[0])
    assert len(expected) > len(found) == 200 and model.actor.offset.abs().max() > 0
    assert len(expected) > searching == model.search.counted[0] > 100
    assert all(np.array_equal(a, b) and x == y for (a, x), (b, y) in zip(found, expected[-200:], strict=True))


@pytest.mark.parametrize("tasks", [{}, {"task_ids": [0, 2], "show_task": True}])
def test_one_collector_is_the_overlapped_loop(monkeypatch, tasks):
    """With one order at a time a chunk is chosen one step before the updates for the rows before it are done."""
    still = dict(exploration_std=0.0, correction_range=(1.0, 1.0), utd=0.75)
    original = RLT._sample_action

    def apart(self, *args, **kwargs):  # batches are drawn from the same numbers, whoever draws noise
        state = np.random.get_state()
        found = original(self, *args, **kwargs)
        np.random.set_state(state)
        return found

    ours, _ = learned(150, venv=local(1, 2, depth=1, **tasks), **still)
    monkeypatch.setattr(RLT, "_sample_action", apart)
    theirs = make_model(venv=make_numbered(2, **tasks), train_freq=(1, "overlap"), **fast(**still))
    theirs.learn(150)
    theirs._train_meanwhile()  # the updates that it still owes
    assert ours._n_updates > 80 and same(ours.get_parameters(), theirs.get_parameters())


@pytest.mark.parametrize("candidates", [1, 4])
def test_collectors_get_the_critics_that_choose(monkeypatch, candidates):
    """They are the learner's slow critics, anew with the first order after every 50 updates."""
    play, order, played, known = Collector.play, CollectorVecEnv._order, [], {}

    def watched_play(self, training, on_trial, critics, orders):
        result = play(self, training, on_trial, critics, orders)
        mine = copied(self._model.policy.critic_target.state_dict())
        played.append((self._model.critics_choose, orders.counters["_n_updates"], bool(critics[1]), mine))
        return result

    def watched_order(self, model, worker):
        if model.critics_choose:
            known.setdefault(model._n_updates // 50, copied(model.policy.critic_target.state_dict()))
        order(self, model, worker)

    monkeypatch.setattr(Collector, "play", watched_play)
    monkeypatch.setattr(CollectorVecEnv, "_order", watched_order)
    settings = {"net_arch": [32, 32], "offset_search": False, "candidates": candidates}
    learned(300, critic_warmup_updates=20, policy_kwargs=settings)
    assert [choose for choose, *_ in played] == [candidates > 1 and updates > 20 for _, updates, *_ in played]
    assert [given for *_, given, _ in played] == [choose for choose, *_ in played]
    seen = {updates // 50: mine for choose, updates, _, mine in played if choose}
    assert (len(seen) > 4) == (candidates > 1)
    assert all(same(mine, known[at]) for at, mine in seen.items())


def test_another_model_plays_with_its_own_parameters(tmp_path, monkeypatch):
    """Although it has as many updates as the one before, so that versions are equal."""
    venv, play, played = local(), Collector.play, []
    settings = {"net_arch": [32, 32], "offset_search": False}
    first, _ = learned(100, venv=venv, policy_kwargs=settings)
    first.save(tmp_path / "model")
    second = RLT.load(tmp_path / "model", env=venv, device="cpu")
    with th.no_grad():
        for parameter in second.policy.parameters():
            parameter.add_(0.01)
    names = ("training_actor", "critic_target")
    expected = [copied(getattr(second.policy, name).state_dict()) for name in names]

    def watched_play(self, *arguments):
        result = play(self, *arguments)
        played.append([copied(getattr(self._model.policy, name).state_dict()) for name in names])
        return result

    monkeypatch.setattr(Collector, "play", watched_play)
    second.learn(1, reset_num_timesteps=False)
    assert second.critics_choose and all(same(mine, its) for mine, its in zip(played[0], expected, strict=True))


def test_collectors_play_all_the_time_so_nothing_overlaps():
    """RLT's default ``train_freq`` would leave updates owed for ever."""
    ours, theirs = (learned(150, train_freq=frequency)[0] for frequency in (1, (1, "overlap")))
    assert ours._n_updates > 80 and ours._n_updates == theirs._n_updates
    assert same(ours.get_parameters(), theirs.get_parameters())


def test_the_same_arrivals_give_the_same_model():
    settings = dict(gate={"window": 4}, action_noise=NormalActionNoise(np.zeros((4, 7)), np.full((4, 7), 0.1)))
    first, second = (learned(200, **settings)[0] for _ in range(2))
    assert same(first.get_parameters(), second.get_parameters())
    other = learned(200, venv=local(order=1), **settings)[0]
    assert not same(first.get_parameters(), other.get_parameters())


def test_updates_per_row_are_exact_and_staleness_is_bounded_and_counted():
    model, steps = learned(400, utd=2.0)
    assert model._n_updates == 4 + 2 * (400 - 16) and model.env.stale == 0 and model.replay_buffer.rows_stored == 400
    ages = [orders["age"] for *_, orders in steps]
    assert min(ages) >= 0 and max(ages) > 20  # the answers come in any order, so some wait long
    strict, steps = learned(400, venv=local(max_staleness=20), utd=2.0)
    old = sum(len(envs) for envs, _, orders in steps if orders["age"] > 20)
    assert old > 0 and strict.env.stale == old and strict.replay_buffer.rows_stored == 400 - old
    assert strict.num_timesteps == 400 and strict._n_updates < model._n_updates


def test_a_lost_collector_costs_its_running_episodes_only():
    """They are played again from their start; no return crosses the loss, and the gate counts none of them."""
    venv = local(lose={1: 21}, seed=4)
    model, steps = learned(400, venv=venv, learning_starts=1000, gate={"window": 4})
    assert venv._workers.replaced == [1]
    broken = [row for rows in rows_by_env(steps).values() for row in rows if row["outcome"].broken]
    assert len(broken) == 2 and model.replay_buffer.rows_stored == 398
    for env in venv.members[1]:
        rows = rows_by_env(steps)[env]
        at = next(n for n, row in enumerate(rows) if row["outcome"].broken)
        start = next(row for row in reversed(rows[:at]) if row["began"])
        lost = start["state"] + (6 if rows[at - 1]["done"] else 0)  # it may have been about to begin the next one
        assert rows[at + 1]["began"] and rows[at + 1]["state"] == lost
    assert all(trial.success is not None for trial in model.gate.baseline.trials[:12])


def test_an_actor_that_was_rejected_plays_on_as_practice():
    """Only episodes that begin now are the next candidate's."""
    seats = OrderedSeats(3)
    tasks = np.zeros(3, dtype=int)
    assert seats.follow(Orders([("actor",), ("vla",), ("actor",)], (1,), {}), tasks).all()
    seats.ended(np.array([False, False, True]))
    began = seats.follow(Orders([("actor",)] * 3, (2,), {}), tasks)
    assert began.tolist() == [False, False, True] and seats.player.tolist() == ["", "vla", "actor"]


def test_a_rejected_actor_of_another_task_changes_nothing():
    """Each environment is told who plays the task that its episode has."""
    seats, tasks = OrderedSeats(3), np.array([0, 1, 1])
    seats.follow(Orders([("actor", "vla"), ("vla", "actor"), ("actor", "")], (1, 1), {}), tasks)
    assert seats.player.tolist() == ["actor", "actor", ""]
    seats.follow(Orders([("", "")] * 3, (2, 1), {}), tasks)
    assert seats.player.tolist() == ["", "actor", ""]


def test_an_episode_whose_simulator_broke_is_not_counted_as_played():
    """A collector plays it again, and so does one that takes its place later."""
    venv = local()
    answer, broken = venv._workers.answer, []

    def breaking(worker, reference, timeout=None):
        played = answer(worker, reference, timeout)
        if getattr(played, "infos", None) and len(broken) < 3 and not played.dones[0]:
            broken.append(int(venv.members[worker][0]))
            played.infos[0]["outcome"] = replace(played.infos[0]["outcome"], broken=True)
            played.infos[0]["terminal_observation"] = {key: value[0] for key, value in played.new_obs.items()}
            played.dones[0] = True
        return played

    venv._workers.answer = breaking
    _, steps = learned(100, venv=venv, learning_starts=1000)
    whole = {
        env: sum(row["done"] and not row["outcome"].broken for row in rows) for env, rows in rows_by_env(steps).items()
    }
    assert len(broken) == 3 and venv._ended.tolist() == [whole[env] for env in range(6)]


def test_new_episodes_begin_after_a_reset():
    model, _ = learned(60, gate={"window": 4})
    model.env.seed(5)
    first = model.env.reset()
    assert first["z_rl"].shape == (6, 16)
    model.end_trajectories()
    model._last_obs = first
    seen = Arrivals()
    model.learn(60, callback=seen, reset_num_timesteps=False)
    begun = {env for envs, step, _ in seen.steps for env, began in zip(envs, step["began"], strict=True) if began}
    assert begun == set(range(6)) and model.num_timesteps == 120
    for env, rows in rows_by_env(seen.steps).items():
        np.testing.assert_array_equal(rows[0]["obs"]["z_rl"], first["z_rl"][env])


def test_saved_and_loaded(tmp_path):
    model, _ = learned(100, gate={"window": 4})
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / "buffer")
    again = RLT.load(tmp_path / "model", env=local(), device="cpu")
    again.load_replay_buffer(tmp_path / "buffer")
    assert same(model.get_parameters(), again.get_parameters())
    assert again.replay_buffer.rows_stored == model.replay_buffer.rows_stored
    again.learn(60, reset_num_timesteps=False)
    assert again.num_timesteps == 160 and all(th.isfinite(p).all() for p in again.policy.parameters())


def test_it_takes_no_actions():
    with pytest.raises(RuntimeError, match="choose their chunks themselves"):
        local().step(np.zeros((6, 4, 7)))
