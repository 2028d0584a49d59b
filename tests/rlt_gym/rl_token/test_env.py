"""RLTokenVectorEnv over a fake raw environment whose observations are counters."""

from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from vla_helpers import SHIPPED_VLAS

from rlt_gym.libero.make import make_rl_token_libero_vec
from rlt_gym.rl_token.encoder import RLTokenConfig, RLTokenEncoder
from rlt_gym.rl_token.env import RLTokenVectorEnv
from rlt_gym.rl_token.io import load_rl_token
from rlt_gym.rl_token.untrained import MeanToken
from rlt_gym.testing import FakeLiberoVectorEnv, FakeVLA, check_vector_env
from rlt_gym.vla.base import VLAOutput, VLASpec
from rlt_gym.vla.registry import load_vla

N, C = 3, 4


class CountingVLA:
    """Tokens carry picture, proprio and task, so that a mix-up shows; the chunk carries the seed."""

    spec = VLASpec("counting", token_dim=4, horizon=6, stochastic=True)
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.calls: list[int] = []

    def forward(self, obs, tasks, *, seed=None) -> VLAOutput:
        self.calls.append(len(tasks))
        assert set(obs) == {"agentview", "wrist", "state"} and obs["agentview"].dtype == np.uint8
        numbers = [obs["agentview"][:, 0, 0, 0], obs["wrist"][:, 0, 0, 0], obs["state"][:, 2], [len(t) for t in tasks]]
        tokens = torch.tensor(np.stack([np.asarray(x, np.float32) for x in numbers], axis=1))[:, None].repeat(1, 2, 1)
        chunk = torch.tensor([s % 1000 / 1000 for s in seed])[:, None, None].expand(-1, 6, 7).float()
        mask = torch.ones(len(tasks), 2, dtype=torch.bool)
        return VLAOutput(tokens, mask, mask.to(torch.uint8), chunk)

    def to(self, device):
        return self

    def fingerprint(self) -> str:
        return "f" * 64


class ReadingEncoder(RLTokenEncoder):
    """Gives the first token itself."""

    def __init__(self, fingerprint: str = "f" * 64) -> None:
        super().__init__(RLTokenConfig(4, max_tokens=2, width=4, heads=1), fingerprint, "counting")

    def forward(self, output: VLAOutput) -> torch.Tensor:
        return output.tokens[:, 0]


def make(mode: AutoresetMode = AutoresetMode.SAME_STEP, **kwargs: Any) -> RLTokenVectorEnv:
    raw = FakeLiberoVectorEnv(N, chunk_length=C, max_episode_steps=10, success_step=7, autoreset_mode=mode, **kwargs)
    return RLTokenVectorEnv(raw, CountingVLA(), ReadingEncoder())


def zeros() -> np.ndarray:
    return np.zeros((N, C, 7), np.float32)


def test_spaces():
    env = make()
    assert env.single_observation_space["z_rl"].shape == (4,)
    assert env.single_observation_space["vla_ref"].shape == (C, 7)
    assert env.observation_space["proprio"].shape == (N, 8)
    assert env.action_space.shape == (N, C, 7) and env.single_action_space.shape == (C, 7)
    obs, _ = env.reset(seed=0)
    assert obs in env.observation_space
    assert all(value.dtype == np.float32 for value in obs.values())


def test_library_checker():
    check_vector_env(make())


