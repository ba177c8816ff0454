"""Whether the ranks of a group can map each other's memory, from what each of them says of itself. Pure, no GPU."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from xstage_plugin.attention.agreement import require_same
from xstage_plugin.attention.span_errors import SpanRefusedError


@dataclass(frozen=True)
class SpanFacts:
    """What one rank brings to a span.

    Attributes:
        shape: elements of its buffer.
        dtype: name of the element type.
        device_type: ``cuda`` for a GPU.
        host: name and boot of the host, equal for ranks that share one.
        gpu: the GPU's UUID.
        unreachable: UUIDs of the GPUs that this process sees and whose memory its GPU cannot map.
    """

    shape: tuple[int, ...]
    dtype: str
    device_type: str
    host: str
    gpu: str
    unreachable: frozenset[str]


def require_mappable(facts: list[SpanFacts]) -> None:
    """All ranks can map each other's buffers; every rank decides this from the same ``facts``.

    Raises:
        SpanRefusedError: with the first reason that holds.
    """
    for rank, fact in enumerate(facts):
        if fact.device_type != "cuda":
            raise SpanRefusedError(f"rank {rank} asks for a span on {fact.device_type!r}; expected a CUDA device")
    require_same([fact.shape for fact in facts], "shape_per_rank", SpanRefusedError)
    require_same([fact.dtype for fact in facts], "dtype", SpanRefusedError)
    if prod(facts[0].shape) == 0:
        raise SpanRefusedError(f"shape_per_rank is {facts[0].shape}; expected at least one element")
    # Peers of another host need fabric handles, which nothing here has tried; see span_map.
    for rank, fact in enumerate(facts):
        if fact.host != facts[0].host:
            raise SpanRefusedError(f"ranks 0 and {rank} are on different hosts; a span takes the ranks of one host")
    seen: dict[str, int] = {}
    for rank, fact in enumerate(facts):
        other = seen.setdefault(fact.gpu, rank)
        if other != rank:
            raise SpanRefusedError(f"ranks {other} and {rank} share GPU {fact.gpu}; expected one GPU a rank")
    for rank, fact in enumerate(facts):
        for peer, other_fact in enumerate(facts):
            if peer != rank and other_fact.gpu in fact.unreachable:
                raise SpanRefusedError(
                    f"the GPU of rank {rank} ({fact.gpu}) has no peer access to that of rank {peer} ({other_fact.gpu}); "
                    "`xstage doctor` shows the links"
                )
