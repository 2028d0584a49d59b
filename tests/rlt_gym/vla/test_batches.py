"""No forward pass has more rows than the VLA allows, and the parts are the whole."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import toy_env  # noqa: F401 registers the fakes
from toy_vla import ToyVLA
from vla_helpers import observations, tiny_vla, write_demos

from rlt_gym.rl_token.encode_demos import EncodeDemosConfig, encode_demos
from rlt_gym.rl_token.env import RLTokenVectorEnv
from rlt_gym.rl_token.pretrain import PretrainTokenConfig, pretrain_token
from rlt_gym.testing import FakeLiberoVectorEnv, FakeVLA
from rlt_gym.vla import VLAOutput, load_vla
from rlt_gym.vla.base import VLASpec
from rlt_gym.vla.batches import run_vla
from rlt_gym.vla.success_rates import success_rates


class WordVLA(ToyVLA):
    """One token per word, padded to the longest instruction of the batch: parts have different numbers of tokens."""

    def __init__(self, max_batch=None):
        super().__init__()
        self.spec = VLASpec("words", token_dim=4, horizon=2, stochastic=True, max_batch=max_batch)
        self.calls = []

    def forward(self, obs, tasks, *, seed=None):
        self.calls.append(len(tasks))
        lengths = [len(task.split()) for task in tasks]
        tokens, mask = torch.full((len(tasks), max(lengths), 4), 9.0), torch.zeros(len(tasks), max(lengths)).bool()
        for row, (length, task) in enumerate(zip(lengths, tasks, strict=True)):
            tokens[row, :length] = torch.tensor([float(len(word)) for word in task.split()])[:, None]
            mask[row, :length] = True
        chunk = torch.tensor(seed)[:, None, None].expand(-1, 2, 7) / 100 + torch.tensor(obs["state"][:, :1, None]) / 100
        return VLAOutput(tokens, mask, mask.to(torch.uint8) * 2, chunk.float())


TASKS = ["a", "open the drawer", "put the bowl on it", "b", "c"]


@pytest.mark.parametrize(("limit", "calls"), [(None, [5]), (1, [1] * 5), (2, [2, 2, 1]), (5, [5]), (7, [5])])
def test_parts_are_the_whole(limit, calls):
    obs, vla = observations(5), WordVLA(limit)
    seeds = [3, 1, 4, 1, 5]
    output = run_vla(vla, obs, TASKS, seeds)
    assert vla.calls == calls
    assert output.mask.tolist() == [[place < len(task.split()) for place in range(5)] for task in TASKS]
    whole = WordVLA().forward(obs, TASKS, seed=seeds)
    torch.testing.assert_close(output.tokens[output.mask], whole.tokens[whole.mask], rtol=0, atol=0)
    assert torch.equal(output.kind, whole.kind) and torch.equal(output.chunk, whole.chunk)
    assert output.tokens.shape == (5, 5, 4)


def test_mini_gives_the_same_in_parts():
    obs, vla = observations(5), tiny_vla()
    whole = run_vla(vla, obs, TASKS)
    limited = tiny_vla()
    limited._spec = replace(limited.spec, max_batch=2)
    parts = run_vla(limited, obs, TASKS)
    torch.testing.assert_close(parts.tokens, whole.tokens, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(parts.chunk, whole.chunk, rtol=1e-5, atol=1e-5)
    assert load_vla("mini", vla_kwargs={"max_batch": 3}).spec.max_batch == 3


def test_a_part_that_breaks_the_contract_is_refused():
    vla = WordVLA(2)
    vla.spec = replace(vla.spec, horizon=3)
    with pytest.raises(ValueError, match=r"chunk is torch.float32 \(2, 2, 7\), not float32 \(2, 3, 7\)"):
        run_vla(vla, observations(5), TASKS, [0] * 5)
    with pytest.raises(ValueError, match="max_batch of 'words' must be an integer from 1 on, got 0"):
        replace(vla.spec, max_batch=0)


def test_the_type_of_the_tokens_is_that_of_the_specification():
    vla = WordVLA()
    vla.spec = replace(vla.spec, dtype="bfloat16")
    with pytest.raises(ValueError, match=r"tokens is torch\.float32, but spec.dtype is 'bfloat16'"):
        run_vla(vla, observations(5), TASKS, [0] * 5)


class Limited(FakeVLA):
    """Refuses more than three rows."""

    def __init__(self):
        super().__init__(horizon=8)
        self.spec = replace(self.spec, max_batch=3)

    def forward(self, obs, tasks, *, seed=None):
        assert len(tasks) <= 3
        return super().forward(obs, tasks, seed=seed)


def test_the_environment_keeps_the_limit_in_inner_and_final_observations_too():
    envs = [
        RLTokenVectorEnv(FakeLiberoVectorEnv(4, chunk_length=4, obs_stride=1, max_episode_steps=10), vla, "mean")
        for vla in (Limited(), FakeVLA(horizon=8))
    ]
    resets = [env.reset(seed=0) for env in envs]
    np.testing.assert_allclose(resets[0][0]["z_rl"], resets[1][0]["z_rl"], atol=1e-5)
    for _ in range(4):
        steps = [env.step(np.zeros((4, 4, 7), np.float32)) for env in envs]
        for key in ("z_rl", "vla_ref", "proprio"):
            np.testing.assert_allclose(steps[0][0][key], steps[1][0][key], atol=1e-5)
            np.testing.assert_allclose(steps[0][4]["inner_obs"][key], steps[1][4]["inner_obs"][key], atol=1e-5)
    assert max(envs[0].vla.calls) == 3 and max(envs[1].vla.calls) >= 16


def test_pretrain_encode_and_success_rates_keep_it(tmp_path):
    write_demos(tmp_path / "a.hdf5", "open the drawer", demos=4)
    vla = Limited()
    pretrain_token(
        PretrainTokenConfig(
            [str(tmp_path / "a.hdf5")], output=str(tmp_path / "t.safetensors"), steps=1, layers=1, heads=1, z_dim=8,
            batch_size=8, progress=False,
        ),
        vla,
    )  # fmt: skip
    config = EncodeDemosConfig([str(tmp_path / "a.hdf5")], str(tmp_path / "e.safetensors"), rl_token="mean")
    encode_demos(replace(config, progress=False), vla)
    success_rates(vla, "fake", [0], 4, num_envs=5, progress=False, env_id="FakeLIBERO-v0")
    assert max(vla.calls) == 3 and len(vla.calls) > 10
