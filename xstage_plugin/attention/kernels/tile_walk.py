# mypy: ignore-errors
"""Which tiles a persistent CTA takes, and where their output and its announcement go.

The tiles come in the order in which upstream's kernel numbers its CTAs, or the work of its persistent ones.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from flash_attn.cute.tile_scheduler import SingleTileLPTScheduler, StaticPersistentTileScheduler
from quack.cute_dsl_utils import ParamsBase

from xstage_plugin.attention.kernels.row_wait import await_rows

# The entries of a span, each as (nanoseconds of the global timer, cycles of the SM).
ISSUED, SMEM_FREE, COMPLETE = range(3)
SPAN_SHAPE = (3, 2)


@dataclass
class Delivery(ParamsBase):
    """What a role needs to store a tile and to announce it.

    It reaches the device inside the scheduler's parameters, which upstream gives to every role; the output goes to one only.

    Attributes:
        order: upstream's parameters of the order of tiles, a class of ``tile_scheduler.py``.
        out: output as the TMA store addresses it, [rows, d, h, b]; None where upstream gives it to the role that stores.
        store: its copy atom, or None likewise.
        arrivals: int32 [b, h, rows], or None: nothing is announced.
        spans: int64 [b, h, row blocks, 3, 2], or None: nothing is timed.
        awaits: int32 [sequences, rows], this rank's own counters, or None: the kernel ends with its own last tile.
        expected: what they count up to; None likewise.
    """

    order: ParamsBase
    out: cute.Tensor | None
    store: cute.CopyAtom | None
    arrivals: cute.Tensor | None
    spans: cute.Tensor | None
    awaits: cute.Tensor | None
    expected: Int32 | None

    def tiles(self):
        """Number of tiles, whatever the order."""
        return self.order.total_blocks if self.is_longest_first else self.order.total_blocks_cluster

    @property
    def is_longest_first(self):
        return isinstance(self.order, SingleTileLPTScheduler.Params)

    @cute.jit
    def announce(self, row, head, batch):
        """One more tile of the rows from ``row`` on is complete.

        The thread that saw it complete calls this behind a system fence: both together are a release.
        """
        if const_expr(self.arrivals is not None):
            entry = self.arrivals.iterator + cute.crd2idx((batch, head, row), self.arrivals.layout)
            cute.arch.red(entry, Int32(1), op="add", dtype="u32", sem="relaxed", scope="sys")

    @cute.jit
    def await_rows(self, block_rows: cutlass.Constexpr):
        """Return when this CTA's share of this rank's rows has arrived. The storing warp, behind its last announcement."""
        if const_expr(self.awaits is not None):
            await_rows(self.awaits, self.expected, block_rows)

    @cute.jit
    def stamp(self, entry: cutlass.Constexpr, block, head, batch):
        """Note the time of one entry of a tile's span."""
        if const_expr(self.spans is not None):
            self.spans[batch, head, block, entry, 0] = Int64(cute.arch.globaltimer())
            self.spans[batch, head, block, entry, 1] = Int64(cute.arch.clock64())


class TileWalk:
    """The scheduler of a CTA, or of a cluster of CTAs, as upstream's roles call it. Every round over them is like the first.

    Attributes:
        delivery: what it was created with.
    """

    def __init__(self, delivery, *place):
        self.delivery, self._place = delivery, place

    @classmethod
    def create(cls, delivery):
        """A walk from the first tile of this CTA or cluster."""
        return cls(delivery, _which_of(delivery.order)[0])

    def get_current_work(self):
        order, tile = self.delivery.order, self._place[0]
        if self.delivery.is_longest_first:
            return SingleTileLPTScheduler(order, tile, Int32(0)).get_current_work()
        return StaticPersistentTileScheduler(order, tile).get_current_work()

    def initial_work_tile_info(self):
        return self.get_current_work()

    def prefetch_next_work(self):
        """Nothing to fetch: every CTA knows its tiles."""

    def producer_tail(self):
        """Nothing was fetched."""

    def advance_to_next_work(self):
        self._place = self._next(_which_of(self.delivery.order)[1], *self._place)
        return self.get_current_work()

    def _next(self, walks, tile):
        return (tile + walks,)

    def __extract_mlir_values__(self):
        # The delivery never changes: a kernel's argument, seen from every loop.
        return [value for part in self._place for value in cutlass.extract_mlir_values(part)]

    def __new_from_mlir_values__(self, values):
        place = (cutlass.new_from_mlir_values(part, [value]) for part, value in zip(self._place, values, strict=True))
        return type(self)(self.delivery, *place)


class TurningWalk(TileWalk):
    """Of every two rounds the second runs backwards over the CTAs.

    Where the costs of tiles fall along the order (causal attention starts with the longest), nobody is served last twice.
    """

    @classmethod
    def create(cls, delivery):
        first, walks = _which_of(delivery.order)
        return cls(delivery, first, 2 * (walks - first) - 1)

    def _next(self, walks, tile, step):
        # From a place in one round to the place in the reversed one, and back: the two steps add up to two rounds.
        return tile + step, 2 * walks - step


def _which_of(order):
    """The number of this CTA's walk, and of how many: the CTAs of a cluster walk together."""
    if order.cluster_shape_m == 1:
        return Int32(cute.arch.block_idx()[0]), Int32(cute.arch.grid_dim()[0])
    return Int32(cute.arch.cluster_idx()[0]), Int32(cute.arch.cluster_dim()[0])
