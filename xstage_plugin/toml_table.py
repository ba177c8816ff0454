"""A TOML file read through one gate: every missing key or wrong type is one line that names the file and the key."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from xstage_plugin.checks import LARGEST, plain_text, shown
from xstage_plugin.errors import InvalidInputError
from xstage_plugin.files import read_text
from xstage_plugin.provenance import Origin, Source

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")


class Table:
    """One table of a TOML document. ``where`` is the file and the path of keys to it, for errors."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self._values = values
        self.where = where

    @classmethod
    def parse(cls, text: str, where: str) -> Table:
        """Raises InvalidInputError if ``text`` is no TOML."""
        try:
            return cls(tomllib.loads(text), where)
        except RecursionError:
            raise InvalidInputError(f"{where}: not TOML: nested too deeply") from None
        except ValueError as error:  # its own error type, or a whole number of too many digits
            reason = str(error).splitlines()[0][:120]
            raise InvalidInputError(f"{where}: not TOML: {reason}") from None

    @classmethod
    def read(cls, path: Path, what: str) -> Table:
        """Raises InvalidInputError if ``path`` cannot be read or is no TOML."""
        return cls.parse(read_text(path, what), str(path))

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def keys(self) -> list[str]:
        return list(self._values)

    def text(self, key: str, default: str | None = None) -> str:
        return plain_text(str(self._get(key, str, "a text", default)))

    def integer(self, key: str) -> int:
        value = self._get(key, int, "a whole number", None)
        if isinstance(value, bool):
            raise self._wrong(key, value, "a whole number")
        return int(value)

    def number(self, key: str) -> float:
        return self._number(key, self._get(key, object, "a number", None))

    def numbers(self, key: str) -> tuple[float, ...]:
        values = self._get(key, list, "a list of numbers", None)
        return tuple(self._number(key, value) for value in values)

    def table(self, key: str) -> Table:
        return Table(self._get(key, dict, "a table", None), f"{self.where}: {key}")

    def tables(self, key: str) -> list[Table]:
        values = self._get(key, list, "a list of tables", None)
        if not values or not all(isinstance(value, dict) for value in values):
            raise self._wrong(key, values, "a list of tables")
        return [Table(value, f"{self.where}: {key}[{index}]") for index, value in enumerate(values)]

    def origin(self) -> Origin:
        """The keys ``source`` and ``note`` of this table."""
        name = self.text("source")
        if name not in {source.value for source in Source}:
            raise self._wrong("source", name, "one of " + ", ".join(source.value for source in Source))
        return Origin(Source(name), self.text("note", ""))

    def build(self, make: Callable[[], T]) -> T:
        """``make()``, with the place in the file put before what it finds wrong."""
        try:
            return make()
        except InvalidInputError as error:
            message = str(error)
            raise (error if message.startswith(self.where) else InvalidInputError(f"{self.where}: {message}")) from None

    def _get(self, key: str, kind: type, expected: str, default: Any) -> Any:
        if key not in self._values:
            if default is not None:
                return default
            raise InvalidInputError(f"{self.where}: {key!r} is missing; expected {expected}")
        value = self._values[key]
        if not isinstance(value, kind):
            raise self._wrong(key, value, expected)
        return value

    def _number(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or (isinstance(value, int) and abs(value) > LARGEST):
            raise self._wrong(key, value, "a number")
        return float(value)

    def _wrong(self, key: str, value: Any, expected: str) -> InvalidInputError:
        return InvalidInputError(f"{self.where}: {shown(key)} is {shown(value)}; expected {expected}")
