"""A prepared Ulysses layer: memory taken, launches planned, nothing left to agree on."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from xstage_plugin.attention.arrival_rows import choose_parts
from xstage_plugin.attention.arrivals import ArrivalBoard, ArrivalCounters
from xstage_plugin.attention.arriving_backend import awaits_rows
from xstage_plugin.attention.backends import AttentionBackend, output_dtype
from xstage_plugin.attention.consumption import AfterExchange, AsRowsArrive, Consumer, Consumption
from xstage_plugin.attention.delivery import Awaited, FusedDelivery
from xstage_plugin.attention.launch_plan import fused_plan, serial_plan
from xstage_plugin.attention.layout import UlyssesLayout
from xstage_plugin.attention.mode_choice import FUSED, ModeChoice
from xstage_plugin.attention.routes import BARRIER, ArrivedRoute, FusedRoute, NcclRoute, PeerCopyRoute, Route, Span
from xstage_plugin.attention.serial import LocalAttention, NcclExchange, PeerCopy
from xstage_plugin.attention.span_errors import SpanClosedError
from xstage_plugin.attention.ulysses_op import enlist
from xstage_plugin.attention.ulysses_settings import Settings
from xstage_plugin.errors import InvalidInputError

if TYPE_CHECKING:
    import torch


class UlyssesCall:
    """A prepared layer: call it with q, k, v as often as you like. Made by :func:`prepare_ulysses`.

    Attributes:
        layout, mode, reason, backend, span, softmax_scale, causal, q_order, ordering: what it runs, and why this mode.
            ``span`` is None where ranks without a span go through ``all_to_all_single``.
        rank: this process in the group.
        buffer: [B, most local rows, H, d], what the peers write.
        out: [B, S_local, H, d], this rank's rows in it: what every call returns.
        key: name of the call for the torch operator.
        consumer: what its rows go to, for a call prepared with ``consume``.
        consumption: how it gets them; None for a call prepared without.
        board: counts what arrives; None where rows come behind the exchange.
    """

    def __init__(
        self,
        settings: Settings,
        dtype: torch.dtype,
        device: torch.device,
        group: Any,
        span: Span | None,
        backend: AttentionBackend,
        choice: ModeChoice,
        counters: ArrivalCounters | None = None,
        block_rows: int | None = None,
    ) -> None:
        import torch
        import torch.distributed as dist

        layout, self.rank = settings.layout, dist.get_rank(group)
        self.layout, self.mode, self.reason = layout, choice.mode, choice.reason
        self.backend, self.span = backend, span
        self.softmax_scale = settings.softmax_scale or 1 / math.sqrt(layout.head_dim)
        self.causal, self.q_order, self.ordering = settings.causal, settings.q_order, settings.ordering
        self._dtype, self._device = dtype, device
        # Memory made under inference_mode could not be written outside of it.
        with torch.inference_mode(False):
            self.buffer = self._buffer_of(span, layout, output_dtype(dtype))
            rows = layout.local_rows(self.rank)
            # Layers that share a span then also share the tensor, which spares torch.compile the case of aliased inputs.
            self.out = self.buffer if rows == self.buffer.shape[1] else self.buffer[:, :rows]
            self.board: ArrivalBoard | None = None
            if counters is not None and block_rows is not None:
                self.board = ArrivalBoard(counters, layout, self.rank, block_rows)
            self._route: Route | None = None
            self.consumption: Consumption | None = None
            if self.board is not None and span is not None:
                self._announce(span, self.board, settings)
            else:
                self._route = self._make_route(group, settings.head_by_head)
                if settings.consumes:
                    self.consumption = AfterExchange(self._route, self.out, choose_parts(rows, None, settings.parts))
        self.consumer: Consumer | None = None
        kv_heads = layout.kv_heads_of(self.rank)[1]
        self._q_shape = (layout.batch, layout.q_rows(self.q_order), layout.heads[self.rank], layout.head_dim)
        self._kv_shape = (layout.batch, layout.seq_len, kv_heads, layout.head_dim)
        self.key = enlist(self)

    def _announce(self, span: Span, board: ArrivalBoard, settings: Settings) -> None:
        """Rows announce themselves: to a consumer, part by part, or to the kernel, which then ends when all are there."""
        rows = self.layout.local_rows(self.rank)
        parts = choose_parts(rows, board.block_rows, settings.parts if settings.consumes else None)
        in_kernel = awaits_rows(self.backend) and len(parts.ranges) == 1 and parts.waits
        delivery = self._make_delivery(span, settings.head_by_head, board.awaited(rows) if in_kernel else None)
        if settings.consumes:
            enters = self.ordering == BARRIER
            self.consumption = AsRowsArrive(span, delivery, enters, board, self.out, parts, in_kernel)
        else:
            self._route = ArrivedRoute(span, delivery)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, consume: Consumer | None = None) -> torch.Tensor:
        """Attention and delivery, on the current stream; returns ``out``.

        ``consume``: takes the rows of this call instead of ``consumer``.

        Raises:
            InvalidInputError: q, k or v do not fit, a consumer is missing or was not prepared for; checked without talking to
                the other ranks.
            SpanClosedError: the span was closed.
        """
        import torch

        self.check(q, k, v)
        if self.consumption is None and consume is None:
            torch.ops.xstage.ulysses_deliver(q, k, v, self.out, self.key)
        else:
            self.run(q, k, v, consume)
        return self.out

    def issue(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """The call without its barriers (what the sender sees); for measurements, its result is not safe to use.

        Raises:
            InvalidInputError: as a call; and for one whose rows announce themselves, which must be waited for.
        """
        self.check(q, k, v)
        if self._route is None:
            raise InvalidInputError(
                "a call whose rows announce themselves cannot be issued alone; prepare one without consume="
            )
        self._route.issue(q, k, v)

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, consume: Consumer | None = None) -> None:
        """What the torch operator runs. Calls with a consumer do not go through it.

        Raises:
            InvalidInputError: a consumer is missing or was not prepared for.
        """
        consumer = self._consumer_or(consume)
        if self.consumption is not None and consumer is not None:
            self.consumption(q, k, v, consumer)
        elif self._route is not None:
            self._route(q, k, v)

    def _consumer_or(self, consume: Consumer | None) -> Consumer | None:
        import torch

        # A consumer may be false: a list that collects, empty at first.
        consumer = self.consumer if consume is None else consume
        if (consumer is None) != (self.consumption is None):
            missing = "no consumer was given to" if consumer is None else "a consumer was given to"
            prepared = "with" if consumer is None else "without"
            raise InvalidInputError(f"{missing} a Ulysses call prepared {prepared} one; prepare it with consume= or without")
        if consumer is not None and torch.compiler.is_compiling():
            # What a consumer writes is no argument of the operator: a compiler would move its readers.
            raise InvalidInputError("torch.compile met a Ulysses call with consume=; keep it outside: torch.compiler.disable")
        return consumer

    def check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """q, k and v are what the call was prepared for, and the span is still there.

        Raises:
            InvalidInputError: otherwise, naming the tensor.
            SpanClosedError: the span was closed.
        """
        if self.span is not None and self.span.closed:
            raise SpanClosedError("the output span of this Ulysses call was closed; make a new one and prepare again")
        if self.board is not None and self.board.closed:
            raise SpanClosedError("the arrival counters of this Ulysses call were closed; prepare it again")
        self.require((("q", q, self._q_shape), ("k", k, self._kv_shape), ("v", v, self._kv_shape)))

    def require(self, tensors: Iterable[tuple[str, torch.Tensor, tuple[int, ...]]]) -> None:
        """Each tensor has the shape beside it, and the type, device and form that the call was prepared for.

        Raises:
            InvalidInputError: otherwise, naming the tensor.
        """
        import torch

        for name, tensor, shape in tensors:
            if tuple(tensor.shape) != shape:
                raise InvalidInputError(f"{name} is {tuple(tensor.shape)}; this rank's layout expects {shape}")
            if tensor.dtype != self._dtype:
                raise InvalidInputError(f"{name} is {tensor.dtype}; the call was prepared for {self._dtype}")
            if tensor.device != self._device:
                raise InvalidInputError(f"{name} is on {tensor.device}; the call was prepared for {self._device}")
            if tensor.stride(-1) != 1:
                raise InvalidInputError(f"{name} has stride {tensor.stride(-1)} along the head dimension; expected 1")
            if tensor.requires_grad and torch.is_grad_enabled():
                raise InvalidInputError(f"{name} requires a gradient; this is forward only: call it under torch.no_grad()")

    def _buffer_of(self, span: Span | None, layout: UlyssesLayout, dtype: torch.dtype) -> torch.Tensor:
        import torch

        return torch.empty(layout.span_shape, dtype=dtype, device=self._device) if span is None else span.local()

    def _make_delivery(self, span: Span, head_by_head: bool, awaited: Awaited | None = None) -> FusedDelivery:
        layout, rank, scale, causal = self.layout, self.rank, self.softmax_scale, self.causal
        plan = fused_plan(layout, rank, self.q_order, causal, head_by_head)
        slots = span.slots(plan.first_rank)
        counters = None if self.board is None else self.board.slots(plan.first_rank)
        return FusedDelivery(plan, layout, rank, slots, self._dtype, self.backend, scale, causal, counters, awaited)

    def _make_route(self, group: Any, head_by_head: bool) -> Route:
        layout, rank, scale, causal = self.layout, self.rank, self.softmax_scale, self.causal
        if self.mode == FUSED and self.span is not None:
            return FusedRoute(self.span, self._make_delivery(self.span, head_by_head), self.ordering)
        steps = serial_plan(layout, rank, self.q_order, causal)
        attention = LocalAttention(steps, layout, rank, self.buffer.dtype, self._device, self.backend, scale, causal)
        if self.span is None:
            return NcclRoute(attention, NcclExchange(layout, rank, self.q_order, attention.scratch, self.out, group))
        copy = PeerCopy(steps, layout, rank, self.span.slots(steps.first_rank), attention.scratch)
        return PeerCopyRoute(self.span, attention, copy, self.ordering)
