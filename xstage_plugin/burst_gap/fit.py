"""From samples to a platform model: drain rate, issue floor, capacity, in this order (sections 3.3 to 3.5).

The gap sweep takes no part in the fit; only its local control is looked at, and the model is judged by it afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from xstage_plugin.burst_gap.curves import Capacity, FloorCurve, IssueFloor, ServiceShare
from xstage_plugin.burst_gap.device import DeviceSpec
from xstage_plugin.burst_gap.holdout import HoldoutError, holdout_errors
from xstage_plugin.burst_gap.platform_model import PlatformModel
from xstage_plugin.burst_gap.samples import BurstGapSamples, GapSample, IsolatedSample, ZeroGapSample
from xstage_plugin.burst_gap.units import BYTES_PER_US_AT_1_GBPS, MIB
from xstage_plugin.errors import FitRefusedError
from xstage_plugin.provenance import Origin, Source

# A producer count takes part in the drain rate if its own rate comes this close to the best: fewer producers leave the
# link idle while the last of them finish, and would drag the aggregate down.
SATURATING_SHARE = 0.97
# An isolated burst counts as free of backpressure up to this factor over the local control, and as backpressured above
# the second one; between the two it is neither. The factors are relative to the remote-to-local ratio of small bursts.
CLEAN_RATIO, BACKPRESSURED_RATIO = 1.2, 1.5
# The remote issue time must fall by this much over the gap sweep before there is an effect to model, and the local
# control's fall must stay under this share of it.
LEAST_RECOVERY, LARGEST_LOCAL_SHARE = 0.25, 0.5
# Samples of one drain rate may scatter this much around V/R (median); more means that they contradict each other.
LARGEST_SCATTER = 0.15
REPEAT_TOLERANCE = 0.25
# Period over issue plus gap, median of a list.
PERIOD_RATIO = (0.7, 1.4)
LARGEST_HOLDOUT_ERROR, LARGEST_HOLDOUT_P90, LARGEST_FLOOR_ERROR = 0.10, 0.20, 0.35
# No link between GPUs lies outside these rates; a value that does is in other units.
PLAUSIBLE_GBPS = (1.0, 20_000.0)
# Capacities of one producer count that scatter more are worth a word.
WIDE_SPREAD, LARGEST_SPREAD = 0.15, 0.5


@dataclass(frozen=True)
class DrainFit:
    """Equation 1 at zero gap. Rates in GB/s.

    Attributes:
        gbps: R.
        launch_us: constant share of launch and tail in each period, where the run could not separate it.
        rate_by_producers: rate that each producer count reaches alone.
        used_producers: the counts that saturate the path and so define R.
        residual_median, residual_p90: |predicted / measured - 1| over the samples used.
    """

    gbps: float
    launch_us: float
    rate_by_producers: dict[int, float]
    used_producers: tuple[int, ...]
    residual_median: float
    residual_p90: float


@dataclass(frozen=True)
class CapacityFit:
    """Q at one producer count: the median of V - R T over its backpressured isolated bursts, and their spread."""

    num_producers: int
    capacity_bytes: float
    points: int
    spread: float


@dataclass(frozen=True)
class FitReport:
    """A fitted model with everything that says how far to trust it."""

    model: PlatformModel
    drain: DrainFit
    capacity: tuple[CapacityFit, ...]
    holdout: tuple[HoldoutError, ...]
    notes: tuple[str, ...]


def fit_platform(
    samples: BurstGapSamples,
    *,
    name: str,
    description: str,
    store: str,
    device: DeviceSpec,
    num_gpus: int = 2,
    completion_latency_us: float,
    completion_latency_origin: Origin,
    provenance: dict[str, str],
) -> FitReport:
    """The platform model that ``samples`` determine, and how well it predicts their gap sweep.

    Raises:
        FitRefusedError: too few samples, samples that contradict each other, or a local control that depends on the
            gap as the remote stores do; the message says which.
    """
    _refuse_contradictions(samples)
    doubts = _refuse_local_recovery(samples.gap_sweep)
    counts = [s.num_producers for s in samples.zero_gap] + [s.num_producers for s in samples.gap_sweep]
    most = max(counts + [s.num_producers for s in samples.isolated])
    if most > device.num_sms:
        raise FitRefusedError(f"{most} producers on a GPU of {device.num_sms} SMs ({device.name}); a producer needs an SM")
    drain = fit_drain_rate(samples.zero_gap, samples.launch_in_period)
    if samples.link_raw_gbps is not None and drain.gbps > samples.link_raw_gbps:
        raise FitRefusedError(
            f"drain rate: the samples give {drain.gbps:.0f} GB/s, above the raw rate of the link, {samples.link_raw_gbps:.0f} "
            "GB/s: check the units"
        )
    floor = fit_issue_floor(samples.isolated)
    capacity = fit_capacity(samples.isolated, drain.gbps)
    model = PlatformModel(
        name=name,
        description=description,
        store=store,
        drain_rate_gbps=drain.gbps,
        drain_rate_origin=Origin(
            Source.MEASURED, f"zero-gap bursts of {_listed(drain.used_producers)} producers, aggregate over all of them"
        ),
        issue_floor=floor,
        capacity=Capacity(
            tuple(entry.num_producers for entry in capacity),
            _not_falling([entry.capacity_bytes / MIB for entry in capacity]),
            Origin(Source.MEASURED, "isolated bursts past the knee, V - R T"),
        ),
        service_share=_service_share(samples.zero_gap, drain),
        completion_latency_us=completion_latency_us,
        completion_latency_origin=completion_latency_origin,
        device=device,
        num_gpus=num_gpus,
        provenance=provenance,
    )
    holdout = holdout_errors(model, samples.gap_sweep)
    overall = holdout[-1]
    if overall.period_median > LARGEST_HOLDOUT_ERROR or overall.period_p90 > LARGEST_HOLDOUT_P90:
        raise FitRefusedError(
            f"the model misses the periods of its held-out gap sweep by {overall.period_median:.0%} (median) and "
            f"{overall.period_p90:.0%} (p90); expected at most {LARGEST_HOLDOUT_ERROR:.0%} and {LARGEST_HOLDOUT_P90:.0%}: "
            "zero_gap, isolated and gap_sweep contradict each other"
        )
    recovered = overall.recovered_issue_median
    if recovered is not None and recovered > LARGEST_FLOOR_ERROR:
        raise FitRefusedError(
            f"the issue floor from the isolated bursts misses the recovered bursts of the gap sweep by {recovered:.0%} "
            f"(median); expected at most {LARGEST_FLOOR_ERROR:.0%}: isolated and gap_sweep contradict each other"
        )
    notes = (*doubts, *_warnings(samples, device, drain, capacity))
    return FitReport(model, drain, capacity, holdout, notes)


def fit_drain_rate(samples: Sequence[ZeroGapSample], launch_in_period: bool) -> DrainFit:
    """R from zero-gap periods: T = V/R (+ a constant launch share if the periods contain one), robust to outliers.

    Raises:
        FitRefusedError: fewer than three drain-dominated samples, or a scatter above 15% (median).
    """
    dominated = [sample for sample in samples if sample.drain_dominated]
    if len(dominated) < 3:
        raise FitRefusedError(
            f"drain rate: {len(dominated)} of {len(samples)} zero-gap samples are drain-dominated (their period clearly "
            "above the local control's); expected 3 or more: measure more producers or larger bursts"
        )
    launch_us = _robust_line(dominated, True)[1] if launch_in_period else 0.0
    by_producers: dict[int, list[ZeroGapSample]] = {}
    for sample in dominated:
        by_producers.setdefault(sample.num_producers, []).append(sample)
    rates = {count: _largest_burst_rate(group, launch_us) for count, group in sorted(by_producers.items())}
    used = [count for count, rate in rates.items() if rate >= SATURATING_SHARE * max(rates.values())]
    chosen = [sample for sample in dominated if sample.num_producers in used]
    if len(chosen) < 3:
        raise FitRefusedError(
            f"drain rate: only {len(chosen)} samples come from producer counts that saturate the path ({_listed(used)}); "
            "expected 3 or more"
        )
    gbps, launch_us = _robust_line(chosen, launch_in_period)
    if not PLAUSIBLE_GBPS[0] <= gbps <= PLAUSIBLE_GBPS[1]:
        low, high = PLAUSIBLE_GBPS
        raise FitRefusedError(
            f"drain rate: the samples give {gbps:.3g} GB/s; expected {low:g} to {high:g}: check the units, times are "
            "microseconds and bursts KiB per producer"
        )
    predicted = np.array([sample.burst_total_bytes for sample in chosen]) / (gbps * BYTES_PER_US_AT_1_GBPS) + launch_us
    residual = np.abs(predicted / np.array([sample.aggregate_period_us for sample in chosen]) - 1)
    if np.median(residual) > LARGEST_SCATTER:
        raise FitRefusedError(
            f"drain rate: zero-gap periods scatter {np.median(residual):.0%} (median) around one rate; "
            f"expected at most {LARGEST_SCATTER:.0%}: the samples contradict each other"
        )
    return DrainFit(gbps, launch_us, rates, tuple(used), float(np.median(residual)), float(np.quantile(residual, 0.9)))


def fit_issue_floor(samples: Sequence[IsolatedSample]) -> IssueFloor:
    """T_iss^0(K, B) from the isolated bursts that ran as fast as the local control.

    Where a producer count meets its knee, its curve goes on with the points of fewer producers: the floor is what one
    producer's own store loop takes, and the samples show it to depend on K hardly at all.

    Raises:
        FitRefusedError: no producer count has two points free of backpressure.
    """
    base = _base_ratio(samples)
    clean: dict[int, dict[float, float]] = {}
    for sample in samples:
        if _ratio(sample) <= CLEAN_RATIO * base:
            clean.setdefault(sample.num_producers, {})[sample.burst_kib] = sample.issue_us_median
    curves: list[FloorCurve] = []
    fewer: dict[float, float] = {}
    for count in sorted(clean):
        points = dict(clean[count])
        points.update({size: value for size, value in fewer.items() if size > max(points)})
        fewer = points
        sizes = sorted(points)
        if len(sizes) >= 2:
            curves.append(FloorCurve(count, tuple(sizes), _not_falling([points[size] for size in sizes])))
    if not curves:
        raise FitRefusedError(
            "issue floor: no producer count has two isolated bursts without backpressure; expected 2 or more: "
            "measure smaller bursts, or wait longer before each one"
        )
    return IssueFloor(tuple(curves), Origin(Source.MEASURED, "isolated bursts that ran as fast as the local control"))


def fit_capacity(samples: Sequence[IsolatedSample], drain_rate_gbps: float) -> tuple[CapacityFit, ...]:
    """Q(K) = V - R T from isolated bursts past the knee (equation 7), for each K that has at least two of them.

    Raises:
        FitRefusedError: no producer count has two such bursts, or they give a capacity of zero or less.
    """
    base = _base_ratio(samples)
    beyond: dict[int, list[float]] = {}
    for sample in samples:
        if _ratio(sample) > BACKPRESSURED_RATIO * base:
            lead = sample.burst_total_bytes - drain_rate_gbps * BYTES_PER_US_AT_1_GBPS * sample.issue_us_median
            beyond.setdefault(sample.num_producers, []).append(lead)
    fits = []
    for count, leads in sorted(beyond.items()):
        if len(leads) < 2:
            continue
        capacity = float(np.median(leads))
        if capacity <= 0:
            raise FitRefusedError(
                f"capacity: isolated bursts of {count} producers drain slower than {drain_rate_gbps:.0f} GB/s, the rate "
                "of the zero-gap samples; the samples contradict each other"
            )
        spread = float(np.median(np.abs(np.array(leads) / capacity - 1)))
        if spread > LARGEST_SPREAD:
            raise FitRefusedError(
                f"capacity: the isolated bursts of {count} producers scatter by {spread:.0%} around one capacity; expected "
                f"at most {LARGEST_SPREAD:.0%}: they contradict the drain rate of {drain_rate_gbps:.0f} GB/s"
            )
        fits.append(CapacityFit(count, capacity, len(leads), spread))
    if not fits:
        raise FitRefusedError(
            "capacity: no producer count has two isolated bursts past its knee; expected 2 or more: measure larger bursts"
        )
    return tuple(fits)


def _robust_line(samples: Sequence[ZeroGapSample], with_launch: bool) -> tuple[float, float]:
    """(R in GB/s, launch in us) of T = V/R + launch, least absolute relative residuals (smoothed at 1%)."""
    total = np.array([sample.burst_total_bytes for sample in samples])
    period = np.array([sample.aggregate_period_us for sample in samples])
    start_rate = float(np.median(total / period))

    def residual(x: np.ndarray) -> np.ndarray:
        return np.asarray((total / (start_rate * x[0]) + (x[1] if with_launch else 0.0)) / period - 1)

    bounds = ([0.05, 0.0], [20.0, max(float(period.min()), 1e-6)])
    result = least_squares(residual, [1.0, bounds[1][1] / 10], bounds=bounds, loss="soft_l1", f_scale=0.01)
    return float(start_rate * result.x[0] / BYTES_PER_US_AT_1_GBPS), float(result.x[1]) if with_launch else 0.0


def _largest_burst_rate(samples: Sequence[ZeroGapSample], launch_us: float) -> float:
    """Rate (GB/s) over the upper half of one producer count's bursts: the largest converge to one trend."""
    largest = sorted(samples, key=lambda sample: sample.burst_total_bytes)[len(samples) // 2 :]
    rates = [sample.burst_total_bytes / max(sample.aggregate_period_us - launch_us, 1e-9) for sample in largest]
    return float(np.median(rates) / BYTES_PER_US_AT_1_GBPS)


def _service_share(samples: Sequence[ZeroGapSample], drain: DrainFit) -> ServiceShare:
    """Median producer's period over the aggregate period, at zero gap, for each K."""
    by_producers: dict[int, list[float]] = {}
    for sample in samples:
        aggregate = sample.aggregate_period_us - drain.launch_us
        if sample.drain_dominated and aggregate > 0:
            by_producers.setdefault(sample.num_producers, []).append(sample.period_us_median / aggregate)
    counts = sorted(by_producers)
    return ServiceShare(
        tuple(counts),
        tuple(float(np.median(by_producers[count])) for count in counts),
        Origin(Source.MEASURED, "zero-gap bursts, period of the median producer over the aggregate period"),
    )


def _ratio(sample: IsolatedSample) -> float:
    return sample.issue_us_median / sample.local_issue_us_median


def _base_ratio(samples: Sequence[IsolatedSample]) -> float:
    """Remote over local issue time of the smallest bursts, which no capacity can reach; at least 1."""
    sizes = sorted({sample.burst_kib for sample in samples})[:2]
    return max(1.0, float(np.median([_ratio(sample) for sample in samples if sample.burst_kib in sizes])))


def _not_falling(values: Sequence[float]) -> tuple[float, ...]:
    """``values`` with each raised to the largest before it: clock noise must not make a larger burst cheaper."""
    return tuple(float(value) for value in np.maximum.accumulate(np.array(values)))


def _refuse_contradictions(samples: BurstGapSamples) -> None:
    """Samples must agree with themselves: a period is issue plus gap, and the same point measures the same time."""
    zero = [(s.period_us_median, s.issue_us_median) for s in samples.zero_gap]
    shortest = {key: min(group, key=lambda s: s.gap_us) for key, group in _sweeps(samples.gap_sweep).items()}
    sweep = [(s.period_us_median, s.issue_us_median + s.gap_us) for s in shortest.values()]
    for name, pairs in (("zero_gap", zero), ("gap_sweep", sweep)):
        # Medians over producers, each taken on its own, differ row by row; over a whole list they must not.
        ratio = float(np.median([period / least for period, least in pairs]))
        if not PERIOD_RATIO[0] <= ratio <= PERIOD_RATIO[1]:
            raise FitRefusedError(
                f"{name}: periods are {ratio:.2g} times issue plus gap (median); expected {PERIOD_RATIO[0]:g} to "
                f"{PERIOD_RATIO[1]:g}: a period is both together, check the units and columns"
            )
    for index, gap in enumerate(samples.gap_sweep):
        if gap.period_us_median < 0.8 * gap.gap_us:
            raise FitRefusedError(
                f"gap_sweep[{index}]: period {gap.period_us_median:g} us is shorter than its gap, {gap.gap_us:g} us"
            )
    points: list[tuple[str, int, tuple[float, ...], float]] = []
    for i, s in enumerate(samples.zero_gap):
        points.append(("zero_gap", i, (s.num_producers, s.burst_kib), s.aggregate_period_us))
    for i, g in enumerate(samples.gap_sweep):
        points.append(("gap_sweep", i, (g.num_producers, g.burst_kib, g.gap_us), g.period_us_median))
    for i, b in enumerate(samples.isolated):
        points.append(("isolated", i, (b.num_producers, b.burst_kib), b.issue_us_median))
    seen: dict[tuple[object, ...], tuple[str, float]] = {}
    for name, index, key, value in points:
        where, first = seen.setdefault((name, *key), (f"{name}[{index}]", value))
        if abs(value / first - 1) > REPEAT_TOLERANCE:
            raise FitRefusedError(
                f"{where} and {name}[{index}] measure the same point as {first:g} us and {value:g} us; "
                f"expected repeats within {REPEAT_TOLERANCE:.0%}"
            )
    by_point = {(s.num_producers, s.burst_kib): s.period_us_median for s in samples.zero_gap}
    # A shortest gap that is a small part of the period leaves the point drain-limited, as the zero-gap sample is.
    shared = [
        s.period_us_median / by_point[key]
        for key, s in shortest.items()
        if key in by_point and s.gap_us < 0.1 * s.period_us_median
    ]
    if shared and abs(float(np.median(shared)) - 1) > REPEAT_TOLERANCE:
        raise FitRefusedError(
            f"gap_sweep starts at {float(np.median(shared)):.2g} times the period that zero_gap has for the same bursts "
            f"(median); expected the same within {REPEAT_TOLERANCE:.0%}: the two lists contradict each other"
        )


def _refuse_local_recovery(gap_sweep: Sequence[GapSample]) -> list[str]:
    """The effect must be the remote path's: issue time falls over the gap there, and not in local memory.

    Returns a note for each single sweep whose local control falls too; most of them doing so refuses the samples.
    """
    sweeps = [sorted(group, key=lambda sample: sample.gap_us) for group in _sweeps(gap_sweep).values() if len(group) >= 3]
    if not sweeps:
        raise FitRefusedError("gap sweep: no (producers, burst) has three gaps; expected 3 or more to hold the fit against")
    remote = [_fall([sample.issue_us_median for sample in sweep]) for sweep in sweeps]
    if max(remote) < LEAST_RECOVERY:
        raise FitRefusedError(
            f"gap sweep: remote issue time falls by {max(remote):.0%} at most as the gap grows; expected at least "
            f"{LEAST_RECOVERY:.0%}: the path was never saturated, measure more producers or larger bursts"
        )
    recovering = [(sweep, fall) for sweep, fall in zip(sweeps, remote, strict=True) if fall >= LEAST_RECOVERY]
    suspect = [
        (sweep[0], local, fall)
        for sweep, fall in recovering
        if (local := _fall([sample.local_issue_us_median for sample in sweep])) > LARGEST_LOCAL_SHARE * fall
    ]
    if 2 * len(suspect) >= len(recovering):
        raise FitRefusedError(
            f"gap sweep: in {len(suspect)} of {len(recovering)} sweeps the local control recovers with the gap as the remote "
            f"stores do ({suspect[0][1]:.0%} against {suspect[0][2]:.0%}); what was measured is not the remote path"
        )
    return [
        f"the local control of the {first.num_producers} x {first.burst_kib:g} KiB sweep falls by {local:.0%} with the gap"
        for first, local, _ in suspect
    ]


def _sweeps(gap_sweep: Sequence[GapSample]) -> dict[tuple[int, float], list[GapSample]]:
    groups: dict[tuple[int, float], list[GapSample]] = {}
    for sample in gap_sweep:
        groups.setdefault((sample.num_producers, sample.burst_kib), []).append(sample)
    return groups


def _fall(values: Sequence[float]) -> float:
    """Relative fall from the first third of the gaps to the last (medians)."""
    third = max(1, len(values) // 3)
    return max(0.0, 1 - float(np.median(values[-third:]) / np.median(values[:third])))


def _warnings(samples: BurstGapSamples, device: DeviceSpec, drain: DrainFit, capacity: Sequence[CapacityFit]) -> list[str]:
    slow = [count for count in drain.rate_by_producers if count not in drain.used_producers]
    notes = [
        f"{count} producers reach {drain.rate_by_producers[count]:.0f} GB/s and take no part in the drain rate"
        for count in slow
    ]
    most = max(sample.num_producers for sample in samples.zero_gap)
    if most < device.num_sms:
        notes.append(f"at most {most} producers were measured; the GPU has {device.num_sms} SMs")
    notes += [
        f"capacity at {entry.num_producers} producers scatters by {entry.spread:.0%} over its bursts"
        for entry in capacity
        if entry.spread > WIDE_SPREAD
    ]
    return notes


def _listed(counts: Sequence[int]) -> str:
    return ", ".join(str(count) for count in counts)
