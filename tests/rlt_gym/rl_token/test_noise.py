"""NoiseAction: the chunk played is what the VLA's flow makes of the action, and tokens are computed once."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from flow_vla import LENGTH, SIZE, STEPS, FlowVLA, make_two_ways
from gymnasium.error import ResetNeeded

from rlt_gym.core.flat import FlatVectorEnv
from rlt_gym.rl_token.noise import NoiseAction
from rlt_gym.testing import FakeRLTokenVectorEnv, FakeVLA, check_vector_env, check_vla
from rlt_gym.vla.base import VLAOutput, VLASpec, forward_seed
from rlt_gym.vla.remote.protocol import describe, read_description

N = 3


def noises(parts, rng, scale=1.0):
    return (scale * rng.normal(size=(N, parts, SIZE))).astype(np.float32)


def by_hand(obs, noise):
    """The VLA's own flow, from the position that an observation shows."""
    position = torch.tensor(obs["proprio"][:, :1])
    whole = torch.tensor(noise).repeat_interleave(STEPS // noise.shape[1], dim=1)
    return FlowVLA().flow(position, whole).numpy()[:, :LENGTH]


@pytest.mark.parametrize(("parts", "max_batch"), [(1, None), (2, 2), (STEPS, None)])
def test_the_chunk_played_is_the_flow_of_the_action(parts, max_batch):
    vla = FlowVLA(max_batch=max_batch)
    env, rng, ended = NoiseAction(make_two_ways(N, vla=vla), bound=10.0, parts=parts), np.random.default_rng(0), 0
    assert env.single_action_space.shape == (parts, SIZE) and env.action_space.shape == (N, parts, SIZE)
    obs, _ = env.reset()
    for _ in range(6):  # episodes end: then the VLA sees more rows than there are environments
        noise = noises(parts, rng)
        wanted = by_hand(obs, noise)
        before, passes, flows = obs["proprio"][:, 0].copy(), sum(vla.calls), sum(vla.flows)
        obs, _, terminations, truncations, infos = env.step(noise)
        done = terminations | truncations
        ended += int(done.sum())
        for i in range(N):
            info = infos["final_info"] if done[i] else infos
            np.testing.assert_allclose(info["executed_actions"][i], wanted[i], atol=1e-5)
            steps = int(info["chunk_steps"][i])
            after = infos["final_obs"][i]["proprio"] if done[i] else obs["proprio"][i]
            np.testing.assert_allclose(after[0], before[i] + 0.1 * wanted[i, :steps, 0].sum(), atol=1e-5)
        # tokens of each row once; the flow for the noise of every row seen before, and for the VLA's own
        rows = N + int(done.sum())
        assert sum(vla.calls) - passes == rows and sum(vla.flows) - flows >= rows + N
    assert ended > N


def test_the_noise_of_a_seed_makes_the_reference_chunk():
    env = make_two_ways(N)
    obs, infos = env.reset(seed=3)
    for _ in range(3):
        seeds = [forward_seed(*pair) for pair in zip(infos["noise_seed"], infos["episode_steps"], strict=True)]
        own = [torch.randn(STEPS, SIZE, generator=torch.Generator().manual_seed(seed)).numpy() for seed in seeds]
        np.testing.assert_allclose(env.chunks_of_noise(np.stack(own)), obs["vla_ref"], atol=1e-6)
        obs, _, _, _, infos = env.step(obs["vla_ref"])


def test_one_part_is_repeated_and_the_bound_clips():
    env, rng = NoiseAction(make_two_ways(N), bound=0.5), np.random.default_rng(1)
    env.reset()
    noise = noises(1, rng, 3.0)
    assert np.array_equal(env.chunks(noise), env.chunks(noise.clip(-0.5, 0.5)))
    assert np.array_equal(env.chunks(noise), env.env.chunks_of_noise(noise.clip(-0.5, 0.5).repeat(STEPS, axis=1)))
    assert np.abs(env.chunks(noise) - env.chunks(-noise)).max() > 0.1


def test_a_shorter_chunk_is_the_beginning():
    whole, short = (make_two_ways(N, chunk_length=length) for length in (STEPS, LENGTH))
    for env in (whole, short):
        env.reset()
    noise = noises(1, np.random.default_rng(2))
    np.testing.assert_allclose(short.chunks_of_noise(noise), whole.chunks_of_noise(noise)[:, :LENGTH], atol=1e-6)


def test_executed_actions_are_what_was_played():
    """Before the critical phase the VLA's own chunk is played; a member that has just begun has played nothing."""
    late = make_two_ways(N, critical_phase=lambda sim: sim.env._steps[sim.index] >= 2 * LENGTH)
    critical = NoiseAction(late, bound=10.0)
    obs, _ = critical.reset()
    noise, seen = noises(1, np.random.default_rng(0)), set()
    for _ in range(6):
        own, asked = obs["vla_ref"].copy(), by_hand(obs, noise)
        obs, _, terminations, truncations, infos = critical.step(noise)
        done = terminations | truncations
        assert infos["_executed_actions"].tolist() == (~done).tolist()
        if done.any():
            assert infos["final_info"]["_executed_actions"].tolist() == done.tolist()
        for i in range(N):
            info = infos["final_info"] if done[i] else infos
            is_critical = bool(info["critical_chunk"][i])
            seen.add(is_critical)
            wanted = asked[i] if is_critical else own[i]
            np.testing.assert_allclose(info["executed_actions"][i], wanted, atol=1e-5)
    assert seen == {False, True}


def test_it_is_a_vector_environment_also_over_flat_observations():
    check_vector_env(NoiseAction(make_two_ways(2), parts=LENGTH))  # it wants as many rows as control steps
    flat = NoiseAction(FlatVectorEnv(make_two_ways(2)))
    obs, _ = flat.reset()
    assert obs.shape == (2, 1 + 8 + LENGTH * 7) and flat.step(np.zeros((2, 1, SIZE)))[0].shape == obs.shape


def test_refusals():
    env = make_two_ways(N)
    with pytest.raises(ResetNeeded, match="call reset"):
        env.chunks_of_noise(np.zeros((N, 1, SIZE)))
    env.reset()
    for wrong in (np.zeros((N, 3, SIZE)), np.zeros((N, 1, 6)), np.zeros((N, SIZE)), np.zeros((2, 1, SIZE))):
        with pytest.raises(ValueError, match=r"of the shape \(3, m, 7\), m a divisor of 8, got the shape"):
            env.chunks_of_noise(wrong)
    with pytest.raises(ValueError, match="must be finite numbers"):
        NoiseAction(env).step(np.full((N, 1, SIZE), np.nan))
    with pytest.raises(ValueError, match=r"actions must have the shape \(3, 1, 7\), got \(3, 8, 7\)"):
        NoiseAction(env).step(np.zeros((N, STEPS, SIZE)))
    for arguments, message in (
        ({"bound": 0.0}, "bound must be a number > 0, got 0.0"),
        ({"parts": 0}, "parts must be an integer >= 1, got 0"),
        ({"parts": 3}, "parts must be a divisor of the VLA's 8 steps of noise, got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            NoiseAction(env, **arguments)
    with pytest.raises(ValueError, match="needs an environment of this process with a VLA"):
        NoiseAction(FakeRLTokenVectorEnv(1))


def test_a_vla_without_noise_is_refused_before_simulators_start(monkeypatch):
    monkeypatch.setattr("flow_vla.TwoWays", None)  # would be called
    message = "The VLA 'fake' takes no noise from outside: use one whose VLASpec says noise"
    with pytest.raises(ValueError, match=message):
        make_two_ways(1, vla=FakeVLA(), needs_noise=True)
    monkeypatch.undo()
    env = make_two_ways(1, vla=FakeVLA())
    with pytest.raises(ValueError, match=message):
        NoiseAction(env)
    with pytest.raises(ValueError, match=message):
        env.chunks_of_noise(np.zeros((1, 1, SIZE)))


def test_the_contract_of_noise():
    vla = FlowVLA()
    output = check_vla(vla)
    with pytest.raises(ValueError, match=r"noise has the shape \(4, 8, 6\); the VLA 'flow' takes \(4, 8, 7\)"):
        output.chunk_of(torch.zeros(4, STEPS, 6), vla.spec)
    plain = VLAOutput(output.tokens, output.mask, output.kind, output.chunk)
    with pytest.raises(ValueError, match=r"spec.noise is \(8, 7\), but there is no from_noise"):
        plain.check(vla.spec, 4)
    plain.from_noise = lambda noise: 2.0 + noise
    with pytest.raises(ValueError, match=r"chunk has values outside \[-1, 1\] or NaN \(from_noise\)"):
        plain.chunk_of(torch.zeros(4, STEPS, SIZE), vla.spec)
    for wrong in ((4,), (4, 0), (4.0, 7)):
        with pytest.raises(ValueError, match=r"VLASpec.noise of 'x' must be \(steps, numbers per step\)"):
            VLASpec("x", 8, 4, noise=wrong)
    # a server makes no chunks of noise, so its clients say that they take none
    vla.spec = replace(vla.spec, dtype="float32")
    spec, _ = read_description(describe(vla, 8, 1 << 20, "float16"), "here")
    assert spec == replace(vla.spec, noise=None, dtype="float16")


@pytest.mark.parametrize(
    ("flow", "message"),
    [
        (lambda flow, noise: flow(noise + noise.mean()), "the noise of one row changes the chunks of other rows"),
        (lambda flow, noise: flow(torch.zeros_like(noise)), "other noise gives the same chunk"),
        (lambda flow, noise: flow(noise + torch.rand(1)), "the same noise a second time gives another chunk"),
    ],
)
def test_the_checker_finds_broken_noise(flow, message):
    class Broken(FlowVLA):
        def forward(self, obs, tasks, *, seed=None):
            output = super().forward(obs, tasks, seed=seed)
            good = output.from_noise
            output.from_noise = lambda noise: flow(good, noise)
            return output

    with pytest.raises(ValueError, match=message):
        check_vla(Broken())
