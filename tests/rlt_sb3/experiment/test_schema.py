"""The JSON schema of configurations: up to date, met by what is shipped, and of use against misspelled settings."""

import json
from dataclasses import asdict

import jsonschema
import pytest
import yaml

from rlt_sb3.experiment.algorithms import RESERVED
from rlt_sb3.experiment.config import TrainConfig, config_file, load_config, save_config, shipped_configs
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
        ({"algorithm": "ppo"}, "is not one of"),
        ({"rlt": {"learning_strats": 3}}, "'learning_strats' was unexpected"),
        ({"rlt": {"seed": 3}}, "'seed' was unexpected"),
    ],
)
def test_refuses(config, complaint):
    with pytest.raises(jsonschema.ValidationError, match=complaint):
        jsonschema.validate(config, SCHEMA)


def test_every_setting_is_described():
    properties = SCHEMA["properties"]
    groups = (properties, properties["env"]["properties"], properties["evaluation"]["properties"])
    assert [name for group in groups for name, setting in group.items() if not setting["description"]] == []
    rlt = properties["rlt"]["properties"]
    assert {"gamma", "bc_coef", "learning_starts"} <= set(rlt) and not set(RESERVED) & set(rlt)
    assert [name for name, setting in rlt.items() if not setting["description"]] == []
