"""
Files and names of RL-token encoders: what ``env.rl_token``, ``--rl_token`` and :func:`load_rl_token` take.

Other packages add names with :func:`register_encoder`, in a module that their entry-point group ``rlt.encoders`` names.
"""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from rlt_gym.core.files import atomic_write, write_json
from rlt_gym.core.registry import Entry, Registry
from rlt_gym.rl_token.base import Encoder, check_encoder, require_tokens
from rlt_gym.rl_token.decoder import RLTokenDecoder
from rlt_gym.rl_token.encoder import FORMAT, RLTokenConfig, RLTokenEncoder
from rlt_gym.rl_token.none import NoToken
from rlt_gym.vla.base import FrozenVLA
from rlt_gym.vla.registry import encoder_folders

ENCODERS = Registry("RL token", group="rlt.encoders")


def register_encoder(name: str, factory: str | Callable[..., Encoder], description: str = "") -> None:
    """
    Let :func:`load_rl_token` know an encoder by name.

    :param name: The name, or a scheme with its colon: ``"hub:"`` answers for every ``"hub:anything"``.
    :param factory: Called as ``factory(vla=vla)``, for a scheme as ``factory("anything", vla=vla)``, with the VLA or
        ``None``; returns an :class:`~rlt_gym.rl_token.base.Encoder`. A callable or ``"module:attribute"``.
    :param description: One line.
    """
    ENCODERS.register(name, Entry(factory, description))


def load_rl_token(
    rl_token: str | os.PathLike[str] | Encoder = "auto",
    vla: FrozenVLA | None = None,
    device: torch.device | str = "cpu",
) -> Encoder:
    """
    Get a frozen RL-token encoder.

    :param rl_token: ``"auto"`` (the shipped weights that belong to ``vla``), ``"mean"`` (no RL token: the mean of the
        VLA's picture tokens), ``"mean-all"`` (of all its tokens), ``"last"`` (its last token), ``"random:auto"`` or
        ``"random:FILE"`` (a token of this form with random weights), ``"none"`` (a single zero, for a VLA without
        tokens), another registered name, a ``.safetensors`` path, or an encoder.
    :param vla: The VLA to use it with; its fingerprint is compared.
    :param device: Device to run on.
    :return: The encoder in evaluation mode, without gradients.
    :raises ValueError: If the name is unknown, or the file missing, damaged, or another VLA's.
    """
    if vla is not None and rl_token != "none" and not isinstance(rl_token, NoToken):
        require_tokens(vla)
    found = ENCODERS.find(rl_token) if isinstance(rl_token, str) else None
    if found is not None:
        entry, arguments = found
        encoder = check_encoder(entry.make(*arguments, vla=vla))
    elif isinstance(rl_token, str) and not Path(rl_token).suffix and not Path(rl_token).exists():
        raise ValueError(
            f"Unknown RL token {rl_token!r}: allowed are {', '.join(map(repr, ENCODERS.names()))}, the path of a "
            ".safetensors file, or an encoder."
        )
    elif isinstance(rl_token, str | os.PathLike):
        encoder = read_rl_token(rl_token, vla)
    else:
        encoder = check_encoder(rl_token)
    if vla is not None:
        encoder.check_vla(vla)
    encoder = encoder.to(device)
    if isinstance(encoder, nn.Module):
        encoder.eval().requires_grad_(False)
    return encoder


def frozen_fingerprint(vla: FrozenVLA, encoder: Encoder) -> dict[str, str]:
    """
    Hash the weights on which observations depend.

    A policy must not be used with other weights than those it was trained with.

    :param vla: The frozen VLA.
    :param encoder: The RL-token encoder.
    :return: The hash of each: ``"vla"`` and ``"rl_token"``.
    """
    return {"vla": vla.fingerprint(), "rl_token": encoder.fingerprint()}


