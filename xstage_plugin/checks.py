"""Checks of single values, with messages that name the value and what was expected."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from xstage_plugin.errors import InvalidInputError

LARGEST = 1e15  # far above any byte count or time here; keeps products finite


def positive(name: str, value: float) -> float:
    """``value`` if it is a finite number above zero.

    Raises:
        InvalidInputError: otherwise, naming ``name`` and the value.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < LARGEST:
        raise InvalidInputError(f"{name} is {_shown(value)}; expected a finite number above 0")
    return float(value)


def not_negative(name: str, value: float) -> float:
    """``value`` if it is a finite number of at least zero.

    Raises:
        InvalidInputError: otherwise.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < LARGEST:
        raise InvalidInputError(f"{name} is {_shown(value)}; expected a finite number of at least 0")
    return float(value)


def positive_int(name: str, value: int) -> int:
    """``value`` if it is a whole number of at least 1.

    Raises:
        InvalidInputError: otherwise.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < LARGEST:
        raise InvalidInputError(f"{name} is {_shown(value)}; expected a whole number of at least 1")
    return value


def fraction(name: str, value: float) -> float:
    """``value`` if it lies above 0 and is at most 1.

    Raises:
        InvalidInputError: otherwise.
    """
    if positive(name, value) > 1:
        raise InvalidInputError(f"{name} is {_shown(value)}; expected a fraction above 0 and at most 1")
    return float(value)


def unknown_name(what: str, name: str, known: Iterable[str]) -> InvalidInputError:
    """The error for a ``name`` that is no ``what``, with the near ones suggested."""
    names = sorted(known)
    near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
    return InvalidInputError(f"unknown {what} {name!r}; {hint}")


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value)
