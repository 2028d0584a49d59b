"""Where RLT starts: at the VLA, bit for bit, and with which exploration noise."""

import numpy as np
import pytest
import torch as th
from rlt_models import (
    SCALE,
    Rows,
    make_model,
    make_venv,
    random_obs,
)
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.noise import NormalActionNoise

from rlt_sb3.common.noise import HeldNoise


def test_untrained_actor_is_the_vla_bit_for_bit():
    model = make_model()
    obs = random_obs(model, 500)
    for deterministic in (True, False):
        actions, _ = model.predict(obs, deterministic=deterministic)
        assert np.array_equal(actions, obs["vla_ref"])
    single, _ = model.predict({key: value[0] for key, value in obs.items()}, deterministic=True)
    assert np.array_equal(single, obs["vla_ref"][0])


def test_evaluation_at_step_0_equals_the_frozen_vla():
    class Frozen:
        def predict(self, obs, state=None, episode_start=None, deterministic=False):
            return obs["vla_ref"], state

    results = [
        evaluate_policy(policy, make_venv(5, init_states="eval"), n_eval_episodes=30, return_episode_rewards=True)
        for policy in (Frozen(), make_model())
    ]
    assert results[0] == results[1]
    assert 0.3 < np.mean(results[0][0]) < 0.7  # the fake VLA is right about half of the time


def test_direct_mode_starts_elsewhere_and_stays_in_range():
    model = make_model(policy_kwargs={"actor_mode": "direct"})
    obs = random_obs(model, 50)
    actions, _ = model.predict(obs)
    assert not np.allclose(actions, obs["vla_ref"]) and np.abs(actions).max() <= 1.0


@pytest.mark.parametrize("mode", ["residual", "direct"])
def test_warm_up_plays_the_vla_exactly(mode):
    model, rows = make_model(policy_kwargs={"actor_mode": mode}, learning_starts=20, exploration_std=0.3), Rows()
    model.learn(40, callback=rows)
    starts = 20 // model.n_envs
    for obs, actions in zip(rows.obs[:starts], rows.actions[:starts], strict=True):
        assert np.array_equal(obs["vla_ref"], actions)
    assert not np.array_equal(rows.obs[starts]["vla_ref"], rows.actions[starts])
    # what is stored is what was executed
    stored, slots = model.replay_buffer.storage, model.replay_buffer.storage.is_row(np.arange(1000))
    in_order = sorted(map(tuple, np.concatenate(rows.actions).reshape(-1, 28).tolist()))
    assert sorted(map(tuple, stored.actions[:1000][slots].reshape(-1, 28).tolist())) == in_order


def test_a_direct_actor_plays_when_it_is_fitted():
    """Until then the VLA's chunks are played, with noise (here: of size 0)."""
    updates = []

    class Counted(Rows):
        def _on_step(self) -> bool:
            updates.append(self.model._n_updates)
            return super()._on_step()

    rows = Counted()
    settings = dict(learning_starts=20, critic_warmup_updates=50, utd=0.1, exploration_std=0.0)
    make_model(policy_kwargs={"actor_mode": "direct"}, **settings).learn(60, callback=rows)
    own = [np.array_equal(np.clip(obs["vla_ref"], -1, 1), act) for obs, act in zip(rows.obs, rows.actions, strict=True)]
    assert own == [count <= 50 for count in updates]
    assert {count for count in updates if count <= 50} == {0, 50} and updates[-1] > 50


def test_what_is_played_stays_in_range():
    """Whatever the VLA proposes, and with noise at the border."""
    model = make_model()
    model._setup_learn(1)
    model._last_obs["vla_ref"][:] = 1.5
    warm_up, practice = (model._sample_action(starts, None, 2)[0] for starts in (10, 0))
    assert (warm_up == 1.0).all() and practice.max() == 1.0 and practice.min() < 1.0


def noise(chunks, **settings):
    model = make_model(learning_starts=0, **settings)
    model._setup_learn(1)
    model._last_obs["vla_ref"][:] = 0.0
    return np.concatenate([model._sample_action(0, model.action_noise, model.n_envs)[0] for _ in range(chunks)])


def test_exploration_noise():
    drawn = noise(40, num_envs=50, exploration_std=0.05)
    assert drawn.std() == pytest.approx(0.05, rel=0.05)
    assert not np.allclose(drawn[:, :1], drawn)
    one = noise(1, exploration_std=[0.1, 0, 0, 0, 0, 0, 0])
    assert one[..., 0].any() and not one[..., 1:].any()
    scaled = noise(40, num_envs=50, exploration_std=0.05, action_scale=SCALE)
    np.testing.assert_allclose(scaled.std(axis=(0, 1)), 0.05 * np.array(SCALE), rtol=0.05)


