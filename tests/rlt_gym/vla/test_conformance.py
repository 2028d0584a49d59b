"""The checker accepts the VLAs that are here and names what is wrong with broken ones."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from toy_vla import ToyVLA
from vla_helpers import observations, tiny_vla

from rlt_gym.testing import FakeVLA
from rlt_gym.vla import load_vla
from rlt_gym.vla.conformance import CHECKS, check_vla, examine_vla
from rlt_gym.vla.probing import example_observations, orientation_of

TASKS = ["put the bowl on the stove", "open the top drawer", "frobnicate", "push the plate"]


@pytest.mark.parametrize(
    "make", [tiny_vla, lambda: load_vla("mini"), FakeVLA, lambda: FakeVLA(stochastic=True), ToyVLA],
    ids=["tiny", "mini", "fake", "stochastic", "toy"],
)  # fmt: skip
def test_ours_pass(make):
    vla = make()
    output = check_vla(vla, observations(4, vla.spec.image_size or 32), TASKS)
    assert output.chunk.shape == (4, vla.spec.horizon, 7)


class Broken(ToyVLA):
    """A ToyVLA whose output is changed afterwards."""

    def __init__(self, change, **spec):
        super().__init__()
        self.change = change
        self.spec = replace(self.spec, **spec)

    def forward(self, obs, tasks, *, seed=None):
        output = super().forward(obs, tasks, seed=seed)
        output.longest, output.rows = max(map(len, tasks)), [len(task) for task in tasks]
        self.change(output, obs, seed)
        return output


def adds(value):
    """Adds to the chunk what ``value(output, obs, seed)`` gives."""

    def change(output, obs, seed):
        output.chunk[:, :, 5] += value(output, obs, seed)

    return change


def sets(name, value):
    return lambda output, obs, seed: setattr(output, name, value(getattr(output, name)))


def row_noise(output, obs, seed):
    return torch.tensor(seed)[:, None] / 100


def batch_noise(output, obs, seed):
    return torch.tensor([sum(seed)] * len(seed))[:, None] / 100


def widens(output, obs, seed):
    """As where pads are attended to: the longest instruction of the batch moves every row."""
    output.chunk[:, :, 5] += output.longest / 1000


def pads_first(output, obs, seed):
    output.mask = output.mask.clone()
    output.mask[1::2, -1] = False


def paints(output, obs, seed):
    obs["wrist"][:] = 0


counter = iter(range(10**6))


@pytest.mark.parametrize(
    ("change", "spec", "message"),
    [
        (adds(lambda o, obs, seed: 2.0), {}, r"chunk has values outside \[-1, 1\]"),
        (sets("chunk", lambda chunk: chunk.double()), {}, "chunk is torch.float64"),
        (sets("tokens", lambda tokens: tokens[:, :, :4]), {}, "tokens is torch.float32"),
        (sets("tokens", lambda tokens: tokens.requires_grad_()), {}, "carry gradients"),
        (sets("tokens", torch.inference_mode()(lambda tokens: tokens.clone())), {}, "tokens are inference tensors"),
        (sets("tokens", lambda tokens: tokens * torch.nan), {}, "valid tokens are NaN"),
        (sets("mask", lambda mask: mask & False), {}, "a row has no valid token"),
        (sets("kind", lambda kind: kind * 0), {}, r"valid tokens have the kinds \[0\]"),
        (sets("kind", lambda kind: kind.to("meta")), {"max_tokens": 1}, "more than spec.max_tokens = 1"),
        (paints, {}, "changes the observation 'wrist'"),
        (adds(lambda o, obs, seed: next(counter) / 100), {}, "the same call a second time has other chunk"),
        (adds(lambda o, obs, seed: torch.arange(len(o.chunk))[:, None] / 10), {}, "row 3 in another place has other"),
        (adds(lambda o, obs, seed: len(o.chunk) / 10), {}, "row 0 without the other rows has other chunk"),
        (pads_first, {}, r"row \d in another place has \d valid tokens, not \d"),
        (adds(row_noise), {}, "spec.stochastic is False, but"),
        (lambda *_: None, {"stochastic": True}, "spec.stochastic is True, but"),
        (lambda *_: None, {"kinds": ("image",)}, r"tokens are of \['image', 'state'\], spec.kinds says \('image',\)"),
        (lambda *_: None, {"dtype": "bfloat16"}, "tokens is torch.float32, but spec.dtype is 'bfloat16'"),
        (lambda *_: None, {"cameras": ("agentview", "wrist")}, "picture of 'wrist' can be flipped and the"),
        (lambda *_: None, {"language": True}, "another instruction gives the same output"),
        (adds(lambda o, *_: torch.tensor(o.rows)[:, None] / 1000), {}, "language is False, but another instruction"),
    ],
)  # fmt: skip
def test_faults_are_named(change, spec, message):
    vla = Broken(change, **spec)
    with pytest.raises(ValueError, match=f"The VLA 'toy' breaks the FrozenVLA contract: .*{message}"):
        check_vla(vla, observations(4), TASKS)


def test_row_noise_is_right_and_batch_noise_is_wrong():
    check_vla(Broken(adds(row_noise), stochastic=True), observations(4), TASKS, seeds=[3, 9, 4, 5])
    with pytest.raises(ValueError, match="row 0 without the other rows"):
        check_vla(Broken(adds(batch_noise), stochastic=True), observations(4), TASKS, seeds=[3, 9, 4, 5])


def test_pads_that_are_attended_to():
    """All instructions as long as each other: only a longer one beside them tells."""
    tasks = ["abcd", "efgh", "ijkl", "mnop"]
    with pytest.raises(ValueError, match="row 0 beside a long instruction has other chunk"):
        check_vla(Broken(widens), observations(4), tasks)


def test_a_picture_whose_orientation_does_not_matter():
    """One adapter loses the picture, the other one mixes it with its mirror image."""

    class Blind(ToyVLA):
        def forward(self, obs, tasks, *, seed=None):
            return super().forward({**obs, "agentview": obs["agentview"] * 0}, tasks, seed=seed)

    with pytest.raises(ValueError, match="the picture of 'agentview' can be flipped and the output stays the same"):
        check_vla(Blind())

    class Symmetric(ToyVLA):
        def forward(self, obs, tasks, *, seed=None):
            picture = obs["agentview"] // 2 + obs["agentview"][:, :, ::-1] // 2
            return super().forward({**obs, "agentview": picture}, tasks, seed=seed)

    with pytest.raises(ValueError, match="the picture of 'agentview' can be mirrored and the output stays the same"):
        check_vla(Symmetric())


class Showing(ToyVLA):
    """Says how it turns pictures, and shows what it reads."""

    def __init__(self, stated, shows):
        super().__init__()
        self.spec, self.shows = replace(self.spec, orientation=stated), shows

    def frames(self, obs):
        return self.shows(obs)


def turned(obs):
    """As LeRobot's pictures of LIBERO: turned by 180 degrees, here made smaller, in 0..1."""
    pictures = obs["agentview"][:, ::-1, ::-1].astype(np.float32) / 255
    half = pictures.reshape(len(pictures), pictures.shape[1] // 2, 2, pictures.shape[2] // 2, 2, 3)
    return {"agentview": half.mean(axis=(2, 4))}


@pytest.mark.parametrize(
    ("stated", "shows", "message"),
    [
        ("flipped", turned, "network reads the picture of 'agentview' turned, spec.orientation says 'flipped'"),
        ("turned", lambda obs: {"agentview": obs["agentview"]}, "'agentview' same, spec.orientation says 'turned'"),
        ("turned", lambda obs: {"agentview": obs["agentview"][:, ::-1]}, "'agentview' flipped, spec.orientation says"),
        ("turned", lambda obs: {}, r"frames\(\) lacks 'agentview'"),
        (
            "turned",
            lambda obs: {"agentview": obs["agentview"][::-1, ::-1, ::-1]},
            "shows other pictures of 'agentview'",
        ),
        ("turned", lambda obs: {"agentview": obs["agentview"][0]}, "shows other pictures of 'agentview'"),
    ],
)
def test_the_frame_that_the_network_reads(stated, shows, message):
    check_vla(Showing("turned", turned))
    with pytest.raises(ValueError, match=message):
        check_vla(Showing(stated, shows))


def test_what_is_exported_for_training_is_what_the_adapter_shows():
    """One frame by two ways: the file of a dataset, and the VLA's own eyes."""
    obs = example_observations(ToyVLA().spec)
    exported = obs["agentview"][:, ::-1, ::-1]
    assert orientation_of(obs["agentview"], exported) == orientation_of(obs["agentview"], turned(obs)["agentview"])
    assert orientation_of(exported, turned(obs)["agentview"]) == "same"


class Net(ToyVLA):
    """Has a network that decides nothing."""

    def __init__(self, spoil=lambda net: None, touch=lambda net: None):
        super().__init__()
        self.net, self.touch = torch.nn.BatchNorm1d(8).eval().requires_grad_(False), touch
        spoil(self.net)

    def forward(self, obs, tasks, *, seed=None):
        self.touch(self.net)
        return super().forward(obs, tasks, seed=seed)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda: Net(lambda net: net.requires_grad_(True)), r"2 parameters require gradients \(weight, bias\)"),
        (lambda: Net(lambda net: net.train()), r"1 modules are in training mode \(BatchNorm1d\)"),
        (lambda: Net(touch=lambda net: net.num_batches_tracked.add_(1)), r"forward\(\) changes 0.num_batches_tracked"),
        (lambda: Net(touch=lambda net: net.weight[3].mul_(1.0001)), r"forward\(\) changes 0.weight"),
    ],
)
def test_a_vla_that_is_not_frozen(broken, message):
    check_vla(Net())
    with pytest.raises(ValueError, match=message):
        check_vla(broken())


