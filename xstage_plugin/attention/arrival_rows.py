"""Which row blocks a range of rows depends on, and in which parts a consumer gets its rows. Pure, no GPU."""

from __future__ import annotations

from dataclasses import dataclass

from xstage_plugin.checks import shown
from xstage_plugin.errors import InvalidInputError

# A further part costs a wait and a smaller product, 4 us on two H200s, and what it could hide there is less.
DEFAULT_PARTS = 1
# For ``parts``: the consumer gets all rows at once and waits for them itself.
UNWAITED = 0


@dataclass(frozen=True)
class Parts:
    """What a consumer is called with, and when.

    Attributes:
        ranges: consecutive rows of this rank, none of them empty; together all of its rows.
        waits: the stream waits for each part before the consumer gets it.
        reason: one line.
    """

    ranges: tuple[range, ...]
    waits: bool
    reason: str


def blocks_of(rows: range, block_rows: int) -> range:
    """Numbers of the row blocks that touch ``rows``."""
    return range(rows.start // block_rows, -(-rows.stop // block_rows) if rows else rows.start // block_rows)


def choose_parts(rows: int, block_rows: int | None, asked: int | None) -> Parts:
    """In which parts a consumer gets ``rows`` rows.

    Args:
        rows: of this rank.
        block_rows: rows of a block that announces its arrival; None: rows are there when the exchange has ended.
        asked: most parts; None: the default; 0: one part, for which nothing waits.
    """
    if rows == 0:
        return Parts((), True, "this rank has no rows")
    if block_rows is None:
        return Parts((range(rows),), True, "one part: nothing announces rows before the exchange has ended")
    if asked == UNWAITED:
        return Parts((range(rows),), False, "one part: the consumer waits for its rows itself")
    blocks = len(blocks_of(range(rows), block_rows))
    count = min(DEFAULT_PARTS if asked is None else asked, blocks)
    starts = [part * blocks // count * block_rows for part in range(count)]
    why = "by default" if asked is None else f"{asked} asked for"
    ranges = tuple(range(start, stop) for start, stop in zip(starts, [*starts[1:], rows], strict=True))
    return Parts(ranges, True, f"{count} part{'s' if count > 1 else ''} of {blocks} row blocks, {why}")


def checked_parts(parts: int | None) -> int | None:
    """``parts`` if it can be asked for.

    Raises:
        InvalidInputError: neither None nor a whole number of at least 0.
    """
    if parts is not None and (not isinstance(parts, int) or isinstance(parts, bool) or parts < 0):
        raise InvalidInputError(f"parts is {shown(parts)}; expected None or a whole number of at least 0")
    return parts
