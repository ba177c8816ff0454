"""What one call of a prepared layer does on the stream: attention, exchange, and the barriers around what reaches a peer.

The barriers order memory once a layer, not once a tile. *Entry*: no rank stores before every rank has come to this call, so
whoever still read the previous result in stream order is done. *Closing*: what all ranks stored is visible here afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from xstage_plugin.attention.delivery import FusedDelivery
from xstage_plugin.attention.serial import LocalAttention, NcclExchange, PeerCopy
from xstage_plugin.errors import InvalidInputError

if TYPE_CHECKING:
    import torch

BARRIER, INPUTS = "barrier", "inputs"
ORDERINGS = (BARRIER, INPUTS)


class Span(Protocol):
    """What a layer needs of a :class:`PeerSpan`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    group: Any
    rank: int
    ranks: int
    closed: bool

    def local(self) -> torch.Tensor: ...
    def of(self, rank: int) -> torch.Tensor: ...
    def slots(self, start: int) -> torch.Tensor: ...
    def barrier(self) -> None: ...


class Route(Protocol):
    """One way from q, k, v to every rank's output, on the current stream."""

    def issue(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """The sender's part without barriers: what it takes to issue everything. The result is not safe to use after it."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """All of it, in order: the result is complete in stream order."""


class FusedRoute:
    """Stores from the attention kernel's epilogue."""

    def __init__(self, span: Span, delivery: FusedDelivery, ordering: str) -> None:
        self._span, self._delivery, self._enters = span, delivery, ordering == BARRIER

    def issue(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self._delivery.store(self._delivery.prepare(q), k, v)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        rows = self._delivery.prepare(q)
        if self._enters:
            self._span.barrier()
        self._delivery.store(rows, k, v)
        self._span.barrier()


class ArrivedRoute:
    """The same with a kernel that ends when this rank's rows have arrived: no closing barrier.

    A peer may still read its own q, k and v when it ends, so this is for callers whose next q, k and v come to the peers
    behind a meeting of their own; the entry barrier is one for the output only.
    """

    def __init__(self, span: Span, delivery: FusedDelivery) -> None:
        self._span, self._delivery = span, delivery

    def issue(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        raise InvalidInputError("a call whose kernel waits for its rows cannot be issued alone; take a backend that does not")

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        rows = self._delivery.prepare(q)
        self._span.barrier()
        self._delivery.store(rows, k, v)


class PeerCopyRoute:
    """Attention into local memory, then strided copies through the span."""

    def __init__(self, span: Span, attention: LocalAttention, copy: PeerCopy, ordering: str) -> None:
        self._span, self._attention, self._copy, self._enters = span, attention, copy, ordering == BARRIER

    def issue(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self._attention(q, k, v)
        self._copy()

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self._attention(q, k, v)
        if self._enters:
            self._span.barrier()
        self._copy()
        self._span.barrier()


class NcclRoute:
    """Attention into local memory, then NCCL, which orders both sides itself."""

    def __init__(self, attention: LocalAttention, exchange: NcclExchange) -> None:
        self._attention, self._exchange = attention, exchange

    def issue(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self._attention(q, k, v)
        self._exchange()

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self.issue(q, k, v)
