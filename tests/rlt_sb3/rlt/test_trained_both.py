"""``train_token`` beside ``train_vla``: the critics' loss reaches the encoder, and through it the VLA."""

import numpy as np
import pytest
import torch as th
import trained_vla
from torch.func import functional_call
from trained_vla import GATE, same
from vla_helpers import TINY

from rlt_gym.rl_token.shown import read_instructions
from rlt_gym.vla.mini.model import MiniVLANet, normalize_frames
from rlt_sb3 import RLT
from rlt_sb3.experiment.config import TrainConfig
from rlt_sb3.rlt.settings import check_before_env


def make_env(show_pictures=True):
    # every earlier token is blanked: the decoder draws nothing at random
    return trained_vla.make_env(show_pictures, context_dropout=1.0)


def make_model(venv=None, train_token=None, train_vla=None, **kwargs) -> RLT:
    learns = {"part": "all"} | (train_vla or {}), train_token or {}
    return trained_vla.make_model(venv or make_env(), *learns, **{"batch_size": 8} | kwargs)


def parts(model, network="critic"):
    """Copies of what learns: the VLA, the encoder, the decoder."""
    features = getattr(model.policy, network).features_extractor
    found = features.weights, features.token.encoder.parameters(), features.token.decoder.parameters()
    return [[value.detach().clone() for value in part] for part in found]


def which_moved(before, after) -> list[bool]:
    return [not same(one, other) for one, other in zip(before, after, strict=True)]


@pytest.mark.parametrize("part", ["head", "all"])
def test_the_gradients_against_the_losses_written_out(part):
    model = make_model(
        train_token={"recon_coef": 0.5}, train_vla={"part": part, "imitation_coef": 3.0},
        policy_delay=1, reference_dropout=0.0, target_policy_noise=0.0, action_scale=0.5, bc_coef=7.0,
    ).learn(20)  # fmt: skip
    features, training, vla = model.critic.features_extractor, model.policy.vla_training, model.policy.vla
    for value in features.weights:  # as after a long training
        value.data += 0.05 * th.randn(value.shape, generator=th.Generator().manual_seed(1))
    nothing = lambda module: th.optim.SGD(module.parameters(), lr=0.0)  # noqa: E731
    model.actor.optimizer, model.critic.optimizer = nothing(model.actor.mu), nothing(model.critic.ensemble)
    training.optimizer, model.policy.token_training.optimizer = nothing(features.weights), nothing(features.token)
    batch, targets = model.replay_buffer.sample(16), {}
    rows, frozen = dict(batch.observations), batch.bc_target.clone()
    original = model._targets
    model._targets = lambda given: targets.setdefault("y", original(given))
    model._update_critic(batch)
    model._update_actor(batch)
    training.step(batch.bc_target, model.action_unit)
    encoder, decoder = features.token.encoder, features.token.decoder
    found = [[value.grad for value in one] for one in (features.weights, encoder.parameters(), decoder.parameters())]

    leaves = [value.detach().clone().requires_grad_() for value in features.weights]
    state = {key.removeprefix("vla.net."): value for key, value in vla.state_dict().items() if key.startswith("vla.")}
    own = {key.removeprefix("vla.net."): leaf for key, leaf in zip(vla.moving, leaves, strict=True)}
    frames = [normalize_frames(rows["pictures"][:, n], 32) for n in range(2)]
    net = MiniVLANet(TINY)
    words = net.text_batch(read_instructions(rows["instruction"].numpy()))
    tokens, chunk = functional_call(net, state | own, (frames, rows["proprio"], *words))
    z = ((tokens - encoder.token_mean[: tokens.shape[1]]) / encoder.token_std).clamp(-10, 10)
    z_rl = th.nn.functional.layer_norm(encoder.encode(z), (12,))
    proprio = features.of_token(rows, rows["z_rl"])[:, 12:]
    seen, reference = th.cat([z_rl, proprio], 1), chunk[:, :3].flatten(1)
    critic = (model.critic.ensemble(seen, None, batch.actions) - targets["y"]).square().mean(1).sum()
    constant = z.detach()
    recon = (decoder(encoder.encode(constant), constant, 1.0) - constant).square().mean()
    action = reference + model.actor.mu(th.cat([seen.detach(), reference], 1))
    assert float(action.detach().abs().max()) < 1.0  # the limits would cut gradients
    actor = 7.0 * ((action - frozen) / 0.5).square().mean() - model.critic.ensemble(seen.detach(), None, action).mean()
    imitation = 3.0 * ((reference - frozen) / 0.5).square().mean()
    losses = critic + actor + imitation, critic + 0.5 * recon, 0.5 * recon
    learning = leaves, list(encoder.parameters()), list(decoder.parameters())
    for mine, loss, given, least in zip(found, losses, learning, (4, 4, 4), strict=True):
        expected = th.autograd.grad(loss, given, allow_unused=True, retain_graph=True)
        compared = 0
        for one, other in zip(mine, expected, strict=True):
            if other is not None:
                assert th.allclose(one, other, rtol=1e-3, atol=1e-5 * float(other.abs().max() + 1)), (one, other)
                compared += float(other.abs().max()) > 1e-4
        assert compared >= least
    for term, given in ((critic, learning[1]), (recon, learning[1]), (critic, leaves if part == "all" else [])):
        partial = th.autograd.grad(term, given, allow_unused=True, retain_graph=True) if given else [th.ones(1)]
        assert any(value is not None and float(value.abs().max()) > 1e-5 for value in partial)


