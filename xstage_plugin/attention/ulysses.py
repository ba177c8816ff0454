"""Ulysses attention whose output goes straight to the ranks that own it.

    out = ulysses_attention(q, k, v)       # this rank's heads over the whole sequence -> its rows of all heads

A call prepares itself the first time (collective, takes memory) and then only launches. For full control prepare it once
with :func:`prepare_ulysses`; for a layer that also does the exchange before attention use :class:`UlyssesAttention`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xstage_plugin.attention.agreement import agree, group_or_world, require_same
from xstage_plugin.attention.arrival_rows import UNWAITED
from xstage_plugin.attention.arrivals import ArrivalCounters
from xstage_plugin.attention.backends import AUTO, AttentionBackend, output_dtype
from xstage_plugin.attention.consumption import Consumer
from xstage_plugin.attention.layout import SEQUENCE, UlyssesLayout
from xstage_plugin.attention.mode_choice import AUTO as AUTO_MODE
from xstage_plugin.attention.mode_choice import FUSED, SERIAL, ModeChoice
from xstage_plugin.attention.peer_span import refuse_capture
from xstage_plugin.attention.routes import BARRIER, Span
from xstage_plugin.attention.span_cache import close_shared_spans, shared_counters, shared_span
from xstage_plugin.attention.span_errors import GroupMismatchError, SpanRefusedError
from xstage_plugin.attention.ulysses_call import UlyssesCall
from xstage_plugin.attention.ulysses_settings import SPOKEN, Fact, Settings, common_backend, examine
from xstage_plugin.checks import shown
from xstage_plugin.errors import InvalidInputError

if TYPE_CHECKING:
    import torch

__all__ = [
    "UlyssesAttention",  # noqa: F822 - made by __getattr__ below
    "UlyssesCall",
    "UlyssesLayout",
    "prepare_ulysses",
    "release_ulysses",
    "ulysses_attention",
]

_calls: dict[tuple[Any, ...], UlyssesCall] = {}


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: Any = None,
    layout: UlyssesLayout | None = None,
    span: Span | None = None,
    backend: str | AttentionBackend = AUTO,
    mode: str = AUTO_MODE,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_order: str = SEQUENCE,
    ordering: str = BARRIER,
    platform: str | None = None,
    consume: Consumer | None = None,
    parts: int | None = None,
) -> torch.Tensor:
    """Attention of this rank's heads over the whole sequence; returns this rank's rows of all heads.

    Every rank of ``group`` calls it with the same settings. The first call with given settings is collective, takes memory
    and is refused inside a CUDA-graph capture; later ones launch only. So a rank that alone changes a setting later waits for
    the others until the group's timeout. Forward only.

    Args:
        q: [B, S, h_local, d]; in a delivery order [B, rows of all ranks, h_local, d].
        k, v: [B, S, h_kv_local, d], rows as in the sequence.
        group: ranks that share the sequence; default: all.
        layout: rows and heads of all ranks; default: rows shared evenly, as many heads on every rank as here.
        span: for the output, of ``layout.span_shape``; default: one that layers of this shape share.
        backend: ``fa4``, ``fa3``, ``auto`` (the first of the two that runs on all ranks), or an object of your own.
        mode: ``fused``, ``serial`` (attention, then copies to the peers), or ``auto`` (the advisor decides).
        softmax_scale: default 1 / sqrt(d). Per-tensor scales of FP8 inputs go here (those of q and k) and onto the result.
        causal: row i of the sequence sees keys up to i.
        q_order: rows of q: ``sequence``, ``own_last`` or ``own_first`` (see :mod:`xstage_plugin.attention.layout`). With
            shared rows, ``sequence`` costs one copy of q; ``own_last`` never does, and no two ranks start at one peer.
        ordering: ``barrier``: ranks meet before they store, so that nobody's previous result is overwritten while read.
            ``inputs``: the caller's q, k, v came out of an exchange with every rank that ran after this rank's last use
            of the previous result (so in a Ulysses layer); no barrier before the stores.
            With ``barrier`` and a backend whose kernel waits for its rows (``fa4-arrival``, ``fa3-arrival``) that wait takes
            the place of the closing barrier: the call may end while a peer's kernel still reads its own q, k and v.
        platform: platform model for the advisor, a bundled name or a file; default $XSTAGE_PLATFORM, else a bundled one of
            this GPU's generation.
        consume: gets this rank's rows as they arrive, before the call returns: ``consume(rows, first_row)`` for consecutive
            parts, rows [B, n, H, d], on the current stream, which has waited for them. Take a backend that announces rows
            (``fa4-arrival``, ``fa3-arrival``) and ``fused``: there is no closing barrier then, the waits take its place. With
            any other it gets all rows at once, behind the exchange. Not under torch.compile.
        parts: most parts; default: one, for which the kernel itself waits.

    Returns:
        [B, S_local, H, d], a view of the span: valid in stream order until the next call that uses the same span, on any
        rank. Copy what must live longer.

    Raises:
        GroupMismatchError: on every rank alike (first call): the ranks disagree, or one of them cannot go on.
        SpanRefusedError: on every rank alike (first call, ``fused``): no span over these ranks.
        InvalidInputError: q, k or v do not fit the layout.
    """
    if parts == UNWAITED and consume is not None:
        raise InvalidInputError(
            "parts is 0, and nothing tells the consumer how to wait; expected 1 or more, or prepare_ulysses"
        )
    shapes = layout or (tuple(q.shape), tuple(k.shape))
    settings = (backend, mode, softmax_scale, causal, q_order, ordering, platform, consume is not None, parts)
    key = (group, shapes, span, q.dtype, q.device, *settings)
    # What cannot be kept is no setting either: preparing says so on all ranks.
    call = _calls.get(key) if _is_hashable(key) else None
    if call is None:
        _refuse_tracing()
        call = _calls[key] = prepare_ulysses(
            layout or _even_layout(q, k, group),
            q.dtype,
            device=q.device,
            group=group,
            span=span,
            backend=backend,
            mode=mode,
            softmax_scale=softmax_scale,
            causal=causal,
            q_order=q_order,
            ordering=ordering,
            platform=platform,
            consume=consume,
            parts=parts,
        )
        # Kept for all calls with these settings: it must not keep the first one's consumer.
        call.consumer = None
    return call(q, k, v, consume=consume)


def prepare_ulysses(
    layout: UlyssesLayout,
    dtype: torch.dtype,
    *,
    device: torch.device | str = "cuda",
    group: Any = None,
    span: Span | None = None,
    backend: str | AttentionBackend = AUTO,
    mode: str = AUTO_MODE,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_order: str = SEQUENCE,
    ordering: str = BARRIER,
    platform: str | None = None,
    consume: Consumer | None = None,
    parts: int | None = None,
    counters: ArrivalCounters | None = None,
    head_by_head: bool = True,
) -> UlyssesCall:
    """Everything that :func:`ulysses_attention` does once: agree with the other ranks, choose, take memory. Collective.

    Args:
        layout: the same on all ranks.
        dtype: of q, k and v.
        device: where they will be.
        group, span, backend, mode, softmax_scale, causal, q_order, ordering, platform: as in :func:`ulysses_attention`.
        consume: as there; calls may name another consumer. With ``ordering="inputs"`` the exchange before attention has one
            more duty: a call may end while a peer's kernel still reads its q, k and v, so an exchange that stores into a
            peer's memory must meet the peers first (one through NCCL does).
        parts: most parts; 0: the consumer gets all rows at once and before they are there: its kernels wait for them by the
            call's ``board`` (arrival.cuh).
        counters: for arrivals; default: those that all calls over the same output span share.
        head_by_head: order of the fused launches, see :func:`fused_plan`; for measurements.

    Raises:
        GroupMismatchError, SpanRefusedError: on every rank alike.
    """
    refuse_capture("a Ulysses call prepares itself")
    group = group_or_world(group)
    device = _with_index(device)
    asked = (mode, softmax_scale, causal, q_order, ordering, platform, consume is not None, parts, head_by_head)
    settings = Settings(layout, str(dtype), *asked)

    def look() -> Fact:
        if consume is not None and not callable(consume):
            raise InvalidInputError(f"consume is {shown(consume)}; expected a function of rows and first_row")
        return examine(settings, dtype, device, group, span, counters, backend)

    facts = agree(group, look)
    for name in settings.__dataclass_fields__:
        require_same([getattr(fact.settings, name) for fact in facts], SPOKEN.get(name, name))
    require_same([fact.has_span for fact in facts], "whether span= is given")
    require_same([fact.has_counters for fact in facts], "whether counters= is given")
    require_same([fact.choice.mode for fact in facts], "the mode that the platform model leads to")
    chosen, block_rows = common_backend(facts, backend)
    choice = facts[0].choice
    out_dtype = output_dtype(dtype)
    if span is None:
        try:
            span = shared_span(layout.span_shape, out_dtype, group, device)
        except SpanRefusedError as refused:
            if mode == FUSED:
                raise
            choice = ModeChoice(SERIAL, f"{refused}; the output goes through all_to_all_single")
    if span is None or block_rows is None or choice.mode != FUSED:
        counters = None
    elif counters is None:
        counters = shared_counters(span, layout)
    if parts == UNWAITED and consume is not None and counters is None:
        why = f"{chosen.name} does not announce {layout.seq_len} keys" if choice.mode == FUSED else f"the mode is {choice.mode}"
        raise GroupMismatchError(f"parts is 0 and no rows announce themselves ({why}); expected parts from 1 on")
    made: list[UlyssesCall] = []

    def make() -> None:
        made.append(UlyssesCall(settings, dtype, device, group, span, chosen, choice, counters, block_rows))

    agree(group, make)  # it takes memory, which one rank may not have
    made[0].consumer = consume
    return made[0]


def release_ulysses() -> None:
    """Forget all calls that :func:`ulysses_attention` prepared and close the spans that layers share. Results are gone."""
    _calls.clear()
    close_shared_spans()


def _is_hashable(key: tuple[Any, ...]) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True


def _refuse_tracing() -> None:
    """torch.compile would take the collective apart; an eager call first leaves it only the launch."""
    import torch

    if torch.compiler.is_compiling():
        raise InvalidInputError(
            "torch.compile met a Ulysses call that is not prepared; call it once before, or prepare_ulysses"
        )


def _even_layout(q: torch.Tensor, k: torch.Tensor, group: Any) -> UlyssesLayout:
    import torch.distributed as dist

    if q.dim() != 4 or k.dim() != 4:
        raise InvalidInputError(f"q is {tuple(q.shape)} and k {tuple(k.shape)}; expected [B, S, heads, d]")
    ranks = dist.get_world_size(group_or_world(group))
    batch, rows, heads, head_dim = q.shape
    return UlyssesLayout.even(rows, heads * ranks, head_dim, ranks, batch=batch, kv_heads=k.shape[2] * ranks)


def _with_index(device: torch.device | str) -> torch.device:
    import torch

    found = torch.device(device)
    if found.type == "cuda" and found.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return found


def __getattr__(name: str) -> Any:
    # A torch module class cannot be named without torch; it is made when somebody asks for it.
    if name == "UlyssesAttention":
        from xstage_plugin.attention.ulysses_module import module_class

        return module_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
