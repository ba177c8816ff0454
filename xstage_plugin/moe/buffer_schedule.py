"""DeepGEMM's MegaMoE under a schedule of ours. Thin: the order lies in the kernel, the choice in schedule_choice.

The schedule of a symmetric buffer is a word in it that the kernel reads when it starts, so that it can be changed without a
compile. The order of tiles is each rank's own affair, and so is who copies a token: ranks that run different schedules
still get the right result. :func:`set_schedule` makes them agree all the same, since the slowest rank decides the time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from xstage_plugin import env
from xstage_plugin.burst_gap.catalog import platform_for
from xstage_plugin.checks import shown
from xstage_plugin.errors import InvalidInputError, XStageError
from xstage_plugin.moe.advisor import INTERLEAVED
from xstage_plugin.moe.all_ranks import DESTROYED, gather_or_raise
from xstage_plugin.moe.routing import balanced_routing
from xstage_plugin.moe.schedule_choice import AUTO, ScheduleChoice, choose_schedule
from xstage_plugin.moe.schedule_word import has_shared_pulls, read_choice, require_overlay, write_choice
from xstage_plugin.moe.workload import MoeWorkload

if TYPE_CHECKING:
    import torch

    from xstage_plugin.burst_gap.platform_model import PlatformModel


class ScheduleMismatchError(XStageError):
    """The ranks of a group asked for different schedules, or one of them could not choose; raised on all of them."""


def set_schedule(
    sym_buffer: Any, schedule: str = AUTO, lead: str | int = AUTO, *, pulls: str = AUTO, platform: str | None = None
) -> ScheduleChoice:
    """Set the schedule that MegaMoE runs on ``sym_buffer`` from now on. Collective over the buffer's group.

    Args:
        sym_buffer: what ``deep_gemm.get_symm_buffer_for_mega_moe`` returned.
        schedule: the order of tiles: ``auto`` (the advisor decides), ``wave`` (the original) or ``interleaved``.
        lead: rows that Linear-1 stays ahead, or ``auto``.
        pulls: ``stock``, ``shared`` (a token crosses the link once for all experts of a rank), or ``auto``: shared with an
            interleaved order, where the kernel can.
        platform: platform model for the advisor, a bundled name or a file; default $XSTAGE_PLATFORM, else a bundled one of
            this GPU's generation.

    Returns:
        What was set, with the reason. In stream order: launches before it keep the earlier schedule. A captured CUDA graph
        reads the word when it is replayed, so it follows.

    Raises:
        ScheduleMismatchError: on every rank, if they do not all ask for the same, or one of them cannot: it asks for
            nonsense, its overlay is not active (call ``xstage_plugin.register()`` first) or its buffer is gone.
    """
    return _set_together(sym_buffer, schedule, lead, pulls, platform)[1]


@contextlib.contextmanager
def schedule(
    sym_buffer: Any, schedule: str = AUTO, lead: str | int = AUTO, *, pulls: str = AUTO, platform: str | None = None
) -> Iterator[ScheduleChoice]:
    """:func:`set_schedule` for the calls inside the ``with``; afterwards the buffer has the schedule that it had before."""
    before, chosen = _set_together(sym_buffer, schedule, lead, pulls, platform, remember=True)
    try:
        yield chosen
    finally:
        if before is not None and sym_buffer.buffer is not None:
            write_choice(sym_buffer, before)


def current_schedule(sym_buffer: Any) -> ScheduleChoice:
    """What ``sym_buffer`` is set to. Waits for the GPU."""
    return read_choice(sym_buffer)


def _set_together(
    sym_buffer: Any, schedule: str, lead: str | int, pulls: str, platform: str | None, remember: bool = False
) -> tuple[ScheduleChoice | None, ScheduleChoice]:
    """What the buffer was set to, where that is to be remembered, and what it is set to now."""
    before, choice = None, None

    def look() -> tuple[int, str]:
        nonlocal before, choice
        choice = plan_schedule(sym_buffer, schedule, lead, pulls, platform)
        before = read_choice(sym_buffer) if remember else None
        return choice.lead_rows, choice.pulls

    answers = gather_or_raise(sym_buffer, "set_schedule", look, ScheduleMismatchError)
    for what, values in (
        ("leads of {} rows (0 is the expert wave)", [rows for rows, _ in answers]),
        ("pulls {}", [kind for _, kind in answers]),
    ):
        if len(set(values)) > 1:
            raise ScheduleMismatchError(f"the ranks ask for {what.format(values)}; expected the same on all")
    assert choice is not None  # a rank without one has a fault, and raised
    write_choice(sym_buffer, choice)
    return before, choice


def plan_schedule(
    sym_buffer: Any, schedule: str = AUTO, lead: str | int = AUTO, pulls: str = AUTO, platform: str | None = None
) -> ScheduleChoice:
    """What :func:`set_schedule` would set, as far as this rank alone knows. Sets nothing, asks nobody.

    Raises:
        InvalidInputError: a value that no rank can run.
        UpstreamError: the overlay is not active in this process.
    """
    require_overlay()
    if sym_buffer.buffer is None:
        raise InvalidInputError(DESTROYED)
    device = sym_buffer.buffer.device
    for name, value in (("schedule", schedule), ("lead", lead), ("pulls", pulls), ("platform", platform)):
        if value is not None and not isinstance(value, (str, int)):
            raise InvalidInputError(f"{name} is {shown(value)}; expected a name{' or a number' if name == 'lead' else ''}")
    chosen_from = (platform, env.default_platform(), _arch_of(device))
    _require_same_arch(_platform(*chosen_from), chosen_from[-1], schedule, lead)
    shape = (
        sym_buffer.hidden,
        sym_buffer.intermediate_hidden,
        sym_buffer.num_experts,
        sym_buffer.num_topk,
        sym_buffer.group.size(),
        sym_buffer.num_max_tokens_per_rank,
    )
    return _choose(shape, schedule, lead, pulls, chosen_from, has_shared_pulls(device))


@functools.lru_cache(maxsize=256)
def _choose(
    shape: tuple[int, ...],
    schedule: str,
    lead: str | int,
    pulls: str,
    chosen_from: tuple[str | None, str, str],
    can_share: bool,
) -> ScheduleChoice:
    """Cached: a call in a model's loop asks for the same thing each time."""
    hidden, intermediate, experts, topk, ranks, tokens = shape
    # What all ranks know alike: the shape, the most tokens that a rank brings, and no routing but a balanced one.
    workload = MoeWorkload(
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        topk=topk,
        ranks=ranks,
        tokens_per_rank=tokens,
        routing=balanced_routing(experts),
    )
    return choose_schedule(workload, schedule, lead, _platform(*chosen_from), pulls, can_share)


@functools.lru_cache(maxsize=8)
def _platform(name: str | None, _from_environment: str, arch: str) -> PlatformModel:
    """Of what the caller and the environment say; MegaMoE scatters with 16-byte stores."""
    return platform_for(name, arch, "st.v4")


def _arch_of(device: torch.device) -> str:
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _require_same_arch(model: PlatformModel, arch: str, schedule: str, lead: str | int) -> None:
    """The advisor must not answer for another generation of GPU than the one that runs the kernel."""
    asks_advisor = schedule == AUTO or (schedule == INTERLEAVED and lead == AUTO)
    if asks_advisor and model.device.arch != arch:
        raise InvalidInputError(
            f"platform {model.name} is of {model.device.arch} and this GPU of {arch}; give platform=, or set "
            f"{env.PLATFORM} to what `xstage calibrate` wrote"
        )
