"""Spans that layers of the same shape share: one layer's result is used up before the next one's is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xstage_plugin.attention.peer_span import PeerSpan

if TYPE_CHECKING:
    import torch

_spans: dict[tuple[Any, tuple[int, ...], Any, Any], PeerSpan] = {}


def shared_span(shape: tuple[int, ...], dtype: torch.dtype, group: Any, device: torch.device) -> PeerSpan:
    """The open span of this shape, type, group and device; made where there is none, which is collective.

    Raises:
        SpanRefusedError: on every rank alike.
    """
    key = (group, shape, dtype, device)
    if key not in _spans or _spans[key].closed:
        _spans[key] = PeerSpan(shape, dtype, group, device=device)
    return _spans[key]


def close_shared_spans() -> None:
    """Close every span made here. Results that lie in them are gone."""
    for span in _spans.values():
        span.close()
    _spans.clear()