def test_noisy_chunks_have_less_and_more_of_the_actors_correction():
    """An actor that adds 0.1 everywhere plays between 0 and 0.2 more than the VLA, one number for a whole chunk."""

    def corrections(chunks, **settings):
        model = make_model(learning_starts=0, num_envs=50, exploration_std=0.0, **settings)
        model._setup_learn(1)
        model._last_obs["vla_ref"][:] = 0.5
        model.actor_target.mu[-1].bias.data.fill_(0.1)
        return np.concatenate([model._sample_action(0, None, 50)[0] - 0.5 for _ in range(chunks)])

    drawn = corrections(40)
    assert np.ptp(drawn.reshape(2000, -1), axis=1).max() == 0.0  # the same for all numbers of a chunk
    shares = np.sort(drawn[:, 0, 0]) / 0.1
    assert len(np.unique(shares)) > 1900
    np.testing.assert_allclose(shares, np.linspace(0.0, 2.0, 2000), atol=0.1)  # uniform
    np.testing.assert_allclose(corrections(2, correction_range=(1.0, 1.0)), 0.1, atol=1e-6)
    shares = corrections(40, correction_range=(0.5, 3.0))[:, 0, 0] / 0.1
    assert 0.5 <= shares.min() < 0.51 and 2.9 < shares.max() <= 3.0


def test_the_critics_choose_from_several_chunks(monkeypatch):
    """Critics that like the sum of the first action: in each environment the variant with the largest sum is played."""
    model = make_model(learning_starts=0, num_envs=50, policy_kwargs={"candidates": 6})
    model._setup_learn(1)
    asked = []

    def likes_the_first_action(observation, chunks):
        assert len(observation["features"]) == len(chunks) == 6 * 50  # all variants in one pass
        np.testing.assert_array_equal(observation["features"].reshape(6, 50, -1), np.stack([seen[0]] * 6))
        asked.append(chunks.numpy().reshape(6, 50, 4, 7))
        values = chunks[:, :7].sum(1)
        return th.stack([values, values + 1.0, values - 4.0])

    seen = []
    model.policy.critic_target.features_extractor.register_forward_hook(lambda *outs: seen.append(outs[-1].numpy()))
    monkeypatch.setattr(model.policy.critic_target, "q_values", likes_the_first_action)
    for warming_up, opens in ((True, False), (False, True)):  # critics that know nothing yet are not asked
        monkeypatch.setattr(type(model), "_warming_up", warming_up)
        model.search_opens = opens
        model._sample_action(0, None, 50)
        assert not asked
    model.search_opens = False
    played = model._sample_action(0, None, 50)[0]
    assert len(asked) == len(seen) == 1  # what the critics see is computed once for all variants
    best = asked[0][:, :, 0].sum(2).argmax(0)
    assert len(set(best)) == 6
    np.testing.assert_array_equal(played, asked[0][best, np.arange(50)])
    changed = asked[0] - model._last_obs["vla_ref"]
    assert len(np.unique(changed[..., 0, 0])) > 250  # each has noise of its own; some are clipped
    model.policy.candidates = 1
    model._sample_action(0, None, 50)
    assert len(asked) == 1


def test_held_noise():
    sigma = 0.05 * np.array(SCALE)
    drawn = noise(40, num_envs=50, exploration_std=0.0, action_noise=HeldNoise(4, sigma))
    np.testing.assert_allclose(drawn.std(axis=(0, 1)), sigma, rtol=0.05)
    assert np.array_equal(np.broadcast_to(drawn[:, :1], drawn.shape), drawn)
    assert len(np.unique(drawn[:, 0, 0])) == 40 * 50  # another one in each chunk and environment
    with pytest.raises(ValueError, match="sigma must be one number >= 0 per action dimension"):
        HeldNoise(4, 0.1)
    with pytest.raises(ValueError, match="chunk_length must be >= 1"):
        HeldNoise(0, sigma)


def test_further_action_noise():
    noise = NormalActionNoise(np.full((4, 7), 0.5), np.zeros((4, 7)))
    model = make_model(action_noise=noise, exploration_std=0.0, learning_starts=0)
    model._setup_learn(1)
    model._last_obs["vla_ref"][:] = 0.0
    assert np.allclose(model._sample_action(0, model.action_noise, 2)[0], 0.5)
