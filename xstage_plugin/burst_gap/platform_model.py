"""The Burst–Gap model of one platform: equations 1 to 7 of the paper and its design test (10)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xstage_plugin.burst_gap.curves import Array, Capacity, IssueFloor, ServiceShare
from xstage_plugin.burst_gap.device import DeviceSpec
from xstage_plugin.burst_gap.units import BYTES_PER_US_AT_1_GBPS, MIB
from xstage_plugin.checks import positive, positive_int, shown
from xstage_plugin.errors import InvalidInputError
from xstage_plugin.provenance import Origin

STORES = ("st.v4", "bulk")
MOE_TABLES = ("paper_table2",)


@dataclass(frozen=True)
class DesignTest:
    """Equation 10, element by element: does a recurring burst run without backpressure?

    Attributes:
        rate_bound_holds: the gap drains the burst before the next one (no accumulation across periods).
        capacity_bound_holds: one burst alone fits the outstanding capacity.
    """

    rate_bound_holds: NDArray[np.bool_]
    capacity_bound_holds: NDArray[np.bool_]

    @property
    def holds(self) -> NDArray[np.bool_]:
        return self.rate_bound_holds & self.capacity_bound_holds


@dataclass(frozen=True)
class PublishedTimes:
    """Compute times published for a platform, in place of estimates.

    Attributes:
        moe_table: bundled table of MegaMoE tile times, keyed by bundled expert shape.
        qloop_us_per_kv_tile: sigma of equation 20, for 128 x 128 tiles of ``qloop_head_dim``.
        origin: where they were published.
    """

    moe_table: str
    qloop_us_per_kv_tile: float
    qloop_head_dim: int
    origin: Origin

    def __post_init__(self) -> None:
        if self.moe_table not in MOE_TABLES:
            raise InvalidInputError(f"moe_table is {shown(self.moe_table)}; expected one of {', '.join(MOE_TABLES)}")
        positive("qloop_us_per_kv_tile", self.qloop_us_per_kv_tile)
        positive_int("qloop_head_dim", self.qloop_head_dim)


@dataclass(frozen=True)
class PlatformModel:
    """M_X = (T_iss^0, R, Q) of section 3.6, with the source of each number.

    Every method takes ``producers`` (K), ``burst_bytes`` (B, bytes per producer and burst) and ``gap_us`` (G) as numbers
    or arrays, broadcasts them, and returns an array of float64 (0-d for plain numbers). The period and issue time are
    those of the aggregate: bytes of all producers over the time of all producers. Under saturation the median producer
    may be faster; see :meth:`median_producer_period_us`.

    Attributes:
        name: bundled name or file stem.
        description: one line.
        store: how the stores are issued, ``st.v4`` (16-byte stores of registers) or ``bulk`` (bulk copy out of shared memory).
        drain_rate_gbps: R, aggregate, GB/s (1e9 bytes a second).
        drain_rate_origin: where R comes from.
        issue_floor: T_iss^0(K, B).
        capacity: Q(K).
        num_gpus: GPUs that took part in the measurement.
        published: compute times published for this platform, if any.
        service_share: unequal service under saturation, where it was measured.
        completion_latency_us: T_lat of equation 17, from the last store's issue to its visibility at the peer.
        completion_latency_origin: where T_lat comes from.
        device: the GPU.
        provenance: date, driver, link, method: whatever the measuring run recorded.
    """

    name: str
    description: str
    store: str
    drain_rate_gbps: float
    drain_rate_origin: Origin
    issue_floor: IssueFloor
    capacity: Capacity
    completion_latency_us: float
    completion_latency_origin: Origin
    device: DeviceSpec
    num_gpus: int = 2
    published: PublishedTimes | None = None
    service_share: ServiceShare | None = None
    provenance: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        positive("drain rate in GB/s", self.drain_rate_gbps)
        positive("completion latency in us", self.completion_latency_us)
        positive_int("num_gpus", self.num_gpus)
        if self.store not in STORES:
            raise InvalidInputError(f"store is {shown(self.store)}; expected one of {', '.join(STORES)}")

    def burst_total_bytes(self, producers: Any, burst_bytes: Any) -> Array:
        """V = K * B, bytes."""
        return np.asarray(np.multiply(producers, burst_bytes, dtype=float))

    def drain_us(self, total_bytes: Any) -> Array:
        """V / R: microseconds the path needs for ``total_bytes``."""
        return np.asarray(np.divide(total_bytes, self.drain_rate_gbps * BYTES_PER_US_AT_1_GBPS), dtype=float)

    def issue_floor_us(self, producers: Any, burst_bytes: Any) -> Array:
        """T_iss^0(K, B): issue time without backpressure."""
        return self.issue_floor.at(producers, burst_bytes)

    def issue_us(self, producers: Any, burst_bytes: Any, gap_us: Any) -> Array:
        """T_iss(G; K, V) = max(T_iss^0, V/R - G). Equation 3."""
        return self.issue_floor_us(producers, burst_bytes) + self.overhead_us(producers, burst_bytes, gap_us)

    def period_us(self, producers: Any, burst_bytes: Any, gap_us: Any) -> Array:
        """T_period = max(T_iss^0 + G, V/R). Equations 1 and 2."""
        floor = self.issue_floor_us(producers, burst_bytes)
        return np.asarray(np.maximum(floor + gap_us, self.drain_us(self.burst_total_bytes(producers, burst_bytes))))

    def overhead_us(self, producers: Any, burst_bytes: Any, gap_us: Any) -> Array:
        """Backpressure [V/R - G - T_iss^0]+. Equation 4."""
        return np.asarray(np.maximum(self._rate_slack(producers, burst_bytes, gap_us), 0.0))

    def recovery_gap_us(self, producers: Any, burst_bytes: Any) -> Array:
        """G* = [V/R - T_iss^0]+: the least gap without backpressure. Equation 5."""
        return self.overhead_us(producers, burst_bytes, 0.0)

    def peak_outstanding_bytes(self, producers: Any, burst_bytes: Any) -> Array:
        """q_peak^0 = [V - R T_iss^0]+: outstanding at the end of an isolated burst, if nothing bounds it. Equation 6."""
        drained = self.issue_floor_us(producers, burst_bytes) * self.drain_rate_gbps * BYTES_PER_US_AT_1_GBPS
        return np.asarray(np.maximum(self.burst_total_bytes(producers, burst_bytes) - drained, 0.0))

    def capacity_bytes(self, producers: Any) -> Array:
        """Q(K), bytes."""
        return self.capacity.at(producers)

    def isolated_issue_us(self, producers: Any, burst_bytes: Any) -> Array:
        """T_iss of a burst that starts on an empty path: max(T_iss^0, (V - Q)/R). Equation 7."""
        return self.issue_floor_us(producers, burst_bytes) + self.isolated_overhead_us(producers, burst_bytes)

    def isolated_overhead_us(self, producers: Any, burst_bytes: Any) -> Array:
        """What an isolated burst waits for its own drain: [(V - Q)/R - T_iss^0]+ (equation 7 less the floor)."""
        return np.asarray(np.maximum(self._capacity_slack(producers, burst_bytes), 0.0))

    def design_test(self, producers: Any, burst_bytes: Any, gap_us: Any) -> DesignTest:
        """Both bounds of equation 10."""
        rate, capacity = np.broadcast_arrays(
            self._rate_slack(producers, burst_bytes, gap_us) <= 0, self._capacity_slack(producers, burst_bytes) <= 0
        )
        return DesignTest(rate, capacity)

    def median_producer_period_us(self, producers: Any, burst_bytes: Any, gap_us: Any) -> Array:
        """Period of the median producer: max(T_iss^0 + G, s V/R), with s the measured service share (1 if unknown).

        An extension of equation 1: a saturated fabric need not serve its producers equally.
        """
        share = 1.0 if self.service_share is None else self.service_share.at(producers)
        floor = self.issue_floor_us(producers, burst_bytes)
        return np.asarray(np.maximum(floor + gap_us, share * self.drain_us(self.burst_total_bytes(producers, burst_bytes))))

    def knee_burst_bytes(self, producers: int) -> float:
        """B at which an isolated burst of K producers reaches the capacity: V - R T_iss^0(K, B) = Q (section 3.5).

        Infinite where the producers' own floor keeps them below the drain rate at every size up to 1 GiB.
        """
        low, high = 1.0, 1024.0 * MIB
        if self._capacity_slack(producers, high) <= 0:
            return float("inf")
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (low, middle) if self._capacity_slack(producers, middle) > 0 else (middle, high)
        return low

    def outside(self, producers: float, burst_bytes: float) -> tuple[str, ...]:
        """What of (K, B) lies outside the measured points, in words; empty inside."""
        return self.issue_floor.outside(producers, burst_bytes) + self.capacity.outside(producers)

    def _rate_slack(self, producers: Any, burst_bytes: Any, gap_us: Any) -> Array:
        drain = self.drain_us(self.burst_total_bytes(producers, burst_bytes))
        return np.asarray(drain - gap_us - self.issue_floor_us(producers, burst_bytes))

    def _capacity_slack(self, producers: Any, burst_bytes: Any) -> Array:
        excess = self.burst_total_bytes(producers, burst_bytes) - self.capacity_bytes(producers)
        return np.asarray(self.drain_us(excess) - self.issue_floor_us(producers, burst_bytes))
