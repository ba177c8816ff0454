"""Samples of the remote-store probe: what a calibration run measured, before any model.

The file is JSON with three lists of rows (``zero_gap``, ``gap_sweep``, ``isolated``) and ``meta``. Counting: a burst is
``burst_kib`` KiB per producer, a period runs from burst start to burst start, issue from the first store to the last one
accepted. ``issue_us_*`` and ``period_us_median`` are of the median producer; ``aggregate_period_us`` is burst bytes of all
producers over their joint rate. A run without that figure gives ``kernel_us_per_burst`` instead: time of the launch over
its bursts, which contains a constant share of launch and tail.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xstage_plugin.burst_gap.units import KIB
from xstage_plugin.checks import shown
from xstage_plugin.errors import InvalidInputError
from xstage_plugin.files import read_json

LISTS = ("zero_gap", "gap_sweep", "isolated")


@dataclass(frozen=True)
class ZeroGapSample:
    """Periodic bursts without a gap: the path is drain-limited."""

    num_producers: int
    burst_kib: float
    issue_us_median: float
    period_us_median: float
    aggregate_period_us: float
    local_issue_us_median: float
    local_aggregate_period_us: float | None = None

    @property
    def burst_total_bytes(self) -> float:
        return self.num_producers * self.burst_kib * KIB

    @property
    def drain_dominated(self) -> bool:
        """Whether the path and not the producers' own loop sets the period: by the local control's period where it was
        measured, otherwise by twice its issue time."""
        if self.local_aggregate_period_us is not None:
            return self.aggregate_period_us >= 1.2 * self.local_aggregate_period_us
        return self.aggregate_period_us >= 2 * self.local_issue_us_median


@dataclass(frozen=True)
class GapSample:
    """Periodic bursts with ``gap_us`` of no stores after each. ``aggregate_period_us`` is None where not measured."""

    num_producers: int
    burst_kib: float
    gap_us: float
    issue_us_median: float
    issue_us_p90: float
    period_us_median: float
    local_issue_us_median: float
    aggregate_period_us: float | None = None


@dataclass(frozen=True)
class IsolatedSample:
    """One burst of all producers at once on an empty path."""

    num_producers: int
    burst_kib: float
    issue_us_median: float
    issue_us_p90: float
    local_issue_us_median: float

    @property
    def burst_total_bytes(self) -> float:
        return self.num_producers * self.burst_kib * KIB


@dataclass(frozen=True)
class BurstGapSamples:
    """Everything one calibration run measured for one kind of store."""

    zero_gap: tuple[ZeroGapSample, ...]
    gap_sweep: tuple[GapSample, ...]
    isolated: tuple[IsolatedSample, ...]
    launch_in_period: bool
    link_raw_gbps: float | None
    meta: dict[str, Any]


def read_samples(path: Path) -> BurstGapSamples:
    """The samples in the file ``path``.

    Raises:
        InvalidInputError: not readable, not JSON, a list or key missing or empty, or a number that is not finite and
            positive; the message names the row.
    """
    document = read_json(path, "a samples file (JSON)")
    samples = parse_samples(document, str(path))
    try:
        json.dumps(document, allow_nan=False)
    except ValueError:
        raise InvalidInputError(f"{path}: holds NaN or infinity; expected finite numbers in every field") from None
    return samples


def parse_samples(document: Any, where: str) -> BurstGapSamples:
    """The samples in a JSON document. Raises InvalidInputError as :func:`read_samples`."""
    if not isinstance(document, dict):
        raise InvalidInputError(f"{where}: not a samples file; expected an object with {', '.join(LISTS)}")
    rows = {name: _rows(document, name, where) for name in LISTS}
    has_aggregate = all("aggregate_period_us" in row.values for row in rows["zero_gap"])
    period_key = "aggregate_period_us" if has_aggregate else "kernel_us_per_burst"
    meta = document.get("meta", {})
    if not isinstance(meta, dict):
        raise InvalidInputError(f"{where}: meta is {type(meta).__name__}; expected an object")
    return BurstGapSamples(
        zero_gap=tuple(
            ZeroGapSample(
                row.count("num_producers"),
                row.number("burst_kib"),
                row.number("issue_us_median"),
                row.number("period_us_median"),
                row.number(period_key),
                row.number("local_issue_us_median"),
                row.number("local_aggregate_period_us") if "local_aggregate_period_us" in row.values else None,
            )
            for row in rows["zero_gap"]
        ),
        gap_sweep=tuple(
            GapSample(
                row.count("num_producers"),
                row.number("burst_kib"),
                row.number("gap_us", zero_allowed=True),
                row.number("issue_us_median"),
                row.number("issue_us_p90"),
                row.number("period_us_median"),
                row.number("local_issue_us_median"),
                row.number("aggregate_period_us") if "aggregate_period_us" in row.values else None,
            )
            for row in rows["gap_sweep"]
        ),
        isolated=tuple(
            IsolatedSample(
                row.count("num_producers"),
                row.number("burst_kib"),
                row.number("issue_us_median"),
                row.number("issue_us_p90"),
                row.number("local_issue_us_median"),
            )
            for row in rows["isolated"]
        ),
        launch_in_period=not has_aggregate,
        link_raw_gbps=_link_raw_gbps(document),
        meta=meta,
    )


def _link_raw_gbps(document: dict[str, Any]) -> float | None:
    """Raw rate of the link, where the run recorded it."""
    copies = document.get("copies")
    value = copies.get("link_raw_gbps") if isinstance(copies, dict) else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e12 else None


@dataclass(frozen=True)
class _Row:
    values: dict[str, Any]
    where: str

    def number(self, key: str, zero_allowed: bool = False) -> float:
        if key not in self.values:
            raise InvalidInputError(f"{self.where}: {key} is missing; expected a number")
        value = self.values[key]
        expected = "a finite number of at least 0" if zero_allowed else "a finite number above 0"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InvalidInputError(f"{self.where}: {key} is {shown(value)}; expected {expected}")
        # The upper bound keeps whole numbers of any length out of float's way.
        if not (abs(value) < 1e12 and math.isfinite(value)) or value < 0 or (value == 0 and not zero_allowed):
            raise InvalidInputError(f"{self.where}: {key} is {shown(value)}; expected {expected}")
        return float(value)

    def count(self, key: str) -> int:
        value = self.number(key)
        if value != int(value):
            raise InvalidInputError(f"{self.where}: {key} is {shown(value)}; expected a whole number")
        return int(value)


def _rows(document: dict[str, Any], name: str, where: str) -> list[_Row]:
    if name not in document:
        raise InvalidInputError(f"{where}: not a samples file: {name} is missing; expected {', '.join(LISTS)}")
    rows = document[name]
    if not isinstance(rows, list) or not rows:
        raise InvalidInputError(f"{where}: {name} holds no samples; expected a list of rows")
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise InvalidInputError(f"{where}: {name}[{index}] is {shown(row)}; expected an object")
    return [_Row(row, f"{where}: {name}[{index}]") for index, row in enumerate(rows)]
