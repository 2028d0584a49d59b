"""A VLA as unlike the shipped one as those of others are, from the check to RLT."""

import numpy as np
import pytest
import torch
from foreign_vla import SIZE, STEPS, WIDTH, ForeignVLA, JointedEnv, LiberoForeignVLA
from vla_helpers import write_demos

from rlt_gym.libero.make import make_rl_token_libero_vec
from rlt_gym.rl_token.env import RLTokenVectorEnv
from rlt_gym.rl_token.pretrain import PretrainTokenConfig, pretrain_token
from rlt_gym.testing import FakeLiberoVectorEnv, check_vector_env
from rlt_gym.vla.conformance import examine_vla
from rlt_sb3 import RLT, GymnasiumVecEnv

RLT_SETTINGS = {"learning_starts": 20, "critic_warmup_updates": 4, "seed": 0, "device": "cpu"}


def learn(env, chunks):
    """Some chunks of RLT; every weight stays finite and some have changed."""
    model = RLT("MultiInputPolicy", GymnasiumVecEnv(env), **RLT_SETTINGS)
    before = {key: value.clone() for key, value in model.policy.state_dict().items()}
    model.learn(chunks)
    after = model.policy.state_dict()
    assert all(bool(torch.isfinite(value).all()) for value in after.values() if value.is_floating_point())
    assert any(not torch.equal(before[key], value) for key, value in after.items())
    return model


@pytest.mark.parametrize("make", [ForeignVLA, LiberoForeignVLA], ids=["jointed", "libero"])
def test_it_keeps_the_contract(make):
    results = {result.name: result for result in examine_vla(make(max_batch=None), tolerance=0.02)}
    assert {name for name, result in results.items() if result.status in ("FAIL", "skip")} == {"noise"}
    assert results["noise"].status == "skip"  # it takes none from outside
    assert f"({4}, {len(make().spec.cameras) * 16 + 9}, {WIDTH})" in results["output"].detail
    assert results["orientation"].detail.endswith("same" if make is ForeignVLA else "turned")


def test_the_command_keeps_the_limit_of_rows(monkeypatch, capsys):
    """No forward pass has more than three rows."""
    from rlt_sb3.cli.main import main

    monkeypatch.setenv("RLT_ALLOWED_IMPORTS", "foreign_vla")
    assert main(["vla", "check", "foreign_vla:ForeignVLA"]) == 0, capsys.readouterr().out
    assert "  pass  orientation  the network reads the pictures same" in capsys.readouterr().out
    arguments = ["vla", "check", "foreign_vla:ForeignVLA", "--tolerance", "1e-9", "--vla_kwargs.max_batch", "1"]
    assert main(arguments) == 0, "one row at a time, nothing rounds otherwise"


def test_three_cameras_another_arm_and_a_chunk_of_50():
    """Each row of a batch that holds final observations too gets its own noise, whatever part it lies in."""
    vla = ForeignVLA()
    env = RLTokenVectorEnv(JointedEnv(4, chunk_length=10, max_episode_steps=30, seed=0), vla, "mean")
    check_vector_env(env, n_steps=8)
    assert env.single_observation_space["z_rl"].shape == (WIDTH,)
    assert env.single_observation_space["vla_ref"].shape == (10, 8)
    obs, _ = env.reset(seed=0)
    assert np.abs(obs["vla_ref"]).max() <= 1 and len({row.tobytes() for row in obs["vla_ref"]}) == 4
    again, _ = env.reset(seed=0)
    np.testing.assert_array_equal(obs["vla_ref"], again["vla_ref"])
    whole = RLTokenVectorEnv(JointedEnv(4, chunk_length=STEPS, seed=0), vla, "mean").reset(seed=0)[0]["vla_ref"]
    assert whole.shape == (4, STEPS, 8)
    np.testing.assert_array_equal(whole[:, :10], obs["vla_ref"])
    with pytest.raises(ValueError, match=r"chunk_length is 51; with the VLA 'foreign' .* horizon 50"):
        RLTokenVectorEnv(JointedEnv(1, chunk_length=51), vla, "mean")


def test_fifty_chunks_of_rlt_in_a_world_that_is_not_libero():
    env = RLTokenVectorEnv(JointedEnv(2, chunk_length=10, max_episode_steps=60, seed=0), ForeignVLA(), "mean")
    model = learn(env, 50)
    assert model.num_timesteps >= 50 and model.action_space.shape == (10, 8)


def test_libero_refuses_the_policy_of_the_other_arm(tmp_path):
    with pytest.raises(
        ValueError, match=r"'foreign' needs the cameras \['front', 'left', 'hand'\], and the robot 'panda'"
    ):
        make_rl_token_libero_vec(1, vla=ForeignVLA())
    demos = write_demos(tmp_path / "demos.hdf5", "open it", demos=1, length=3, size=SIZE)
    with pytest.raises(ValueError, match="needs the cameras"):
        pretrain_token(PretrainTokenConfig([str(demos)], progress=False), ForeignVLA())


@pytest.fixture(scope="module")
def token(tmp_path_factory):
    """An RL token of its tokens, wider than all of ours."""
    folder = tmp_path_factory.mktemp("foreign")
    for number, instruction in enumerate(("open the drawer", "put the bowl on the plate and turn the stove on")):
        write_demos(folder / f"{number}.hdf5", instruction, demos=3, length=5, size=SIZE, seed=number, render="exact")
    config = PretrainTokenConfig(
        [str(folder)], output=str(folder / "token.safetensors"), z_dim=32, width=32, layers=1, heads=2, steps=3,
        batch_size=4, frame_stride=2, progress=False,
    )  # fmt: skip
    encoder = pretrain_token(config, LiberoForeignVLA())
    assert encoder.z_dim == 32 and encoder.config.token_dim == WIDTH
    return str(folder / "token.safetensors")


def test_pretrain_and_fifty_chunks_of_rlt(token):
    raw = FakeLiberoVectorEnv(2, chunk_length=8, image_size=SIZE, max_episode_steps=24)
    env = RLTokenVectorEnv(raw, LiberoForeignVLA(), token)
    obs, _ = env.reset(seed=0)
    assert obs["z_rl"].shape == (2, 32) and obs["vla_ref"].shape == (2, 8, 7)
    learn(env, 50)


@pytest.mark.sim
def test_on_a_real_scene(token):
    """The environment draws 224 exact pixels because the VLA asks for them."""
    env = make_rl_token_libero_vec(
        1, "libero_goal", [1], vla=LiberoForeignVLA(), rl_token=token, assets="embedded", max_episode_steps=80, seed=0
    )
    try:
        assert env.env.observation_space["wrist"].shape == (1, SIZE, SIZE, 3) and env.metadata["render"] == "exact"
        learn(env, 50)
    finally:
        env.close()
