"""Times at one clock: under a power limit the SM clock moves more from sample to sample than the arms differ. Pure, no GPU.

A sample is one reading a rank: event time, and the rate at which the rank's SMs ran meanwhile. Their product is what the
arm cost in SM cycles. Ranks that wait for each other end together, so the one at the slower clock waited least: the least
cycles over the ranks are those of the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Reading:
    """One sample on one rank: microseconds a call, and the mean SM clock in MHz."""

    us: float
    mhz: float


Sample = Sequence[Reading]


def timed_us(sample: Sample) -> float:
    """What the sample took: the maximum over ranks, microseconds."""
    return max(reading.us for reading in sample)


def median_mhz(samples: Sequence[Sample]) -> float:
    """Median SM clock over samples and ranks."""
    return float(np.median([reading.mhz for sample in samples for reading in sample]))


def at_clock_us(samples: Sequence[Sample], mhz: float) -> list[float]:
    """What each sample would have taken with all SMs at ``mhz``, microseconds; parts that the link bounds count as SM time."""
    return [min(reading.us * reading.mhz for reading in sample) / mhz for sample in samples]
