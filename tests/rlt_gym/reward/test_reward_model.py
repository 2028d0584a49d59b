"""The network that sees success: its inputs, files, threshold and figures against sums done by hand, and LIBERO."""

import json

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from rlt_gym.libero.make import make_rl_token_libero_vec
from rlt_gym.reward.model import RewardModel, RewardModelConfig, load_reward_model, pooled, save_reward_model
from rlt_gym.reward.training import Labels, TrainRewardConfig, fit, lowest_threshold, measure, train_reward
from rlt_gym.vla import load_vla
from rlt_gym.vla.base import TOKEN_KINDS, VLAOutput
from rlt_gym.vla.batches import run_vla


def output_of(tokens, mask):
    kind = torch.full(mask.shape, TOKEN_KINDS["image"], dtype=torch.uint8)
    return VLAOutput(tokens=tokens, mask=mask, kind=kind, chunk=torch.zeros(len(tokens), 2, 7))


def test_inputs_are_mean_and_deviation_of_the_valid_tokens():
    rng = np.random.default_rng(0)
    tokens, mask = rng.normal(size=(3, 5, 4)).astype(np.float32), rng.random((3, 5)) < 0.6
    mask[:, 2] = True
    found = pooled(output_of(torch.as_tensor(tokens), torch.as_tensor(mask))).numpy()
    for row in range(3):
        valid = tokens[row][mask[row]]
        np.testing.assert_allclose(found[row], np.concatenate([valid.mean(0), valid.std(0)]), atol=1e-5)


def test_files(tmp_path):
    vla, path = load_vla("mini"), tmp_path / "reward.safetensors"
    model = RewardModel(RewardModelConfig(vla.spec.token_dim, threshold=0.7), vla.fingerprint(), "mini")
    model.scale.fill_(2.0)
    save_reward_model(path, model, {"threshold": 0.7})
    loaded = load_reward_model(path, vla)
    assert loaded.config == model.config
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in model.state_dict().items())
    assert json.loads(path.with_suffix(".json").read_text())["vla_fingerprint"] == vla.fingerprint()
    tokens = torch.randn(50, 6, vla.spec.token_dim)
    seen = output_of(tokens, torch.ones(50, 6, dtype=torch.bool))
    np.testing.assert_array_equal(loaded.verdicts(seen), model.probabilities(seen) > 0.7)
    with pytest.raises(ValueError, match=r"trained on tokens of the VLA 'mini' with .* not of 'mini' with"):
        load_reward_model(path, load_vla("mini-goal"))
    with pytest.raises(ValueError, match=r"There is no reward model at .*none\.safetensors; train one"):
        load_reward_model(tmp_path / "none.safetensors", vla)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="cannot be read as a reward model"):
        make_rl_token_libero_vec(1, "libero_goal", [1], reward_model=path)


def labels_of(rows):
    """Rows of (episode, probability, reached)."""
    episode, values, reached = map(np.array, zip(*rows, strict=True))
    return values, Labels(np.zeros((len(rows), 2), np.float32), reached.astype(bool), episode)


def test_figures():
    values, labels = labels_of(
        [
            (0, 0.1, 0), (0, 0.95, 1), (0, 0.9, 1),  # seen at once
            (1, 0.2, 0), (1, 0.5, 1), (1, 0.4, 1), (1, 0.85, 1),  # seen two chunks later
            (2, 0.82, 0), (2, 0.9, 1),  # called a success before it is one
            (3, 0.1, 0), (3, 0.3, 0),
            (4, 0.1, 0), (4, 0.2, 1),  # missed
        ]
    )  # fmt: skip
    found = measure(values, labels, 0.8)
    counts = {name: (value["count"], value["of"]) for name, value in found.items() if isinstance(value, dict)}
    assert counts == {
        "false_positive_chunks": (1, 6),
        "missed_chunks": (3, 7),
        "false_positive_episodes": (1, 5),
        "detected_episodes": (2, 4),
    }
    assert found["delay_chunks"] == 1.0
    low, high = binomtest(1, 5).proportion_ci(method="wilson")
    assert found["false_positive_episodes"]["wilson_95"] == [low, high]
    bins = {}
    for value, reached in zip(values, labels.reached, strict=True):
        bins.setdefault(min(int(10 * value), 9), []).append((value, reached))
    gaps = [
        len(rows) / 13 * abs(np.mean([v for v, _ in rows]) - np.mean([r for _, r in rows])) for rows in bins.values()
    ]
    assert found["calibration_error"] == pytest.approx(sum(gaps))
    assert lowest_threshold(values, labels, 0.0) == pytest.approx(0.82)
    assert lowest_threshold(values, labels, 0.2) == 0.5
    said = values > lowest_threshold(values, labels, 0.0)
    assert not (said & ~labels.reached).any()


def test_what_can_be_seen_is_learned():
    rng = np.random.default_rng(0)
    reached = rng.random(400) < 0.3
    features = rng.normal(size=(400, 16)).astype(np.float32) * 5 + 3
    features[:, 3] += 20 * reached
    labels = Labels(features, reached, np.arange(400) // 10)
    vla = load_vla("mini")
    model = fit(labels, TrainRewardConfig(steps=200), vla)
    again = fit(labels, TrainRewardConfig(steps=200), vla)
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())
    with torch.no_grad():
        right = (model.logits(torch.as_tensor(features)) > 0).numpy() == reached
    assert right.mean() > 0.97


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"episodes": 5}, "episodes is 5; it must be at least 10"),
        ({"false_positives": 1.0}, r"false_positives is 1.0; it must be in \[0, 1\)"),
        ({"output": "x.pt"}, "must end in .safetensors"),
    ],
)
def test_bad_settings(wrong, message):
    with pytest.raises(ValueError, match=message):
        TrainRewardConfig(**wrong)


def test_from_rollouts_to_practice(tmp_path, monkeypatch):
    """On LIBERO: rollouts, a model, its file, an environment that asks it."""
    path = tmp_path / "reward.safetensors"
    settings = {"assets": "embedded", "train_episode_steps": 120}
    config = TrainRewardConfig(
        suite="libero_goal", episodes=10, output=str(path), env_kwargs=settings, steps=50, progress=False
    )
    assert train_reward(config) == path
    said = json.loads(path.with_suffix(".json").read_text())
    assert 0.5 <= said["threshold"] < 1.0 and said["held_out"]["false_positive_chunks"]["of"] > 10
    env = make_rl_token_libero_vec(1, "libero_goal", [1], reward_model=path, seed=0, **settings)
    try:
        calls = []

        def noted(vla, obs, tasks, seeds):
            calls.append((list(tasks), list(seeds), obs["state"].tolist()))
            return run_vla(vla, obs, tasks, seeds)

        monkeypatch.setattr("rlt_gym.rl_token.env.run_vla", noted)
        env.reward_model.config = RewardModelConfig(128, threshold=1.0)  # nothing is a success
        obs, _ = env.reset(seed=0)
        env.step(obs["vla_ref"])
        at_reset, judged, shown = calls
        assert judged == shown and judged[1] != at_reset[1]  # the judge sees what the policy will see
        env.reward_model.config = RewardModelConfig(128, threshold=0.0)  # everything is
        obs, _ = env.reset(seed=0)
        _, rewards, terminations, _, infos = env.step(obs["vla_ref"])
        assert rewards.tolist() == [1.0] and terminations.all()
        assert infos["final_info"]["is_success"].all() and not infos["final_info"]["goal_reached"].any()
    finally:
        env.close()
