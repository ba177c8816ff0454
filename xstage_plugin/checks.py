"""Checks of single values, with messages that name the value and what was expected."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable

from xstage_plugin.errors import InvalidInputError

# Times, sizes and rates here lie far inside these bounds, and products of a few of them stay finite.
SMALLEST, LARGEST = 1e-9, 1e15
LARGEST_COUNT = 2**31 - 1
MOST_SHOWN = 60


def positive(name: str, value: float) -> float:
    """``value`` if it is a finite number above zero (1e-9 to 1e15).

    Raises:
        InvalidInputError: otherwise, naming ``name`` and the value.
    """
    if not _is_number(value) or not SMALLEST <= value <= LARGEST:
        raise InvalidInputError(f"{name} is {shown(value)}; expected a finite number above 0{_limits(value)}")
    return float(value)


def not_negative(name: str, value: float) -> float:
    """``value`` if it is a finite number of at least zero (at most 1e15).

    Raises:
        InvalidInputError: otherwise.
    """
    if not _is_number(value) or not 0 <= value <= LARGEST:
        raise InvalidInputError(f"{name} is {shown(value)}; expected a finite number of at least 0{_limits(value)}")
    return float(value)


def positive_int(name: str, value: int, at_most: int = LARGEST_COUNT) -> int:
    """``value`` if it is a whole number from 1 to ``at_most``.

    Raises:
        InvalidInputError: otherwise.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidInputError(f"{name} is {shown(value)}; expected a whole number of at least 1")
    if value > at_most:
        raise InvalidInputError(f"{name} is {shown(value)}; expected at most {at_most}")
    return value


def not_negative_int(name: str, value: int) -> int:
    """``value`` if it is a whole number of at least 0.

    Raises:
        InvalidInputError: otherwise, naming ``name`` and the value.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidInputError(f"{name} is {shown(value)}; expected a whole number of at least 0")
    return value


def fraction(name: str, value: float) -> float:
    """``value`` if it lies above 0 and is at most 1.

    Raises:
        InvalidInputError: otherwise.
    """
    if positive(name, value) > 1:
        raise InvalidInputError(f"{name} is {shown(value)}; expected a fraction above 0 and at most 1")
    return float(value)


def unknown_name(what: str, name: str, known: Iterable[str]) -> InvalidInputError:
    """The error for a ``name`` that is no ``what``, with the near ones suggested."""
    names = sorted(known)
    near = difflib.get_close_matches(name.lower()[:MOST_SHOWN], names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
    return InvalidInputError(f"unknown {what} {shown(name)}; {hint}")


def shown(value: object) -> str:
    """``value`` for an error message: numbers plain, texts quoted, nothing longer than a line can bear."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**MOST_SHOWN:
        return "a number of more than 60 digits"
    text = f"{value:g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."


def plain_text(text: str) -> str:
    """``text`` as one line that any terminal and file can hold: no control characters, no lone surrogates."""
    sound = text.encode("utf-8", "replace").decode()
    return " ".join("".join(char if char.isprintable() else " " for char in sound).split())[:300]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _limits(value: object) -> str:
    """The bound that a positive finite number broke, if it is one."""
    if not _is_number(value) or not isinstance(value, (int, float)):
        return ""
    if value > LARGEST and not (isinstance(value, float) and math.isinf(value)):
        return f", at most {LARGEST:g}"
    return f", at least {SMALLEST:g}" if 0 < value < SMALLEST else ""
