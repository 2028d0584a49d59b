"""``train_token``: the critics' loss reaches the encoder, and nothing else does."""

import numpy as np
import pytest
import torch as th
from rlt_models import SMALL
from stable_baselines3.common.logger import configure
from stable_baselines3.common.torch_layers import FlattenExtractor

from rlt_gym.rl_token.encoder import RLTokenConfig, RLTokenEncoder
from rlt_gym.rl_token.env import RLTokenVectorEnv
from rlt_gym.testing import FakeLiberoVectorEnv
from rlt_gym.testing.vla import FakeVLA
from rlt_sb3 import RLT, GymnasiumVecEnv
from rlt_sb3.experiment.config import TrainConfig
from rlt_sb3.rlt.settings import check_before_env

N = 2
OFFLINE = {"offline_data": "rows", "offline_ratio": 0.5}
OTHER_FEATURES = {"train_token": {}, "features_extractor_class": FlattenExtractor}


def make_env(show_tokens=True, encoder=None):
    vla = FakeVLA(horizon=4)
    with th.random.fork_rng(devices=[]):
        th.manual_seed(0)
        trained = RLTokenEncoder(RLTokenConfig(vla.spec.token_dim, max_tokens=5, width=12, layers=1, heads=2))
    trained.set_statistics(th.full((12,), 0.1), th.full((12,), 2.0))
    raw = FakeLiberoVectorEnv(N, chunk_length=4, max_episode_steps=16, success_step=14)
    return GymnasiumVecEnv(RLTokenVectorEnv(raw, vla, encoder or trained, show_tokens=show_tokens))


def make_model(venv=None, train_token=None, **kwargs) -> RLT:
    networks = {"net_arch": [16, 16], "critic_precision": "float32", "train_token": train_token, "offset_search": False}
    settings = SMALL | {"learning_starts": 8, "critic_warmup_updates": 6, "policy_kwargs": networks} | kwargs
    return RLT("MultiInputPolicy", venv or make_env(), **settings)


def encoder_of(model, network="critic"):
    return {k: v.clone() for k, v in getattr(model, network).features_extractor.token.encoder.state_dict().items()}


def same(first, second) -> bool:
    return all(th.equal(first[key], second[key]) for key in first)


def test_the_environment_shows_the_tokens_that_the_encoder_reads():
    venv = make_env()
    obs = venv.reset()
    tokens, env = obs["vla_tokens"], venv.env
    assert tokens.dtype == np.float16 and tokens.shape == (N, 5, 12) and obs.keys() == set(env.single_observation_space)
    z = env.encoder.standardize(th.tensor(tokens).float())
    mask = th.tensor((tokens != 0).any(2))
    assert np.allclose(env.encoder.encode(z, mask).numpy(), obs["z_rl"], atol=5e-3)  # float16
    plain = make_env(show_tokens=False).reset()
    assert "vla_tokens" not in plain and all(np.array_equal(plain[key], obs[key]) for key in plain)


def test_final_observations_have_tokens():
    venv = make_env()
    venv.reset()
    for _ in range(8):
        _, _, dones, infos = venv.step(np.zeros((N, 4, 7)))
        if dones.any():
            break
    final = infos[int(np.flatnonzero(dones)[0])]["terminal_observation"]
    assert final["vla_tokens"].shape == (5, 12) and final["vla_tokens"].any()


def test_training_begins_with_the_encoder_of_the_environment():
    model = make_model(train_token={})
    wanted = model.env.get_attr("encoder")[0].state_dict()
    for network in ("actor", "actor_target", "critic", "critic_target"):
        assert same(wanted, encoder_of(model, network))
    frozen = make_model(venv=make_env())
    obs = model.env.reset()
    tensors, _ = model.policy.obs_to_tensor(obs)
    assert th.allclose(
        model.critic.extract_features(tensors, model.critic.features_extractor),
        frozen.critic.extract_features(tensors, frozen.critic.features_extractor), atol=1e-2,
    )  # fmt: skip


