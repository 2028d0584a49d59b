"""A gate for each task, for observations that say which task is played."""

import json
import warnings

import numpy as np
import pytest
import torch as th
from rlt_models import fast, make_model, random_obs
from stable_baselines3.common.vec_env import VecMonitor

from rlt_gym.testing import FakeRLTokenVectorEnv
from rlt_sb3 import RLT, GymnasiumVecEnv
from rlt_sb3.callbacks.budget import BudgetCallback
from rlt_sb3.callbacks.selection import SelectionCallback
from rlt_sb3.common.chunk_outcome import ChunkOutcome
from rlt_sb3.common.gated_policy import ActorOfTask, TaskActors, tasks_of
from rlt_sb3.common.policy_gate import PolicyGate
from rlt_sb3.common.schedules import ChunkSchedule
from rlt_sb3.common.task_gate import TaskGate
from rlt_sb3.common.trials import Sample, Trial
from rlt_sb3.evaluation.results import Evaluation, StateResult

T = 3


def make_venv(num_envs=2, **kwargs):
    env = FakeRLTokenVectorEnv(num_envs, task_ids=tuple(range(T)), show_task=True, **kwargs)
    return VecMonitor(GymnasiumVecEnv(env), info_keywords=("is_success",))


def with_tasks(num_envs=2, **kwargs):
    return make_model(num_envs, make_venv(num_envs), **fast(**kwargs))


class Number(th.nn.Module):
    """An actor that plays one number."""

    def __init__(self, value=0.0):
        super().__init__()
        self.value = th.nn.Parameter(th.tensor(value))

    def forward(self, observation):
        return self.value.detach().repeat(len(observation["task"]), 1)


class Policy:
    """The copies that a gate controls; the actor that learns plays the number that is set."""

    starts_at_vla = True

    def __init__(self, n_tasks=None):
        self.training_actor = Number()
        self.actor_on_trial, self.actor_deployed = (
            Number() if n_tasks is None else TaskActors(Number() for _ in range(n_tasks)) for _ in range(2)
        )

    def start_trial(self):
        self.actor_on_trial.load_state_dict(self.training_actor.state_dict())

    def deploy(self, parameters):
        self.actor_deployed.load_state_dict(parameters)


def test_each_task_has_a_gate_as_if_it_were_alone():
    """Environment t plays task t only: T gates that know one environment each decide the same, step by step."""
    rng = np.random.default_rng(0)
    several, alone = TaskGate(T, share=1.0, window=8), [PolicyGate(share=1.0, window=8) for _ in range(T)]
    policy, policies = Policy(T), [Policy() for _ in range(T)]
    for gate, n_envs in ((several, T), *((gate, 1) for gate in alone)):
        gate.begin()
        gate.restart(n_envs)
    left, success = np.zeros(T, int), np.zeros(T, bool)
    rates = {"vla": (0.3, 0.5, 0.9), "actor": (0.95, 0.5, 0.4)}
    seen = set()
    for step in range(1500):
        observation = {"task": th.eye(T)}
        reference, practice = np.full((T, 1), -1.0), np.full((T, 1), -2.0)
        for one in (policy, *policies):
            one.training_actor.value.data.fill_(float(step))
        if step < 30:
            several.play_vla(observation)
            for gate in alone:
                gate.play_vla(observation)
            chunks = reference
        else:
            chunks = several.choose(policy, observation, practice, reference, ready=True)
            single = [
                gate.choose(its, {"task": th.eye(T)[[t]]}, practice[[t]], reference[[t]], ready=True)
                for t, (gate, its) in enumerate(zip(alone, policies, strict=True))
            ]
            assert np.array_equal(chunks, np.concatenate(single))
        assert several.noise_free.tolist() == [gate.noise_free[0] for gate in alone]
        for env in np.flatnonzero(left == 0):
            player = "vla" if chunks[env, 0] == -1.0 else "actor"
            left[env], success[env] = rng.integers(1, 5), rng.random() < rates[player][env]
        left -= 1
        dones = left == 0
        outcomes = [
            ChunkOutcome(8, np.zeros(8), np.zeros((8, 7)), success=bool(success[t] and dones[t]), task_id=t)
            for t in range(T)
        ]
        several.step(policy, outcomes, dones)
        for t, (gate, its) in enumerate(zip(alone, policies, strict=True)):
            gate.step(its, [outcomes[t]], dones[[t]])
        for mine, other in zip(several.gates, alone, strict=True):
            assert all(getattr(mine, name) == getattr(other, name) for name in PolicyGate.COUNTERS)
            assert all(getattr(mine, name).to_list() == getattr(other, name).to_list() for name in PolicyGate.SAMPLES)
            assert [one.number for one in mine.contenders] == [one.number for one in other.contenders]
        deployed = [actor.value.item() for actor in policy.actor_deployed.actors]
        assert deployed == [its.actor_deployed.value.item() for its in policies]
        seen.add(tuple(gate.approvals > 0 for gate in alone))
    assert (True, False, False) in seen and not any(worse for *_, worse in seen)
    metrics = several.metrics()
    assert metrics["approvals"] == sum(gate.approvals for gate in alone)
    assert metrics["candidates"] == sum(gate.candidates for gate in alone)
    assert metrics["tasks_deployed"] == sum(gate.approvals > 0 for gate in alone) >= 1
    again = TaskGate(T, share=1.0, window=8)
    again.load_state_dict(json.loads(json.dumps(several.state_dict())))
    assert again.state_dict()["tasks"][0]["approvals"] == several.gates[0].approvals > 0
    assert again.gates[1].player is again.gates[0].player


