"""
What surrounds a policy: pictures as its dataset has them, and the checkpoint's own pre- and post-processor.

These normalize, make tokens of instructions, and give actions in the robot's units.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.nn.functional import interpolate

from rlt_gym.vla.base import REVERSED
from rlt_gym.vla.lerobot.checkpoint import POST, PRE, find_backbone, short

#: A camera whose levels, 0 to 1, spread less than this was not measured rightly: LeRobot 0.4 squares pictures of bytes.
SMALLEST_STD = 0.02


def see_picture(frame: torch.Tensor, orientation: str, size: int) -> torch.Tensor:
    """
    Turn a picture, pool it to the size of the dataset, round to whole levels as the dataset's pictures are.

    :param frame: uint8 (B, S, S, 3) as the environment gives it, S >= ``size``.
    :param orientation: A name of :data:`~rlt_gym.vla.base.REVERSED`.
    :param size: Edge of the dataset's pictures.
    :return: (B, 3, size, size) in [0, 1].
    """
    # LeRobot's own layout: another one has the same numbers, but convolutions round differently
    picture = frame.flip(REVERSED[orientation]).permute(0, 3, 1, 2).contiguous().float()
    if frame.shape[1] != size:
        picture = interpolate(picture, (size, size), mode="area").round()
    return picture / 255.0


def precision(config: Any, dtype: str | None, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """
    Calculate as LeRobot's evaluation does: in mixed precision if the checkpoint says it, or if the caller does.

    :param config: The policy's configuration.
    :param dtype: What the caller says, a name of :data:`~rlt_gym.vla.lerobot.checkpoint.DTYPES`; ``None`` = nothing.
    :param device: Where the policy is.
    :return: The precision, in which to run the policy.
    """
    in_policy = isinstance(getattr(config, "dtype", None), str)
    if dtype is None and config.use_amp:
        return torch.autocast(device.type)
    if dtype in (None, "float32") or in_policy:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, dtype))


def check_gradients(config: Any, dtype: str | None) -> None:
    """
    Refuse a precision in which a policy does not learn well.

    :param config: The policy's configuration.
    :param dtype: What the caller says, see :func:`precision`.
    :raises ValueError: If it is half precision.
    """
    if dtype == "float16" or (dtype is None and config.use_amp):
        given = "use_amp of the checkpoint" if dtype is None else f"dtype {dtype!r}"
        raise ValueError(
            f"{given} may make small gradients zero: a policy that learns calculates in float32 or bfloat16; set "
            "vla_kwargs {dtype: float32}."
        )


def load_processors(
    folder: Path, config: Any, backbone: str | None = None, trust_image_stats: bool = False
) -> tuple[Any, Any]:
    """
    Load what comes before and after the policy.

    :param folder: The checkpoint.
    :param config: The policy's configuration, which names the device.
    :param backbone: Folder or hub name of the tokenizer; ``None`` = what the checkpoint names.
    :param trust_image_stats: Accept statistics of pictures that cannot be right.
    :return: LeRobot's pipelines: observation -> batch, actions -> actions in the robot's units, all on the device.
    :raises ValueError: If files or statistics are missing, or statistics of pictures are wrong.
    """
    from lerobot.policies.factory import make_pre_post_processors

    missing = [name for name in (PRE, POST) if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"{folder} has no {' and no '.join(missing)}: LeRobot before 0.4 saved it; convert it with "
            "`python -m lerobot.processor.migrate_policy_normalization`."
        )
    before, after = (_overrides(folder / name, config) for name in (PRE, POST))
    tokenizer = before.get("tokenizer_processor")
    if tokenizer is not None:
        tokenizer["tokenizer_name"] = find_backbone(folder, tokenizer["tokenizer_name"], backbone)
    try:
        pre, post = make_pre_post_processors(
            config, str(folder), preprocessor_overrides=before, postprocessor_overrides=after
        )
    except (OSError, KeyError, TypeError, ValueError, ImportError, SafetensorError) as error:
        found = "" if tokenizer is None else f" with the tokenizer {tokenizer['tokenizer_name']!r}"
        raise ValueError(
            f"The processors in {folder} cannot be loaded{found} ({short(error)}); a tokenizer that is elsewhere is "
            "named with vla_kwargs {backbone: FOLDER}."
        ) from error
    _check_statistics(folder, config, pre, post, trust_image_stats)
    return pre, post


def reads_language(pre: Any) -> bool:
    """
    Find out whether the instruction becomes part of the batch.

    :param pre: The pre-processor.
    :return: Whether one of its steps makes tokens of it.
    """
    return any("tokeniz" in type(step).__name__.lower() for step in pre.steps)


def _overrides(path: Path, config: Any) -> dict[str, dict[str, Any]]:
    """Everything on the policy's device; the tokenizer as the file names it."""
    overrides: dict[str, dict[str, Any]] = {}
    for step in json.loads(path.read_text(encoding="utf-8"))["steps"]:
        name = step.get("registry_name")
        if name == "device_processor":
            overrides[name] = {"device": config.device}
        elif name == "tokenizer_processor":
            overrides[name] = {"tokenizer_name": step["config"].get("tokenizer_name")}
    return overrides


def _check_statistics(folder: Path, config: Any, pre: Any, post: Any, trust_image_stats: bool) -> None:
    """
    Refuse what LeRobot passes over in silence.

    A feature without statistics is handed through as it is, so the robot would get normalized actions.
    """
    names = set(config.input_features) | set(config.output_features)
    absent, wrong = set(), {}
    for step in (*pre.steps, *post.steps):
        statistics = getattr(step, "_tensor_stats", None)
        if statistics is None:
            continue
        for key, feature in step.features.items():
            mode = step.norm_map.get(feature.type)
            if mode is None or mode.value == "IDENTITY" or key not in names or "empty_camera" in key:
                continue
            if not statistics.get(key):
                absent.add(key)
            elif feature.type.value == "VISUAL" and mode.value == "MEAN_STD":
                std = float(statistics[key]["std"].min())
                if std < SMALLEST_STD:
                    wrong[key] = std
    if absent:
        raise ValueError(
            f"{folder} has no statistics of {', '.join(sorted(absent))}, so nothing would be normalized: was it "
            "trained?"
        )
    if wrong and not trust_image_stats:
        found = ", ".join(f"{std:.2g} of {key}" for key, std in sorted(wrong.items()))
        raise ValueError(
            f"{folder} was trained with a standard deviation of the pictures of {found}, which LeRobot 0.4 computes "
            "wrongly: train it with --dataset.use_imagenet_stats=true, or accept it with vla_kwargs "
            "{trust_image_stats: true}."
        )
