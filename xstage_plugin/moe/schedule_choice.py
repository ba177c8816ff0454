"""Which schedule a MegaMoE call is to run: names and leads from the caller, checked, or from the advisor. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from xstage_plugin.burst_gap.platform_model import PlatformModel
from xstage_plugin.checks import shown
from xstage_plugin.errors import InvalidInputError
from xstage_plugin.moe.advisor import INTERLEAVED, WAVE, advise_moe
from xstage_plugin.moe.workload import MoeWorkload

AUTO = "auto"
SCHEDULES = (AUTO, WAVE, INTERLEAVED)
# The word that the kernel reads holds the lead in its lower 16 bits; 0 there is the expert wave.
LARGEST_LEAD = 2**16 - 1


@dataclass(frozen=True)
class ScheduleChoice:
    """A schedule to run: ``lead_rows`` is 0 for the expert wave. ``reason`` is the advisor's, or that it was asked for."""

    lead_rows: int
    reason: str

    @property
    def schedule(self) -> str:
        return INTERLEAVED if self.lead_rows else WAVE


def choose_schedule(workload: MoeWorkload, schedule: str, lead: str | int, platform: PlatformModel) -> ScheduleChoice:
    """The choice that ``schedule`` and ``lead`` ask for; ``auto`` asks the advisor.

    Args:
        workload: the same on all ranks, so that they decide alike.
        schedule: ``auto``, ``wave`` or ``interleaved``.
        lead: rows that Linear-1 stays ahead under ``interleaved``, or ``auto`` for the advisor's.
        platform: what the advisor decides by.

    Raises:
        InvalidInputError: another schedule, a lead that is no number from 1 to 65535, or a lead under ``wave``.
    """
    if schedule not in SCHEDULES:
        raise InvalidInputError(f"schedule is {shown(schedule)}; expected one of {', '.join(SCHEDULES)}")
    rows = _lead(lead)
    if schedule == WAVE:
        if rows is not None:
            raise InvalidInputError(f"lead is {rows} under schedule 'wave'; a lead goes with 'interleaved' or 'auto'")
        return ScheduleChoice(0, "asked for")
    if schedule == INTERLEAVED and rows is not None:
        return ScheduleChoice(rows, "asked for")
    decision = advise_moe(platform, workload)
    if schedule == AUTO and decision.schedule == WAVE:
        return ScheduleChoice(0, decision.reason)
    return ScheduleChoice(rows or min(decision.lead_knee_rows, LARGEST_LEAD), decision.reason)


def parse_lead(text: str) -> str | int:
    """A lead given as text (an environment variable): ``auto`` or a whole number.

    Raises:
        InvalidInputError: neither.
    """
    if text == AUTO:
        return AUTO
    try:
        return int(text)
    except ValueError:
        raise InvalidInputError(f"lead is {shown(text)}; expected 'auto' or a whole number of rows") from None


def _lead(lead: str | int) -> int | None:
    if lead == AUTO:
        return None
    if not isinstance(lead, int) or isinstance(lead, bool) or not 1 <= lead <= LARGEST_LEAD:
        raise InvalidInputError(f"lead is {shown(lead)}; expected 'auto' or a whole number of rows from 1 to {LARGEST_LEAD}")
    return lead