def test_each_task_knows_its_own_episodes_of_the_vla():
    gate = TaskGate(T, window=4)
    gate.know_vla(
        Sample(5, [Trial(-1, 8, task, success) for task, success in ((0, 1), (2, 0), (2, 1), (2, 1), (0, 1))])
    )
    assert [one.baseline.count() for one in gate.gates] == [(2, 2), (0, 0), (2, 3)]


@pytest.mark.parametrize("horizon", [None, 40])
def test_what_the_vla_did_before_training_is_the_baseline(horizon):
    """Successes beyond the horizon of training episodes are failures there."""
    model = with_tasks(gate={"share": 0.5, "window": 2})
    model.env.venv.env.train_episode_steps = 50  # of 80
    rows = [StateResult(i, i % 2, i, True, 30 + 5 * i, 4 + i) for i in range(6)]
    model.know_vla(Evaluation("frozen VLA", "selection", rows), *([] if horizon is None else [horizon]))
    expected = [(2, 3), (1, 3), (0, 0)] if horizon else [(3, 3), (2, 3), (0, 0)]
    assert [one.baseline.count() for one in model.gate.gates] == expected
    model.learn(2)  # begins a run
    assert [one.baseline.count() for one in model.gate.gates] == expected
    with_tasks(gate=False).know_vla(Evaluation("frozen VLA", "selection", rows))  # nobody asks
    with pytest.raises(ValueError, match=r"needs .* 'selection', got held-out states \('eval'\)"):
        model.know_vla(Evaluation("frozen VLA", "eval", rows))


def test_an_end_of_a_trial_leaves_the_other_tasks_trials_alone():
    gate, policy = TaskGate(2, share=1.0, window=8), Policy(2)
    gate.restart(2)
    for one in gate.gates:
        one.baseline = Sample(32, [Trial(0, 24, 0, False) for _ in range(32)])
    gate.choose(policy, {"task": th.eye(2)}, np.zeros((2, 1)), np.ones((2, 1)), ready=True)
    assert gate.gates[0].player.tolist() == ["actor", "actor"]
    gate.gates[0].abandon_trial()
    assert gate.gates[0].player.tolist() == ["", "actor"] and gate.gates[1].on_trial


