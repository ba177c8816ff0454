"""Measure a node: run the plan on a bench, judge the run, and give the samples that a platform model is fitted to.

Counting is that of ``probe.cu``. Every remote point stands beside the same kernel storing to local memory; every byte is
checked where it was to arrive.
"""

from __future__ import annotations

import datetime
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from xstage_plugin import __version__
from xstage_plugin.burst_gap.gpu_info import GpuInfo, MachineInfo
from xstage_plugin.burst_gap.measuring_plan import MeasuringPlan, isolated_config, periodic_config, sweep_gaps_us
from xstage_plugin.burst_gap.probe import ProbeResult
from xstage_plugin.burst_gap.probe_bench import Bench
from xstage_plugin.burst_gap.probe_config import NUM_SAMPLES, ProbeConfig
from xstage_plugin.burst_gap.topology import LOCAL, available_topologies
from xstage_plugin.burst_gap.units import BYTES_PER_US_AT_1_GBPS, KIB
from xstage_plugin.errors import XStageError
from xstage_plugin.provenance import package_versions, source_state

# The SM clock may wander by this much over a run; each launch is converted with its own clock, so only a jump matters.
LARGEST_CLOCK_SPREAD = 0.05
# Rounds of one saturated point may differ by this much before something else used the link.
LARGEST_ROUND_SPREAD = 0.10
WARMUP_LAUNCHES = 20

Progress = Callable[[int, int, str], None]


class DisturbedRunError(XStageError):
    """Something else had a part in the measurement; no model may be made of it. ``document`` holds what was measured."""

    def __init__(self, message: str, document: dict[str, Any]) -> None:
        super().__init__(message)
        self.document = document


@dataclass(frozen=True)
class Point:
    """One configuration of the plan with its results, one row a round, and the same of its local control."""

    config: ProbeConfig
    remote: tuple[dict[str, float], ...]
    local: tuple[dict[str, float], ...]


def measure(
    bench: Bench,
    plan: MeasuringPlan,
    *,
    store: str,
    topology: str,
    before: MachineInfo,
    after: Callable[[], MachineInfo],
    command: str,
    ordinals: Sequence[int],
    progress: Progress = lambda done, total, what: None,
) -> dict[str, Any]:
    """The samples document of one calibration: every point of ``plan``, remote and local, and the comparisons.

    Args:
        bench: the GPUs.
        plan: what to measure.
        store: ``st.v4`` or ``bulk``.
        topology: who stores to whom; of the sources of a topology the slowest counts.
        before, after: the machine's state around the run, for the record.
        command: as the user gave it, for the record.
        ordinals: CUDA ordinals of the bench's GPUs.
        progress: called with (launches done, launches planned, what comes next).

    Raises:
        DisturbedRunError: the clock moved, rounds disagree, or data arrived wrong.
        GpuError: the GPUs failed.
    """
    bench.reserve(plan.largest_burst_total_bytes * 4)
    others = [name for name in available_topologies(bench.num_gpus) if name != topology]
    session = _Session(bench, store, topology, plan.num_runs + WARMUP_LAUNCHES + 2 * (1 + len(others)), progress)
    session.warm_up(plan)
    zero = session.rounds(plan, [periodic_config(plan, store, k, kib, 0.0) for k, kib in plan.zero_gap])
    estimate = max(np.median([row["aggregate_gbps"] for row in point.remote]) for point in zero)
    sweep_configs = [
        periodic_config(plan, store, k, kib, gap)
        for k, kib in plan.gap_sweep
        for gap in sweep_gaps_us(plan, k, kib, float(estimate))
    ]
    sweep = session.rounds(plan, sweep_configs)
    isolated = session.rounds(plan, [isolated_config(plan, store, k, kib) for k, kib in plan.isolated])
    saturating = max((point.config for point in zero), key=lambda config: config.burst_total_bytes)
    topologies = [session.topology_row(topology, saturating)] + [session.topology_row(name, saturating) for name in others]
    machine_after = after()
    gpu = next(entry for entry in before.gpus if entry.ordinal == ordinals[0])
    document = {
        "meta": _meta(bench, plan, store, topology, before, machine_after, gpu, command, ordinals, session),
        "zero_gap": [_periodic_row(point) for point in zero],
        "gap_sweep": [_periodic_row(point) for point in sweep],
        "isolated": [_isolated_row(point) for point in isolated],
        "topologies": topologies,
        "copies": {**bench.copy_rates_gbps(), "link_raw_gbps": link_raw_gbps(gpu)},
    }
    _refuse_disturbed(session, zero, document)
    _refuse_company(machine_after, ordinals, bench.processes_per_gpu, document)
    return document


