"""Where a number comes from."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Source(str, enum.Enum):
    """How a number came to be. An estimate is never shown without this mark."""

    MEASURED = "measured"
    PAPER = "paper"
    DATASHEET = "datasheet"
    ESTIMATED = "estimated"
    GIVEN = "given"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Origin:
    """Source of a number and one sentence on how it was had."""

    source: Source
    note: str = ""

    def __str__(self) -> str:
        return f"{self.source}: {self.note}" if self.note else str(self.source)
