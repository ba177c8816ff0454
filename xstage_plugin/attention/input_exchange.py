"""The exchange before attention: every rank gives the heads that the others compute, out of its own rows.

q lands in the order ``own_last``, ready for the fused launches; k and v land in sequence order. Shared rows of k and v are on
every rank already, and each takes its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from xstage_plugin.attention.layout import OWN_LAST, UlyssesLayout

if TYPE_CHECKING:
    import torch

    from xstage_plugin.attention.routes import Span


@dataclass(frozen=True)
class Transfer:
    """Rows and heads that one rank gives another: all sequences, all of the head dimension.

    Attributes:
        which: 0, 1 or 2: of q, k or v.
        rows: in what the sender has, [B, S_local, heads, d].
        heads: in the same.
        target_rows: in what the owner gets, [B, rows, its heads, d].
    """

    which: int
    rows: slice
    heads: slice
    target_rows: slice


def transfers(layout: UlyssesLayout, sender: int, owner: int) -> tuple[Transfer, ...]:
    """What ``sender`` gives ``owner``, in one order on both sides; none of them is empty. Pure, no GPU."""
    found = []
    count, start = layout.local_rows(sender), layout.delivery_start(owner, sender, OWN_LAST)
    heads = slice(layout.head_start(owner), layout.head_start(owner) + layout.heads[owner])
    if count:
        found.append(Transfer(0, slice(0, count), heads, slice(start, start + count)))
    first, kv_count = layout.kv_heads_of(owner)
    at = 0
    for part in layout.local_ranges(sender):
        # Shared rows are nobody's to give: every rank has them.
        if owner == sender or part == layout.own_range(sender):
            rows, target = slice(at, at + len(part)), slice(part.start, part.stop)
            found += [Transfer(which, rows, slice(first, first + kv_count), target) for which in (1, 2)]
        at += len(part)
    return tuple(found)


def input_span_shape(layout: UlyssesLayout) -> tuple[int]:
    """Elements of the buffer that takes q, k and v of any rank of ``layout``."""
    ranks = range(layout.ranks)
    return (max(sum(prod(shape) for shape in _part_shapes(layout, rank)) for rank in ranks),)


class InputExchange:
    """Pushes through a span: a strided copy for each part, nothing is packed.

    Args:
        span: of ``input_span_shape(layout)`` elements, of the type of q, k and v.
        layout, rank: whose rows and heads.

    Attributes:
        q, k, v: what arrived, [B, rows, heads, d] each; valid after :meth:`meet`.
    """

    def __init__(self, span: Span, layout: UlyssesLayout, rank: int) -> None:
        self._span = span
        self.q, self.k, self.v = _parts(span.local(), layout, rank)
        self._copies: list[tuple[Transfer, torch.Tensor]] = []
        for owner in layout.delivery_ranks(rank, OWN_LAST):
            theirs = _parts(span.of(owner), layout, owner)
            self._copies += [(part, theirs[part.which][:, part.target_rows]) for part in transfers(layout, rank, owner)]

    @property
    def closed(self) -> bool:
        return self._span.closed

    def push(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Copy into the peers' buffers, on the current stream. No rank may still read what an earlier push brought."""
        sources = (q, k, v)
        for part, target in self._copies:
            target.copy_(sources[part.which][:, part.rows, part.heads])

    def meet(self) -> None:
        """Wait on the stream for all ranks: what they pushed is here, and what they had is read."""
        self._span.barrier()


class InputAllToAll:
    """The same through ``all_to_all_single``, for ranks that cannot have a span. Memory is taken once.

    Args:
        layout, rank: whose rows and heads.
        dtype, device: of q, k and v.
        group: the ranks.

    Attributes:
        q, k, v: what arrived, [B, rows, heads, d] each; valid after :meth:`push`.
        closed: never; there is no span to close.
    """

    closed = False

    def __init__(self, layout: UlyssesLayout, rank: int, dtype: torch.dtype, device: torch.device, group: Any) -> None:
        import torch

        self._group = group
        buffer = torch.empty(input_span_shape(layout), dtype=dtype, device=device)
        self.q, self.k, self.v = parts = _parts(buffer, layout, rank)
        ranks = range(layout.ranks)
        sent = [[(part, _shape(layout, part)) for part in transfers(layout, rank, owner)] for owner in ranks]
        received = [[(part, _shape(layout, part)) for part in transfers(layout, sender, rank)] for sender in ranks]
        self._send_sizes, self._receive_sizes = (
            [sum(prod(shape) for _, shape in of_rank) for of_rank in side] for side in (sent, received)
        )
        self._send, self._receive = (
            torch.empty(sum(sizes), dtype=dtype, device=device) for sizes in (self._send_sizes, self._receive_sizes)
        )
        self._packs = _views(self._send, [pair for of_rank in sent for pair in of_rank])
        unpacks = _views(self._receive, [pair for of_rank in received for pair in of_rank])
        self._unpacks = [(parts[part.which][:, part.target_rows], view) for part, view in unpacks]

    def push(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Send and receive, on the current stream; the collective orders both sides."""
        import torch.distributed as dist

        sources = (q, k, v)
        for part, view in self._packs:
            view.copy_(sources[part.which][:, part.rows, part.heads])
        dist.all_to_all_single(self._receive, self._send, self._receive_sizes, self._send_sizes, group=self._group)
        for target, view in self._unpacks:
            target.copy_(view)

    def meet(self) -> None:
        """Nothing to wait for: the collective was the meeting, and nobody stores into this rank's memory."""


def _shape(layout: UlyssesLayout, part: Transfer) -> tuple[int, int, int, int]:
    return (layout.batch, part.rows.stop - part.rows.start, part.heads.stop - part.heads.start, layout.head_dim)


def _views(flat: torch.Tensor, pairs: list[tuple[Transfer, tuple[int, int, int, int]]]) -> list[tuple[Transfer, torch.Tensor]]:
    """Consecutive pieces of ``flat`` in these shapes."""
    found, start = [], 0
    for part, shape in pairs:
        found.append((part, flat[start : start + prod(shape)].view(shape)))
        start += prod(shape)
    return found


def _part_shapes(layout: UlyssesLayout, rank: int) -> tuple[tuple[int, ...], ...]:
    kv_shape = (layout.batch, layout.seq_len, layout.kv_heads_of(rank)[1], layout.head_dim)
    return (layout.batch, layout.delivery_rows, layout.heads[rank], layout.head_dim), kv_shape, kv_shape


def _parts(buffer: torch.Tensor, layout: UlyssesLayout, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v in the buffer of ``rank``, one after another."""
    parts, start = [], 0
    for shape in _part_shapes(layout, rank):
        parts.append(buffer[start : start + prod(shape)].view(shape))
        start += prod(shape)
    return parts[0], parts[1], parts[2]