def measure_local_only(bench: Bench, plan: MeasuringPlan, store: str) -> list[dict[str, float]]:
    """The local control alone, for a machine with one GPU: issue time over the burst size, all producers."""
    bench.reserve(plan.largest_burst_total_bytes * 4)
    rows = []
    for count, kib in plan.isolated:
        if count == bench.num_sms:
            row = summarise(bench.run(isolated_config(plan, store, count, kib), LOCAL))
            rows.append({"num_producers": count, "burst_kib": kib, **row})
    return rows


def link_raw_gbps(gpu: GpuInfo) -> float | None:
    """Raw rate of all active NVLinks of a GPU in one direction, GB/s, or None where NVML does not say."""
    if not gpu.nvlink_count or not gpu.nvlink_mbps:
        return None
    return gpu.nvlink_count * gpu.nvlink_mbps / 1e3


def summarise(results: Sequence[ProbeResult]) -> dict[str, float]:
    """One row of numbers for the launches of one moment: over all producers of all sources, rates of the slowest source."""
    issue = np.concatenate([result.issue_us.ravel() for result in results])
    row = {f"issue_us_{name}": float(np.quantile(issue, level)) for name, level in _QUANTILES}
    row["sm_clock_mhz"] = float(np.median([result.sm_clock_mhz for result in results]))
    row["mismatches"] = float(sum(result.mismatches or 0 for result in results))
    if results[0].config.isolated:
        return row
    period = np.concatenate([result.period_us.ravel() for result in results])
    share = np.concatenate([result.rates_gbps / result.rates_gbps.mean() for result in results])
    rate = min(result.aggregate_gbps or 0.0 for result in results)
    total = results[0].config.burst_total_bytes
    # A producer's own period is its bytes over its own rate; the samples of the ring are the window's last ones only.
    own = np.concatenate([result.config.burst_bytes / result.rates_gbps / BYTES_PER_US_AT_1_GBPS for result in results])
    row |= {
        "period_us_median": float(np.median(own)),
        "period_us_p90": float(np.quantile(own, 0.9)),
        "gap_us": float(period.mean() - issue.mean()),
        "aggregate_gbps": rate,
        "aggregate_period_us": total / rate / BYTES_PER_US_AT_1_GBPS,
    }
    row |= {f"share_{name}": float(np.quantile(share, level)) for name, level in (("min", 0.0), *_QUANTILES, ("max", 1.0))}
    return row


_QUANTILES = (("p10", 0.1), ("median", 0.5), ("p90", 0.9))


