# mypy: ignore-errors
"""How a storing role makes its kernel last until this rank's rows have arrived.

A wait in a kernel of its own, or a barrier, costs a few microseconds behind attention. Here CTAs wait that have stored and
announced all of their tiles, so that nobody keeps a peer from a tile, and the rows are there when the kernel ends.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from xstage_plugin.attention.peer_span import BARRIER_TIMEOUT_MS

TIMEOUT_NS = BARRIER_TIMEOUT_MS * 1_000_000


@cute.jit
def await_rows(counters, expected, block_rows: cutlass.Constexpr):
    """Return when every row block of this CTA's share has arrived; its counter is 0 then. A whole warp calls it.

    The waits are acquires at system scope: the next kernel of the stream sees the rows. A wait beyond the timeout, or a
    counter above ``expected`` (it was not cleared, or a tile was announced twice), traps.

    Args:
        counters: int32 [sequences, rows], this rank's own; the entry of a block's first row counts its tiles.
        expected: tiles of a block that has arrived.
        block_rows: rows of a block.
    """
    sequences, rows = counters.shape
    blocks = cute.ceil_div(rows, block_rows)
    ctas = Int32(cute.arch.grid_dim()[0])
    index = Int32(cute.arch.block_idx()[0]) + ctas * cute.arch.lane_idx()
    while index < sequences * blocks:
        entry = counters.iterator + cute.crd2idx((index // blocks, index % blocks * block_rows), counters.layout)
        _await_count(entry, expected)
        cute.arch.store(entry, Int32(0), sem="relaxed", scope="sys")
        index += ctas * cute.arch.WARP_SIZE


@cute.jit
def _await_count(entry, expected):
    arrived = _count(entry)
    begin_ns = cute.arch.globaltimer()
    while arrived != expected:
        if arrived > expected or cute.arch.globaltimer() - begin_ns > TIMEOUT_NS:
            # In silence: a printf would give every thread of the kernel a stack.
            cute.arch.inline_ptx("trap;")
        arrived = _count(entry)


def _count(entry):
    return cute.arch.load(entry, Int32, sem="acquire", scope="sys")
