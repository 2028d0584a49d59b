"""The JSON schema of configurations: up to date, met by what is shipped, and of use against misspelled settings."""

import json
from dataclasses import asdict

import jsonschema
import pytest
import yaml

from rlt_sb3.experiment.algorithms import RESERVED
from rlt_sb3.experiment.config import TrainConfig, config_file, load_config, save_config, shipped_configs
from rlt_sb3.experiment.models import resolve_settings
from rlt_sb3.experiment.schema import FILE, text

SCHEMA = json.loads(FILE.read_text(encoding="utf-8"))


def test_is_up_to_date():
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    assert FILE.read_text(encoding="utf-8") == text(), "run `make schema`"


@pytest.mark.parametrize("name", shipped_configs())
def test_shipped_config_meets_it(name):
    with open(config_file(name), encoding="utf-8") as file:
        lines = file.read()
    jsonschema.validate(yaml.safe_load(lines), SCHEMA)
    assert "\n# yaml-language-server: $schema=schema.json\n" in lines


def test_saved_config_meets_it(tmp_path):
    save_config(TrainConfig(), tmp_path / "config.yaml")
    jsonschema.validate(yaml.safe_load((tmp_path / "config.yaml").read_text()), SCHEMA)
    assert asdict(load_config(tmp_path / "config.yaml")) == asdict(TrainConfig())


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"total_chunk": 3}, "'total_chunk' was unexpected"),
        ({"env": {"task_ids": ["a"]}}, "'a' is not of type 'integer'"),
        ({"env": {"num_envs": 1.5}}, "is not of type 'integer'"),
        ({"algorithm": "sac"}, "is not one of"),
        ({"rlt": {"learning_strats": 3}}, "'learning_strats' was unexpected"),
        ({"rlt": {"seed": 3}}, "'seed' was unexpected"),
        ({"rlt": {"gamma": "x"}}, "'x' is not of type 'number'"),
        ({"rlt": {"learning_rate": {"start": 1}}}, "'end' is a required property"),
        ({"rlt": {"policy_kwargs": {"net_arhc": [8]}}}, "'net_arhc' was unexpected"),
        ({"rlt": {"policy_kwargs": {"activation_fn": "GELU"}}}, "'GELU' does not match"),
        ({"rlt": {"action_noise": 3}}, "'action_noise' was unexpected"),
        ({"tqc": {"gama": 0.9}}, "'gama' was unexpected"),
        ({"tqc": {"batch_size": 2.5}}, "2.5 is not of type 'integer'"),
    ],
)
def test_refuses(config, complaint):
    with pytest.raises(jsonschema.ValidationError, match=complaint):
        jsonschema.validate(config, SCHEMA)


@pytest.mark.parametrize(
    "config",
    [
        {"rlt": {"bc_coef": {"start": 20, "end": 5, "end_fraction": 0.5}, "learning_rate": 1e-4, "q_bounds": None}},
        {"rlt": {"policy_kwargs": {"activation_fn": "torch.nn:GELU", "net_arch": {"pi": [8], "qf": [8, 8]}}}},
        {"rlt": {"q_bounds": [0, 2], "train_freq": [1, "step"], "exploration_std": [0.1, 0.2], "gate": {"window": 8}}},
        {"rlt": {"bc_coef": {"start": 60, "end": 5, "chunks": 3000}, "gate": False}},
        {"tqc": {"ent_coef": 0.1, "replay_buffer_class": None, "policy_kwargs": {"n_quantiles": 5}, "device": "cuda"}},
    ],
)
def test_accepts(config):
    """What a run accepts as well."""
    jsonschema.validate(config, SCHEMA)
    for name, settings in config.items():
        resolve_settings(name, settings)


def test_defaults_are_those_of_a_run():
    """TQC's differ from sb3-contrib's; those that depend on the environment are left out."""
    tqc = SCHEMA["properties"]["tqc"]["properties"]
    assert tqc["buffer_size"]["default"] == 50_000 and tqc["learning_starts"]["default"] == 500
    assert "default" not in tqc["gamma"] and "default" not in tqc["gradient_steps"]
    assert SCHEMA["properties"]["rlt"]["properties"]["device"]["default"] == tqc["device"]["default"] == "auto"


def test_every_setting_is_described():
    properties = SCHEMA["properties"]
    groups = (properties, properties["env"]["properties"], properties["evaluation"]["properties"])
    assert [name for group in groups for name, setting in group.items() if not setting["description"]] == []
    rlt, tqc = properties["rlt"]["properties"], properties["tqc"]["properties"]
    assert {"gamma", "bc_coef", "learning_starts"} <= set(rlt) and not set(RESERVED) & (set(rlt) | set(tqc))
    (gate,) = [part["properties"] for part in rlt["gate"]["anyOf"] if "properties" in part]
    assert {"share", "window"} <= set(gate)
    for group in (rlt, tqc, gate):
        assert [name for name, setting in group.items() if not setting["description"]] == []
