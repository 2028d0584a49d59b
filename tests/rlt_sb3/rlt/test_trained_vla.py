"""``train_vla``: a copy of the VLA learns from critics and actor; the frozen one and the default stay as they are."""

import gc
from types import FunctionType, ModuleType

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.logger import configure
from torch.func import functional_call
from trained_vla import GATE, N, make_env, make_model, same, weights_of
from vla_helpers import TINY, tiny_vla

from rlt_gym.rl_token.shown import read_instructions, read_seeds
from rlt_gym.testing.vla import FakeVLA
from rlt_gym.vla.mini.model import MiniVLA, MiniVLANet, normalize_frames
from rlt_sb3 import RLT
from rlt_sb3.experiment.config import TrainConfig
from rlt_sb3.rlt.settings import check_before_env

OFFLINE = {"offline_data": "rows", "offline_ratio": 0.5}


def test_rows_hold_what_the_vla_reads():
    venv = make_env()
    obs = venv.reset()
    assert obs["pictures"].shape == (N, 2, 32, 32, 3) and obs["pictures"].dtype == np.uint8
    frames = {"agentview": obs["pictures"][:, 0], "wrist": obs["pictures"][:, 1], "state": obs["proprio"]}
    tasks, seeds = read_instructions(obs["instruction"]), read_seeds(obs["vla_seed"])
    assert all(tasks) and len(set(seeds)) == N
    output = venv.env.vla.forward(frames, tasks, seed=seeds)
    assert np.array_equal(output.chunk[:, :3].numpy(), obs["vla_ref"])
    plain = make_env(show_pictures=False).reset()
    assert "pictures" not in plain and all(np.array_equal(plain[key], obs[key]) for key in plain)


def test_final_observations_have_pictures():
    venv = make_env()
    venv.reset()
    for _ in range(8):
        _, _, dones, infos = venv.step(np.zeros((N, 3, 7)))
        if dones.any():
            break
    final = infos[int(np.flatnonzero(dones)[0])]["terminal_observation"]
    assert final["pictures"].shape == (2, 32, 32, 3) and final["instruction"].any()


def test_before_its_first_step_the_copy_changes_nothing():
    """Bit for bit: no actor is updated here, so the copy does not move either."""
    settings = {"policy_delay": 1000, "gate": GATE, "batch_size": 8}
    frozen = make_model(make_env(show_pictures=False), **settings).learn(24)
    late = make_model(train_vla={"part": "all", "learning_rate": 1.0}, **settings).learn(24)
    assert late._n_updates == frozen._n_updates > 20 and not late.critic.features_extractor.moved
    for name, value in frozen.policy.state_dict().items():
        assert th.equal(value, late.policy.state_dict()[name]), name


@pytest.mark.parametrize("part", ["head", "lora", "all"])
def test_the_copy_begins_as_the_frozen_vla(part):
    if part == "lora":
        pytest.importorskip("peft", exc_type=ImportError)
    model = make_model(train_vla={"part": part})
    obs, _ = model.policy.obs_to_tensor(model.env.reset())
    features = model.actor.features_extractor
    expected = features(obs)
    features.moved.fill_(True)
    seen = features.see(obs)
    assert seen["features"] is not expected and th.allclose(seen["features"], expected, atol=1e-5)
    assert th.allclose(seen["vla_ref"], obs["vla_ref"], atol=1e-6)
    assert not th.equal(seen["vla_ref"][0], seen["vla_ref"][1])


def leaves_of(model, part):
    """What learns, as leaves, and all weights of a plain network made of them."""
    vla = model.policy.vla
    state = {
        key.removeprefix("vla.net."): value for key, value in vla.state_dict().items() if key.startswith("vla.net.")
    }
    leaves = [value.requires_grad_() for value in weights_of(model)]
    own = {key.removeprefix("vla.net."): leaf for key, leaf in zip(vla.moving, leaves, strict=True)}
    if part != "lora":
        return leaves, state | own
    plain = {key.replace(".base_layer", ""): value for key, value in state.items() if "lora_" not in key}
    for key, down in own.items():
        if ".lora_A." in key:
            layer = key.split(".lora_A")[0]
            plain[f"{layer}.weight"] = plain[f"{layer}.weight"] + own[key.replace("lora_A", "lora_B")] @ down
    return leaves, plain


