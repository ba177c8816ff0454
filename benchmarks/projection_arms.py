"""What each arm of ab_projection.py runs, over one span, the same q, k and v and the same weight.

Every complete arm is what a caller of ulysses_attention gets who brings q, k and v: ranks meet before they store, so that
nobody's rows are overwritten while its projection reads them. Arms without flags meet once more before the projection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from projection_figures import (
    ARRIVING,
    ATTENTION,
    BY_OWNER,
    COPY,
    FLAGGED,
    FLAGS,
    FUSED,
    LAUNCHED,
    NCCL,
    PROJECTION,
    SILENT,
)
from ulysses_arms import Inputs

from xstage_plugin.attention.arrivals import ArrivalCounters
from xstage_plugin.attention.arriving_backend import ArrivingBackend
from xstage_plugin.attention.backends import AttentionBackend
from xstage_plugin.attention.delivery import FusedDelivery
from xstage_plugin.attention.launch_plan import fused_plan, serial_plan
from xstage_plugin.attention.layout import OWN_LAST, SEQUENCE, UlyssesLayout
from xstage_plugin.attention.projection import OutputProjection
from xstage_plugin.attention.routes import Span
from xstage_plugin.attention.serial import LocalAttention, NcclExchange, exchange_nccl
from xstage_plugin.attention.ulysses import prepare_ulysses


@dataclass(frozen=True)
class Steps:
    """One arm.

    Attributes:
        call: what is timed.
        rows: this rank's rows, [1, S / P, H, d], after ``call`` has ended on every rank; None: the arm has none of its own.
        projection: its ``result`` is that of ``projected_rows()``.
        projected_rows: what was projected.
        counted: whether the counters show that many calls; None: the arm has no counters of its own.
    """

    call: Callable[[], object]
    rows: Callable[[], torch.Tensor] | None = None
    projection: OutputProjection | None = None
    projected_rows: Callable[[], torch.Tensor] | None = None
    counted: Callable[[int], bool] | None = None


class ProjectionArms:
    """The arms of one case on one rank. Collective.

    Args:
        layout, rank: even rows and heads, one sequence.
        stock, arriving: the kernel as it comes, and the one that announces.
        inputs: q, k and v.
        span: for the output of all arms.
        weight: [out, H d].
        counters: for the arms with flags; default: those of the span.

    Attributes:
        steps: by the arm's name.
        poisonable: every tensor that an arm writes.
    """

    def __init__(
        self,
        layout: UlyssesLayout,
        rank: int,
        stock: AttentionBackend,
        arriving: ArrivingBackend,
        inputs: Inputs,
        span: Span,
        weight: torch.Tensor,
        counters: ArrivalCounters | None = None,
    ) -> None:
        self._layout, self._rank, self._inputs, self._weight = layout, rank, inputs, weight
        self._block_rows = arriving.block_rows(layout.head_dim, inputs.q.dtype, False)
        self.poisonable: list[torch.Tensor] = [span.local()]
        q, k, v, device = inputs.q, inputs.k, inputs.v, inputs.q.device
        last = torch.cat([q[:, part.start : part.stop] for part in layout.q_ranges(rank, OWN_LAST)], 1)

        def local(kernel: AttentionBackend, counts: torch.Tensor | None = None) -> tuple[Callable[[], object], torch.Tensor]:
            """The fused launches of ``kernel``, storing at the same distances into this GPU's memory."""
            plan = fused_plan(layout, rank, OWN_LAST)
            slots = span.slots(plan.first_rank)
            memory = torch.empty_strided(slots.shape, slots.stride(), dtype=slots.dtype, device=device)
            self.poisonable.append(memory)
            delivery = FusedDelivery(plan, layout, rank, memory, q.dtype, kernel, layout.head_dim**-0.5, False, counts)
            return lambda: delivery.store(last, k, v), memory

        def complete(backend: AttentionBackend, mode: str = "fused", **more: Any) -> Steps:
            projection = self._projection()
            options: dict[str, Any] = {"backend": backend, "mode": mode, "q_order": OWN_LAST, "consume": projection}
            call = prepare_ulysses(layout, q.dtype, device=device, span=span, counters=counters, **options | more)
            return Steps(lambda: call(last, k, v), span.local, projection, span.local)

        steps = serial_plan(layout, rank, SEQUENCE)
        attention = LocalAttention(steps, layout, rank, span.dtype, device, stock, layout.head_dim**-0.5, False)
        out = torch.empty(layout.out_shape(rank), dtype=span.dtype, device=device)
        exchange = NcclExchange(layout, rank, SEQUENCE, attention.scratch, out, inputs.group)
        self._out = out
        self.poisonable += [attention.scratch, out]
        behind_nccl, alone = self._projection(), self._projection()
        generator = torch.Generator(device).manual_seed(rank)
        fixed = torch.randn(out.shape, dtype=out.dtype, device=device, generator=generator)

        def serial() -> None:
            attention(q, k, v)
            exchange()
            behind_nccl(out, 0)

        counts = torch.zeros(layout.ranks, *layout.span_shape[:2], dtype=torch.int32, device=device)
        launched, silent, flagged = local(stock), local(arriving), local(arriving, counts)
        self._counts = counts
        self.steps = {
            ATTENTION.name: Steps(lambda: attention(q, k, v), lambda: self._exchanged(attention.scratch, SEQUENCE)),
            LAUNCHED.name: Steps(launched[0], lambda: self._gathered(launched[1])),
            SILENT.name: Steps(silent[0], lambda: self._gathered(silent[1])),
            FLAGGED.name: Steps(flagged[0], lambda: self._gathered(flagged[1]), counted=self._counted),
            PROJECTION.name: Steps(lambda: alone(fixed, 0), None, alone, lambda: fixed),
            NCCL.name: Steps(serial, lambda: out, behind_nccl, lambda: out),
            COPY.name: complete(stock, "serial"),
            FUSED.name: complete(stock),
            # The same kernel object behind a front that announces nothing: its rows come behind the closing barrier.
            ARRIVING.name: complete(Silent(arriving)),
            **{arm.name: complete(arriving, parts=parts) for parts, arm in FLAGS.items()},
            BY_OWNER.name: complete(arriving, parts=1, head_by_head=False),
        }

    def begin_check(self) -> None:
        """What an arm writes holds NaN, and its counters of local memory 0."""
        for tensor in self.poisonable:
            tensor.fill_(float("nan"))
        self._counts.zero_()

    def _projection(self) -> OutputProjection:
        made = OutputProjection(self._weight, batch=1, rows=self._layout.local_rows(self._rank))
        self.poisonable.append(made.result)
        return made

    def _counted(self, calls: int) -> bool:
        """Every block of every slot was raised by each of this rank's heads in each call, and nothing else was."""
        expected = torch.zeros_like(self._counts)
        expected[:, :, :: self._block_rows] = calls * self._layout.heads[self._rank]
        return torch.equal(self._counts, expected)

    def _exchanged(self, scratch: torch.Tensor, order: str) -> torch.Tensor:
        """The rows of attention alone, brought to their owners after the fact."""
        return exchange_nccl(scratch, torch.empty_like(self._out), self._layout, self._rank, order, self._inputs.group)

    def _gathered(self, memory: torch.Tensor) -> torch.Tensor:
        """The same of attention as it is launched for the fused path."""
        start, count = self._layout.head_start(self._rank), self._layout.heads[self._rank]
        scratch = memory[:, :, :, start : start + count].transpose(0, 1).flatten(1, 2).contiguous()
        return self._exchanged(scratch, OWN_LAST)


class Silent:
    """A kernel that can announce, as one that cannot."""

    def __init__(self, kernel: AttentionBackend) -> None:
        self.name, self.refusal, self._kernel = kernel.name, kernel.refusal, kernel

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *, softmax_scale: float, causal: bool
    ) -> None:
        self._kernel(q, k, v, out, softmax_scale=softmax_scale, causal=causal)
