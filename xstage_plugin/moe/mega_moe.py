"""DeepGEMM's MegaMoE under a schedule of ours. Thin: the order lies in the kernel, the choice in schedule_choice.

The schedule of a symmetric buffer is a word in it that the kernel reads at its start, so that a call can change it without
a compile. All ranks set it together; a call alone never communicates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xstage_plugin import env
from xstage_plugin.burst_gap.catalog import load_platform
from xstage_plugin.errors import InvalidInputError, XStageError
from xstage_plugin.moe.routing import balanced_routing
from xstage_plugin.moe.schedule_choice import ScheduleChoice, choose_schedule
from xstage_plugin.moe.workload import MoeWorkload

if TYPE_CHECKING:
    import torch

    from xstage_plugin.burst_gap.platform_model import PlatformModel

# Upstream's workspace stands at the start of the buffer; it reserves 32 bytes for barriers and uses 28.
SCHEDULE_WORD_BYTES = slice(28, 32)


class ScheduleMismatchError(XStageError):
    """The ranks of a group asked for different schedules, or one of them could not choose; raised on all of them."""


def set_schedule(
    sym_buffer: Any, schedule: str = "auto", lead: str | int = "auto", *, platform: str | None = None
) -> ScheduleChoice:
    """Set the schedule that MegaMoE runs on ``sym_buffer`` from now on. Collective over the buffer's group.

    Args:
        sym_buffer: what ``deep_gemm.get_symm_buffer_for_mega_moe`` returned.
        schedule: ``auto`` (the advisor decides), ``wave`` (the original) or ``interleaved``.
        lead: rows that Linear-1 stays ahead, or ``auto``.
        platform: platform model for the advisor, a bundled name or a file; default $XSTAGE_PLATFORM.

    Returns:
        What was set, with the reason. In stream order: launches before it keep the earlier schedule.

    Raises:
        ScheduleMismatchError: on every rank, if they do not all ask for the same, or one of them asks for nonsense.
        UpstreamError: the overlay is not active in this process; call ``xstage_plugin.register()`` first.
    """
    import torch.distributed as dist

    choice, fault = None, ""
    try:
        _require_overlay()
        model = load_platform(platform or env.default_platform())
        _require_same_arch(model, sym_buffer.buffer.device, schedule, lead)
        choice = choose_schedule(_workload(sym_buffer), schedule, lead, model)
    except XStageError as error:
        fault = str(error)
    mine = (fault, choice.lead_rows if choice else -1)
    answers: list[Any] = [None] * sym_buffer.group.size()
    dist.all_gather_object(answers, mine, group=sym_buffer.group)
    faults = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text]
    if faults:
        raise ScheduleMismatchError(faults[0])
    leads = [rows for _, rows in answers]
    if len(set(leads)) > 1 or choice is None:
        raise ScheduleMismatchError(f"the ranks ask for leads of {leads} rows (0 is the expert wave); expected the same on all")
    _word(sym_buffer).fill_(choice.lead_rows)
    return choice


def current_lead(sym_buffer: Any) -> int:
    """Lead in rows that ``sym_buffer`` is set to, 0 for the expert wave. Waits for the GPU."""
    return int(_word(sym_buffer).item())


def _workload(sym_buffer: Any) -> MoeWorkload:
    """What all ranks know alike: the shape, the most tokens that a rank brings, and no routing but a balanced one."""
    return MoeWorkload(
        hidden=sym_buffer.hidden,
        intermediate=sym_buffer.intermediate_hidden,
        experts=sym_buffer.num_experts,
        topk=sym_buffer.num_topk,
        ranks=sym_buffer.group.size(),
        tokens_per_rank=sym_buffer.num_max_tokens_per_rank,
        routing=balanced_routing(sym_buffer.num_experts),
    )


def _word(sym_buffer: Any) -> torch.Tensor:
    import torch

    buffer = sym_buffer.buffer
    if buffer is None:
        raise InvalidInputError("the symmetric buffer was destroyed; make a new one")
    word: torch.Tensor = buffer[SCHEDULE_WORD_BYTES].view(torch.int32)
    return word


def _require_same_arch(model: PlatformModel, device: torch.device, schedule: str, lead: str | int) -> None:
    """The advisor must not answer for another generation of GPU than the one that runs the kernel."""
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    if "auto" in (schedule, lead) and schedule != "wave" and model.device.arch != f"sm_{major}{minor}":
        raise InvalidInputError(
            f"platform {model.name} is of {model.device.arch} and this GPU of sm_{major}{minor}; give platform=, or set "
            f"{env.PLATFORM} to what `xstage calibrate` wrote"
        )


def _require_overlay() -> None:
    from xstage_plugin.upstream.activate import active
    from xstage_plugin.upstream.errors import NotInEffectError

    if active() is None:
        raise NotInEffectError("the schedules are not active in this process; call xstage_plugin.register() first")