def critic_gradient(model, batch, recon_coef):
    """The gradients of one critic update by autograd's own accumulation, on a model of the same weights."""
    token = model.policy.token_training.features.token
    th.manual_seed(7)
    tokens = batch.observations["vla_tokens"].float()
    mask = (tokens != 0).any(2)
    mask = mask[:, mask.any(0)]
    z = token.encoder.standardize(tokens[:, : mask.shape[1]])
    z_rl = token.encoder.encode(z, mask)
    predicted = token.decoder(z_rl, z, token.encoder.config.context_dropout)
    recon = ((predicted - z).square() * mask[..., None]).sum() / (mask.sum() * z.shape[2])
    features = model.policy.token_training.features
    proprio = super(type(features), features).forward(batch.observations)[:, z_rl.shape[1] :]
    features = th.cat([th.nn.functional.layer_norm(z_rl, z_rl.shape[1:]), proprio], dim=1)
    q = model.critic.ensemble(features, None, batch.actions)
    loss = (q - model._oracle_targets).pow(2).mean(1).sum() + recon_coef * recon
    return th.autograd.grad(loss, list(token.encoder.parameters()), allow_unused=True)


@pytest.mark.parametrize("recon_coef", [0.0, 0.5])
def test_the_critics_loss_reaches_the_encoder(recon_coef):
    """Against the same loss written out, beside ``recon_coef`` times that of stage 1."""
    model = make_model(train_token={"recon_coef": recon_coef}, target_policy_noise=0.0)
    model.learn(40)
    batch = model.replay_buffer.sample(16)
    targets = {}
    original = model._targets
    model._targets = lambda rows: targets.setdefault("t", original(rows))
    token = model.policy.token_training.features.token
    model.policy.token_training.optimizer = th.optim.SGD(token.parameters(), lr=0.0)
    before = encoder_of(model)
    state = {k: v.clone() for k, v in model.critic.ensemble.state_dict().items()}
    th.manual_seed(7)
    model._update_critic(batch)
    found = [None if p.grad is None else p.grad.clone() for p in token.encoder.parameters()]
    assert same(before, encoder_of(model))  # the learning rate is 0
    model.critic.ensemble.load_state_dict(state)
    model._oracle_targets = targets["t"]
    expected = critic_gradient(model, batch, recon_coef)
    assert max(float(grad.abs().max()) for grad in expected if grad is not None) > 1e-4
    for one, other in zip(found, expected, strict=True):
        if other is not None:
            assert th.allclose(one, other, atol=1e-6)


def test_only_the_critics_update_moves_the_encoder():
    model = make_model(train_token={"recon_coef": 0.0, "encoder_lr": 1e-2})
    start = model.env.get_attr("encoder")[0].state_dict()
    model.learn(8)  # the VLA's own chunks
    model._update_critic(model.replay_buffer.sample(16))
    assert model._warming_up and same(start, encoder_of(model))
    model.learn(40, reset_num_timesteps=False)
    moved = encoder_of(model)
    assert not same(start, moved) and same(start, model.env.get_attr("encoder")[0].state_dict())
    batch = model.replay_buffer.sample(16)
    with th.no_grad():
        batch.observations["features"] = model.critic.features_extractor(batch.observations)
    model._update_actor(batch)
    assert same(moved, encoder_of(model))
    for name in ("token.encoder.e_rl", "token.decoder.head.weight"):  # the actor that learns has the critics' encoder
        actor, critic = (net.features_extractor.state_dict()[name] for net in (model.actor, model.critic))
        assert th.equal(actor, critic)
    assert not same(moved, encoder_of(model, "actor_target"))  # a slow copy


def test_recon_coef_trains_the_decoder(tmp_path):
    losses = []
    model = make_model(train_token={"recon_coef": 1.0, "encoder_lr": 3e-3})
    model.set_logger(configure(str(tmp_path), ["csv"]))
    record = model._update_critic
    model._update_critic = lambda batch: losses.append(float((found := record(batch))[-1])) or found
    model.learn(160)
    assert np.mean(losses[-20:]) < 0.8 * np.mean(losses[:20])
    assert "train/recon_loss" in (tmp_path / "progress.csv").read_text().splitlines()[0].split(",")


