"""The unfused references: attention into local memory, then the output exchange; through the span, or through NCCL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xstage_plugin.attention.delivery import run_launches
from xstage_plugin.attention.launch_plan import SerialPlan
from xstage_plugin.attention.layout import UlyssesLayout

if TYPE_CHECKING:
    import torch

    from xstage_plugin.attention.backends import AttentionBackend


class LocalAttention:
    """Attention of one rank's heads over the whole sequence, into a scratch taken once.

    Args:
        plan: from :func:`serial_plan`.
        layout, rank: whose rows and heads.
        out_dtype, device: of the scratch.
        backend, softmax_scale, causal: the attention.

    Attributes:
        scratch: [B, rows of q, h, d], in the plan's order of q.
    """

    def __init__(
        self,
        plan: SerialPlan,
        layout: UlyssesLayout,
        rank: int,
        out_dtype: torch.dtype,
        device: torch.device,
        backend: AttentionBackend,
        softmax_scale: float,
        causal: bool,
    ) -> None:
        import torch

        self._plan, self._backend, self._scale, self._causal = plan, backend, softmax_scale, causal
        shape = (layout.batch, layout.q_rows(plan.q_order), layout.heads[rank], layout.head_dim)
        self.scratch = torch.empty(shape, dtype=out_dtype, device=device)
        self._outputs = tuple(self.scratch[:, part.first_row : part.first_row + part.rows] for part in plan.launches)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        run_launches(self._plan.launches, self._outputs, q, k, v, self._backend, self._scale, self._causal)
        return self.scratch


class PeerCopy:
    """Strided copies of a scratch into the owners' buffers: the strongest simple exchange.

    Args:
        plan: from :func:`serial_plan`.
        layout, rank: whose rows and heads.
        slots: [P, B, most local rows, H, d], slot 0 is ``plan.first_rank``.
        scratch: [B, rows of q, h, d].
    """

    def __init__(self, plan: SerialPlan, layout: UlyssesLayout, rank: int, slots: torch.Tensor, scratch: torch.Tensor) -> None:
        start, count = layout.head_start(rank), layout.heads[rank]
        heads = slice(start, start + count)
        self._pairs = []
        for copy in plan.copies:
            rows = scratch[:, copy.first_row : copy.first_row + copy.slots * copy.rows].unflatten(1, (copy.slots, copy.rows))
            end = copy.local_row + copy.rows
            owners = slots[copy.slot : copy.slot + copy.slots, :, copy.local_row : end, heads].transpose(0, 1)
            self._pairs.append((owners, rows))

    def __call__(self) -> None:
        for owners, rows in self._pairs:
            owners.copy_(rows)


class NcclExchange:
    """``all_to_all_single`` and a permute; needs no span. Rows that more than one rank needs are sent to each of them.

    A scratch in sequence order of one sequence without shared rows is sent as it lies; any other is packed first.

    Args:
        layout, rank, q_order: whose rows, and the order of the scratch.
        scratch: [B, rows of q, h, d].
        out: [B, S_local, H, d], any strides.
        group: the ranks.
    """

    def __init__(
        self, layout: UlyssesLayout, rank: int, q_order: str, scratch: torch.Tensor, out: torch.Tensor, group: Any
    ) -> None:
        import torch

        self._group, self._out = group, out
        batch, heads, head_dim = layout.batch, layout.heads[rank], layout.head_dim
        local = [layout.local_rows(owner) for owner in range(layout.ranks)]
        self._send_sizes = [batch * rows * heads * head_dim for rows in local]
        self._receive_sizes = [batch * local[rank] * theirs * head_dim for theirs in layout.heads]
        self._received = torch.empty(sum(self._receive_sizes), dtype=scratch.dtype, device=scratch.device)
        pieces = _pieces(layout, rank, q_order)
        if batch == 1 and [row for part in pieces for row in part] == list(range(scratch.shape[1])):
            self._send, self._packing = scratch.view(-1), []
        else:
            self._send = torch.empty(sum(self._send_sizes), dtype=scratch.dtype, device=scratch.device)
            packed = [
                part.view(batch, rows, heads, head_dim)
                for part, rows in zip(self._send.split(self._send_sizes), local, strict=True)
            ]
            self._packing = [pair for i in range(layout.ranks) for pair in _row_copies(packed[i], scratch, pieces[i])]
        self._unpacking = _head_copies(layout, rank, out, self._received, self._receive_sizes)

    def __call__(self) -> torch.Tensor:
        """Exchange the scratch as it now is. The output is complete in stream order."""
        import torch.distributed as dist

        for packed, rows in self._packing:
            packed.copy_(rows)
        dist.all_to_all_single(self._received, self._send, self._receive_sizes, self._send_sizes, group=self._group)
        for heads, received in self._unpacking:
            heads.copy_(received)
        return self._out


def exchange_nccl(
    scratch: torch.Tensor, out: torch.Tensor, layout: UlyssesLayout, rank: int, q_order: str = "sequence", group: Any = None
) -> torch.Tensor:
    """Deliver ``scratch`` [B, rows of q, h, d] into ``out`` [B, S_local, H, d] of all ranks. Collective; takes memory.

    For many calls keep a :class:`NcclExchange`.
    """
    return NcclExchange(layout, rank, q_order, scratch, out, group)()


def _pieces(layout: UlyssesLayout, rank: int, q_order: str) -> list[list[int]]:
    """For each owner the rows of the scratch that are its local rows, in order."""
    if q_order == "sequence":
        return [[row for part in layout.local_ranges(owner) for row in part] for owner in range(layout.ranks)]
    starts = [layout.delivery_start(rank, owner, q_order) for owner in range(layout.ranks)]
    return [list(range(start, start + layout.local_rows(owner))) for owner, start in enumerate(starts)]


def _row_copies(packed: torch.Tensor, scratch: torch.Tensor, rows: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Copies of whole stretches of ``rows``, which may have one gap (shared rows stand apart from own ones)."""
    copies, start = [], 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or rows[i] != rows[i - 1] + 1:
            copies.append((packed[:, start:i], scratch[:, rows[start] : rows[i - 1] + 1]))
            start = i
    return copies


def _head_copies(
    layout: UlyssesLayout, rank: int, out: torch.Tensor, received: torch.Tensor, sizes: list[int]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The permute: one copy where all ranks compute equally many heads, else one a rank."""
    batch, rows, _, head_dim = layout.out_shape(rank)
    if len(set(layout.heads)) == 1:
        parts = received.view(layout.ranks, batch, rows, layout.heads[0], head_dim)
        return [(out.unflatten(2, (layout.ranks, layout.heads[0])), parts.permute(1, 2, 0, 3, 4))]
    copies = []
    for source, part in enumerate(received.split(sizes)):
        start, count = layout.head_start(source), layout.heads[source]
        copies.append((out[:, :, start : start + count], part.view(batch, rows, count, head_dim)))
    return copies
