"""Which attention launches and which copies bring every output row to its owner. Pure, no GPU.

Every rank's output buffer is a *slot*; the slots lie at equal distances, so consecutive destinations with equally many rows
are one more tensor dimension. A launch gives that dimension to the kernel in one of two ways, because kernels take their tiles
block by block, then head by head, then along the batch:

- as its batch: q and output [slots, rows, h, d], keys and values expanded; one destination is served after the other;
- as its heads, and the rank's heads as its batch: q and output [h, rows, slots, d], keys and values [h, S, 1, d]; every head
  goes to all destinations before the next one. Then what a wave of tiles stores at once is only partly remote.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from xstage_plugin.attention.layout import OWN_FIRST, OWN_LAST, SEQUENCE, UlyssesLayout, checked_order
from xstage_plugin.errors import InvalidInputError


@dataclass(frozen=True)
class Launch:
    """One call of the attention kernel.

    Attributes:
        first_row: first row in q.
        rows: rows for every destination.
        slot: first destination slot, counted from the plan's ``first_rank``.
        slots: destinations, consecutive slots; they are the kernel's batch where ``element`` is given.
        element: sequence of the batch; None: all sequences at once, then ``slots`` is 1.
        kv_rows: keys and values that are seen, from the first on.
        head_by_head: destinations are the kernel's heads, and this rank's heads its batch.
    """

    first_row: int
    rows: int
    slot: int
    slots: int
    element: int | None
    kv_rows: int
    head_by_head: bool = False


@dataclass(frozen=True)
class Copy:
    """One strided copy of finished rows, all sequences, all heads of the sender.

    Attributes:
        first_row: first row in the sender's scratch.
        rows: rows for every destination; destination i takes them from ``first_row + i * rows``.
        slot, slots: first destination slot and their number.
        local_row: first row in the destination's buffer.
    """

    first_row: int
    rows: int
    slot: int
    slots: int
    local_row: int


@dataclass(frozen=True)
class FusedPlan:
    """Launches that store every row to its owner.

    Attributes:
        first_rank: rank of slot 0, from 0 to P.
        q_order: order of q that the launches read.
        gathers: q arrives in sequence order and is first copied into ``q_order``, because shared rows go out several times.
        launches: the calls, in the order in which they run.
    """

    first_rank: int
    q_order: str
    gathers: bool
    launches: tuple[Launch, ...]


@dataclass(frozen=True)
class SerialPlan:
    """Launches into a scratch of q's shape, then copies to the owners. ``first_rank`` as in :class:`FusedPlan`."""

    first_rank: int
    q_order: str
    launches: tuple[Launch, ...]
    copies: tuple[Copy, ...]


@dataclass(frozen=True)
class _Segment:
    """The rows of one destination, where they stand in q, and how far their keys go."""

    slot: int
    first_row: int
    rows: int
    kv_rows: int


def fused_plan(layout: UlyssesLayout, rank: int, q_order: str, causal: bool = False, head_by_head: bool = True) -> FusedPlan:
    """Launches of ``rank`` that store its heads' output straight to the owners.

    Args:
        layout, rank: whose rows and heads.
        q_order: in which q arrives.
        causal: row i of the sequence sees keys up to i.
        head_by_head: serve all destinations with a head before the next one, in launches over several of them. Needs a
            key/value head for each of the rank's heads; without, one destination is served after the other.

    Raises:
        InvalidInputError: unknown order, or causal attention with shared rows.
    """
    _require_causal_fits(layout, causal)
    # Shared rows stand once in the sequence and go to every rank: the kernel reads them once for each.
    gathers = checked_order(q_order) == SEQUENCE and layout.shared_rows > 0
    order = OWN_LAST if gathers else q_order
    launches: list[Launch] = []
    # The kernel's heads share their keys then, so heads that already share some cannot be its batch.
    by_head = head_by_head and layout.kv_heads_of(rank)[1] == layout.heads[rank]
    for run in _runs(_segments(layout, rank, order, causal), together=not causal):
        launches += _launches_of(run, layout.batch, by_head)
    return FusedPlan(first_rank(rank, order), order, gathers, tuple(launches))


def serial_plan(layout: UlyssesLayout, rank: int, q_order: str, causal: bool = False) -> SerialPlan:
    """Attention into a local scratch in ``q_order``, then copies to the owners.

    Raises:
        InvalidInputError: unknown order, or causal attention with shared rows.
    """
    _require_causal_fits(layout, causal)
    segments = _segments(layout, rank, q_order, causal)
    if causal and q_order != SEQUENCE:
        launches = tuple(Launch(part.first_row, part.rows, 0, 1, None, part.kv_rows) for part in segments)
    else:
        launches = (Launch(0, layout.q_rows(q_order), 0, 1, None, layout.seq_len),)
    if q_order == SEQUENCE and layout.shared_rows:
        copies = _copies_with_shared_rows(layout)
    else:
        copies = tuple(Copy(run[0].first_row, run[0].rows, run[0].slot, len(run), 0) for run in _runs(segments, together=True))
    return SerialPlan(first_rank(rank, q_order), q_order, launches, copies)


def first_rank(rank: int, q_order: str) -> int:
    """Rank of the first slot: destinations come in rising slots from there."""
    return {SEQUENCE: 0, OWN_LAST: rank + 1, OWN_FIRST: rank}[checked_order(q_order)]


def _segments(layout: UlyssesLayout, rank: int, q_order: str, causal: bool) -> list[_Segment]:
    segments, first_row = [], 0
    for slot, owner in enumerate(layout.delivery_ranks(rank, q_order)):
        rows = layout.local_rows(owner)
        # Masks are aligned to the bottom right: keys up to the segment's last row make its part of the causal mask.
        kv_rows = layout.row_start(owner) + rows if causal else layout.seq_len
        if rows:
            segments.append(_Segment(slot, first_row, rows, kv_rows))
        first_row += rows
    return segments


def _runs(segments: list[_Segment], together: bool) -> list[list[_Segment]]:
    """Neighbouring segments with equally many rows; every segment by itself unless ``together``."""
    if not together:
        return [[segment] for segment in segments]
    # A destination without rows leaves a gap in the slots, so the slot minus its place in the list changes there.
    keyed = groupby(enumerate(segments), key=lambda item: (item[1].slot - item[0], item[1].rows))
    return [[segment for _, segment in group] for _, group in keyed]


def _launches_of(run: list[_Segment], batch: int, by_head: bool) -> list[Launch]:
    """The fewest launches: all destinations at once, one call a sequence; or all sequences, one call a destination."""
    first = run[0]
    if batch > len(run) or len(run) == 1:
        return [Launch(part.first_row, part.rows, part.slot, 1, None, part.kv_rows) for part in run]
    return [Launch(first.first_row, first.rows, first.slot, len(run), b, first.kv_rows, by_head) for b in range(batch)]


def _copies_with_shared_rows(layout: UlyssesLayout) -> tuple[Copy, ...]:
    """From a scratch in sequence order: own and shared rows of a destination do not stand together there."""
    copies = []
    for owner in range(layout.ranks):
        local_row = 0
        for part in layout.local_ranges(owner):
            copies.append(Copy(part.start, len(part), owner, 1, local_row))
            local_row += len(part)
    return tuple(copies)


def _require_causal_fits(layout: UlyssesLayout, causal: bool) -> None:
    if causal and layout.shared_rows:
        raise InvalidInputError(
            f"causal attention with {layout.shared_rows} shared rows; expected none: shared rows stand before or after all "
            "others, and one mask cannot say which keys each rank's copy sees"
        )
