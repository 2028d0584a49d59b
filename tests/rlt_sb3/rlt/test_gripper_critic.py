"""The critic of the gripper alone: its arithmetic, what the actors do with it, and that it learns."""

import numpy as np
import pytest
import torch as th
from rlt_models import Numpy, fast, make_model, make_venv, oracle_model, random_obs, to_numpy
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import configure

from rlt_sb3 import RLT
from rlt_sb3.rlt.gripper import GripperTrial

GRIPPER = 6
SETTINGS = {"gripper_flip": 0.02, "gripper_critic": {"n_critics": 3, "net_arch": [16, 16]}}


def q_of(oracle, net, obs, reverse):
    return oracle.q(f"{net}.gripper_critic", obs, np.where(reverse, 1.0, -1.0)[:, None])


def decisions(oracle, net, obs, margin=0.02):
    n = len(obs["z_rl"])
    yes, no = np.ones(n, dtype=bool), np.zeros(n, dtype=bool)
    return q_of(oracle, net, obs, yes).min(0) - q_of(oracle, net, obs, no).mean(0) > margin


def make_agreeing(model):
    """Members that agree, so that some of them prefer the reversed gripper: random ones hardly ever all do."""
    for actor in (model.actor, model.actor_target):
        ensemble = actor.gripper_critic.ensemble
        with th.no_grad():
            for weights in (*ensemble.weights, *ensemble.biases):
                weights[:] = weights[:1] + 0.02 * (weights - weights[:1])
            ensemble.weights[0][:, -1] = th.linspace(-2.0, 2.0, 16)


def test_loss_targets_and_gradient_against_numpy():
    model, batch = oracle_model(SETTINGS, critic_warmup_updates=0)
    model._n_updates = 1
    make_agreeing(model)
    training = model.policy.gripper_training
    training.activate(np.ones(1, bool))
    oracle = Numpy(model)
    obs, following, actions = to_numpy(batch)
    executed, reference = actions.reshape(obs["vla_ref"].shape), obs["vla_ref"]
    reverse = (executed[..., GRIPPER].mean(1) > 0) != (reference[..., GRIPPER].mean(1) > 0)
    chosen = decisions(oracle, "actor_target", following)
    assert 0 < reverse.sum() < len(reverse) and 0 < chosen.sum() < len(chosen)
    next_q = q_of(oracle, "actor_target", following, chosen).min(0)
    rewards, discounts, dones = (x.double().numpy()[:, 0] for x in (batch.rewards, batch.discounts, batch.dones))
    targets = np.clip(rewards + (1.0 - dones) * discounts * next_q, 0.0, 1.0)
    expected = ((q_of(oracle, "actor", obs, reverse) - targets) ** 2).mean(1).sum()
    bias = model.actor.gripper_critic.ensemble.biases[2]
    gradient = 2.0 * (q_of(oracle, "actor", obs, reverse) - targets).mean(1)
    before = {name: value.clone() for name, value in model.policy.state_dict().items()}
    assert float(model._update_gripper(batch)) == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(bias.grad[:, 0, 0].numpy(), gradient, rtol=1e-4)
    changed = {name for name, value in model.policy.state_dict().items() if not th.equal(value, before[name])}
    assert changed and all(name.startswith("actor.gripper_critic.ensemble") for name in changed)


def test_the_actor_reverses_whole_chunks_where_the_critic_prefers_it():
    model, batch = oracle_model(SETTINGS)
    make_agreeing(model)
    with th.no_grad():
        plain = model.actor(batch.observations).view_as(batch.observations["vla_ref"]).numpy()
    model.policy.gripper_training.activate(np.ones(1, bool))
    obs, _, _ = to_numpy(batch)
    wanted = decisions(Numpy(model), "actor", obs)
    assert 0 < wanted.sum() < len(wanted)
    expected = plain.copy()
    expected[wanted, :, GRIPPER] = np.where(obs["vla_ref"][wanted, :, GRIPPER].mean(1) > 0, -1.0, 1.0)[:, None]
    chunks = model.actor(batch.observations)
    np.testing.assert_array_equal(chunks.detach().view_as(batch.observations["vla_ref"]).numpy(), expected)
    # the actor's loss has no gradient with respect to the critic of the gripper, and no pull on what it reversed
    model._update_actor(batch)
    assert all(parameter.grad is None for parameter in model.actor.gripper_critic.parameters())
    commands = model.actor.gripper_critic.command(
        batch.bc_target, batch.observations, model.actor.features_extractor(batch.observations)
    )
    assert th.equal(commands.view(-1, 4, 7)[wanted, :, GRIPPER], th.as_tensor(expected[wanted, :, GRIPPER]))


