"""Strict loading: one tensor too few or too many is an error, and nothing is loaded then."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from vla_helpers import tiny_vla

from rlt_gym.vla import load_vla, weights
from rlt_gym.vla.weights import load_weights


class Net(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.a = nn.Linear(3, 2, dtype=dtype)
        self.register_buffer("mean", torch.zeros(3, dtype=dtype))


def stored(path, **changes):
    state = {key: value.clone() for key, value in Net().state_dict().items()} | changes
    save_file({key: value for key, value in state.items() if value is not None}, path)
    return state


def test_all_tensors_arrive_in_the_type_of_the_network(tmp_path):
    path = tmp_path / "net.safetensors"
    state = stored(path, mean=torch.arange(3.0).half())
    for dtype in (torch.float32, torch.bfloat16):
        net = Net(dtype)
        load_weights(net, path)
        for key, value in net.state_dict().items():
            assert value.dtype == dtype and torch.equal(value, state[key].to(dtype))
        assert all(parameter.requires_grad for parameter in net.parameters()), "freezing is the caller's business"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a.bias": None}, "not those of Net: missing: a.bias$"),
        ({"b": torch.zeros(1)}, "surplus: b$"),
        ({"mean": torch.zeros(4)}, r"of another shape: mean \(\(4,\) in the file, \(3,\) in the network\)"),
        ({f"x{i}": torch.zeros(1) for i in range(5)}, "surplus: x0, x1, x2 and 2 more"),
    ],
)
def test_differences_are_named_and_nothing_is_loaded(tmp_path, changes, message):
    path, net = tmp_path / "net.safetensors", Net()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    stored(path, **changes)
    with pytest.raises(ValueError, match=message):
        load_weights(net, path)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


def test_weights_are_read_onto_the_device_of_the_network(tmp_path, monkeypatch):
    path, asked, real = tmp_path / "net.safetensors", [], weights.safe_open
    stored(path)
    monkeypatch.setattr(weights, "safe_open", lambda *a, device, **k: (asked.append(device), real(*a, **k))[1])
    load_weights(Net(), path)
    load_weights(Net().to("meta"), path)
    assert asked == ["cpu", "meta"]


@pytest.mark.parametrize("change", ["missing", "surplus"])
def test_a_mini_with_one_tensor_too_few_or_too_many_is_refused(tmp_path, change):
    path = tmp_path / "vla.safetensors"
    tiny_vla().save(path)
    state = load_file(path)
    with weights.safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    if change == "missing":
        del state["norm.bias"]
    else:
        state["extra"] = torch.zeros(1)
    save_file(state, path, metadata=metadata)
    with pytest.raises(ValueError, match=rf"vla.safetensors cannot be read as MiniVLA weights \(.*{change}: .*; train"):
        load_vla(path)
