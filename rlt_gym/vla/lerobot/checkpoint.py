"""What LeRobot's trainer saves (``pretrained_model``): where it is, its configuration, its policy with its weights."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rlt_gym.core.files import atomic_folder, atomic_write, write_json
from rlt_gym.vla.weights import load_weights

WEIGHTS, CONFIG = "model.safetensors", "config.json"
PRE, POST = "policy_preprocessor.json", "policy_postprocessor.json"
#: Types in which a policy can calculate.
DTYPES = ("float32", "bfloat16", "float16")
#: Files of a backbone, any of which makes a folder one.
_BACKBONE_FILES = ("tokenizer_config.json", "tokenizer.json", "preprocessor_config.json")


def find_checkpoint(name: str, revision: str | None = None) -> Path:
    """
    Find a checkpoint, or fetch it from the model hub.

    :param name: A folder, the output folder of ``lerobot-train`` among them, or ``owner/name`` of the hub.
    :param revision: Branch, tag or commit of the hub; ``None`` = the newest.
    :return: The folder that has ``config.json`` and ``model.safetensors``.
    :raises ValueError: If there is none.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        for folder in (path, path / "pretrained_model", path / "checkpoints" / "last" / "pretrained_model"):
            if (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file():
                return folder
        raise ValueError(
            f"{path} is no checkpoint of LeRobot: it has no {CONFIG} with {WEIGHTS}; name the folder "
            "pretrained_model that lerobot-train wrote (adapters of PEFT must be merged first)."
        )
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise ValueError(f"There is no folder {path}, and a policy of the model hub is called owner/name.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        found = snapshot_download(name, revision=revision)
    except (OSError, RuntimeError, ValueError, HfHubHTTPError) as error:  # offline, not found, not allowed, no name
        raise ValueError(
            f"There is no folder {path}, and the model hub does not give {name!r} ({short(error)})."
        ) from error
    return find_checkpoint(str(found))


def made_from(folder: Path) -> dict[str, Any]:
    """
    Read how the demonstrations were recorded, if the checkpoint has a ``provenance.json``.

    :param folder: The checkpoint.
    :return: Settings of ``rlt collect``, ``render`` and ``assets`` among them; empty if nobody wrote them down.
    :raises ValueError: If the file is damaged.
    """
    path = folder / "provenance.json"
    if not path.is_file():
        return {}
    try:
        made = json.loads(path.read_text())["demonstrations"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} does not say how the demonstrations were made ({short(error)}): remove it."
        ) from error
    return made if isinstance(made, dict) else {}


def read_config(
    folder: Path, device: torch.device, dtype: str | None = None, settings: Mapping[str, Any] | None = None
) -> Any:
    """
    Read the policy's configuration, for use on a device.

    :param folder: The checkpoint.
    :param device: Where the policy will run.
    :param dtype: A name of :data:`DTYPES`, for the policies that have one in their configuration (PI0, PI05).
    :param settings: Other values for entries of the configuration, e.g. ``{"num_inference_steps": 10}``.
    :return: LeRobot's ``PreTrainedConfig``.
    :raises ValueError: If this version of LeRobot cannot read it, or an argument does not fit.
    """
    from draccus.utils import DraccusException
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies import factory  # noqa: F401  (registers the types of policies)
    from lerobot.utils.import_utils import register_third_party_plugins

    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype may be {', '.join(DTYPES)}, got {dtype!r}.")
    register_third_party_plugins()
    try:
        config = PreTrainedConfig.from_pretrained(str(folder), local_files_only=True)
    except (DraccusException, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"LeRobot {_version()} cannot read {folder / CONFIG} ({short(error)}).") from error
    if config.use_peft:
        raise ValueError(f"{folder} is an adapter of PEFT: merge it into its policy and save that first.")
    unknown = sorted(key for key in settings or {} if not hasattr(config, key))
    if unknown:
        raise ValueError(f"config names {', '.join(unknown)}, which a {config.type} policy of LeRobot does not have.")
    for key, value in (settings or {}).items():
        setattr(config, key, value)
    config.device = str(device)
    for name in ("compile_model", "gradient_checkpointing"):  # neither lets tokens be read
        if hasattr(config, name):
            setattr(config, name, False)
    if dtype is not None and isinstance(getattr(config, "dtype", None), str):
        if dtype == "float16":
            raise ValueError(f"A {config.type} policy calculates in float32 or bfloat16, got {dtype!r}.")
        config.dtype = dtype
    return config


def find_backbone(folder: Path, named: str | None, given: str | None = None) -> str | None:
    """
    Find the language model or tokenizer that a checkpoint names but does not contain.

    A trained checkpoint stores the name as it was given, often the path of a folder of the trainer's machine. Where
    this is no folder, one inside the checkpoint is taken, first one of the same name.

    :param folder: The checkpoint.
    :param named: What the checkpoint names.
    :param given: What the caller names instead.
    :return: A folder, or a name of the model hub; ``None`` if nothing is named.
    :raises ValueError: If it is a folder that is not there.
    """
    if given is not None:
        path = Path(given).expanduser()
        return str(path) if path.is_dir() else given
    if named is None or Path(named).is_dir():
        return named
    inside = _backbones(folder)
    same = [path for path in inside if path.name == Path(named).name]
    if same or len(inside) == 1:
        return str((same or inside)[0])
    if Path(named).is_absolute() or named.startswith((".", "~")):
        raise ValueError(
            f"{folder} was trained with the language model in {named}, which is not there: put it into the checkpoint, "
            "or name it with vla_kwargs {backbone: FOLDER}."
        )
    return named


def _backbones(folder: Path) -> list[Path]:
    """Find the backbones inside a checkpoint."""
    return [path for path in sorted(folder.iterdir()) if any((path / file).is_file() for file in _BACKBONE_FILES)]


def load_policy(folder: Path, config: Any, dtype: str | None = None) -> tuple[Any, frozenset[str]]:
    """
    Build the policy on its device, and load all its weights.

    LeRobot's own ``from_pretrained`` loads leniently unless it is told otherwise, and that of PI0 and PI05 returns
    random weights when loading fails. Here every tensor of the policy comes from the file, and the file has no other.

    :param folder: The checkpoint.
    :param config: Of :func:`read_config`.
    :param dtype: ``"float32"`` keeps the language model of SmolVLA in single precision, which is in half precision if
        it was before training.
    :return: LeRobot's ``PreTrainedPolicy``, frozen, and the names of the parameters that LeRobot's trainer trains.
    :raises ValueError: If the backbone is missing, or the weights are not the policy's.
    """
    half = getattr(config, "load_vlm_weights", False) and dtype is None
    try:
        policy = build_policy(config)
    except OSError as error:
        raise ValueError(
            f"The {config.type} policy in {folder} cannot be built ({short(error)}): if its language model is missing, "
            "put it into the checkpoint or name it with vla_kwargs {backbone: FOLDER}."
        ) from error
    if half:
        policy.model.vlm_with_expert.vlm.to(torch.bfloat16)
    trained = frozenset(name for name, parameter in policy.named_parameters() if parameter.requires_grad)
    policy = policy.eval().requires_grad_(False)
    try:
        with safe_open(folder / WEIGHTS, framework="numpy") as file:
            names = _names(policy, list(file.keys()))
        load_weights(policy, folder / WEIGHTS, names)
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{folder / WEIGHTS} cannot be read as a {config.type} policy: {short(error)}") from error
    return policy, trained


def save_checkpoint(folder: Path, origin: Path, policy: Any, provenance: Mapping[str, Any]) -> None:
    """
    Write a checkpoint that differs from another one in its weights only.

    :param folder: Where to, a folder that is not there yet.
    :param origin: The other checkpoint. Of its files go with it: configuration, processors, and a backbone inside.
    :param policy: Has the weights.
    :param provenance: How they were trained; ``provenance.json`` also keeps how the demonstrations of the other one
        were recorded, see :func:`made_from`.
    """
    from safetensors.torch import save_model

    with atomic_folder(folder) as written:
        for name in plain_files(origin):
            shutil.copyfile(origin / name, written / name)
        for path in _backbones(origin):
            shutil.copytree(path, written / path.name)
        with atomic_write(written / WEIGHTS) as temporary:
            save_model(policy, str(temporary))
        write_json(written / "provenance.json", {"demonstrations": made_from(origin), **provenance})


def plain_files(folder: Path) -> list[str]:
    """
    Name the files of a checkpoint but for its weights.

    :param folder: The checkpoint.
    :return: Its configuration and what its processors need, without backbone and tokenizer.
    """
    steps = [step for name in (PRE, POST) for step in json.loads((folder / name).read_text(encoding="utf-8"))["steps"]]
    return [CONFIG, PRE, POST, *(step["state_file"] for step in steps if step.get("state_file"))]


def build_policy(config: Any) -> Any:
    """
    Build a policy whose weights come later.

    :param config: Of :func:`read_config`; it is changed, so that nothing is fetched.
    :return: LeRobot's ``PreTrainedPolicy`` with random weights, on its device.
    """
    from lerobot.policies.factory import get_policy_class

    if hasattr(config, "load_vlm_weights"):
        config.load_vlm_weights = False  # they are in the checkpoint
    if hasattr(config, "pretrained_backbone_weights"):
        config.pretrained_backbone_weights = None  # likewise
    with contextlib.redirect_stdout(sys.stderr), torch.device(config.device):
        policy = get_policy_class(config.type)(config)
    return policy.to(config.device)


class _Name(str):
    """The name of a tensor, in the place of the tensor."""

    def clone(self) -> _Name:
        """Return itself, as a tensor would return its copy."""
        return self


def _names(policy: Any, file: Iterable[str]) -> dict[str, str]:
    """
    Match the policy's tensors with those of the file: name in the policy -> name in the file.

    PI0 and PI05 rename what was ported from openpi. A tensor that is used in two places is stored once.
    """
    own = policy.state_dict()
    names = {name: name for name in file}
    rename = getattr(policy, "_fix_pytorch_state_dict_keys", None)
    if rename is not None:
        renamed = rename({name: _Name(name) for name in file}, policy.config)
        names = {name if name.startswith("model.") else f"model.{name}": str(old) for name, old in renamed.items()}
        names |= {name: name for name in set(file) - set(names.values())}
    places = {value.data_ptr(): names[name] for name, value in own.items() if name in names and value.numel()}
    for name, value in own.items():
        if name not in names and value.data_ptr() in places:
            names[name] = places[value.data_ptr()]
    return names


def _version() -> str:
    from importlib.metadata import version

    return version("lerobot")


def short(error: BaseException) -> str:
    """
    Shorten a message of several lines.

    :param error: The error.
    :return: Its message in one line.
    """
    text = " ".join(str(error).split())
    return text if len(text) < 200 else f"{text[:200]}..."