def test_each_optimizer_moves_its_own_weights_only():
    for rates, moved in (((0.0, 1e-3), [False, True, True]), ((1e-3, 0.0), [True, False, False])):
        model = make_model(train_vla={"learning_rate": rates[0]}, train_token={"encoder_lr": rates[1]})
        start = parts(model)
        assert which_moved(start, parts(model.learn(20))) == moved
        assert model.critic.features_extractor.moved


def test_until_the_warm_up_ends_only_the_decoder_learns():
    model = make_model(train_vla={"learning_rate": 1e-2}, train_token={"encoder_lr": 1e-2}, gate=GATE)
    vla = model.env.get_attr("vla")[0].fingerprint()
    frozen, start = model.env.get_attr("encoder")[0].state_dict(), parts(model)
    model.learn(8)
    model._n_updates = model.policy_delay
    batch = model.replay_buffer.sample(16)
    model._update_critic(batch)
    assert model._warming_up and which_moved(start, parts(model)) == [False, False, True]
    assert not model.critic.features_extractor.moved and not batch.observations["vla_ref"].requires_grad
    model.learn(20, reset_num_timesteps=False)
    model.train(model._n_updates % model.policy_delay, 8)  # the last update is one of the actor, too
    assert which_moved(start, parts(model)) == [True] * 3
    assert which_moved(parts(model), parts(model, "actor")) == [False] * 3  # the actor that learns has the critics'
    assert which_moved(start, parts(model, "actor_deployed")) == [False] * 3  # the untrained one
    assert model.env.get_attr("vla")[0].fingerprint() == vla
    assert all(th.equal(value, model.env.get_attr("encoder")[0].state_dict()[key]) for key, value in frozen.items())
    obs = model.env.reset()
    assert np.array_equal(model.predict(obs, deterministic=True)[0], obs["vla_ref"])  # no actor has beaten the VLA


def test_the_critics_read_the_encoder_from_its_own_first_step_on():
    """The VLA takes its first step only with the first update of the actor, which never comes here."""
    model = make_model(train_token={"encoder_lr": 1e-2}, policy_delay=1000, gate=GATE)
    before = parts(model)
    model.learn(24)
    assert which_moved(before, parts(model)) == [False, True, True]
    observations, _ = model.policy.obs_to_tensor(model.env.reset())
    for network in (model.critic, model.actor):
        features = network.features_extractor
        assert features.moved
        read = features(observations)
        features.moved.fill_(False)
        assert (network is model.actor) == th.equal(read, features(observations))  # the actor gets it with its update


def test_saving_and_going_on(tmp_path):
    settings = {"train_vla": {"learning_rate": 1e-3}, "train_token": {"encoder_lr": 1e-2}, "gate": GATE}
    first = make_model(**settings).learn(24)
    first.policy.deploy(first.policy.training_actor.state_dict())
    first.save(tmp_path / "model.zip")
    first.save_replay_buffer(tmp_path / "buffer.pkl")
    loaded = RLT.load(tmp_path / "model.zip", env=make_env(), device="cpu")
    assert same(list(first.policy.state_dict().values()), list(loaded.policy.state_dict().values()))
    for name in ("token_training", "vla_training"):
        mine, theirs = (getattr(model.policy, name).optimizer.state_dict()["state"] for model in (first, loaded))
        assert mine and all(th.equal(mine[n]["exp_avg"], theirs[n]["exp_avg"]) for n in mine)
    obs = make_env().reset()
    chunks = first.predict(obs)[0]
    assert np.array_equal(chunks, RLT.load(tmp_path / "model.zip").predict(obs)[0])
    assert not np.array_equal(chunks, obs["vla_ref"])
    loaded.load_replay_buffer(tmp_path / "buffer.pkl")
    before = parts(loaded)
    assert which_moved(before, parts(loaded.learn(8, reset_num_timesteps=False))) == [True] * 3


def test_pictures_are_enough_and_needed():
    networks = {"train_token": {}, "train_vla": {}}
    config = TrainConfig(algorithms={"rlt": {"policy_kwargs": networks}})
    with pytest.raises(ValueError, match=r"train_vla needs pictures in the observations: set env\.show_pictures"):
        config.check()
    config.env.show_pictures = True
    config.check()
    check_before_env(RLT, {"policy_kwargs": networks})
    with pytest.raises(ValueError, match=r"make the environment with show_pictures=True"):
        make_model(make_env(show_pictures=False))
    with pytest.raises(ValueError, match=r"train_token.encoder_lr must be a number >= 0, got -1"):
        make_model(train_token={"encoder_lr": -1})
