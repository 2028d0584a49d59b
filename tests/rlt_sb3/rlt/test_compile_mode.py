"""`compile_mode`: compiled networks compute what the others compute, in updates, rollouts and after loading."""

import numpy as np
import pytest
import torch as th
from rlt_models import fast, make_model, make_venv, random_obs

from rlt_sb3 import RLT

SETTINGS = fast(learning_starts=20, critic_warmup_updates=6, gate=False)
NETWORKS = {"net_arch": [16, 16], "critic_precision": "float32"}


@pytest.fixture(params=["without code", pytest.param("default", marks=pytest.mark.expensive)])
def compiler(request, monkeypatch):
    """Inductor needs a C++ compiler and half a minute; without it the same graphs are traced and run by PyTorch."""
    calls, compiled = [], th.compile

    def counted(function, mode, dynamic):
        calls.append(function)
        kind = {"mode": mode} if request.param == "default" else {"backend": "aot_eager"}
        return compiled(function, dynamic=dynamic, fullgraph=True, **kind)

    monkeypatch.setattr(th, "compile", counted)
    yield calls
    th.compiler.reset()


def test_compiled_updates_are_the_updates(compiler, tmp_path):
    model = make_model(**SETTINGS, policy_kwargs=NETWORKS | {"compile_mode": "default"})
    plain = make_model(**SETTINGS, policy_kwargs=NETWORKS)
    assert len(compiler) == 4  # actor, critics and their targets of one of the models
    plain.policy.load_state_dict(model.policy.state_dict())
    before = {name: value.clone() for name, value in plain.policy.state_dict().items()}
    for one in (model, plain):
        th.manual_seed(0)
        np.random.seed(0)
        one.learn(60)
    assert model._n_updates == plain._n_updates > 50
    for name, value in plain.policy.state_dict().items():
        th.testing.assert_close(model.policy.state_dict()[name], value, atol=1e-4, rtol=1e-3, msg=name)
    assert sum(not th.equal(value, before[name]) for name, value in plain.policy.state_dict().items()) > 10
    obs = random_obs(plain, 7)
    np.testing.assert_allclose(model.predict(obs)[0], plain.predict(obs)[0], atol=1e-4)

    model.save(tmp_path / "model.zip")
    loaded = RLT.load(tmp_path / "model.zip", env=make_venv(2), device="cpu")
    assert loaded.policy.compile_mode == "default" and len(compiler) == 8
    np.testing.assert_array_equal(loaded.predict(obs)[0], model.predict(obs)[0])


def test_bad_modes_are_refused():
    with pytest.raises(ValueError, match=r"compile_mode must be None or one of \('default', .*got 'fast'"):
        make_model(policy_kwargs={"compile_mode": "fast"})
