"""What can be wrong with a checkpoint is said in one line; what was moved is found."""

import json
import shutil

import pytest

lerobot = pytest.importorskip("lerobot", reason="needs the extra 'lerobot' (scripts/lerobot_env.sh)")

import lerobot_policies as tiny  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from rlt_gym.vla.registry import load_vla  # noqa: E402


@pytest.fixture(scope="module")
def act(tmp_path_factory):
    return tiny.make_act(tmp_path_factory.mktemp("policies") / "act")


@pytest.fixture(scope="module")
def smolvla(tmp_path_factory):
    return tiny.make_smolvla(tmp_path_factory.mktemp("policies") / "smolvla")


def copied(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def refused(folder, message, **arguments):
    with pytest.raises(ValueError, match=message) as caught:
        load_vla(f"lerobot:{folder}", vla_kwargs=arguments)
    assert "\n" not in str(caught.value)


def test_every_tensor_must_be_there(smolvla, tmp_path):
    folder = copied(smolvla, tmp_path)
    file, state = folder / "model.safetensors", load_file(smolvla / "model.safetensors")
    name, value = "model.action_out_proj.bias", state["model.action_out_proj.bias"]
    reads = r"model\.safetensors cannot be read as a smolvla policy: its tensors are not those of SmolVLAPolicy: "
    for changed, message in [
        ({key: tensor for key, tensor in state.items() if key != name}, f"missing: {name}"),
        ({**state, "more": value.clone()}, "surplus: more"),
        (
            {**state, name: value[:5].clone()},
            rf"of another shape: {name} \(\(5,\) in the file, \(7,\) in the network\)",
        ),
    ]:
        save_file(changed, file)
        refused(folder, reads + message)
    file.write_bytes((smolvla / "model.safetensors").read_bytes()[:-100])
    refused(folder, "cannot be read as a smolvla policy: .*[Ii]ncomplete|not fully covered")
    save_file(state, file)
    for name, value in load_vla(f"lerobot:{folder}").policy.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_the_folder_of_the_trainer_will_do(act, tmp_path):
    inner = tmp_path / "out" / "checkpoints" / "last" / "pretrained_model"
    shutil.copytree(act, inner)
    prints = {load_vla(f"lerobot:{folder}").fingerprint() for folder in (act, tmp_path / "out", inner.parent)}
    assert len(prints) == 1, "where it lies does not matter"


def test_the_fingerprint_tells_weights_and_statistics(act, tmp_path):
    first = load_vla(f"lerobot:{act}").fingerprint()
    folder = copied(act, tmp_path)
    post = "policy_postprocessor_step_0_unnormalizer_processor"
    for file, name in (("model", "model.action_head.bias"), (post, "action.std")):
        state = load_file(folder / f"{file}.safetensors")
        save_file({**state, name: state[name] * 1.01}, folder / f"{file}.safetensors")
        second = load_vla(f"lerobot:{folder}").fingerprint()
        assert second != first
        first = second


def test_a_language_model_is_found_where_the_checkpoint_went(smolvla, tmp_path):
    whole = load_vla(f"lerobot:{smolvla}").fingerprint()
    folder = copied(smolvla, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert config["vlm_model_name"] == str(smolvla / "backbone")
    shutil.move(smolvla / "backbone", tmp_path / "language")  # the folder that is named is gone
    try:
        assert load_vla(f"lerobot:{folder}").fingerprint() == whole, "one inside the checkpoint"
        (folder / "backbone").rename(folder / "other")
        assert load_vla(f"lerobot:{folder}").fingerprint() == whole, "under any name"
        shutil.rmtree(folder / "other")
        refused(folder, "trained with the language model in .*backbone, which is not there: put it into .*backbone: FO")
        given = load_vla(f"lerobot:{folder}", vla_kwargs={"backbone": str(tmp_path / "language")})
        assert given.fingerprint() == whole
        for name in ("config.json", "policy_preprocessor.json"):  # as if it were on the model hub
            text = (folder / name).read_text().replace(str(smolvla / "backbone"), "someone/vlm")
            (folder / name).write_text(text)
        refused(folder, "cannot be (loaded|built) .*someone/vlm")
    finally:
        shutil.move(tmp_path / "language", smolvla / "backbone")


def test_statistics_that_are_missing_or_wrong(tmp_path):
    stats = tiny.statistics()
    folder = tiny.make_act(tmp_path / "none", stats={key: value for key, value in stats.items() if key != "action"})
    refused(folder, "has no statistics of action, so nothing would be normalized")
    # LeRobot 0.4.4 squares bytes, which overflow
    folder = tiny.make_act(tmp_path / "wrong", stats=tiny.statistics(image_std=0.0015))
    refused(
        folder, r"standard deviation of the pictures of 0\.0015 of observation\.images\.image, .*use_imagenet_stats"
    )
    load_vla(f"lerobot:{folder}", vla_kwargs={"trust_image_stats": True})


def test_cameras_that_are_not_the_environments(tmp_path, act):
    hand = {"observation.images.top": 64, "observation.images.hand": 64}
    folder = tiny.make_act(tmp_path / "hand", cameras=hand)
    refused(
        folder, r"with the pictures observation\.images\.top, observation\.images\.hand has no camera for observation"
    )
    cameras = {"agentview": "observation.images.top", "wrist": "observation.images.hand"}
    assert load_vla(f"lerobot:{folder}", vla_kwargs={"cameras": cameras}).spec.cameras == ("agentview", "wrist")
    refused(folder, r"is given observation\.images\.left", cameras={**cameras, "x": "observation.images.left"})
    refused(act, r"no camera for observation\.images\.image2", cameras={"agentview": "observation.images.image"})
    one = tiny.make_act(tmp_path / "one", cameras={"observation.images.image": 96})
    spec = load_vla(f"lerobot:{one}").spec
    assert (spec.cameras, spec.image_size) == (("agentview",), 96)


def test_files_and_settings_that_do_not_fit(act, tmp_path):
    refused(act, "orientation may be same, flipped, mirrored, turned, got 'rotated'", orientation="rotated")
    refused(act, "gripper may be env, open, closed, open-signed, got 'robotiq'", gripper="robotiq")
    refused(act, r"cannot be made with vla_kwargs \{'camera': 1\}", camera=1)
    folder = copied(act, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for changed, message in [
        ({**config, "wheels": 4}, r"LeRobot .* cannot read .*config\.json .*wheels"),
        ({**config, "type": "wheels"}, r"LeRobot .* cannot read .*config\.json .*wheels"),
        ({**config, "use_peft": True}, "is an adapter of PEFT"),
    ]:
        (folder / "config.json").write_text(json.dumps(changed))
        refused(folder, message)
    shape = {"observation.images.image": {"type": "VISUAL", "shape": [3, 48, 64]}}
    changed = {**config, "input_features": {**config["input_features"], **shape}}
    (folder / "config.json").write_text(json.dumps(changed))
    refused(folder, r"was trained on observation\.images\.image of the shape \(3, 48, 64\); .* square")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "policy_postprocessor.json").unlink()
    refused(folder, r"has no policy_postprocessor\.json: LeRobot before 0\.4 saved it")
    refused("nobody/nothing", "There is no folder nobody/nothing, and the model hub does not give 'nobody/nothing'")
