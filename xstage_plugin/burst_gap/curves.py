"""Measured tables behind a platform model: exact at the points, linear between them, and a stated rule outside."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xstage_plugin.burst_gap.units import KIB, MIB
from xstage_plugin.checks import positive, positive_int
from xstage_plugin.errors import InvalidInputError
from xstage_plugin.provenance import Origin

Array = NDArray[np.float64]


@dataclass(frozen=True)
class FloorCurve:
    """Backpressure-free issue time over burst size, for one number of producers (T_iss^0 in the paper's Table 1).

    Attributes:
        producers: concurrent producers K.
        burst_kib: bytes per producer and burst B, in KiB, strictly rising.
        floor_us: issue time at those sizes, not falling.
    """

    producers: int
    burst_kib: tuple[float, ...]
    floor_us: tuple[float, ...]

    def __post_init__(self) -> None:
        positive_int("producers of an issue floor", self.producers)
        _check_table(f"issue floor at {self.producers} producers", "burst_kib", self.burst_kib, self.floor_us)

    def at(self, burst_bytes: Array) -> Array:
        """Issue time (us) at ``burst_bytes``. Outside the table the first and last segments are continued as straight
        lines, below it never under the line to the origin; one point alone is a line through the origin."""
        burst = np.asarray(burst_bytes, dtype=float) / KIB
        x, y = np.asarray(self.burst_kib), np.asarray(self.floor_us)
        if len(x) == 1:
            return np.asarray(burst * (y[0] / x[0]))
        first, last = (y[1] - y[0]) / (x[1] - x[0]), (y[-1] - y[-2]) / (x[-1] - x[-2])
        below = np.maximum(y[0] + (burst - x[0]) * first, y[0] * burst / x[0])
        above = y[-1] + (burst - x[-1]) * last
        inside = np.interp(burst, x, y)
        return np.asarray(np.where(burst < x[0], below, np.where(burst > x[-1], above, inside)))


@dataclass(frozen=True)
class IssueFloor:
    """T_iss^0(K, B): one curve over B for each measured K, linear in K between them, the nearest curve outside."""

    curves: tuple[FloorCurve, ...]
    origin: Origin

    def __post_init__(self) -> None:
        if not self.curves:
            raise InvalidInputError("issue floor has no curve; expected at least one")
        _check_rising("producers of the issue floor", [curve.producers for curve in self.curves])

    def at(self, producers: Any, burst_bytes: Any) -> Array:
        """Issue time (us), broadcast over ``producers`` and ``burst_bytes`` (bytes per producer)."""
        k, burst = np.broadcast_arrays(np.asarray(producers, dtype=float), np.asarray(burst_bytes, dtype=float))
        values = np.stack([curve.at(burst) for curve in self.curves])
        knots = np.array([curve.producers for curve in self.curves], dtype=float)
        position = np.interp(k, knots, np.arange(len(knots)))
        low = np.floor(position).astype(int)
        high = np.minimum(low + 1, len(knots) - 1)
        weight = position - low
        at_low = np.take_along_axis(values, low[np.newaxis], axis=0)[0]
        at_high = np.take_along_axis(values, high[np.newaxis], axis=0)[0]
        return np.asarray((1 - weight) * at_low + weight * at_high)

    def outside(self, producers: float, burst_bytes: float) -> tuple[str, ...]:
        """What of (K, B) lies outside the measured points, in words; empty inside."""
        notes = _outside_producers("issue floor", producers, [curve.producers for curve in self.curves])
        nearest = min(self.curves, key=lambda curve: abs(curve.producers - producers))
        low, high = nearest.burst_kib[0], nearest.burst_kib[-1]
        if not low <= burst_bytes / KIB <= high:
            span = f"{low:g}" if low == high else f"{low:g} to {high:g}"
            notes += (f"issue floor at {burst_bytes / KIB:g} KiB is extrapolated from {span} KiB",)
        return notes


@dataclass(frozen=True)
class Capacity:
    """Q(K): bytes that may be outstanding over all producers before issue waits for the drain (section 3.5).

    Between measured K it is linear. Outside it takes the cautious side: below, the first point's share per producer;
    above, the last point's total.
    """

    producers: tuple[int, ...]
    capacity_mib: tuple[float, ...]
    origin: Origin

    def __post_init__(self) -> None:
        for count in self.producers:
            positive_int("producers of the capacity", count)
        _check_table("capacity", "producers", self.producers, self.capacity_mib)

    def at(self, producers: Any) -> Array:
        """Capacity (bytes) for each of ``producers``."""
        k = np.asarray(producers, dtype=float)
        inside = np.interp(k, self.producers, self.capacity_mib)
        return np.asarray(np.where(k < self.producers[0], inside * k / self.producers[0], inside) * MIB)

    def outside(self, producers: float) -> tuple[str, ...]:
        return _outside_producers("capacity", producers, list(self.producers))


@dataclass(frozen=True)
class ServiceShare:
    """How unequally a saturated link serves its producers: period of the median producer over the aggregate period.

    1 means equal service. Below 1 the median producer is served faster than the average, and a few slow ones decide
    when the kernel ends. Nearest value outside the measured K.
    """

    producers: tuple[int, ...]
    median_over_aggregate: tuple[float, ...]
    origin: Origin

    def __post_init__(self) -> None:
        _check_table("service share", "producers", self.producers, self.median_over_aggregate, rising=False)

    def at(self, producers: Any) -> Array:
        return np.asarray(np.interp(np.asarray(producers, dtype=float), self.producers, self.median_over_aggregate))


def _check_table(name: str, x_name: str, x: tuple[float, ...], y: tuple[float, ...], rising: bool = True) -> None:
    if not x or len(x) != len(y):
        raise InvalidInputError(f"{name}: {len(x)} points of {x_name} and {len(y)} values; expected as many, at least 1")
    for value in (*x, *y):
        positive(f"{name}: a point or value", value)
    _check_rising(f"{name}: {x_name}", list(x))
    if rising and any(b < a for a, b in itertools.pairwise(y)):
        raise InvalidInputError(f"{name}: values {list(y)} fall; expected them not to")


def _check_rising(name: str, values: list[int] | list[float]) -> None:
    if any(b <= a for a, b in itertools.pairwise(values)):
        raise InvalidInputError(f"{name} are {values}; expected them strictly rising")


def _outside_producers(name: str, producers: float, measured: list[int]) -> tuple[str, ...]:
    if measured[0] <= producers <= measured[-1]:
        return ()
    span = f"{measured[0]}" if len(measured) == 1 else f"{measured[0]} to {measured[-1]}"
    return (f"{name} at {producers:g} producers is extrapolated from {span}",)
