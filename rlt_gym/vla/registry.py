"""
Names of frozen VLAs: what ``env.vla``, ``--vla`` and :func:`load_vla` take. Nothing here imports PyTorch to list them.

A package that brings a VLA calls :func:`register_vla` in a module and names this module in its entry points::

    [project.entry-points."rlt.vlas"]
    my_vla = "my_package.rlt_registration"
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from safetensors import SafetensorError, safe_open

from rlt_gym.core.imports import resolve_class
from rlt_gym.core.registry import Entry, Registry
from rlt_gym.vla.base import FrozenVLA, require_vla

if TYPE_CHECKING:
    import torch

F = TypeVar("F", bound=Callable[..., Any])

#: Modules of this package that register VLAs on import. They are named, not imported: an adapter knows this module.
MODULES = ("rlt_gym.vla.mini", "rlt_gym.vla.remote", "rlt_gym.vla.lerobot")
#: Entry-point group in which other packages name the modules that register theirs.
GROUP = "rlt.vlas"

VLAS = Registry("VLA", MODULES, GROUP)
FORMATS = Registry("VLA file format", MODULES[:1], GROUP)
_ENCODER_FOLDERS: dict[Path, None] = {}


@overload
def register_vla(
    name: str,
    factory: str | Callable[..., Any],
    description: str | Callable[[], str] = "",
    *,
    kwargs: Mapping[str, Any] | None = None,
    encoders: str | os.PathLike[str] | None = None,
    install: str = "",
) -> None: ...


@overload
def register_vla(
    name: str,
    *,
    description: str | Callable[[], str] = "",
    kwargs: Mapping[str, Any] | None = None,
    encoders: str | os.PathLike[str] | None = None,
    install: str = "",
) -> Callable[[F], F]: ...


def register_vla(
    name: str,
    factory: str | Callable[..., Any] | None = None,
    description: str | Callable[[], str] = "",
    *,
    kwargs: Mapping[str, Any] | None = None,
    encoders: str | os.PathLike[str] | None = None,
    install: str = "",
) -> Callable[[F], F] | None:
    """
    Let :func:`load_vla` know a VLA by name; without ``factory`` this is a decorator of the factory.

    :param name: The name, or a scheme with its colon: ``"hub:"`` answers for every ``"hub:anything"``.
    :param factory: Called as ``factory(device=device, **vla_kwargs)``, for a scheme as ``factory("anything",
        device=device, **vla_kwargs)``; gives a FrozenVLA on that device. A callable (the class will do), or
        ``"module:attribute"``, imported when the VLA is loaded.
    :param description: One line for ``rlt list``, or a function that returns it.
    :param kwargs: Further arguments of the factory, which ``vla_kwargs`` cannot change.
    :param encoders: Folder with RL tokens that belong to this VLA, for ``rl_token="auto"``.
    :param install: What ``pip install`` takes to get the packages that the factory imports, e.g. ``"rlt[lerobot]"``.
        The error names it if one of them is missing.
    :return: The decorator, or ``None`` if a factory was given.
    :raises ValueError: If the name is empty or has a colon before its end.
    """

    def register(factory: Any) -> Any:
        """
        Register ``factory``.

        :param factory: The factory.
        :return: The same.
        """
        VLAS.register(name, Entry(factory, description, dict(kwargs or {}), install))
        if encoders is not None:
            _ENCODER_FOLDERS[Path(encoders)] = None
        return factory

    if factory is None:
        return register
    register(factory)
    return None


def register_vla_format(format: str, reader: str | Callable[..., Any]) -> None:
    """
    Let :func:`load_vla` know which class reads a kind of ``.safetensors`` file.

    :param format: The entry ``format`` of the file's metadata.
    :param reader: Called as ``reader(path, device=device, **vla_kwargs)``; returns a FrozenVLA. A callable or
        ``"module:attribute"``.
    """
    FORMATS.register(format, Entry(reader))


def list_vlas() -> dict[str, str]:
    """
    List the registered VLAs.

    :return: Every name that :func:`load_vla` knows, with its description; schemes end in a colon.
    """
    return VLAS.names()


def encoder_folders() -> list[Path]:
    """
    List the folders in which ``rl_token="auto"`` looks.

    :return: Folders with RL tokens that registered VLAs brought along.
    """
    VLAS.load_modules()
    return list(_ENCODER_FOLDERS)


def load_vla(
    vla: str | os.PathLike[str] | FrozenVLA = "mini",
    device: torch.device | str = "cpu",
    vla_kwargs: Mapping[str, Any] | None = None,
) -> FrozenVLA:
    """
    Get a frozen VLA.

    :param vla: A registered name or scheme (:func:`list_vlas`), the path of a ``.safetensors`` file that ``rlt
        train-vla`` wrote or that has a format of :func:`register_vla_format`, ``"package.module:Class"`` of a package
        that :mod:`rlt_gym.core.imports` allows, or an object that obeys :class:`~rlt_gym.vla.base.FrozenVLA`.
    :param device: Device to run on. Who makes the VLA is told, so that the weights go there at once.
    :param vla_kwargs: Further arguments of who makes it: the registered factory, the file's reader, the class.
    :return: The VLA on ``device``. An object that is already there is returned unchanged; its ``to`` is not called.
    :raises ValueError: If the name is unknown or not allowed, a package is missing, the file missing or damaged, an
        argument wrong, or the object not a FrozenVLA.
    """
    kwargs = dict(vla_kwargs or {})
    if not isinstance(vla, str | os.PathLike):
        if kwargs:
            raise ValueError(f"vla_kwargs are for a VLA that is named; this one is a {type(vla).__name__} already.")
        return _on(require_vla(vla), device)
    name = os.fspath(vla)
    found = VLAS.find(name) if isinstance(vla, str) else None
    if found is None:
        found = _file(name) if Path(name).suffix == ".safetensors" else _class(name)
    entry, arguments = found
    return _on(require_vla(_make(entry, name, arguments, device, kwargs)), device)


def _make(
    entry: Entry, name: str, arguments: tuple[Any, ...], device: torch.device | str, kwargs: dict[str, Any]
) -> Any:
    """Call the factory; what is missing or does not fit is one line."""
    fixed = sorted({"device", *entry.kwargs} & set(kwargs))
    if fixed:
        raise ValueError(f"vla_kwargs may not have {', '.join(fixed)}: the VLA {name!r} is made with it already.")
    try:
        try:
            factory = entry.load()
        except AttributeError as error:
            raise ValueError(f"The VLA {name!r} is registered as {entry.factory!r}: {error}.") from error
        _check_arguments(factory, name, arguments, {**entry.kwargs, "device": device}, kwargs)
        return factory(*arguments, **entry.kwargs, device=device, **kwargs)
    except ImportError as error:
        advice = f"pip install '{entry.install}'" if entry.install else "install it"
        raise ValueError(f"The VLA {name!r} needs a package that is not there ({error}): {advice}.") from error


def _check_arguments(
    factory: Callable[..., Any], name: str, arguments: tuple[Any, ...], fixed: dict[str, Any], kwargs: dict[str, Any]
) -> None:
    try:
        signature = inspect.signature(factory)
    except ValueError:  # some built-in classes have none
        return
    try:
        signature.bind(*arguments, **fixed, **kwargs)
    except TypeError as error:
        free = [key for key in list(signature.parameters)[len(arguments) :] if key not in fixed]
        raise ValueError(
            f"The VLA {name!r} cannot be made with vla_kwargs {kwargs}: {error} (allowed: {', '.join(free) or 'none'})."
        ) from error


def _file(name: str) -> tuple[Entry, tuple[Any, ...]]:
    return _reader(Path(name)), (Path(name),)


def _class(name: str) -> tuple[Entry, tuple[Any, ...]]:
    """Look up the class that ``"package.module:Class"`` names; anything else is unknown."""
    names = list_vlas()
    if re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", name):
        try:
            return Entry(resolve_class(name, "vla")), ()
        except ValueError as error:
            raise ValueError(f"Unknown VLA {name!r}: {_schemes(names)}, and as a class: {error}") from error
    if ":" in name:
        raise ValueError(f"Unknown VLA {name!r}: {_schemes(names)}. A class is 'package.module:Class'.")
    raise ValueError(
        f"Unknown VLA {name!r}: allowed are {', '.join(map(repr, names))}, names given to register_vla, "
        "'package.module:Class', the path of a .safetensors file that `rlt train-vla` wrote, or, in Python, a "
        "FrozenVLA object."
    )


def _schemes(names: Iterable[str]) -> str:
    known = ", ".join(repr(name) for name in names if name.endswith(":"))
    return f"no such scheme is registered (schemes: {known or 'none; a package that brings one must be installed'})"


def _reader(path: Path) -> Entry:
    """Find what reads the file, by the format in its metadata."""
    advice = "train one with `rlt train-vla`, or name another file."
    if not path.is_file():
        raise ValueError(f"There are no VLA weights at {path}; {advice}")
    try:
        with safe_open(path, framework="numpy") as file:
            format = (file.metadata() or {}).get("format")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read as VLA weights ({error}); {advice}") from error
    found = FORMATS.find(format) if format else None
    if found is None:
        known = ", ".join(map(repr, FORMATS.names()))
        raise ValueError(f"{path} cannot be read as VLA weights (format is {format!r}, known are {known}); {advice}")
    return found[0]


def _on(vla: FrozenVLA, device: torch.device | str) -> FrozenVLA:
    """Move a VLA unless it is on ``device``: some models cannot move, and copying billions of weights takes long."""
    import torch

    here, there = torch.device(vla.device), torch.device(device)
    if here != there and here.type == there.type:  # "cuda" is the current one of cuda:0, cuda:1, ...
        here, there = (torch.empty(0, device=place).device for place in (here, there))
    return vla if here == there else vla.to(device)
