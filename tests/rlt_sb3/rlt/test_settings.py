"""Settings of RLT: combinations that train, values and spaces that are refused."""

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from rlt_models import (
    fast,
    make_model,
    make_venv,
    random_obs,
)
from stable_baselines3.common.buffers import DictReplayBuffer
from stable_baselines3.common.vec_env import VecNormalize

from rlt_sb3 import RLT
from rlt_sb3.common.noise import HeldNoise


@pytest.mark.parametrize(
    "options",
    [
        dict(  # the paper's
            n_steps=1,
            utd=5,
            critic_warmup_updates=0,
            q_bounds=None,
            policy_kwargs=dict(actor_mode="direct", n_critics=2),
        ),
        dict(reference_dropout=0.0, policy_delay=1, policy_kwargs=dict(n_critics=1, actor_q="first")),
        dict(
            action_noise=HeldNoise(4, [0.1] * 7),
            reference_dropout=1.0,
            policy_kwargs=dict(n_target_critics=2, critic_precision="bfloat16"),
        ),
        dict(learning_rate=lambda progress: 1e-3 * progress, train_freq=3, target_policy_noise=0.0),
        dict(policy_kwargs=dict(net_arch=dict(pi=[16], qf=[24, 8]), optimizer_class=th.optim.AdamW, layer_norm=False)),
        dict(policy_kwargs=dict(features_extractor_kwargs=dict(proprio_norm="none"), activation_fn=th.nn.SiLU)),
    ],
)
def test_options_run(options):
    model = make_model(**(fast() | options))
    model.learn(40)
    actions, _ = model.predict(random_obs(model, 5))
    assert actions.shape == (5, 4, 7) and np.isfinite(actions).all()
    assert model._n_updates > 0


def policy(**kwargs) -> dict:
    return dict(policy_kwargs=kwargs)


BAD = [
    (dict(gamma=1.1), "gamma"), (dict(tau=0.0), "tau"), (policy(actor_tau=2.0), "actor_tau"),
    (dict(n_steps=0), "n_steps"), (dict(utd=0.0), "utd"), (dict(utd=float("inf")), "utd must be > 0 and finite"),
    (dict(stats_window_size=0), "stats_window_size must be an integer >= 1"), (dict(policy_delay=True), "policy_delay"),
    (dict(learning_rate=lambda left: np.nan if left == 0.5 else 1e-3), "learning_rate must be >= 0"),
    (dict(bc_coef=-1.0), "bc_coef"), (policy(actor_q="max"), "actor_q"),
    (dict(reference_dropout=1.5), "reference_dropout"), (dict(exploration_std=-0.1), "exploration_std"),
    (dict(exploration_std=[0.1, 0.1]), "exploration_std"), (dict(action_scale=[1.0, 0, 1, 1, 1, 1, 1]), "action_scale"),
    (dict(q_bounds=(1.0, 0.0)), "q_bounds"), (dict(q_bounds=(1.0, 1.0)), "q_bounds"),
    (dict(correction_range=2.0), "correction_range"), (dict(correction_range=(-1.0, 1.0)), "correction_range"),
    (dict(correction_range=(2.0, 1.0)), r"must be \(low, high\), 0 <= low <= high < inf, got \(2.0, 1.0\)"),
    (dict(correction_range=(0.0, float("inf"))), "correction_range"),
    (policy(n_critics=0), "n_critics"), (policy(n_target_critics=6), "n_target_critics"),
    (dict(batch_size=0), "batch_size"), (policy(actor_mode="tanh"), "actor_mode"),
    (dict(policy_delay=0), "policy_delay"),
    (policy(critic_precision="int8"), "critic_precision"), (dict(critic_warmup_updates=-1), "critic_warmup_updates"),
    (dict(target_policy_noise=-0.1), "target_policy_noise"), (dict(learning_starts=-1), "learning_starts"),
    (policy(act_with="best"), "act_with"), (policy(candidates=0), "candidates must be an integer >= 1, got 0"),
    (policy(n_critic=3), "Unknown RLT setting 'policy_kwargs.n_critic'. Valid settings: .*n_critics"),
    (dict(replay_buffer_kwargs=dict(ratio=1)), "Unknown RLT setting 'replay_buffer_kwargs.ratio'. .*offline_ratio"),
    (dict(gate=dict(trials=3)), "Unknown RLT setting 'gate.trials'. Valid settings: share, window, level"),
    (dict(gate=None), "gate must be True, False or a dict with some of share, window, level, task_weight, got None"),
    (policy(offset_search=None), "policy_kwargs.offset_search must be True, False or a dict with .*, got None"),
    (policy(offset_search=dict(opening=2.5)), r"offset_search.opening must be an integer >= 0 \(episodes\), got 2.5"),
    (policy(offset_search=dict(share=None)), r"offset_search.share must be in \[0, 1\] .*, got None"),
    (policy(offset_search=dict(share=1.1)), "offset_search.share"), (policy(offset_search=dict(std="a")), "got 'a'"),
    (policy(offset_search=dict(std=0.0)), "offset_search.std"), (policy(offset_search=dict(reach=0)), "reach must be"),
    (policy(offset_search=dict(memory="x")), "memory must be an integer >= 16"),
    (policy(offset_search=dict(memory=20.5)), "memory must be an integer >= 16"),
    (dict(train_freq=(1, "episode")), r"train_freq must be counted in steps with 2 environments, got \(1, 'episode'\)"),
    (dict(gate=0.5), "gate must be True, False or a dict with some of share, window, level, task_weight, got 0.5"),
    (dict(replay_buffer_class=DictReplayBuffer), "ChunkReplayBuffer"),
    (dict(policy_kwargs=dict(features_extractor_kwargs=dict(proprio_norm="minmax"))), "proprio_norm"),
    (dict(policy_kwargs=dict(features_extractor_kwargs=dict(proprio_norm=([0.0], [1.0])))), "proprio_norm"),
    (dict(policy_kwargs=dict(features_extractor_kwargs=dict(proprio_norm=([np.nan] * 8, [1.0] * 8)))), "proprio_norm"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_settings(options, message):
    with pytest.raises(ValueError, match=message):
        make_model(**options)


def test_bad_spaces():
    def model_with(change) -> RLT:
        venv = make_venv(1, monitor=False)
        change(venv)
        return make_model(venv=venv)

    def without_reference(venv):
        venv.observation_space = spaces.Dict({k: v for k, v in venv.observation_space.items() if k != "vla_ref"})

    def other_chunk(venv):
        venv.action_space = spaces.Box(-1.0, 1.0, (3, 7), np.float32)

    def wide_actions(venv):
        venv.action_space = spaces.Box(-2.0, 2.0, (4, 7), np.float32)

    def flat_actions(venv):
        venv.action_space = spaces.Box(-1.0, 1.0, (28,), np.float32)

    def token_picture(venv):
        venv.observation_space = spaces.Dict(
            dict(venv.observation_space.items()) | {"z_rl": spaces.Box(-1.0, 1.0, (4, 4), np.float32)}
        )

    for change, message in (
        (without_reference, "vla_ref"),
        (other_chunk, "chunk_length"),
        (wide_actions, r"\[-1, 1\]"),
        (flat_actions, "chunks"),
        (token_picture, "vectors"),
    ):
        with pytest.raises(ValueError, match=message):
            model_with(change)
    with pytest.raises(ValueError, match="VecNormalize"):
        make_model(venv=VecNormalize(make_venv(1), norm_obs_keys=["proprio"]))
    with pytest.raises(ValueError, match="MlpPolicy"):
        RLT("MlpPolicy", make_venv(1))