def test_nothing_is_reversed_before_the_warm_up_of_the_critics_ends():
    model = make_model(**fast(policy_kwargs=SETTINGS | {"gripper_flip": 1.0}, gate=False))
    with th.no_grad():  # from the start on, the critic prefers the reversed gripper everywhere
        for actor in (model.actor, model.actor_target):
            for name, weights in actor.gripper_critic.ensemble.named_parameters():
                weights.fill_(0.0 if name.startswith("weights.2") else 0.1)
            actor.gripper_critic.ensemble.weights[0][:, -1] = 1.0
            actor.gripper_critic.margin = -1.0
    obs = random_obs(model, 50)
    chunks, _ = model.predict(obs)
    assert np.array_equal(chunks, obs["vla_ref"])  # the untrained policy is the VLA
    model.learn(40)
    assert bool(model.actor.gripper_critic.active) and bool(model.actor_target.gripper_critic.active)
    chunks, _ = model.predict(obs)
    assert (chunks[..., GRIPPER] == np.where(obs["vla_ref"][..., GRIPPER].mean(1) > 0, -1.0, 1.0)[:, None]).all()


def test_it_acts_in_the_tasks_whose_trial_has_succeeded():
    """The critic prefers the reversed gripper everywhere; only the second of three tasks has shown that it helps."""
    venv = make_venv(2, task_ids=range(3), show_task=True)
    model = make_model(**fast(venv=venv, policy_kwargs=SETTINGS | {"gripper_flip": "auto"}, gate=False))
    for actor in (model.actor, model.actor_target):
        actor.gripper_critic.margin = -1e3
    trial = model.gripper_trial
    assert len(trial.flip) == 3
    model.learn(40)
    assert not model.actor.gripper_critic.active.any()
    trial.trying[1], trial.flip[1] = False, 0.02
    model.train(1, 16)
    expected = [False, True, False]
    assert model.actor.gripper_critic.active.tolist() == model.actor_target.gripper_critic.active.tolist() == expected
    obs = random_obs(model, 60) | {"task": np.eye(3, dtype=np.float32)[np.arange(60) % 3]}
    chunks, _ = model.predict(obs)
    opposite = np.where(obs["vla_ref"][..., GRIPPER].mean(1) > 0, -1.0, 1.0)
    is_reversed = (chunks[..., GRIPPER] == opposite[:, None]).all(1)
    assert is_reversed.tolist() == expected * 20
    # nor do the targets of the gripper's critic reverse it in other tasks
    observations, _ = model.policy.obs_to_tensor(obs)
    features = model.actor.features_extractor(observations)
    assert model.actor_target.gripper_critic.reverses(observations, features).tolist() == expected * 20
    # the VLA's episodes say something about the offset where the gripper is all that could tell it from the actor
    model._last_obs, model.search_opens = obs, True
    assert model._vla_has_offset.tolist() == [True, False, True] * 20


def test_the_slow_copy_follows_while_the_network_waits_for_the_search():
    model, batch = oracle_model(SETTINGS, tau=0.3)
    network = [weights.clone() for weights in model.actor.mu.parameters()]
    for copies in (False, True):
        online, slow = (actor.gripper_critic.ensemble for actor in (model.actor, model.actor_target))
        before = [weights.clone() for weights in slow.parameters()]
        model._update(batch, 0.0, copies=copies, acts=False, follow_q=True)
        for old, new, followed in zip(before, slow.parameters(), online.parameters(), strict=True):
            th.testing.assert_close(new, old + (0.3 if copies else 0.0) * (followed - old))
    assert all(th.equal(old, new) for old, new in zip(network, model.actor.mu.parameters(), strict=True))


def test_the_search_takes_no_episode_of_the_vla_for_one_of_the_actor():
    """With this critic the actor differs from the VLA from its warm-up on, whatever the offset is."""
    settings = SETTINGS | {"offset_search": {"opening": 10**6}}
    model = make_model(**fast(policy_kwargs=settings, gate={"share": 0.5, "window": 5}))
    seen = {"vla": 0, "actor": 0, "search": 0}

    class Look(BaseCallback):
        def _on_step(self) -> bool:
            assert model.search_opens and not any(weights.any() for weights in model.actor.mu[-1].parameters())
            for env, tried in enumerate(model.search.tried):
                player = "search" if model.search.searching[env] else model.gate.player[env]
                if player in seen:
                    seen[player] += 1
                    assert np.isnan(tried).all() if player == "vla" else not np.isnan(tried).any()
            return True

    model.learn(400, callback=Look())
    assert min(seen.values()) > 20