@pytest.mark.parametrize("part", ["head", "lora", "all"])
def test_the_gradients_against_the_losses_written_out(part):
    if part == "lora":
        pytest.importorskip("peft", exc_type=ImportError)
    model = make_model(
        train_vla={"part": part, "rank": 2, "imitation_coef": 3.0},
        policy_delay=1, reference_dropout=0.0, target_policy_noise=0.0, action_scale=0.5, bc_coef=7.0, batch_size=8,
    ).learn(20)  # fmt: skip
    generator = th.Generator().manual_seed(1)
    for value in model.critic.features_extractor.weights:  # as after a long training; LoRA's product begins at zero
        value.data += 0.05 * th.randn(value.shape, generator=generator)
    training, nothing = model.policy.vla_training, lambda module: th.optim.SGD(module.parameters(), lr=0.0)
    model.actor.optimizer, model.critic.optimizer = nothing(model.actor.mu), nothing(model.critic.ensemble)
    training.optimizer = nothing(training.features)
    batch, targets = model.replay_buffer.sample(16), {}
    rows, frozen = dict(batch.observations), batch.bc_target.clone()
    original = model._targets
    model._targets = lambda given: targets.setdefault("y", original(given))
    leaves, weights = leaves_of(model, part)
    model._update_critic(batch)
    model._update_actor(batch)
    training.step(batch.bc_target, model.action_unit)
    found = [value.grad for value in training.features.weights]

    frames = [normalize_frames(rows["pictures"][:, n], 32) for n in range(2)]
    net = MiniVLANet(TINY)
    words = net.text_batch(read_instructions(rows["instruction"].numpy()))
    tokens, chunk = functional_call(net, weights, (frames, rows["proprio"], *words))
    encoder = model.env.get_attr("encoder")[0]
    scaled = ((tokens - encoder.token_mean[: tokens.shape[1]]) / encoder.token_std).clamp(-10, 10)
    z_rl = th.nn.functional.layer_norm(encoder.encode(scaled), (12,))
    proprio = model.critic.features_extractor.of_token(rows, rows["z_rl"])[:, 12:]
    features, reference = th.cat([z_rl, proprio], 1), chunk[:, :3].flatten(1)
    critic = (model.critic.ensemble(features, None, batch.actions) - targets["y"]).square().mean(1).sum()
    seen = features.detach()
    action = reference + model.actor.mu(th.cat([seen, reference], 1))
    assert float(action.detach().abs().max()) < 1.0  # the limits would cut gradients
    pull = 7.0 * ((action - frozen) / 0.5).square().mean()
    actor = pull - model.critic.ensemble(seen, None, action).mean()
    total = critic + actor + 3.0 * ((reference - frozen) / 0.5).square().mean()
    expected = th.autograd.grad(total, leaves, allow_unused=True, retain_graph=True)
    compared = 0
    for one, other in zip(found, expected, strict=True):
        if other is not None:
            assert th.allclose(one, other, rtol=1e-3, atol=1e-5 * float(other.abs().max() + 1)), (one, other)
            compared += float(other.abs().max()) > 1e-4
    assert compared >= {"head": 4, "lora": 8, "all": 20}[part]
    # each of the three terms matters to this comparison
    for term in (critic, actor, total - critic - actor)[part == "head" :]:
        partial = th.autograd.grad(term, leaves, allow_unused=True, retain_graph=True)
        assert any(value is not None and float(value.abs().max()) > 1e-4 for value in partial)