class _Session:
    """The launches of one calibration: counts them, remembers clocks, and stops at wrong data."""

    def __init__(self, bench: Bench, store: str, topology: str, total: int, progress: Progress) -> None:
        self.bench, self.store, self.topology = bench, store, topology
        self.clocks_mhz: list[float] = []
        self._done, self._total, self._progress = 0, total, progress

    def warm_up(self, plan: MeasuringPlan) -> None:
        """Bring the clocks up and everything lazy into being."""
        count, kib = max(plan.zero_gap)
        for _ in range(WARMUP_LAUNCHES):
            self._run(periodic_config(plan, self.store, count, kib, 0.0), self.topology, "warm-up")
        self.clocks_mhz.clear()

    def rounds(self, plan: MeasuringPlan, configs: Sequence[ProbeConfig]) -> list[Point]:
        """Every configuration, remote then local, ``plan.rounds`` times, forwards and backwards in turn."""
        remote: list[list[dict[str, float]]] = [[] for _ in configs]
        local: list[list[dict[str, float]]] = [[] for _ in configs]
        for number in range(plan.rounds):
            order: Iterable[int] = range(len(configs)) if number % 2 == 0 else reversed(range(len(configs)))
            for index in order:
                remote[index].append(self._run(configs[index], self.topology, str(configs[index])))
                local[index].append(self._run(configs[index], LOCAL, str(configs[index])))
        return [Point(config, tuple(far), tuple(near)) for config, far, near in zip(configs, remote, local, strict=True)]

    def topology_row(self, topology: str, config: ProbeConfig) -> dict[str, Any]:
        """Aggregate rate and fairness of one topology at saturation, the better of two launches."""
        rows = [self._run(config, topology, topology) for _ in range(2)]
        best = max(rows, key=lambda row: row["aggregate_gbps"])
        keys = ("aggregate_gbps", "share_min", "share_p10", "share_median", "share_p90", "share_max")
        return {"topology": topology, "num_producers": config.num_producers, "burst_kib": config.burst_bytes / KIB} | {
            key: best[key] for key in keys
        }

    def _run(self, config: ProbeConfig, topology: str, what: str) -> dict[str, float]:
        self._progress(self._done, self._total, what)
        results = self.bench.run(config, topology)
        self._done += 1
        for result in results:
            if result.mismatches is None or result.mismatches:
                found = "was not checked" if result.mismatches is None else f"{result.mismatches} words are wrong"
                raise DisturbedRunError(f"data at the destination: {config}: {found} ({result.first_mismatch}); no model", {})
        row = summarise(results)
        self.clocks_mhz.append(row["sm_clock_mhz"])
        return row


def _middle(rows: Sequence[dict[str, float]], key: str) -> float:
    return float(np.median([row[key] for row in rows]))


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    """Five digits: a nanosecond in ten milliseconds, and below what any clock here resolves."""
    return {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in row.items()}


_PERIODIC_KEYS = (
    *("issue_us_p10", "issue_us_median", "issue_us_p90", "period_us_median", "period_us_p90", "aggregate_period_us"),
    *("aggregate_gbps", "share_min", "share_p10", "share_median", "share_p90", "share_max", "sm_clock_mhz"),
)


def _periodic_row(point: Point) -> dict[str, Any]:
    return _rounded(
        {
            "num_producers": point.config.num_producers,
            "burst_kib": point.config.burst_bytes / KIB,
            "gap_us": _middle(point.remote, "gap_us"),
            "gap_requested_us": point.config.gap_us,
            **{key: _middle(point.remote, key) for key in _PERIODIC_KEYS},
            "local_issue_us_median": _middle(point.local, "issue_us_median"),
            "local_aggregate_period_us": _middle(point.local, "aggregate_period_us"),
            "round_aggregate_gbps": [float(f"{row['aggregate_gbps']:.5g}") for row in point.remote],
        }
    )


def _isolated_row(point: Point) -> dict[str, Any]:
    return _rounded(
        {
            "num_producers": point.config.num_producers,
            "burst_kib": point.config.burst_bytes / KIB,
            **{key: _middle(point.remote, key) for key in ("issue_us_p10", "issue_us_median", "issue_us_p90", "sm_clock_mhz")},
            "local_issue_us_median": _middle(point.local, "issue_us_median"),
            "round_issue_us_median": [float(f"{row['issue_us_median']:.5g}") for row in point.remote],
        }
    )


