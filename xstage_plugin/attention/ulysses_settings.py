"""What the ranks of a Ulysses layer must agree on before it is prepared, and what each of them finds out for that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xstage_plugin.attention.agreement import require_same
from xstage_plugin.attention.arrival_rows import checked_parts
from xstage_plugin.attention.arrivals import ArrivalCounters, counter_shape
from xstage_plugin.attention.arriving_backend import awaits_rows, block_rows_of
from xstage_plugin.attention.backends import AttentionBackend, candidates, output_dtype
from xstage_plugin.attention.launch_plan import fused_plan
from xstage_plugin.attention.layout import UlyssesLayout
from xstage_plugin.attention.mode_choice import AUTO, ModeChoice, checked_mode, choose_mode
from xstage_plugin.attention.routes import BARRIER, ORDERINGS, Span
from xstage_plugin.attention.span_errors import GroupMismatchError
from xstage_plugin.burst_gap.catalog import platform_for
from xstage_plugin.checks import positive, shown, unknown_name
from xstage_plugin.errors import InvalidInputError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Settings:
    """What a rank asks for; must be equal on all of them."""

    layout: UlyssesLayout
    dtype: str
    mode: str
    softmax_scale: float | None
    causal: bool
    q_order: str
    ordering: str
    platform: str | None
    consumes: bool
    parts: int | None
    head_by_head: bool


# What the ranks are told where a setting differs: in the caller's words.
SPOKEN = {"consumes": "whether consume= is given"}


@dataclass(frozen=True)
class Fact:
    """What a rank found: the mode that it would run, and for each kernel why it cannot run it (empty if it can).

    ``block_rows``: for each kernel the rows of a block that it announces, None where it does not.
    """

    settings: Settings
    has_span: bool
    has_counters: bool
    choice: ModeChoice
    refusals: tuple[tuple[str, str], ...]
    block_rows: tuple[int | None, ...]


def examine(
    settings: Settings,
    dtype: torch.dtype,
    device: torch.device,
    group: Any,
    span: Span | None,
    counters: ArrivalCounters | None,
    backend: str | AttentionBackend,
) -> Fact:
    """What this rank finds of a call with ``settings``: looks at this rank only, launches nothing, takes no memory.

    Raises:
        InvalidInputError: it cannot be, with the first reason.
    """
    import torch
    import torch.distributed as dist

    layout, rank, ranks = settings.layout, dist.get_rank(group), dist.get_world_size(group)
    if not isinstance(layout, UlyssesLayout):
        raise InvalidInputError(f"layout is {shown(layout)}; expected a UlyssesLayout")
    if not isinstance(dtype, torch.dtype):
        raise InvalidInputError(f"dtype is {shown(dtype)}; expected a torch dtype")
    if layout.ranks != ranks:
        raise InvalidInputError(f"the layout is for {layout.ranks} ranks and the group has {ranks}; expected the same")
    if settings.ordering not in ORDERINGS:
        raise unknown_name("ordering", str(settings.ordering), ORDERINGS)
    if settings.softmax_scale is not None:
        positive("softmax_scale", settings.softmax_scale)
    layout.kv_heads_of(rank)
    fused_plan(layout, rank, settings.q_order, settings.causal)
    checked_parts(settings.parts)
    if not isinstance(settings.causal, bool):
        raise InvalidInputError(f"causal is {shown(settings.causal)}; expected True or False")
    if span is not None:
        _require_fits("the span", span, layout.span_shape, output_dtype(dtype), device, group)
    if counters is not None:
        _require_fits("the counter span", counters.span, counter_shape(layout), torch.int32, device, group)
    arch = _arch(device)
    platform = platform_for(settings.platform, arch, "bulk") if checked_mode(settings.mode) == AUTO else None
    choice = choose_mode(layout, settings.mode, platform, arch)
    kernels = candidates(backend)
    refusals = tuple((kernel.name, kernel.refusal(layout.head_dim, dtype, device)) for kernel in kernels)
    block_rows = tuple(
        block_rows_of(kernel, layout.head_dim, dtype, settings.causal, layout.seq_len)
        if not refused and _counts(settings, kernel)
        else None
        for kernel, (_, refused) in zip(kernels, refusals, strict=True)
    )
    return Fact(settings, span is not None, counters is not None, choice, refusals, block_rows)


def _counts(settings: Settings, kernel: AttentionBackend) -> bool:
    """Whether rows announce their arrival: to a consumer, or to a kernel that waits in place of the closing barrier.

    With ``inputs`` the caller's exchange may rely on that barrier: it also says that no peer reads its q, k and v any more.
    """
    return settings.consumes or (settings.ordering == BARRIER and awaits_rows(kernel))


def _require_fits(what: str, span: Span, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, group: Any) -> None:
    import torch.distributed as dist

    if span.closed:
        raise InvalidInputError(f"{what} is closed; make a new one")
    for name, got, expected in (
        ("shape", tuple(span.shape), shape),
        ("dtype", span.dtype, dtype),
        ("device", span.device, device),
        ("ranks", span.ranks, dist.get_world_size(group)),
        ("rank", span.rank, dist.get_rank(group)),
    ):
        if got != expected:
            raise InvalidInputError(f"{what}'s {name} is {got}; this layout expects {expected}")
    if span.group != group:
        raise InvalidInputError(f"{what} was made over another group of ranks; make one over this group")


def common_backend(facts: list[Fact], backend: str | AttentionBackend) -> tuple[AttentionBackend, int | None]:
    """The first kernel that runs on every rank, and the rows of a block that it announces; the same on all of them.

    Raises:
        GroupMismatchError: none does, or they announce other blocks; says why, for each of them.
    """
    require_same([tuple(name for name, _ in fact.refusals) for fact in facts], "backend")
    reasons = []
    for place, kernel in enumerate(candidates(backend)):
        refused = [(rank, fact.refusals[place][1]) for rank, fact in enumerate(facts) if fact.refusals[place][1]]
        if not refused:
            require_same([fact.block_rows[place] for fact in facts], f"rows of a block of {kernel.name}")
            return kernel, facts[0].block_rows[place]
        reasons.append(f"rank {refused[0][0]}: {refused[0][1]}")
    raise GroupMismatchError(f"no attention backend runs this on all ranks; {'; '.join(reasons)}")


def _arch(device: torch.device) -> str:
    import torch

    if device.type != "cuda" or not torch.cuda.is_available():
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