@pytest.mark.parametrize("part", ["head", "lora", "all"])
def test_what_moves(part):
    if part == "lora":
        pytest.importorskip("peft", exc_type=ImportError)
    model = make_model(train_vla={"part": part, "learning_rate": 1e-3}, gate=GATE, batch_size=8)
    start, frozen = weights_of(model), model.env.get_attr("vla")[0].fingerprint()
    shared = [value.clone() for value in model.policy.vla.state_dict().values()]
    model.learn(8)
    batch, model._n_updates = model.replay_buffer.sample(16), model.policy_delay
    model._update_critic(batch)
    assert model._warming_up and not batch.observations["vla_ref"].requires_grad  # the row's own
    model.learn(20, reset_num_timesteps=False)
    moved = weights_of(model)
    assert not any(th.equal(one, other) for one, other in zip(start, moved, strict=True) if one.abs().max() > 0)
    assert same(moved, weights_of(model, "actor"))  # the actor that learns has the VLA of the critics
    assert not same(moved, weights_of(model, "actor_target"))  # a slow copy
    assert same(start, weights_of(model, "actor_deployed"))  # the untrained one
    assert same(shared, list(model.policy.vla.state_dict().values()))
    obs = model.env.reset()
    assert model.env.get_attr("vla")[0].fingerprint() == MiniVLA(tiny_vla().net).fingerprint() == frozen
    assert np.array_equal(model.predict(obs, deterministic=True)[0], obs["vla_ref"])  # no actor has beaten the VLA


def test_the_gate_plays_the_frozen_vla():
    model = make_model(train_vla={"learning_rate": 1e-2}, gate={"share": 1.0, "window": 50}, batch_size=8).learn(40)
    chunks = model.replay_buffer.storage
    rows = chunks.is_row(np.arange(chunks.size))
    assert np.array_equal(chunks.actions[rows], chunks.obs["vla_ref"][rows])
    obs, _ = model.policy.obs_to_tensor(model._last_obs)
    reference = model.actor.features_extractor.see(obs)["vla_ref"]
    assert float((reference - obs["vla_ref"]).abs().max()) > 1e-3  # although the copy has moved


def test_the_imitation_keeps_the_copy_near_the_frozen_vla(tmp_path):
    def distance(coef):
        model = make_model(
            train_vla={"part": "all", "learning_rate": 3e-3, "imitation_coef": coef}, bc_coef=0.0, batch_size=8
        )
        model.set_logger(configure(str(tmp_path), ["csv"]))
        model.learn(60)
        obs, _ = model.policy.obs_to_tensor(model.env.reset())
        return float((model.actor.features_extractor.see(obs)["vla_ref"] - obs["vla_ref"]).square().mean())

    assert distance(1000.0) < 0.2 * distance(0.0)
    assert "train/imitation_loss" in (tmp_path / "progress.csv").read_text().splitlines()[0].split(",")


def test_training_twice_saving_and_going_on(tmp_path):
    def trained():
        return make_model(train_vla={"part": "all", "learning_rate": 1e-3}, gate=GATE, batch_size=8).learn(40)

    first, second = trained(), trained()
    assert same(list(first.policy.state_dict().values()), list(second.policy.state_dict().values()))
    first.save(tmp_path / "model.zip")
    first.save_replay_buffer(tmp_path / "buffer.pkl")
    loaded = RLT.load(tmp_path / "model.zip", env=make_env(), device="cpu")
    assert same(list(first.policy.state_dict().values()), list(loaded.policy.state_dict().values()))
    mine, theirs = (model.policy.vla_training.optimizer.state_dict()["state"] for model in (first, loaded))
    assert mine.keys() == theirs.keys() and all(th.equal(mine[n]["exp_avg"], theirs[n]["exp_avg"]) for n in mine)
    loaded.load_replay_buffer(tmp_path / "buffer.pkl")
    stored = [model.replay_buffer.storage.obs["pictures"] for model in (first, loaded)]
    assert np.array_equal(*stored) and stored[0].any()
    obs = make_env().reset()
    first.policy.deploy(first.policy.training_actor.state_dict())
    assert not np.array_equal(first.predict(obs)[0], loaded.predict(obs)[0])
    first.save(tmp_path / "model.zip")
    assert np.array_equal(first.predict(obs)[0], RLT.load(tmp_path / "model.zip").predict(obs)[0])
    before = weights_of(loaded)
    loaded.learn(20, reset_num_timesteps=False)
    assert not same(before, weights_of(loaded))