def test_the_table_has_every_check_and_what_a_vla_raises():
    results = {result.name: result for result in examine_vla(Net())}
    assert list(results) == list(CHECKS)
    assert {result.status for result in results.values()} == {"pass", "info", "skip"}
    assert results["orientation"].status == "skip" and results["frozen"].detail == "5 tensors frozen and unchanged"
    assert (
        "ms per observation in a batch of 4" in results["speed"].detail and "weights 0.0 MB" in results["memory"].detail
    )
    assert {result.name: result.detail for result in examine_vla(Showing(None, turned))}["orientation"].startswith(
        "the network reads pictures {'agentview': 'turned'}"
    )

    class Raises(ToyVLA):
        def forward(self, obs, tasks, *, seed=None):
            if len(tasks) == 1:
                raise RuntimeError("one row\nis not enough")
            return super().forward(obs, tasks, seed=seed)

    found = {result.name: result for result in examine_vla(Raises())}
    assert found["single row"] == type(found["order"])("single row", "FAIL", "RuntimeError: one row is not enough")
    assert found["order"].status == "pass" and found["fingerprint"].status == "pass", "the others run all the same"
    with pytest.raises(RuntimeError, match="one row"):
        check_vla(Raises())

    def dead(*args, **kwargs):
        raise RuntimeError("no output at all")

    vla = ToyVLA()
    vla.forward = dead
    assert [(r.name, r.status) for r in examine_vla(vla)] == [("output", "FAIL")]
    assert [(r.name, r.status) for r in examine_vla(object())] == [("contract", "FAIL")]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="object is no FrozenVLA: it lacks spec"):
        check_vla(object())  # type: ignore[arg-type]


