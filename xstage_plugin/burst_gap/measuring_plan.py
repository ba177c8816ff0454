"""What a calibration measures, in which order. Pure: sizes, producer counts and gaps for a GPU, no GPU needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from xstage_plugin.burst_gap.probe_config import ProbeConfig
from xstage_plugin.burst_gap.units import BYTES_PER_US_AT_1_GBPS, KIB
from xstage_plugin.checks import positive, positive_int
from xstage_plugin.errors import InvalidInputError

MODES = ("quick", "full")
# An isolated burst must find the path empty: this long without stores drains any capacity seen so far ten times over.
ISOLATED_GAP_US = 60.0
# Gaps of a sweep as shares of V/R: dense around recovery, where the law bends.
FULL_GAPS = (0.0, 0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0)
QUICK_GAPS = (0.0, 0.5, 0.8, 1.0, 1.2, 2.0)


@dataclass(frozen=True)
class MeasuringPlan:
    """The points of one calibration.

    Attributes:
        mode: ``quick`` or ``full``.
        rounds: times that every point is measured; the rounds run forwards and backwards in turn.
        window_us: length of a periodic measurement.
        zero_gap: (producers, KiB per producer) without a gap.
        gap_sweep: (producers, KiB) swept over ``gap_shares`` of their V/R.
        isolated: (producers, KiB) one burst at a time.
        num_threads: threads of a producer.
    """

    mode: str
    rounds: int
    window_us: float
    zero_gap: tuple[tuple[int, float], ...]
    gap_sweep: tuple[tuple[int, float], ...]
    gap_shares: tuple[float, ...]
    isolated: tuple[tuple[int, float], ...]
    num_threads: int = 256

    @property
    def largest_burst_total_bytes(self) -> int:
        """Bytes of the largest burst over all producers: what a destination must hold, per slot."""
        return max(int(count * size * KIB) for count, size in (*self.zero_gap, *self.gap_sweep, *self.isolated))

    @property
    def num_runs(self) -> int:
        """Launches of remote stores and of their local controls."""
        points = len(self.zero_gap) + len(self.gap_sweep) * len(self.gap_shares) + len(self.isolated)
        return 2 * self.rounds * points


def make_plan(mode: str, num_sms: int, largest_burst_kib: float) -> MeasuringPlan:
    """The plan for a GPU.

    Args:
        mode: ``quick`` or ``full``.
        num_sms: the most producers; the counts measured are shares of it.
        largest_burst_kib: the largest burst that one producer can stage (shared memory, for bulk stores).

    Raises:
        InvalidInputError: an unknown mode, or fewer than 8 SMs.
    """
    if mode not in MODES:
        raise InvalidInputError(f"mode is {mode!r}; expected one of {', '.join(MODES)}")
    positive("largest burst in KiB", largest_burst_kib)
    if positive_int("num_sms", num_sms) < 8:
        raise InvalidInputError(f"num_sms is {num_sms}; expected at least 8 to vary the producers")
    half, quarter, eighth = num_sms // 2, num_sms // 4, num_sms // 8

    def grid(counts: Sequence[int], sizes: Sequence[float]) -> tuple[tuple[int, float], ...]:
        return tuple((count, size) for count in counts for size in sizes if size <= largest_burst_kib)

    if mode == "quick":
        return MeasuringPlan(
            mode,
            rounds=1,
            window_us=2000.0,
            zero_gap=grid((quarter, half, num_sms), (8, 16, 32, 64)),
            gap_sweep=grid((quarter, half, num_sms), (8, 16, 32, 64)),
            gap_shares=QUICK_GAPS,
            isolated=grid((quarter, half, num_sms), (2, 4, 8, 12, 16, 20, 24, 32, 48, 64, 96)),
        )
    return MeasuringPlan(
        mode,
        rounds=4,
        window_us=4000.0,
        zero_gap=grid((eighth, quarter, half, num_sms * 3 // 4, num_sms), (4, 8, 16, 32, 64, 128)),
        gap_sweep=grid((quarter, half, num_sms), (8, 16, 32, 64)),
        gap_shares=FULL_GAPS,
        isolated=grid((quarter, half, num_sms * 3 // 4, num_sms), (2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128)),
    )


def periodic_config(plan: MeasuringPlan, store: str, producers: int, burst_kib: float, gap_us: float) -> ProbeConfig:
    """Periodic bursts at one point; the window grows until a slow producer still fits a dozen periods into it."""
    base = ProbeConfig(
        producers, int(burst_kib * KIB), gap_us, store=store, window_us=plan.window_us, num_threads=plan.num_threads
    )
    # 100 GB/s and a share of a third: slower than any link this is meant for.
    slowest_period_us = 3 * base.burst_total_bytes / (100 * BYTES_PER_US_AT_1_GBPS) + gap_us
    return replace(base, window_us=max(plan.window_us, 12 * slowest_period_us))


def isolated_config(plan: MeasuringPlan, store: str, producers: int, burst_kib: float) -> ProbeConfig:
    """Isolated bursts at one point."""
    return ProbeConfig(
        producers,
        int(burst_kib * KIB),
        ISOLATED_GAP_US,
        isolated=True,
        store=store,
        num_bursts=40,
        num_threads=plan.num_threads,
    )


def sweep_gaps_us(plan: MeasuringPlan, producers: int, burst_kib: float, drain_rate_gbps: float) -> tuple[float, ...]:
    """The gaps of one sweep, microseconds, from a first estimate of R."""
    drain_us = producers * burst_kib * KIB / (positive("drain rate", drain_rate_gbps) * BYTES_PER_US_AT_1_GBPS)
    return tuple(round(share * drain_us, 3) for share in plan.gap_shares)