def test_it_waits_for_the_trial(monkeypatch):
    """With ``gripper_flip="auto"`` it learns during the trial, acts if that succeeds, and rests after one in vain."""
    monkeypatch.setattr(GripperTrial, "EPISODES", 20)
    model = make_model(**fast(policy_kwargs=SETTINGS | {"gripper_flip": "auto"}, gate=False))
    trial, critic = model.gripper_trial, model.actor.gripper_critic
    model.learn(60)
    assert trial.trying and not critic.active
    weights = critic.ensemble.weights[0].clone()
    model.train(2, 16)
    assert not th.equal(critic.ensemble.weights[0], weights)
    trial.trying[:] = False
    weights = critic.ensemble.weights[0].clone()
    model.train(2, 16)
    assert th.equal(critic.ensemble.weights[0], weights) and not critic.active
    trial.flip[:] = 0.02
    model.train(2, 16)
    assert not th.equal(critic.ensemble.weights[0], weights)
    assert critic.active and model.actor_target.gripper_critic.active


def test_it_learns_when_to_let_go():
    """A success is worth 1 where z_rl is positive and the gripper does the opposite; the other way round elsewhere."""
    model = make_model(**fast(learning_rate=1e-3, policy_kwargs=SETTINGS, gate=False))
    model.learn(200)
    rng = np.random.default_rng(0)
    for _ in range(400):
        batch = model.replay_buffer.sample(64)
        for observations in (batch.observations, batch.next_observations):
            observations.pop("features", None)
            observations["z_rl"] = th.as_tensor(rng.normal(size=observations["z_rl"].shape)).float()
        reference = batch.observations["vla_ref"]
        reference[..., GRIPPER] = 1.0
        opens = th.as_tensor(rng.random(64) < 0.1)  # one row in ten
        batch.actions.view_as(reference)[..., GRIPPER] = th.where(opens, -1.0, 1.0)[:, None]
        wants = batch.observations["z_rl"][:, 0] > 0
        batch.rewards[:, 0] = (opens == wants).float()
        batch.dones[:] = 1.0
        model._update_gripper(batch)
    chunks = model.actor(batch.observations).detach().view_as(reference)
    opened = (chunks[..., GRIPPER] < 0).float().mean(1)
    assert opened[wants].mean() > 0.8 and opened[~wants].mean() < 0.1


def test_copies_and_files_have_it(tmp_path):
    """The slow copy follows, an actor on trial has its critic, and a saved model goes on as it would have."""
    model = make_model(**fast(policy_kwargs=SETTINGS, gate={"share": 0.5}, num_envs=2))
    model.set_logger(configure(str(tmp_path), ["csv"]))
    model.learn(60)
    assert "train/gripper_loss" in (tmp_path / "progress.csv").read_text().splitlines()[0].split(",")
    online, slow = model.actor.gripper_critic, model.actor_target.gripper_critic
    assert not th.equal(online.ensemble.weights[0], slow.ensemble.weights[0])
    model.policy.start_trial()
    on_trial = model.policy.actor_on_trial.gripper_critic
    assert all(th.equal(a, b) for a, b in zip(on_trial.state_dict().values(), slow.state_dict().values(), strict=True))
    model.save(tmp_path / "model.zip")
    model.save_replay_buffer(tmp_path / "rows.pkl")
    loaded = RLT.load(tmp_path / "model.zip", env=make_venv(2), device="cpu")
    loaded.load_replay_buffer(tmp_path / "rows.pkl")
    for one in (model, loaded):
        np.random.seed(0)
        th.manual_seed(0)
        one._setup_learn(1)
        one.train(20, 32)
    ours, theirs = model.policy.state_dict(), loaded.policy.state_dict()
    assert ours.keys() == theirs.keys() and all(th.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gripper_critic": {}}, r"gripper_flip must be 'auto' or > 0 with gripper_critic"),
        (SETTINGS | {"gripper_critic": {"members": 2}}, r"gripper_critic\.members"),
        (SETTINGS | {"gripper_critic": {"n_critics": 0}}, r"gripper_critic\.n_critics must be an integer >= 1, got 0"),
        (SETTINGS | {"gripper_critic": {"margin": -1}}, r"gripper_critic\.margin must be a number >= 0, got -1"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make_model(policy_kwargs=settings)
