"""`critic_precision="auto"` asks the device on which the critics are, not the processor beside it."""

from contextlib import nullcontext

import pytest
import torch as th
from rlt_models import make_model, random_obs

from rlt_sb3.common import hardware


@pytest.fixture(autouse=True)
def asked_anew():
    hardware.has_bfloat16.cache_clear()
    yield
    hardware.has_bfloat16.cache_clear()


@pytest.mark.parametrize("cpu", [False, True])
@pytest.mark.parametrize("gpu", [False, True])
def test_each_device_is_asked_itself(monkeypatch, cpu, gpu):
    monkeypatch.setattr(hardware, "cpu_has_bfloat16", lambda: cpu)
    monkeypatch.setattr(th.cuda, "is_bf16_supported", lambda including_emulation=True: gpu or including_emulation)
    assert hardware.has_bfloat16(th.device("cpu")) == cpu
    assert hardware.has_bfloat16(th.device("cuda", 0)) == gpu
    assert not hardware.has_bfloat16(th.device("mps"))


def test_the_critics_ask_where_they_are(monkeypatch):
    """A tensor on "meta" has no numbers, but a device and a type."""
    asked = []
    monkeypatch.setattr("rlt_sb3.rlt.policies.has_bfloat16", lambda device: asked.append(device.type) or False)
    monkeypatch.setattr(th, "autocast", lambda *args, **kwargs: nullcontext())  # it does not know "meta"
    model = make_model(policy_kwargs={"critic_precision": "auto"})
    obs, _ = model.policy.obs_to_tensor(random_obs(model, 3))
    actions = obs["vla_ref"].flatten(1)
    model.critic.q_values(obs, actions)
    critic = model.critic.to("meta")
    critic.q_values({key: value.to("meta") for key, value in obs.items()}, actions.to("meta"))
    assert asked == ["cpu", "meta"]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_auto_is_what_the_device_says(monkeypatch, precision):
    monkeypatch.setattr("rlt_sb3.rlt.policies.has_bfloat16", lambda device: precision == "bfloat16")
    auto, given = (make_model(policy_kwargs={"critic_precision": name}) for name in ("auto", precision))
    obs, _ = given.policy.obs_to_tensor(random_obs(given, 3))
    actions = obs["vla_ref"].flatten(1)
    given.set_parameters(auto.get_parameters())
    assert th.equal(auto.critic.q_values(obs, actions), given.critic.q_values(obs, actions))
    other = {"float32": "bfloat16", "bfloat16": "float32"}[precision]
    given.policy.set_critic_precision(other)
    assert not th.equal(auto.critic.q_values(obs, actions), given.critic.q_values(obs, actions))
    with pytest.raises(ValueError, match="critic_precision must be one of"):
        given.policy.set_critic_precision("float16")
