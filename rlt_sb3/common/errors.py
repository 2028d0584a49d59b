"""Errors that are not a wrong setting: the command line prints their message and exits with status 1."""

from collections.abc import Collection


class RunError(RuntimeError):
    """Raised if a run's files, simulators or machine have a problem; the message says what to do."""


def unknown_settings(label: str, unknown: Collection[str], known: Collection[str]) -> str:
    """
    Write the error message about settings that do not exist.

    :param label: name of the algorithm
    :param unknown: names that were given and that it does not have
    :param known: names of its settings
    :return: the message of the error
    """
    names = ", ".join(map(repr, sorted(unknown)))
    return f"Unknown {label} setting{'s' if len(unknown) > 1 else ''} {names}. Valid settings: {', '.join(known)}."
