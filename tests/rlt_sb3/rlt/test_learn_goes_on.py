"""`learn(..., reset_num_timesteps=False)`: the environments are not reset, so nothing is cut."""

import itertools

import numpy as np
import pytest
from rlt_models import Rows, fast, make_model, make_venv
from run_helpers import same


def collected(parts: list[int], **env):
    model, rows = make_model(venv=make_venv(2, **env), learning_starts=1000, n_steps=3), Rows()
    infos = []
    for number, chunks in enumerate(parts):
        model.learn(chunks, callback=rows, reset_num_timesteps=number == 0)
        infos += rows.infos
    return model, infos


@pytest.mark.parametrize("env", [{}, {"obs_stride": 2}])
def test_rows_are_those_of_one_call(env):
    """The same rows, the same returns, inner rows among them."""
    (whole, infos), (parts, infos_of_parts) = collected([36], **env), collected([10, 6, 20], **env)
    assert [info["chunk_steps"] for info in infos] == [info["chunk_steps"] for info in infos_of_parts]
    mine, theirs = whole.replay_buffer, parts.replay_buffer
    slots = np.flatnonzero(mine.storage.is_row(np.arange(mine.storage.size)))
    assert np.array_equal(slots, np.flatnonzero(theirs.storage.is_row(np.arange(theirs.storage.size))))
    assert same(mine._gather(slots), theirs._gather(slots))
    for one, other in zip(mine.storage.returns(slots, 3, 0.99), theirs.storage.returns(slots, 3, 0.99), strict=True):
        assert np.array_equal(one, other)
    assert np.array_equal(whole._value_bias.returns, parts._value_bias.returns)


def test_another_environment_cuts():
    model, _ = collected([10])
    model.set_env(make_venv(2))
    model.learn(10, reset_num_timesteps=False)
    storage = model.replay_buffer.storage
    following = storage.next_slot[storage.is_row(np.arange(storage.size))]
    # the last rows of both first episodes lead to observations that are no rows: new episodes began
    assert sum(not bool(storage.is_row(slot)) for slot in following) >= 4


def test_an_interrupt_in_the_update_of_the_actor_lets_the_critics_learn_on(monkeypatch):
    """Their gradients are switched off meanwhile."""
    model = make_model(**fast(batch_size=8))
    original, calls = model.critic.actor_q, itertools.count()

    def interrupted(*args):
        if next(calls) == 5:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(model.critic, "actor_q", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.learn(100)
    before = model._n_updates
    assert all(parameter.requires_grad for parameter in model.critic.parameters())
    model.learn(40, reset_num_timesteps=False)
    assert model._n_updates > before
