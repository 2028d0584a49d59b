"""A VLA that this package has never heard of: registered by one line, listed, loaded by name, used."""

import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from toy_vla import ToyVLA
from vla_helpers import SHIPPED_VLAS, tiny_vla

from rlt_gym.libero.make import make_rl_token_libero_vec
from rlt_gym.rl_token.env import RLTokenVectorEnv
from rlt_gym.rl_token.io import ENCODERS, load_rl_token, register_encoder
from rlt_gym.rl_token.untrained import MeanToken
from rlt_gym.testing import FakeLiberoVectorEnv, FakeVLA
from rlt_gym.vla import list_vlas, load_vla, register_vla, register_vla_format
from rlt_gym.vla.registry import FORMATS, VLAS

SHIPPED = [*SHIPPED_VLAS, "rlt:", "openpi:", "lerobot:"]


@pytest.fixture(autouse=True)
def nothing_stays_registered():
    """What a test registers is gone after it."""
    registries = (VLAS, FORMATS, ENCODERS)
    for registry in registries:
        registry.names()
    before = [dict(registry._entries) for registry in registries]
    yield
    for registry, entries in zip(registries, before, strict=True):
        registry._entries.clear()
        registry._entries.update(entries)


def test_one_line_is_enough(capsys):
    register_vla("toy", "toy_vla:ToyVLA", "pulls the hand to the origin")

    assert list_vlas() == {**{name: list_vlas()[name] for name in SHIPPED}, "toy": "pulls the hand to the origin"}
    assert isinstance(load_vla("toy"), ToyVLA)
    raw = FakeLiberoVectorEnv(2, chunk_length=4, max_episode_steps=10)
    env = RLTokenVectorEnv(raw, load_vla("toy"), load_rl_token("mean", load_vla("toy")))
    obs, _ = env.reset(seed=0)
    assert obs["z_rl"].shape == (2, 8) and obs["vla_ref"].shape == (2, 4, 7)
    np.testing.assert_allclose(obs["vla_ref"][:, 0, :3], np.clip(-0.5 * obs["proprio"][:, :3], -1, 1))
    assert env.step(np.zeros((2, 4, 7), np.float32))[0] in env.observation_space
    by_name = RLTokenVectorEnv(FakeLiberoVectorEnv(2, chunk_length=4), "toy", "mean")
    assert by_name.metadata["fingerprint"] == env.metadata["fingerprint"]

    from rlt_sb3.cli.main import main

    assert main(["list"]) == 0
    assert "  toy               pulls the hand to the origin" in capsys.readouterr().out.splitlines()
    shipped = ", ".join(map(repr, SHIPPED_VLAS))
    with pytest.raises(ValueError, match=rf"Unknown VLA 'tyo': allowed are .*{shipped},.* 'toy',"):
        load_vla("tyo")


@pytest.mark.parametrize(
    "command, setting", [("train", "--env.vla"), ("pretrain-token", "--vla"), ("encode-demos", "--vla")]
)
def test_help_and_error_say_what_a_vla_may_be(command, setting, capsys):
    """A path is that of a file of this package's own; an object cannot be given on a command line."""
    from rlt_sb3.cli.main import main

    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    help_of_it = text[text.rindex(f"{setting} VLA") :][:200]
    assert "a name or scheme of ``rlt list``, the path of a file that ``rlt train-vla`` wrote, or" in help_of_it
    allowed = "the path of a .safetensors file that `rlt train-vla` wrote, or, in Python, a FrozenVLA object"
    with pytest.raises(ValueError, match=allowed):
        load_vla("some/checkpoint")


def test_decorator_arguments_and_schemes():
    register_vla("toy-strong", ToyVLA, kwargs={"gain": 2.0})

    @register_vla("hub:", description="models of a hub")
    def from_hub(name, device):
        return ToyVLA(device, gain=float(name))

    assert load_vla("toy-strong").gain == 2.0 and load_vla("hub:3").gain == 3.0 and list_vlas()["hub:"]
    assert from_hub("1", "cpu").gain == 1.0, "the decorator gives back what it was given"
    for name in ("", ":", "a:b", "a::"):
        with pytest.raises(ValueError, match="a scheme that ends in its only colon"):
            register_vla(name, ToyVLA)
    register_vla("broken", dict)
    with pytest.raises(ValueError, match="dict is no FrozenVLA: it lacks spec"):
        load_vla("broken")


