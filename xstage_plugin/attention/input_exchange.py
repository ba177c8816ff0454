"""The exchange before attention: every rank pushes the heads that the others compute out of its own rows, through a span."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from xstage_plugin.attention.layout import OWN_LAST, UlyssesLayout

if TYPE_CHECKING:
    import torch

    from xstage_plugin.attention.routes import Span


def input_span_shape(layout: UlyssesLayout) -> tuple[int]:
    """Elements of the buffer that takes q, k and v of any rank of ``layout``."""
    ranks = range(layout.ranks)
    return (max(sum(prod(shape) for shape in _part_shapes(layout, rank)) for rank in ranks),)


class InputExchange:
    """Brings q [B, S_local, H, d] and k, v [B, S_local, H_kv, d] of all ranks to this rank's heads over all rows.

    q lands in the order ``own_last``, ready for the fused launches; k and v land in sequence order. Shared rows of k and v
    are on every rank already, and each takes its own.

    Args:
        span: of ``input_span_shape(layout)`` elements, of the type of q, k and v.
        layout, rank: whose rows and heads.

    Attributes:
        q, k, v: what arrived, [B, rows, heads, d] each; valid after the span's barrier that follows :meth:`push`.
    """

    def __init__(self, span: Span, layout: UlyssesLayout, rank: int) -> None:
        self.q, self.k, self.v = _parts(span.local(), layout, rank)
        self._copies: list[tuple[int, torch.Tensor, slice, slice]] = []
        for owner in layout.delivery_ranks(rank, OWN_LAST):
            theirs = _parts(span.of(owner), layout, owner)
            start = layout.delivery_start(owner, rank, OWN_LAST)
            rows = layout.local_rows(rank)
            heads = slice(layout.head_start(owner), layout.head_start(owner) + layout.heads[owner])
            self._add(0, theirs[0][:, start : start + rows], slice(0, rows), heads)
            first, count = layout.kv_heads_of(owner)
            local_start = 0
            for part in layout.local_ranges(rank):
                # Shared rows are nobody's to give: every rank has them.
                if owner == rank or part == layout.own_range(rank):
                    local = slice(local_start, local_start + len(part))
                    for which in (1, 2):
                        self._add(which, theirs[which][:, part.start : part.stop], local, slice(first, first + count))
                local_start += len(part)

    def _add(self, which: int, target: torch.Tensor, rows: slice, heads: slice) -> None:
        if target.numel():
            self._copies.append((which, target, rows, heads))

    def push(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Copy into the peers' buffers, on the current stream. No rank may still read what an earlier push brought."""
        sources = (q, k, v)
        for which, target, rows, heads in self._copies:
            target.copy_(sources[which][:, rows, heads])


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
