"""Strict loading of what transformers and projects that build on it save: models, processors, statistics."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from rlt_gym.vla.normalization import Normalization


def load_pretrained(
    model_class: str, path: str | os.PathLike[str], device: torch.device | str = "cpu", dtype: str = "bfloat16"
) -> Any:
    """
    Load a model of transformers strictly, straight onto its device.

    ``from_pretrained`` itself fills missing tensors with random numbers and goes on.

    :param model_class: Name of a class of transformers, e.g. ``"Qwen2_5_VLForConditionalGeneration"``.
    :param path: A folder that ``save_pretrained`` wrote, or a name of the hub.
    :param device: Device to run on.
    :param dtype: Type of the weights, a name of torch's.
    :return: The model in evaluation mode.
    :raises ValueError: If the extra is missing, the class does not import, there is no such model, or a tensor is
        missing, surplus, or of another shape.
    """
    loader = hf_class(model_class)
    place = {} if torch.device(device).type == "cpu" else {"device_map": device}  # needs accelerate
    try:
        model, report = loader.from_pretrained(
            path, dtype=getattr(torch, dtype), output_loading_info=True, ignore_mismatched_sizes=True, **place
        )
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} has no weights of {model_class}: {_first_line(error)}") from error
    problems = []
    for what, key in (
        ("missing", "missing_keys"),
        ("surplus", "unexpected_keys"),
        ("of another shape", "mismatched_keys"),
    ):
        found = report.get(key) or ()  # those of another shape come with both shapes
        names = sorted(name if isinstance(name, str) else str(name[0]) for name in found)
        if names:
            problems.append(f"{what}: {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if names[3:] else ""))
    if problems:
        raise ValueError(f"{path} does not fit {model_class}: its tensors are {'; '.join(problems)}.")
    return model.eval()


def load_processor(path: str | os.PathLike[str]) -> Any:
    """
    Load the processor of a vision-language model.

    :param path: A folder that ``save_pretrained`` wrote, or a name of the hub.
    :return: The processor, which pads at the left.
    :raises ValueError: If the extra is missing, or there is no such processor.
    """
    try:
        processor = hf_class("AutoProcessor").from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} has no processor: {_first_line(error)}") from error
    processor.tokenizer.padding_side = "left"
    return processor


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def hf_class(name: str) -> Any:
    """
    Import a class of transformers.

    :param name: Its name.
    :return: The class.
    :raises ValueError: If it cannot be imported; says what to install.
    """
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"A VLA of transformers needs the extra: pip install 'rlt[hf]' ({error}).") from error
    try:
        return getattr(transformers, name)
    except (ImportError, AttributeError, RuntimeError) as error:
        reason = f"transformers {transformers.__version__} has no {name} that can be imported"
        try:
            import torchvision  # noqa: F401
        except (ImportError, RuntimeError) as other:
            raise ValueError(
                f"{reason}: torchvision does not fit torch {torch.__version__} ({_first_line(other)}): "
                "install the torchvision of this torch."
            ) from error
        raise ValueError(f"{reason} ({_first_line(error)}): install another version.") from error


def read_statistics(path: str | os.PathLike[str], key: str | None = None, epsilon: float = 0.0) -> Normalization:
    """
    Read the quantiles of the actions from OpenVLA's and Qwen-OFT's ``dataset_statistics.json``.

    :param path: The file: ``{key: {"action": {"q01": [...], "q99": [...], "mask": [...]}}}``.
    :param key: The data set (``unnorm_key``); ``None`` = the only one.
    :param epsilon: What the checkpoint's code adds to ``q99 - q01`` (OpenVLA-OFT: 1e-8).
    :return: The normalization.
    :raises ValueError: If there are several data sets, not this one, or the file has another form.
    """
    try:
        sets = json.loads(Path(path).read_text())
        names = sorted(sets)
        if key is None and len(names) == 1:
            (key,) = names
        if key not in names:
            raise ValueError(f"{path} has statistics of {', '.join(names)}; unnorm_key must be one, got {key!r}.")
        action = sets[key]["action"]
        return Normalization.quantiles(action["q01"], action["q99"], action.get("mask") or (), epsilon)
    except (OSError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} has no statistics of actions (q01, q99): {type(error).__name__} {error}.") from error