class Scaled(ToyVLA):
    """A user's class: made with the device and ``vla_kwargs``."""

    def __init__(self, device, gain=0.5, *, path=None) -> None:
        super().__init__(device, gain)


def test_vla_kwargs_reach_whoever_makes_it(tmp_path, monkeypatch):
    register_vla("toy", Scaled, kwargs={"path": "there"})
    register_vla("hub:", lambda rest, device, gain: ToyVLA(device, float(rest) + gain))
    assert load_vla("toy", vla_kwargs={"gain": 3.0}).gain == 3.0
    assert load_vla("hub:1", vla_kwargs={"gain": 3.0}).gain == 4.0
    for name, kwargs, message in (
        ("toy", {"gian": 1}, r"'toy' cannot be made with vla_kwargs {'gian': 1}: got an unexpected.*allowed: gain\)"),
        ("toy", {"path": "other"}, "vla_kwargs may not have path: the VLA 'toy' is made with it already"),
        ("toy", {"device": "cuda"}, "vla_kwargs may not have device"),
        ("hub:1", {}, "missing a required argument: 'gain'"),
        ("mini", {"path": "x"}, "vla_kwargs may not have path"),
        (ToyVLA(), {"gain": 1.0}, "vla_kwargs are for a VLA that is named; this one is a ToyVLA already"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            load_vla(name, vla_kwargs=kwargs)
        assert "\n" not in str(caught.value)


def test_a_class_of_an_allowed_package_can_be_named(monkeypatch):
    """As other classes that settings name: what an allowed module has only imported is not allowed."""
    monkeypatch.delenv("RLT_ALLOWED_IMPORTS", raising=False)
    monkeypatch.delitem(sys.modules, "named_vla", raising=False)
    with pytest.raises(ValueError, match=r"names the module 'named_vla'.*RLT_ALLOWED_IMPORTS=named_vla"):
        load_vla("named_vla:NamedVLA")
    assert "named_vla" not in sys.modules, "refused before it is imported"
    monkeypatch.setenv("RLT_ALLOWED_IMPORTS", "named_vla")
    vla = load_vla("named_vla:NamedVLA", "cpu", {"gain": 0.125})
    assert vla.gain == 0.125 and type(vla).__name__ == "NamedVLA"
    assert load_vla("rlt_gym.testing.vla:FakeVLA", vla_kwargs={"horizon": 50}).spec.horizon == 50
    for name, message in (
        ("named_vla:ToyVLA", "names the module 'toy_vla'"),
        ("named_vla:nothing", "there is no 'named_vla:nothing'"),
        ("named_vla:make", "must name a class"),
        ("os:system", "names the module 'os'"),
        ("named_vla:NamedVLA.load", "no such scheme is registered"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            load_vla(name)
        assert "\n" not in str(caught.value)


def test_unknown_schemes_and_missing_packages_are_one_line():
    register_vla("hub:", "toy_vla:ToyVLA")
    for name in ("zmq://host:8000", "robots:robots/base", "robots:act", "robots:~/out/pretrained_model"):
        with pytest.raises(ValueError, match=f"Unknown VLA '{name}': no such scheme .*schemes: .*'hub:'\\)") as caught:
            load_vla(name)
        assert "\n" not in str(caught.value)
    register_vla("far:", "a_module_that_is_not_there:load", install="rlt[far]")
    with pytest.raises(
        ValueError, match=r"'far:away' needs a package .*a_module_that_is_not_there.*pip install 'rlt\[far\]'"
    ):
        load_vla("far:away")
    register_vla("typo", "toy_vla:TOyVLA")
    with pytest.raises(ValueError, match="'typo' is registered as 'toy_vla:TOyVLA': module 'toy_vla' has no attribute"):
        load_vla("typo")
    seen = []
    register_vla("remote:", lambda rest, device: seen.append(rest) or ToyVLA(device))
    load_vla("remote://host:8000")
    assert seen == ["//host:8000"], "a scheme gets all that stands after its colon"


def test_every_command_takes_vla_kwargs(monkeypatch, tmp_path):
    """The value that the command line gives is the one with which the VLA is made."""
    from rlt_sb3.cli.main import parse

    monkeypatch.setenv("RLT_ALLOWED_IMPORTS", "named_vla")
    for command, prefix in (("train", "--env."), ("pretrain-token", "--"), ("encode-demos", "--")):
        words = [f"{prefix}vla", "named_vla:NamedVLA", f"{prefix}vla_kwargs", "{gain: 0.25}"]
        config = parse(command, words)
        part = config.env if command == "train" else config
        assert load_vla(part.vla, "cpu", part.vla_kwargs).gain == 0.25
        assert parse(command, [*words[:2], f"{prefix}vla_kwargs.gain", "2"]) and part.vla_kwargs == {"gain": 0.25}


def test_make_and_make_vec_take_vla_kwargs_and_a_run_makes_the_vla_once(monkeypatch):
    import pickle

    import gymnasium

    from rlt_sb3.experiment.config import EnvConfig
    from rlt_sb3.experiment.environment import make_env

    monkeypatch.setenv("RLT_ALLOWED_IMPORTS", "named_vla")
    monkeypatch.setattr("rlt_gym.libero.vector_env.LiberoVectorEnv", FakeLiberoVectorEnv)
    arguments = {"vla": "named_vla:NamedVLA", "vla_kwargs": {"gain": 0.25}, "rl_token": "mean", "chunk_length": 4}
    env = gymnasium.make_vec("RLToken-LIBERO-v0", 2, **arguments)
    assert env.vla.gain == 0.25 and pickle.loads(pickle.dumps(env)).vla.gain == 0.25
    assert gymnasium.make("RLToken-LIBERO-v0", **arguments).unwrapped.vector_env.vla.gain == 0.25
    config = EnvConfig(**arguments, render_mode=None)
    first = make_env(config, "train", 0)
    assert first.vla.gain == 0.25 and make_env(config, "eval", 0, like=first).vla is first.vla


def test_the_later_registration_counts_and_warns():
    with pytest.warns(UserWarning, match="The VLA 'mini' is registered again"):
        register_vla("mini", ToyVLA)
    assert isinstance(load_vla("mini"), ToyVLA)


def test_another_package_is_imported_when_a_name_is_unknown(tmp_path, monkeypatch):
    """Its entry point names a module that registers; one that fails costs a warning."""
    (tmp_path / "theirs.py").write_text(
        "from rlt_gym.vla import register_vla\nregister_vla('theirs', 'toy_vla:ToyVLA', 'of another package')\n"
    )
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rlt.vlas]\ntheirs = theirs\nbad = a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(VLAS, "_plugins_loaded", False)
    load_vla("mini")
    assert "theirs" not in sys.modules, "nothing is imported for a name that is known"
    try:
        with pytest.warns(UserWarning, match=r"entry point bad = 'a_package_that_is_not_there' .*ModuleNotFoundError"):
            assert isinstance(load_vla("theirs"), ToyVLA)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert list_vlas()["theirs"] == "of another package"
    finally:
        sys.modules.pop("theirs", None)


def test_a_file_is_read_by_the_class_of_its_format(tmp_path):
    from safetensors.numpy import save_file

    path = tmp_path / "toy.safetensors"
    save_file({"gain": np.array([0.25], np.float32)}, path, metadata={"format": "toy/1"})
    with pytest.raises(ValueError, match=r"cannot be read as VLA .*format is 'toy/1', known are 'rlt_gym.mini_vla/1'"):
        load_vla(path)

    def read(path, device):
        from safetensors.numpy import load_file

        return ToyVLA(device, gain=float(load_file(path)["gain"][0]))

    register_vla_format("toy/1", read)
    assert load_vla(path).gain == load_vla(str(path)).gain == 0.25
    save_file({}, path)
    with pytest.raises(ValueError, match="format is None"):
        load_vla(path)


def test_a_vla_that_is_on_the_device_is_not_moved(monkeypatch):
    """Billions of weights must not visit the CPU, and a remote or quantized VLA cannot move at all."""

    class Stays(FakeVLA):
        def to(self, device):
            raise AssertionError(f"moved to {device}")

    vla = Stays()
    vla.device = torch.device("meta")
    assert load_vla(vla, "meta") is vla
    with pytest.raises(AssertionError, match="moved to cpu"):
        load_vla(vla)
    env = RLTokenVectorEnv(FakeLiberoVectorEnv(1, chunk_length=4), vla, MeanToken(12), device="meta")
    assert env.vla is vla
    monkeypatch.setattr("rlt_gym.libero.vector_env.LiberoVectorEnv", FakeLiberoVectorEnv)
    vla.device = torch.device("cpu")
    assert make_rl_token_libero_vec(1, vla=vla, rl_token="mean", device="cpu").vla is vla
    assert load_vla(vla, torch.device("cpu")) is load_vla(vla) is vla


def test_the_specification_says_what_it_was_trained_on():
    assert load_vla("mini").spec.assets == load_vla("mini-slow").spec.assets == tiny_vla().spec.assets == "embedded"
    assert ToyVLA().spec.assets == "official" and FakeVLA().spec.assets is None


def test_an_encoder_of_ones_own():
    class First:
        """No module, no weights: the first token."""

        z_dim = 8

        def __call__(self, output):
            return output.tokens[:, 0]

        def to(self, device):
            return self

        def fingerprint(self):
            return "first"

        def check_vla(self, vla):
            if vla.spec.token_dim != 8:
                raise ValueError("other width")

    register_encoder("first", lambda vla: First())
    vla = ToyVLA()
    for encoder in (load_rl_token("first", vla), load_rl_token(First(), vla)):
        env = RLTokenVectorEnv(FakeLiberoVectorEnv(1, chunk_length=4), vla, encoder)
        obs, _ = env.reset(seed=0)
        np.testing.assert_array_equal(obs["z_rl"], obs["proprio"])
    with pytest.raises(ValueError, match="other width"):
        load_rl_token("first", FakeVLA())
    with pytest.raises(
        ValueError,
        match="'frist': allowed are 'auto', 'mean', 'mean-all', 'last', 'random:', 'none', 'first', the path",
    ):
        load_rl_token("frist", vla)
    with pytest.raises(ValueError, match=r"rl_token is a ToyVLA; .* it lacks z_dim, check_vla, __call__"):
        load_rl_token(vla, vla)


def test_names_are_listed_without_torch():
    code = "import sys; from rlt_sb3.cli.catalog import vlas; print(list(vlas()), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{SHIPPED} False"


def test_auto_finds_the_tokens_of_a_registered_vla(tmp_path):
    from rlt_gym.rl_token.encoder import RLTokenConfig, RLTokenEncoder
    from rlt_gym.rl_token.io import save_rl_token
    from rlt_gym.vla.registry import _ENCODER_FOLDERS

    vla = ToyVLA()
    token = RLTokenEncoder(RLTokenConfig(8, max_tokens=2, width=4, heads=1), vla.fingerprint(), "toy")
    save_rl_token(tmp_path / "token.safetensors", token)
    with pytest.raises(ValueError, match="No shipped RL token belongs to the VLA 'toy'"):
        load_rl_token("auto", vla)
    try:
        register_vla("toy", ToyVLA, encoders=tmp_path)
        assert load_rl_token("auto", vla).fingerprint() == token.fingerprint()
    finally:
        del _ENCODER_FOLDERS[tmp_path]


def test_a_run_with_a_class_of_ones_own_is_trained_and_evaluated(monkeypatch, tmp_path):
    """``vla_kwargs`` are in the run's config.yaml: its evaluation makes the same VLA, and another one is refused."""
    import yaml
    from run_helpers import quick

    from rlt_sb3.experiment.eval_config import EvalConfig
    from rlt_sb3.experiment.evaluate_run import evaluate_run
    from rlt_sb3.experiment.train import train

    monkeypatch.setenv("RLT_ALLOWED_IMPORTS", "named_vla")
    monkeypatch.setattr("rlt_gym.libero.vector_env.LiberoVectorEnv", FakeLiberoVectorEnv)
    config = quick(tmp_path, "RLToken-LIBERO-v0", total_chunks=60)
    config.env.vla, config.env.vla_kwargs = "named_vla:NamedVLA", {"gain": 0.25}
    config.env.rl_token, config.env.suite, config.env.chunk_length = "mean", "libero_goal", 4
    config.env.task_ids = [1]
    train(config)
    saved = tmp_path / "toy" / "config.yaml"
    settings = yaml.safe_load(saved.read_text())
    assert settings["env"]["vla_kwargs"] == {"gain": 0.25}
    evaluate_run(EvalConfig(str(tmp_path / "toy"), n_states=4, progress=False))
    settings["env"]["vla_kwargs"] = {"gain": 0.5}
    saved.write_text(yaml.safe_dump(settings))
    with pytest.raises(ValueError, match=r"was made with other frozen weights .*: vla "):
        evaluate_run(EvalConfig(str(tmp_path / "toy"), n_states=4, progress=False))
