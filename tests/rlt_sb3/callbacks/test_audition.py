"""The selection states decide, beside the trials, which actor is deployed."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch as th
from rlt_models import fast, make_model

from rlt_sb3 import RLT
from rlt_sb3.callbacks.budget import BudgetCallback
from rlt_sb3.callbacks.selection import SelectionCallback
from rlt_sb3.common.trials import Sample, Trial
from rlt_sb3.evaluation.results import Evaluation, StateResult


def chunks(actor, model: RLT, obs) -> np.ndarray:
    with th.no_grad():
        return actor(model.policy.obs_to_tensor(obs)[0]).numpy().reshape(obs["vla_ref"].shape)


def outcome(successes: int, steps: int = 5) -> Evaluation:
    return Evaluation("x", "selection", [StateResult(p, 0, p, p < successes, steps, 1) for p in range(20)])


def selection(model: RLT, evaluate, tmp_path, **kwargs) -> SelectionCallback:
    callback = SelectionCallback(evaluate, 20, outcome(10), BudgetCallback(100), tmp_path / "best.zip", **kwargs)
    callback.init_callback(model)
    return callback


def moved(model: RLT) -> None:
    """The practicing actor learns something."""
    with th.no_grad():
        for parameter in model.policy.training_actor.parameters():
            parameter.add_(0.01)


def of(successes: int, n: int) -> Sample:
    return Sample(n, [Trial(0, 5, 0, number < successes) for number in range(n)])


def test_selection_plays_practicing_actor_until_one_is_approved(tmp_path):
    model = make_model(**fast(gate={"share": 0.5, "window": 50}))
    model.learn(100)
    obs = model.env.reset()
    results, played = iter([outcome(13), outcome(14), outcome(2)]), []

    def evaluate(player):
        played.append(player.predict(obs)[0])
        return next(results)

    callback = selection(model, evaluate, tmp_path)
    practicing = chunks(model.policy.training_actor, model, obs)
    assert not np.array_equal(practicing, obs["vla_ref"])
    # 13 against the VLA's 10 on the same states: 3 fixed, none broken, p = 1/8 > 0.1
    assert callback.run().evaluation == outcome(10)
    assert np.array_equal(played[-1], practicing) and np.array_equal(model.predict(obs)[0], obs["vla_ref"])
    # 4 fixed, none broken: p = 1/16
    assert callback.run().evaluation == outcome(14)
    assert np.array_equal(model.predict(obs)[0], practicing) and model.gate.approvals == 1
    assert np.array_equal(RLT.load(tmp_path / "best.zip", device="cpu").predict(obs)[0], practicing)
    model.policy.training_actor.mu[-1].bias.data.add_(0.1)
    # of what is deployed, from now on, which does not play again; the practicing actor is worse
    assert callback.run().evaluation == outcome(14)
    assert len(played) == 3 and not np.array_equal(played[-1], practicing)
    assert np.array_equal(model.predict(obs)[0], practicing) and model.gate.approvals == 1


def test_the_best_model_is_kept(tmp_path):
    """More successes are better, then fewer control steps; among equals the newest one."""
    model = make_model(**fast())
    model.learn(30)
    obs = model.env.reset()
    points = [
        (outcome(12), True), (outcome(11, 1), False), (outcome(12, 6), False), (outcome(12), True),
        (outcome(12, 4), True), (outcome(13, 9), True), (outcome(0), False),
    ]  # fmt: skip
    results = iter([result for result, _ in points])
    callback = selection(model, lambda player: next(results), tmp_path)
    for result, kept in points:
        model.policy.training_actor.mu[-1].bias.data.add_(0.01)
        callback.run()
        best = RLT.load(tmp_path / "best.zip", device="cpu").predict(obs)[0]
        assert np.array_equal(best, model.predict(obs)[0]) is kept
        assert (callback.best == result) is kept


def test_an_untrained_direct_actor_is_not_taken_for_the_vla(tmp_path):
    model = make_model(**fast(gate={"share": 0.5}), policy_kwargs={"actor_mode": "direct"})
    model.learn(30)
    callback = selection(model, lambda player: outcome(3), tmp_path)
    assert callback.run().evaluation == outcome(3) and model.gate.none_deployed


def test_interrupt_while_practicing_actor_plays_deploys_nothing(tmp_path):
    model = make_model(**fast(gate={"share": 0.5, "window": 50}))
    model.learn(100)
    obs = model.env.reset()

    def interrupted(player):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        selection(model, interrupted, tmp_path).run()
    assert np.array_equal(model.predict(obs)[0], obs["vla_ref"]) and model.gate.none_deployed


def test_networks_that_are_put_back_end_the_running_trial(tmp_path):
    model = make_model(**fast(gate={"share": 0.5, "window": 50}))
    model.gate.approvals = 1
    model.learn(100)
    results = iter([outcome(18), outcome(17), outcome(1), outcome(1)])  # deployed and practicing, twice
    callback = selection(model, lambda player: next(results), tmp_path, guard="restore")
    callback.run()
    best = model.policy.actor_deployed.state_dict()["mu.0.weight"].clone()
    assert model.gate.best.states.count() == (18, 20) and model.gate.approvals == 1  # 17 pass, and are not deployed
    model.gate.contenders.clear()
    with th.no_grad():
        model.policy.actor_deployed.mu[0].weight.add_(0.1)  # another actor is deployed, and its networks are put back
    model.gate.start_trial(model.policy)
    callback.run()
    assert not model.gate.on_trial and th.equal(model.policy.actor_deployed.mu[0].weight, best)
    assert all(value.equal(model.policy.state_dict()["actor_deployed." + name]) for name, value
               in model.gate.best.parameters.items())  # fmt: skip


def test_an_actor_that_does_worse_on_the_states_gives_way_to_the_one_before(tmp_path):
    """As in a run whose predict() went from 45 to 35 of 48; and the same after a resume."""
    model = make_model(**fast(gate={"share": 0.5, "window": 50}))
    model.learn(100)
    obs, results = model.env.reset(), [outcome(19)]
    callback = selection(model, lambda player: results.pop(0), tmp_path)
    assert callback.run().evaluation == outcome(19)
    better = model.predict(obs)[0]
    moved(model)
    gate = model.gate
    gate.baseline = of(20, 40)
    gate.start_trial(model.policy)
    gate.trials = of(20, 20)
    gate.pass_trial(model.policy)
    worse = model.predict(obs)[0]
    assert not np.array_equal(worse, better) and [one.number for one in gate.contenders] == [2, 1]
    moved(model)

    model.save(tmp_path / "model.zip")
    loaded = RLT.load(tmp_path / "model.zip", env=model.env, device="cpu")
    loaded.set_logger(model.logger)
    resumed = selection(loaded, lambda player: results.pop(0), tmp_path)
    resumed.load_state_dict(json.loads(json.dumps(callback.state_dict())))
    points = []
    for one, player in ((callback, model), (resumed, loaded)):
        assert np.array_equal(player.predict(obs)[0], worse)
        results[:] = [outcome(14), outcome(12)]  # what is deployed, and the practicing actor
        point = one.run()
        points.append(replace(point, minutes=0.0))
        assert not results and np.array_equal(player.predict(obs)[0], better)
        assert point.evaluation == outcome(19) and point.candidate == outcome(12)
        results[:] = [outcome(11)]  # both are known now
        assert one.run().evaluation == outcome(19) and not results
    assert points[0] == points[1] and loaded.gate.state_dict() == gate.state_dict()
    assert resumed.played == callback.played and resumed.best == callback.best


def test_an_actor_that_passed_without_being_deployed_is_known_when_its_turn_comes(tmp_path):
    model = make_model(**fast(gate={"share": 0.5, "window": 50}))
    model.learn(100)
    obs, results, gate = model.env.reset(), [outcome(19)], model.gate
    callback = selection(model, lambda player: results.pop(0), tmp_path)
    gate.baseline = of(100, 200)
    callback.run()
    moved(model)
    results[:] = [outcome(18)]
    second = chunks(model.policy.training_actor, model, obs)
    callback.run()  # passes, and is not the best
    assert [one.number for one in gate.contenders] == [1, 2] and callback.played["2"] == outcome(18)
    gate.contenders[0].states = Sample()  # if nothing were known of the best, it would have to play
    callback.played.pop("1")
    moved(model)
    results[:] = [outcome(3), outcome(2)]
    gate.contenders[0].trials = of(100, 100)
    assert callback.run().evaluation == outcome(18) and not results
    assert np.array_equal(model.predict(obs)[0], second)
