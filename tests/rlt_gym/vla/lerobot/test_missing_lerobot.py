import importlib.util

import pytest

from rlt_gym.vla.registry import list_vlas, load_vla
from rlt_sb3.cli.main import main


@pytest.mark.skipif(importlib.util.find_spec("lerobot") is not None, reason="LeRobot is there")
def test_the_extra_is_named_if_lerobot_is_not_there(tmp_path, capsys):
    assert "lerobot:" in list_vlas()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"needs a package that is not there \(.*\): pip install 'rlt\[lerobot\]'\.$"):
        load_vla(f"lerobot:{tmp_path}")
    assert main(["vla", "check", f"lerobot:{tmp_path}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_folder_that_is_no_checkpoint_is_named_first(tmp_path):
    with pytest.raises(
        ValueError, match=r"is no checkpoint of LeRobot: it has no config\.json with model\.safetensors"
    ):
        load_vla(f"lerobot:{tmp_path}")
    for name in (tmp_path / "gone", "./gone", "~/gone/pretrained_model", "gone"):
        with pytest.raises(ValueError, match=r"There is no folder .*gone.*, and a policy of the model hub is called"):
            load_vla(f"lerobot:{name}")
