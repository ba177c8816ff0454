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
STOCK_PULLS, SHARED_PULLS = "stock", "shared"
PULLS = (AUTO, STOCK_PULLS, SHARED_PULLS)
# The word that the kernel reads holds the lead in its lower 16 bits (0 there is the expert wave), and above it the pulls.
LARGEST_LEAD = 2**16 - 1
SHARED_PULLS_BIT = 1 << 16


@dataclass(frozen=True)
class ScheduleChoice:
    """A schedule to run.

    Attributes:
        lead_rows: rows that Linear-1 stays ahead, 0 for the expert wave.
        reason: the advisor's, or that it was asked for.
        pulls: ``stock``, or ``shared``: Dispatch brings a token over the link once for all experts of a rank.
    """

    lead_rows: int
    reason: str
    pulls: str = STOCK_PULLS

    @classmethod
    def of_word(cls, word: int, reason: str) -> ScheduleChoice:
        """What a kernel that reads ``word`` runs."""
        return cls(word & LARGEST_LEAD, reason, SHARED_PULLS if word & SHARED_PULLS_BIT else STOCK_PULLS)

    @property
    def schedule(self) -> str:
        return INTERLEAVED if self.lead_rows else WAVE

    @property
    def word(self) -> int:
        """What the kernel reads."""
        return self.lead_rows | (SHARED_PULLS_BIT if self.pulls == SHARED_PULLS else 0)


def choose_schedule(
    workload: MoeWorkload,
    schedule: str,
    lead: str | int,
    platform: PlatformModel,
    pulls: str = AUTO,
    can_share: bool = True,
) -> ScheduleChoice:
    """The choice that ``schedule``, ``lead`` and ``pulls`` ask for; ``auto`` asks the advisor.

    Args:
        workload: the same on all ranks, so that they decide alike.
        schedule: the order of tiles: ``auto``, ``wave`` or ``interleaved``.
        lead: rows that Linear-1 stays ahead under ``interleaved``, or ``auto`` for the advisor's.
        platform: what the advisor decides by.
        pulls: ``stock``, ``shared``, or ``auto``: shared where the order is interleaved, there are ranks to pull from and the
            kernel can. Where the advisor stays with the wave, Dispatch is not what holds the tiles up, and copies cost.
        can_share: the kernel has shared pulls.

    Raises:
        InvalidInputError: a name that is none of these, a lead that is no number from 1 to 65535, a lead under ``wave``, or
            shared pulls of a kernel that has none.
    """
    if schedule not in SCHEDULES:
        raise InvalidInputError(f"schedule is {shown(schedule)}; expected one of {', '.join(SCHEDULES)}")
    if pulls not in PULLS:
        raise InvalidInputError(f"pulls is {shown(pulls)}; expected one of {', '.join(PULLS)}")
    if pulls == SHARED_PULLS and not can_share:
        raise InvalidInputError("pulls is 'shared', which the kernel of this GPU has not; expected 'auto' or 'stock'")
    rows, reason = _order(workload, schedule, _lead(lead), platform)
    if pulls == AUTO:
        pulls = SHARED_PULLS if rows and can_share and workload.ranks > 1 else STOCK_PULLS
    return ScheduleChoice(rows, reason, pulls)


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


def _order(workload: MoeWorkload, schedule: str, rows: int | None, platform: PlatformModel) -> tuple[int, str]:
    """Lead in rows, 0 for the wave, and the reason."""
    if schedule == WAVE:
        if rows is not None:
            raise InvalidInputError(f"lead is {rows} under schedule 'wave'; a lead goes with 'interleaved' or 'auto'")
        return 0, "asked for"
    if schedule == INTERLEAVED and rows is not None:
        return rows, "asked for"
    decision = advise_moe(platform, workload)
    if schedule == AUTO and decision.schedule == WAVE:
        return 0, decision.reason
    asked = "the order was asked for; the lead is the least that does not starve Linear-2"
    return rows or min(decision.lead_knee_rows, LARGEST_LEAD), decision.reason if schedule == AUTO else asked


def _lead(lead: str | int) -> int | None:
    if lead == AUTO:
        return None
    if not isinstance(lead, int) or isinstance(lead, bool) or not 1 <= lead <= LARGEST_LEAD:
        raise InvalidInputError(f"lead is {shown(lead)}; expected 'auto' or a whole number of rows from 1 to {LARGEST_LEAD}")
    return lead