def test_a_deployed_actor_keeps_its_vla():
    model = make_model(train_vla={"learning_rate": 1e-2}, gate=GATE, batch_size=8).learn(40)
    model.policy.deploy(model.policy.training_actor.state_dict())
    obs = make_env().reset()
    deployed, _ = model.predict(obs)
    model.learn(20, reset_num_timesteps=False)
    assert model.gate.approvals == 0 and np.array_equal(deployed, model.predict(obs)[0])
    model.policy.deploy(model.policy.training_actor.state_dict())
    assert not np.array_equal(deployed, model.predict(obs)[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_model(make_env(show_pictures=False), {}), r"make the environment with show_pictures=True"),
        (lambda: make_model(train_vla={"part": "tail"}), r"part must be one of \('head', 'lora', 'all'\), got 'tail'"),
        (lambda: make_model(train_vla={"learning_rate": -1}), r"learning_rate must be a number >= 0, got -1"),
        (lambda: make_model(train_vla={"rank": 0}), r"rank must be an integer >= 1, got 0"),
        (lambda: check_before_env(RLT, {"policy_kwargs": {"train_vla": {"imitation": 1}}}), "imitation"),
        (lambda: make_model(train_vla={}, replay_buffer_kwargs=OFFLINE), "leave out offline_data"),
        (lambda: make_model(make_env(vla=FakeVLA(horizon=4)), {}), "'fake' gives no gradients: use a MiniVLA"),
        (
            lambda: make_model(train_vla={}, buffer_size=10**11),
            r"GiB \(100000000000 rows of \d+ bytes and 0.\d MiB of a second VLA\).*lower buffer_size below \d+",
        ),
    ],
)  # fmt: skip
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_memory_is_reported(capsys):
    make_model(train_vla={}, verbose=1, buffer_size=1000)
    # a row: two pictures, 256 + 4 bytes, 12 + 8 + 21 numbers of the observation, 21 of the chunk
    assert f"1000 rows of {2 * 32 * 32 * 3 + 260 + 4 * 62} bytes" in capsys.readouterr().out
    assert make_model(make_env(show_pictures=False), verbose=1).memory_report is None


def bytes_of(model) -> int:
    """Bytes of all tensors and arrays that can be reached from a model, gradients and what optimizers keep included."""
    seen, left, found = {}, [model], {}
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, type | ModuleType):
            continue
        seen[id(one)] = one  # alive, so that no other object gets its number
        if isinstance(one, np.ndarray):
            found[one.ctypes.data] = max(one.nbytes, found.get(one.ctypes.data, 0))
        elif isinstance(one, th.Tensor):
            found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
            left.append(one.grad)
        # what a function sees of its module is not the model's
        left += [one.__closure__, one.__defaults__] if isinstance(one, FunctionType) else gc.get_referents(one)
    return sum(found.values())


def test_the_memory_does_not_grow_with_the_rows():
    """Rows have their place from the beginning; VLA, optimizers and all else are as large with 200 rows as with 50."""
    model = make_model(train_vla={"part": "all"}, batch_size=8, utd=0.25, buffer_size=500).learn(50)
    first, rows = bytes_of(model), model.replay_buffer.size()
    weights = sum(value.nbytes for value in model.policy.state_dict().values())
    pictures = model.replay_buffer.storage.obs["pictures"].nbytes
    assert first > pictures + weights + 2 * sum(value.nbytes for value in weights_of(model))  # Adam's two averages
    model.learn(150, reset_num_timesteps=False)
    assert model.replay_buffer.size() >= 4 * rows - 8 and model.critic.features_extractor.moved
    grown = bytes_of(model) - first
    assert abs(grown) < model.replay_buffer.storage.obs["pictures"][0].nbytes  # less than the pictures of one row
    model.policy.vla_training.kept = [th.zeros(1000)]  # what somebody keeps would be seen
    assert bytes_of(model) - first == grown + 4000


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("show_pictures", None, r"train_vla needs pictures in the observations: set env.show_pictures to true"),
        ("workers", 2, r"train_vla needs the VLA in this process, and rollout.workers is 2"),
    ],
)
def test_settings_are_checked_before_there_is_an_environment(setting, value, message):
    config = TrainConfig(algorithms={"rlt": {"policy_kwargs": {"train_vla": {}}}})
    config.env.show_pictures = True
    config.check()
    setattr(config.env if setting == "show_pictures" else config.rollout, setting, value)
    with pytest.raises(ValueError, match=message):
        config.check()