def test_a_new_episode_belongs_to_its_own_task():
    """One environment that plays the tasks in turn."""
    gate, policy = TaskGate(2, share=1.0, window=8), Policy(2)
    gate.restart(1)
    for episode in range(10):
        gate.play_vla({"task": th.eye(2)[[episode % 2]]})
        outcome = ChunkOutcome(8, np.zeros(8), np.zeros((8, 7)), success=episode % 2 == 1, task_id=episode % 2)
        gate.step(policy, [outcome], np.array([True]))
    assert [one.baseline.count() for one in gate.gates] == [(0, 5), (5, 5)]


def test_rows_are_played_by_their_tasks_actor():
    actors = TaskActors(Number(float(10 * task)) for task in range(T))
    order = [2, 0, 0, 1, 2]
    observation = {"task": th.eye(T)[order], "z_rl": th.zeros(5, 4)}
    assert actors(observation)[:, 0].tolist() == [10.0 * task for task in order]
    assert tasks_of({"task": np.eye(T)[order]}).tolist() == order
    assert all(name.startswith("actors.") for name in actors.all_as(Number(7.0).state_dict()))
    actors.load_state_dict(actors.all_as(Number(7.0).state_dict()))
    assert actors(observation)[:, 0].tolist() == [7.0] * 5


def states(*successes):
    """Four selection states of each task."""
    return Sample(4 * len(successes), [Trial(0, 24, t, n < k) for t, k in enumerate(successes) for n in range(4)])


def test_an_audition_deploys_the_actor_only_where_it_is_better():
    gate, policy = TaskGate(T, window=8), Policy(T)
    gate.use_states(states(0, 0, 4))
    policy.training_actor.value.data.fill_(5.0)
    during = []
    played, names = gate.audition(
        policy, lambda: during.append([a.value.item() for a in policy.actor_deployed.actors]), lambda _: states(4, 1, 4)
    )
    assert during == [[5.0] * T] and names == [] and played is None
    assert [actor.value.item() for actor in policy.actor_deployed.actors] == [5.0, 0.0, 0.0]
    assert gate.deployed_name == "1-0-0" and not gate.plays_vla(policy)
    gate.use_states(states(0, 0, 0))
    policy.training_actor.value.data.fill_(6.0)
    assert gate.audition(policy, lambda: None, lambda _: states(4, 4, 4))[1] == [gate.deployed_name]
    assert [actor.value.item() for actor in policy.actor_deployed.actors] == [6.0] * T


def test_selection_plays_again_what_an_audition_has_put_together(tmp_path):
    """The practicing actor passes in one task of three: what is deployed is neither this actor nor the VLA."""

    def evaluation(*successes):
        rows = [StateResult(n, t, n, n < k, 5, 1) for t, k in enumerate(successes) for n in range(4)]
        return Evaluation("x", "selection", rows)

    model = with_tasks(gate={"share": 0.5, "window": 50})
    model.learn(60)
    results, deployed = [evaluation(4, 1, 2), evaluation(4, 0, 4)], []

    def evaluate(player):
        deployed.append(player.gate.deployed_name)
        return results.pop(0)

    callback = SelectionCallback(evaluate, 20, evaluation(0, 0, 4), BudgetCallback(100), tmp_path / "best.zip")
    callback.init_callback(model)
    point = callback.run()
    assert point.candidate == evaluation(4, 1, 2) and point.evaluation == evaluation(4, 0, 4)
    assert deployed == ["0-0-0", "1-0-0"] and not results and model.gate.deployed_name == "1-0-0"
    assert model.gate.gates[0].best.states.count() == (4, 4)
    results[:] = [evaluation(0, 0, 2)]  # the practicing actor only: what is deployed is known
    assert callback.run().evaluation == evaluation(4, 0, 4) and not results
    again = SelectionCallback(evaluate, 20, evaluation(0, 0, 4), BudgetCallback(100), tmp_path / "best.zip")
    again.load_state_dict(json.loads(json.dumps(callback.state_dict())))
    assert again.played == callback.played


