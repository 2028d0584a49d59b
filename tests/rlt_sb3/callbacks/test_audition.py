"""The selection states decide, beside the trials, which actor is deployed."""

import numpy as np
import pytest
import torch as th
from rlt_models import fast, make_model

from rlt_sb3 import RLT
from rlt_sb3.callbacks.budget import BudgetCallback
from rlt_sb3.callbacks.selection import SelectionCallback
from rlt_sb3.evaluation.results import Evaluation, StateResult

pytestmark = pytest.mark.usefixtures("one_thread")


def chunks(actor, model: RLT, obs) -> np.ndarray:
    with th.no_grad():
        return actor(model.policy.obs_to_tensor(obs)[0]).numpy().reshape(obs["vla_ref"].shape)


def outcome(successes: int, steps: int = 5) -> Evaluation:
    return Evaluation("x", "selection", [StateResult(p, 0, p, p < successes, steps, 1) for p in range(20)])


def selection(model: RLT, evaluate, tmp_path, **kwargs) -> SelectionCallback:
    callback = SelectionCallback(evaluate, 20, outcome(10), BudgetCallback(100), tmp_path / "best.zip", **kwargs)
    callback.init_callback(model)
    return callback


def test_selection_plays_practicing_actor_until_one_is_approved(tmp_path):
    model = make_model(**fast(gate={"share": 0.5, "window": 50}))
    model.learn(100)
    obs = model.env.reset()
    results, played = iter([outcome(16), outcome(18), outcome(3), outcome(2)]), []

    def evaluate(player):
        played.append(player.predict(obs)[0])
        return next(results)

    callback = selection(model, evaluate, tmp_path)
    practicing = chunks(model.policy.training_actor, model, obs)
    assert not np.array_equal(practicing, obs["vla_ref"])
    # 16 against the VLA's 10 on the same states: 6 fixed, none broken, p = 1/64 > 0.0125
    assert callback.run().evaluation == outcome(10)
    assert np.array_equal(played[-1], practicing) and np.array_equal(model.predict(obs)[0], obs["vla_ref"])
    # 8 fixed, none broken: p = 1/256 <= 0.0125 / 3, the level of the second audition
    assert callback.run().evaluation == outcome(18)
    assert np.array_equal(model.predict(obs)[0], practicing) and model.gate.approvals == 1
    assert np.array_equal(RLT.load(tmp_path / "best.zip", device="cpu").predict(obs)[0], practicing)
    model.policy.training_actor.mu[-1].bias.data.add_(0.1)
    assert callback.run().evaluation == outcome(3)  # of what is deployed, from now on; the practicing actor is worse
    assert np.array_equal(played[-2], practicing) and not np.array_equal(played[-1], practicing)
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
    model.gate.start_trial(model.policy)
    callback.run()
    assert not model.gate.on_trial
