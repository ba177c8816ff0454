"""How a consumer gets this rank's rows: part after part as they arrive, or all at once behind the exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from xstage_plugin.attention.arrival_rows import Parts

if TYPE_CHECKING:
    import torch

    from xstage_plugin.attention.arrivals import ArrivalBoard
    from xstage_plugin.attention.delivery import FusedDelivery
    from xstage_plugin.attention.routes import Route, Span

# consumer(rows [B, n, H, d], first_row): works on the current stream; the rows are local rows first_row to first_row + n - 1.
Consumer = Callable[["torch.Tensor", int], object]


class Consumption(Protocol):
    """One way from q, k, v to consumed rows, on the current stream.

    Attributes:
        parts: what the consumer gets.
        meets: when it ends, the kernels of all ranks have; otherwise a peer may still read its own q, k and v.
    """

    parts: Parts
    meets: bool

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, consume: Consumer) -> None: ...


class AfterExchange:
    """Any route to its end, then the consumer."""

    meets = True

    def __init__(self, route: Route, out: torch.Tensor, parts: Parts) -> None:
        self.parts = parts
        self._route, self._out = route, out

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, consume: Consumer) -> None:
        self._route(q, k, v)
        for part in self.parts.ranges:
            consume(self._out[:, part.start : part.stop], part.start)


class AsRowsArrive:
    """Stores that announce themselves; no closing barrier.

    All of this rank's rows are there when it ends, because each part was waited for, or the kernel did; the counters are
    clear again.

    Args:
        span, delivery: as for :class:`FusedRoute`; the delivery announces.
        enters: ranks meet before they store.
        board: counts what arrives.
        out: [B, S_local, H, d], this rank's rows.
        parts: in which they are consumed.
        in_kernel: the delivery ends when all of this rank's rows are there.
    """

    meets = False

    def __init__(
        self,
        span: Span,
        delivery: FusedDelivery,
        enters: bool,
        board: ArrivalBoard,
        out: torch.Tensor,
        parts: Parts,
        in_kernel: bool,
    ) -> None:
        self.parts, self._in_kernel = parts, in_kernel
        self._span, self._delivery, self._enters, self._board, self._out = span, delivery, enters, board, out

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, consume: Consumer) -> None:
        rows = self._delivery.prepare(q)
        if self._enters:
            self._span.barrier()
        self._delivery.store(rows, k, v)
        waiting = [] if self._in_kernel else list(self.parts.ranges)
        try:
            for part in self.parts.ranges:
                if self.parts.waits and not self._in_kernel:
                    self._board.take(waiting.pop(0))
                consume(self._out[:, part.start : part.stop], part.start)
        finally:
            # Also where the consumer failed: tiles of this call must not count in the next.
            for part in waiting:
                self._board.take(part)