def test_one_batched_call_holds_final_observations_too():
    """Env 0 and 2 (even init_index) succeed at control step 7, env 1 runs into the horizon at 10."""
    env = make()
    vla = env.vla
    env.reset(seed=0)
    env.step(zeros())
    obs, rewards, terminated, truncated, infos = env.step(zeros())
    assert vla.calls == [N, N, N + 2]
    assert terminated.tolist() == [True, False, True] and not truncated.any() and rewards.tolist() == [1, 0, 1]
    assert infos["_final_obs"].tolist() == [True, False, True] and infos["final_obs"][1] is None
    for i in (0, 2):
        final = infos["final_obs"][i]
        assert set(final) == {"z_rl", "vla_ref", "proprio"} and final in env.single_observation_space
        assert final["z_rl"][0] == 7 and final["z_rl"][2] == i and obs["z_rl"][i, 0] == 0
        assert final["proprio"][0] == 7 and obs["proprio"][i, 0] == 0
    assert obs["z_rl"][1, 0] == 8
    assert infos["final_info"]["chunk_steps"][0] == 3
    obs, _, terminated, truncated, infos = env.step(zeros())
    assert truncated.tolist() == [False, True, False] and infos["final_obs"][1]["z_rl"][0] == 10
    assert vla.calls == [N, N, N + 2, N + 1]


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_observations_inside_the_chunks_go_into_the_same_batch(stride):
    env, plain = make(obs_stride=stride), make()
    assert env.obs_stride == stride and plain.obs_stride is None
    check_vector_env(make(obs_stride=stride))
    env.reset(seed=0)
    plain.reset(seed=0)
    key_steps, calls = np.zeros(N, dtype=int), []
    for _ in range(5):  # episodes end at 7 (two envs) and at 10 control steps
        start = key_steps.copy()
        *rest, infos = env.step(zeros())
        *same, plain_infos = plain.step(zeros())
        for key, value in rest[0].items():
            np.testing.assert_array_equal(value, same[0][key])
        assert "inner_obs" not in plain_infos
        inner, count = infos["inner_obs"], infos["inner_count"]
        assert set(inner) == {"z_rl", "vla_ref", "proprio"} and inner["z_rl"].shape == (N, (C - 1) // stride, 4)
        done = rest[2] | rest[3]
        for i in range(N):
            final = infos["final_info"] if done[i] else infos
            executed = int(final["chunk_steps"][i])
            assert count[i] == sum(step < executed for step in range(stride, C, stride))
            for place in range(inner["z_rl"].shape[1]):
                step = start[i] + (place + 1) * stride
                if place >= count[i]:
                    assert all(not inner[key][i, place].any() for key in inner)
                    continue
                assert inner["z_rl"][i, place, 0] == inner["proprio"][i, place, 0] == step
                assert inner["z_rl"][i, place, 1] == final["init_index"][i] and inner["z_rl"][i, place, 2] == i
                seed = int(np.random.SeedSequence([int(step), int(final["noise_seed"][i])]).generate_state(1)[0])
                assert inner["vla_ref"][i, place, 0, 0] == pytest.approx(seed % 1000 / 1000)
            key_steps[i] = 0 if done[i] else start[i] + executed
        calls.append(N + int(done.sum()) + int(count.sum()))
    assert env.vla.calls[-5:] == calls and len(env.vla.calls) == 6


def test_seeds_are_reproducible_and_belong_to_the_observation():
    first, second = make(), make()
    a, b = first.reset(seed=0)[0]["vla_ref"], second.reset(seed=0)[0]["vla_ref"]
    np.testing.assert_array_equal(a, b)
    assert len({float(x) for x in a[:, 0, 0]}) == N  # noise_seed differs
    first.step(zeros())
    _, _, _, _, infos = first.step(zeros())
    key = [7, int(infos["final_info"]["noise_seed"][0])]
    seed = int(np.random.SeedSequence(key).generate_state(1)[0])
    assert infos["final_obs"][0]["vla_ref"][0, 0] == pytest.approx(seed % 1000 / 1000)


def test_disabled_mode_with_partial_reset():
    env = make(AutoresetMode.DISABLED, task_ids=[5, 1234])
    obs, infos = env.reset(seed=0)
    words = [len(text) for text in infos["instruction"]]
    np.testing.assert_array_equal(obs["z_rl"][:, 3], words)
    env.step(zeros())
    obs, _, terminated, _, infos = env.step(zeros())
    assert "final_obs" not in infos and obs["z_rl"][0, 0] == 7
    obs, infos = env.reset(options={"reset_mask": terminated})
    assert obs["z_rl"][:, 0].tolist() == [0, 8, 0]
    assert obs["z_rl"][1, 3] == words[1]  # the env that was not reset keeps its instruction
    assert env.vla.calls == [N] * 4


@pytest.mark.parametrize("encoder", ["mean", "trained"])
def test_what_a_vla_leaves_in_places_without_a_token_does_not_matter(encoder):
    class Untidy(FakeVLA):
        rest = 0.0

        def forward(self, obs, tasks, *, seed=None):
            output = super().forward(obs, tasks, seed=seed)
            assert not output.mask.all()
            return replace(output, tokens=output.tokens.masked_fill(~output.mask[..., None], self.rest))

    vla = Untidy(horizon=8)
    torch.manual_seed(0)
    config = RLTokenConfig(vla.spec.token_dim, width=16, heads=2, layers=1)
    token = MeanToken(vla.spec.token_dim) if encoder == "mean" else RLTokenEncoder(config)
    shown = []
    for vla.rest in (0.0, float("nan"), float("inf")):
        # instructions of different lengths, so that rows differ in what is valid
        raw = FakeLiberoVectorEnv(6, task_ids=list(range(6)))
        shown.append(RLTokenVectorEnv(raw, vla, token, show_tokens=True).reset(seed=0)[0])
    for obs in shown[1:]:
        for key in ("z_rl", "vla_tokens"):
            np.testing.assert_array_equal(obs[key], shown[0][key])


def test_arrays_are_fresh():
    env = make()
    first, _ = env.reset(seed=0)
    copy = {key: value.copy() for key, value in first.items()}
    env.step(zeros())
    second, *_, infos = env.step(zeros())
    for key in first:
        np.testing.assert_array_equal(first[key], copy[key])
        assert not np.shares_memory(first[key], second[key])
        assert not np.shares_memory(infos["final_obs"][0][key], second[key])


@pytest.mark.parametrize(
    ("actions", "match"),
    [
        (np.zeros((N, C + 1, 7)), "actions must have shape"),
        (np.zeros((N, C * 7)), "actions must have shape"),
        (np.where(np.arange(N)[:, None, None] == 1, np.nan, np.zeros((N, C, 7))), r"environments \[1\]"),
        (np.full((N, C, 7), np.inf), r"NaN or inf for environments \[0, 1, 2\]; nothing was executed"),
        (np.zeros((N, C, 7), complex), "must be finite real numbers, got complex128"),
    ],
)
def test_bad_actions_are_not_sent(actions, match):
    env = make()
    env.reset(seed=0)
    with pytest.raises(ValueError, match=match):
        env.step(actions)
    assert env.step(zeros())[0]["z_rl"][:, 0].tolist() == [4] * N


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_the_task_is_shown(mode):
    """``task`` says the same as ``task_id``: at the start, in the midst, at the end and inside the chunks."""
    settings = {"max_episode_steps": 10, "success_step": 7, "obs_stride": 2, "task_ids": (3, 0, 2, 5)}
    raw = FakeLiberoVectorEnv(N, chunk_length=C, autoreset_mode=mode, **settings)
    env = RLTokenVectorEnv(raw, CountingVLA(), ReadingEncoder(), show_task=True)
    assert env.single_observation_space["task"].shape == (6,)
    obs, infos = env.reset(seed=0)
    ended = 0
    for _ in range(12):
        assert obs in env.observation_space and obs["task"].dtype == np.float32
        assert obs["task"].sum(1).tolist() == [1.0] * N and obs["task"].argmax(1).tolist() == infos["task_id"].tolist()
        played = infos["task_id"].copy()
        obs, _, terminated, truncated, infos = env.step(zeros())
        for i in np.flatnonzero(infos.get("_final_obs", np.zeros(N, bool))):
            ended += 1
            assert infos["final_obs"][i]["task"].argmax() == infos["final_info"]["task_id"][i] == played[i]
        for i in range(N):
            inside = infos["inner_obs"]["task"][i, : infos["inner_count"][i]]
            assert inside.argmax(1).tolist() == [played[i]] * len(inside)
        done = terminated | truncated
        if mode is AutoresetMode.DISABLED and done.any():
            obs, began = env.reset(options={"reset_mask": done})
            infos["task_id"] = np.where(done, began["task_id"], infos["task_id"])
    assert ended or mode is not AutoresetMode.SAME_STEP


def test_constructor_refuses_what_does_not_fit():
    raw = FakeLiberoVectorEnv(num_envs=1, chunk_length=7)
    with pytest.raises(ValueError, match=r"chunk_length is 7.*horizon 6"):
        RLTokenVectorEnv(raw, CountingVLA(), ReadingEncoder())
    raw = FakeLiberoVectorEnv(num_envs=1, chunk_length=C)
    with pytest.raises(ValueError, match="fingerprint"):
        RLTokenVectorEnv(raw, CountingVLA(), ReadingEncoder("0" * 64))
    wide = CountingVLA()
    wide.spec = replace(wide.spec, token_dim=5)
    with pytest.raises(ValueError, match="width 4"):
        RLTokenVectorEnv(raw, wide, ReadingEncoder())
    with pytest.raises(ValueError, match="lack"):
        RLTokenVectorEnv(make(), CountingVLA(), ReadingEncoder())
    other = CountingVLA()
    other.spec = replace(other.spec, cameras=("agentview", "front"))
    with pytest.raises(
        ValueError, match=r"'counting' needs the cameras \['front'\].*'fake' has \['agentview', 'wrist'\]"
    ):
        RLTokenVectorEnv(raw, other, ReadingEncoder())
    other.spec = replace(CountingVLA.spec, action_dim=6)
    with pytest.raises(ValueError, match=r"'counting' gives actions of 6 numbers, and the robot 'fake' takes 7"):
        RLTokenVectorEnv(raw, other, ReadingEncoder())
    other.spec = replace(CountingVLA.spec, state_dim=14)
    with pytest.raises(ValueError, match=r"'counting' reads a state of 14 numbers, and the robot 'fake' has 8"):
        RLTokenVectorEnv(raw, other, ReadingEncoder())
    other.spec = replace(CountingVLA.spec, image_size=24)
    with pytest.raises(ValueError, match=r"image_size is 16; the VLA 'counting' needs frames of at least 24 pixels"):
        RLTokenVectorEnv(raw, other, ReadingEncoder())
    other.spec = replace(CountingVLA.spec, image_size=8)
    assert RLTokenVectorEnv(raw, other, ReadingEncoder()).num_envs == 1, "larger frames tell it nothing more"
    other.spec = replace(CountingVLA.spec, image_size=4, frame_size=8)
    with pytest.raises(ValueError, match=r"image_size is 16; the VLA 'counting' needs frames of 8 pixels"):
        RLTokenVectorEnv(raw, other, ReadingEncoder())
    other.spec = CountingVLA.spec
    robot = raw.metadata.pop("robot")
    with pytest.raises(ValueError, match="metadata lack 'robot'"):
        RLTokenVectorEnv(raw, CountingVLA(), ReadingEncoder())
    raw.metadata["robot"] = robot
    with pytest.raises(ValueError, match="autoreset_mode must be an AutoresetMode, got None"):
        raw.metadata["autoreset_mode"] = None
        RLTokenVectorEnv(raw, CountingVLA(), ReadingEncoder())


def test_factory_checks_before_any_process_starts(monkeypatch):
    from rlt_gym.libero import vector_env

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("a worker was about to start")

    monkeypatch.setattr(vector_env, "LiberoVectorEnv", fail)
    with pytest.raises(ValueError, match="horizon 6"):
        make_rl_token_libero_vec(1, chunk_length=7, vla=CountingVLA(), rl_token=ReadingEncoder())
    with pytest.raises(ValueError, match="fingerprint"):
        make_rl_token_libero_vec(1, chunk_length=C, vla=CountingVLA(), rl_token=ReadingEncoder("0" * 64))
    with pytest.raises(ValueError, match=rf"allowed are .*{', '.join(map(repr, SHIPPED_VLAS))}"):
        make_rl_token_libero_vec(1, vla="maxi")
    for change, message in (
        ({"action_dim": 14}, "'counting' gives actions of 14 numbers, and the robot 'panda' takes 7"),
        ({"state_dim": 14}, "'counting' reads a state of 14 numbers, and the robot 'panda' has 8"),
        ({"cameras": ("agentview", "front")}, r"needs the cameras \['front'\], and the robot 'panda' has"),
        ({"image_size": 224}, "image_size is 200; the VLA 'counting' needs frames of at least 224 pixels: leave"),
        ({"image_size": 64, "frame_size": 256}, "image_size is 200; the VLA 'counting' needs frames of 256 pixels"),
    ):
        vla = CountingVLA()
        vla.spec = replace(vla.spec, **change)
        with pytest.raises(ValueError, match=message):
            make_rl_token_libero_vec(1, chunk_length=C, vla=vla, rl_token=ReadingEncoder(), image_size=200)

    for wrong, message in (
        (-0.5, "penalty must be >= 0"),
        ("much", "gripper_penalty must be a number or a dict"),
        ({"signal": "force"}, "signal must be one of"),
        ({"cost": 1}, "unexpected keyword argument 'cost'"),
        ({"env": None}, "unexpected keyword argument 'env'"),
    ):
        with pytest.raises(ValueError, match=message):
            make_rl_token_libero_vec(1, vla=CountingVLA(), rl_token=ReadingEncoder(), gripper_penalty=wrong)


@pytest.mark.parametrize(
    "given, penalty, signal",
    [(None, None, None), (0.5, 0.5, "fingers"), ({"penalty": 0.25, "signal": "command"}, 0.25, "command")],
)
def test_the_gripper_penalty_takes_all_arguments(monkeypatch, given, penalty, signal):
    from rlt_gym.libero import vector_env

    monkeypatch.setattr(vector_env, "LiberoVectorEnv", FakeLiberoVectorEnv)
    env = make_rl_token_libero_vec(
        1, chunk_length=C, vla=CountingVLA(), rl_token=ReadingEncoder(), gripper_penalty=given, success_step=99
    )
    assert (getattr(env.env, "penalty", None), getattr(env.env, "signal", None)) == (penalty, signal)
    env.reset(seed=0)
    commands = np.zeros((1, C, 7), dtype=np.float32)
    commands[0, :, 6] = [-1, 1, -1, 1]
    assert env.step(commands)[1][0] == (-3 * penalty if signal == "command" else 0.0)


@pytest.mark.parametrize(
    ("spec", "given", "drawn"),
    [
        ({}, {}, 128),
        ({}, {"image_size": 96}, 96),
        ({"image_size": 224}, {}, 224),
        ({"image_size": 224}, {"image_size": 256}, 256),
        ({"image_size": 64, "frame_size": 128}, {}, 128),
        ({"image_size": 448, "frame_size": 256}, {}, 256),
    ],
)
def test_the_environment_draws_frames_of_the_size_that_the_vla_needs(monkeypatch, spec, given, drawn):
    from rlt_gym.libero import vector_env

    monkeypatch.setattr(vector_env, "LiberoVectorEnv", FakeLiberoVectorEnv)
    vla, shapes = CountingVLA(), []
    vla.spec = replace(vla.spec, **spec)
    forward = vla.forward
    vla.forward = lambda obs, *args, **kwargs: (shapes.append(obs["wrist"].shape), forward(obs, *args, **kwargs))[1]
    env = make_rl_token_libero_vec(2, chunk_length=C, vla=vla, rl_token=ReadingEncoder(), **given)
    env.reset(seed=0)
    # one made-up observation before simulators start, then the environment's
    assert shapes == [(1, drawn, drawn, 3), (2, drawn, drawn, 3)]


def test_mini_vla_gets_the_frames_that_it_was_trained_on():
    """Drawing at 64 pixels and averaging 128 pixels to 64 are not the same picture."""
    for name in SHIPPED_VLAS:
        spec = load_vla(name).spec
        assert (spec.image_size, spec.frame_size, spec.check_frame_size()) == (64, 128, 128)


@pytest.mark.parametrize("name", SHIPPED_VLAS)
def test_every_shipped_vla_has_an_rl_token(name):
    vla = load_vla(name)
    assert load_rl_token("auto", vla).vla_fingerprint == vla.fingerprint()


def test_factory_passes_everything_on(monkeypatch):
    from rlt_gym.libero import vector_env

    monkeypatch.setattr(vector_env, "LiberoVectorEnv", FakeLiberoVectorEnv)
    env = gymnasium.make_vec(
        "RLToken-LIBERO-v0",
        num_envs=2,
        chunk_length=C,
        task_ids=[3],
        vla=CountingVLA(),
        rl_token=ReadingEncoder(),
        image_size=8,
    )
    _, infos = env.reset(seed=1)
    assert env.num_envs == 2 and infos["task_id"].tolist() == [3, 3]
    env.close()


def test_the_vla_acts_until_the_critical_phase():
    """Someone who only watches sees what is played: vla_ref before control step 4 of an episode, the action after."""
    played = []

    def watch(simulator, proposed, step):
        played.append((simulator.index, step, proposed.astype(np.float32)))

    env = make(intervention=watch, critical_phase=lambda simulator: simulator.env._steps[simulator.index] >= 4)
    obs, infos = env.reset(seed=0)
    for _ in range(6):
        played.clear()
        reference, critical = obs["vla_ref"], infos["critical_phase"]
        actions = np.full(env.action_space.shape, 0.25, dtype=np.float32)
        obs, _, terminations, truncations, infos = env.step(actions)
        done = terminations | truncations
        for i in range(N):
            chunk = infos["final_info"]["critical_chunk"][i] if done[i] else infos["critical_chunk"][i]
            assert chunk == critical[i]
        for i, step, action in played:
            assert critical[i] == (step - step % C >= 4)
            np.testing.assert_array_equal(action, (actions if critical[i] else reference)[i, step % C])
