"""Who is credited with the training episodes: the VLA or the actor on trial, as `learn` counts them."""

import numpy as np
import pytest
from rlt_models import Rows, fast, make_model

pytestmark = pytest.mark.usefixtures("one_thread")


def finished(rows: Rows) -> int:
    return sum("episode" in info for info in rows.infos)


def gated(**settings):
    return make_model(**fast(gate={"share": 1.0, "window": 1000}, **settings))


def test_the_warm_up_measures_the_vla():
    """Every episode that ends in the warm-up is the VLA's, although only some of all episodes are trials."""
    model, rows = make_model(learning_starts=200, gate={"share": 0.01, "window": 4}), Rows()
    model.learn(200, callback=rows)
    assert finished(rows) >= 5
    assert len(model.gate.vla) == finished(rows)
    assert sum(model.gate.vla) == sum(info["is_success"] for info in rows.infos if "episode" in info)
    assert model.gate.candidates == 0 and not model.gate.recent


def test_a_second_learn_credits_the_vla_with_what_it_plays():
    model, rows = gated(learning_starts=80), Rows()
    model.learn(200)
    gate = model.gate
    vla, actors = len(gate.vla), len(gate.recent)
    assert gate.on_trial and vla and actors
    model.learn(80, callback=rows)  # all in the warm-up that comes first again
    for obs, actions in zip(rows.obs, rows.actions, strict=True):
        assert np.array_equal(actions, np.clip(obs["vla_ref"], -1, 1))
    assert finished(rows) > 0
    assert len(gate.vla) == vla + finished(rows)
    assert len(gate.recent) == actors and not gate.on_trial  # the open trial is over; its window is not filled later


def test_a_learn_that_goes_on_keeps_the_trial():
    model = gated()
    model.learn(100)
    candidates, outcomes = model.gate.candidates, len(model.gate.outcomes)
    assert model.gate.on_trial and outcomes
    model.learn(100, reset_num_timesteps=False)
    assert model.gate.candidates == candidates and len(model.gate.outcomes) > outcomes


def test_a_direct_actor_is_not_the_vla_before_one_is_deployed():
    """As the documentation of ``gate`` says: the untrained actor plays until then."""
    model = make_model(**fast(gate={"share": 0.5, "window": 1000}), policy_kwargs={"actor_mode": "direct"})
    obs = model.env.reset()
    untrained = model.predict(obs)[0]
    model.learn(60)
    assert model.gate.none_deployed and not model.gate.plays_vla(model.policy)
    assert np.array_equal(model.predict(obs)[0], untrained)
    assert not np.allclose(untrained, obs["vla_ref"], atol=0.05)
