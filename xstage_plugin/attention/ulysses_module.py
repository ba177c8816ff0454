"""The module class behind ``ulysses.UlyssesAttention``: both exchanges and the attention between them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from xstage_plugin.attention.agreement import agree, group_or_world, require_same
from xstage_plugin.attention.arrivals import ArrivalCounters
from xstage_plugin.attention.backends import AUTO, AttentionBackend
from xstage_plugin.attention.consumption import Consumer
from xstage_plugin.attention.input_exchange import InputAllToAll, InputExchange, input_span_shape
from xstage_plugin.attention.layout import OWN_LAST, UlyssesLayout
from xstage_plugin.attention.mode_choice import AUTO as AUTO_MODE
from xstage_plugin.attention.routes import INPUTS, Span
from xstage_plugin.attention.span_cache import shared_span
from xstage_plugin.attention.span_errors import SpanClosedError
from xstage_plugin.attention.ulysses import prepare_ulysses
from xstage_plugin.attention.ulysses_call import UlyssesCall
from xstage_plugin.attention.ulysses_op import enlist
from xstage_plugin.errors import InvalidInputError

if TYPE_CHECKING:
    import torch


@cache
def module_class() -> Any:
    """:class:`UlyssesAttention`, a ``torch.nn.Module``; made on the first call, because naming its base imports torch."""
    import torch

    class UlyssesAttention(torch.nn.Module):  # type: ignore[misc]
        """A Ulysses attention layer: from this rank's rows of all heads to the same, over the whole sequence.

        Making it is collective and takes memory; ``forward`` launches only. Layers of one shape share their spans. Forward
        only; no parameters.

        Args:
            layout: rows and heads of all ranks.
            dtype, device: of q, k and v.
            group, backend, mode, softmax_scale, causal, platform, consume, parts: as in :func:`ulysses_attention`.
            span, input_span: memory for the output (``layout.span_shape``) and for q, k and v
                (``input_span_shape(layout)`` elements); default: spans that layers of this shape share. Ranks that cannot
                have one exchange through ``all_to_all_single``, before attention too; ``fused`` is refused there.
            counters: as in :func:`prepare_ulysses`.

        Raises:
            GroupMismatchError, SpanRefusedError: on every rank alike.
        """

        def __init__(
            self,
            layout: UlyssesLayout,
            dtype: torch.dtype,
            *,
            device: torch.device | str = "cuda",
            group: Any = None,
            span: Span | None = None,
            input_span: Span | None = None,
            backend: str | AttentionBackend = AUTO,
            mode: str = AUTO_MODE,
            softmax_scale: float | None = None,
            causal: bool = False,
            platform: str | None = None,
            consume: Consumer | None = None,
            parts: int | None = None,
            counters: ArrivalCounters | None = None,
        ) -> None:
            super().__init__()
            # The exchange before attention meets every rank after its last use of the previous result: no entry barrier.
            call = prepare_ulysses(
                layout,
                dtype,
                device=device,
                group=group,
                span=span,
                backend=backend,
                mode=mode,
                softmax_scale=softmax_scale,
                causal=causal,
                q_order=OWN_LAST,
                ordering=INPUTS,
                platform=platform,
                consume=consume,
                parts=parts,
                counters=counters,
            )
            group = group_or_world(group)
            needed = (input_span_shape(layout), dtype)
            given = agree(group, lambda: _given(input_span, *needed))
            require_same(given, "whether input_span= is given")
            device = call.buffer.device
            exchange: InputExchange | InputAllToAll
            with torch.inference_mode(False):
                if call.span is None and input_span is None:
                    exchange = InputAllToAll(layout, call.rank, dtype, device, group)
                else:
                    inputs = input_span or shared_span(*needed, group, device)
                    exchange = InputExchange(inputs, layout, call.rank)
            self.call = call
            self._layer = _Layer(call, exchange)
            self._key = enlist(self._layer)

        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            """q [B, S_local, H, d], k and v [B, S_local, H_kv, d], shared rows on every rank -> [B, S_local, H, d].

            The result is valid in stream order until the next layer that shares the span runs, on any rank.

            Raises:
                InvalidInputError: q, k or v do not fit.
                SpanClosedError: one of its spans was closed.
            """
            self._layer.check(q, k, v)
            if self.call.consumption is None:
                torch.ops.xstage.ulysses_deliver(q, k, v, self._layer.out, self._key)
            else:
                self._layer.run(q, k, v)
            return self._layer.out

        def extra_repr(self) -> str:
            return f"{self.call.mode}, {self.call.backend.name}, {self.call.reason}"

    return UlyssesAttention


class _Layer:
    """What the torch operator runs for a module."""

    def __init__(self, call: UlyssesCall, exchange: InputExchange | InputAllToAll) -> None:
        layout = call.layout
        self.out, self._call, self._exchange = call.out, call, exchange
        rows = (layout.batch, layout.local_rows(call.rank))
        kv_shape = (*rows, layout.total_kv_heads, layout.head_dim)
        self._shapes = ((*rows, layout.total_heads, layout.head_dim), kv_shape, kv_shape)

    def check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        span = self._call.span
        if self._exchange.closed or (span is not None and span.closed):
            raise SpanClosedError("a span of this Ulysses layer was closed; make a new layer")
        self._call.require(zip("qkv", (q, k, v), self._shapes, strict=True))

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self._exchange.push(q, k, v)
        self._exchange.meet()
        try:
            self._call.run(self._exchange.q, self._exchange.k, self._exchange.v)
        finally:
            # Without a closing barrier a peer's kernel may still read what the exchange brought, and the next layer that
            # shares the memory, of whatever kind, stores there.
            if self._call.consumption is not None and not self._call.consumption.meets:
                self._exchange.meet()


def _given(span: Span | None, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    if span is not None and (tuple(span.shape), span.dtype) != (shape, dtype):
        raise InvalidInputError(f"input_span is {tuple(span.shape)} of {span.dtype}; this layout expects {shape} of {dtype}")
    return span is not None