def test_rlt_uses_it_and_learns_twice_the_same(tmp_path):
    settings = {"gate": {"share": 0.8, "window": 8}, "bc_coef": ChunkSchedule(60.0, 15.0, chunks=50), "utd": 0.5}
    models = [with_tasks(**settings, learning_starts=60).learn(600) for _ in range(2)]
    model = models[0]
    assert isinstance(model.gate, TaskGate) and isinstance(model.policy.actor_deployed, TaskActors)
    for name, value in model.policy.state_dict().items():
        assert th.equal(value, models[1].policy.state_dict()[name]), name
    assert model.gate.state_dict() == models[1].gate.state_dict()
    assert model.task_chunks.sum() == model.num_timesteps == 600 and (model.task_chunks > 100).all()
    baselines = [gate.baseline for gate in model.gate.gates]
    assert all(trial.task == task for task, one in enumerate(baselines) for trial in one.ended())
    assert all(one.complete for one in baselines) and model.gate.metrics()["candidates"] >= T
    model.save(tmp_path / "model")
    loaded = RLT.load(tmp_path / "model", env=make_venv())
    obs = random_obs(model, 6)
    obs["task"] = np.eye(T, dtype=np.float32)[[0, 1, 2, 2, 1, 0]]
    assert np.array_equal(loaded.predict(obs)[0], model.predict(obs)[0])
    assert loaded.gate.state_dict() == model.gate.state_dict()
    assert loaded.task_chunks.tolist() == model.task_chunks.tolist()
    loaded.learn(60, reset_num_timesteps=False)
    assert loaded.task_chunks.sum() == loaded.num_timesteps == 660
    loaded.learn(60)  # a new run
    assert loaded.task_chunks.sum() == loaded.num_timesteps == 60


def of_vla(*counts):
    """So many successes of so many episodes in each task, before training."""
    trials = [Trial(-1, 8, task, n < k) for task, (k, total) in enumerate(counts) for n in range(total)]
    return Sample(len(trials), trials)


def test_a_task_whose_outcome_is_open_has_more_episodes():
    gate = TaskGate(5, window=8, task_weight=4)
    assert gate.weights == [4] * 5  # nothing is known
    gate.know_vla(of_vla((24, 24), (12, 24), (0, 24), (21, 24), (2, 2)))
    # (k + 1) / (n + 2) = 25/26, 1/2, 1/26, 22/26, 3/4: 1 + 12 p (1 - p) = 1.44, 4, 1.44, 2.56, 3.25
    assert gate.weights == [1, 4, 1, 3, 3]
    policy = Policy(5)
    gate.use_states(states(0, 0, 0, 0, 0))
    gate.audition(policy, lambda: None, lambda _: states(0, 4, 0, 0, 0))
    assert gate.weights == [1, 3, 1, 3, 3]  # of the actor that passed in task 1: 5/6
    gate.gates[1].best.trials = Sample(16, [Trial(0, 24, 1, True) for _ in range(16)])
    assert gate.weights == [1, 2, 1, 3, 3]  # 21/22
    assert TaskGate(5, window=8, task_weight=1).weights == [1] * 5
    for bad in (0, 2.0, True):
        with pytest.raises(ValueError, match=f"gate.task_weight must be an integer >= 1, got {bad}"):
            TaskGate(5, task_weight=bad)


def test_rlt_practices_such_a_task_more_often(tmp_path):
    model = with_tasks(gate={"share": 0.5, "window": 8}, learning_starts=60)
    env = model.env.venv.env
    model.gate.know_vla(of_vla((0, 64), (32, 64), (64, 64)))
    model.learn(300)
    assert model.gate.weights_told == model.gate.weights == env.sequence.task_weights == [1, 4, 1]
    assert [model.gate.metrics()[f"task_weight_{task}"] for task in range(T)] == [1, 4, 1]
    assert model.search is None and (model.task_chunks[1] > 2.5 * model.task_chunks[[0, 2]]).all()
    model.save(tmp_path / "model")
    other, at_reset = make_venv(), []
    reset = other.venv.env.reset
    other.venv.env.reset = lambda **told: at_reset.append(other.venv.env.sequence.task_weights) or reset(**told)
    RLT.load(tmp_path / "model", env=other).learn(2, reset_num_timesteps=False)
    assert at_reset == [[1, 4, 1]]  # told before the first episodes begin
    even = with_tasks(gate={"share": 0.5, "window": 8, "task_weight": 1}).learn(300)
    assert np.ptp(even.task_chunks) < 30 and even.env.venv.env.sequence.task_weights == [1, 1, 1]