def test_training_twice_saving_and_going_on(tmp_path):
    def trained():
        model = make_model(train_token={"encoder_lr": 1e-2}, gate={"share": 0.5, "window": 4})
        return model.learn(60)

    first, second = trained(), trained()
    assert same(first.policy.state_dict(), second.policy.state_dict())
    first.save(tmp_path / "model.zip")
    first.save_replay_buffer(tmp_path / "buffer.pkl")
    loaded = RLT.load(tmp_path / "model.zip", env=make_env(), device="cpu")
    assert same(first.policy.state_dict(), loaded.policy.state_dict())
    mine, theirs = (model.policy.token_training.optimizer.state_dict()["state"] for model in (first, loaded))
    assert mine.keys() == theirs.keys() and all(th.equal(mine[n]["exp_avg"], theirs[n]["exp_avg"]) for n in mine)
    loaded.load_replay_buffer(tmp_path / "buffer.pkl")
    stored = [model.replay_buffer.storage.obs["vla_tokens"] for model in (first, loaded)]
    assert np.array_equal(*stored) and stored[0].any()
    obs = make_env().reset()
    assert np.array_equal(first.predict(obs)[0], RLT.load(tmp_path / "model.zip").predict(obs)[0])
    encoder = encoder_of(loaded)
    loaded.learn(20, reset_num_timesteps=False)
    assert not same(encoder, encoder_of(loaded))


def test_a_deployed_actor_keeps_its_encoder():
    model = make_model(train_token={"encoder_lr": 1e-2}, gate={"share": 0.5, "window": 4})
    model.learn(40)
    model.policy.deploy(model.policy.training_actor.state_dict())
    obs = make_env().reset()
    deployed, _ = model.predict(obs)
    model.learn(40, reset_num_timesteps=False)
    assert model.gate.approvals == 0
    assert np.array_equal(deployed, model.predict(obs)[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_model(make_env(show_tokens=False), {}), r"make the environment with show_tokens=True"),
        (lambda: make_model(train_token={"recon_coef": -1.0}), r"recon_coef must be a number >= 0, got -1.0"),
        (lambda: make_model(train_token={"encoder_lr": "fast"}), r"train_token.encoder_lr must be a number >= 0"),
        (lambda: check_before_env(RLT, {"policy_kwargs": {"train_token": {"recon": 1}}}), "recon"),
        (lambda: make_model(train_token={}, replay_buffer_kwargs=OFFLINE), "leave out offline_data"),
        (lambda: make_model(policy_kwargs=OTHER_FEATURES), "features_extractor_class must be left out with"),
    ],
)  # fmt: skip
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_workers_on_a_cluster_have_no_encoder_to_begin_with():
    config = TrainConfig(algorithms={"rlt": {"policy_kwargs": {"train_token": {}}}})
    config.env.show_tokens, config.rollout.workers = True, 2
    with pytest.raises(ValueError, match=r"train_token needs the RL token in this process, and rollout.workers is 2"):
        config.check()


def test_an_encoder_without_weights_is_refused():
    from rlt_gym.rl_token.untrained import MeanToken

    with pytest.raises(ValueError, match="needs an encoder with weights, got MeanToken"):
        make_model(make_env(encoder=MeanToken(12, ("all",))), {})


def test_a_buffer_beyond_the_memory_is_refused():
    """Before it is made. A row: 60 float16 tokens' numbers, 12 + 8 + 28 numbers of the observation, 28 of the chunk."""
    with pytest.raises(ValueError, match=r"GiB \(100000000000 rows of 424 bytes.*lower buffer_size below \d+"):
        make_model(train_token={}, buffer_size=10**11)


def test_settings_are_checked_before_there_is_an_environment():
    check_before_env(RLT, {"policy_kwargs": {"train_token": {"encoder_lr": 1e-4}}})