def test_observations_are_made_up_for_any_specification():
    spec = replace(ToyVLA().spec, cameras=("a", "b", "c"), image_size=224, state_dim=14)
    obs = example_observations(spec, 3)
    assert {key: value.shape for key, value in obs.items()} == {
        "a": (3, 224, 224, 3), "b": (3, 224, 224, 3), "c": (3, 224, 224, 3), "state": (3, 14)
    }  # fmt: skip
    assert not np.array_equal(obs["a"], obs["b"]) and obs["a"].dtype == np.uint8


def test_the_command(monkeypatch, capsys):
    from rlt_gym.testing import check_vla as public
    from rlt_sb3.cli.main import main

    assert public(ToyVLA()).chunk.shape == (4, 6, 7)
    assert main(["vla", "check", "mini"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[1:4]] == ["output", "tokens", "observation"]
    assert lines[-1] == "It keeps the contract." and not any(line.lstrip().startswith("FAIL") for line in lines)
    assert main(["vla", "show", "mini"]) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert shown["render"] == "fast" and shown["horizon"] == "8" and "control_frequency" in shown
    monkeypatch.setenv("RLT_ALLOWED_IMPORTS", "named_vla")
    arguments = ["vla", "check", "named_vla:DeafVLA"]
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert "  FAIL  instruction  The VLA 'toy' breaks" in out and out.endswith("1 checks failed: instruction\n")
    assert main([*arguments, "--vla_kwargs", "{deaf: false}"]) == 0
    rough = ["vla", "check", "named_vla:RoughVLA"]
    assert main(rough) == 0, "half precision"
    assert main([*rough, "--vla_kwargs.dtype", "float32"]) == 1 == main([*rough, "--tolerance", "0.001"])
    assert capsys.readouterr().out.count("1 checks failed: single row") == 2
    assert main(["vla", "check", "gr00t:x/y"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("rlt vla: Unknown VLA 'gr00t:x/y': no such scheme") and error.count("\n") == 1


def test_fingerprint_and_size_of_the_batch():
    vla = ToyVLA()
    with pytest.raises(ValueError, match="was given 1 rows; it needs at least two"):
        check_vla(vla, observations(1), TASKS[:1])
    vla.fingerprint = lambda: str(np.random.default_rng().random())
    with pytest.raises(ValueError, match="another string when it is called again"):
        check_vla(vla, observations(4), TASKS)
    vla.fingerprint = lambda: ""
    with pytest.raises(ValueError, match="fingerprint"):
        check_vla(vla, observations(4), TASKS)
