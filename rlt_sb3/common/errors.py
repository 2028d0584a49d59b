"""Errors that are not a wrong setting: the command line prints their message and exits with status 1."""


class RunError(RuntimeError):
    """Something about a run's files, simulators or machine; the message says what to do."""
