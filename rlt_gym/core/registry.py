"""Names that settings take for objects which users may bring: ``"name"`` or ``"scheme:rest"`` -> a factory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any


@dataclass(frozen=True)
class Entry:
    """
    One registered name.

    :param factory: Makes the object: a callable, or ``"module:attribute"``, which is imported when it is called.
    :param description: One line for listings, or a function that returns it.
    :param kwargs: Arguments that every call of the factory gets.
    """

    factory: str | Callable[..., Any]
    description: str | Callable[[], str] = ""
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def make(self, *args: Any, **kwargs: Any) -> Any:
        """
        Call the factory.

        :param args: Positional arguments.
        :param kwargs: Keyword arguments beside :attr:`kwargs`.
        :return: What it returns.
        """
        factory = resolve_name(self.factory) if isinstance(self.factory, str) else self.factory
        return factory(*args, **{**self.kwargs, **kwargs})


class Registry:
    """
    Names and schemes with their factories.

    Names come from three places: modules of this package (``modules``), calls of :meth:`register`, and other installed
    packages. Such a package names, in the entry-point group ``group``, a module that registers its names on import. It
    is imported only when a name is unknown or all names are listed.

    :param kind: What the names stand for, for messages, e.g. ``"VLA"``.
    :param modules: Modules that register names on import; imported when the registry is first used.
    :param group: Entry-point group, ``None`` = other packages cannot add names without being imported.
    """

    def __init__(self, kind: str, modules: Sequence[str] = (), group: str | None = None) -> None:
        self.kind, self.group = kind, group
        self._entries: dict[str, Entry] = {}
        self._modules: Sequence[str] = tuple(modules)
        self._plugins_loaded = group is None

    def register(self, name: str, entry: Entry) -> None:
        """
        Add a name; a name that is registered again stands for the later entry, with a warning.

        :param name: The name, or a scheme with its colon (``"hub:"``), which answers for all ``"hub:anything"``.
        :param entry: What it stands for.
        :raises ValueError: If the name is empty, or a colon is not at its end.
        """
        if not name.strip(":") or ":" in name[:-1]:
            raise ValueError(f"{self.kind} name {name!r}: it must be a word, or a scheme that ends in its only colon.")
        self.load_modules()  # first, so that what comes with the package cannot replace what a user registers
        if name in self._entries:
            warnings.warn(f"The {self.kind} {name!r} is registered again; the later entry is used.", stacklevel=3)
        self._entries[name] = entry

    def remove(self, name: str) -> None:
        """
        Remove an entry.

        :param name: A registered name.
        :raises KeyError: If there is none.
        """
        del self._entries[name]

    def find(self, text: str) -> tuple[Entry, tuple[str, ...]] | None:
        """
        Look a setting up.

        :param text: ``"name"`` or ``"scheme:rest"``.
        :return: The entry and the positional arguments of its factory: ``()`` for a name, ``(rest,)`` for a scheme.
            ``None`` if nothing is registered.
        """
        scheme, colon, rest = text.partition(":")
        name, arguments = (scheme + colon, (rest,)) if colon else (text, ())
        self.load_modules()
        if name not in self._entries:
            self._load_plugins()
        return (self._entries[name], arguments) if name in self._entries else None

    def names(self) -> dict[str, str]:
        """
        List what can be named.

        :return: Every name with its description, in the order of registration.
        """
        self.load_modules()
        self._load_plugins()
        return {
            name: entry.description if isinstance(entry.description, str) else entry.description()
            for name, entry in self._entries.items()
        }

    def load_modules(self) -> None:
        """Import the modules of this package that register names."""
        modules, self._modules = self._modules, ()  # emptied first: these modules call register()
        for module in modules:
            import_module(module)

    def _load_plugins(self) -> None:
        if self._plugins_loaded:
            return
        self._plugins_loaded = True
        for point in entry_points(group=str(self.group)):
            try:
                point.load()
            except Exception as error:  # somebody else's package must not keep ours from working
                warnings.warn(
                    f"The entry point {point.name} = {point.value!r} of the group {self.group!r} cannot be loaded "
                    f"({type(error).__name__}: {error}); each {self.kind} that it registers is missing.",
                    stacklevel=4,
                )