def save_rl_token(
    path: str | os.PathLike[str],
    encoder: RLTokenEncoder,
    decoder: RLTokenDecoder | None = None,
    provenance: dict[str, Any] | None = None,
) -> None:
    """
    Write encoder (and decoder) as float16 safetensors with architecture and VLA fingerprint, and provenance as JSON.

    The JSON also has the fingerprints of the encoder and of its VLA.

    :param path: A name that ends in ``.safetensors``.
    :param encoder: The encoder.
    :param decoder: The decoder, to be kept for further training; ``None`` = do not keep it.
    :param provenance: How it was trained.
    :raises ValueError: If the name ends otherwise.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"RL-token weights must be written to a .safetensors file, not {path}.")
    state = {f"encoder.{key}": value for key, value in encoder.state_dict().items()}
    if decoder is not None:
        state |= {f"decoder.{key}": value for key, value in decoder.state_dict().items()}
    metadata = {
        "format": FORMAT,
        "config": json.dumps(asdict(encoder.config)),
        "vla_fingerprint": encoder.vla_fingerprint,
        "vla_name": encoder.vla_name,
    }
    with atomic_write(path) as temporary:
        save_file({k: v.detach().cpu().half().contiguous() for k, v in state.items()}, temporary, metadata=metadata)
    whose = {"fingerprint": encoder.fingerprint(), "vla_fingerprint": encoder.vla_fingerprint}
    write_json(path.with_suffix(".json"), {**(provenance or {}), **whose})


def read_rl_token(path: str | os.PathLike[str], vla: FrozenVLA | None = None) -> RLTokenEncoder:
    """
    Read a file that :func:`save_rl_token` wrote.

    :param path: The ``.safetensors`` file.
    :param vla: The VLA to use it with.
    :return: The encoder.
    :raises ValueError: If the file is missing, damaged, or belongs to another VLA.
    """
    path = Path(path)
    encoder = _read(path)
    if vla is not None and encoder.vla_fingerprint and encoder.vla_fingerprint != vla.fingerprint():
        try:
            encoder.check_vla(vla)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    encoder.source = path.absolute()
    return encoder


def _read(path: Path) -> RLTokenEncoder:
    return _read_parts(path)[0]


def read_autoencoder(path: str | os.PathLike[str]) -> tuple[RLTokenEncoder, RLTokenDecoder]:
    """
    Read encoder and decoder, to train them further.

    :param path: A ``.safetensors`` file that :func:`save_rl_token` wrote.
    :return: Both.
    :raises ValueError: If the file is missing or damaged, or has no decoder.
    """
    encoder, state = _read_parts(Path(path), decoder=True)
    if not state:
        raise ValueError(f"{path} has no decoder, so its training cannot go on: name another file.")
    decoder = RLTokenDecoder(encoder.config)
    decoder.load_state_dict(state)
    return encoder, decoder


def read_decoder_of(encoder: RLTokenEncoder) -> RLTokenDecoder | None:
    """
    Read the decoder that was trained with an encoder. Nobody's random numbers are used up.

    :param encoder: As :func:`load_rl_token` gave it.
    :return: The decoder; ``None`` = the encoder is from no file, or its file has none.
    :raises ValueError: If the file is gone, or has other weights by now.
    """
    if encoder.source is None:
        return None
    with torch.random.fork_rng(devices=[]):
        stored, state = _read_parts(encoder.source, decoder=True)
        if stored.fingerprint() != encoder.fingerprint():
            raise ValueError(
                f"{encoder.source} no longer has the weights of the RL token that was read from it, so its decoder "
                "does not fit: load the file again."
            )
        if not state:
            return None
        decoder = RLTokenDecoder(stored.config)
    decoder.load_state_dict(state)
    return decoder


def _read_parts(path: Path, decoder: bool = False) -> tuple[RLTokenEncoder, dict[str, torch.Tensor]]:
    """Read the encoder, and the weights of the decoder if they are asked for and the file has them."""
    advice = "train one with `rlt pretrain-token`, or name another file."
    if not path.is_file():
        raise ValueError(f"There are no RL-token weights at {path}; {advice}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            states: dict[str, dict[str, torch.Tensor]] = {"encoder": {}, "decoder": {}}
            for key in file.keys():
                part, _, name = key.partition(".")
                if part in states and (part == "encoder" or decoder):
                    states[part][name] = file.get_tensor(key).float()
        if metadata.get("format") != FORMAT:
            raise KeyError(f"format is {metadata.get('format')!r}, not {FORMAT!r}")
        config = RLTokenConfig(**json.loads(metadata["config"]))
        encoder = RLTokenEncoder(config, metadata["vla_fingerprint"], metadata["vla_name"])
        encoder.load_state_dict(states["encoder"])
    except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError, OSError) as error:
        raise ValueError(f"{path} cannot be read as RL-token weights ({error}); {advice}") from error
    return encoder, states["decoder"]


def shipped_rl_token(vla: FrozenVLA | None) -> RLTokenEncoder:
    """
    Find the RL token that was shipped for a VLA, in the folders that registered VLAs name.

    :param vla: The VLA.
    :return: The encoder.
    :raises ValueError: If there is none for this VLA.
    """
    return read_rl_token(shipped_path(vla), vla)


def shipped_path(vla: FrozenVLA | None) -> Path:
    """
    Find the file of the RL token that was shipped for a VLA.

    :param vla: The VLA.
    :return: The file.
    :raises ValueError: If there is none for this VLA.
    """
    if vla is None:
        raise ValueError("rl_token='auto' needs a VLA to choose the weights for; give vla= or a .safetensors path.")
    known = []
    for path, metadata in _shipped():
        if metadata.get("vla_fingerprint") == vla.fingerprint():
            return path
        known.append(f"{path.name} (for {metadata.get('vla_name')!r})")
    raise ValueError(
        f"No shipped RL token belongs to the VLA {vla.spec.name!r} with fingerprint {vla.fingerprint()[:12]}...; "
        f"shipped are: {', '.join(known) or 'none'}. Train one with `rlt pretrain-token` and give its path."
    )


def _shipped() -> Iterator[tuple[Path, dict[str, str]]]:
    """Find the files of RL tokens that were shipped, with their metadata."""
    for path in (path for folder in encoder_folders() for path in sorted(folder.glob("*.safetensors"))):
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
        except (SafetensorError, OSError):
            continue
        if metadata.get("format") == FORMAT:
            yield path, metadata


register_encoder("auto", shipped_rl_token, "the shipped RL token that belongs to the VLA")
register_encoder("mean", "rlt_gym.rl_token.untrained:mean_token", "no RL token: the mean of the VLA's picture tokens")
register_encoder("mean-all", "rlt_gym.rl_token.untrained:mean_of_all", "no RL token: the mean of all tokens of the VLA")
register_encoder("last", "rlt_gym.rl_token.untrained:last_token", "no RL token: the last token of the VLA")
register_encoder(
    "random:",
    "rlt_gym.rl_token.untrained:random_token",
    "random:auto or random:FILE, this RL token with random weights",
)
register_encoder("none", "rlt_gym.rl_token.none:no_token", "no RL token: one zero, for a VLA that gives no tokens")
