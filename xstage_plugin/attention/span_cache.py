"""Spans that layers of the same shape share: one layer's result is used up before the next one's is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xstage_plugin.attention.agreement import agree
from xstage_plugin.attention.arrival_wait import StreamWait
from xstage_plugin.attention.arrivals import ArrivalCounters, counter_shape
from xstage_plugin.attention.layout import UlyssesLayout
from xstage_plugin.attention.peer_span import PeerSpan

if TYPE_CHECKING:
    import torch

    from xstage_plugin.attention.routes import Span

_spans: dict[tuple[Any, tuple[int, ...], Any, Any], PeerSpan] = {}
# By output span: two spans' layers may run beside each other, those of one never do.
_counters: dict[Any, ArrivalCounters] = {}


def shared_span(shape: tuple[int, ...], dtype: torch.dtype, group: Any, device: torch.device) -> PeerSpan:
    """The open span of this shape, type, group and device; made where there is none, which is collective.

    Raises:
        SpanRefusedError: on every rank alike.
    """
    key = (group, shape, dtype, device)
    if key not in _spans or _spans[key].closed:
        _spans[key] = PeerSpan(shape, dtype, group, device=device)
    return _spans[key]


def shared_counters(span: Span, layout: UlyssesLayout) -> ArrivalCounters:
    """The arrival counters of the output span ``span``; made where there are none, which is collective.

    Raises:
        GroupMismatchError: on every rank alike: no span, or one of them cannot load the waiting kernel.
    """
    import torch

    if span not in _counters or _counters[span].span.closed:
        memory = PeerSpan(counter_shape(layout), torch.int32, span.group, device=span.device)
        _spans[span, memory.shape, memory.dtype, memory.device] = memory
        made: list[ArrivalCounters] = []
        agree(span.group, lambda: made.append(ArrivalCounters(memory, StreamWait(span.device))))
        _counters[span] = made[0]
    return _counters[span]


def close_shared_spans() -> None:
    """Close every span made here. Results that lie in them are gone."""
    for span in _spans.values():
        span.close()
    _spans.clear()
    _counters.clear()
