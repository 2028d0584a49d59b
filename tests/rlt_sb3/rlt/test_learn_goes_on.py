"""`learn(..., reset_num_timesteps=False)`: the environments are not reset, so nothing is cut."""

import itertools

import numpy as np
import pytest
from local_collectors import NumberedVectorEnv
from rlt_models import Rows, fast, make_model, make_venv
from run_helpers import same
from stable_baselines3.common.vec_env import VecMonitor

from rlt_sb3 import GymnasiumVecEnv


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


class Stops(Rows):
    """Ends training after some vector steps, as a used up budget does."""

    def __init__(self, after):
        super().__init__()
        self.after = after

    def _on_step(self):
        return super()._on_step() and self.n_calls < self.after


@pytest.mark.parametrize("train_freq", [1, (1, "overlap")])
@pytest.mark.parametrize("how", ["interrupt", "callback"])
def test_a_step_that_was_not_stored_gives_the_episodes_up(monkeypatch, how, train_freq):
    """The simulators are further than the last observation: no row may begin there and end where they are."""
    env = NumberedVectorEnv(2)
    venv = VecMonitor(GymnasiumVecEnv(env), info_keywords=("is_success",))
    settings = fast(learning_starts=200, gate={"share": 0.5}, policy_kwargs={"offset_search": True})
    model = make_model(venv=venv, train_freq=train_freq, **settings)
    model.learn(20)
    if how == "callback":
        model.learn(20, reset_num_timesteps=False, callback=Stops(4))
    else:
        original, calls = env._control_step, itertools.count()

        def interrupted(*args):
            if next(calls) == 21:  # in the midst of a step of both environments
                raise KeyboardInterrupt
            return original(*args)

        with monkeypatch.context() as patch:
            patch.setattr(env, "_control_step", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model.learn(20, reset_num_timesteps=False)
    assert 20 < model.num_timesteps < 40
    rows = Rows()
    model.learn(20, reset_num_timesteps=False, callback=rows)
    assert not rows.obs[0]["proprio"][:, 6].any()  # new episodes
    storage = model.replay_buffer.storage
    slots = np.flatnonzero(storage.is_row(np.arange(storage.size)))
    before, after = (storage.obs["proprio"][at] for at in (slots, storage.next_slot[slots]))
    assert np.array_equal(before[:, 2], after[:, 2]) and np.array_equal(
        after[:, 6] - before[:, 6], storage.chunk_steps[slots]
    )
