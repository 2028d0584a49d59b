"""
Make a checkpoint of ``lerobot-train`` small and movable.

    python examples/lerobot/pack.py runs/lerobot/smolvla/checkpoints/000200/pretrained_model examples/lerobot/smolvla

The weights are stored in half precision (they are used in single precision again). A backbone folder that the
checkpoint names by its path is copied into it, under its last name. ``provenance.json`` says how it was trained.
"""

import argparse
import json
import shutil
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rlt_gym.core.files import write_json

PROCESSORS = ("policy_preprocessor*", "policy_postprocessor*")


def pack(checkpoint: Path, out: Path, facts: dict[str, str]) -> None:
    """
    Write the packed checkpoint.

    :param checkpoint: folder ``pretrained_model``
    :param out: folder to write; files of that name in it are replaced
    :param facts: what else ``provenance.json`` says
    """
    out.mkdir(parents=True, exist_ok=True)
    weights = load_file(checkpoint / "model.safetensors")
    half = {name: value.half() if value.is_floating_point() else value for name, value in weights.items()}
    save_file({name: value.contiguous() for name, value in half.items()}, out / "model.safetensors")
    for pattern in PROCESSORS:
        for path in checkpoint.glob(pattern):
            shutil.copyfile(path, out / path.name)
    config = json.loads((checkpoint / "config.json").read_text())
    backbone = config.get("vlm_model_name")
    if backbone is not None and Path(backbone).is_dir():
        # the processors name it a second time, as their tokenizer; "lerobot:FOLDER" finds it inside the checkpoint
        shutil.copytree(backbone, out / Path(backbone).name, dirs_exist_ok=True)
        text = (out / "policy_preprocessor.json").read_text()
        (out / "policy_preprocessor.json").write_text(text.replace(f'"{backbone}"', f'"{Path(backbone).name}"'))
        config["vlm_model_name"] = Path(backbone).name
    write_json(out / "config.json", config)
    train = json.loads((checkpoint / "train_config.json").read_text())
    dataset = Path(train["dataset"]["root"])
    made = dataset / "meta" / "rlt.json"
    provenance = {
        "lerobot": version("lerobot"),
        "torch": torch.__version__,
        "step": int(checkpoint.resolve().parent.name),
        "batch_size": train["batch_size"],
        "seed": train["seed"],
        "optimizer": train["optimizer"],
        "scheduler": train["scheduler"],
        "demonstrations": json.loads(made.read_text()) if made.is_file() else str(dataset),
        **facts,
    }
    write_json(out / "provenance.json", provenance)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--fact", nargs=2, action="append", default=[], metavar=("NAME", "TEXT"))
    args = parser.parse_args()
    pack(args.checkpoint, args.out, dict(args.fact))
