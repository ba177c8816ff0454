"""How well a fitted model predicts the gap sweep, which the fit never saw (section 3.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xstage_plugin.burst_gap.platform_model import PlatformModel
from xstage_plugin.burst_gap.samples import GapSample
from xstage_plugin.burst_gap.units import KIB


@dataclass(frozen=True)
class HoldoutError:
    """Relative errors |predicted / measured - 1| over the gaps of one (K, B), or over all of them (both None).

    ``period_law`` names what is predicted: ``aggregate`` (equation 1) where the run measured it, otherwise
    ``median producer`` (equation 1 with the service share). ``recovered_*`` counts only gaps of at least G*, where no
    producer is starved. Issue times compare the mean burst (period less gap, equation 3) under ``aggregate``, otherwise the
    median burst's; ``own_issue_median`` is always of the median burst.
    """

    num_producers: int | None
    burst_kib: float | None
    points: int
    period_law: str
    period_median: float
    period_p90: float
    recovered_period_median: float | None
    recovered_period_p90: float | None
    issue_median: float
    issue_p90: float
    recovered_issue_median: float | None
    own_issue_median: float
    worst_gap_us: float


def holdout_errors(model: PlatformModel, gap_sweep: Sequence[GapSample]) -> tuple[HoldoutError, ...]:
    """One row for each (K, B) of the sweep, in order, and a last one over all points."""
    groups: dict[tuple[int, float], list[GapSample]] = {}
    for sample in gap_sweep:
        groups.setdefault((sample.num_producers, sample.burst_kib), []).append(sample)
    rows = [_errors(model, group, *key) for key, group in sorted(groups.items())]
    return (*rows, _errors(model, list(gap_sweep), None, None))


def _errors(
    model: PlatformModel, samples: Sequence[GapSample], num_producers: int | None, burst_kib: float | None
) -> HoldoutError:
    producers = np.array([sample.num_producers for sample in samples], dtype=float)
    burst = np.array([sample.burst_kib * KIB for sample in samples])
    gap = np.array([sample.gap_us for sample in samples])
    aggregate = [sample.aggregate_period_us for sample in samples]
    by_aggregate = all(value is not None for value in aggregate)
    if by_aggregate:
        measured, predicted = np.array(aggregate, dtype=float), model.period_us(producers, burst, gap)
    else:
        measured = np.array([sample.period_us_median for sample in samples])
        predicted = model.median_producer_period_us(producers, burst, gap)
    floor = model.issue_floor_us(producers, burst)
    # Where the run measured the aggregate, a median burst waits as equation 3 has it, equal service or not.
    median_law = model.period_us if by_aggregate else model.median_producer_period_us
    own = np.maximum(median_law(producers, burst, gap) - gap, floor)
    own_error = _relative(own, np.array([sample.issue_us_median for sample in samples]))
    # A mean burst's issue is its period less the gap; it cannot be shorter than the fastest issue, clock noise aside.
    issue_error = _relative(predicted - gap, np.maximum(measured - gap, 1e-9)) if by_aggregate else own_error
    period_error = _relative(predicted, measured)
    recovered = gap >= model.recovery_gap_us(producers, burst)
    return HoldoutError(
        num_producers=num_producers,
        burst_kib=burst_kib,
        points=len(samples),
        period_law="aggregate" if by_aggregate else "median producer",
        period_median=float(np.median(period_error)),
        period_p90=float(np.quantile(period_error, 0.9)),
        recovered_period_median=_quantile(period_error[recovered], 0.5),
        recovered_period_p90=_quantile(period_error[recovered], 0.9),
        issue_median=float(np.median(issue_error)),
        issue_p90=float(np.quantile(issue_error, 0.9)),
        recovered_issue_median=_quantile(issue_error[recovered], 0.5),
        own_issue_median=float(np.median(own_error)),
        worst_gap_us=float(gap[int(np.argmax(period_error))]),
    )


def _relative(predicted: np.ndarray, measured: np.ndarray) -> np.ndarray:
    return np.asarray(np.abs(predicted / measured - 1))


def _quantile(values: np.ndarray, level: float) -> float | None:
    return float(np.quantile(values, level)) if len(values) else None