def test_the_search_follows_the_weights():
    policy_kwargs = {"offset_search": {"opening": 8}}
    model = with_tasks(gate={"share": 0.5, "window": 8}, policy_kwargs=policy_kwargs)
    model.gate.know_vla(of_vla((0, 64), (32, 64), (64, 64)))
    model.learn(100)
    assert model.search.shares.tolist() == [0.25, 1.0, 0.25]


def test_environments_that_know_no_weights_play_their_tasks_as_they_like():
    class Others(FakeRLTokenVectorEnv):
        set_task_weights = property()  # getting it raises AttributeError

    env = Others(2, task_ids=tuple(range(T)), show_task=True)
    venv = VecMonitor(GymnasiumVecEnv(env), info_keywords=("is_success",))
    settings = {"gate": {"share": 0.5, "window": 8}, "policy_kwargs": {"offset_search": {"opening": 8}}}
    model = make_model(2, venv, **fast(**settings))
    model.gate.know_vla(of_vla((0, 64), (32, 64), (64, 64)))
    model.learn(100)
    assert model.gate.weights_told is None and model.search.shares.tolist() == [1.0] * 3
    assert env.sequence.task_weights == [1, 1, 1]


def test_the_task_reaches_actor_and_critics():
    model = with_tasks()
    assert model.actor.features_dim == make_model().actor.features_dim + T
    with th.no_grad():
        for parameter in model.policy.parameters():
            parameter.add_(0.1 * th.ones_like(parameter).normal_())
    obs = {name: th.as_tensor(value) for name, value in random_obs(model, 1).items()}
    one, other = ({**obs, "task": th.eye(T)[[task]]} for task in range(2))
    actions = obs["vla_ref"].flatten(1)
    assert not th.equal(model.actor(one), model.actor(other))
    assert not th.equal(model.critic.q_values(one, actions), model.critic.q_values(other, actions))


def test_the_pull_weakens_with_each_tasks_own_chunks():
    model = with_tasks(bc_coef=ChunkSchedule(60.0, 10.0, chunks=100))
    model.task_chunks[:] = 0, 50, 400
    batch = {"task": th.eye(T)[[2, 0, 1, 1]]}
    assert model._pull(batch)[:, 0].tolist() == [10.0, 60.0, 35.0, 35.0]
    assert make_model(bc_coef=ChunkSchedule(60.0, 10.0, chunks=100))._pull({}) == 60.0


def test_what_learns_below_the_actor_is_refused():
    for trains in ("train_token", "train_vla"):
        with pytest.raises(ValueError, match=f"{trains}.* copy for all tasks: leave out show_task"):
            with_tasks(policy_kwargs={trains: {}})
    with pytest.raises(ValueError, match="offline_data do not say which task"):
        with_tasks(replay_buffer_kwargs={"offline_data": "rows.hdf5"})


def test_a_view_of_one_task_leaves_the_others_alone():
    policy = Policy(T)
    view = ActorOfTask(policy, 1)
    policy.training_actor.value.data.fill_(3.0)
    view.start_trial()
    view.deploy({"value": th.tensor(4.0)})
    assert [actor.value.item() for actor in policy.actor_on_trial.actors] == [0.0, 3.0, 0.0]
    assert [actor.value.item() for actor in policy.actor_deployed.actors] == [0.0, 4.0, 0.0]
    assert view.starts_at_vla and view.training_actor is policy.training_actor


def test_one_warning_names_the_tasks():
    gate = TaskGate(4, window=8)
    for task in (1, 3):
        gate.gates[task].baseline.start(0)
    for one in gate.gates:
        one.try_next(Policy(), ready=True)
    with pytest.warns(UserWarning, match=r"on trial in the tasks 1, 3: 32 noise-free episodes"):
        gate.warn_of_open_baseline()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gate.warn_of_open_baseline()
