"""Who is credited with the training episodes: the VLA or the actor on trial, as `learn` counts them."""

import warnings

import numpy as np
import pytest
from rlt_models import Rows, fast, make_model

pytestmark = pytest.mark.usefixtures("one_thread")


class Players(Rows):
    """Keeps as well who plays, and what the actor on trial would."""

    def _on_training_start(self) -> None:
        super()._on_training_start()
        self.players, self.tried, self.candidates = [], [], []

    def _on_rollout_start(self) -> None:
        self.last = self.model._last_obs

    def _on_step(self) -> bool:
        gate, policy = self.model.gate, self.model.policy
        self.players.append(gate.player.copy())
        self.candidates.append(gate.candidates)
        tried = policy.actor_on_trial(policy.obs_to_tensor(self.model._last_obs)[0]).detach().numpy()
        self.tried.append(tried.reshape(self.locals["actions"].shape))
        return super()._on_step()


def finished(rows: Rows) -> int:
    return sum("episode" in info for info in rows.infos)


def gated(**settings):
    return make_model(**fast(gate={"share": 1.0, "window": 10}, utd=0.1, **settings))


def test_the_warm_up_measures_the_vla():
    """Every episode of the warm-up is the VLA's, although only some of all episodes are trials."""
    model, rows = make_model(learning_starts=200, gate={"share": 0.01, "window": 100}), Rows()
    model.learn(200, callback=rows)
    assert finished(rows) >= 5
    assert model.gate.baseline.count() == (
        sum(info["is_success"] for info in rows.infos if "episode" in info),
        finished(rows),
    )
    assert model.gate.candidates == 0 and not model.gate.recent


@pytest.mark.parametrize("num_envs", [2, 8])
def test_episodes_are_played_by_whom_they_are_credited_to(num_envs):
    """Row by row: baseline, practice and trials; the first 32 noise-free episodes that start are the baseline."""
    model, rows = make_model(num_envs, **fast(gate={"share": 0.5, "window": 8}, learning_starts=80, utd=0.1)), Players()
    model.learn(1200, callback=rows)
    gate, dones = model.gate, np.array([["episode" in info for info in rows.infos]]).reshape(-1, num_envs)
    assert gate.baseline.complete and gate.candidates and len(gate.recent) == 8
    began, credited = np.ones(num_envs, bool), np.full(num_envs, "", object)
    started = {"vla": [], "actor": [], "": []}
    for number, (obs, actions, players) in enumerate(zip(rows.obs, rows.actions, rows.players, strict=True)):
        reference, warm_up = np.clip(obs["vla_ref"], -1, 1), number * num_envs < 80
        for env in range(num_envs):
            same_candidate = number == 0 or rows.candidates[number] == rows.candidates[number - 1]
            if began[env]:
                started[players[env]].append((number, env))
                credited[env] = players[env]
            elif same_candidate:
                assert players[env] == credited[env]
            else:  # a decided candidate leaves its episodes to practice
                assert players[env] in (credited[env], "") and credited[env] != "vla"
                credited[env] = players[env]
            if players[env] == "vla" or warm_up:
                assert np.array_equal(actions[env], reference[env])
            elif players[env] == "actor":
                assert np.array_equal(actions[env], np.clip(rows.tried[number][env], -1, 1))
            else:
                assert not np.array_equal(actions[env], np.clip(rows.tried[number][env], -1, 1))
        began = dones[number]
    # in the order of their start, and each as it ended
    ends = []
    for number, env in started["vla"]:
        end = number + int(np.argmax(dones[number:, env]))
        ends.append(bool(rows.infos[end * num_envs + env]["is_success"]))
    assert [trial.success for trial in gate.baseline.trials] == ends and len(ends) == 32
    first_trial = min(number for number, _ in started["actor"])
    assert max(number for number, _ in started["vla"]) < first_trial
    assert min(number for number in range(len(dones)) if rows.candidates[number]) <= first_trial


def test_nobody_is_on_trial_while_only_the_critics_learn():
    model = make_model(**fast(gate={"share": 1.0, "window": 2}, learning_starts=200, utd=1e-6))
    model.learn(260)
    gate = model.gate
    assert gate.baseline.complete and model._n_updates == 4 and not gate.candidates
    model.train(1, 32)
    model.learn(4, reset_num_timesteps=False)
    assert gate.candidates == 1


def test_a_second_learn_credits_the_vla_with_what_it_plays():
    model, rows = gated(learning_starts=80), Rows()
    model.learn(400)
    gate = model.gate
    actors = gate.recent.copy()
    assert gate.baseline.complete and actors and gate.candidates
    gate.start_trial(model.policy)
    model.learn(80, callback=rows)  # all in the warm-up that comes first again
    for obs, actions in zip(rows.obs, rows.actions, strict=True):
        assert np.array_equal(actions, np.clip(obs["vla_ref"], -1, 1))
    assert 0 < finished(rows) <= 40
    assert gate.baseline.count()[1] == finished(rows)
    assert gate.recent == actors and not gate.on_trial  # the open trial is over; its window is not filled later


def test_a_learn_that_goes_on_keeps_the_trial():
    model = gated()
    model.learn(60)
    gate = model.gate
    assert not gate.on_trial and 0 < gate.baseline.count()[1] < 40
    model.gate.baseline.size = gate.baseline.count()[1]  # enough
    while not (gate.on_trial and gate.trials.ended()):
        model.learn(8, reset_num_timesteps=False)
    candidates, trials = gate.candidates, gate.trials.ended()
    model.learn(8, reset_num_timesteps=False)
    assert gate.candidates == candidates and gate.trials.ended()[: len(trials)] == trials


def test_training_that_ends_before_a_trial_says_so():
    model = gated()
    with pytest.warns(UserWarning, match=r"No actor has been on trial.* 40 are needed") as caught:
        model.learn(60)
        model.learn(10, reset_num_timesteps=False)
    assert len([one for one in caught if "on trial" in str(one.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.learn(600, reset_num_timesteps=False)
    assert model.gate.baseline.complete


def test_a_gate_repeats_itself():
    states = []
    for _ in range(2):
        model = make_model(4, **fast(gate={"share": 0.5, "window": 4}, utd=0.1))
        model.learn(500)
        states.append((model.gate.state_dict(), model.policy.state_dict()["actor.mu.0.weight"].numpy()))
    assert states[0][0] == states[1][0] and np.array_equal(states[0][1], states[1][1])
    assert states[0][0]["candidates"] > 1


def test_a_direct_actor_is_not_the_vla_before_one_is_deployed():
    """As the documentation of ``gate`` says: the untrained actor plays until then."""
    model = make_model(**fast(gate={"share": 0.5, "window": 1000}), policy_kwargs={"actor_mode": "direct"})
    obs = model.env.reset()
    untrained = model.predict(obs)[0]
    model.learn(60)
    assert model.gate.none_deployed and not model.gate.plays_vla(model.policy)
    assert np.array_equal(model.predict(obs)[0], untrained)
    assert not np.allclose(untrained, obs["vla_ref"], atol=0.05)
