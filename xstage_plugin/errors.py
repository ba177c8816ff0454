"""The errors this package raises. Each message is one line: the operation, what was expected, what came, the next step."""

from __future__ import annotations


class XStageError(Exception):
    """Base of every error that this package raises on purpose. The command line prints it as one line and exits with 2."""


class InvalidInputError(XStageError, ValueError):
    """A value, name or file that the caller gave cannot be used; the message names it and what was expected."""


class FitRefusedError(XStageError):
    """The samples do not determine a platform model; the message says why."""