def _meta(
    bench: Bench,
    plan: MeasuringPlan,
    store: str,
    topology: str,
    before: MachineInfo,
    after: MachineInfo,
    gpu: GpuInfo,
    command: str,
    ordinals: Sequence[int],
    session: _Session,
) -> dict[str, Any]:
    """Provenance of one run, as design/measurement asks for it."""
    mine = [entry for entry in before.gpus if entry.ordinal in ordinals]
    later = [entry for entry in after.gpus if entry.ordinal in ordinals]
    links = f"{gpu.nvlink_count} NVLinks of {gpu.nvlink_mbps} MB/s" if gpu.nvlink_count and gpu.nvlink_mbps else "not known"
    return {
        "what": f"{bench.num_gpus} x {gpu.name}, {store} stores, {topology}",
        "store": store,
        "topology": topology,
        "method": f"windows of {plan.window_us / 1e3:g} ms, {plan.rounds} rounds, medians over rounds, {bench.how}; every byte "
        f"checked; issue quantiles over the last {NUM_SAMPLES} bursts of each producer",
        "mode": plan.mode,
        "num_threads": plan.num_threads,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "gpu": f"{gpu.name} ({gpu.num_sms} SMs, {gpu.arch}, L2 {gpu.l2_bytes} bytes)",
        "num_gpus": bench.num_gpus,
        "link": links,
        "driver": before.driver_version or "not known",
        "cuda": ".".join(str(part) for part in before.cuda_version or ()),
        "sm_clock_mhz": {
            "min": min(session.clocks_mhz),
            "median": float(np.median(session.clocks_mhz)),
            "max": max(session.clocks_mhz),
        },
        "gpus_before": [_state(entry) for entry in mine],
        "gpus_after": [_state(entry) for entry in later],
        "command": command,
        "versions": {"xstage-plugin": __version__, "python": platform.python_version(), **package_versions()},
        "system": f"{platform.system()} {platform.release()}, {sys.platform}",
        **source_state(),
        "units": "KiB = 1024 B, GB/s = 1e9 B/s, us = microseconds; share: a producer's rate over the mean rate",
    }


def _state(gpu: GpuInfo) -> dict[str, Any]:
    fields = ("ordinal", "sm_clock_mhz", "memory_clock_mhz", "temperature_c", "nvlink_count", "nvlink_mbps", "nvlink_version")
    return {name: asdict(gpu)[name] for name in fields}


def _refuse_company(after: MachineInfo, ordinals: Sequence[int], ours: int, document: dict[str, Any]) -> None:
    """Another process that came to a GPU during the run. Counted, since process numbers differ between namespaces."""
    for gpu in after.gpus:
        if gpu.ordinal in ordinals and gpu.compute_pids is not None and len(gpu.compute_pids) > ours:
            pids = ", ".join(str(pid) for pid in gpu.compute_pids)
            raise DisturbedRunError(
                f"GPU {gpu.ordinal} has {len(gpu.compute_pids)} processes at the end of the run ({pids}), {ours} of them ours; "
                "something else used it: no model",
                document,
            )


def _refuse_disturbed(session: _Session, zero: Sequence[Point], document: dict[str, Any]) -> None:
    clocks = np.array(session.clocks_mhz)
    spread = float((clocks.max() - clocks.min()) / np.median(clocks))
    if spread > LARGEST_CLOCK_SPREAD:
        raise DisturbedRunError(
            f"the SM clock moved by {spread:.0%} during the run ({clocks.min():.0f} to {clocks.max():.0f} MHz); expected at "
            f"most {LARGEST_CLOCK_SPREAD:.0%}: no model; run again when the GPU is cool and alone",
            document,
        )
    most = max(point.config.num_producers for point in zero)
    for point in zero:
        rates = [row["aggregate_gbps"] for row in point.remote]
        spread = (max(rates) - min(rates)) / float(np.median(rates))
        if point.config.num_producers == most and spread > LARGEST_ROUND_SPREAD:
            raise DisturbedRunError(
                f"{point.config}: rounds differ by {spread:.0%} in rate ({min(rates):.0f} to {max(rates):.0f} GB/s); expected "
                f"at most {LARGEST_ROUND_SPREAD:.0%}: something else uses the link; no model",
                document,
            )
