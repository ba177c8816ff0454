"""Arrival counters: how many tiles of each row block of this rank's output the ranks have delivered so far.

A kernel that announces adds 1, as a release at system scope, to the counter of a tile's row block in the memory of the rank
that owns the tile, once all bytes of the tile are there. A block has arrived when its counter is H: one tile a head, over all
ranks. Whoever waits for it with an acquire at system scope sees its rows. Waiting also uses the counters up: they are 0 again
before the ranks meet for the next call, so a call needs no number of its own.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Protocol

from xstage_plugin.attention.arrival_rows import blocks_of
from xstage_plugin.attention.delivery import Awaited
from xstage_plugin.attention.layout import UlyssesLayout
from xstage_plugin.attention.peer_span import BARRIER_TIMEOUT_MS

if TYPE_CHECKING:
    import torch

    from xstage_plugin.attention.routes import Span


class DeviceArrivals(ctypes.Structure):
    """``xstage::Arrivals`` of arrival.cuh: what a kernel of yours needs to wait for rows."""

    _fields_ = (
        ("counters", ctypes.c_uint64),
        ("sequence_stride", ctypes.c_int64),
        ("timeout_ns", ctypes.c_uint64),
        ("block_rows", ctypes.c_uint32),
        ("expected", ctypes.c_int32),
        ("rank", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    )


class TakeBlocks(Protocol):
    """How a stream waits: until each of ``blocks`` has arrived in every sequence; then their counters are 0 again."""

    def __call__(self, board: ArrivalBoard, blocks: range) -> None: ...


class ArrivalCounters:
    """Counters that all calls over one output span share: they are 0 whenever no call is under way.

    Making it clears this rank's counters; the ranks must meet before one of them raises any.

    Args:
        span: of :func:`counter_shape` and int32.
        take: how a stream waits for them.
    """

    def __init__(self, span: Span, take: TakeBlocks) -> None:
        import torch

        self.span, self.take = span, take
        span.local().zero_()
        if span.device.type == "cuda":
            torch.cuda.synchronize(span.device)


class ArrivalBoard:
    """The counters as one layer uses them, on this rank.

    Attributes:
        counters: int32 [B, most local rows]; the entry of a row block's first row counts its tiles, the others stay 0.
        block_rows: rows of a block.
        expected: tiles of a block that has arrived, H.
        rank: this process in the group.
    """

    def __init__(self, counters: ArrivalCounters, layout: UlyssesLayout, rank: int, block_rows: int) -> None:
        self.block_rows, self.expected, self.rank = block_rows, layout.total_heads, rank
        self.counters = counters.span.local()
        self._span, self._take = counters.span, counters.take

    @property
    def closed(self) -> bool:
        return self._span.closed

    def slots(self, first_rank: int) -> torch.Tensor:
        """All ranks' counters, [P, B, most local rows], slot 0 is ``first_rank``; for :class:`FusedDelivery`."""
        return self._span.slots(first_rank)

    def take(self, rows: range) -> None:
        """Wait on the current stream until the blocks that touch ``rows`` are there, in every sequence; clear their counters.

        Within one call every block is taken once. The host does not wait. Legal inside a CUDA-graph capture.
        """
        self._take(self, blocks_of(rows, self.block_rows))

    def awaited(self, rows: int) -> Awaited:
        """This rank's ``rows`` rows, for a kernel that waits for them before it ends, and clears their counters."""
        return Awaited(self.counters[:, :rows], self.expected)

    def on_device(self) -> DeviceArrivals:
        """The board for a kernel of yours; valid as long as the span of the counters."""
        return DeviceArrivals(
            self.counters.data_ptr(),
            self.counters.stride(0),
            BARRIER_TIMEOUT_MS * 1_000_000,
            self.block_rows,
            self.expected,
            self.rank,
        )


def counter_shape(layout: UlyssesLayout) -> tuple[int, int]:
    """Shape of every rank's counters, [B, most local rows]: one for each row of the output buffer."""
    return layout.span_shape[:2]
