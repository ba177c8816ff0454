"""What each arm of ab_ulysses.py runs, and where this rank's rows are afterwards; all over one span and the same q, k and v."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from ulysses_figures import ATTENTION, BY_OWNER, COPY, FUSED, LAUNCHED, NCCL, OWN_FIRST, SENDER

from xstage_plugin.attention import layout as layouts
from xstage_plugin.attention.backends import AttentionBackend
from xstage_plugin.attention.delivery import FusedDelivery
from xstage_plugin.attention.launch_plan import fused_plan, serial_plan
from xstage_plugin.attention.layout import SEQUENCE, UlyssesLayout
from xstage_plugin.attention.peer_span import PeerSpan
from xstage_plugin.attention.routes import INPUTS, FusedRoute
from xstage_plugin.attention.serial import LocalAttention, NcclExchange, exchange_nccl
from xstage_plugin.attention.ulysses import UlyssesCall, prepare_ulysses


@dataclass(frozen=True)
class Steps:
    """One arm. ``result`` gives this rank's rows, [1, S / P, H, d], after ``call`` has ended on every rank."""

    call: Callable[[], object]
    result: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Inputs:
    """q, k and v of one rank, [1, S, h, d], rows as in the sequence; ``group`` is for the NCCL exchanges."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    group: Any


class UlyssesArms:
    """The arms of one case on one rank. Collective.

    Attributes:
        steps: by the arm's name.
        scratch, out: of ``serial nccl``: attention's output of the whole sequence, and this rank's rows of all heads.
        poisonable: every tensor that an arm writes.
    """

    def __init__(self, layout: UlyssesLayout, rank: int, backend: AttentionBackend, inputs: Inputs, span: PeerSpan) -> None:
        self._layout, self._rank, self._inputs = layout, rank, inputs
        q, k, v = inputs.q, inputs.k, inputs.v
        scale = layout.head_dim**-0.5
        # The exchange before attention delivers q in any order; here it is put there once, outside the timing.
        last, first = (self._ordered(q, order) for order in (layouts.OWN_LAST, layouts.OWN_FIRST))

        def prepared(mode: str, order: str) -> UlyssesCall:
            options: dict[str, Any] = {"backend": backend, "mode": mode, "q_order": order, "ordering": INPUTS}
            return prepare_ulysses(layout, q.dtype, device=q.device, span=span, **options)

        fused, own_first = prepared("fused", layouts.OWN_LAST), prepared("fused", layouts.OWN_FIRST)
        copy = prepared("serial", layouts.OWN_LAST)
        # As launched: what the fused kernel stores, at the same distances, into this GPU's memory.
        plan = fused_plan(layout, rank, layouts.OWN_LAST)
        slots = span.slots(plan.first_rank)
        self._local = torch.empty_strided(slots.shape, slots.stride(), dtype=slots.dtype, device=slots.device)
        launched = FusedDelivery(plan, layout, rank, self._local, q.dtype, backend, scale, False)
        by_owner = fused_plan(layout, rank, layouts.OWN_LAST, head_by_head=False)
        owners = FusedRoute(span, FusedDelivery(by_owner, layout, rank, slots, q.dtype, backend, scale, False), INPUTS)
        attention = LocalAttention(
            serial_plan(layout, rank, SEQUENCE), layout, rank, span.dtype, q.device, backend, scale, False
        )
        self.scratch = attention.scratch
        self.out = torch.empty(layout.out_shape(rank), dtype=span.dtype, device=q.device)
        exchange = NcclExchange(layout, rank, SEQUENCE, self.scratch, self.out, inputs.group)
        self._attend = lambda: attention(q, k, v)
        self.poisonable = (self._local, span.local(), self.scratch, self.out)
        self.steps = {
            ATTENTION.name: Steps(self._attend, self._exchanged),
            LAUNCHED.name: Steps(lambda: launched.store(last, k, v), self._gathered),
            SENDER.name: Steps(lambda: fused.issue(last, k, v), span.local),
            FUSED.name: Steps(lambda: fused(last, k, v), span.local),
            OWN_FIRST.name: Steps(lambda: own_first(first, k, v), span.local),
            BY_OWNER.name: Steps(lambda: owners(last, k, v), span.local),
            NCCL.name: self.serial(exchange),
            COPY.name: Steps(lambda: copy(last, k, v), span.local),
        }

    def serial(self, exchange: Callable[[], object]) -> Steps:
        """Attention into ``scratch``, then an exchange of it into ``out``."""

        def call() -> None:
            self._attend()
            exchange()

        return Steps(call, lambda: self.out)

    def _ordered(self, q: torch.Tensor, order: str) -> torch.Tensor:
        return torch.cat([q[:, part.start : part.stop] for part in self._layout.q_ranges(self._rank, order)], 1)

    def _exchanged(self) -> torch.Tensor:
        """The rows of attention alone, brought to their owners after the fact."""
        out = torch.empty_like(self.out)
        return exchange_nccl(self.scratch, out, self._layout, self._rank, SEQUENCE, self._inputs.group)

    def _gathered(self) -> torch.Tensor:
        """The same of attention as it is launched for the fused path."""
        start, count = self._layout.head_start(self._rank), self._layout.heads[self._rank]
        scratch = self._local[:, :, :, start : start + count].transpose(0, 1).flatten(1, 2).contiguous()
        out = torch.empty_like(self.out)
        return exchange_nccl(scratch, out, self._layout, self._rank, layouts.OWN_LAST, self._inputs.group)
