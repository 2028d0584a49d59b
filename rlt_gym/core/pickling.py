"""Environments that are pickled and copied by the arguments they were made with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class PickledByArguments:
    """
    Pickles an environment as the call that made it; a simulator, its processes and sockets cannot be moved.

    Unpickling and ``copy.deepcopy`` make a new environment with the same arguments, which must be picklable themselves.
    It has its own simulators, which start then, and the ``spec``; it has no episode yet and must be reset. One that was
    made without a seed draws its own.
    """

    _made_by: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """
        Keep the arguments.

        :param args: Of the constructor.
        :param kwargs: Likewise.
        :return: The environment, not initialized yet.
        """
        self = super().__new__(cls)
        self._made_by = (cls, args, kwargs)
        return self

    def made_by(self, function: Callable[..., Any], **kwargs: Any) -> Any:
        """
        Say what made this environment, where that was not its class alone.

        :param function: A function that makes environments; importable.
        :param kwargs: Its arguments.
        :return: The environment.
        """
        self._made_by = (function, (), kwargs)
        return self

    def __reduce__(self) -> Any:
        env: Any = self
        return _make, (*self._made_by, env.unwrapped.spec)


def _make(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], spec: Any) -> Any:
    env = function(*args, **kwargs)
    env.unwrapped.spec = spec
    return env
