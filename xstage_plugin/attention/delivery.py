"""Fused delivery: the attention kernel's own epilogue stores every output tile into the memory of the rank that owns it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

from xstage_plugin.attention.launch_plan import FusedPlan, Launch

if TYPE_CHECKING:
    import torch

    from xstage_plugin.attention.arriving_backend import ArrivingBackend
    from xstage_plugin.attention.backends import AttentionBackend
    from xstage_plugin.attention.layout import UlyssesLayout


class Awaited(NamedTuple):
    """This rank's own counters, int32 [B, local rows], and how many tiles make a block of them complete."""

    awaits: torch.Tensor
    expected: int


def slot_outputs(launches: tuple[Launch, ...], slots: torch.Tensor, heads: slice) -> tuple[torch.Tensor, ...]:
    """For each launch the rows that it writes, as the kernel takes them: [b, rows, h, d].

    Args:
        launches: of a :class:`FusedPlan`.
        slots: [P, B, most local rows, H, d], slot 0 is the plan's ``first_rank``. Any tensor with these dimensions: a
            span's slots, or local memory of the same strides (what attention alone costs).
        heads: the heads that this rank computes.
    """

    def output(launch: Launch) -> torch.Tensor:
        if launch.element is None:
            return slots[launch.slot, :, : launch.rows, heads]
        owners = slice(launch.slot, launch.slot + launch.slots)
        return _for_kernel(launch, slots[owners, launch.element, : launch.rows, heads])

    return tuple(output(launch) for launch in launches)


def slot_arrivals(launches: tuple[Launch, ...], counters: torch.Tensor, heads: int) -> tuple[torch.Tensor, ...]:
    """For each launch the arrival counters of its tiles, as the kernel takes them: [b, h, rows].

    Args:
        launches: of a :class:`FusedPlan`.
        counters: [P, B, most local rows], slot 0 is the plan's ``first_rank``.
        heads: number of heads that this rank computes; all of them raise the same counters.
    """
    rows = counters[..., None, None].expand(*counters.shape, heads, 1)
    return tuple(entries[..., 0].transpose(1, 2) for entries in slot_outputs(launches, rows, slice(heads)))


def run_launches(
    launches: tuple[Launch, ...],
    outputs: tuple[torch.Tensor, ...],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    backend: AttentionBackend,
    softmax_scale: float,
    causal: bool,
    arrivals: tuple[torch.Tensor, ...] | None = None,
    awaited: Awaited | None = None,
) -> None:
    """Run ``launches`` on q [B, rows, h, d], k and v [B, S, h_kv, d] into ``outputs``, on the current stream.

    ``arrivals``: counters that the launches raise, by an :class:`ArrivingBackend`; None: they announce nothing.
    ``awaited``: what the last of them waits for before it ends.
    """
    for number, (launch, out) in enumerate(zip(launches, outputs, strict=True), 1):
        if launch.element is None:
            rows = q[:, launch.first_row : launch.first_row + launch.rows]
            keys, values = k[:, : launch.kv_rows], v[:, : launch.kv_rows]
        else:
            end = launch.first_row + launch.slots * launch.rows
            rows = _for_kernel(launch, q[launch.element, launch.first_row : end].unflatten(0, (launch.slots, launch.rows)))
            keys, values = (_seen_by_all(launch, x[launch.element, : launch.kv_rows]) for x in (k, v))
        if arrivals is None:
            backend(rows, keys, values, out, softmax_scale=softmax_scale, causal=causal)
            continue
        last = awaited._asdict() if awaited is not None and number == len(launches) else {}
        announce = cast("ArrivingBackend", backend).announce
        announce(rows, keys, values, out, arrivals[number - 1], softmax_scale=softmax_scale, causal=causal, **last)


def _for_kernel(launch: Launch, rows: torch.Tensor) -> torch.Tensor:
    """[slots, rows, h, d] as the launch gives it to the kernel."""
    return rows.permute(2, 1, 0, 3) if launch.head_by_head else rows


def _seen_by_all(launch: Launch, keys: torch.Tensor) -> torch.Tensor:
    """Keys or values of one sequence, [S, h_kv, d], for every destination; nothing is copied."""
    if launch.head_by_head:
        return keys.transpose(0, 1).unsqueeze(2)
    return keys.expand(launch.slots, -1, -1, -1)


class FusedDelivery:
    """The launches of one rank, bound to the slots of a span.

    Args:
        plan: from :func:`fused_plan`, for the order in which q arrives.
        layout, rank: whose rows and heads.
        slots: [P, B, most local rows, H, d], slot 0 is ``plan.first_rank``.
        dtype: of q.
        backend, softmax_scale, causal: the attention.
        counters: [P, B, most local rows], slot 0 is ``plan.first_rank``: tiles raise these as they arrive, which takes an
            :class:`ArrivingBackend`. None: they arrive in silence.
        awaited: what the kernel waits for before it ends; needs ``counters``.
    """

    def __init__(
        self,
        plan: FusedPlan,
        layout: UlyssesLayout,
        rank: int,
        slots: torch.Tensor,
        dtype: torch.dtype,
        backend: AttentionBackend,
        softmax_scale: float,
        causal: bool,
        counters: torch.Tensor | None = None,
        awaited: Awaited | None = None,
    ) -> None:
        self._plan, self._backend, self._scale, self._causal = plan, backend, softmax_scale, causal
        start, count = layout.head_start(rank), layout.heads[rank]
        self._outputs = slot_outputs(plan.launches, slots, slice(start, start + count))
        self._arrivals = None if counters is None else slot_arrivals(plan.launches, counters, count)
        self._awaited = awaited
        self._gather = _Gather(layout, rank, plan.q_order, dtype, slots.device) if plan.gathers else None

    def prepare(self, q: torch.Tensor) -> torch.Tensor:
        """q in the order that the launches read; touches this rank's memory only."""
        return self._gather(q) if self._gather else q

    def store(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Attention and its stores to the peers, of what :meth:`prepare` returned."""
        how = (self._backend, self._scale, self._causal, self._arrivals, self._awaited)
        run_launches(self._plan.launches, self._outputs, q, k, v, *how)


class _Gather:
    """Copies q from sequence order into another one, into memory taken once."""

    def __init__(self, layout: UlyssesLayout, rank: int, q_order: str, dtype: torch.dtype, device: torch.device) -> None:
        import torch

        positions = [row for part in layout.q_ranges(rank, q_order) for row in part]
        self._index = torch.tensor(positions, device=device)
        shape = (layout.batch, layout.delivery_rows, layout.heads[rank], layout.head_dim)
        self._rows = torch.empty(shape, dtype=dtype, device=device)

    def __call__(self, q: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.index_select(q, 1, self._index, out=self._rows)
